"""Methods with a memory of every image: against loops from their papers' formulas."""

import math

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import load_recipe, override
from deepbregman.data.opening import open_data
from deepbregman.errors import UserError
from deepbregman.evaluation.knn import build_knn_monitor
from deepbregman.method.patches import shuffle_patches
from deepbregman.objectives import Samples, ViewGroups, build_step
from deepbregman.objectives.memory import MemoryBank, MemoryContrast
from deepbregman.objectives.pirl import contrast_with_memory
from deepbregman.objectives.step import gather_alone

from .methods import configure, draw_views, name_terms

NUM_IMAGES, TAU = 12, 0.5
INDICES = torch.tensor([3, 11, 0, 7])


def units(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(shape, dtype=torch.float64, generator=generator), dim=-1)


def dot(a: Tensor, b: Tensor) -> float:
    return sum(map(float.__mul__, a.tolist(), b.tolist()))


def test_a_memory_moves_towards_what_it_sees_and_forgets_nothing_else():
    torch.manual_seed(0)
    bank = MemoryBank(NUM_IMAGES, 3, momentum=0.75).double()
    before, seen = bank.rows.clone(), units(4, 3)
    bank.remember(INDICES, seen)
    for place in range(NUM_IMAGES):
        if place not in INDICES:
            assert torch.equal(bank.rows[place], before[place])
            continue
        mixed = 0.75 * before[place] + 0.25 * seen[INDICES.tolist().index(place)]
        torch.testing.assert_close(bank.rows[place], mixed / mixed.norm())
    assert torch.equal(bank.recall(INDICES), bank.rows[INDICES])
    edges = torch.tensor([0.0, 0.999, 1.0 - 2**-24])
    assert bank.choose(edges).tolist() == [0, 11, 11]


def noise_contrast(z: Tensor, own: Tensor, others: Tensor, normaliser: float) -> float:
    """J of the paper on instance discrimination, with P_n = 1 / n and m draws of it."""
    total, m = 0.0, len(others)
    for v, f in zip(z, own, strict=True):
        p = math.exp(dot(v, f) / TAU) / normaliser
        total -= math.log(p / (p + m / NUM_IMAGES))
        for g in others:
            p = math.exp(dot(v, g) / TAU) / normaliser
            total -= math.log(1.0 - p / (p + m / NUM_IMAGES))
    return total / len(z)


def test_noise_contrast_is_its_formula_with_the_first_batchs_normaliser():
    contrast = MemoryContrast(NUM_IMAGES, TAU, "nce").double()
    nowhere = torch.zeros(4, 5, dtype=torch.bool)
    z, own, others = units(4, 3), units(4, 3, seed=1), units(5, 3, seed=2)
    sums = [math.exp(dot(v, g) / TAU) for v in z for g in others]
    normaliser = NUM_IMAGES * sum(sums) / len(sums)
    found = contrast(z, own, others, nowhere)
    assert float(found) == pytest.approx(noise_contrast(z, own, others, normaliser), rel=1e-9)
    later = units(4, 3, seed=3), units(4, 3, seed=4), units(5, 3, seed=5)
    expected = noise_contrast(*later, normaliser)
    assert float(contrast(*later, nowhere)) == pytest.approx(expected, rel=1e-9)


def test_the_softmax_leaves_the_image_itself_out_of_the_others():
    contrast = MemoryContrast(NUM_IMAGES, TAU, "softmax").double()
    z, own, others = units(2, 3), units(2, 3, seed=1), units(4, 3, seed=2)
    itself = torch.tensor([[False, True, False, False], [False] * 4])
    expected = 0.0
    for i in range(2):
        mine = math.exp(dot(z[i], own[i]) / TAU)
        rest = [math.exp(dot(z[i], others[j]) / TAU) for j in range(4) if not itself[i, j]]
        expected -= math.log(mine / (mine + sum(rest))) / 2
    assert float(contrast(z, own, others, itself)) == pytest.approx(expected, rel=1e-9)


