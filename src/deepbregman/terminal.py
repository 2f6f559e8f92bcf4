"""Output to the terminal: text, progress bars, and streams that may be closed."""

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, cast

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from .errors import UserError, make_printable

MaybeText = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
MaybeNumber = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]
"""Types of options that need not be given."""
ReportProgress = Callable[[str, int, int], None]
"""Takes the name of the work, how much of it is done, and how much there is."""
LINE_SECONDS = 60.0
"""Without a terminal, a line tells how far the work is after so long."""


def ignore_progress(*_: object) -> None:
    """Take progress and do nothing."""


def say(console: Console, message: str, style: str | None = None) -> None:
    """Print words as they are: a folder may be called [x], or contain terminal codes."""
    console.print(
        make_printable(message),
        style=style,
        soft_wrap=True,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_choices(console: Console, choices: Mapping[str, str]) -> None:
    """Print names, each with what it means."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, meaning in choices.items():
        table.add_row(f"[bold]{name}[/bold]", escape(meaning))
    console.print(table)


def parse_budget(text: str) -> float:
    """Return the seconds of a time such as 90s, 30m, 2h or 1h30m."""
    number = r"(\d+(?:\.\d+)?)\s*"
    pattern = rf"(?:{number}h)?\s*(?:{number}m(?:in)?)?\s*(?:{number}s)?"
    found = re.fullmatch(pattern, str(text).strip(), re.IGNORECASE)  # a program may give a number
    hours, minutes, rest = (float(number or 0) for number in found.groups()) if found else (0, 0, 0)
    seconds = 3600.0 * hours + 60.0 * minutes + rest
    if not 0.0 < seconds < 1e9:
        raise UserError(
            f"--budget {text}: it must be a time above 0 with its unit, h, m or s, such as 30m, "
            "2h or 1h30m"
        )
    return seconds


def count_words(number: int, noun: str) -> str:
    """Write a number of things: ``1 epoch``, ``2,000 epochs``, ``2 classes``, ``2 batches``."""
    ending = "es" if noun.endswith(("ss", "tch")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def join_words(words: Iterable[str]) -> str:
    """Write a list as in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


PLANNED_SHARE = 0.9
"""Share of a budget that training is planned for; opening, evaluating and saving take some."""


def choose_budget(seconds: float) -> str:
    """Return a value of --budget that is enough to train for these seconds."""
    minutes = math.ceil(seconds / PLANNED_SHARE / 60)
    return f"{minutes}m" if minutes < 120 else f"{math.ceil(minutes / 60)}h"


def format_duration(seconds: float) -> str:
    """Write a time as a person would say it, in its two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{minutes / 1440:.1f} days"


@contextmanager
def progress_bars(console: Console, says_loading: bool = False) -> Iterator[ReportProgress]:
    """Draw a bar for each kind of work that is reported, until the block ends.

    A bar appears when its work is first reported as unfinished, and goes when it is finished.
    Where there is no terminal, a line is written once a minute instead.

    Args:
        says_loading: until then, a bar says that the program loads: importing torch takes seconds.
            Not for work that prints lines of its own in between.
    """
    if not console.is_terminal:
        yield _write_lines(console)
        return
    with Progress(console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {}
        loading = progress.add_task("loading", total=None, visible=says_loading)

        def report(work: str, done: int, total: int) -> None:
            progress.update(loading, visible=False)
            if work not in bars:
                bars[work] = progress.add_task(work)
            is_open = done < total
            progress.update(bars[work], completed=done, total=total, visible=is_open)
            if not is_open:  # a line that is printed next would be written into the bar
                progress.refresh()

        yield report


@contextmanager
def say_loading(console: Console | None) -> Iterator[None]:
    """Show that the program loads, until the block ends: importing torch takes seconds."""
    with (console or Console(quiet=True)).status("loading PyTorch ..."):
        yield


def _write_lines(console: Console) -> ReportProgress:
    last_line = time.monotonic()

    def report(work: str, done: int, total: int) -> None:
        nonlocal last_line
        if done < total and time.monotonic() - last_line >= LINE_SECONDS:
            say(console, f"{work}: {done:,} of {total:,}")
            last_line = time.monotonic()

    return report


def open_lasting_console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Return a console that does not fail when its pipe, terminal or disk is gone."""
    stream = sys.stderr if stderr else sys.stdout
    if stream is None:  # closed by the program that started this one
        return Console(stderr=stderr, quiet=True)
    return Console(file=cast(IO[str], _LastingStream(stream)), quiet=quiet, emoji=False)


def print_note(words: str, stream: IO[str] | None) -> None:
    """Print a note to a stream if it can be written to."""
    if stream is None:
        return  # print() would take standard output instead
    try:
        print(make_printable(f"note: {words}"), file=stream)
    except OSError:
        silence(stream)


def silence(stream: IO[str]) -> None:
    """Discard what a stream still holds and everything that follows."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _LastingStream:
    """A stream that falls silent, instead of failing, once it cannot be written to."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._stop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        silence(self._stream)
        # While a bar runs, sys.stderr is rich's and leads back here.
        errors = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        if errors is not self._stream:
            why = error.strerror or error
            what = f"standard output: {why}; nothing more is printed there, the work continues"
            print_note(what, errors)
