"""Searches and clusters to tables on the screen."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from deepbregman.errors import make_printable
from deepbregman.runs import Record


class Found(NamedTuple):
    """A line of a search's table."""

    name: str
    class_name: str | None
    value: str


def shown_value(value: float) -> str:
    """Write a cosine or a divergence; the latter has no scale, and may be small throughout."""
    return f"{value:.2e}" if 0.0 < value < 1e-3 else f"{value:.4f}"


def search_table(title: str, found: Mapping[str, Sequence[Found]]) -> Table:
    """Draw what was found for one query, a group of columns for each measure."""
    table = Table(title=_words(title), title_justify="left")
    table.add_column("rank", justify="right")
    labelled = any(item.class_name is not None for items in found.values() for item in items)
    for measure in found:
        table.add_column(measure, justify="right")
        if labelled:
            table.add_column("class", overflow="fold")
        table.add_column("image", overflow="fold")
    for rank, items in enumerate(zip(*found.values(), strict=True), start=1):
        cells = [str(rank)]
        for item in items:
            cells.append(item.value)
            cells += [_words(item.class_name or "")] if labelled else []
            cells.append(_words(item.name))
        table.add_row(*cells)
    return table


def _words(text: str) -> str:
    """Show a name as it is, whoever gave it."""
    return escape(make_printable(text))


def metric_table(rows: Sequence[Record], title: str) -> Table:
    """Draw rows with a line for each variant and a column for each metric, in per cent."""
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    table = Table(title=_words(title), title_justify="left")
    table.add_column("variant")
    for metric in metrics:
        table.add_column(f"{metric} %", justify="right")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = {row["metric"]: row for row in rows if row["variant"] == variant}
        table.add_row(variant, *(_value(cells[metric]) for metric in metrics))
    return table


def _value(row: Record) -> str:
    deviation = row["deviation"]
    return f"{row['value']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def cluster_table(
    partitions: Mapping[str, tuple[Sequence[int], Sequence[float]]], title: str
) -> Table:
    """Draw the sizes and the objective of clusters.

    Args:
        partitions: for each variant the sizes of its clusters, and its objective for each seed.
        title: of the table.
    """
    table = Table(title=_words(title), title_justify="left")
    table.add_column("variant")
    table.add_column("objective (best seed)", justify="right")
    table.add_column("sizes, largest first", overflow="fold")
    for variant, (sizes, objectives) in partitions.items():
        words = " ".join(str(size) for size in sorted(sizes, reverse=True))
        table.add_row(variant, shown_value(min(objectives)), words)
    return table
