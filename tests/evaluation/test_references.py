"""What accuracies are read against, by scikit-learn and by a plain loop."""

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import balanced_accuracy_score

from deepbregman.commands.evaluate import evaluate
from deepbregman.evaluation import references
from deepbregman.evaluation.features import LabelledFeatures
from deepbregman.evaluation.references import PixelClassifiers, guess


def arrays(few: LabelledFeatures) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pixels and labels of both splits."""
    found = []
    for part in (few.train, few.test):
        images = part.split.images
        pixels = images.pixels.expand(-1, 3, -1, -1).double().flatten(1) / 255.0
        found += [pixels.numpy(), part.labels.numpy()]
    return found[0], found[1], found[2], found[3]


def test_guessing(few):
    balanced = LabelledFeatures(few.model, few.config, few.source, few.device, balanced=True)
    found = guess(balanced)
    train, train_labels, test, test_labels = arrays(few)
    dummy = DummyClassifier(strategy="most_frequent").fit(train, train_labels)
    assert found["top1"] == pytest.approx(100 * dummy.score(test, test_labels))
    expected = balanced_accuracy_score(test_labels, dummy.predict(test))
    assert found["balanced"] == pytest.approx(100 * expected)
    assert found["top5"] >= found["top1"]


def test_neighbours_among_pixels(few):
    train, train_labels, test, test_labels = arrays(few)
    correct = 0
    for image, label in zip(test, test_labels, strict=True):
        cosines = train @ image / np.linalg.norm(train, axis=1) / np.linalg.norm(image)
        votes = np.zeros(10)
        for index in np.argsort(-cosines, kind="stable")[:20]:
            votes[train_labels[index]] += np.exp(cosines[index] / 0.1)
        correct += int(votes.argmax() == label)
    pixels = PixelClassifiers(few, seed=0)
    assert pixels.knn(20)["top1"] == pytest.approx(100 * correct / len(test))


def test_of_many_images_a_sample_learns(few, monkeypatch):
    pixels = PixelClassifiers(few, seed=0)
    monkeypatch.setattr(references, "LARGEST_TRAIN", 30)
    train, labels, test = pixels._pixels
    assert len(train) == len(labels) == 30
    assert len(test) == len(few.test.labels)
    assert torch.bincount(labels).min() > 0  # of every class


def test_rows_carry_them(short_run, few_digits, few):
    rows = evaluate(short_run, data=few_digits, epochs=0)
    chance = guess(few)
    for row in rows:
        assert row["chance"] == pytest.approx(chance[row["metric"]])
        assert chance["top1"] < row["raw_pixels"] <= 100
    linear = {row["raw_pixels"] for row in rows if row["protocol"] == "linear"}
    assert PixelClassifiers(few, 0).linear()["top1"] in linear
