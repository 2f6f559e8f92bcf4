"""The record of a search, read: its fields, and what became of its trials."""

from typing import NamedTuple

from deepbregman.runs import Record


def searched(record: Record) -> list[str]:
    """Return the fields that were searched."""
    return [words.partition("=")[0] for words in record["space"]]


class Dimension(NamedTuple):
    """What one field could be."""

    bounds: tuple[float, float] | None
    """Of an interval; None of a choice."""
    choices: list[str]
    is_log: bool


def dimension(words: str) -> Dimension:
    """Read a dimension of a space as it is written: ``field=LOW:HIGH:log`` or ``field=A,B``."""
    written = words.partition("=")[2]
    choices = written.split(",")
    if len(choices) > 1:
        return Dimension(None, choices, is_log=False)
    low, high = map(float, written.split(":")[:2])
    return Dimension((low, high), [], written.endswith(":log"))


def as_choice(value: object) -> str:
    """Write a value as the choices of a dimension are written."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def completed(record: Record) -> list[Record]:
    """Return the trials that have a value of their own, best first.

    One that diverged was told to the sampler as a guess at chance; that is nothing it reached.
    """
    done = [row for row in record["trials"] if row["value"] is not None and not row["diverged"]]
    return sorted(done, key=lambda row: (-row["value"], row["trial"]))


def fate(trial: Record) -> str:
    """Say in a word what became of a trial."""
    return "diverged" if trial["diverged"] else str(trial["state"])


def fates(record: Record) -> str:
    """Count the trials by what became of them."""
    found = [fate(trial) for trial in record["trials"]]
    return ", ".join(f"{found.count(word)} {word}" for word in dict.fromkeys(found)) or "none"
