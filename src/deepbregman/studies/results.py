"""The results of a study: every value, its summary by arm, and differences to the reference."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deepbregman.errors import UserError
from deepbregman.files import check_new_folder, now, write_csv, write_json
from deepbregman.reporting.grid_charts import CONTROLS, OURS
from deepbregman.reporting.grid_tables import save_study_tables
from deepbregman.reporting.screen import (
    draw_main_quantities,
    draw_outcome,
    draw_study_tables,
    draw_trials,
)
from deepbregman.runs import Record
from deepbregman.statistics import interval_over_images, summarise, summarise_pairs
from deepbregman.terminal import count_words, say

from .definition import ALONE, StudyResult

if TYPE_CHECKING:
    from deepbregman.evaluation.results import Predictions  # loads torch, which takes seconds

MAIN_METRIC = "linear, cached features"
FindPredictions = Callable[[str, int, str], "Predictions | None"]
"""Finds what an arm with a seed predicted, by the name of the metric; None where it is not kept."""


def summarise_arms(rows: Sequence[Record]) -> list[Record]:
    """Summarise every metric of every arm over its seeds; diverged seeds are only counted."""
    arms: dict[str, list[Record]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    summary = []
    for name, mine in arms.items():
        values: dict[str, list[float]] = {}
        for row in mine:
            for metric, value in row["metrics"].items():
                values.setdefault(metric, []).append(value)
        summary.append(
            {
                "arm": name,
                "series": mine[0]["series"],
                "x": mine[0]["x"],
                "num_diverged": sum(row["state"] == "diverged" for row in mine),
                "metrics": {metric: summarise(found) for metric, found in values.items()},
            }
        )
    return summary


def find_references(study: Record) -> dict[str, str]:
    """Return arm -> the arm it is compared with.

    That is the study's reference or, in a figure of drops, the first arm of the same series. A
    method with the divergence, or with its control, is compared with the method alone.
    """
    if study.get("with_divergence"):
        return {
            **_pair_by_method(study, OURS, ALONE),
            **_pair_by_method(study, CONTROLS, ALONE),
        }
    first: dict[str, str] = {}
    for arm in study["arms"]:
        first.setdefault(arm["series"], arm["name"])
    drops = study["figure"] == "drops"
    against = {
        arm["name"]: first[arm["series"]] if drops else study["reference"] for arm in study["arms"]
    }
    return {arm: other for arm, other in against.items() if other not in (None, arm)}


def _pair_by_method(study: Record, series: str, other: str) -> dict[str, str]:
    """Return the arms of a series, each with the arm of another series that has its method."""
    found = {arm["x"]: arm["name"] for arm in study["arms"] if arm["series"] == other}
    mine = [arm for arm in study["arms"] if arm["series"] == series]
    return {arm["name"]: found[arm["x"]] for arm in mine if arm["x"] in found}


def estimate_interval(
    pairs: Sequence[tuple["Predictions | None", "Predictions | None"]], *, balanced: bool = False
) -> list[float] | None:
    """Return the interval of a difference in points, over seeds and test images.

    Pairs are what two arms predicted with each seed. None if one is not kept, or of other images
    than the first.
    """
    import numpy as np

    changes, labels = [], None
    for mine, other in pairs:
        if mine is None or other is None:
            return None
        labels = mine.labels if labels is None else labels
        if not all(np.array_equal(labels, part.labels) for part in (mine, other)):
            return None
        right = [
            np.mean([classes == labels for classes in part.predicted], axis=0)
            for part in (mine, other)
        ]
        changes.append(100.0 * (right[0] - right[1]))
    if labels is None:
        return None
    return interval_over_images(changes, labels.tolist() if balanced else None)


def compare_arms(
    rows: Sequence[Record], against: Mapping[str, str], find: FindPredictions = lambda *_: None
) -> dict[str, Record]:
    """Compare every metric of every arm with its reference's, seed by seed.

    Returns:
        Arm -> metric -> mean, deviation, n and interval of the differences, and ``over_images``,
        the interval over seeds and test images where predictions are kept.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        for metric, value in row["metrics"].items():
            values.setdefault(row["arm"], {}).setdefault(metric, {})[row["seed"]] = value
    found: dict[str, Record] = {}
    for arm, other in against.items():
        found[arm] = {}
        for metric, mine in values.get(arm, {}).items():
            others = values.get(other, {}).get(metric, {})
            pair = summarise_pairs(mine, others)
            if pair is not None:
                predicted = [
                    (find(arm, seed, metric), find(other, seed, metric))
                    for seed in sorted(mine.keys() & others.keys())
                ]
                found[arm][metric] = {**pair, "over_images": estimate_interval(predicted)}
    return found