def test_pirl_is_its_formula():
    z, own, others = units(3, 4), units(3, 4, seed=1), units(6, 4, seed=2)
    itself = torch.zeros(3, 6, dtype=torch.bool)
    itself[1, 4] = True
    expected = 0.0
    for i in range(3):
        rest = [math.exp(dot(z[i], others[j]) / TAU) for j in range(6) if not itself[i, j]]
        mine = math.exp(dot(z[i], own[i]) / TAU)
        expected -= math.log(mine / (mine + sum(rest))) / 3
        expected -= sum(math.log(1.0 - one / (one + sum(rest))) for one in rest) / 3
    assert float(contrast_with_memory(z, own, others, itself, TAU)) == pytest.approx(
        expected, rel=1e-9
    )


def test_gradients():
    own, others = units(3, 4, seed=1), units(6, 4, seed=2)
    itself = torch.zeros(3, 6, dtype=torch.bool)
    inputs = (units(3, 4).requires_grad_(),)
    for loss in ("nce", "softmax"):
        contrast = MemoryContrast(NUM_IMAGES, TAU, loss).double()
        contrast(units(3, 4), own, others, itself)  # which sets the normaliser
        assert torch.autograd.gradcheck(contrast.eval(), (*inputs, own, others, itself))
    assert torch.autograd.gradcheck(
        lambda z: contrast_with_memory(z, own, others, itself, TAU), inputs
    )


def built(name: str, num_views: int, **changes: object):
    """A method in float64, a batch of 4 images and what it makes of them."""
    torch.manual_seed(0)
    config = configure(name, **changes)
    objective = build_step(config, num_images=NUM_IMAGES).double().objective
    random = objective.draw(4, device=torch.device("cpu"), generator=torch.Generator())
    samples = Samples(INDICES, None, random.double())
    return objective, ViewGroups(draw_views(num_views, 4)), samples


@pytest.mark.parametrize("name", ["instdisc", "pirl", "cmc"])
def test_only_training_changes_the_memory(name):
    """Towards the mean of the views; PIRL's towards the image alone, not its puzzle."""
    objective, views, samples = built(name, 2, **{"objective.momentum": 0.7})
    before = {key: value.clone() for key, value in objective.state_dict().items()}
    objective.eval()
    objective(views, gather_alone, samples)
    assert all(torch.equal(objective.state_dict()[key], before[key]) for key in before)
    objective.train()
    outputs = objective(views, gather_alone, samples)
    banks = [key for key in before if key.endswith("bank.rows")]
    halves = outputs.student.chunk(2)  # of CMC: brightness in both views, then colours
    means = [half.mean(dim=0) for half in halves]
    kept = {"cmc": means, "pirl": means[:1], "instdisc": [outputs.student.mean(dim=0)]}[name]
    for key, seen in zip(banks, kept, strict=True):
        moved = (objective.state_dict()[key] != before[key]).any(dim=1)
        assert torch.nonzero(moved).flatten().tolist() == sorted(INDICES.tolist())
        mixed = F.normalize(0.7 * before[key][INDICES] + 0.3 * seen.detach(), dim=1)
        torch.testing.assert_close(objective.state_dict()[key][INDICES], mixed)
    torch.testing.assert_close(
        outputs.student.norm(dim=2), torch.ones_like(outputs.student[..., 0])
    )


def test_the_memorys_vectors_are_the_divergences_targets():
    objective, views, samples = built("instdisc", 1)
    expected = objective.bank.recall(INDICES)
    outputs = objective(views, gather_alone, samples)
    assert torch.equal(outputs.teacher, expected[None])
    distances = (outputs.student[0] - expected).square().sum(dim=1)
    torch.testing.assert_close(outputs.terms["proximal"], distances.mean())


