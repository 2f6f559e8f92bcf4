"""Few labels per class: each rule against a loop, and draws that are what they say."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from deepbregman.commands.evaluate import evaluate
from deepbregman.errors import UserError
from deepbregman.evaluation.classes import FeatureBank
from deepbregman.evaluation.features import Features
from deepbregman.evaluation.few import RULES, Task, draw_labels, measure_draw
from deepbregman.evaluation.options import Few
from deepbregman.method.bregman import bregman, squared_euclidean

from .conftest import with_gaps

LABELS = torch.tensor([0, 0, 1, 1, 1, 2])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KNOWN = Features(draw(6, 5, seed=0), draw(6, 4, seed=1), draw(6, 3, seed=2))
QUERIES = Features(draw(9, 5, seed=3), draw(9, 4, seed=4), draw(9, 3, seed=5))


def ask(rule: str, smoothing: float, known: Features = KNOWN, labels: Tensor = LABELS) -> Tensor:
    bank = FeatureBank.gather(KNOWN.representation)
    return RULES[rule](Task(known, labels, QUERIES, 3, smoothing, bank))


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def mean(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def unit(row: list[float]) -> list[float]:
    return [x / math.hypot(*row) for x in row]


def hard(p: list[float], q: list[float]) -> float:
    return max(p) - p[q.index(max(q))]


def soft(p: list[float], q: list[float]) -> float:
    def share(row: list[float]) -> list[float]:
        total = sum(math.exp(x / 0.5) for x in row)
        return [math.exp(x / 0.5) / total for x in row]

    return 0.5 * sum(b * math.log(b / a) for a, b in zip(share(p), share(q), strict=True))


def classes(part: Tensor | None) -> list[list[list[float]]]:
    return [part[label == LABELS].double().tolist() for label in range(3)]


@pytest.mark.parametrize(("form", "smoothing"), [(hard, 0.0), (soft, 0.5)])
def test_the_nearest_distribution_equals_a_loop(form, smoothing):
    found = ask("nearest distribution, divergence", smoothing)
    for query, predicted in zip(QUERIES.scores.double().tolist(), found.tolist(), strict=True):
        distances = [form(query, mean(rows)) for rows in classes(KNOWN.scores)]
        assert distances[predicted] == pytest.approx(min(distances), abs=1e-12)
    assert len(set(found.tolist())) > 1


@pytest.mark.parametrize(
    ("name", "part"), [("cosine", "representation"), ("cosine of embeddings", "embedding")]
)
def test_the_nearest_mean_equals_a_loop(name, part):
    found = ask(f"nearest mean, {name}", 0.0)
    means = [mean([unit(row) for row in rows]) for rows in classes(getattr(KNOWN, part))]
    for query, predicted in zip(getattr(QUERIES, part).tolist(), found.tolist(), strict=True):
        likeness = [cosine(query, centre) for centre in means]
        assert predicted == likeness.index(max(likeness))


@pytest.mark.parametrize(
    ("name", "part", "distance"),
    [
        ("divergence", "scores", soft),
        ("cosine", "representation", lambda p, q: -cosine(p, q)),
    ],
)
def test_the_nearest_image_equals_a_loop(name, part, distance):
    found = ask(f"nearest image, {name}", 0.5)
    for query, predicted in zip(getattr(QUERIES, part).tolist(), found.tolist(), strict=True):
        nearest = [
            min(distance(query, row) for row in rows) for rows in classes(getattr(KNOWN, part))
        ]
        assert predicted == nearest.index(min(nearest))


def test_the_linear_rule_is_scikit_learns():
    """Features are centred and divided by one number; one of them, nearly constant, stays so."""
    shrink = torch.tensor([1.0, 1.0, 1e-3, 1.0, 1.0])
    known, asked = (part.representation.double() * shrink for part in (KNOWN, QUERIES))
    task = Task(
        KNOWN._replace(representation=known),
        LABELS,
        QUERIES._replace(representation=asked),
        3,
        0.0,
        FeatureBank.gather(known),
    )
    middle = known.mean(dim=0)
    scale = (known - middle).square().mean().sqrt()
    fit = LogisticRegression(C=1 / (1e-2 * 6), tol=1e-8)
    fit.fit(((known - middle) / scale).numpy(), LABELS.numpy())
    expected = fit.predict(((asked - middle) / scale).numpy())
    assert RULES["linear"](task).tolist() == expected.tolist()


def centre(rows: list[list[float]]) -> Callable[[list[float]], list[float]]:
    """The function that makes a feature of unit length and takes the mean of such rows away."""
    middle = mean([unit(row) for row in rows])
    return lambda row: [x - c for x, c in zip(unit(row), middle, strict=True)]


def scores_over(bank: list[list[float]]) -> Callable[[list[float]], list[float]]:
    """The function from a feature to its scores, one for each row of a bank, of unit length."""
    move = centre(bank)
    others = [move(row) for row in bank]

    def score(row: list[float]) -> list[float]:
        moved = move(row)
        return unit([sum(x * y for x, y in zip(moved, b, strict=True)) for b in others])

    return score


def test_the_nearest_class_over_a_bank_equals_a_loop():
    found = ask("nearest class, divergence over a bank", 0.0)
    score = scores_over(KNOWN.representation.double().tolist())
    means = [mean([score(row) for row in rows]) for rows in classes(KNOWN.representation)]
    for query, predicted in zip(QUERIES.representation.tolist(), found.tolist(), strict=True):
        likeness = [cosine(score(query), one) for one in means]
        assert predicted == likeness.index(max(likeness))
    assert len(set(found.tolist())) > 1


def test_the_centred_mean_equals_a_loop():
    found = ask("nearest mean, cosine of centred features", 0.0)
    move = centre(KNOWN.representation.double().tolist())
    means = [mean([unit(move(row)) for row in rows]) for rows in classes(KNOWN.representation)]
    for query, predicted in zip(QUERIES.representation.tolist(), found.tolist(), strict=True):
        likeness = [cosine(move(query), one) for one in means]
        assert predicted == likeness.index(max(likeness))


class TestFeatureBank:
    rows = draw(12, 5, seed=6)

    @pytest.mark.parametrize("entries", [2**24, 20])  # all at once, and four rows at a time
    def test_one_minus_the_product_is_the_bregman_divergence_of_the_scores(
        self, entries, monkeypatch
    ):
        monkeypatch.setattr("deepbregman.method.bregman._ENTRIES", entries)
        bank = FeatureBank.gather(self.rows)
        score = scores_over(self.rows.double().tolist())
        rows = QUERIES.representation.double().tolist()
        whole = torch.tensor([score(row) for row in rows], dtype=torch.float64)
        expected = bregman(squared_euclidean, whole[:, None], whole[None])
        found = bank.score(QUERIES.representation)
        assert torch.allclose(1.0 - found @ found.T, expected, atol=1e-9)

    def test_the_length_of_a_feature_does_not_matter(self):
        scale = torch.arange(1.0, 13.0)[:, None]
        banks = [FeatureBank.gather(rows) for rows in (self.rows, scale * self.rows)]
        one, other = (bank.score(QUERIES.representation) for bank in banks)
        assert torch.allclose(one @ one.T, other @ other.T, atol=1e-6)

    def test_a_class_is_the_centre_of_its_images(self):
        """No other vector of unit length has a smaller sum of divergences to them."""
        bank = FeatureBank.gather(self.rows)
        members = bank.score(KNOWN.representation)
        logits = bank.class_logits(KNOWN.representation, 0 * LABELS, KNOWN.representation, 1)
        least = float((1.0 - logits).sum())
        for seed in range(20):
            other = members.sum(dim=0) + 0.3 * draw(5, seed=seed).double()
            assert float((1.0 - members @ (other / other.norm())).sum()) > least

    def test_images_that_are_all_alike_have_no_scores(self):
        bank = FeatureBank.gather(torch.ones(4, 5))
        assert bank.score(self.rows).abs().max() < 1e-6


def test_with_one_label_a_distribution_is_its_image():
    one = KNOWN.select(torch.tensor([0, 2, 5]))
    by_image, by_set = (
        ask(f"nearest {what}, divergence", 0.5, one, torch.arange(3))
        for what in ("image", "distribution")
    )
    assert torch.equal(by_image, by_set)


def test_draws_take_as_many_of_each_class_and_differ_by_seed():
    labels = torch.tensor([1, 2, 1, 2, 2, 1, 4, 4, 4])
    rows = draw_labels(labels, 2, seed=0)
    assert labels[rows].tolist() == [1, 1, 2, 2, 4, 4]
    assert len(set(rows.tolist())) == 6
    drawn = {tuple(draw_labels(labels, 2, seed).tolist()) for seed in range(8)}
    assert len(drawn) > 1


def test_all_rules_measure_the_same_draw(few):
    found = measure_draw(few, 5, seed=3)
    assert set(found) == set(RULES)
    rows = draw_labels(few.train.labels, 5, 3)
    from sklearn.neighbors import NearestCentroid

    points = torch.nn.functional.normalize(few.train.features.representation[rows].double(), dim=1)
    centroids = NearestCentroid().fit(points.numpy(), few.train.labels[rows].numpy()).centroids_
    asked = few.test.features.representation.double().numpy()
    cosines = asked @ (centroids / np.linalg.norm(centroids, axis=1, keepdims=True)).T
    right = (cosines.argmax(axis=1) == few.test.labels.numpy()).mean()
    assert found["nearest mean, cosine"]["top1"] == pytest.approx(100 * right)


def test_numbers_of_classes_may_have_gaps(few):
    """As where a class has no image at all."""
    expected = measure_draw(few, 5, seed=3)
    assert measure_draw(with_gaps(few), 5, seed=3) == expected


def test_the_protocol_averages_draws(short_run, few_digits, monkeypatch):
    settings = Few(labels_per_class=(1, 3), draws=2)
    rows = evaluate(short_run, protocols=["few"], data=few_digits, few=settings)
    assert [row["num_train"] for row in rows] == [10] * len(RULES) + [30] * len(RULES)
    assert rows[0]["details"] == {"draws": 2}
    drawn: list[tuple[int, int]] = []

    def count(_labelled: object, count: int, seed: int) -> dict[str, dict[str, float]]:
        drawn.append((count, seed))
        return {"linear": {"top1": float(len(drawn))}}

    monkeypatch.setattr("deepbregman.evaluation.few.measure_draw", count)
    rows = evaluate(short_run, protocols=["few"], data=few_digits, seeds=2, few=settings)
    assert [count for count, _ in drawn] == [1, 1, 3, 3, 1, 1, 3, 3]
    assert len({seed for _, seed in drawn}) == 8  # no draw is another one again
    assert {row["variant"]: row["values"] for row in rows} == {
        "1 label per class, linear": [1.5, 5.5],
        "3 labels per class, linear": [3.5, 7.5],
    }


def test_more_labels_than_the_smallest_class_has_are_refused(short_run, few_digits, few):
    with pytest.raises(UserError, match="labels_per_class has 21, and class '0' has 20"):
        evaluate(short_run, protocols=["few"], data=few_digits, few=Few((21,)))
    train = few.source.train
    left = torch.cat([(train.labels != 7).nonzero()[:, 0], (train.labels == 7).nonzero()[:3, 0]])
    source = replace(few.source, train=train.select(left))
    with pytest.raises(UserError, match="labels_per_class has 5, and class '7' has 3"):
        evaluate(short_run, protocols=["few"], source=source, few=Few((1, 5)))
