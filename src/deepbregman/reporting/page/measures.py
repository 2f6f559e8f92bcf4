"""What runs were judged by, arm by arm, with the published figures of the same quantity beside."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from deepbregman.runs import Record

from .arms import Arm, Spread, Subject, is_number, spread
from .published import CAVEAT, beside
from .tables import Cell, Row, Table

ASCENDING = ("top1", "top5", "balanced", "AP", "mAP", "recall", "precision", "nmi", "ari", "purity")
"""Beginnings of the metrics of which more is better; of others none is called best."""

LEAST_SEEDS = 3


class Measure(NamedTuple):
    """One quantity: rows are pooled over runs only if all of this is the same."""

    data: str
    protocol: str
    variant: str
    metric: str
    split: str
    num_train: int
    num_test: int

    @property
    def title(self) -> str:
        """What it is, in words."""
        details = [part for part in (self.metric, self.split) if part and part != "top1"]
        return f"{self.protocol}: {self.variant}" + f" ({', '.join(details)})" * bool(details)

    @property
    def sizes(self) -> str:
        """The numbers of images behind it."""
        return f"{self.num_train:,} / {self.num_test:,}"


def titles(columns: Sequence[Measure]) -> list[str]:
    """Name quantities, those of one name by the numbers of images as well."""
    names = [measure.title for measure in columns]
    return [
        name if names.count(name) == 1 else f"{name} [{measure.sizes}]"
        for name, measure in zip(names, columns, strict=True)
    ]


def measure_of(row: Record) -> Measure:
    """Say which quantity a row of an evaluation is of."""
    return Measure(
        data=str(row["data"]),
        protocol=str(row["protocol"]),
        variant=str(row["variant"]),
        metric=str(row["metric"]),
        split=str(row.get("split") or ""),
        num_train=int(row.get("num_train") or 0),
        num_test=int(row.get("num_test") or 0),
    )


def measures(arms: Sequence[Arm]) -> list[Measure]:
    """Return all quantities that any run was judged by, in the order of the records."""
    rows = (row for arm in arms for run in arm.runs for row in run.evaluations)
    return list(dict.fromkeys(measure_of(row) for row in rows))


def values(arm: Arm, measure: Measure) -> list[tuple[Subject, Record]]:
    """Return the rows of an arm's runs for one quantity."""
    return [(run, row) for run in arm.runs for row in run.evaluations if measure_of(row) == measure]


def summary(arm: Arm, measure: Measure) -> Cell:
    """Summarise one quantity over the runs of an arm."""
    found = values(arm, measure)
    if not found:
        return Cell(text="—", note="not measured")
    notes = [f"{run.name}: {row['value']:.2f}" for run, row in found]
    early = [row for _, row in found if row.get("epoch", 0) < row.get("epochs", 0)]
    if early:
        notes.append(f"of an encoder saved at epoch {early[0]['epoch']} of {early[0]['epochs']}")
    over, whole = "", spread([row["value"] for _, row in found])
    if len(found) == 1 and is_number(found[0][1].get("deviation")):
        row = found[0][1]
        whole = Spread(row["value"], row["deviation"], int(row.get("n") or 1))
        over = "repetitions of the evaluation of one run"
    missing = len(arm.runs) if len(found) < len(arm.runs) else 0
    return Cell(whole, note="; ".join(notes), over=over, of_runs=missing)


def with_best(cells: Sequence[Cell], num_seeds: Sequence[int], ascending: bool) -> list[Cell]:
    """Mark the best cell, if it leads every other by more than the two deviations together.

    Args:
        cells: of one quantity, an arm each.
        num_seeds: of each arm; with fewer than three, a deviation is luck and nothing is clear.
        ascending: whether more is better; if that is not known, none is marked.
    """
    known = [index for index, cell in enumerate(cells) if cell.spread is not None]
    if not ascending or len(known) < 2:
        return list(cells)
    best = max(known, key=lambda index: _spread(cells[index]).mean)

    def is_clear(index: int) -> bool:
        ahead, behind = _spread(cells[best]), _spread(cells[index])
        if ahead.deviation is None or behind.deviation is None or num_seeds[index] < LEAST_SEEDS:
            return False
        return ahead.mean - behind.mean > ahead.deviation + behind.deviation

    if num_seeds[best] < LEAST_SEEDS or not all(
        is_clear(index) for index in known if index != best
    ):
        return list(cells)
    return [cell._replace(best=index == best) for index, cell in enumerate(cells)]


