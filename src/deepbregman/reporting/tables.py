"""Rows to tables on the screen."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from deepbregman.errors import printable
from deepbregman.runs import Record


def percent(value: float, deviation: float | None = None) -> str:
    """Write an accuracy in per cent, with its deviation where there is one."""
    return f"{value:.1f}" if deviation is None else f"{value:.1f} ± {deviation:.1f}"


def evaluation_table(rows: Sequence[Record], title: str) -> Table:
    """Draw the rows of evaluations, of one or several protocols."""
    table = Table(title=escape(printable(title)), title_justify="left")
    table.add_column("protocol")
    table.add_column("variant")
    table.add_column("top-1 %", justify="right")
    table.add_column("train / test", justify="right")
    for row in rows:
        sizes = f"{row['num_train']:,} / {row['num_test']:,}"
        table.add_row(row["protocol"], row["variant"], f"{row['value']:.2f}", sizes)
    return table


def comparison_table(rows: Sequence[Record], title: str) -> Table:
    """Draw the quickstart's comparison: one line per kind of feature."""
    table = Table(title=title, title_justify="left")
    table.add_column("features")
    table.add_column("linear, all labels", justify="right")
    table.add_column("linear, 5 labels per class", justify="right")
    table.add_column("kNN (k=20)", justify="right")
    for row in rows:
        table.add_row(
            row["features"],
            percent(row["linear"]),
            percent(row["few_labels"], row["few_labels_deviation"]),
            percent(row["knn"]),
        )
    return table
