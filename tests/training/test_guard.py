"""A loss or gradient that is not finite: found at its step, and never saved."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, override
from deepbregman.errors import UserError
from deepbregman.method.views import Views
from deepbregman.objectives import Step, StepOutputs
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.faults import Interrupted

Poison = Callable[..., None]


@pytest.fixture(scope="session")
def tiny_config(tiny_config) -> Config:
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


def saved_step(folder: Path) -> int:
    return int(checkpoints.load(Run.open(folder).last_checkpoint)["step"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("batch", "kept"), [(3, 2), (4, 2), (6, 4)])
def test_the_step_is_named_and_the_checkpoint_before_is_kept(
    tiny_config, tmp_path, poison_views, batch, kept, value
):
    poison_views(batch, value=value)
    with pytest.raises(UserError, match=rf"not finite from step {batch} on.*learning_rate"):
        pretrain(tiny_config, run=tmp_path / "run")
    assert saved_step(tmp_path / "run") == kept
    assert [row["epoch"] for row in Run.open(tmp_path / "run").metrics()] == [
        *range(1, kept // 2 + 1)
    ]


def test_in_the_first_epoch_nothing_is_saved(tiny_config, tmp_path, poison_views):
    poison_views(1)
    with pytest.raises(UserError, match="not finite from step 1 on"):
        pretrain(tiny_config, run=tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_gradient_of_an_epochs_last_step_is_found_before_the_save(
    tiny_config, tmp_path, poison_gradient
):
    """All losses of the epoch are finite; only the parameters are no longer."""
    poison_gradient(4)
    with pytest.raises(UserError, match="parameters are not finite after step 4"):
        pretrain(tiny_config, run=tmp_path / "run")
    assert saved_step(tmp_path / "run") == 2
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        assert all(v.isfinite().all() for v in checkpoints.load(path)["objective"].values())


def test_a_signal_does_not_save_what_has_diverged(tiny_config, tmp_path, poison_views, stop_after):
    poison_views(3)
    with stop_after(3), pytest.raises(UserError, match="not finite from step 3 on"):
        pretrain(tiny_config, run=tmp_path / "run")
    assert saved_step(tmp_path / "run") == 2


def test_counting_goes_on_after_a_resumption_inside_an_epoch(
    tiny_config, tmp_path, poison_views, stop_after
):
    with stop_after(3), pytest.raises(Interrupted):
        pretrain(tiny_config, run=tmp_path / "run")
    poison_views(2)
    with pytest.raises(UserError, match="not finite from step 5 on"):
        resume(tmp_path / "run")
    assert saved_step(tmp_path / "run") == 4
