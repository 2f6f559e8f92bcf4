"""Images of another kind: distances and areas against scikit-learn and loops."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from torch import Tensor
from torchvision.utils import save_image

from deepbregman.commands.evaluate import evaluate
from deepbregman.config import override
from deepbregman.errors import UserError
from deepbregman.evaluation.ood import auroc, draw_noise, list_distances, mahalanobis_to
from deepbregman.evaluation.options import Ood

from ..conftest import normal
from .conftest import with_gaps


def test_the_area_is_the_share_of_pairs_in_the_right_order():
    inside, outside = normal(30).round(decimals=1), normal(20, seed=1).round(decimals=1) + 0.3
    pairs = [(a < b) + 0.5 * (a == b) for a in inside.tolist() for b in outside.tolist()]
    assert auroc(inside, outside) == pytest.approx(100 * sum(pairs) / len(pairs))
    assert auroc(torch.zeros(4), torch.ones(3)) == 100.0


def test_mahalanobis_to_one_gaussian_is_scikit_learns():
    train, points = normal(60, 5, seed=2) * torch.tensor([1.0, 2, 3, 0.1, 1]), normal(7, 5, seed=3)
    distance = mahalanobis_to(train, torch.zeros(60, dtype=torch.int64), 1)
    expected = EmpiricalCovariance().fit(train.numpy()).mahalanobis(points.numpy())
    assert distance(points).tolist() == pytest.approx(expected.tolist(), rel=1e-3)


def test_mahalanobis_to_classes_takes_the_nearest_of_one_covariance():
    labels = torch.arange(60) % 3
    train, points = normal(60, 4, seed=4) + 3.0 * labels[:, None], normal(7, 4, seed=5) + 2.0
    means = torch.stack([train[labels == label].mean(dim=0) for label in range(3)])
    inverse = torch.linalg.inv(torch.cov((train - means[labels]).T, correction=0))
    expected = [
        min(float((point - mean) @ inverse @ (point - mean)) for mean in means) for point in points
    ]
    assert mahalanobis_to(train, labels, 3)(points).tolist() == pytest.approx(expected, rel=1e-3)


def test_without_any_variance_the_distance_is_euclidean():
    """Such as with one training image of each class, or images that are all the same."""
    train, points = normal(3, 4, seed=6), normal(7, 4, seed=7)
    nearest = torch.cdist(points, train).square().amin(dim=1)
    found = mahalanobis_to(train, torch.arange(3), 3)(points)
    assert found.tolist() == pytest.approx(nearest.tolist(), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_distances_equal_a_loop(few, smoothing):
    """In the hard form, the gap that the winner of a distribution leaves in an image's scores."""
    few = replace(few, config=override(few.config, {"divergence.smoothing": smoothing}))
    distances = list_distances(few, neighbours=3)
    train, test = few.train.features.scores.double(), few.test.features.scores.double()

    def gaps(rows: Tensor) -> Tensor:
        if smoothing:
            shares, logs = (rows / smoothing).softmax(dim=1), (test / smoothing).log_softmax(dim=1)
            return smoothing * ((shares * shares.log()).sum(dim=1) - logs @ shares.T)
        return torch.stack([test.amax(dim=1) - test[:, row.argmax()] for row in rows], dim=1)

    means = torch.stack([train[few.train.labels == label].mean(dim=0) for label in range(10)])
    known = {
        "divergence, training distribution": gaps(train.mean(dim=0, keepdim=True))[:, 0],
        "divergence, nearest class": gaps(means).amin(dim=1),
        "divergence, neighbour 3": gaps(train).sort(dim=1).values[:, 2],
    }
    for name, expected in known.items():
        found = distances[name](few.test.features)
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    for name, part in (("cosine", "representation"), ("cosine of embeddings", "embedding")):
        asked, bank = (getattr(each.features, part) for each in (few.test, few.train))
        cosine = torch.nn.functional.cosine_similarity(asked[:, None], bank[None], dim=2)
        nearest = -cosine.sort(dim=1, descending=True).values[:, 2]
        found = distances[f"{name}, neighbour 3"](few.test.features)
        assert found.tolist() == pytest.approx(nearest.tolist(), abs=1e-5)
    h, labels = few.train.features.representation, few.train.labels
    for name, groups, count in (("one Gaussian", 0 * labels, 1), ("nearest class", labels, 10)):
        expected = mahalanobis_to(h, groups, count)(few.test.features.representation)
        torch.testing.assert_close(distances[f"Mahalanobis, {name}"](few.test.features), expected)


def test_numbers_of_classes_may_have_gaps(few):
    """As where a class has no image at all."""
    expected, found = (list_distances(each, neighbours=3) for each in (few, with_gaps(few)))
    for name in ("Mahalanobis, nearest class", "divergence, nearest class"):
        both = (each[name](few.test.features) for each in (found, expected))
        torch.testing.assert_close(*both)  # products of other sizes are rounded otherwise


def test_noise_is_seeded_and_uniform():
    first, again, other = (draw_noise(20, 8, seed).images for seed in (0, 0, 1))
    assert torch.equal(first.pixels, again.pixels)  # type: ignore[union-attr]  # of arrays
    assert not torch.equal(first.pixels, other.pixels)  # type: ignore[union-attr]  # of arrays
    assert 120 < first.pixels.double().mean() < 135  # type: ignore[union-attr]  # of arrays


def test_digits_are_told_from_noise_and_not_from_themselves(short_run, few_digits):
    rows = evaluate(
        short_run,
        protocols=["ood"],
        data=few_digits,
        ood=Ood(against=("noise", few_digits), neighbours=5),
        seeds=2,
    )
    values = {row["variant"]: row["value"] for row in rows}
    for row in rows:  # only noise is drawn
        assert row["n"] == (2 if row["variant"].startswith("noise: ") else 1)
    assert any(len(set(row["values"])) == 2 for row in rows)
    assert len(values) == 14
    assert values["noise: cosine, neighbour 5"] > 90.0
    assert all(value == 50.0 for name, value in values.items() if name.startswith("few: "))
    with pytest.raises(UserError, match="no such folder"):
        evaluate(short_run, protocols=["ood"], data=few_digits, ood=Ood(against=("nowhere",)))


def test_nothing_stands_in_for_an_unreadable_image_of_another_kind(
    short_run, few_digits, tmp_path, monkeypatch
):
    """Also where a set is too large to be decoded on opening."""
    monkeypatch.setattr("deepbregman.data.listings.FULL_DECODE_LIMIT", 0)
    sets = [tmp_path / name / "photos" for name in ("whole", "damaged")]
    for folder in sets:
        folder.mkdir(parents=True)
        for place in range(5):
            pixels = draw_noise(1, 12, place).images.pixels[0]  # type: ignore[union-attr]  # of arrays
            save_image(pixels / 255, folder / f"{place}.png")
    (sets[1] / "3.png").write_bytes((sets[0] / "3.png").read_bytes()[:60])
    (sets[0] / "3.png").unlink()
    against = tuple(map(str, sets))
    options: dict[str, Any] = {"protocols": ["ood"], "data": few_digits, "skip_unreadable": True}
    rows = evaluate(short_run, ood=Ood(against=against), **options)
    values: dict[str, list[float]] = {}
    for row in rows:
        folder, _, name = row["variant"].partition(": ")
        assert folder in against  # both are called photos
        values.setdefault(name, []).append(row["value"])
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in values.values())
    assert len({row["details"]["num_outside"] for row in rows}) == 1
