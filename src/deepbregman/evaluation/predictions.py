"""The predicted class of every test image, kept beside a run's results.

``RUN/predictions.json`` holds them for each dataset and variant, packed to a few kilobytes. With
them an interval can count the sampling of the test images, and not that of seeds alone.

::

    {"cifar10": {"epoch": 200.0, "labels": "...", "classes": ["airplane", ...],
                 "predicted": {"linear, cached features": ["..."]}}}    a text for each seed
"""

import base64
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deepbregman.errors import UserError
from deepbregman.files import read_json
from deepbregman.runs import Record, Run

NAME = "predictions.json"
FIELD = "predicted"
"""Of a row, on its way from the protocol to the file."""
_SHAPE = {...: {"epoch": float, "labels": str, "classes": [str], FIELD: {...: [str]}}}

Classes = npt.NDArray[np.uint16]


def pack(classes: Tensor) -> str:
    """Write class numbers (N,), below 2^16, as text."""
    numbers = classes.cpu().numpy().astype("<u2")
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode()


def unpack(text: str) -> Classes:
    """Read what :func:`pack` wrote."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2")


class Predictions(NamedTuple):
    """What a variant predicted for the test images of a dataset."""

    labels: Classes
    predicted: list[Classes]
    """For each seed of the evaluation."""
    classes: tuple[str, ...]
    """Names, where they are known."""


def take_predictions(rows: Sequence[Record]) -> dict[tuple[str, str], list[str]]:
    """Remove predictions from complete rows, and return them by dataset and variant."""
    found = {}
    for row in rows:
        texts = row.pop(FIELD, None)
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
    """Write predictions for one dataset, in place of older ones of the variant or another epoch.

    Args:
        predicted: as :func:`take_predictions` returns them.
    """
    with run.edit_record(NAME) as record:
        for (data, variant), texts in predicted.items():
            part = record.get(data)
            if part is None or (part["epoch"], part["labels"]) != (epoch, labels):
                names = list(classes or ())
                part = {"epoch": epoch, "labels": labels, "classes": names, FIELD: {}}
                record[data] = part
            part[FIELD][variant] = texts


class KeptPredictions:
    """The predictions that a run's folder holds; the file is read when first asked for."""

    def __init__(self, run: Run) -> None:
        self.path = run.path / NAME

    @cached_property
    def record(self) -> Record:
        """What the file holds; empty where there is none."""
        return read_json(self.path, _SHAPE) if self.path.is_file() else {}

    def find(self, data: str, variant: str) -> Predictions | None:
        """Return what a variant predicted, None where that is not kept.

        Args:
            variant: protocol and variant, such as ``linear, cached features``.
        """
        part = self.record.get(data) or {}
        texts = (part.get(FIELD) or {}).get(variant)
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
