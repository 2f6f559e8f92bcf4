import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deepbregman.config import DivergenceSettings, OptimiserSettings, load_recipe, override
from deepbregman.objectives import Group
from deepbregman.objectives.divergence import DivergenceTerm
from deepbregman.training.optimisers import (
    Lars,
    Muon,
    build_optimiser,
    learning_rate,
    set_learning_rates,
    split_by_decay,
)

CPU = torch.device("cpu")
SHAPES = [(3, 4), (2, 3, 2, 2), (5,), ()]
STEPS = 4


def draws(seed: int) -> list[list[Tensor]]:
    """Initial weights, then the gradients of each step, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]
        for _ in range(1 + STEPS)
    ]


def run(optimiser: torch.optim.Optimizer, weights: list[Tensor], grads: list[list[Tensor]]) -> None:
    for step in grads:
        for weight, grad in zip(weights, step, strict=True):
            weight.grad = grad.clone()
        optimiser.step()


def norm(values: list[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


def naive_lars(
    weight: Tensor,
    grads: list[Tensor],
    *,
    rate: float,
    momentum: float,
    decay: float,
    trust: float,
    clip: bool,
) -> list[float]:
    """Algorithm 1 of You et al. 2017, in Python floats, but with ||g + decay w|| below the line.

    With ``clip`` the smaller of the local and the global rate counts, not their product.
    """
    w = weight.flatten().tolist()
    velocity = [0.0] * len(w)
    for grad in grads:
        g = grad.flatten().tolist()
        update = [a + decay * b for a, b in zip(g, w, strict=True)]
        local = 1.0
        if weight.ndim > 1:
            local = trust * norm(w) / norm(update)
            if clip:
                local = min(local, rate) / rate
        velocity = [momentum * v + rate * local * u for v, u in zip(velocity, update, strict=True)]
        w = [a - v for a, v in zip(w, velocity, strict=True)]
    return w


# Clipped, the limit binds always at the smallest trust, and never at the largest.
@pytest.mark.parametrize(
    ("trust", "clip"), [(0.001, False), (0.02, False), (0.02, True), (0.5, True), (10.0, True)]
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_agrees_with_a_naive_loop(trust, clip, momentum, decay):
    start, *grads = draws(3)
    weights = [weight.clone().requires_grad_() for weight in start]
    how = {"momentum": momentum, "trust": trust, "clip": clip}
    run(Lars(weights, 0.3, weight_decay=decay, **how), weights, grads)
    for index, weight in enumerate(weights):
        own = [step[index] for step in grads]
        expected = naive_lars(start[index], own, rate=0.3, decay=decay, **how)
        torch.testing.assert_close(weight.flatten().tolist(), expected, rtol=1e-12, atol=1e-14)


def test_clipped_lars_is_sgd_but_for_large_gradients():
    config = OptimiserSettings(name="clipped-lars", learning_rate=0.5, weight_decay=0.0)
    for gradient, expected in ((0.01, 0.005), (3.0, 0.02)):
        weight = nn.Parameter(torch.eye(1, 4, dtype=torch.float64))  # of norm 1
        optimiser = build_optimiser(config, [Group([("weight", weight)])], CPU)
        weight.grad = torch.tensor([[0.0, gradient, 0.0, 0.0]], dtype=torch.float64)
        optimiser.step()
        assert weight[0, 1].item() == pytest.approx(-expected)
        optimiser.param_groups[0]["lr"] = 0.0  # frozen: nothing moves, and nothing is divided by 0
        before = weight.detach().clone()
        optimiser.step()
        assert torch.equal(weight, before)


def test_convention_lars_takes_the_norm_after_the_decay():
    """As SimCLR's code does; the paper divides by ||g|| + decay ||w||, which is never smaller."""
    weight = torch.tensor([[3.0, 0.0]], dtype=torch.float64, requires_grad=True)
    weight.grad = torch.tensor([[0.0, 4.0]], dtype=torch.float64)
    Lars([weight], 1.0, momentum=0.0, weight_decay=1.0, trust=1.0).step()
    # update (3, 4) of norm 5, local rate 3 / 5; the paper's would be 3 / (4 + 3)
    torch.testing.assert_close(weight.tolist(), [[3.0 - 9 / 5, -12 / 5]])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_moves_biases_as_sgd_does_whatever_the_rate(decay):
    """Not adapted, and the velocity is free of the rate, as in torch: a schedule acts at once."""
    start, *grads = draws(1)
    ours, theirs = (start[2].clone().requires_grad_() for _ in range(2))
    optimisers = [
        Lars([ours], 0.1, momentum=0.8, weight_decay=decay, trust=1e-9),
        torch.optim.SGD([theirs], 0.1, momentum=0.8, weight_decay=decay),
    ]
    for step, rate in zip(grads, (0.1, 0.4, 0.2, 0.0), strict=True):
        for weight, optimiser in zip((ours, theirs), optimisers, strict=True):
            optimiser.param_groups[0]["lr"] = rate
            weight.grad = step[2].clone()
            optimiser.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_lars_of_zeros_is_finite():
    zero, still = torch.zeros(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    skipped = torch.ones(2, 2, requires_grad=True)
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    Lars([zero, still, skipped], 0.5).step()
    assert torch.equal(zero, torch.full((2, 2), -0.5))  # nothing to adapt to: plain descent
    assert torch.equal(still, torch.ones(2, 2))
    assert torch.equal(skipped, torch.ones(2, 2))


@pytest.mark.parametrize("make", [Lars, Muon])
def test_a_group_without_a_gradient_stays_as_it_is(make):
    moved, still = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    moved.grad = torch.ones(2, 2)
    make([{"params": [still]}, {"params": [moved]}], 0.5).step()
    assert torch.equal(still, torch.ones(2, 2))
    assert not torch.equal(moved, torch.ones(2, 2))


def test_lars_leaves_gradients_alone():
    weight = torch.ones(2, 2, requires_grad=True)
    torch.autograd.backward(weight.square().sum())
    Lars([weight], 0.1, weight_decay=0.1).step()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))


