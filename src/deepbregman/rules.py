"""Rules for configuration fields: what an annotation promises, checked on construction."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .errors import UserError, abbreviate, suggest


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
    """The rule for a name: one of those known here, or one that another library knows."""

    known: tuple[str, ...]
    prefix: str
    """What a name of the other library begins with."""

    def broken_by(self, value: str) -> str | None:
        """Say that the name is none, with the nearest one, or None."""
        if value in self.known or (value.startswith(self.prefix) and value != self.prefix):
            return None
        foreign = f"{self.prefix}{value.rpartition(':')[2]}"  # a prefix misspelt, or left out
        guess = suggest(value, (*self.known, foreign))
        return f"it must be one of {', '.join(self.known)}, or {self.prefix}NAME{guess}"


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        return False


def matches(value: Any, hint: Any) -> bool:
    """Whether a value has the type of its field; a whole number will do for a float."""
    if get_origin(hint) is Annotated:
        return matches(value, get_args(hint)[0])
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if items[-1] is Ellipsis:
            return all(matches(item, items[0]) for item in value)
        return len(value) == len(items) and all(map(matches, value, items))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def described(hint: Any) -> str:
    """Name a type for the reader of an error."""
    if get_origin(hint) is Annotated:
        return described(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return f"a list, each item {described(items[0])}"
        return f"a list of {len(items)} items, each {described(items[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]


def broken(value: Any, hint: Any) -> str | None:
    """Say which rule of its annotation a value of the right type breaks, or None."""
    if get_origin(hint) is tuple:
        items = get_args(hint)
        hints = items[:1] * len(value) if items[-1] is Ellipsis else items
        return next(filter(None, map(broken, value, hints)), None)
    if get_origin(hint) is Annotated:
        rules = [rule for rule in hint.__metadata__ if isinstance(rule, Range | Name)]
        words = next(filter(None, (rule.broken_by(value) for rule in rules)), None)
        return words or broken(value, get_args(hint)[0])
    if hint is str:
        if "\0" in value:
            return "it must not hold a null character"
        try:
            value.encode()
        except UnicodeEncodeError:  # a file's name in another encoding, as the shell passed it
            return "it must be valid Unicode; rename the file or folder"
    return None


class Section:
    """A part of the configuration that checks its own fields by their annotations."""

    def __post_init__(self) -> None:
        """Check every field; the subclass's name in lower case is the section's."""
        section = type(self).__name__.lower()
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value, where = getattr(self, name), f"{section}.{name}"
            if isinstance(value, list):  # as TOML has it, and JSON
                value = tuple(value)
                object.__setattr__(self, name, value)
            if not matches(value, hint):
                choices = map(str, get_args(hint)) if get_origin(hint) is Literal else ()
                guess = suggest(value, choices) if isinstance(value, str) else ""
                raise UserError(
                    f"{where} is {abbreviate(value)}: it must be {described(hint)}{guess}"
                )
            words = broken(value, hint)
            if words:
                raise UserError(f"{where} is {abbreviate(value)}: {words}")
