"""The results of a study: every value, its summary by arm, and differences to the reference."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from deepbregman.errors import UserError
from deepbregman.files import check_can_be_folder
from deepbregman.reporting.screen import outcome_table, study_table, trial_table
from deepbregman.runs import Record, now, write_csv, write_json
from deepbregman.statistics import summarise, summarise_pairs
from deepbregman.terminal import say

from .definition import StudyResult

MAIN_METRIC = "linear, cached features"


def summarise_arms(rows: Sequence[Record]) -> list[Record]:
    """Summarise every metric of every arm over its seeds, in the order of the rows.

    A diverged seed has no accuracy; it is only counted.
    """
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

    That is the study's reference or, in a figure of drops, the first arm of the same series.
    """
    first: dict[str, str] = {}
    for arm in study["arms"]:
        first.setdefault(arm["series"], arm["name"])
    drops = study["figure"] == "drops"
    against = {
        arm["name"]: first[arm["series"]] if drops else study["reference"] for arm in study["arms"]
    }
    return {arm: other for arm, other in against.items() if other not in (None, arm)}


def compare_arms(rows: Sequence[Record], against: Mapping[str, str]) -> dict[str, Record]:
    """Compare every metric of every arm with its reference's, seed by seed.

    Returns:
        Arm -> metric -> mean, deviation, n and interval of the differences.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        for metric, value in row["metrics"].items():
            values.setdefault(row["arm"], {}).setdefault(metric, {})[row["seed"]] = value
    found: dict[str, Record] = {}
    for arm, other in against.items():
        pairs = {
            metric: summarise_pairs(mine, values.get(other, {}).get(metric, {}))
            for metric, mine in values.get(arm, {}).items()
        }
        found[arm] = {metric: pair for metric, pair in pairs.items() if pair}
    return found


def write_results(
    folder: Path, definition: Record, rows: Sequence[Record], costs: Mapping[str, Record]
) -> Record:
    """Write ``results.json``, ``results.csv`` and ``summary.csv``."""
    against = find_references(definition["study"])
    changes = compare_arms(rows, against)
    summary = [
        {
            **arm,
            "against": against.get(arm["arm"]),
            "difference": changes.get(arm["arm"], {}),
            "cost": costs.get(arm["arm"]),
        }
        for arm in summarise_arms(rows)
    ]
    results = {
        **{key: definition[key] for key in ("study", "recipe", "data", "epochs", "judge")},
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
    write_csv(folder / "summary.csv", [line for arm in summary for line in _flatten(arm)])
    return results


def _flatten(arm: Record) -> list[Record]:
    """Make a line for each metric of an arm; one without a metric if every seed diverged."""
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


def print_result(result: StudyResult, console: Console) -> None:
    """Print the table of a study or a search, its figures and the next command."""
    folder, results = result
    if "trials" in results:
        console.print(trial_table(results))
    elif "quantities" in results:
        counts = f"{len(results['runs'])} runs, {len(results['quantities'])} quantities"
        say(console, f"{counts}\ntables: {folder / 'tables.md'}")
    elif "arms" in results:
        console.print(study_table(results))
    else:
        shown = [row for row in results["rows"] if "of class" not in row["metric"]]
        console.print(outcome_table({**results, "rows": shown}))
    for path in sorted(folder.glob("*.png")):
        say(console, f"figure: {path}")
    if results.get("best"):
        best = folder / "best.toml"
        say(console, f"best:   {best}\nnext:   deepbregman pretrain {best}")


# Studies that compute and draw at once, without trials.


def check_new_folder(out: Path) -> None:
    """Refuse a folder that is not empty, or that cannot be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"--out {out} exists and is not an empty folder: name another folder, or remove it"
        )
    check_can_be_folder(out)


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
    """Write ``results.json`` with a row for every arm and metric.

    Args:
        values: (arm, metric) -> a value for each seed.
    """
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
