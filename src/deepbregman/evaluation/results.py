"""Accuracies, and the rows that every protocol writes, in one schema.

A row is one number: of a protocol, a variant of it, a source and a metric.

==================  ===================================================================
``protocol``        such as ``knn``
``variant``         of the protocol, such as ``cosine, k=20``
``data``            the dataset of the evaluation
``metric``          ``top1``, ``top5``, ``balanced``, ...
``value``           the mean over seeds, in per cent
``deviation``       the sample standard deviation over seeds (divisor n - 1); None for one
``values``          the value of each seed
``n``               how many: 1 where the seed cannot matter, however many were asked for
``seed``            the first seed; the others follow it
``num_train``       labelled images that the classifier learned from
``num_test``        test images, used once
``data_changed``    whether the run's own images have changed since pretraining; None for other
                    data, or where it is not known
``num_replaced``    unreadable images among them that others replaced
``details``         the settings of the variant: its budget and grids
``chosen``          what each seed chose on held-out training images
``chance``          of ``knn`` and ``linear``: who always answers with the most frequent class
``raw_pixels``      of ``knn`` and ``linear``: the same kind of classifier on the pixels themselves
``epoch``           at which the encoder was saved
``epochs``          of its pretraining, as configured
``device``          of the evaluation
``finished``        when
==================  ===================================================================
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from deepbregman.errors import Notice, UserError
from deepbregman.files import check_writable, refuse_link
from deepbregman.runs import Record, Run
from deepbregman.statistics import summarise


def top_k_accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    """Return how often the label (n,) is among the k largest logits (n, C)."""
    hits = logits.topk(k, dim=1).indices == labels.to(logits.device)[:, None]  # (n, k)
    return 100.0 * hits.any(dim=1).double().mean().item()


def balanced_accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Return the mean over the classes present of the share of each that is predicted right."""
    from sklearn.metrics import recall_score

    truth = labels.cpu().numpy()
    recall = recall_score(truth, predicted.cpu().numpy(), labels=np.unique(truth), average="macro")
    return 100.0 * float(recall)


def accuracies(
    labels: Tensor, *, predicted: Tensor, logits: Tensor | None = None, balanced: bool = False
) -> dict[str, float]:
    """Measure ``top1``; ``top5`` from logits of 6 classes or more; ``balanced`` where asked for.

    Args:
        logits: (n, C), or None where only the winner is known.
    """
    values = {"top1": 100.0 * (predicted == labels.to(predicted.device)).double().mean().item()}
    if logits is not None and logits.shape[1] > 5:
        values["top5"] = top_k_accuracy(logits, labels, 5)
    if balanced:
        values["balanced"] = balanced_accuracy(predicted, labels)
    return values


@dataclass(frozen=True)
class Measurement:
    """The result of one variant of a protocol with one seed."""

    variant: str
    values: dict[str, float]
    """Metric -> per cent."""
    num_train: int
    num_test: int
    num_replaced: int = 0
    details: Record = field(default_factory=dict)
    chosen: Record = field(default_factory=dict)
    predicted: str = ""
    """The class of each test image, as ``predictions.pack`` writes it; empty where not kept."""


def make_rows(seeds: Sequence[Sequence[Measurement]]) -> list[Record]:
    """Make a row for each variant and metric.

    Args:
        seeds: for each seed the same variants, in the same order.
    """
    rows = []
    for repeated in zip(*seeds, strict=True):
        first = repeated[0]
        assert all(one.variant == first.variant for one in repeated)
        predicted = [one.predicted for one in repeated]
        for place, metric in enumerate(first.values):
            values = [one.values[metric] for one in repeated]
            summary = summarise(values)
            rows.append(
                {
                    "variant": first.variant,
                    "metric": metric,
                    "value": summary["mean"],
                    "deviation": summary["deviation"],
                    "values": values,
                    "n": summary["n"],
                    "num_train": first.num_train,
                    "num_test": first.num_test,
                    "num_replaced": max(one.num_replaced for one in repeated),
                    "details": first.details,
                    "chosen": [one.chosen for one in repeated],
                    # Once for a variant; the evaluation moves it to a file of its own.
                    **({"predicted": predicted} if place == 0 and all(predicted) else {}),
                }
            )
    return rows


def can_record(run: Run) -> bool:
    """Whether the run's folder can be written to; if not, print a note.

    A link in place of the lock of its records is an error, before the work begins.
    """
    refuse_link(run.path / ".records.lock")
    try:
        check_writable(run.path)
    except UserError:
        words = f"{run.path} cannot be written to: results are printed, not recorded"
        warnings.warn(words, Notice, stacklevel=3)
        return False
    return True


def record_rows(run: Run, rows: Sequence[Record]) -> None:
    """Write rows into the run's result, in place of older ones of the same kind or another epoch.

    All metrics of a variant are replaced together, so that they always come from one evaluation.
    """

    def kind(row: Record) -> tuple[str, ...]:
        return row["protocol"], row["variant"], row["data"]

    fresh = {kind(row) for row in rows}
    with run.edit_record() as result:
        older = [
            row
            for row in run.evaluations()
            if kind(row) not in fresh and row["epoch"] == rows[0]["epoch"]
        ]
        result["evaluations"] = [*older, *rows]
