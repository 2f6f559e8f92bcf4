"""What a search leaves behind: every trial, the best configuration, and what mattered."""

import shlex
import warnings
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from deepbregman.config import Config, override, to_toml
from deepbregman.runs import Record, now, replacing, write_csv, write_json

from .workers import CONTINUES, SURPLUS, TAKEN

LEAST_FOR_IMPORTANCE = 4


def trial_rows(study: optuna.Study) -> list[Record]:
    """Return a row for every trial that was ever begun."""
    return [
        _row(trial)
        for trial in study.get_trials(deepcopy=False)
        if SURPLUS not in trial.user_attrs and trial.state != TrialState.WAITING
    ]


def _row(trial: FrozenTrial) -> Record:
    reported = trial.intermediate_values
    seconds = trial.duration.total_seconds() if trial.duration else None
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.value if trial.state == TrialState.COMPLETE else None,
        "last_knn": reported[max(reported)] if reported else None,
        "last_epoch": max(reported) if reported else None,
        "diverged": bool(trial.user_attrs.get("diverged")),
        "continues": trial.user_attrs.get(CONTINUES),
        "seconds": seconds,
        "values": dict(trial.params),
    }


def importance(study: optuna.Study) -> dict[str, float] | None:
    """Return each field's share of the variance of the values, by functional ANOVA.

    None of too few trials, or of trials that all came to the same.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < LEAST_FOR_IMPORTANCE:
        return None
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of degenerate trees, on a handful of trials
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except (RuntimeError, ValueError):
        return None


def write_trials(folder: Path, study: optuna.Study, definition: Record) -> Record:
    """Write ``trials.json`` and ``trials.csv``.

    Returns:
        What is in ``trials.json``: enough to draw the search.
    """
    rows = trial_rows(study)
    record = {
        **{key: value for key, value in definition.items() if key != "base"},
        "num_counted": len(study.get_trials(deepcopy=False, states=TAKEN)),
        "importance": importance(study),
        "best": _best(rows),
        "trials": rows,
        "written": now(),
    }
    write_json(folder / "trials.json", record)
    flat = [{k: v for k, v in row.items() if k != "values"} | row["values"] for row in rows]
    write_csv(folder / "trials.csv", flat)
    return record


def _best(rows: list[Record]) -> Record | None:
    complete = [row for row in rows if row["value"] is not None and not row["diverged"]]
    return max(complete, key=lambda row: (row["value"], -row["trial"]), default=None)


def write_best(folder: Path, recipe: Config, record: Record) -> Path | None:
    """Write ``best.toml``: the recipe with the values of the best trial, ready to train.

    Args:
        folder: of the search.
        recipe: as it was before the search held images out of it.
        record: of :func:`write_trials`.
    """
    best = record["best"]
    if best is None:
        return None
    path = folder / "best.toml"
    command = shlex.join(" ".join(word.splitlines()) for word in record["command"])
    values = ", ".join(f"{name} = {value}" for name, value in best["values"].items())
    header = (
        f"# {record['recipe']}, searched over {', '.join(record['space'])}.\n"
        f"# Search:   {command}\n"
        f"# Command:  deepbregman pretrain {path}\n"
        f"# Expected: {record['objective']} {best['value']:.2f} % on held-out training images of "
        f"{record['data']}, one seed: trial {best['trial']},\n"
        f"#           the best of {record['num_counted']} and so an optimistic value.\n"
        f"# Found:    {values}.\n"
    )
    with replacing(path) as file:
        file.write((header + "\n" + to_toml(override(recipe, best["values"]))).encode())
    return path
