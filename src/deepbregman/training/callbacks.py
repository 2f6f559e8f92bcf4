"""Events of a run for code of the user's own."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from deepbregman.errors import UserError, abbreviate
from deepbregman.method.networks import Model
from deepbregman.runs import Record, Run

from .diagnostics import RECORDED


class Callback:
    """Gets the events of a run; override the methods that you need.

    An exception ends the run, which resumes from its last checkpoint. All random numbers of a step
    are drawn from seeds of its own, so that a callback may draw what it likes.
    """

    stop: str = ""
    """Set it to a reason in ``on_epoch`` to end the run after this epoch, saved and complete."""

    def on_start(self, run: Run, step: int, total_steps: int) -> None:
        """Training begins, or goes on after ``step`` steps. In process 0 only."""

    def on_step(self, step: int, losses: Mapping[str, Tensor]) -> None:
        """An optimiser step was taken. In every process.

        Args:
            losses: ``total`` and each term, the mean over the batches of this step, of all
                processes; scalars on the device. To read one waits for the device, so read them
                rarely.
        """

    def on_epoch(self, record: Mapping[str, Any], model: Model) -> Mapping[str, float] | None:
        """Close an epoch, before its metrics are written. In process 0 only, without gradient.

        Args:
            record: the epoch's metrics: ``epoch``, ``step``, the losses, the diagnostics and,
                where it was measured, ``knn``.
            model: the networks, in evaluation mode; leave their weights alone.
        """
        return None

    def on_end(self, run: Run) -> None:
        """Training is complete, or was to stop early. In process 0 only."""


def collect_metrics(callbacks: Sequence[Callback], record: Record, model: Model) -> Record:
    """Tell callbacks that an epoch ends, and return the metrics that they add to it."""
    added: Record = {}
    for callback in callbacks:
        found = callback.on_epoch({**record, **added}, model)
        if found is None:
            continue
        name = type(callback).__name__
        try:
            numbers = {str(metric): float(value) for metric, value in found.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise UserError(
                f"{name}.on_epoch returned {abbreviate(found)}: it must return a dict of names and "
                "numbers, or None"
            ) from None
        taken = sorted(numbers.keys() & {*record, *added, *RECORDED})
        if taken:
            raise UserError(
                f"{name}.on_epoch returned {', '.join(taken)}, a name that the run's metrics use "
                "for something else: give it another"
            )
        added |= numbers
    return added