def _spread(cell: Cell) -> Spread:
    assert cell.spread is not None
    return cell.spread


def is_ascending(metric: str) -> bool:
    """Tell whether more of a metric is known to be better."""
    return metric.lower().startswith(tuple(word.lower() for word in ASCENDING))


def evaluation_tables(arms: Sequence[Arm], prefix: str = "") -> list[Table]:
    """Make a table for each source of data: arms in rows, quantities in columns."""
    tables = []
    found = measures(arms)
    for data in dict.fromkeys(measure.data for measure in found):
        columns = [measure for measure in found if measure.data == data]
        tables.append(_table(arms, columns, data, prefix))
    return tables


def _table(arms: Sequence[Arm], columns: Sequence[Measure], data: str, prefix: str) -> Table:
    num_seeds = [len(arm.seeds) for arm in arms]
    by_column = [
        with_best([summary(arm, measure) for arm in arms], num_seeds, is_ascending(measure.metric))
        for measure in columns
    ]
    rows = [
        Row(arm.name, tuple(cells), arm.place, note=count(arm))
        for arm, cells in zip(arms, zip(*by_column, strict=True), strict=True)
    ]
    printed = published_rows(arms, columns)
    name = PurePath(data).name or data
    return Table(
        key=f"{prefix}evaluations-{name}",
        title=f"Evaluations on {name}",
        corner="arm",
        columns=tuple(titles(columns)),
        rows=(*rows, *printed),
        caption="Per cent; mean ± sample deviation over seeds" + f". {CAVEAT}" * bool(printed),
        details=tuple(measure.sizes for measure in columns),
    )


def count(arm: Arm) -> str:
    """Say how many runs an arm has, and if they share seeds."""
    runs, seeds = len(arm.runs), len(arm.seeds)
    return f"n = {runs}" + (f", of {seeds} different seeds" if seeds < runs else "")


def published_rows(arms: Sequence[Arm], columns: Sequence[Measure]) -> list[Row]:
    """Return what the paper printed for these quantities, a row for each method and table."""
    kappas = {arm.config.divergence.num_subnetworks for arm in arms if arm.config.divergence.weight}
    cells: dict[tuple[str, str, str], dict[int, float]] = {}
    for index, measure in enumerate(columns):
        asked = (measure.data, measure.protocol, measure.variant, measure.metric)
        for entry in beside(*asked, num_subnetworks=kappas):
            method = entry.method
            if entry.num_subnetworks is not None:
                method += f", κ = {entry.num_subnetworks}"
            where = f"the paper's {entry.table} ({entry.conditions})"
            cells.setdefault((method, entry.table, where), {})[index] = entry.value
    return [
        Row(
            method,
            tuple(
                Cell(text=f"{printed[i]:.1f}" if i in printed else "") for i in range(len(columns))
            ),
            is_published=True,
            note=where,
        )
        for (method, _, where), printed in cells.items()
    ]


def quickstart_tables(arms: Sequence[Arm]) -> list[Table]:
    """Make a table of every run of the quickstart, which has a comparison of its own."""
    tables = []
    for run in (run for arm in arms for run in arm.runs if "quickstart" in run.result):
        rows = []
        for line in run.result["quickstart"]:
            few = Spread(line["few_labels"], line["few_labels_deviation"], line["few_labels_draws"])
            cells = (
                Cell(Spread(line["linear"], None, 1)),
                Cell(few, over="draws of the labels"),
                Cell(Spread(line["knn"], None, 1)),
            )
            rows.append(Row(line["features"], cells))
        columns = ("linear, all labels", "linear, 5 labels per class", "kNN (k=20)")
        title = f"{run.name}: features compared"
        caption = "Per cent of the test digits; the deviation is over draws of the labels"
        key = f"quickstart-{run.name}"
        tables.append(Table(key, title, "features", columns, tuple(rows), caption))
    return tables
