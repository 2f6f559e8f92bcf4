"""A loss or gradient that is not finite: found at its step, never saved, skipped where asked."""

import io
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, override
from deepbregman.data.opening import open_data, select_images
from deepbregman.errors import Notice, UserError
from deepbregman.method.views import Views
from deepbregman.objectives import Step, StepOutputs
from deepbregman.objectives.divergence import Divergences, DivergenceTerm
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.faults import Interrupted
from deepbregman.training.loop import Pretraining
from deepbregman.training.processes import launch

Poison = Callable[..., None]


@pytest.fixture
def plain_config(tiny_config) -> Config:
    """Without the sample of health, whose views would be counted too."""
    return override(tiny_config, {"training.health_every": 0})


@pytest.fixture
def poison_views(monkeypatch) -> Poison:
    """Make the pixels of these batches, counted from 1, not a number: it spreads everywhere."""

    def poison(*batches: int, value: float = math.nan) -> None:
        plain, calls = Views.forward, iter(range(1, 10**6))

        def forward(views: Views, *arguments: Tensor) -> Tensor:
            images = plain(views, *arguments)
            return images.fill_(value) if next(calls) in batches else images

        monkeypatch.setattr(Views, "forward", forward)

    return poison


@pytest.fixture
def poison_gradient(monkeypatch) -> Poison:
    """Give these batches a gradient that is not a number, and the loss that they have."""

    def poison(*batches: int) -> None:
        plain, calls = Step.forward, iter(range(1, 10**6))

        def forward(step: Step, *inputs: Any) -> StepOutputs:
            outputs = plain(step, *inputs)
            if next(calls) in batches:
                weight = next(step.objective.projection.parameters())
                outputs = outputs._replace(total=outputs.total + (weight - weight).sqrt().sum())
            return outputs

        monkeypatch.setattr(Step, "forward", forward)

    return poison


def start(config: Config, folder: Path) -> Pretraining:
    source = open_data(config)
    images = select_images(source, torch.arange(len(source.train)))
    return Pretraining(config, images, launch("cpu"), folder)


def saved_step(folder: Path) -> int:
    return int(checkpoints.load(Run.open(folder).last_checkpoint)["step"])


