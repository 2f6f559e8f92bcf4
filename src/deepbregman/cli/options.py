"""What the verbs share: common options, parsing, and words printed as they are."""

from collections.abc import Callable
from typing import Literal, TypeVar

import tyro
from rich.console import Console

from deepbregman.launching import place

Accelerator = Literal["auto", "cpu", "cuda"]
PROGRAM = "deepbregman"
T = TypeVar("T")


def parse(function: Callable[..., T], verb: str, arguments: list[str]) -> T:
    """Call a function with the options that its signature and docstring describe."""
    first = place().local_rank == 0  # the one that talks, among several processes
    return tyro.cli(function, args=arguments, prog=f"{PROGRAM} {verb}", console_outputs=first)


def say(console: Console, message: str) -> None:
    """Print words as they are: a folder may be called [x]."""
    console.print(message, soft_wrap=True, highlight=False, markup=False)
