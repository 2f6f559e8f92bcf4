"""The paper's own figures, to stand beside ours and never to be mixed with them."""

import importlib.resources
import re
import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import PurePath
from typing import NamedTuple

_OURS = re.compile(r" of \d+ crops|, \d+ px$")
"""In the name of a variant: judged as no publication here does, on crops or at another size."""
CAVEAT = (
    "Published figures are transcribed: other code, epochs and choices than the runs here, perhaps "
    "another encoder, mostly one run and no deviation. They are a mark on the wall, not an arm."
)


class Published(NamedTuple):
    """One printed value, and what it was printed for."""

    method: str
    value: float
    data: str
    protocol: str
    metric: str
    variant: str | None
    """One of the parts of a variant's name, such as ``1 % labels``; None is any."""
    num_subnetworks: int | None
    table: str
    """The label of the table in the paper's source."""
    title: str
    conditions: str


@cache
def published() -> tuple[Published, ...]:
    """Return every value, table by table."""
    text = (importlib.resources.files(__package__) / "published.toml").read_text(encoding="utf-8")
    return tuple(
        Published(
            row["method"],
            value,
            column["data"],
            table["protocol"],
            column.get("metric") or table["metric"],
            column.get("variant"),
            column.get("num_subnetworks"),
            table["label"],
            table["title"],
            table["conditions"],
        )
        for table in tomllib.loads(text)["tables"]
        for row in table["rows"]
        for column, value in zip(table["columns"], row["values"], strict=True)
    )


def beside(
    data: str, protocol: str, variant: str, metric: str, num_subnetworks: Collection[int] = ()
) -> list[Published]:
    """Return what was printed for the same quantity.

    Args:
        data: the source, by name or as a folder.
        protocol: of the measurement.
        variant: of the protocol, in parts with commas between.
        metric: such as ``top1``.
        num_subnetworks: of the runs; the table of subnetworks is shown for these only.
    """
    if _OURS.search(variant):
        return []
    name = PurePath(data).stem.lower()
    parts = variant.split(", ")
    return [
        entry
        for entry in published()
        if (name, protocol, metric) == (entry.data, entry.protocol, entry.metric)
        if entry.variant is None or entry.variant in parts
        if entry.num_subnetworks is None or entry.num_subnetworks in num_subnetworks
    ]