@pytest.mark.parametrize("name", ["instdisc", "pirl"])
@pytest.mark.parametrize("has_teacher", [False, True])
def test_a_teacher_beside_the_memory_gives_the_targets(name, has_teacher):
    match = {"divergence.weight": 1.0, "divergence.source": "bank", "divergence.compare": "match"}
    beside = {"teacher.momentum": 0.9, "weak_views.num_views": 1} if has_teacher else {}
    step = build_step(configure(name, **match, **beside), num_images=NUM_IMAGES)
    memory, seen = step.objective.bank.recall(INDICES), []
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=generator)
    groups = [g and g.draw(4, device="cpu", generator=generator) for g in step.views]
    random = step.objective.draw(4, device=torch.device("cpu"), generator=generator)
    if has_teacher:
        step.teacher.register_forward_hook(lambda *call: seen.append(call[2]))
    outputs = step(pixels, None, ViewGroups(*groups), Samples(INDICES, None, random))
    assert torch.equal(outputs.teacher[0], seen[0] if has_teacher else memory)
    step.divergence.network.push(outputs.teacher[0])  # full: the next step matches
    outputs = step(pixels, None, ViewGroups(*groups), Samples(INDICES, None, random))
    assert name_terms(step, outputs)["divergence"] > 0.0


def test_instdisc_finds_each_view_in_the_memory():
    changes = {"objective.loss": "softmax", "objective.proximal": 0.0}
    objective, views, samples = built("instdisc", 2, **changes)
    bank, places = objective.bank.rows.clone(), (samples.random * NUM_IMAGES).long().tolist()
    outputs = objective(views, gather_alone, samples)
    expected = 0.0
    for view in outputs.student.detach():
        for z, index in zip(view, INDICES.tolist(), strict=True):
            rest = [math.exp(dot(z, bank[j]) / 0.1) for j in places if j != index]
            own = math.exp(dot(z, bank[index]) / 0.1)
            expected -= math.log(own / (own + sum(rest))) / 8
    assert outputs.terms["discrimination"].item() == pytest.approx(expected, rel=1e-6)


def test_pirl_weighs_the_image_and_the_puzzle_made_of_its_patches():
    """Patches are embedded one by one, joined in their shuffled order, and embedded once more."""
    changes = {"objective.puzzle_share": 0.3, "objective.weight": 2.0}
    objective, views, samples = built("pirl", 2, **changes)
    objective.eval()
    outputs = objective(views, gather_alone, samples)
    assert objective.weights == pytest.approx({"puzzle": 0.6, "image": 1.4})
    image = objective.projection(objective.encoder(views.main[0]))
    negatives = objective.settings.negatives
    places = (samples.random[-negatives:] * NUM_IMAGES).long()
    drawn = samples.random[:-negatives].view(4, 4, 3)  # images, patches, order and position
    pieces = shuffle_patches(views.main[1], drawn[..., 0], drawn[..., 1:], 2, 3)
    found = [objective.patch_head(objective.encoder(patches)).flatten() for patches in pieces]
    puzzle = objective.puzzle_head(torch.stack(found))
    bank, itself = objective.bank, INDICES[:, None] == places
    for name, z in (("image", image), ("puzzle", puzzle)):
        mine = F.normalize(z, dim=1)
        own, others = bank.recall(INDICES), bank.recall(places)
        expected = contrast_with_memory(mine, own, others, itself, 0.07)
        torch.testing.assert_close(outputs.terms[name], expected, rtol=1e-6, atol=0.0)


def test_colours_find_brightness_and_brightness_colours():
    objective, views, samples = built("cmc", 1, **{"objective.loss": "softmax"})
    bright, colour = (bank.rows.clone() for bank in (objective.bright_bank, objective.colour_bank))
    places = (samples.random * NUM_IMAGES).long()
    outputs = objective(views, gather_alone, samples)
    expected = torch.zeros((), dtype=torch.float64)
    for z, bank in zip(outputs.student, (colour, bright), strict=True):
        for i, index in enumerate(INDICES.tolist()):
            rest = torch.stack([z[i] @ bank[j] for j in places.tolist() if j != index]) / 0.07
            own = z[i] @ bank[index] / 0.07
            expected = expected + torch.logaddexp(own, rest.logsumexp(0)) / 4 - own / 4
    torch.testing.assert_close(outputs.terms["contrastive"], expected)


