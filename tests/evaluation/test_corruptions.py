"""Corruptions against closed forms and torchvision; the protocol on a few digits."""

import math
from typing import Any

import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from deepbregman.commands.evaluate import evaluate
from deepbregman.evaluation.corruptions import (
    STRENGTHS,
    blur,
    compress_jpeg,
    corrupt,
    lower_contrast,
)
from deepbregman.evaluation.features import compute_features
from deepbregman.evaluation.frozen import SharedBatches
from deepbregman.evaluation.knn import cosine_neighbours, find_neighbours, vote
from deepbregman.evaluation.linear import fit_best


def draw(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_jpeg_rounds_flat_grey_blocks_as_the_standard_says():
    """Of a flat block only the mean is kept, in steps of the table's first entry, scaled."""
    greys = torch.tensor([3, 77, 130, 201])
    images = (greys.view(4, 1, 1, 1).expand(4, 3, 16, 16) / 255).float()
    step = (16 * (5000 // 40) + 50) // 100  # for quality 40
    expected = [128 + step * round(8 * (grey - 128) / step) / 8 for grey in greys.tolist()]
    found = compress_jpeg(images, 40) * 255
    assert found.flatten(1).std(dim=1).max() == 0.0
    assert found[:, 0, 0, 0].tolist() == pytest.approx(expected, abs=0.51)


def test_jpeg_of_less_quality_is_further_from_the_image():
    images = torch.nn.functional.interpolate(draw(3, 3, 9, 9), size=32, mode="bilinear")
    errors = [float((compress_jpeg(images, q) - images).square().mean()) for q in (80, 58, 40)]
    assert 0 < errors[0] < errors[1] < errors[2] < 0.01


def test_blur_is_a_gaussian_over_pixels_of_32():
    """One bright point spreads as exp(-r^2 / 2 sigma^2), in twice as large images twice as far."""
    for side in (32, 64):
        image = torch.zeros(1, 3, side, side)
        image[..., side // 2, side // 2] = 1.0
        found = blur(image, 0.7)[0, 0].double()
        sigma = 0.7 * side / 32
        ratio = found[side // 2, side // 2 + 1] / found[side // 2, side // 2]
        assert float(ratio) == pytest.approx(math.exp(-1 / (2 * sigma**2)), rel=1e-4)
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("sigma", STRENGTHS["blur"])
def test_blur_is_cut_off_at_four_sigma_as_scipy_does(sigma):
    images = draw(2, 3, 32, 32)
    expected = gaussian_filter(images.numpy(), (0, 0, sigma, sigma), mode="mirror", truncate=4.0)
    torch.testing.assert_close(blur(images, sigma), torch.from_numpy(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", STRENGTHS)
def test_a_greater_strength_changes_more_within_the_range_of_pixels(name):
    images = torch.nn.functional.interpolate(draw(3, 3, 9, 9), size=32, mode="bilinear")
    changed = [corrupt(name, strength, 0)(images, 0) for strength in STRENGTHS[name]]
    errors = [float((each - images).square().mean()) for each in changed]
    assert 0 < errors[0] < errors[1] < errors[2]
    assert all(each.min() >= 0.0 and each.max() <= 1.0 for each in changed)


def test_contrast_keeps_the_mean_and_shrinks_the_rest():
    images = draw(2, 3, 8, 8)
    found = lower_contrast(images, 0.4)
    assert torch.allclose(found.mean(dim=(2, 3)), images.mean(dim=(2, 3)), atol=1e-6)
    assert torch.allclose(found.std(dim=(2, 3)), 0.4 * images.std(dim=(2, 3)), atol=1e-6)


def test_noise_has_its_deviation_and_is_of_the_number_of_the_batch():
    change = corrupt("noise", 0.08, 0)
    images = torch.full((512, 3, 32, 32), 0.5)
    first, second = change(images, 0), change(images, 1)
    assert float((first - images).std()) == pytest.approx(0.08, rel=0.05)
    assert not torch.equal(first, second)
    again = corrupt("noise", 0.08, 0)
    assert torch.equal(again(images, 1), second)  # whichever is asked for first
    assert torch.equal(again(images, 0), first)


def test_two_devices_find_what_one_finds(short_run, few_digits, monkeypatch):
    monkeypatch.setattr("deepbregman.evaluation.features.BATCH_SIZE", 16)
    name = "deepbregman.evaluation.corruptions.STRENGTHS"
    monkeypatch.setattr(name, {"noise": STRENGTHS["noise"]})
    shared: list[int] = []
    plain = SharedBatches.__init__

    def count(self: SharedBatches, *arguments: Any) -> None:
        plain(self, *arguments)
        shared.append(self.num_batches)

    monkeypatch.setattr(SharedBatches, "__init__", count)
    one, two = (
        evaluate(short_run, protocols=["corruptions"], data=few_digits, devices=devices)
        for devices in (1, 2)
    )
    assert shared
    assert min(shared) > 1
    assert [row["value"] for row in one] == [row["value"] for row in two]


def test_the_protocol_measures_what_it_says(few, short_run, few_digits):
    rows = evaluate(short_run, protocols=["corruptions"], data=few_digits)
    values = {row["variant"]: row["value"] for row in rows}
    names = ["clean", *(f"{name} {n}" for name in STRENGTHS for n in (1, 2, 3)), "mean of all"]
    classifiers = ["linear", "kNN by cosine, k=20", "kNN by divergence, k=20"]
    assert list(values) == [f"{each}, {name}" for each in classifiers for name in names]
    mean = sum(values[f"linear, {name}"] for name in names[1:-1]) / 12
    assert values["linear, mean of all"] == pytest.approx(mean)
    features = compute_features(
        few.model, few.test.batches, 8, change=lambda images, _: lower_contrast(images, 0.15)
    )
    train = few.train.features.representation
    fit, _ = fit_best(train, few.train.labels, 10, seed=0)
    by_d = find_neighbours(few, features, "divergence", 20)
    predicted = {
        "linear": fit.predict(features.representation).argmax(1),
        "kNN by cosine, k=20": vote(
            cosine_neighbours(features.representation, train, 20), few.train.labels, 10
        ),
        "kNN by divergence, k=20": vote(by_d, few.train.labels, 10),
    }
    for name, classes in predicted.items():
        expected = 100 * (classes == few.test.labels).double().mean().item()
        assert values[f"{name}, contrast 3"] == pytest.approx(expected)
    assert len({tuple(classes.tolist()) for classes in predicted.values()}) == 3
