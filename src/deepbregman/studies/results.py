"""The cells of a study, gathered: every value, and mean, deviation and number by arm."""

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from deepbregman.runs import Record, now, replacing, write_json

from .cells import Cell

MAIN_METRIC = "linear, cached features"


def summarise(values: Sequence[float]) -> Record:
    """Return mean, sample deviation (None of a single value) and number."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation, "n": len(values)}


def gather(cells: Iterable[Cell]) -> list[Record]:
    """Return a row for every cell that is done, in their order."""
    rows = []
    for cell in cells:
        outcome = cell.outcome()
        if outcome is not None:
            shown = {"arm": cell.arm.name, "series": cell.arm.series, "x": cell.arm.x}
            rows.append({**shown, "seed": cell.seed, "run": cell.name, **outcome})
    return rows


def by_arm(rows: Sequence[Record]) -> list[Record]:
    """Summarise every metric of every arm over its seeds, in the order of the rows.

    A seed whose training diverged has no accuracy; the arm says how many there are.
    """
    names = dict.fromkeys(row["arm"] for row in rows)
    summary = []
    for name in names:
        mine = [row for row in rows if row["arm"] == name]
        metrics = dict.fromkeys(metric for row in mine for metric in row["metrics"])
        summary.append(
            {
                **{key: mine[0][key] for key in ("arm", "series", "x")},
                "num_diverged": sum(row["state"] == "diverged" for row in mine),
                "metrics": {
                    metric: summarise(
                        [row["metrics"][metric] for row in mine if metric in row["metrics"]]
                    )
                    for metric in metrics
                },
            }
        )
    return summary


def lost(rows: Sequence[Record], metric: str) -> dict[str, Record]:
    """Summarise what each arm loses against the first of its series, seed by seed.

    Pairing by seed takes out what the seed alone does; arms without a common seed are left out.
    """
    first: dict[str, str] = {}
    values: dict[str, dict[int, float]] = {}
    series = {row["arm"]: row["series"] for row in rows}
    for row in rows:
        first.setdefault(row["series"], row["arm"])
        if metric in row["metrics"]:
            values.setdefault(row["arm"], {})[row["seed"]] = row["metrics"][metric]
    summary = {}
    for arm, mine in values.items():
        base = values.get(first[series[arm]], {})
        paired = [value - base[seed] for seed, value in mine.items() if seed in base]
        if paired:
            summary[arm] = summarise(paired)
    return summary


def write_csv(path: Path, rows: Sequence[Record]) -> None:
    """Write flat rows, which need not have the same columns, as CSV."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def write_results(folder: Path, definition: Record, cells: Sequence[Cell]) -> Record:
    """Write ``results.json``, ``results.csv`` and ``summary.csv``.

    Args:
        folder: of the study.
        definition: what ``study.json`` holds.
        cells: all that the study can have; those not done are left out.

    Returns:
        What is in ``results.json``: enough to draw the table and the figure.
    """
    rows = gather(cells)
    summary = by_arm(rows)
    if definition["study"]["figure"] == "drops":
        losses = lost(rows, MAIN_METRIC)
        summary = [{**arm, "lost": losses.get(arm["arm"])} for arm in summary]
    results = {
        **{key: definition[key] for key in ("study", "recipe", "data", "epochs", "judge")},
        "metric": MAIN_METRIC,
        "arms": summary,
        "cells": rows,
        "written": now(),
    }
    write_json(folder / "results.json", results)
    flat = [
        {key: row[key] for key in ("arm", "series", "x", "seed", "state", "run")} | row["metrics"]
        for row in rows
    ]
    write_csv(folder / "results.csv", flat)
    long = [
        {**{key: arm[key] for key in ("arm", "series", "x")}, "metric": metric, **values}
        for arm in summary
        for metric, values in arm["metrics"].items()
    ]
    write_csv(folder / "summary.csv", long)
    return results
