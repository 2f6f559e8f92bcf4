"""Rows to tables on the screen."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from deepbregman.errors import make_printable
from deepbregman.runs import Record


def percent(value: float, deviation: float | None = None) -> str:
    """Write an accuracy in per cent, with its deviation where there is one."""
    return f"{value:.1f}" if deviation is None else f"{value:.1f} ± {deviation:.1f}"


METRICS = {"top1": "top-1 %", "top5": "top-5 %", "balanced": "balanced %"}
"""Titles of metrics; any other is titled by its name."""


def evaluation_table(rows: Sequence[Record], title: str) -> Table:
    """Draw the rows of evaluations: a line for each variant, a column for each metric.

    A mean over several seeds is written with the sample's deviation.
    """
    lines: dict[tuple[str, ...], dict[str, Record]] = {}
    for row in rows:
        kind = (row["protocol"], row["variant"], row["data"])
        lines.setdefault(kind, {})[row["metric"]] = row
    found: set[str] = {row["metric"] for row in rows}
    metrics = [name for name in METRICS if name in found] + sorted(found - set(METRICS))
    several = any(row["n"] > 1 for row in rows)
    table = Table(title=escape(make_printable(title)), title_justify="left")
    table.add_column("protocol", no_wrap=True)
    # On a narrow screen cells are folded: a least width would be held at the cost of the last
    # column, and with an ellipsis AP50-07 and AP50-10 would look the same.
    table.add_column("variant", overflow="fold")
    titles = [METRICS.get(metric, metric) for metric in metrics]
    for title_of_column in [*titles, *(["seeds"] if several else []), "train / test"]:
        table.add_column(title_of_column, justify="right", overflow="fold")
    for (protocol, variant, _), measured in lines.items():
        one = next(iter(measured.values()))
        cells = [_mean(measured[name]) if name in measured else "" for name in metrics]
        cells += [str(one["n"])] if several else []
        sizes = f"{one['num_train']:,} / {one['num_test']:,}"
        table.add_row(protocol, escape(variant), *cells, sizes)
    return table


def _mean(row: Record) -> str:
    spread = "" if row["deviation"] is None else f" ± {row['deviation']:.2f}"
    return f"{row['value']:.2f}{spread}"


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
