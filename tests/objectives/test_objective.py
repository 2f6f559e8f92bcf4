"""What the interface promises to any method, shown by one that uses all of it."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from deepbregman import load_encoder
from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import (
    METHODS,
    Config,
    ObjectiveSettings,
    WeakViewSettings,
    from_toml,
    load_recipe,
    override,
    to_toml,
)
from deepbregman.config.methods import SimCLRSettings
from deepbregman.errors import UserError
from deepbregman.objectives import ViewGroups, build_step
from deepbregman.objectives.objective import OBJECTIVES
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.faults import Interrupted
from deepbregman.training.randomness import BatchShare

from . import toy

SMALL = {
    "objective.name": "toy",
    "weak_views.crop_area": [0.6, 1.0],
    "data.holdout": 0.0,
    "training.epochs": 2,
    "optimiser.warmup_epochs": 1.0,
    "training.batch_size": 32,
    "training.knn_every": 1,
    "training.save_seconds": 0.0,
    "training.tensorboard": False,
    "encoder.projection_hidden": 12,
    "encoder.embedding": 6,
    "divergence.num_subnetworks": 5,
    "divergence.hidden": 4,
}


def configure(**changes: Any) -> Config:
    return override(load_recipe("digits"), {**SMALL, **changes})


def states(run: Run) -> dict[str, torch.Tensor]:
    saved = checkpoints.load(run.last_checkpoint)
    return {**saved["objective"], **saved["divergence"]}


def test_a_configuration_of_it_survives_toml():
    config = configure()
    assert isinstance(config.objective, toy.ToySettings)
    assert config.weak_views == WeakViewSettings(crop_area=(0.6, 1.0))
    assert from_toml(to_toml(config), "here") == config
    back = override(config, {"objective.name": "simclr", "weak_views": None})
    assert back.objective == SimCLRSettings()
    assert back.weak_views is None


def test_views_that_a_method_cannot_use_are_refused_by_name():
    with pytest.raises(UserError, match=r"views.num_views is 1: the method simclr needs 2"):
        override(load_recipe("digits"), {"views.num_views": 1})
    with pytest.raises(UserError, match=r"weak_views.jitter is .*hue"):
        configure(**{"weak_views.jitter": [0.0, 0.0, 0.0, 0.6]})


def test_weights_are_drawn_from_the_seed_and_from_nothing_else():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = build_step(configure()).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = (build_step(configure(seed=seed)).state_dict() for seed in (0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if name.endswith("weight") and one[name].ndim > 1]
    assert len(drawn) > 8
    assert not [name for name in drawn if torch.equal(one[name], other[name])]


@pytest.mark.parametrize(("normalises", "mean", "deviation"), [(True, 0.3, 0.2), (False, 0.0, 1.0)])
def test_pixels_are_normalised_unless_they_are_not_to_be(normalises, mean, deviation):
    config = configure(**{"encoder.normalise_pixels": normalises})
    encoder = build_step(config, mean=(0.3,) * 3, deviation=(0.2,) * 3).objective.encoder
    assert encoder.mean.flatten().tolist() == pytest.approx([mean] * 3)
    assert encoder.deviation.flatten().tolist() == pytest.approx([deviation] * 3)


def test_a_group_has_its_own_strengths_and_leaves_the_main_draws_as_they_were():
    changes = {"small_views.num_views": 3, "small_views.crop_area": [0.1, 0.3]}
    changes |= {"views.relative_size": 0.75}
    both, plain = configure(**changes), override(load_recipe("digits"), {"training.batch_size": 32})
    shares = [BatchShare(config, 64, torch.device("cpu"), 0, 1) for config in (both, plain)]
    steps = [build_step(config) for config in (both, plain)]
    drawn = [share.draw_uniforms(step.views, 5) for share, step in zip(shares, steps, strict=True)]
    assert torch.equal(drawn[0].main, drawn[1].main)
    assert not torch.equal(drawn[0].weak[0], drawn[0].main[0])
    images = torch.randint(0, 256, (32, 3, 8, 8), dtype=torch.uint8)
    made = [
        group(images, None, uniforms)
        for group, uniforms in zip(steps[0].views, drawn[0], strict=True)
        if group is not None and uniforms is not None
    ]
    assert [(*views.shape[:2], views.shape[-1]) for views in made] == [
        *((2, 32, 6), (1, 32, 8), (3, 32, 4))
    ]
    areas = [group.crop_area for group in steps[0].views]
    assert areas == [plain.views.crop_area, (0.6, 1.0), (0.1, 0.3)]
    assert steps[0].views.weak.jitter_probability == 0.0
    assert steps[1].views.weak is None
    assert drawn[1].weak is None


def test_a_method_without_an_objective_is_an_error(monkeypatch):
    monkeypatch.delitem(OBJECTIVES, "toy")
    with pytest.raises(UserError, match=r"'toy': .* no objective; .* settings=ToySettings"):
        build_step(configure())


def test_two_methods_cannot_share_a_name():
    with pytest.raises(ValueError, match="'toy', which is that of ToySettings"):
        type("Other", (ObjectiveSettings,), {"name": "toy"})
    assert METHODS["toy"] is toy.ToySettings


@pytest.fixture(scope="module")
def complete(tmp_path_factory, few_digits) -> Run:
    config = override(load_recipe("digits"), {**SMALL, "data.source": few_digits})
    return pretrain(config, run=tmp_path_factory.mktemp("toy") / "run")


def test_its_terms_and_metrics_travel_by_name(complete):
    for row in complete.metrics():
        weight = complete.config.divergence.weight
        total = row["match"] + 0.5 * row["repel"] + weight * row["divergence"]
        assert row["total"] == pytest.approx(total, rel=1e-5)
        assert row["queue_norm"] == pytest.approx(1.0, rel=1e-5)
        assert {"knn", "alignment", "active_subnetworks"} <= row.keys()
        assert "contrastive" not in row


def test_teacher_queue_and_predictor_are_in_its_state(complete):
    state = states(complete)
    fresh = build_step(complete.config)
    assert not torch.equal(state["queue"], fresh.objective.state_dict()["queue"])
    for name in ("teacher.1.3.weight", "predictor.0.weight", "network.weight1"):
        assert name in state
    student, teacher = state["projection.3.weight"], state["teacher.1.3.weight"]
    start = fresh.objective.state_dict()["projection.3.weight"]
    assert 0.0 < (teacher - start).norm() < (student - start).norm()  # it lags behind


@pytest.mark.parametrize("stop_at", [2, 6])
def test_it_goes_on_to_the_bit(complete, tmp_path, stop_after, stop_at):
    with stop_after(stop_at), pytest.raises(Interrupted):
        pretrain(complete.config, run=tmp_path / "run")
    run = resume(tmp_path / "run")
    found, expected = states(run), states(complete)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    keep = ("total", "match", "repel", "divergence", "knn")
    rows = [[{k: row[k] for k in keep} for row in each.metrics()] for each in (run, complete)]
    assert rows[0] == rows[1]


def test_an_encoder_loads_without_the_heads(complete):
    encoder = load_encoder(complete.path)
    saved = states(complete)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(tensor, saved[f"encoder.{name}"])
    damaged = checkpoints.load(complete.last_checkpoint)
    del damaged["objective"]["encoder.mean"]
    other = Run.create(complete.path.parent / "other", complete.config, {})
    checkpoints.save(other.last_checkpoint, damaged)
    with pytest.raises(UserError, match=r"mean is missing"):
        load_encoder(other.path)


@pytest.mark.slow
def test_one_compiled_step_serves_all_weights():
    """Torch 2.11 guards every value of a dictionary whose keys a compiled step reads."""
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    counters.clear()
    totals = []
    for weight in (1.0, 0.4):
        torch.manual_seed(0)
        step = build_step(override(load_recipe("digits"), {"divergence.weight": weight}))
        uniforms = ViewGroups(
            *(None if group is None else group.draw(4, device="cpu") for group in step.views)
        )
        step.compile(backend="eager")
        totals.append(step(images, None, uniforms).total.item())
        assert counters["stats"]["unique_graphs"] == 1
    assert totals[0] != totals[1]
