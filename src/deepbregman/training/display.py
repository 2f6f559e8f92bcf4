"""Progress of a run on the terminal, and its TensorBoard events."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from deepbregman.runs import Record, Run
from deepbregman.terminal import LINE_SECONDS, format_duration, say

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SHOWN = (
    ("learning_rate", "lr", "{:.2e}"),
    ("active_subnetworks", "active", "{:.0f}"),
    ("effective_rank", "rank", "{:.1f}"),
    ("knn", "kNN", "{:.1f} %"),
    ("images_per_second", "images/s", "{:,.0f}"),
    ("views_per_second", "views/s", "{:,.0f}"),
)
IN_BAR = ("total", "knn")
"""Metrics that stand beside the bar, so that it fits into 80 columns; the lines have all."""
LEFT_OUT = ("views_per_second", "learning_rate", "images_per_second", "active_subnetworks")
"""Metrics that a line on a terminal leaves out first where it would not fit; then loss terms, the
divergence last."""
FIRST_SECONDS = 5.0
"""Time of training after which the time left is told: the first steps are slower."""
MEASURED_SECONDS = 20.0
"""Time of training after which the total time is estimated."""
LONG_SECONDS = 6 * 3600.0
"""A run that takes longer gets a hint how to shorten it."""


class Display:
    """A progress bar for people, and a line every few epochs that also suits a log file.

    Args:
        report_every: epochs between printed lines; the first and the last are always printed.
        tell: takes warnings instead of the console.
    """

    def __init__(
        self,
        console: Console,
        epochs: int,
        steps_per_epoch: int,
        report_every: int,
        weights: Mapping[str, float] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.console, self.tell = console, tell
        self.weights = weights or {}
        losses = [("total", "loss"), *((name, name) for name in self.weights)]
        self.shown = [*((name, label, "{:.4f}") for name, label in losses), *SHOWN]
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        self.report_every = max(1, report_every)
        self.first: tuple[int, float] | None = None
        """The first step that was shown, and when: compiling and loading come before it."""
        self.last_line = time.monotonic()
        self.left = ""
        """Remaining time of the run, in words; empty until steps have been timed."""
        self.has_checked_length = False
        """Whether the remaining time has been checked: the user is warned of a long run once."""
        self.last_verdict = ""
        self.last_warnings: set[str] = set()
        """Those of the epoch before, without their numbers."""
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[status]}"),
            console=console,
            transient=True,
        )
        self.task = self.progress.add_task(
            "", total=epochs * steps_per_epoch, epoch=1, epochs=epochs, status="", left=""
        )

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show_step(self, step: int) -> None:
        """Show the number of steps that are done."""
        left = self._estimate_left(step)
        self.left = "" if left is None else f"{format_duration(left)} left"
        epoch = max(1, -(-step // self.steps_per_epoch))  # its own line comes after its last step
        self.progress.update(self.task, completed=step, epoch=epoch, left=self.left)
        if not self.console.is_terminal and time.monotonic() - self.last_line >= LINE_SECONDS:
            steps = f"step {step:,} of {self.total_steps:,}"
            words = self.left or "the time left is not known yet"
            self._print(f"epoch {epoch:>4} of {self.epochs}, {steps}: {words}")
        if left is None or self.first is None:
            return
        if not self.has_checked_length and time.monotonic() - self.first[1] >= MEASURED_SECONDS:
            self.has_checked_length = True
            if left > LONG_SECONDS:
                self.warn(
                    f"at this speed the run takes another {format_duration(left)}: a GPU, a "
                    "smaller encoder.name, a smaller data.image_size or fewer training.epochs "
                    "shorten it; the recipe auto with --budget 2h chooses them for you"
                )

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def _estimate_left(self, step: int) -> float | None:
        """Return the seconds to the end, or None before steps have been timed."""
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
        done, seconds = step - self.first[0], now - self.first[1]
        if not done or seconds < FIRST_SECONDS:
            return None
        return seconds / done * (self.total_steps - step)

    def _print(self, words: str) -> None:
        say(self.console, words)
        self.last_line = time.monotonic()

    def show_epoch(self, record: Record) -> None:
        """Show the metrics of an epoch, loss terms as they enter the total."""
        values = record | weigh_terms(record, self.weights)
        parts = {
            name: f"{label} {pattern.format(values[name])}"
            for name, label, pattern in self.shown
            if name in values
        }
        status = "  ".join(parts[name] for name in IN_BAR if name in parts)
        self.progress.update(self.task, status=status)
        epoch = record["epoch"]
        if self._is_due(epoch) and parts:  # none if nothing is trained, and there are no labels
            ends = epoch == self.epochs or self.console.is_terminal  # the bar shows it
            left = f"  {self.left}" if self.left and not ends else ""
            head = f"epoch {epoch:>4} of {self.epochs}{left}"
            others = [name for name in reversed(list(self.weights)) if name != "divergence"]
            for name in (*LEFT_OUT, *others, "divergence"):
                length = len("  ".join([head, *parts.values()]))
                if self.console.is_terminal and length > self.console.width:
                    parts.pop(name, None)
            self._print("  ".join([head, *parts.values()]))

    def _is_due(self, epoch: int) -> bool:
        """Whether an epoch gets a line."""
        return epoch == 1 or epoch == self.epochs or epoch % self.report_every == 0

    def show_verdict(self, record: Record) -> None:
        """Say how training goes, when that is another word than before or the last one."""
        word = record["verdict"]
        if word != self.last_verdict or record["epoch"] == self.epochs:
            self._print(f"health: {word} ({record['reason']})")
        self.last_verdict = word

    def warn_of_epoch(self, epoch: int, messages: Sequence[str]) -> None:
        """Warn of what looks wrong in an epoch: when it begins, and where a line is due."""
        kinds = {re.sub(r"[\d.]+", "", message) for message in messages}
        if self._is_due(epoch) or kinds - self.last_warnings:
            for message in messages:
                self.warn(f"epoch {epoch}: {message}")
        self.last_warnings = kinds

    def warn(self, message: str) -> None:
        """Show something that the user should look at."""
        if self.tell is not None:
            self.tell(message)
        else:
            say(self.console, f"warning: {message}", "yellow")


def weigh_terms(record: Record, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the loss terms of an epoch as they enter its total.

    The weight of the divergence may change from step to step while it warms up, so its part is what
    the others leave of the total.
    """
    found = {name: weight * record[name] for name, weight in weights.items() if name in record}
    if "divergence" in found and "total" in record:
        others = sum(value for name, value in found.items() if name != "divergence")
        found["divergence"] = record["total"] - others
    return found


def open_events(run: Run, step: int) -> "SummaryWriter":
    """Open a run's TensorBoard events; those after a step, left by a crash, are taken back."""
    from torch.utils.tensorboard import SummaryWriter  # two seconds to import

    return SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)


def write_events(writer: "SummaryWriter", record: Record) -> None:
    """Write an epoch's metrics to disk, before a checkpoint can say that it is over."""
    try:
        for name, value in record.items():
            if not isinstance(value, str):
                writer.add_scalar(name, value, record["step"])
        writer.flush()
    except OSError as error:  # it names no file
        raise OSError(error.errno, error.strerror, writer.log_dir) from None


@contextmanager
def closing_events(writer: "SummaryWriter | None") -> Iterator[None]:
    """Close the events at the end, after an error, too.

    Their thread leaves its errors to `write_events`, so it does not print them as well.
    """
    if writer is None:
        yield
        return
    print_error = threading.excepthook

    def print_others(told: threading.ExceptHookArgs) -> None:
        if type(told.thread).__name__ != "_AsyncWriterThread":
            print_error(told)

    threading.excepthook = print_others
    try:
        yield
    finally:
        with suppress(OSError):  # every epoch is written already
            writer.close()
        threading.excepthook = print_error
