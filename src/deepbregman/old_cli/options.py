"""What the verbs of this folder share, until they have moved to commands/."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import tyro
from rich.console import Console

from deepbregman.launching import is_first_of_machine
from deepbregman.terminal import ReportProgress, lasting_console
from deepbregman.terminal import progress_bars as _progress_bars
from deepbregman.terminal import say as say

Accelerator = Literal["auto", "cpu", "cuda"]
PROGRAM = "deepbregman"
T = TypeVar("T")


def parse(function: Callable[..., T], verb: str, arguments: list[str]) -> T:
    """Call a function with the options that its signature and docstring describe."""
    function.__doc__ = re.sub(r"\n {8,}(?=\S)", " ", inspect.cleandoc(function.__doc__ or ""))
    outputs = is_first_of_machine()
    return tyro.cli(function, args=arguments, prog=f"{PROGRAM} {verb}", console_outputs=outputs)


def screen() -> Console:
    """Return a console for long work."""
    return lasting_console()


@contextmanager
def progress_bars() -> Iterator[ReportProgress]:
    """Show a bar for each kind of work reported, on a terminal only, gone when all is done."""
    with _progress_bars(lasting_console(stderr=True)) as report:
        yield report
