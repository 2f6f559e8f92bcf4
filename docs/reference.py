"""The reference pages, made from the code: the help of every command, and the public names."""

import contextlib
import importlib
import inspect
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ForwardRef, get_args, get_origin

import deepbregman
from deepbregman.cli import COMMANDS, main
from deepbregman.evaluation import options

WIDTH = 90
"""Characters of a line of code that fit on a page of the site."""
GROUPS = {
    "commands": "Commands",
    "config": "Configurations",
    "errors": "Errors",
    "runs": "Runs",
    "exporting": "Encoders",
    "method.bregman": "Divergences",
    "method.losses": "Losses",
    "method.gathering": "Several processes",
    "method.networks": "Networks",
    "method.views": "Views",
    "objectives.objective": "Methods of your own",
    "training": "Callbacks",
    "data": "Data of your own",
    "objectives": "Teacher and bank",
    "evaluation": "Evaluation",
}
"""The heading for the names of each part of the package; other parts come last."""


def list_commands() -> list[tuple[str, ...]]:
    """List the words of every command that has a help text of its own."""
    commands: list[tuple[str, ...]] = []
    for command in COMMANDS:
        module = importlib.import_module(f"deepbregman.commands.{command}")
        commands.append((command,))
        commands.extend((command, name) for name in getattr(module, "SUBCOMMANDS", {}))
    return commands


def capture(*words: str) -> str:
    """Return what a command prints, without colours and as wide as a page of the site."""
    printed = io.StringIO()
    with _plain_terminal(), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(list(words))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    wrapped = (textwrap.fill(line, WIDTH) if line[:1].strip() else line for line in lines)
    return "\n".join(wrapped).strip()


@contextlib.contextmanager
def _plain_terminal() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(COLUMNS=str(WIDTH), NO_COLOR="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def describe_command_line() -> str:
    """Return the help of every command as sections in Markdown."""
    sections = [f"\n```text\n{capture('--help')}\n```\n"]
    for words in list_commands():
        heading = "#" * (1 + len(words))
        sections.append(
            f"\n{heading} {' '.join(words)}\n\n```text\n{capture(*words, '--help')}\n```\n"
        )
    sections.append(f"\n## All recipes\n\n```text\n{capture('recipes')}\n```\n")
    return "".join(sections)


def list_public_names() -> dict[str, str]:
    """Return the module of each public name, by the stub that declares them."""
    stub = Path(deepbregman.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    found = re.findall(r"^from \.(\S+) import (\w+) as \2$", stub, flags=re.MULTILINE)
    return {name: module for module, name in found}


def describe_python() -> str:
    """Return a section for each part of the package; Sphinx fills in the docstrings."""
    groups: dict[str, list[str]] = {title: [] for title in [*GROUPS.values(), "More"]}
    for name, module in list_public_names().items():
        titles = (title for part, title in GROUPS.items() if f"{module}.".startswith(f"{part}."))
        groups[next(titles, "More")].append(name)
    sections = []
    for title, names in groups.items():
        if names:
            entries = "".join(_describe_name(name) for name in names)
            sections.append(f"\n## {title}\n\n```{{eval-rst}}\n{entries}```\n")
    return "".join(sections)


def _describe_name(name: str) -> str:
    public = getattr(deepbregman, name)
    if public.__module__ == options.__name__:
        words = "The `help of evaluate <command_line.html#evaluate>`_ explains each of them."
        return f".. autoclass:: deepbregman.{name}\n\n   {words}\n\n"
    if isinstance(public, type):
        return f".. autoclass:: deepbregman.{name}\n   :members:\n\n"
    return f".. autofunction:: deepbregman.{name}\n\n"


def describe_signature(called: Callable[..., object]) -> str:
    """Return the parameters of a function, without what their types tell the command line."""
    from sphinx.util.inspect import stringify_signature  # which only the site needs

    signature = inspect.signature(called)
    parameters = [
        parameter.replace(annotation=_simplify(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    return stringify_signature(
        signature.replace(parameters=parameters),
        show_return_annotation=False,
        unqualified_typehints=True,
    )


def _simplify(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
