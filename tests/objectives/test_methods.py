"""What holds for every method: it steps, resumes, compiles, learns, and refuses what is wrong."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from rich.console import Console

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import METHODS, Config, from_toml, load_recipe, override, recipes, to_toml
from deepbregman.data.images import ArrayImages
from deepbregman.errors import UserError
from deepbregman.evaluation.knn import build_knn_monitor
from deepbregman.objectives import Samples, Step, StepOutputs, ViewGroups, build_step, gather_alone
from deepbregman.training import checkpoints, diagnostics
from deepbregman.training.loop import Pretraining
from deepbregman.training.optimisers import build_optimiser, set_learning_rates
from deepbregman.training.processes import launch

from . import methods
from .methods import configure

NAMES = list(methods.METHODS)
TAKE = {"weak_views": ("ressl", "sce"), "small_views": ("dino", "swav")}
QUEUES = [name for name in NAMES if methods.METHODS[name].get("queue")]


LABELS = torch.arange(96) * 7 % 5


def build(config: Config, **options: Any) -> Step:
    """What trains on the images and labels here."""
    return build_step(config, num_images=96, num_classes=5, **options)


def begin(config: Config, folder: Path) -> Pretraining:
    labels = LABELS if config.objective.needs_labels else None
    return Pretraining(config, images(), launch("cpu"), folder, labels=labels)


def images(count: int = 96) -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return ArrayImages(pixels)


def take_step(step: Step, count: int = 32) -> StepOutputs:
    generator = torch.Generator().manual_seed(1)
    uniforms = ViewGroups(
        *(
            None if group is None else group.draw(count, device="cpu", generator=generator)
            for group in step.views
        )
    )
    pixels = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    random = step.objective.draw(count, device=torch.device("cpu"), generator=generator)
    samples = Samples(torch.arange(count), LABELS[:count], random)
    return step(pixels, None, uniforms, samples)


def test_every_method_has_a_recipe():
    ours = {name for name, kind in METHODS.items() if kind.__module__.startswith("deepbregman.")}
    ours -= {"custom"}  # the user's own, given in Python
    assert {load_recipe(name).objective.name for name in recipes()} == ours
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_through_the_command_line(name, weight, command, few_digits, tmp_path):
    changes = {**methods.TINY, **methods.shrink(name), "divergence.weight": weight}
    changes.pop("views.num_views", None)  # the recipe's own, one of many
    changes |= {"data.image_size": 8, "encoder.name": "small", "data.source": few_digits}
    changes |= {"training.batch_size": 96} | ({"objective.queue": 96} if name in QUEUES else {})
    changes |= {"training.epochs": 1, "optimiser.warmup_epochs": 0}
    words = []
    for key, value in changes.items():
        section, _, field = key.replace("_", "-").partition(".")
        if isinstance(value, bool):
            words.append(f"--{section}.{'' if value else 'no-'}{field}")
        elif key != "objective.name":  # which is the recipe's
            words += [f"--{section}.{field}", value]
    run = tmp_path / "run"
    code, _, errors = command("pretrain", name, "--run", run, *words)
    assert code == 0, errors
    (line,) = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert ("active_subnetworks" in row) == (weight > 0.0)
    assert weight == 0.0 or row["divergence"] > 0.0  # the bank is full at the second step


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_in_evaluation_mode_changes_nothing(name):
    """Neither a queue, a bank, a memory nor a centre."""
    step = build(configure(name))
    take_step(step)
    step.eval()
    before = copy.deepcopy(step.state_dict())
    take_step(step)
    after = step.state_dict()
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


@pytest.mark.parametrize("name", NAMES)
def test_only_the_encoder_of_cpc_cuts_images_into_patches(name):
    """That of PIRL sees the patches of its puzzle, and whole views too."""
    assert (build(configure(name)).objective.encoder.patch is not None) == (name == "cpc")


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_survives_toml(name):
    config = configure(name)
    assert from_toml(to_toml(config), "here") == config


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_on_to_the_bit_from_the_middle_of_an_epoch(name, tmp_path):
    check_resume(methods.carry(name), tmp_path)


def check_resume(config: Config, tmp_path: Path) -> None:
    """Two steps, a checkpoint, three more: the same as three from the checkpoint."""
    first = begin(config, tmp_path / "first")
    feed = first.feed(0, 0)
    first.step_module.train()
    for _ in range(2):
        first.advance(feed)
    saved = copy.deepcopy(first.take_snapshot())
    for _ in range(3):  # into the second epoch
        first.advance(feed)
    second = begin(config, tmp_path / "second")
    second.restore(checkpoints.FoundCheckpoint(saved, "here", [], {}, {}))
    second.step_module.train()
    feed = second.feed(*divmod(second.step, second.steps_per_epoch))
    for _ in range(3):
        second.advance(feed)
    found, expected = (dict(job.step_module.state_dict()) for job in (second, first))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert torch.equal(second.sums, first.sums)
    fresh = build(config).state_dict()
    still = {key for key in expected if torch.equal(expected[key], fresh[key])}
    assert all("mean" in key or "deviation" in key or "bias" in key for key in still), still


@pytest.mark.parametrize("name", NAMES)
def test_a_collapse_is_warned_of(name):
    step = build(configure(name))
    assert diagnostics.find_collapse(diagnostics.diagnose(step, take_step(step))) == []
    for networks in (step.objective.encoder.trunk, getattr(step.objective, "teacher", None)):
        for parameter in [] if networks is None else networks.parameters():
            torch.nn.init.zeros_(parameter)
    (words,) = diagnostics.find_collapse(diagnostics.diagnose(step, take_step(step)))
    assert "collapsed" in words


BESIDE = {"sets": {"views.num_views": 4}, "steps": {"objective.patch": 0.25}}
"""Setting -> what it needs in order to have an effect, or to be varied."""


def vary(settings: Any, field: str) -> Any:
    """Return another value of a setting that the method takes."""
    value = getattr(settings, field)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        choices = get_args(get_type_hints(type(settings))[field])
        return next(choice for choice in choices if choice != value)
    if field in ("queue", "whitening_batch"):  # no smaller than a batch, a divisor of it
        return {0: 64, 8: 16}.get(value, value + 24)
    return value + 1 if isinstance(value, int) else 0.5 * value or 0.5


def describe(config: Config) -> list[Any]:
    """Say how a method steps: its losses and weights, what it trains, and its state at the end."""
    step = build(config)
    losses = []
    for _ in range(3):
        losses.append(take_step(step).losses.tolist())
        with torch.no_grad():
            for parameter in step.objective.projection.parameters():
                parameter.mul_(0.9)  # what an optimiser would do, for a teacher to follow
        step.after_step(0.15)
    groups = step.objective.parameter_groups()
    rates = [(group.rate, group.scheduled, group.frozen_until) for group in groups]
    state = {key: value.tolist() for key, value in step.state_dict().items()}
    return [losses, step.weights, rates, state]


@pytest.mark.parametrize("name", NAMES)
def test_no_setting_is_without_effect(name):
    config = configure(name)
    plain, unused = describe(config), []
    assert describe(config) == plain  # so that a difference below is the setting's
    for field in dataclasses.fields(config.objective):
        if field.name != "name":
            fitted = override(config, BESIDE.get(field.name, {}))
            value = vary(config.objective, field.name)
            found = describe(override(fitted, {f"objective.{field.name}": value}))
            unused += [field.name] * (found == (plain if fitted == config else describe(fitted)))
    assert unused == []


@pytest.mark.parametrize("name", NAMES)
def test_its_weight_is_that_of_its_whole_loss(name):
    once, thrice = (build(configure(name, **{"objective.weight": w})).weights for w in (1.0, 3.0))
    assert any(once.values())
    assert thrice == pytest.approx({term: 3.0 * weight for term, weight in once.items()})


AT_ONCE = ("deep-divergence", "simclr", "simclr-v2", "supcon")
"""They compare all samples of a batch with each other."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*AT_ONCE, "pirl")])
def test_the_loss_of_three_views_is_the_mean_over_pairs_of_them(name):
    objective = build(configure(name)).objective.double()
    views, weak = methods.draw_views(3, 8), methods.draw_views(2, 8)
    random = objective.draw(8, device=torch.device("cpu"), generator=torch.Generator())
    samples = Samples(torch.arange(8), LABELS[:8], random if random is None else random.double())

    def compute(*places: int) -> dict[str, float]:
        groups = ViewGroups(views[list(places)], weak if name in TAKE["weak_views"] else None)
        terms = objective(groups, gather_alone, samples).terms
        objective.load_state_dict(state)  # the queue as it was
        return {term: loss.item() for term, loss in terms.items()}

    for part in objective.modules():
        if isinstance(part, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            part.momentum = 1.0
    state = objective.state_dict()
    compute(0, 1, 2)  # sets the running statistics, so that embeddings differ
    state = copy.deepcopy(objective.eval().state_dict())
    pairs = [compute(0, 1), compute(0, 2)]
    if name != "moco-v2":  # where the first view alone is compared with others
        pairs.append(compute(1, 2))
    assert len({tuple(pair.values()) for pair in pairs}) == len(pairs)
    mean = {term: sum(pair[term] for pair in pairs) / len(pairs) for term in pairs[0]}
    assert compute(0, 1, 2) == pytest.approx(mean, rel=1e-6)


# No gradient reaches pixels through CMC's split of colours, nor through PIRL's cut into patches.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cmc", "pirl")])
def test_every_view_teaches_the_encoder_unless_it_is_a_target(name):
    step = build(configure(name))
    views = [
        group and methods.draw_views(group.num_views, 8, group.size).float().requires_grad_()
        for group in step.views
    ]
    random = step.objective.draw(8, device=torch.device("cpu"), generator=torch.Generator())
    samples = Samples(torch.arange(8), LABELS[:8], random)
    terms = step.objective(ViewGroups(*views), gather_alone, samples).terms
    sum(step.weights[term] * loss for term, loss in terms.items()).backward()
    main, weak, small = (group if group is None else group.grad for group in views)
    assert weak is None
    is_target = [name == "moco-v2" and place == 1 for place in range(len(main))]
    assert [not view.any() for view in main] == is_target
    assert small is None or all(view.any() for view in small)
    assert (small is None) == (name not in TAKE["small_views"])


@pytest.mark.parametrize(
    ("name", "normalised"),
    [
        ("byol", [False, False]),
        ("moco-v3", [True, True]),
        ("nnclr", [True, False]),
        ("simsiam", [True, False]),
    ],
)
def test_what_its_heads_return_is_normalised_as_published(name, normalised):
    """By batch norm, as the last layer of the projection and of the predictor."""
    recipe = load_recipe(name).encoder.projection_output_norm
    objective = build(configure(name, **{"encoder.projection_output_norm": recipe})).objective
    heads = (objective.projection, objective.predictor)
    assert [isinstance(head[-1], torch.nn.BatchNorm1d) for head in heads] == normalised


@pytest.mark.parametrize("name", ["byol", "simsiam", "nnclr"])
def test_gradients_of_the_predictors(name):
    """What is predicted has no gradient: the loss is a smooth function of the predictor."""
    objective = build_step(configure(name)).objective.double()
    views = ViewGroups(methods.draw_views(2, 4))
    state = {key: value.clone() for key, value in objective.state_dict().items()}
    (key,) = (k for k in state if k.startswith("predictor") and state[k].shape == (6, 8))
    term = "contrastive" if name == "nnclr" else "prediction"

    def compute(weight: torch.Tensor) -> torch.Tensor:
        objective.load_state_dict(state)  # the queue as it was
        changed = {key: weight}
        outputs = torch.func.functional_call(objective, changed, (views, gather_alone, Samples()))
        return outputs.terms[term]

    inputs = (state[key].clone().requires_grad_(),)
    assert torch.autograd.gradcheck(compute, inputs, fast_mode=True)


@pytest.mark.parametrize("mixed", [False, True])
def test_all_networks_run_in_bfloat16_where_a_run_is_mixed(mixed):
    objective = build(configure("byol"), mixed=mixed).objective
    views = methods.draw_views(2, 4).float()
    z = objective.embed(views)[1]
    predicted = objective.apply_head(objective.predictor, z.float())
    for found in (z, predicted, objective.teach(views, gather_alone)):
        assert found.dtype == (torch.bfloat16 if mixed else torch.float32)


@pytest.mark.slow  # bfloat16 on a CPU
@pytest.mark.parametrize("name", NAMES)
def test_its_loss_is_finite_in_bfloat16(name):
    step = build(configure(name), mixed=True)
    outputs = take_step(step)
    outputs.total.backward()
    assert outputs.total.dtype == torch.float32
    assert outputs.total.isfinite()
    assert all(p.grad is not None for p in step.parameters() if p.requires_grad)
    plain = take_step(build(configure(name))).total
    torch.testing.assert_close(outputs.total, plain, rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_step_is_one_graph(name):
    torch._dynamo.reset()
    config = methods.carry(name)
    plain, compiled = build(config), build(config)
    compiled.compile(backend="eager", fullgraph=True)
    for _ in range(2):
        totals = [take_step(step).total for step in (plain, compiled)]
        torch.testing.assert_close(totals[1], totals[0])
        for step in (plain, compiled):
            step.after_step(0.5)


def untrained_accuracy(config: Config, source: Any) -> float:
    monitor = build_knn_monitor(source.train, config, torch.device("cpu"))
    assert monitor is not None
    return monitor(build(config).model.eval())["knn"]


# Digits are grey: CMC, which learns from colours, has a test of its own. So have Deep InfoMax and
# CPC: they learn what the parts of an image share, and parts of clean digits share more than the
# digit. Neither gets above an untrained encoder there.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cmc", "cpc", "dim")])
def test_it_learns(name, tmp_path):
    from deepbregman.data.opening import open_data

    config = override(
        load_recipe("digits"),
        {
            **methods.shrink(name),
            "divergence.weight": 0.0,
            "data.holdout": 0.3,  # of 1437 images: 1 % is 4 of the monitor's queries
            "training.epochs": 25,
            "training.batch_size": 128,
            "training.tensorboard": False,
            "training.knn_every": 25,
            "optimiser.warmup_epochs": 2.0,
            **methods.LEARNING.get(name, {}),
        },
    )
    before = untrained_accuracy(config, open_data(config))
    run = pretrain(config, run=tmp_path / "run", console=Console(quiet=True))
    after = run.metrics()[-1]["knn"]
    assert after > before + 2.0, (before, after)  # points of about 8 to gain


PARTS = {
    "cpc": {"objective.patch": 0.375, "objective.directions": 2, "objective.negatives": 128},
    "dim": {
        **{"objective.loss": "jsd", "training.batch_size": 32},
        **{"training.epochs": 12, "training.knn_every": 12},
    },
}
"""Method -> its settings on digits of 16 px; losses are the recipes'.

In six epochs of batches of 128 Deep InfoMax does not get above the untrained encoder there.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_it_learns_what_parts_of_noisy_images_share(name, tmp_path):
    """The noise of one part says nothing about another; an untrained encoder is full of it."""
    from sklearn.datasets import load_digits

    from deepbregman.data.opening import open_data

    digits = load_digits()
    clean = torch.tensor(15.9 * digits.images[:, None], dtype=torch.float32)
    clean = torch.nn.functional.interpolate(clean, size=(16, 16), mode="bilinear")
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    noisy = (0.7 * clean + 25 + 60 * noise).clamp(0, 255).to(torch.uint8)[:, 0]
    path = tmp_path / "noisy.npz"
    np.savez(path, train_images=noisy[:1400].numpy(), train_labels=digits.target[:1400])
    changes: dict[str, Any] = {
        **methods.shrink(name),
        **{"data.source": str(path), "data.image_size": 16, "data.holdout": 0.3},
        **{"divergence.weight": 0.0, "optimiser.warmup_epochs": 2.0},
        **{"training.epochs": 6, "training.batch_size": 128, "training.knn_every": 6},
        **{"training.tensorboard": False, "training.health_every": 0},
        **{"views.num_views": 1, "views.without": ["jitter", "rotation"]},
        **PARTS[name],
    }
    if name == "cpc":
        changes["views.without"] = ["crop", "jitter", "rotation"]
    config = override(load_recipe("digits"), changes)
    before = untrained_accuracy(config, open_data(config))
    run = pretrain(config, run=tmp_path / "run", console=Console(quiet=True))
    after = run.metrics()[-1]["knn"]
    assert after > before + 2.0, (before, after)  # seen: 48 after 44, and 57 after 32


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_it_learns_the_texture_that_parts_share(name, tmp_path):
    """Stripes at one of eight angles, shifted at random, under noise; losses are the recipes'."""
    from deepbregman.data.opening import open_data

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1400) % 8
    angles, shifts = labels * torch.pi / 8, 2.0 * torch.pi * torch.rand(1400, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    along = torch.einsum("n,hw->nhw", angles.cos(), columns)
    along = along + torch.einsum("n,hw->nhw", angles.sin(), rows)
    stripes = torch.sin(1.6 * along + shifts[:, None, None])
    noise = torch.randn(stripes.shape, generator=generator)
    pixels = (128 + 40 * stripes + 40 * noise).clamp(0, 255).to(torch.uint8)
    path = tmp_path / "stripes.npz"
    np.savez(path, train_images=pixels.numpy(), train_labels=labels.numpy())
    recipe = load_recipe(name).objective
    own = {"dim": {"objective.stage": 1, "objective.loss": "jsd"}, "cpc": PARTS["cpc"]}[name]
    changes: dict[str, Any] = {
        **methods.shrink(name),
        **{"data.source": str(path), "data.image_size": 16, "data.holdout": 0.3},
        **{"divergence.weight": 0.0, "optimiser.warmup_epochs": 2.0},
        **{"training.epochs": 3, "training.batch_size": 128, "training.knn_every": 3},
        **{"training.tensorboard": False, "training.health_every": 0},
        **{"views.num_views": 1, "views.without": ["crop", "flip", "jitter", "rotation"]},
        **own,
    }
    config = override(load_recipe("digits"), changes)
    for field in ("stage", "loss"):
        assert getattr(config.objective, field, None) == getattr(recipe, field, None)
    before = untrained_accuracy(config, open_data(config))
    run = pretrain(config, run=tmp_path / "run", console=Console(quiet=True))
    after = run.metrics()[-1]["knn"]
    assert after > before + 5.0, (before, after)  # both: 100 per cent after 81 were seen


@pytest.mark.parametrize("name", QUEUES)
def test_a_queue_smaller_than_the_batch_is_refused(name):
    with pytest.raises(UserError, match=r"objective.queue is 31 with training.batch_size 32: .*"):
        configure(name, **{"objective.queue": 31})


@pytest.mark.parametrize(
    ("name", "group"),
    [(n, group) for group, names in TAKE.items() for n in NAMES if n not in names],
)
def test_a_group_of_views_that_it_does_not_take_is_refused(name, group):
    method = configure(name).objective.name
    with pytest.raises(UserError, match=rf"\[{group}\] is given, but the method {method} takes"):
        configure(name, **{f"{group}.num_views": 1})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_waits_for_the_device(name, tmp_path, no_host_sync):
    config = methods.carry(name, **{"training.compile": "no"})
    labels = LABELS if config.objective.needs_labels else None
    job = Pretraining(config, images(), launch("cuda"), tmp_path / "run", labels=labels)
    feed = job.feed(0, 0)
    job.step_module.train()
    for _ in range(2):
        job.advance(feed)
    with no_host_sync():
        job.advance(feed)


@pytest.mark.parametrize("name", ["dino", "swav"])
def test_prototypes_are_frozen_at_first(name):
    config = configure(name, **{"objective.freeze_prototypes": 0.25})
    objective = build_step(config).objective
    groups = objective.parameter_groups()
    optimiser = build_optimiser(config.optimiser, groups, torch.device("cpu"))
    for step, frozen in ((0, True), (1, True), (2, False)):
        set_learning_rates(config, step, 4, optimiser)  # 8 steps in all
        for group in optimiser.param_groups:
            mine = any(p is objective.prototypes.weight for p in group["params"])
            assert (group["lr"] == 0.0) == (mine and frozen)