@pytest.mark.parametrize("name", ["instdisc", "cmc"])
def test_each_memory_has_a_normaliser_of_its_own(name):
    """By noise-contrastive estimation, whose normaliser is of the first batch's own negatives."""
    changes = {"objective.loss": "nce", "objective.temperature": TAU, "objective.proximal": 0.0}
    if name == "cmc":
        changes.pop("objective.proximal")
    objective, views, samples = built(name, 1, **changes)
    rows = [value.clone() for key, value in objective.state_dict().items() if "bank.rows" in key]
    places = (samples.random * NUM_IMAGES).long()
    outputs = objective(views, gather_alone, samples)
    expected = 0.0
    for z, bank in zip(outputs.student.detach(), reversed(rows), strict=True):  # each the other's
        sums = [math.exp(dot(v, g) / TAU) for v in z for g in bank[places]]
        normaliser = NUM_IMAGES * sum(sums) / len(sums)
        expected += noise_contrast(z, bank[INDICES], bank[places], normaliser)
    (found,) = outputs.terms.values()
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_brightness_knows_nothing_of_colours_nor_colours_of_brightness():
    """Other colours of the same brightness, and other brightness under the same colours."""
    objective, views, samples = built("cmc", 1, **{"objective.space": "ycbcr"})
    objective.eval()
    plain = 0.4 + 0.2 * views.main  # pale: no colour is cut off
    redder = plain + 0.1 * torch.tensor([0.587, -0.299, 0.0]).view(3, 1, 1).double()
    lighter = plain + 0.1 * views.main[:, :, :1]
    for half, (same, other) in enumerate(((redder, lighter), (lighter, redder))):
        before, kept, changed = (
            objective(ViewGroups(each), gather_alone, samples).student[half]
            for each in (plain, same, other)
        )
        torch.testing.assert_close(kept, before)
        assert not torch.allclose(changed, before, atol=1e-4)


def test_a_puzzle_depends_on_its_own_image_alone():
    """As a share of the joint batch: the second half of the images gets its own draws."""
    objective, views, samples = built("pirl", 2)
    objective.eval()
    whole = objective(views, gather_alone, samples).student
    half = ViewGroups(views.main[:, 2:])

    def join(mine: Tensor) -> Tensor:
        return torch.cat([whole[:, :2], F.normalize(mine, dim=2)], dim=1)

    part = objective(half, join, samples._replace(first=2)).student
    torch.testing.assert_close(part, whole)


def test_puzzles_that_cannot_be_cut_are_refused_by_name():
    with pytest.raises(UserError, match=r"objective.grid is 8 with views of 8 px: patches would"):
        configure("pirl", **{"objective.grid": 8})
    with pytest.raises(UserError, match=r"views.num_views is 3: the method pirl takes 2"):
        configure("pirl", **{"views.num_views": 3})


@pytest.mark.slow
def test_brightness_and_colours_teach_each_other_shapes(tmp_path):
    """On digits in which brightness and colours share the shape, and nothing else."""
    digits = load_digits()
    random = np.random.default_rng(0)
    shape = digits.images[..., None] / 16
    grey, colour = (random.normal(0.0, 0.15, shape.shape) for _ in range(2))
    pixels = 0.35 + 0.3 * shape + grey + (0.2 * shape + colour) * np.array([1.0, -0.3, -0.7])
    pixels = (255 * np.clip(pixels, 0.0, 1.0)).astype(np.uint8)
    path = tmp_path / "coloured.npz"
    np.savez(path, train_images=pixels, train_labels=digits.target)
    config = override(
        load_recipe("digits"),
        {
            **{"objective.name": "cmc", "objective.negatives": 512, "data.source": str(path)},
            **{"objective.loss": "softmax"},  # the recipe's
            **{"views.num_views": 1, "views.without": ["jitter", "greyscale"]},
            **{"divergence.weight": 0.0, "training.epochs": 10, "training.batch_size": 128},
            **{"training.tensorboard": False, "training.knn_every": 10, "data.holdout": 0.2},
        },
    )
    source = open_data(config)
    monitor = build_knn_monitor(source.train, config, torch.device("cpu"))
    assert monitor is not None
    fresh = build_step(config, num_images=len(source.train))
    before = monitor(fresh.model.eval())["knn"]
    run = pretrain(config, run=tmp_path / "run", console=Console(quiet=True))
    after = run.metrics()[-1]["knn"]
    assert after > before + 3.0, (before, after)  # per cent
