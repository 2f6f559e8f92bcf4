"""Rules for values.

A rule stands beside its field as an annotation and is checked when the section is made.
"""

import functools
import math
import re
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from deepbregman.errors import UserError, abbreviate, suggest

LARGEST = 1e30
"""Largest accepted number: float32 ends at 3e38, and numbers are multiplied."""
MAX_IMAGE_SIDE = 4096
"""Largest side of an image in pixels: far larger ones fill the memory, and the system then ends the
program without a word."""


@dataclass(frozen=True)
class Range:
    """The rule for a number, or for each number of a tuple."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    increasing: bool = False
    """A (low, high) pair must be in that order."""

    def broken_by(self, value: Any) -> str | None:
        """Say which part of the rule the value breaks, or None."""
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(_is_finite(number) for number in numbers):
            return "it must be finite"
        if any(abs(number) > LARGEST for number in numbers):
            return f"it must be at most {LARGEST:g}"
        if any(number <= self.above or not self.low <= number <= self.high for number in numbers):
            return f"it must be {self._words()}"
        if self.increasing and list(numbers) != sorted(numbers):
            return "it must go from low to high"
        return None

    def _words(self) -> str:
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"between {self.low:g} and {self.high:g}"
        bounds = [
            f"above {self.above:g}" if math.isfinite(self.above) else "",
            f"{self.low:g} or more" if math.isfinite(self.low) else "",
            f"at most {self.high:g}" if math.isfinite(self.high) else "",
        ]
        return " and ".join(filter(None, bounds))


@dataclass(frozen=True)
class Name:
    """The rule for a name: a known one, or a prefix and a name of another library."""

    known: tuple[str, ...]
    prefix: str
    """Prefix of the names of the other library."""

    def broken_by(self, value: str) -> str | None:
        """Return why the name is refused, with the nearest known one; None if it is known."""
        if value in self.known or (value.startswith(self.prefix) and value != self.prefix):
            return None
        foreign = f"{self.prefix}{value.rpartition(':')[2]}"  # a prefix misspelt, or left out
        guess = suggest(value, (*self.known, foreign))
        return f"it must be one of {', '.join(self.known)}, or {self.prefix}NAME{guess}"


@dataclass(frozen=True)
class Distinct:
    """The rule for a list of one item or more, each of them once."""

    def broken_by(self, value: tuple[Any, ...]) -> str | None:
        """Say that the list is empty or names something twice, or None."""
        is_good = value and len(set(value)) == len(value)
        return None if is_good else "it must name at least one, each once"


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        return False


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has the type of its field; a float may be a whole number."""
    origin = get_origin(hint)
    if origin is Annotated:
        return has_type(value, get_args(hint)[0])
    if origin is Literal:
        return value in get_args(hint)
    if origin is UnionType:
        return any(has_type(value, kind) for kind in get_args(hint))
    if origin is tuple:
        items = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if items[-1] is Ellipsis:
            return all(has_type(item, items[0]) for item in value)
        return len(value) == len(items) and all(map(has_type, value, items))
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    """Name a type for the reader of an error."""
    if get_origin(hint) is Annotated:
        return describe(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is UnionType:
        return " or ".join(map(describe, get_args(hint)))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return f"a list, each item {describe(items[0])}"
        return f"a list of {len(items)} items, each {describe(items[0])}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        NoneType: "None",
    }
    return names.get(hint) or f"an object of the class {hint.__name__}"


def accept(value: Any, hint: Any) -> Any:
    """Return a value as its type says: a number, also one of NumPy, as Python's int or float.

    A tensor made of whole numbers could not hold the fractions of a schedule.

    Raises:
        ValueError: The value breaks a rule of its annotation; the message says which.
    """
    origin, kinds = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rules = [rule for rule in hint.__metadata__ if isinstance(rule, Range | Name | Distinct)]
        for rule in rules:
            if words := rule.broken_by(value):
                raise ValueError(words)
        return accept(value, kinds[0])
    if origin is UnionType:
        return accept(value, next(kind for kind in kinds if has_type(value, kind)))
    if origin is tuple:
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(map(accept, value, kinds))
    if hint is str:
        if "\0" in value:
            raise ValueError("it must not hold a null character")
        try:
            value.encode()
        except UnicodeEncodeError:  # a file's name in another encoding, as the shell passed it
            raise ValueError("it must be valid Unicode; rename the file or folder") from None
    return hint(value) if hint in (int, float) else value


@functools.cache
def _read_hints(section: type) -> dict[str, Any]:
    """Return the annotation of every field, read once: a study makes thousands of sections."""
    hints = get_type_hints(section, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


class Section:
    """A table of the configuration that checks its own fields by their annotations."""

    table: ClassVar[str] = ""
    """Name of the table in TOML and in errors; empty where the fields stand in no table."""

    def __init_subclass__(cls, table: str | None = None) -> None:
        """Name the table; by default after the class, without ``Settings``."""
        words = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Settings")).lower()
        cls.table = words if table is None else table

    def __post_init__(self) -> None:
        for name, hint in _read_hints(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            value = getattr(self, name)
            where = f"{self.table}.{name}" if self.table else name
            if isinstance(value, list):  # TOML and JSON have no tuples
                value = tuple(value)
            if not has_type(value, hint):
                choices = map(str, get_args(hint)) if get_origin(hint) is Literal else ()
                guess = suggest(value, choices) if isinstance(value, str) else ""
                raise UserError(
                    f"{where} is {abbreviate(value)}: it must be {describe(hint)}{guess}"
                )
            try:
                accepted = accept(value, hint)
            except ValueError as broken:
                raise UserError(f"{where} is {abbreviate(value)}: {broken}") from None
            object.__setattr__(self, name, accepted)

    @property
    def unused_fields(self) -> dict[str, str]:
        """Fields that training does not use with these settings, and why."""
        return {}


Count = Annotated[int, Range(low=1)]
Whole = Annotated[int, Range(low=0)]
Share = Annotated[float, Range(0.0, 1.0)]
Positive = Annotated[float, Range(above=0.0)]
NotNegative = Annotated[float, Range(low=0.0)]
Shares = Annotated[tuple[float, float], Range(above=0.0, high=1.0, increasing=True)]
"""The least and the largest of some shares."""
Chances = Annotated[float | tuple[float, ...], Range(0.0, 1.0)]
"""A probability of all views, or one of each."""
