"""The predicted class of every test image: kept, read again, and the same as the accuracy."""

import numpy as np
import pytest
import torch

from deepbregman.commands.evaluate import evaluate
from deepbregman.errors import UserError
from deepbregman.evaluation.results import PREDICTIONS, KeptPredictions, pack, unpack


def test_packing_keeps_every_number():
    classes = torch.randint(0, 1000, (5000,), generator=torch.Generator().manual_seed(0))
    assert unpack(pack(classes)).tolist() == classes.tolist()


def test_predictions_give_the_accuracy_of_the_row(short_run, few_digits):
    rows = evaluate(short_run, protocols=["knn", "linear"], data=few_digits, epochs=0)
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
