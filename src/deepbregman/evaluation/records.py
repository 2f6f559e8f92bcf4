"""Rows of an application's measurements, in the schema of the protocols' own."""

import statistics
from collections.abc import Sequence
from typing import Any

from deepbregman.data import Split
from deepbregman.runs import Record, now
from deepbregman.training.processes import device_name

from .galleries import Setting


def spread(values: Sequence[float]) -> Record:
    """Return a row's value over its repetitions: mean, deviation (None of one), values, n."""
    return {
        "value": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
        "n": len(values),
    }


def keep_rows(
    setting: Setting, rows: list[Record], splits: dict[str, Split], **details: Any
) -> list[Record]:
    """Complete rows with what they were measured on, and write them into the run's result.

    They take the place of older rows of the same kind, and of all rows of other epochs.

    Args:
        setting: of the measurement.
        rows: with ``protocol``, ``variant``, ``metric``, and what :func:`spread` returns.
        splits: that were measured on.
        details: more for every row.
    """
    sizes = {
        f"num_{name}": len(splits[name]) if name in splits else 0 for name in ("train", "test")
    }
    rows = [
        {
            **row,
            "data": setting.data,
            "epoch": setting.epoch,
            "epochs": setting.config.training.epochs,
            **sizes,
            **details,
            "device": device_name(setting.device),
            "finished": now(),
        }
        for row in rows
    ]

    def kind(row: Record) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("protocol", "variant", "metric", "data", "split"))

    fresh = {kind(row) for row in rows}
    older = [
        row
        for row in setting.run.evaluations()
        if kind(row) not in fresh and row["epoch"] == setting.epoch
    ]
    setting.run.add_result(evaluations=[*older, *rows])
    return rows
