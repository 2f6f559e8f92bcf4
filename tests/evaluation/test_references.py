"""What accuracies are read against, by scikit-learn and by a plain loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import balanced_accuracy_score

from deepbregman.commands.evaluate import evaluate
from deepbregman.config import override
from deepbregman.data import ArrayImages, Split
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


def make_uneven(few: LabelledFeatures) -> LabelledFeatures:
    """Most training images are sevens, and most test images twos; both also balanced."""
    train, test = few.source.train, few.source.known_test
    kept = (train.labels == 7) | (torch.arange(200) % 4 == 0)
    tested = (test.labels == 2) | (torch.arange(100) % 3 == 0)
    parts = [part.select(rows.nonzero()[:, 0]) for part, rows in ((train, kept), (test, tested))]
    source = replace(few.source, train=parts[0], test=parts[1])
    return replace(few, source=source, balanced=True)


def test_the_most_frequent_class_is_that_of_the_training_images(few):
    uneven = make_uneven(few)
    found, labels = guess(uneven), uneven.test.labels.numpy()
    assert found["top1"] == pytest.approx(100 * np.mean(labels == 7))
    assert found["balanced"] == pytest.approx(10.0)  # one of ten classes


def test_a_classifier_of_weighted_classes_is_compared_with_one_on_pixels(short_run, few):
    uneven = make_uneven(few)
    rows = evaluate(
        short_run, protocols=["linear"], source=uneven.source, epochs=0, balanced=True, seed=1
    )
    found = {(row["variant"], row["metric"]): row["raw_pixels"] for row in rows}
    plain, weighted = (PixelClassifiers(uneven, 1).linear(weighted=each) for each in (False, True))
    assert plain != weighted
    for metric in ("top1", "top5", "balanced"):
        assert found["cached features", metric] == plain[metric]
        assert found["cached features, weighted classes", metric] == weighted[metric]


def test_larger_images_are_averaged_to_16_pixels(few):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20, 3, 32, 32), generator=generator, dtype=torch.uint8)
    split = Split(ArrayImages(pixels), torch.arange(20) % 2)
    config = override(few.config, {"data.image_size": 32})
    source = replace(few.source, train=split, test=split)
    train, _, test = PixelClassifiers(replace(few, config=config, source=source), 0)._pixels
    blocks = pixels.double().view(20, 3, 16, 2, 16, 2).mean(dim=(3, 5)) / 255
    assert torch.equal(train, test)
    torch.testing.assert_close(train.double(), blocks.flatten(1), atol=1e-5, rtol=0)


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
