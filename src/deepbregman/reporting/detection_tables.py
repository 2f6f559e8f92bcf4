"""What pretraining adds to detectors: those from a run's weights minus those from random ones."""

from collections.abc import Iterable, Sequence

from deepbregman.runs import Record
from deepbregman.statistics import Summary, summarise_pairs

from .records import Measure, RunGroup, is_finite, name_datasets
from .tables import Row, Table, count_seeds, make_cell, name_measures


def compare_trunks(runs: Iterable[Sequence[Record]]) -> dict[Measure, Summary]:
    """Return the differences in points, paired by seed, of the evaluations of each run.

    Two detectors of one seed and the same settings differ in the weights of their trunks alone. Of
    several runs each counts once, with the mean over its seeds. Where these have the same seeds,
    so the same random networks, the interval is of the pretraining alone.
    """
    found: dict[Measure, list[Summary]] = {}
    for rows in runs:
        known = {Measure.of(row): row for row in rows if row["protocol"] == "detect"}
        for measure, row in known.items():
            architecture, _, trunk = measure.variant.partition(", ")
            other = known.get(measure._replace(variant=f"{architecture}, random"))
            if trunk != "pretrained" or other is None or _settings(row) != _settings(other):
                continue
            pair = summarise_pairs(_by_seed(row), _by_seed(other))
            if pair is not None:
                difference = measure._replace(variant=f"{measure.variant} - random")
                found.setdefault(difference, []).append(pair)
    return {measure: _summarise_runs(pairs) for measure, pairs in found.items()}


def _settings(row: Record) -> Record:
    return {**(row.get("details") or {}), "num_loaded": None}  # which tells the trunks apart


def _by_seed(row: Record) -> dict[int, float]:
    values = enumerate(row.get("values") or [], start=row.get("seed") or 0)
    return {seed: value for seed, value in values if is_finite(value)}


def _summarise_runs(pairs: Sequence[Summary]) -> Summary:
    if len(pairs) == 1:
        return pairs[0]
    means = {place: pair["mean"] for place, pair in enumerate(pairs)}
    over_runs = summarise_pairs(means, dict.fromkeys(means, 0.0))  # for the interval of their mean
    assert over_runs is not None  # there are runs
    return over_runs


def tabulate_trunks(groups: Sequence[RunGroup], prefix: str = "") -> list[Table]:
    """Make a table of the differences for each dataset: arms in rows, quantities in columns."""
    found = [compare_trunks(run.evaluations for run in group.runs) for group in groups]
    measures, names = dict.fromkeys(m for known in found for m in known), name_datasets(groups)
    tables = []
    for data in dict.fromkeys(measure.data for measure in measures):
        columns = [measure for measure in measures if measure.data == data]
        rows = tuple(
            Row(group.name, tuple(make_cell(known.get(m)) for m in columns), group.place)
            for group, known in zip(groups, found, strict=True)
            if not known.keys().isdisjoint(columns)
        )
        caption = (
            "Differences in points: mean ± sample deviation over the seeds of a run, or over "
            f"several runs ({count_seeds(rows)}), and the 95 % interval of the mean by "
            "Student's t, for these test images"
        )
        tables.append(
            Table(
                key=f"{prefix}detection-{names[data]}",
                title=f"Detection on {names[data]}: pretrained - random",
                corner="arm",
                columns=tuple(name_measures(columns)),
                rows=rows,
                caption=caption,
                details=tuple(measure.sizes for measure in columns),
            )
        )
    return tables
