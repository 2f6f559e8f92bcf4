"""Average precision of detections, in the two ways that are in use for Pascal VOC.

COCO's: 101 points of recall, at most 100 detections of a class in an image, each matched to the
best object that is still free. VOC's: each detection belongs to the object it overlaps most, and
precision is averaged over 11 points of recall (2007) or integrated (since 2010). The published
tables of VOC07+12, that of the paper among them, come from detectron2, which uses the 11 points at
every threshold for the test images of 2007: compare the metrics that end in -07 with them.

Objects marked difficult count neither as found nor as missed, in both.
"""

import contextlib
import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pycocotools import mask
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from torchvision.ops import box_iou

from deepbregman.data.voc import CLASSES, Objects
from deepbregman.errors import UserError

from .detectors import PredictedBoxes

Array = npt.NDArray[np.float64]

THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
"""Overlaps at which a detection counts as right, for AP; the first is AP50's, the sixth AP75's."""
METRICS = ("AP", "AP50", "AP75", "AP-07", "AP50-07", "AP75-07", "AP50-10")
MOST_DETECTIONS = 100


class Scores(NamedTuple):
    """How good detections are, in per cent."""

    means: dict[str, float]
    """METRICS, over the classes that have objects."""
    per_class: dict[str, float]
    """AP50 of each class that has objects."""


def score_detections(truth: Sequence[Objects], found: Sequence[PredictedBoxes]) -> Scores:
    """Measure the detections of a set of images."""
    tables = {"": coco_precision(truth, found), "-07": voc_precision(truth, found, points=11)}
    counted = ~np.isnan(tables[""][0])  # (K,)
    if not counted.any():
        raise UserError("the test images have no object to find, apart from difficult ones")
    means = {}
    for suffix, table in tables.items():
        by_threshold = 100.0 * table[:, counted].mean(axis=1)  # (T,)
        means[f"AP{suffix}"] = float(by_threshold.mean())
        means[f"AP50{suffix}"] = float(by_threshold[0])
        means[f"AP75{suffix}"] = float(by_threshold[THRESHOLDS.index(0.75)])
    means["AP50-10"] = 100.0 * float(voc_precision(truth, found)[0, counted].mean())
    per_class = {
        name: 100.0 * float(value)
        for name, value in zip(CLASSES, tables[""][0], strict=True)
        if not np.isnan(value)
    }
    return Scores(means, per_class)


class _Evaluation(COCOeval):  # type: ignore[misc]  # pycocotools is untyped
    """COCO's own matching and averaging, with difficult objects as VOC means them.

    COCO has a mark for regions that count neither as found nor as missed, ``iscrowd``, which may
    absorb any number of detections, as a difficult object does. But a crowd absorbs whatever lies
    inside it, however small; a difficult object is an ordinary one and needs an ordinary overlap.
    So the mark is used, and the overlaps are computed without it.
    """

    def __init__(self, truth: Sequence[Objects], found: Sequence[PredictedBoxes]) -> None:
        super().__init__(iouType="bbox")
        self.truth, self.found = truth, found
        self.params.imgIds = list(range(len(truth)))
        self.params.catIds = list(range(len(CLASSES)))
        self.params.iouThrs = np.array(THRESHOLDS)
        self.params.areaRng, self.params.areaRngLbl = [[0.0, float("inf")]], ["all"]
        self.params.maxDets = [MOST_DETECTIONS]

    def _prepare(self) -> None:
        self._gts: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self._dts: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        number = 0  # 0 means "not matched" to COCOeval, so records are numbered from 1
        for image, (objects, found) in enumerate(zip(self.truth, self.found, strict=True)):
            rows = zip(_convert_boxes(objects.boxes), *map(Tensor.tolist, objects[1:]), strict=True)
            for box, label, difficult in rows:
                number += 1
                hard = int(difficult)
                record = {"id": number, "bbox": box, "area": 1.0, "iscrowd": hard, "ignore": hard}
                self._gts[image, label].append(record)
            rows = zip(_convert_boxes(found.boxes), *map(Tensor.tolist, found[1:]), strict=True)
            for box, label, value in rows:
                number += 1
                record = {"id": number, "bbox": box, "area": 1.0, "score": value}
                self._dts[image, label].append(record)
        self.evalImgs: list[Any] = []
        self.eval: dict[str, Any] = {}

    def computeIoU(self, imgId: int, catId: int) -> Any:  # COCOeval's names
        truth, found = self._gts[imgId, catId], self._dts[imgId, catId]
        if not truth or not found:
            return []
        best_first = sorted(found, key=lambda record: -record["score"])[:MOST_DETECTIONS]
        boxes = [record["bbox"] for record in best_first]
        return mask.iou(boxes, [record["bbox"] for record in truth], [0] * len(truth))


