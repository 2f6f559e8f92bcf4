"""The one schema in which every protocol's results are written.

A row is one number: of a protocol, a variant of it, a source and a metric.

==================  ===================================================================
``protocol``        such as ``knn``
``variant``         the arm, such as ``cosine, k=20``
``data``            the source it was judged on
``metric``          ``top1``, ``top5``, ``balanced``, ...
``value``           the mean over seeds, in per cent
``deviation``       the sample standard deviation over seeds (divisor n - 1); None for one
``values``          the value of each seed
``n``               how many: 1 where the seed cannot matter, however many were asked for
``seed``            the first seed; the others follow it
``num_train``       labelled images that the classifier learned from
``num_test``        images it was judged on, once
``num_replaced``    unreadable images among them that others stood in for
``details``         what the variant was told: its budget and grids
``chosen``          what each seed chose by itself on images held out of training
``epoch``           that the encoder was saved at
``epochs``          that its pretraining was to have
``device``          on which it was judged
``finished``        when
==================  ===================================================================
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepbregman.config import Config
from deepbregman.runs import Record, Run, now
from deepbregman.training.processes import device_name


@dataclass(frozen=True)
class Measured:
    """One arm of a protocol, with one seed."""

    variant: str
    values: dict[str, float]
    """Metric -> per cent."""
    num_train: int
    num_test: int
    num_replaced: int = 0
    details: Record = field(default_factory=dict)
    chosen: Record = field(default_factory=dict)


def rows_of(seeds: Sequence[Sequence[Measured]]) -> list[Record]:
    """Make a row of each arm and metric.

    Args:
        seeds: for each seed the same arms, in the same order.
    """
    rows = []
    for arms in zip(*seeds, strict=True):
        first = arms[0]
        assert all(arm.variant == first.variant for arm in arms)
        for metric in first.values:
            values = [arm.values[metric] for arm in arms]
            rows.append(
                {
                    "variant": first.variant,
                    "metric": metric,
                    "value": statistics.fmean(values),
                    "deviation": statistics.stdev(values) if len(values) > 1 else None,
                    "values": values,
                    "n": len(values),
                    "num_train": first.num_train,
                    "num_test": first.num_test,
                    "num_replaced": max(arm.num_replaced for arm in arms),
                    "details": first.details,
                    "chosen": [arm.chosen for arm in arms],
                }
            )
    return rows


def stamped(
    rows: Sequence[Record],
    *,
    protocol: str,
    data: str,
    seed: int,
    epoch: float,
    config: Config,
    device: torch.device,
) -> list[Record]:
    """Complete rows with what is the same for all of a protocol's.

    Args:
        rows: of :func:`rows_of`.
        protocol: its name.
        data: the source that was judged on.
        seed: the first.
        epoch: that the encoder was saved at.
        config: of the run.
        device: that it was judged on.
    """
    return [
        {
            "protocol": protocol,
            "data": data,
            **row,
            "seed": seed,
            "epoch": epoch,
            "epochs": config.training.epochs,
            "device": device_name(device),
            "finished": now(),
        }
        for row in rows
    ]


def keep(run: Run, rows: Sequence[Record]) -> None:
    """Write rows beside those that are there, in place of older ones of the same kind or epoch.

    All metrics of a variant are replaced together, so that they always come from one evaluation.
    """

    def kind(row: Record) -> tuple[str, ...]:
        return row["protocol"], row["variant"], row["data"]

    fresh = {kind(row) for row in rows}
    with run.changing() as result:
        older = [
            row
            for row in run.evaluations()
            if kind(row) not in fresh and row["epoch"] == rows[0]["epoch"]
        ]
        result["evaluations"] = [*older, *rows]
