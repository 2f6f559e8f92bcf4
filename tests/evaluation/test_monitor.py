"""The monitor between epochs: what it asks, and what it says of networks that have diverged."""

from typing import Any

import pytest
import torch

from deepbregman.config import load_recipe, override
from deepbregman.data import ArrayImages, Batches, Images, Split, open_source
from deepbregman.data.opening import batch_images, split_for_monitor
from deepbregman.errors import UserError
from deepbregman.evaluation import knn
from deepbregman.evaluation.features import compute_features
from deepbregman.evaluation.knn import build_knn_monitor, knn_accuracy
from deepbregman.objectives import build_step

CPU = torch.device("cpu")


def test_it_queries_what_was_held_out_in_a_bank_of_the_rest(short_config):
    train = open_source("digits", image_size=8).train
    model = build_step(short_config).model.eval()
    monitor = build_knn_monitor(train, short_config, CPU)
    assert monitor is not None
    kept, held_out = split_for_monitor(train, short_config)
    features = compute_features(model, batch_images(train.images, short_config, CPU), 8)
    h = features.representation
    expected = knn_accuracy(h[held_out], train.labels[held_out], h[kept], train.labels[kept], k=20)
    assert monitor(model)["knn"] == pytest.approx(expected, abs=1.6)  # two queries of 130


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """How many images there are in each set that is opened from now on."""
    opened: list[int] = []

    def note(images: Images, *rest: Any, **options: Any) -> Batches:
        opened.append(len(images))
        return batch_images(images, *rest, **options)

    monkeypatch.setattr(knn, "batch_images", note)
    return opened


def test_without_a_held_out_part_a_tenth_is_asked_about(short_config, sizes):
    whole = override(short_config, {"data.holdout": 0.0})
    build_knn_monitor(open_source("digits", image_size=8).train, whole, CPU)
    assert sizes == [1167, 130]  # of 1297


def test_diverged_networks_are_named(short_config):
    model = build_step(short_config).model
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(torch.nan)
    monitor = build_knn_monitor(open_source("digits", image_size=8).train, short_config, CPU)
    assert monitor is not None
    with pytest.raises(UserError, match=r"not finite.*optimiser\.learning_rate"):
        monitor(model)


def test_there_is_none_without_labels_or_queries_or_when_off(short_config):
    train = open_source("digits", image_size=8).train
    single = train.select(torch.tensor([train.labels.tolist().index(digit) for digit in range(10)]))
    assert build_knn_monitor(single, short_config, CPU) is None
    assert build_knn_monitor(Split(train.images), short_config, CPU) is None
    assert build_knn_monitor(train, override(short_config, {"training.knn_every": 0}), CPU) is None


def test_large_images_make_a_smaller_bank(short_config, sizes, monkeypatch):
    """A bank of 20,000 photographs would take 12 GB of the device's memory."""
    monkeypatch.setattr(knn, "MONITOR_BYTES", 100 * 3 * 16**2 + 5)
    build_knn_monitor(open_source("digits", image_size=8).train, short_config, CPU)
    bank, queries = sizes
    assert bank == pytest.approx(100, abs=5)
    assert queries == 130


def test_the_monitor_of_photographs_fits_beside_the_training(sizes):
    """Of the recipe for ImageNet; 20,000 images in its bank and 2,000 queries were 13 GB."""
    images = ArrayImages(torch.zeros(60_000, 3, 1, 1, dtype=torch.uint8))
    train = Split(images, torch.arange(60_000) % 1000)
    build_knn_monitor(train, load_recipe("paper-imagenet"), CPU)
    assert min(sizes) >= 1000  # one of each class
    assert sum(sizes) * 3 * 448**2 < 6e9
