"""Average precision against examples worked by hand and against slow loops."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepbregman.data.voc import CLASSES, Objects
from deepbregman.errors import UserError
from deepbregman.evaluation.detection.average_precision import (
    METRICS,
    THRESHOLDS,
    PredictedBoxes,
    coco_precision,
    score_detections,
    voc_precision,
)

Box = tuple[float, float, float, float]


def objects(*rows: tuple[Box, int, bool]) -> Objects:
    return Objects(
        torch.tensor([row[0] for row in rows], dtype=torch.float32).view(-1, 4),
        torch.tensor([row[1] for row in rows], dtype=torch.int64),
        torch.tensor([row[2] for row in rows], dtype=torch.bool),
    )


def found(*rows: tuple[Box, int, float]) -> PredictedBoxes:
    return PredictedBoxes(
        torch.tensor([row[0] for row in rows], dtype=torch.float32).view(-1, 4),
        torch.tensor([row[1] for row in rows], dtype=torch.int64),
        torch.tensor([row[2] for row in rows], dtype=torch.float32),
    )


A: Box = (0, 0, 10, 10)
B: Box = (20, 0, 30, 10)
C: Box = (40, 0, 50, 10)
FAR: Box = (80, 80, 90, 90)
HALF: Box = (0, 0, 10, 5)  # IoU 0.5 with A


def at_50(truth: Sequence[Objects], detections: Sequence[PredictedBoxes]) -> dict[str, float]:
    """AP50 of class 0 by each of the metrics."""
    return {
        "coco": coco_precision(truth, detections)[0, 0],
        "area": voc_precision(truth, detections)[0, 0],
        "eleven": voc_precision(truth, detections, points=11)[0, 0],
    }


def test_all_found_first_is_one():
    truth = [objects((A, 0, False), (B, 0, False))]
    detections = [found((A, 0, 0.9), (B, 0, 0.8), (FAR, 0, 0.7))]
    assert at_50(truth, detections) == pytest.approx({"coco": 1.0, "area": 1.0, "eleven": 1.0})


def test_a_wrong_detection_first():
    # Precision 0, 1/2, 2/3 at recall 0, 1/2, 1; the envelope is 2/3 throughout.
    truth = [objects((A, 0, False), (B, 0, False))]
    detections = [found((FAR, 0, 0.9), (A, 0, 0.8), (B, 0, 0.7))]
    assert at_50(truth, detections) == pytest.approx(
        dict.fromkeys(("coco", "area", "eleven"), 2 / 3)
    )


def test_one_of_three_is_missed():
    # Recall ends at 2/3: area 2/3; 7 of 11 points (0..0.6); 67 of 101 (0..0.66).
    truth = [objects((A, 0, False), (B, 0, False), (C, 0, False))]
    detections = [found((A, 0, 0.9), (B, 0, 0.8))]
    wanted = {"coco": 67 / 101, "area": 2 / 3, "eleven": 7 / 11}
    assert at_50(truth, detections) == pytest.approx(wanted)


def test_the_recall_of_three_tenths_reaches_its_point():
    # 3 of 10 found: points 0, 0.1, 0.2 and 0.3, which 3 * 0.1 in floating point would miss.
    boxes: list[Box] = [(20.0 * i, 0.0, 20.0 * i + 10.0, 10.0) for i in range(10)]
    truth = [objects(*((box, 0, False) for box in boxes))]
    detections = [found(*((box, 0, 0.9) for box in boxes[:3]))]
    assert voc_precision(truth, detections, points=11)[0, 0] == pytest.approx(4 / 11)


def test_a_duplicate_is_wrong():
    # Right, wrong (A again), right: precision 1, 1/2, 2/3 at recall 1/2, 1/2, 1.
    truth = [objects((A, 0, False), (B, 0, False))]
    detections = [found((A, 0, 0.9), (A, 0, 0.8), (B, 0, 0.7))]
    values = at_50(truth, detections)
    assert values["area"] == pytest.approx((1 + 2 / 3) / 2)
    assert values["eleven"] == pytest.approx((6 * 1 + 5 * 2 / 3) / 11)
    assert values["coco"] == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)


def test_a_difficult_object_is_neither_found_nor_missed():
    truth = [objects((A, 0, False), (B, 0, True))]
    one = {"coco": 1.0, "area": 1.0, "eleven": 1.0}
    assert at_50(truth, [found((A, 0, 0.5))]) == pytest.approx(one)
    # PredictedBoxes first, and twice: neither detection counts.
    seen = [found((B, 0, 0.9), (B, 0, 0.8), (A, 0, 0.5))]
    assert at_50(truth, seen) == pytest.approx(one)


def test_a_difficult_object_absorbs_only_what_overlaps_it_enough():
    # A small box inside a difficult object: COCO's crowd would absorb it, VOC counts it as wrong.
    truth = [objects((A, 0, False), ((20, 0, 40, 20), 0, True))]
    detections = [found(((20, 0, 25, 5), 0, 0.9), (A, 0, 0.5))]
    half = {"coco": 0.5, "area": 0.5, "eleven": 0.5}
    assert at_50(truth, detections) == pytest.approx(half)


def test_an_overlap_of_exactly_the_threshold_counts():
    truth, detections = [objects((A, 0, False))], [found((HALF, 0, 0.9))]
    table = voc_precision(truth, detections)
    assert table[0, 0] == 1.0
    assert table[1, 0] == 0.0
    assert coco_precision(truth, detections)[0, 0] == pytest.approx(1.0)


def test_other_classes_and_other_images_do_not_match():
    truth = [objects((A, 0, False)), objects((B, 1, False))]
    detections = [found((A, 1, 0.9)), found((A, 0, 0.9))]
    table = coco_precision(truth, detections)
    assert table[0, :2].tolist() == [0.0, 0.0]
    assert np.isnan(table[:, 2:]).all()
    assert voc_precision(truth, detections)[0, :2].tolist() == [0.0, 0.0]


def test_a_class_without_objects_is_left_out_of_the_mean():
    truth = [objects((A, 3, False), (B, 5, True))]
    result = score_detections(truth, [found((A, 3, 0.9), (B, 5, 0.9), (FAR, 7, 0.9))])
    assert set(result.means) == set(METRICS)
    assert result.means == pytest.approx(dict.fromkeys(METRICS, 100.0))
    assert result.per_class == pytest.approx({CLASSES[3]: 100.0})


def test_no_detection_at_all_is_zero_and_no_object_is_an_error():
    truth = [objects((A, 3, False)), objects()]
    assert score_detections(truth, [found(), found()]).means == dict.fromkeys(METRICS, 0.0)
    with pytest.raises(UserError, match="no object to find"):
        score_detections([objects((A, 3, True))], [found((A, 3, 0.9))])


@pytest.mark.parametrize(("num_wrong", "coco"), [(99, 1 / 100), (100, 0.0)])
def test_coco_counts_a_hundred_detections_of_a_class_in_an_image(num_wrong, coco):
    """Those of another class beside them are not among the hundred."""
    wrong = [(FAR, 0, 0.9), (FAR, 1, 0.95)] * num_wrong
    truth, detections = [objects((A, 0, False))], [found(*wrong, (A, 0, 0.5))]
    assert coco_precision(truth, detections)[0, 0] == pytest.approx(coco)
    assert voc_precision(truth, detections)[0, 0] == pytest.approx(1 / (num_wrong + 1))


def overlap(a: list[float], b: list[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def curve(
    truth: list[Objects], detections: list[PredictedBoxes], threshold: float, coco: bool
) -> tuple[list[bool], int]:
    """Whether each detection of class 0 that counts is right, best first, one by one."""
    rows = sorted(
        (
            (-float(s), image, box.tolist())
            for image, f in enumerate(detections)
            for box, label, s in zip(*f, strict=True)
            if label == 0
        ),
        key=lambda row: row[0],
    )
    free = {
        (image, i): (box.tolist(), bool(hard))
        for image, o in enumerate(truth)
        for i, (box, label, hard) in enumerate(zip(*o, strict=True))
        if label == 0
    }
    taken: set[tuple[int, int]] = set()
    right = []
    for _, image, box in rows:
        mine = {key: value for key, value in free.items() if key[0] == image}
        if coco:  # ordinary objects that are still free, then difficult ones
            easy = {k: v for k, v in mine.items() if not v[1] and k not in taken}
            hit = [k for k, v in easy.items() if overlap(box, v[0]) >= threshold]
            if hit:
                taken.add(max(hit, key=lambda k: overlap(box, easy[k][0])))
                right.append(True)
            elif not any(v[1] and overlap(box, v[0]) >= threshold for v in mine.values()):
                right.append(False)
            continue
        best = max(mine, key=lambda k: overlap(box, mine[k][0]), default=None)
        if best is None or overlap(box, mine[best][0]) < threshold:
            right.append(False)
        elif not mine[best][1]:
            right.append(best not in taken)
            taken.add(best)
    return right, sum(not hard for _, hard in free.values())


def averaged(right: list[bool], num_objects: int, points: int) -> float:
    """Mean over points of recall of the best precision at that recall or more."""
    total = 0.0
    for k in range(points):
        best, seen = 0.0, 0
        for position, is_right in enumerate(right):
            seen += is_right
            if seen * (points - 1) >= k * num_objects:
                best = max(best, seen / (position + 1))
        total += best
    return total / points


def area(right: list[bool], num_objects: int) -> float:
    total = 0.0
    for start, is_right in enumerate(right):
        if is_right:  # recall rises here by one object
            tail = [sum(right[: end + 1]) / (end + 1) for end in range(start, len(right))]
            total += max(tail) / num_objects
    return total


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Objects], list[PredictedBoxes]]:
    def boxes(least: int) -> list[Box]:
        corner = st.integers(0, 6)
        side = st.integers(2, 6)
        raw = draw(st.lists(st.tuples(corner, corner, side, side), min_size=least, max_size=5))
        return [(x, y, x + w, y + h) for x, y, w, h in raw]

    truth, detections = [], []
    for image in range(draw(st.integers(1, 3))):
        truth.append(
            objects(
                *((b, draw(st.integers(0, 1)), draw(st.booleans())) for b in boxes(0)),
                *([((30.0, 30.0, 35.0, 35.0), 0, False)] if image == 0 else []),
            )
        )
        detections.append(found(*((b, draw(st.integers(0, 1)), 0.0) for b in boxes(0))))
    # Scores all differ: the order of equals is nobody's to say.
    count = sum(len(f.scores) for f in detections)
    values = iter(draw(st.permutations([0.01 + 0.03 * i for i in range(count)])))
    for f in detections:
        f.scores.copy_(torch.tensor([next(values) for _ in f.scores]))
    return truth, detections


@given(scenes())
def test_the_voc_metrics_agree_with_loops(scene):
    truth, detections = scene
    eleven, integrated = voc_precision(truth, detections, points=11), voc_precision(*scene)
    for row, threshold in enumerate(THRESHOLDS):
        right, num_objects = curve(truth, detections, threshold, coco=False)
        assert eleven[row, 0] == pytest.approx(averaged(right, num_objects, 11))
        assert integrated[row, 0] == pytest.approx(area(right, num_objects))


@given(scenes())
def test_the_coco_metric_agrees_with_loops(scene):
    truth, detections = scene
    table = coco_precision(truth, detections)
    for row, threshold in enumerate(THRESHOLDS):
        right, num_objects = curve(truth, detections, threshold, coco=True)
        assert table[row, 0] == pytest.approx(averaged(right, num_objects, 101))


def test_the_means_are_over_classes_and_thresholds():
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> torch.Tensor:
        corner = torch.rand(count, 2, generator=generator) * 60
        return torch.cat([corner, corner + 10 + 30 * torch.rand(count, 2, generator=generator)], 1)

    truth, detections = [], []
    for _ in range(8):
        boxes = some(4)
        labels = torch.randint(0, 3, (4,), generator=generator)
        truth.append(Objects(boxes, labels, torch.zeros(4, dtype=torch.bool)))
        near = torch.cat([boxes + 4 * torch.rand(4, 4, generator=generator), some(6)])
        guessed = torch.cat([labels, torch.randint(0, 3, (6,), generator=generator)])
        detections.append(PredictedBoxes(near, guessed, torch.rand(10, generator=generator)))
    coco, eleven, areas = (np.empty((len(THRESHOLDS), 3)) for _ in range(3))
    for label in range(3):  # the loops look at class 0
        here = [o._replace(labels=(o.labels != label).long()) for o in truth]
        seen = [f._replace(labels=(f.labels != label).long()) for f in detections]
        for row, threshold in enumerate(THRESHOLDS):
            coco[row, label] = averaged(*curve(here, seen, threshold, coco=True), 101)
            by_voc = curve(here, seen, threshold, coco=False)
            eleven[row, label], areas[row, label] = averaged(*by_voc, 11), area(*by_voc)
    result = score_detections(truth, detections)
    expected = {"AP50-10": 100 * areas[0].mean()}
    for suffix, table in (("", coco), ("-07", eleven)):
        expected[f"AP{suffix}"] = 100 * table.mean()
        expected[f"AP50{suffix}"], expected[f"AP75{suffix}"] = 100 * table[[0, 5]].mean(axis=1)
    assert result.means == pytest.approx(expected)
    assert len({round(value, 3) for value in expected.values()}) == 7
    assert 10 < expected["AP"] < 90
    assert result.per_class == pytest.approx(dict(zip(CLASSES, 100 * coco[0], strict=False)))
