"""The cells of a study, gathered: every value, its summary by arm, differences and costs."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepbregman.runs import Record, Run, now, write_csv, write_json

from .cells import Cell

MAIN_METRIC = "linear, cached features"
CONFIDENCE = 0.95
"""That an interval holds the mean difference."""


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


def paired(mine: Mapping[int, float], reference: Mapping[int, float]) -> Record | None:
    """Summarise the differences to a reference seed by seed; None without a common seed.

    Pairing takes out what the seed alone does. ``interval`` holds the mean difference with 95 %
    confidence, by Student's t with n - 1 degrees of freedom; None of a single seed.

    Args:
        mine: value by seed.
        reference: value by seed.
    """
    from scipy.special import stdtrit

    changes = [value - reference[seed] for seed, value in mine.items() if seed in reference]
    if not changes:
        return None
    summary = summarise(changes)
    interval = None
    if summary["deviation"] is not None:
        quantile = float(stdtrit(len(changes) - 1, (1.0 + CONFIDENCE) / 2.0))
        margin = quantile * summary["deviation"] / math.sqrt(len(changes))
        interval = [summary["mean"] - margin, summary["mean"] + margin]
    return {**summary, "interval": interval}


def references(study: Record) -> dict[str, str]:
    """Name the arm that each other is seen against.

    It is the study's reference or, in a figure of drops, the first arm of the same series.

    Args:
        study: its definition.
    """
    first: dict[str, str] = {}
    for arm in study["arms"]:
        first.setdefault(arm["series"], arm["name"])
    drops = study["figure"] == "drops"
    against = {
        arm["name"]: first[arm["series"]] if drops else study["reference"] for arm in study["arms"]
    }
    return {arm: other for arm, other in against.items() if other not in (None, arm)}


def differences(rows: Sequence[Record], against: Mapping[str, str]) -> dict[str, Record]:
    """Compare every metric of every arm with its reference's, seed by seed.

    Args:
        rows: of the cells.
        against: arm -> its reference.

    Returns:
        Arm -> metric -> mean, deviation, n and interval of the differences.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        for metric, value in row["metrics"].items():
            values.setdefault(row["arm"], {}).setdefault(metric, {})[row["seed"]] = value
    found = {
        arm: {
            metric: paired(mine, values.get(other, {}).get(metric, {}))
            for metric, mine in values.get(arm, {}).items()
        }
        for arm, other in against.items()
    }
    return {arm: {m: part for m, part in parts.items() if part} for arm, parts in found.items()}


def costs(cells: Iterable[Cell]) -> dict[str, Record]:
    """Say what the training of each arm that needs no labels took, by its settings and its runs.

    ``samples_per_step`` counts views, over all batches of an optimiser step; ``seconds`` is the
    wall time of training, whatever else the machine did.
    """
    summary: dict[str, Record] = {}
    seconds: dict[str, list[float]] = {}
    for cell in cells:
        if cell.arm.supervised is not None or cell.outcome() is None:
            continue
        settings, views = cell.config.training, cell.config.views.num_views
        cost = summary.setdefault(
            cell.arm.name,
            {
                "encoder": cell.config.encoder.name,
                "epochs": settings.epochs,
                "views_per_image": views,
                "view_size": cell.config.view_size,
                "samples_per_step": settings.batch_size * settings.accumulate * views,
                "steps": None,
                "seconds": None,
            },
        )
        trained = Run.open(cell.folder).result().get("pretrain")  # none of a run that diverged
        if trained:
            seconds.setdefault(cell.arm.name, []).append(trained["seconds"])
            cost |= {"steps": trained["step"], "seconds": summarise(seconds[cell.arm.name])}
    return summary


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
    against, cost = references(definition["study"]), costs(cells)
    changes = differences(rows, against)
    summary = [
        {
            **arm,
            "against": against.get(arm["arm"]),
            "difference": changes.get(arm["arm"], {}),
            "cost": cost.get(arm["arm"]),
        }
        for arm in by_arm(rows)
    ]
    results = {
        **{key: definition[key] for key in ("study", "recipe", "data", "epochs", "judge")},
        "unequal_budget": definition["unequal_budget"],
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
    write_csv(folder / "summary.csv", [line for arm in summary for line in _lines(arm)])
    return results


def _lines(arm: Record) -> list[Record]:
    """Flatten an arm to a line for each metric, or one without where every seed diverged."""
    start = {key: arm[key] for key in ("arm", "series", "x", "num_diverged")}
    lines = []
    for metric, values in arm["metrics"].items():
        change = arm["difference"].get(metric, {})
        low, high = change.get("interval") or (None, None)
        lines.append(
            {
                **start,
                "metric": metric,
                **values,
                "against": arm["against"],
                "difference": change.get("mean"),
                "difference_deviation": change.get("deviation"),
                "difference_n": change.get("n"),
                "difference_low": low,
                "difference_high": high,
            }
        )
    return lines or [start]
