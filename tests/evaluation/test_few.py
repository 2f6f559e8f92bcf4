"""Few labels per class: each rule against a loop, and draws that are what they say."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from deepbregman.commands.evaluate import evaluate
from deepbregman.errors import UserError
from deepbregman.evaluation.classes import FeatureBank
from deepbregman.evaluation.features import Features, LabelledFeatures
from deepbregman.evaluation.few import RULES, Task, draw_labels, measure_draw
from deepbregman.evaluation.options import Few
from deepbregman.runs import Run

LABELS = torch.tensor([0, 0, 1, 1, 1, 2])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KNOWN = Features(draw(6, 5, seed=0), draw(6, 4, seed=1), draw(6, 3, seed=2))
QUERIES = Features(draw(9, 5, seed=3), draw(9, 4, seed=4), draw(9, 3, seed=5))


def ask(rule: str, smoothing: float, known: Features = KNOWN, labels: Tensor = LABELS) -> Tensor:
    bank = FeatureBank.draw(KNOWN.representation)
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
    assert part is not None
    return [part[label == LABELS].double().tolist() for label in range(3)]


@pytest.mark.parametrize(("form", "smoothing"), [(hard, 0.0), (soft, 0.5)])
def test_the_nearest_distribution_equals_a_loop(
    form: Callable[[list[float], list[float]], float], smoothing: float
) -> None:
    found = ask("nearest distribution, divergence", smoothing)
    assert QUERIES.scores is not None
    for query, predicted in zip(QUERIES.scores.double().tolist(), found.tolist(), strict=True):
        distances = [form(query, mean(rows)) for rows in classes(KNOWN.scores)]
        assert distances[predicted] == pytest.approx(min(distances), abs=1e-12)
    assert len(set(found.tolist())) > 1


@pytest.mark.parametrize(
    ("name", "part"), [("cosine", "representation"), ("cosine of embeddings", "embedding")]
)
def test_the_nearest_mean_equals_a_loop(name: str, part: str) -> None:
    found = ask(f"nearest mean, {name}", 0.0)
    means = [mean([unit(row) for row in rows]) for rows in classes(getattr(KNOWN, part))]
    for query, predicted in zip(getattr(QUERIES, part).tolist(), found.tolist(), strict=True):
        likeness = [cosine(query, centre) for centre in means]
        assert predicted == likeness.index(max(likeness))


def test_the_nearest_image_equals_a_loop() -> None:
    found = ask("nearest image, divergence", 0.5)
    assert QUERIES.scores is not None
    for query, predicted in zip(QUERIES.scores.tolist(), found.tolist(), strict=True):
        nearest = [min(soft(query, row) for row in rows) for rows in classes(KNOWN.scores)]
        assert predicted == nearest.index(min(nearest))


def distribution(row: list[float], bank: list[list[float]], centre: list[float]) -> list[float]:
    """The softmax of the cosines with the rows of a bank, all centred."""
    moved = [x - c for x, c in zip(row, centre, strict=True)]
    others = [[x - c for x, c in zip(other, centre, strict=True)] for other in bank]
    shares = [math.exp(cosine(moved, other)) for other in others]
    return [share / sum(shares) for share in shares]


def test_the_nearest_class_over_a_bank_equals_a_loop() -> None:
    found = ask("nearest class, divergence over a bank", 0.0)
    bank = KNOWN.representation.double().tolist()
    centre = mean(bank)
    mixtures = [
        mean([distribution(row, bank, centre) for row in rows])
        for rows in classes(KNOWN.representation)
    ]
    for query, predicted in zip(QUERIES.representation.tolist(), found.tolist(), strict=True):
        mine = distribution(query, bank, centre)
        away = [
            sum(b * math.log(b / a) for a, b in zip(mixture, mine, strict=True))
            for mixture in mixtures
        ]
        assert predicted == away.index(min(away))
    assert len(set(found.tolist())) > 1


def test_the_centred_mean_equals_a_loop() -> None:
    found = ask("nearest mean, cosine of centred features", 0.0)
    centre = mean(KNOWN.representation.double().tolist())

    def move(row: list[float]) -> list[float]:
        return [x - c for x, c in zip(row, centre, strict=True)]

    means = [mean([unit(move(row)) for row in rows]) for rows in classes(KNOWN.representation)]
    for query, predicted in zip(QUERIES.representation.tolist(), found.tolist(), strict=True):
        likeness = [cosine(move(query), one) for one in means]
        assert predicted == likeness.index(max(likeness))


def test_a_mixture_is_the_centre_of_its_images() -> None:
    """No other distribution has a smaller sum of divergences to the images of a class."""
    bank = FeatureBank.draw(KNOWN.representation)
    shares = bank.log_shares(QUERIES.representation).exp()

    def total(target: Tensor) -> float:
        return float((shares * (shares / target).log()).sum())

    mixture = shares.mean(dim=0)
    for seed in range(20):
        other = (mixture.log() + 0.1 * draw(len(mixture), seed=seed).double()).softmax(dim=0)
        assert total(mixture) < total(other)


def test_with_one_label_a_distribution_is_its_image() -> None:
    one = KNOWN.select(torch.tensor([0, 2, 5]))
    by_image, by_set = (
        ask(f"nearest {what}, divergence", 0.5, one, torch.arange(3))
        for what in ("image", "distribution")
    )
    assert torch.equal(by_image, by_set)


def test_draws_take_as_many_of_each_class_and_differ_by_seed() -> None:
    labels = torch.tensor([1, 2, 1, 2, 2, 1, 4, 4, 4])
    rows = draw_labels(labels, 2, seed=0)
    assert labels[rows].tolist() == [1, 1, 2, 2, 4, 4]
    assert len(set(rows.tolist())) == 6
    drawn = {tuple(draw_labels(labels, 2, seed).tolist()) for seed in range(8)}
    assert len(drawn) > 1


def test_all_rules_measure_the_same_draw(few: LabelledFeatures) -> None:
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


def test_the_protocol_averages_draws_and_refuses_too_many_labels(
    short_run: Run, few_digits: str
) -> None:
    settings = Few(labels_per_class=(1, 3), draws=2)
    rows = evaluate(short_run, protocols=["few"], data=few_digits, few=settings, accelerator="cpu")
    assert [row["num_train"] for row in rows] == [10] * len(RULES) + [30] * len(RULES)
    assert rows[0]["details"] == {"draws": 2}
    with pytest.raises(UserError, match="labels_per_class has 21, and class '0' has 20"):
        evaluate(short_run, protocols=["few"], data=few_digits, few=Few((21,)), accelerator="cpu")
