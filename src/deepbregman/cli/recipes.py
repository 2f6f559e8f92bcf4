"""deepbregman recipes: the named configurations."""

import re
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from deepbregman.config import load_recipe, recipes

from .options import parse


def command(arguments: list[str]) -> None:
    """List the recipes, or print one: deepbregman recipes [NAME]."""

    def options(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
        """List the recipes, or print one as a complete .toml file to copy and change.

        Args:
            name: Which to print.
        """
        known = recipes()
        console = Console()
        if name is not None:
            load_recipe(name)  # an unknown name is an error that lists the known ones
            text = known[name] if name in known else Path(name).read_text()
            if console.is_terminal:
                console.print(Syntax(text, "toml"))
            else:
                print(text, end="")
            return
        table = Table(box=None, show_header=False, pad_edge=False)
        for recipe, text in known.items():
            table.add_row(f"[bold]{recipe}[/bold]", escape(_told(text)))
        console.print(table)

    parse(options, "recipes", arguments)


def _told(text: str) -> str:
    """Return a recipe's header to be read: what it is, its cost, what to expect, a line each."""
    header = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    parts = re.split(r"(?=\b(?:Command|Cost|Expected):)", " ".join(header.split()))
    return "\n".join(part.strip() for part in parts if not part.startswith("Command:"))
