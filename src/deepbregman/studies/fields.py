"""Fields by their dotted names: as a user sets them, and as a folder holds them. No torch here."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from deepbregman.config import Config, fields_of
from deepbregman.errors import UserError

Changes = Mapping[str, Any]
"""Fields of the configuration by their dotted names, and the value of each."""
RETIRED = {"views.image_size": "views.relative_size, a share of data.image_size"}
"""Field of earlier versions -> what has become of it."""


def literal(text: str) -> Any:
    """Read a value as TOML would: a number, true, a list, quoted text; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def assignments(words: Iterable[str]) -> dict[str, Any]:
    """Read ``field=value`` words."""
    changes = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name or not text:
            raise UserError(f"--set {word!r}: write it as field=value, such as optimiser.name=lars")
        changes[name] = literal(text)
    return changes


def set_now(data: str | None, epochs: int | None, changes: Changes) -> dict[str, Any]:
    """Return all fields that the user sets, by options of their own and by ``--set``.

    Raises:
        UserError: When the two contradict each other.
    """
    given: dict[str, Any] = {}
    for option, name, value in (
        ("data", "data.source", data),
        ("epochs", "training.epochs", epochs),
    ):
        if value is None:
            continue
        if changes.get(name, value) != value:
            raise UserError(
                f"--{option} {value} and --set {name}={changes[name]} contradict each other: leave "
                "one of them out"
            )
        given[name] = value
    return {**given, **changes}


def refuse_retired(stored: Mapping[str, Any], what: str) -> None:
    """Refuse to go on with what names a field that is no more, instead of starting it anew.

    Args:
        stored: what it was begun with, as plain values.
        what: it is, in words.
    """
    written = json.dumps(stored)
    for name, successor in RETIRED.items():
        if f'"{name}' in written:
            raise UserError(
                f"{what} was begun with {name}, which has become {successor}: choose another "
                "folder with --out; what is there can still be reported"
            )


def value_of(config: Config, name: str) -> Any:
    """Return the value of a field by its dotted name."""
    return fields_of(config)[name]


def differences(before: Config, after: Config) -> list[str]:
    """Name every field in which two configurations differ."""
    one, other = fields_of(before), fields_of(after)
    return [
        f"{name} is {value!r} there, {other[name]!r} here"
        for name, value in one.items()
        if value != other[name]
    ]
