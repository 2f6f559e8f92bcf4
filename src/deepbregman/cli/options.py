"""What the verbs share: common options, parsing, and words printed as they are."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

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