# Stopping


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("batch", "kept"), [(3, 2), (4, 2), (6, 4)])
def test_the_step_is_named_and_the_checkpoint_before_is_kept(
    plain_config, tmp_path, poison_views, batch, kept, value
):
    poison_views(batch, value=value)
    with pytest.raises(UserError, match=rf"not finite from step {batch} on.*learning_rate"):
        pretrain(plain_config, run=tmp_path / "run")
    assert saved_step(tmp_path / "run") == kept
    assert [row["epoch"] for row in Run.open(tmp_path / "run").metrics()] == [
        *range(1, kept // 2 + 1)
    ]


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_the_term_is_named_that_was_not_finite_first(plain_config, tmp_path, monkeypatch, bad):
    """One step later the weights are not finite, and so is every term."""
    plain, calls = DivergenceTerm.forward, iter(range(1, 10**6))

    def forward(term: DivergenceTerm, *inputs: Any) -> Divergences:
        found = plain(term, *inputs)
        factor = math.nan if next(calls) == bad else 1.0
        return found._replace(terms={name: factor * x for name, x in found.terms.items()})

    monkeypatch.setattr(DivergenceTerm, "forward", forward)
    both = override(plain_config, {"training.batch_size": 16, "divergence.weight": 1.0})
    words = f"not finite from step {bad} on, first in the term divergence: "
    with pytest.raises(UserError, match=words) as error:
        pretrain(both, run=tmp_path / "run")
    # Before the first step no weight has changed, so a lower rate would not help.
    assert ("learning_rate" in str(error.value)) == (bad > 1)


def test_in_the_first_epoch_nothing_is_saved(plain_config, tmp_path, poison_views):
    poison_views(1)
    words = "not finite from step 1 on.*or let single batches pass with training.skip_nonfinite"
    with pytest.raises(UserError, match=words):
        pretrain(plain_config, run=tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_gradient_of_an_epochs_last_step_is_found_before_the_save(
    plain_config, tmp_path, poison_gradient
):
    """All losses of the epoch are finite; only the parameters are no longer."""
    poison_gradient(4)
    with pytest.raises(UserError, match="parameters are not finite after step 4"):
        pretrain(plain_config, run=tmp_path / "run")
    assert saved_step(tmp_path / "run") == 2
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        assert all(v.isfinite().all() for v in checkpoints.load(path)["objective"].values())


def test_a_signal_does_not_save_what_has_diverged(plain_config, tmp_path, poison_views, stop_after):
    poison_views(3)
    with stop_after(3), pytest.raises(UserError, match="not finite from step 3 on"):
        pretrain(plain_config, run=tmp_path / "run")
    assert saved_step(tmp_path / "run") == 2


def test_counting_goes_on_after_a_resumption_inside_an_epoch(
    plain_config, tmp_path, poison_views, stop_after
):
    with stop_after(3), pytest.raises(Interrupted):
        pretrain(plain_config, run=tmp_path / "run")
    poison_views(2)
    with pytest.raises(UserError, match="not finite from step 5 on"):
        resume(tmp_path / "run")
    assert saved_step(tmp_path / "run") == 4


def test_moments_that_are_not_finite_are_not_saved(plain_config, tmp_path):
    """With an infinite second moment Adam leaves a weight as it is, for ever and finite."""
    job = start(override(plain_config, {"optimiser.name": "adam"}), tmp_path / "run")
    job.advance(job.feed(0, 0))
    next(iter(job.guard.optimiser.state.values()))["exp_avg_sq"].fill_(math.inf)
    with pytest.raises(UserError, match="not finite after step 1"):
        job.save("last.pt")


# Skipping


def skipping(config: Config, number: int) -> Config:
    return override(config, {"training.skip_nonfinite": number})


def everything(job: Pretraining) -> Iterable[Tensor]:
    yield from job.step_module.state_dict().values()
    for moments in job.guard.optimiser.state.values():
        yield from (value for value in moments.values() if isinstance(value, Tensor))


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is(plain_config, tmp_path):
    guard = start(skipping(plain_config, 1), tmp_path / "run").guard
    guard.keep_buffers()
    assert not guard.should_skip(torch.tensor([3.0, 1.0]), 0)
    assert guard.should_skip(torch.tensor([math.inf, 1.0]), 0)


@pytest.mark.parametrize("kind", ["views", "gradient"])
@pytest.mark.parametrize("optimiser", ["adam", "sgd", "lars"])
def test_a_skipped_batch_leaves_no_trace(
    plain_config, tmp_path, poison_views, poison_gradient, kind, optimiser
):
    """Parameters, moments, decay, and the statistics of batch normalisation are as before."""
    (poison_views if kind == "views" else poison_gradient)(3)
    config = override(skipping(plain_config, 1), {"optimiser.name": optimiser})
    job = start(config, tmp_path / "run")
    job.step_module.train()
    feed = job.feed(0, 0)
    for _ in range(2):
        job.advance(feed)
    before = [value.clone() for value in everything(job)]
    sums = job.sums.clone()
    job.advance(feed)
    after = list(everything(job))
    assert job.step == 3
    assert job.guard.skipped == 1
    assert len(after) == len(before) > 20
    assert all(map(torch.equal, after, before))
    assert torch.equal(job.sums, sums)
    job.advance(feed)
    assert not all(map(torch.equal, everything(job), before))
    job.guard.check(job.step)


def test_a_run_goes_on_after_skipped_batches(plain_config, tmp_path, poison_views):
    """The first step of the second epoch, and the last of the third, which is not diagnosed."""
    poison_views(3, 6)
    console = Console(record=True, width=200, file=io.StringIO())
    run = pretrain(skipping(plain_config, 2), run=tmp_path / "run", console=console)
    assert console.export_text().count("skipped 1 batch of non-finite loss") == 2
    rows = run.metrics()
    assert [row["skipped"] for row in rows] == [0, 1, 1]
    assert all(math.isfinite(row["total"]) for row in rows)
    assert ["alignment" in row for row in rows] == [True, True, False]
    saved = checkpoints.load(run.last_checkpoint)
    assert (saved["step"], saved["skipped"], saved["skipped_in_epoch"]) == (6, 2, 0)


def test_the_mean_loss_is_that_of_the_batches_that_count(plain_config, tmp_path, poison_views):
    poison_views(1)
    job = start(skipping(plain_config, 1), tmp_path / "run")
    job.step_module.train()
    feed = job.feed(0, 0)
    job.advance(feed)
    expected = job.advance(feed).total.item()
    poison_views(1)
    with pytest.warns(Notice, match="skipped 1 batch of non-finite loss"):  # told in Python, too
        run = pretrain(skipping(plain_config, 1), run=tmp_path / "again")
    assert run.metrics()[0]["total"] == expected


@pytest.mark.filterwarnings("ignore:.*skipped 1 batch")
def test_no_more_than_allowed(plain_config, tmp_path, poison_views):
    poison_views(3, 6)
    with pytest.raises(UserError, match=r"not finite at step 6, .*no more than 1 batch"):
        pretrain(skipping(plain_config, 1), run=tmp_path / "run")
    assert saved_step(tmp_path / "run") == 4


def test_a_lower_rate_is_no_help_where_every_batch_was_skipped(
    plain_config, tmp_path, poison_views
):
    poison_views(1, 2)
    words = "not finite at step 2, .*no weight had changed before, so the learning rate is not"
    with pytest.raises(UserError, match=words) as error:
        pretrain(skipping(plain_config, 1), run=tmp_path / "run")
    assert "let single batches pass" not in str(error.value)


@pytest.mark.filterwarnings("ignore:.*skipped 1 batch")
def test_what_was_skipped_before_a_resumption_counts(
    plain_config, tmp_path, poison_views, stop_after
):
    poison_views(3)
    with stop_after(3), pytest.raises(Interrupted):
        pretrain(skipping(plain_config, 1), run=tmp_path / "run")
    poison_views(2)  # batch 5 of the run
    with pytest.raises(UserError, match="not finite at step 5"):
        resume(tmp_path / "run")
    assert [row["skipped"] for row in Run.open(tmp_path / "run").metrics()] == [0, 1]


def test_an_epoch_of_nothing_but_skipped_batches_stops(plain_config, tmp_path, poison_views):
    poison_views(3, 4)
    with pytest.raises(UserError, match="no batch of the epoch had a finite loss"):
        pretrain(skipping(plain_config, 9), run=tmp_path / "run")
    assert saved_step(tmp_path / "run") == 2


def test_where_nothing_is_skipped_skipping_changes_nothing(tiny_run, tmp_path):
    run = pretrain(skipping(tiny_run.config, 3), run=tmp_path / "run")
    states = [checkpoints.load(r.last_checkpoint)["objective"] for r in (run, tiny_run)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    for row, expected in zip(run.metrics(), tiny_run.metrics(), strict=True):
        assert row["skipped"] == 0
        assert {k: row[k] for k in expected if not k.endswith("_per_second")} == {
            k: v for k, v in expected.items() if not k.endswith("_per_second")
        }
