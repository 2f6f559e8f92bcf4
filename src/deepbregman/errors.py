"""The one exception that means "the user can fix this"."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: the message names the value, the rule and the fix; the command exits with 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word closest to ``word``, or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
