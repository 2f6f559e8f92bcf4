"""What the verbs share: common options, parsing, and words printed as they are."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Literal, TypeVar, cast

import tyro
from rich.console import Console
from rich.progress import Progress, TaskID

from deepbregman.errors import printable
from deepbregman.launching import place

Accelerator = Literal["auto", "cpu", "cuda"]
PROGRAM = "deepbregman"
T = TypeVar("T")


def parse(function: Callable[..., T], verb: str, arguments: list[str]) -> T:
    """Call a function with the options that its signature and docstring describe."""
    first = place().local_rank == 0  # the one that talks, among several processes
    # A sentence that goes on in a deeper line is one sentence: the terminal wraps it anew.
    function.__doc__ = re.sub(r"\n {8,}(?=\S)", " ", inspect.cleandoc(function.__doc__ or ""))
    return tyro.cli(function, args=arguments, prog=f"{PROGRAM} {verb}", console_outputs=first)


def silence(stream: IO[str]) -> None:
    """Send what a stream still holds, and all that follows, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def print_note(words: str, stream: IO[str] | None) -> None:
    """Print a note, and go on where that is not possible."""
    if stream is None:
        return  # where print would take standard output
    try:
        print(printable(f"note: {words}"), file=stream)
    except OSError:
        silence(stream)


class _Heard:
    """A stream that is silent, where others fail, once it cannot be written to."""

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
        # While a bar runs, stderr is rich's and leads back here.
        errors = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        if errors is not self._stream:
            why = error.strerror or error
            what = f"standard output: {why}; nothing more is printed there, the work goes on"
            print_note(what, errors)


def screen(quiet: bool = False, stderr: bool = False) -> Console:
    """Return a console for long work, and for errors.

    Neither may fail because a pipe was closed, a terminal is gone, or the disk of a log is full.
    """
    stream = sys.stderr if stderr else sys.stdout
    if stream is None:  # closed by whoever started this
        return Console(stderr=stderr, quiet=True)
    return Console(file=cast(IO[str], _Heard(stream)), quiet=quiet)


def say(console: Console, message: str) -> None:
    """Print words as they are: a folder may be called [x], or hold the codes of a terminal."""
    console.print(printable(message), soft_wrap=True, highlight=False, markup=False)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each kind of work reported, on a terminal only, gone when all is done."""
    console = screen(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def report(work: str, done: int, total: int) -> None:
            if work not in bars:
                bars[work] = progress.add_task(work)
            progress.update(bars[work], completed=done, total=total)

        yield report
