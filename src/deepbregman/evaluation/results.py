"""Accuracies, the rows that every protocol writes, in one schema, and the predictions behind them.

A row is one number: of a protocol, a variant of it, a source and a metric.

==================  ===================================================================
``protocol``        such as ``knn``
``variant``         of the protocol, such as ``cosine, k=20``
``data``            the dataset of the evaluation
``metric``          ``top1``, ``top5``, ``balanced``, ...
``value``           the mean over seeds, in per cent
``deviation``       the sample standard deviation over seeds (divisor n - 1); None for one
``values``          the value of each seed
``n``               the number of values: 1 where nothing depends on the seed
``seed``            the first seed; the others follow it
``num_train``       labelled images that the classifier learned from
``num_test``        test images, used once
``data_changed``    whether the run's own images have changed since pretraining; None for other
                    data, or where it is not known
``details``         the settings of the variant: its budget and grids
``chosen``          what each seed chose on held-out training images
``chance``          of ``knn`` and ``linear``: always answering with the most frequent class
``raw_pixels``      of ``knn`` and ``linear``: the same kind of classifier on the pixels themselves
``epoch``           at which the encoder was saved
``epochs``          of its pretraining, as configured
``device``          of the evaluation
``seconds``         that all variants of the protocol took together, with the features if it was
                    the first to need them; only of ``evaluate``
``finished``        when
==================  ===================================================================

``RUN/predictions.json`` holds the predicted class of every test image, for each dataset and
variant, packed to a few kilobytes. With it an interval can count the sampling of the test images,
and not that of seeds alone.

::

    {"cifar10": {"epoch": 200.0, "labels": "...", "classes": ["airplane", ...],
                 "predicted": {"linear, cached features": ["..."]}}}    a text for each seed
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepbregman.errors import UserError
from deepbregman.files import read_json
from deepbregman.runs import Record, Run
from deepbregman.statistics import summarise

PREDICTIONS = "predictions.json"
_SHAPE = {...: {"epoch": float, "labels": str, "classes": [str], "predicted": {...: [str]}}}


def top_k_accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    """Return how often the label (n,) is among the k largest logits (n, C)."""
    hits = logits.topk(k, dim=1).indices == labels.to(logits.device)[:, None]  # (n, k)
    return 100.0 * hits.any(dim=1).double().mean().item()


def balanced_accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Return the mean over the classes present of the share of each that is predicted right."""
    labels = labels.to(predicted.device)
    sizes = torch.bincount(labels)
    right = torch.bincount(labels[predicted == labels], minlength=len(sizes))
    recalls = (right / sizes.double())[sizes > 0]
    return 100.0 * recalls.mean().item()


def measure_accuracies(
    labels: Tensor, *, predicted: Tensor, logits: Tensor | None = None, balanced: bool = False
) -> dict[str, float]:
    """Measure ``top1``; ``top5`` from logits of 6 classes or more; ``balanced`` where asked for."""
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
    details: Record = field(default_factory=dict)
    chosen: Record = field(default_factory=dict)
    predicted: str = ""
    """The class of each test image, as :func:`pack` writes it; empty where not kept."""


def make_rows(seeds: Sequence[Sequence[Measurement]]) -> list[Record]:
    """Make a row for each variant and metric; each seed has the same variants in one order."""
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
                    "details": first.details,
                    "chosen": [one.chosen for one in repeated],
                    # Once for a variant; the evaluation moves it to a file of its own.
                    **({"predicted": predicted} if place == 0 and all(predicted) else {}),
                }
            )
    return rows


def record_rows(run: Run, rows: Sequence[Record]) -> None:
    """Write rows into the run's result, in place of older ones of the same kind or another epoch.

    All metrics of a variant are replaced together, so that they always come from one evaluation.
    """

    def kind(row: Record) -> tuple[str, ...]:
        # Two folders that ood is measured against may have one name.
        against = str((row.get("details") or {}).get("against") or "").rstrip("/")
        return row["protocol"], row["variant"], row["data"], against

    fresh = {kind(row) for row in rows}
    with run.edit_record() as result:
        older = [
            row
            for row in run.evaluations()
            if kind(row) not in fresh and row["epoch"] == rows[0]["epoch"]
        ]
        result["evaluations"] = [*older, *rows]


Classes = npt.NDArray[np.uint16]


def pack(classes: Tensor) -> str:
    """Write class numbers (N,), below 2^16, as text."""
    numbers = classes.cpu().numpy().astype("<u2")
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode()


def unpack(text: str) -> Classes:
    """Read what :func:`pack` wrote."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2")


class Predictions(NamedTuple):
    """The predictions of a variant for the test images of a dataset."""

    labels: Classes
    predicted: list[Classes]
    """One array for each seed of the evaluation."""
    classes: tuple[str, ...]
    """Names, where they are known."""


def take_predictions(rows: Sequence[Record]) -> dict[tuple[str, str], list[str]]:
    """Remove predictions from complete rows, and return them by dataset and variant."""
    found = {}
    for row in rows:
        texts = row.pop("predicted", None)
        if texts:
            found[str(row["data"]), f"{row['protocol']}, {row['variant']}"] = texts
    return found


def record_predictions(
    run: Run,
    predicted: dict[tuple[str, str], list[str]],
    labels: str,
    classes: Sequence[str] | None,
    epoch: float,
) -> None:
    """Write what :func:`take_predictions` found, in place of what is older or of another epoch."""
    with run.edit_record(PREDICTIONS) as record:
        for (data, variant), texts in predicted.items():
            part = record.get(data)
            if part is None or (part["epoch"], part["labels"]) != (epoch, labels):
                names = list(classes or ())
                part = {"epoch": epoch, "labels": labels, "classes": names, "predicted": {}}
                record[data] = part
            part["predicted"][variant] = texts


class KeptPredictions:
    """The predictions that a run's folder holds; the file is read when first asked for."""

    def __init__(self, run: Run) -> None:
        self.path = run.path / PREDICTIONS

    @cached_property
    def record(self) -> Record:
        """The content of the file; empty if there is none."""
        return read_json(self.path, _SHAPE) if self.path.is_file() else {}

    def find(self, data: str, variant: str) -> Predictions | None:
        """Return what a variant (``linear, cached features``) predicted; None if it is not kept."""
        part = self.record.get(data) or {}
        texts = (part.get("predicted") or {}).get(variant)
        if texts is None:
            return None
        try:
            labels, classes = unpack(part["labels"]), tuple(part.get("classes") or ())
            found = Predictions(labels, list(map(unpack, texts)), classes)
            if any(len(predicted) != len(labels) for predicted in found.predicted):
                raise ValueError("there are not as many predictions as labels")
        except (KeyError, ValueError, zlib.error) as error:
            words = f"{self.path} cannot be used ({error}): restore it or remove it"
            raise UserError(words) from None
        return found
