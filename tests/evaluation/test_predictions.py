"""The predicted class of every test image: kept, read again, and the same as the accuracy."""

import numpy as np
import pytest
import torch

from deepbregman.commands.evaluate import evaluate
from deepbregman.errors import UserError
from deepbregman.evaluation.results import (
    PREDICTIONS,
    KeptPredictions,
    pack,
    record_predictions,
    unpack,
)
from deepbregman.runs import Run


def test_packing_keeps_every_number():
    classes = torch.randint(0, 1000, (5000,), generator=torch.Generator().manual_seed(0))
    assert unpack(pack(classes)).tolist() == classes.tolist()


def test_predictions_give_the_accuracy_of_the_row(short_run, few_digits):
    reported: list[tuple[object, ...]] = []
    given = {"data": few_digits, "epochs": 0, "progress": lambda *words: reported.append(words)}
    rows = evaluate(short_run, protocols=["knn", "linear"], **given)
    whole = [(name, done, 2) for name in ("knn", "linear") for done in range(3)]
    assert [words for words in reported if words[0] in ("knn", "linear")] == whole
    assert not any("predicted" in row for row in rows)
    predictions = KeptPredictions(short_run)
    top1 = [row for row in rows if row["metric"] == "top1"]
    for row in top1:
        kept = predictions.find(few_digits, f"{row['protocol']}, {row['variant']}")
        (predicted,) = kept.predicted
        assert 100 * np.mean(predicted == kept.labels) == pytest.approx(row["value"])
        assert kept.classes == tuple(map(str, range(10)))
    assert predictions.find(few_digits, "linear, elsewhere") is None
    assert predictions.find("elsewhere", "linear, cached features") is None


@pytest.mark.parametrize(("labels", "epoch"), [([0, 1, 0], 2.0), ([0, 1, 1], 3.0)])
def test_predictions_for_other_labels_or_of_another_epoch_leave(
    short_config, tmp_path, labels, epoch
):
    """Else two variants of one file would be compared image by image, though of other images."""
    run = Run.create(tmp_path / "run", short_config, {})
    texts = [pack(torch.tensor([1, 1, 1]))]
    for variant, truth, when in (("knn, a", [0, 1, 1], 2.0), ("knn, b", labels, epoch)):
        known = pack(torch.tensor(truth))
        record_predictions(run, {("digits", variant): texts}, known, None, when)
    kept = KeptPredictions(run)
    assert kept.find("digits", "knn, a") is None
    assert kept.find("digits", "knn, b").labels.tolist() == labels


def test_as_many_predictions_as_labels(short_config, tmp_path):
    run = Run.create(tmp_path / "run", short_config, {})
    labels, texts = pack(torch.tensor([0, 1, 1])), [pack(torch.tensor([0, 1]))]
    record_predictions(run, {("digits", "knn, a"): texts}, labels, None, 1.0)
    with pytest.raises(UserError, match="not as many predictions as labels"):
        KeptPredictions(run).find("digits", "knn, a")


def test_damage_is_named(short_run):
    path = short_run.path / PREDICTIONS
    before = path.read_bytes() if path.is_file() else None
    try:
        path.write_text('{"x": {"epoch": 1, "labels": "AA", "predicted": {"knn, a": ["AA"]}}}')
        with pytest.raises(UserError, match="cannot be used"):
            KeptPredictions(short_run).find("x", "knn, a")
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)