def test_lars_goes_on_from_its_state():
    start, *grads = draws(2)
    whole = [weight.clone().requires_grad_() for weight in start]
    run(Lars(whole, 0.1), whole, grads)
    first = [weight.clone().requires_grad_() for weight in start]
    optimiser = Lars(first, 0.1)
    run(optimiser, first, grads[:2])
    second = [weight.detach().clone().requires_grad_() for weight in first]
    resumed = Lars(second, 0.7)
    resumed.load_state_dict(optimiser.state_dict())
    run(resumed, second, grads[2:])
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


class Network(nn.Module):
    """Weights, biases, normalisation, a scalar, a shared weight and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.linear = nn.Linear(4, 4)
        self.shared = self.linear.weight
        self.sigma = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def identities(parameters: Iterable[Tensor]) -> list[int]:
    return sorted(map(id, parameters))


@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lars", "clipped-lars"])
def test_every_parameter_is_in_one_group_with_its_decay(name, decay_all):
    network = Network()
    config = OptimiserSettings(name=name, weight_decay=0.25, decay_all=decay_all, learning_rate=0.5)
    groups = build_optimiser(config, [Group(network.named_parameters())], CPU).param_groups
    trained = [p for p in network.parameters() if p.requires_grad]
    assert identities([p for g in groups for p in g["params"]]) == identities(trained)
    decays = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    weights = {id(network.convolution.weight), id(network.linear.weight)}
    for parameter in trained:
        decayed = decay_all or id(parameter) in weights
        assert decays[id(parameter)] == (0.25 if decayed else 0.0)
    assert all(group["lr"] == 0.5 for group in groups)


def test_parameter_groups_without_biases():
    groups = split_by_decay(nn.Linear(2, 2, bias=False).named_parameters(), 0.1, decay_all=False)
    assert [len(group["params"]) for group in groups] == [1]


REFERENCES: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, 0.03, betas=(0.6, 0.7), weight_decay=0.2),
    "adamw": lambda p: torch.optim.AdamW(p, 0.03, betas=(0.6, 0.7), weight_decay=0.2),
    "sgd": lambda p: torch.optim.SGD(p, 0.03, momentum=0.7, weight_decay=0.2),
    "lars": lambda p: Lars(p, 0.03, momentum=0.7, weight_decay=0.2, trust=0.001),
    "clipped-lars": lambda p: Lars(p, 0.03, momentum=0.7, weight_decay=0.2, trust=0.02, clip=True),
}


@pytest.mark.parametrize("name", list(REFERENCES))
def test_options_reach_the_optimiser(name):
    config = OptimiserSettings(
        name=name, learning_rate=0.03, betas=(0.6, 0.7), momentum=0.7, weight_decay=0.2
    )
    networks: list[nn.Module] = []
    for build in (
        lambda p: build_optimiser(config, [Group(p)], CPU),
        lambda p: REFERENCES[name](p),
    ):
        torch.manual_seed(0)
        network = nn.Linear(4, 3)
        optimiser = build(network.parameters() if networks else network.named_parameters())
        assert type(optimiser) is type(REFERENCES[name]([torch.zeros(1, requires_grad=True)]))
        for _ in range(3):
            optimiser.zero_grad()
            network(torch.arange(8.0).view(2, 4)).square().mean().backward()
            optimiser.step()
        networks.append(network)
    assert all(
        torch.equal(a, b)
        for a, b in zip(networks[0].parameters(), networks[1].parameters(), strict=True)
    )


# Learning rate


def rates(config: OptimiserSettings, steps_per_epoch: int, epochs: int) -> list[float]:
    return [
        learning_rate(config, step, steps_per_epoch, epochs)
        for step in range(steps_per_epoch * epochs)
    ]


HALF = math.sqrt(0.5)
COSINE = {"schedule": "cosine"}
STEP = {"schedule": "step", "step_factor": 0.5}


@pytest.mark.parametrize(
    ("schedule", "epochs", "expected"),
    [
        ({}, 2, [2.0] * 4),
        ({"warmup_epochs": 2.0}, 3, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        ({"warmup_epochs": 0.5}, 1, [2.0, 2.0]),  # of two steps the first has the full rate
        ({"warmup_epochs": 1.5}, 2, [2 / 3, 4 / 3, 2.0, 2.0]),
        (COSINE, 2, [2.0, 1 + HALF, 1.0, 1 - HALF]),
        ({**COSINE, "warmup_epochs": 1.0}, 3, [1.0, 2.0, 2.0, 1 + HALF, 1.0, 1 - HALF]),
        ({**STEP, "milestones": (1, 3)}, 4, [2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5]),
        ({**COSINE, "warmup_epochs": 0.75}, 2, [1.0, 2.0, 2.0, 1.0]),  # rounded to two steps
        ({**STEP, "milestones": (1,), "warmup_epochs": 1.0}, 2, [1.0, 2.0, 1.0, 1.0]),
        (
            {**STEP, "milestones": (3, 2), "warmup_epochs": 1.0},
            4,
            [1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5],
        ),
    ],
)
def test_rates_of_two_steps_per_epoch_by_hand(schedule, epochs, expected):
    assert rates(OptimiserSettings(learning_rate=2.0, **schedule), 2, epochs) == pytest.approx(
        expected
    )


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.0, 15.0), st.floats(1e-6, 10.0))
def test_cosine_rises_then_falls(steps_per_epoch, epochs, warmup_epochs, rate):
    config = OptimiserSettings(learning_rate=rate, schedule="cosine", warmup_epochs=warmup_epochs)
    found = rates(config, steps_per_epoch, epochs)
    warmup = min(round(warmup_epochs * steps_per_epoch), len(found))
    assert all(a < b for a, b in itertools.pairwise(found[:warmup]))
    assert all(a > b for a, b in itertools.pairwise(found[warmup:]))
    assert all(0.0 < value <= rate for value in found)  # to the bit
    if round(warmup_epochs * steps_per_epoch) <= len(found):
        assert max(found) == rate


def test_a_layer_may_be_named_after_a_bias():
    groups = split_by_decay(
        nn.ModuleDict({"debiased": nn.Linear(2, 2)}).named_parameters(), 0.1, decay_all=False
    )
    assert [(group["weight_decay"], group["params"][0].ndim) for group in groups] == [
        *((0.1, 2), (0.0, 1)),
    ]


def test_biases_of_subnetworks_are_biases_though_they_have_two_dimensions():
    from deepbregman.method.networks import BregmanNetwork

    network = BregmanNetwork(6, 5, 4)
    weights, rest = split_by_decay(network.named_parameters(), 0.1, decay_all=False)
    assert {id(p) for p in weights["params"]} == {id(network.weight1), id(network.weight2)}
    assert id(network.bias1) in {id(p) for p in rest["params"]}
    assert (weights["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert [group["is_weight"] for group in (weights, rest)] == [True, False]


def test_lars_does_not_adapt_a_group_of_biases():
    weight = torch.ones(2, 2, requires_grad=True)
    optimiser = Lars([{"params": [weight], "is_weight": False}], 0.1, momentum=0.0)
    weight.grad = torch.full((2, 2), 3.0)
    optimiser.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 1.0 - 0.1 * 3.0))


def test_the_divergences_weight_rises_over_its_warm_up():
    term = DivergenceTerm(DivergenceSettings(weight=3.0, warmup_epochs=0.75), 3)
    weights = [term.weight_at(step, 4) for step in range(5)]
    assert weights == pytest.approx([1.0, 2.0, 3.0, 3.0, 3.0])


def test_groups_of_one_treatment_are_merged():
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    groups = [
        Group(first.named_parameters()),
        Group(second.named_parameters()),
        Group(third.named_parameters(), rate=10.0, scheduled=False, decayed=False),
    ]
    config = OptimiserSettings(name="sgd", learning_rate=0.1, decay_all=False, weight_decay=0.3)
    built = build_optimiser(config, groups, CPU).param_groups
    assert [(len(g["params"]), g["weight_decay"], g["rate"]) for g in built] == [
        *((2, 0.3, 1.0), (2, 0.0, 1.0)),
        *((1, 0.0, 10.0), (1, 0.0, 10.0)),
    ]


def test_a_group_may_have_a_rate_of_its_own_and_wait():
    config = override(
        load_recipe("digits"),
        {
            "optimiser.schedule": "cosine",
            "optimiser.warmup_epochs": 0.0,
            "optimiser.learning_rate": 2.0,
            "training.epochs": 2,
        },
    )
    layers = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    options: list[dict[str, Any]] = [{}, {"rate": 10.0, "scheduled": False}, {"frozen_until": 0.5}]
    groups = [
        Group(layer.named_parameters(), **option)
        for layer, option in zip(layers, options, strict=True)
    ]
    optimiser = build_optimiser(config.optimiser, groups, CPU)
    found = []
    for step in range(4):
        set_learning_rates(config, step, 2, optimiser)
        found.append([group["lr"] for group in optimiser.param_groups])
    half = math.sqrt(0.5)
    expected = [
        [2.0, 20.0, 0.0],
        [1 + half, 20.0, 0.0],
        [1.0, 20.0, 1.0],
        [1 - half, 20.0, 1 - half],
    ]
    assert found == [pytest.approx(row) for row in expected]
