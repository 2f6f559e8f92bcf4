"""The one exception that means "the user can fix this"."""

import difflib
import errno
from collections.abc import Iterable
from typing import Any

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class UserError(Exception):
    """Bad input: the message names the value, the rule and the fix; the command exits with 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word closest to ``word``, or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def shown(value: Any) -> str:
    """Write a value for an error, at bearable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more than 4300 digits, perhaps in it
        return "beyond what can be written"
    return text if len(text) <= 200 else f"{text[:200]}..."


def printable(text: str) -> str:
    """Write what a terminal would obey, or could not show, as an escape; lines stay lines."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


def explanation(error: BaseException) -> tuple[str, int] | None:
    """Return the words and the exit code for what is no fault of the program, else None."""
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        advice = "; free space there or choose another folder" * (error.errno in _NO_ROOM)
        words = f"{where}{error.strerror or error}{advice}; nothing that was complete is lost"
        return words, 2
    number = getattr(error, "signal_number", None)  # an interrupted run
    if number is not None:
        return str(error), 128 + int(number)
    if any(words in str(error).lower() for words in _OUT_OF_MEMORY):
        return (
            f"out of memory ({str(error).splitlines()[0]}); lower training.batch_size, "
            "data.image_size or divergence.num_subnetworks, or stream with --data.resident no"
        ), 2
    return None
