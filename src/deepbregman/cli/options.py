"""What the verbs share: common options, parsing, and words printed as they are."""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Literal, TypeVar, cast

import tyro
from rich.console import Console
from rich.progress import Progress, TaskID

from deepbregman.errors import Notice, printable
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


@contextmanager
def or_silent(stream: IO[str]) -> Iterator[None]:
    """Where a stream cannot be written to, send what it holds and all that follows nowhere."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _Heard:
    """Standard output, silent from the moment that it cannot be written to."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with or_silent(self._stream), self._told():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with or_silent(self._stream), self._told():
            self._stream.flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            said = f"standard output: {error.strerror or error}"
            warnings.warn(f"{said}; nothing more is printed there, the work goes on", Notice, 2)
            raise


def screen(quiet: bool = False) -> Console:
    """Return a console for long work, which leaves more than words.

    It must not end because a pipe was closed, a terminal is gone, or the disk of a log is full.
    """
    return Console(file=cast(IO[str], _Heard(sys.stdout)), quiet=quiet)


def say(console: Console, message: str) -> None:
    """Print words as they are: a folder may be called [x], or hold the codes of a terminal."""
    console.print(printable(message), soft_wrap=True, highlight=False, markup=False)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each kind of work reported, on a terminal only, gone when all is done."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def report(work: str, done: int, total: int) -> None:
            if work not in bars:
                bars[work] = progress.add_task(work)
            progress.update(bars[work], completed=done, total=total)

        yield report