def _convert_boxes(boxes: Tensor) -> Any:
    corners = boxes.double()
    return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1).tolist()


def coco_precision(truth: Sequence[Objects], found: Sequence[PredictedBoxes]) -> Array:
    """Return COCO's average precision (10, 20) by threshold and class; NaN without objects."""
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress there
        evaluation = _Evaluation(truth, found)
        evaluation.evaluate()
        evaluation.accumulate()
    precision: Array = evaluation.eval["precision"][:, :, :, 0, 0]  # (T, R, K), -1 where undefined
    average: Array = np.where(precision < 0.0, np.nan, precision).mean(axis=1)
    return average


def voc_precision(
    truth: Sequence[Objects], found: Sequence[PredictedBoxes], *, points: int = 0
) -> Array:
    """Return VOC's average precision (10, 20) by threshold and class; NaN without objects.

    Args:
        points: of recall to average over, 11 in 2007; 0 integrates, as VOC does since 2010.
    """
    table = np.full((len(THRESHOLDS), len(CLASSES)), np.nan)
    for label in range(len(CLASSES)):
        matched = _match(truth, found, label)
        if matched.num_objects:
            for row, threshold in enumerate(THRESHOLDS):
                table[row, label] = _average(matched, threshold, points)
    return table


class _Matched(NamedTuple):
    """The detections of a class, best first, each with the object it overlaps most."""

    overlap: Array
    object: npt.NDArray[np.int64]
    difficult: npt.NDArray[np.bool_]
    num_objects: int
    """Objects that are not difficult."""


def _match(truth: Sequence[Objects], found: Sequence[PredictedBoxes], label: int) -> _Matched:
    scores, overlaps, numbers, difficult = [np.zeros(0)], [np.zeros(0)], [], []
    num_before = num_objects = 0
    for objects, detections in zip(truth, found, strict=True):
        of_class = (objects.labels == label).numpy()
        hard = objects.difficult.numpy()[of_class]
        num_objects += int((~hard).sum())
        chosen = (detections.labels == label).numpy()
        scores.append(detections.scores.double().numpy()[chosen])
        boxes = detections.boxes.double()[chosen], objects.boxes.double()[of_class]
        overlap = box_iou(*boxes).numpy()  # (n, m)
        best = overlap.argmax(axis=1) if overlap.size else np.zeros(len(overlap), np.int64)
        overlaps.append(overlap.max(axis=1, initial=0.0))
        numbers.append(num_before + best)
        difficult.append(hard[best] if len(hard) else np.zeros(len(overlap), np.bool_))
        num_before += len(hard)
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return _Matched(
        np.concatenate(overlaps)[order],
        np.concatenate([np.zeros(0, np.int64), *numbers])[order],
        np.concatenate([np.zeros(0, np.bool_), *difficult])[order],
        num_objects,
    )


def _average(matched: _Matched, threshold: float, points: int) -> float:
    """Average precision over recall; the detections of difficult objects are passed over."""
    hit = matched.overlap >= threshold
    counted = ~(hit & matched.difficult)
    hit, objects = hit[counted], matched.object[counted]
    right = np.zeros(len(hit), np.int64)
    where = np.flatnonzero(hit)
    # Only the best detection of an object is right; later ones are duplicates, and wrong.
    right[where[np.unique(objects[where], return_index=True)[1]]] = 1
    num_right = right.cumsum()
    precision = num_right / np.arange(1, len(right) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]  # the best at this recall or more
    if not points:
        return float((envelope * right).sum() / matched.num_objects)
    # Recall >= k / (points - 1), in whole numbers: 0.3 >= 3 * 0.1 is false in floating point.
    needed = np.arange(points) * matched.num_objects
    first = np.searchsorted((points - 1) * num_right, needed)
    return float(np.append(envelope, 0.0)[first].sum() / points)
