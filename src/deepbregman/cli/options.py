"""What the verbs share: common options, parsing, and words printed as they are."""

from collections.abc import Callable
from typing import Literal, TypeVar

import tyro
from rich.console import Console

Accelerator = Literal["auto", "cpu", "cuda"]
PROGRAM = "deepbregman"
T = TypeVar("T")


def parse(function: Callable[..., T], verb: str, arguments: list[str]) -> T:
    """Call a function with the options that its signature and docstring describe."""
    return tyro.cli(function, args=arguments, prog=f"{PROGRAM} {verb}")


def say(console: Console, message: str) -> None:
    """Print words as they are: a folder may be called [x]."""
    console.print(message, soft_wrap=True, highlight=False, markup=False)
