"""deepbregman recipes: the named configurations."""

import re
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.syntax import Syntax

from deepbregman import config
from deepbregman.terminal import print_choices

LISTED_FIRST = (
    *("auto", "best", "cifar10-fast", "cifar10-summit", "digits", "simclr"),
    *("paper", "paper-imagenet", "authors"),
)
"""Our own; the methods of others follow."""


def recipes(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
) -> str | dict[str, str]:
    """List the recipes, or print one as a complete .toml file to copy and change.

    Args:
        name: Recipe to print; without one, all are listed.

    Returns:
        The text of the recipe, or the texts of all recipes by name.
    """
    known = config.recipes()
    if name is None:
        return known
    config.load_recipe(name)  # an unknown name is an error that lists the known ones
    return known[name] if name in known else Path(name).read_text(encoding="utf-8")


def show(result: str | dict[str, str], console: Console) -> None:
    """Print one recipe as it is, or a table of all."""
    if isinstance(result, str):
        if console.is_terminal:
            console.print(Syntax(result, "toml"))
        else:
            print(result, end="")
        return
    names = dict.fromkeys((*LISTED_FIRST, *result))
    print_choices(console, {name: _summarise(result[name]) for name in names})
    console.print("\ndeepbregman recipes NAME prints a recipe, with its cost and what to expect")


def _summarise(text: str) -> str:
    """Return the first sentence of the comment at the head of a recipe: what it is."""
    header = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    about = " ".join(header.split()).split(" Command:")[0]
    return re.split(r"(?<!et al)\. (?=[A-Z])", about)[0].removesuffix(".")