def write_results(
    folder: Path,
    definition: Record,
    rows: Sequence[Record],
    costs: Mapping[str, Record],
    find: FindPredictions = lambda *_: None,
) -> Record:
    """Write ``results.json``, ``results.csv`` and ``tables.md``."""
    against = find_references(definition["study"])
    changes = compare_arms(rows, against, find)
    controls = _pair_by_method(definition["study"], OURS, CONTROLS)
    over_controls = compare_arms(rows, controls, find)
    summary = [
        {
            **arm,
            "against": against.get(arm["arm"]),
            "difference": changes.get(arm["arm"], {}),
            "over_control": over_controls.get(arm["arm"], {}),
            "cost": costs.get(arm["arm"]),
        }
        for arm in summarise_arms(rows)
    ]
    results = {
        **{key: definition[key] for key in ("study", "recipe", "data", "epochs", "evaluate_on")},
        "unequal_budget": definition["unequal_budget"],
        "metric": MAIN_METRIC,
        "arms": summary,
        "cells": list(rows),
        "written": now(),
    }
    write_json(folder / "results.json", results)
    flat = [
        {key: row[key] for key in ("arm", "series", "x", "seed", "state", "run")} | row["metrics"]
        for row in rows
    ]
    write_csv(folder / "results.csv", flat)
    save_study_tables(folder / "tables.md", results)
    return results


def print_result(result: StudyResult, console: Console) -> None:
    """Print the table of a study or a search, its figures and the next command."""
    folder, results = result
    if "trials" in results:
        console.print(draw_trials(results))
    elif "quantities" in results:
        console.print(draw_main_quantities(results))
        counts = f"{len(results['runs'])} runs, {len(results['quantities'])} quantities"
        say(console, f"{counts}\ntables: {folder / 'tables.md'}")
    elif "arms" in results:
        console.print(draw_study_tables(results))
    else:
        shown = [row for row in results["rows"] if "of class" not in row["metric"]]
        console.print(draw_outcome({**results, "rows": shown}))
    for path in sorted(folder.glob("*.png")):
        say(console, f"figure: {path}")
    if results.get("best"):
        best = folder / "best.toml"
        length = count_words(results["epochs"], "epoch")
        say(console, f"best:   {best} ({length}, as in the trials; a long run needs more)")
        say(console, f"next:   deepbregman pretrain {shlex.quote(str(best))}")


# Studies that compute and draw at once, without trials.


def begin_study(out: Path, seeds: int) -> None:
    """Make the folder of a study; refuse one that is not empty, and a study without a seed."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: there must be at least 1; 3 or more give a deviation")
    check_new_folder(out)
    out.mkdir(parents=True, exist_ok=True)


def write_rows(
    out: Path,
    study: str,
    settings: Record,
    provenance: Record,
    values: Mapping[tuple[str, str], Sequence[float]],
    notes: str,
) -> StudyResult:
    """Write ``results.json`` with a row for every arm and metric, which have a value per seed."""
    results = {
        "study": study,
        "notes": notes,
        "settings": settings,
        "provenance": provenance,
        "rows": [
            {"arm": arm, "metric": metric, **summarise(found), "values": list(found)}
            for (arm, metric), found in values.items()
        ],
        "finished": now(),
    }
    write_json(out / "results.json", results)
    return StudyResult(out, results)
