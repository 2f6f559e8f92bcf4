"""Muon against a singular value decomposition and plain SGD."""

import pytest
import torch
from torch import Tensor, nn

from deepbregman.config import OptimiserSettings, load_recipe, override
from deepbregman.objectives import Group
from deepbregman.training.optimisers import Muon, build_optimiser, orthogonalise, set_learning_rates

from ..conftest import normal

CPU = torch.device("cpu")
QUINTIC = (3.4445, -4.7750, 2.0315)  # of Jordan et al.


def test_singular_values_come_near_one_and_vectors_stay():
    for shape in ((2, 6, 10), (2, 10, 6)):
        matrices = normal(*shape)
        found = orthogonalise(matrices, 8, Muon.COEFFICIENTS)
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.6
        assert values.max() < 1.3
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        between = left.mT @ found @ right.mT  # diagonal in the same vectors
        off = between - torch.diag_embed(between.diagonal(dim1=1, dim2=2))
        assert off.abs().max() < 1e-9


def test_one_iteration_is_the_quintic_of_the_singular_values():
    matrix = normal(1, 4, 7)
    a, b, c = QUINTIC
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    changed = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag_embed(changed) @ right
    torch.testing.assert_close(orthogonalise(matrix, 1, Muon.COEFFICIENTS), expected)


def step_by_hand(weight: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    """One convolution at a time, in matrices."""
    rows = len(weight)
    matrix, velocity = weight.flatten(1), torch.zeros_like(weight.flatten(1))
    for gradient in gradients:
        velocity = 0.8 * velocity + 0.2 * gradient.flatten(1)
        ahead = 0.2 * gradient.flatten(1) + 0.8 * velocity
        update = orthogonalise(ahead[None], 4, QUINTIC)[0]
        matrix = matrix - rate * update * rows**0.5 / update.norm()
        matrix = matrix * rows**0.5 / matrix.norm()
    return matrix.view(weight.shape)


def test_convolutions_turn_and_the_rest_descends_as_sgd():
    convolutions = [nn.Parameter(normal(4, 3, 2, 2, seed=i)) for i in range(2)]
    convolutions.append(nn.Parameter(normal(8, 4, 1, 1, seed=2)))
    # The weights of a layer, and those of subnetworks, which have three dimensions.
    dense, twins = (
        [nn.Parameter(normal(*shape, seed=9)) for shape in ((5, 4), (5, 4, 3))] for _ in range(2)
    )
    names = [(f"convolution{i}.weight", weight) for i, weight in enumerate(convolutions)]
    settings = OptimiserSettings(
        name="muon", learning_rate=0.5, convolution_rate=0.05, momentum=0.8, weight_decay=0.01
    )
    groups = [Group([*names, *((f"dense{i}.weight", weight) for i, weight in enumerate(dense))])]
    optimiser = build_optimiser(settings, groups, CPU)
    plain = torch.optim.SGD(twins, 0.5, momentum=0.8, weight_decay=0.01)
    for group in optimiser.param_groups:
        group["lr"] = 0.5 * group["rate"]
    starts = [weight.detach().clone() for weight in convolutions]
    gradients = [[normal(*w.shape, seed=50 + 10 * i + s) for s in range(3)] for i, w in
                 enumerate(convolutions)]  # fmt: skip
    for s in range(3):
        for weight, each in zip(convolutions, gradients, strict=True):
            weight.grad = each[s].clone()
        for weight, twin in zip(dense, twins, strict=True):
            weight.grad = normal(*weight.shape, seed=90 + s)
            twin.grad = weight.grad.clone()
        optimiser.step()
        plain.step()
    torch.testing.assert_close(dense, twins)
    for weight, start, each in zip(convolutions, starts, gradients, strict=True):
        torch.testing.assert_close(weight.detach(), step_by_hand(start, each, 0.05))


def test_both_rates_follow_the_schedule():
    config = override(
        load_recipe("simclr"),
        {"optimiser.name": "muon", "optimiser.convolution_rate": 0.03, "training.epochs": 20},
    )
    plain, faster = (
        [("a.weight", nn.Parameter(normal(2, 2))), ("b.weight", nn.Parameter(normal(2, 2, 1, 1)))]
        for _ in range(2)
    )
    groups = [Group(plain), Group(faster, rate=4.0)]
    optimiser = build_optimiser(config.optimiser, groups, CPU)
    for step, share in ((100, 1.0), (150, 0.5)):  # the end of the warm-up, and half-way on
        set_learning_rates(config, step, 10, optimiser)
        rates = [group["lr"] for group in optimiser.param_groups]
        assert rates == pytest.approx([share * rate for rate in (1.0, 0.03, 4.0, 0.12)])


def test_a_gradient_of_zero_turns_nothing():
    weight = nn.Parameter(normal(4, 3, 2, 2))
    optimiser = Muon([{"params": [weight], "is_convolution": True}], 0.1)
    weight.grad = torch.zeros_like(weight)
    before = weight.detach() * 2.0 / weight.detach().norm()
    optimiser.step()
    torch.testing.assert_close(weight.detach(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_step_is_the_step(tmp_path):
    """Replayed, launched one by one, and continued from a saved state: the same to the bit."""

    def build() -> tuple[list[nn.Parameter], Muon]:
        shapes = ((8, 4, 3, 3), (8, 4, 3, 3), (6, 5))
        weights = [nn.Parameter(normal(*s, seed=i).float().cuda()) for i, s in enumerate(shapes)]
        groups = [{"params": weights[:2], "is_convolution": True}, {"params": weights[2:]}]
        return weights, Muon(groups, 0.1)

    def advance(weights: list[nn.Parameter], optimiser: Muon, step: int) -> None:
        for place, weight in enumerate(weights):
            weight.grad = normal(*weight.shape, seed=100 * step + place).float().cuda()
        for group in optimiser.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimiser.step()

    recorded, launched = build(), build()
    for step in range(6):
        advance(*recorded, step)
        launched[1]._last_key = ()  # never the same twice
        advance(*launched, step)
        if step == 3:
            torch.save(recorded[1].state_dict(), tmp_path / "state.pt")
            recorded[1].load_state_dict(torch.load(tmp_path / "state.pt"))
    assert recorded[1]._recorded is not None
    assert launched[1]._recorded is None
    assert all(map(torch.equal, recorded[0], launched[0]))
