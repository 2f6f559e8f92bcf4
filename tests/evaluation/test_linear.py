import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn import functional

from deepbregman.evaluation import linear
from deepbregman.evaluation.linear import (
    L2_GRID,
    LinearClassifier,
    SgdRows,
    SgdSetting,
    choose_l2,
    fit_linear,
    fit_linear_sgd,
)

DIGITS = load_digits()
FEATURES = torch.tensor(DIGITS.data, dtype=torch.float32)  # (1797, 64); some are constant
LABELS = torch.tensor(DIGITS.target)
TRAIN, TEST = slice(0, 1300), slice(1300, None)
HELD_OUT = torch.arange(1000, 1300)


def accuracy(classifier: LinearClassifier, features: Tensor, labels: Tensor) -> float:
    predictions = classifier.predict(features).argmax(1)
    return float(100 * np.mean(predictions.numpy() == labels.numpy()))


def gradient(
    classifier: LinearClassifier, features: Tensor, labels: Tensor, l2: float
) -> tuple[np.ndarray, np.ndarray]:
    """The slope of the objective at a classifier, by its closed form, in numpy float64."""
    x = StandardScaler().fit_transform(features.double().numpy())
    weight, bias = classifier.weight.numpy(), classifier.bias.numpy()
    logits = x @ weight.T + bias
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    residual = exponentials / exponentials.sum(1, keepdims=True)
    residual[np.arange(len(x)), labels.numpy()] -= 1
    return residual.T @ x / len(x) + l2 * weight, residual.mean(0)


@pytest.mark.parametrize("l2", [1e-1, 1e-3, 1e-6])
def test_agrees_with_scikit_learn(l2):
    classifier = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10, l2=l2)
    scaler = StandardScaler().fit(DIGITS.data[TRAIN])
    # Its default solver stops too early for a small l2 (off by 0.04 at 1e-6); Newton's does not.
    reference = LogisticRegression(C=1 / (l2 * 1300), tol=1e-10, solver="newton-cg")
    reference.fit(scaler.transform(DIGITS.data[TRAIN]), DIGITS.target[TRAIN])
    expected = reference.predict_proba(scaler.transform(DIGITS.data[TEST]))
    actual = classifier.predict(FEATURES[TEST]).softmax(1).numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-3, rtol=0)
    score = reference.score(scaler.transform(DIGITS.data[TEST]), DIGITS.target[TEST])
    assert accuracy(classifier, FEATURES[TEST], LABELS[TEST]) == pytest.approx(100 * score)
    assert 80 < 100 * score < 99


@pytest.mark.parametrize("l2", [1e-1, 1e-3, 1e-6])
def test_the_slope_vanishes_at_the_optimum(l2):
    classifier = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10, l2=l2)
    by_weight, by_bias = gradient(classifier, FEATURES[TRAIN], LABELS[TRAIN], l2)
    tiny = 2 * min(1e-7, 1e-3 * l2)
    assert np.abs(by_weight).max() < tiny
    assert np.abs(by_bias).max() < tiny
    # The check sees a classifier that is slightly off.
    moved = classifier._replace(weight=classifier.weight * 1.01)
    assert np.abs(gradient(moved, FEATURES[TRAIN], LABELS[TRAIN], l2)[0]).max() > 4 * tiny


def test_neither_the_start_nor_the_scale_of_the_features_matters():
    plain = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10, l2=1e-2)
    other = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10, l2=1.0)
    warm = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10, l2=1e-2, start=other)
    torch.testing.assert_close(warm.weight, plain.weight, atol=5e-5, rtol=0)
    affine = torch.linspace(0.01, 100, 64) * FEATURES[TRAIN] + 5
    scaled = fit_linear(affine, LABELS[TRAIN], num_classes=10, l2=1e-2)
    torch.testing.assert_close(
        scaled.predict(affine), plain.predict(FEATURES[TRAIN]), atol=1e-3, rtol=0
    )
    assert (plain.weight - other.weight).abs().max() > 0.1


def test_the_start_may_have_another_precision(monkeypatch):
    """A fit of fewer rows, in float64, may be the start of one that is in float32."""
    start = fit_linear(FEATURES[:100], LABELS[:100], num_classes=10)
    monkeypatch.setattr(linear, "FLOAT64_ELEMENTS", 0)
    fit = fit_linear(FEATURES[:200], LABELS[:200], num_classes=10, start=start)
    assert start.weight.dtype == torch.float64
    assert fit.weight.dtype == torch.float32


def test_stopping_short_is_said(monkeypatch):
    monkeypatch.setattr(linear, "MAX_ITERATIONS", 3)
    with pytest.warns(RuntimeWarning, match="after at most 3 iterations"):
        fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10)


def test_constant_features_are_harmless():
    constant = torch.full((1300, 3), 0.1) * torch.tensor([0.0, 1.0, 1e6])
    widened = torch.cat([FEATURES[TRAIN], constant], dim=1)
    classifier = fit_linear(widened, LABELS[TRAIN], num_classes=10)
    reference = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10)
    assert all(field.isfinite().all() for field in classifier)
    assert classifier.deviation[-3:].tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(
        classifier.predict(widened), reference.predict(FEATURES[TRAIN]), atol=1e-3, rtol=0
    )


def test_an_absent_class_is_never_predicted():
    rows = (LABELS[TRAIN] != 4).nonzero()[:, 0]
    classifier = fit_linear(FEATURES[rows], LABELS[rows], num_classes=10)
    logits = classifier.predict(FEATURES[TEST])
    assert logits[:, 4].tolist() == [-math.inf] * len(logits)
    dense = LABELS[rows] - (LABELS[rows] > 4).long()
    without = fit_linear(FEATURES[rows], dense, num_classes=9).predict(FEATURES[TEST])
    assert logits[:, [0, 1, 2, 3, 5, 6, 7, 8, 9]].equal(without)


def test_inference_mode_and_no_grad_are_no_obstacle():
    expected = fit_linear(FEATURES[:50], LABELS[:50], num_classes=10)
    with torch.inference_mode():
        inside = fit_linear(FEATURES[:50] + 0, LABELS[:50] + 0, num_classes=10)
    assert inside.weight.equal(expected.weight)
    assert not inside.weight.requires_grad


def test_choose_l2_picks_what_brute_force_picks():
    grid, held_out = (1e-4, 1e-3, 1e-2, 1e-1), torch.arange(400, 600)
    best, validation = choose_l2(FEATURES[:600], LABELS[:600], held_out, num_classes=10, grid=grid)
    brute = {}
    for l2 in grid:
        classifier = fit_linear(FEATURES[:400], LABELS[:400], num_classes=10, l2=l2)
        brute[l2] = accuracy(classifier, FEATURES[held_out], LABELS[held_out])
    assert validation == pytest.approx(brute)
    assert best == max(l2 for l2 in brute if brute[l2] == max(brute.values()))
    assert len(set(brute.values())) > 2


def uneven_rows() -> tuple[Tensor, Tensor]:
    """Features (240, 3) of three classes of 200, 30 and 10 rows that overlap."""
    labels = torch.tensor([0] * 200 + [1] * 30 + [2] * 10)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(240, generator=generator)
    centres = torch.tensor([[0.0, 0, 0], [1.5, 0, 0], [0, 1.5, 0]])
    return torch.randn(240, 3, generator=generator) + centres[labels[order]], labels[order]


def test_weighted_classes_are_those_of_scikit_learn():
    features, labels = uneven_rows()
    fit = fit_linear(features, labels, num_classes=3, l2=1e-2, weighted=True)
    scaler = StandardScaler().fit(features.double())
    reference = LogisticRegression(
        C=1 / (1e-2 * 240), tol=1e-10, solver="newton-cg", class_weight="balanced"
    )
    reference.fit(scaler.transform(features.double()), labels)
    expected = reference.predict_proba(scaler.transform(features.double()))
    actual = fit.predict(features).softmax(1).numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)
    plain = fit_linear(features, labels, num_classes=3, l2=1e-2).predict(features).argmax(1)
    recalls = [balanced_accuracy_score(labels, p) for p in (actual.argmax(1), plain)]
    assert recalls[0] > recalls[1] + 0.1


def test_weighted_classes_choose_by_balanced_accuracy():
    features, labels = uneven_rows()
    held_out, rest, grid = torch.arange(0, 240, 2), slice(1, None, 2), (3.0, 1e-1, 1e-3)
    best, validation = choose_l2(
        features, labels, held_out, num_classes=3, grid=grid, weighted=True
    )
    brute = {}
    for l2 in validation:
        fit = fit_linear(features[rest], labels[rest], num_classes=3, l2=l2, weighted=True)
        predicted = fit.predict(features[held_out]).argmax(1)
        brute[l2] = 100 * balanced_accuracy_score(labels[held_out], predicted)
    assert validation == pytest.approx(brute)
    assert brute[best] == max(brute.values())


@pytest.mark.parametrize(
    ("accuracies", "tried"),
    [
        ([90, 91, 92, 93, 94, 95], 6),
        ([90, 95, 94, 93, 99, 99], 4),  # two in a row are worse, and a third would not be
        ([90, 95, 94, 95, 94, 96], 6),  # an equal one is not worse, and ends the row
        ([95, 94, 94, 99, 99, 99], 3),  # worse than the best, not than the one before
        ([95, 93, 94, 99, 99, 99], 3),
        ([90, 91, 92, 93, 92, 91], 6),
    ],
)
def test_two_worse_penalties_in_a_row_end_the_search(monkeypatch, accuracies, tried):
    told = iter(accuracies)
    monkeypatch.setattr(linear, "top_k_accuracy", lambda *_: float(next(told)))
    best, validation = choose_l2(
        FEATURES[:60], LABELS[:60], torch.arange(10), num_classes=10, grid=L2_GRID
    )
    strongest_first = sorted(L2_GRID, reverse=True)
    assert list(validation) == strongest_first[:tried]
    assert list(validation.values()) == accuracies[:tried]
    assert best == strongest_first[accuracies.index(max(accuracies[:tried]))]


def correlated(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Features most of whose variance is in a few directions, and classes that overlap."""
    generator = torch.Generator().manual_seed(0)
    deviations = torch.arange(1, width + 1) ** -1.0
    labels = torch.randint(0, 4, (rows,), generator=generator)
    means = 0.6 * torch.randn(4, width, generator=generator)
    points = (means[labels] + torch.randn(rows, width, generator=generator)) * deviations
    turned = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    return points @ turned, labels


@pytest.fixture
def counts(monkeypatch) -> list[int]:
    """The last number grows with each product of the Hessian and a vector."""
    numbers, multiply = [0], linear._Objective.multiply_hessian

    def count(*arguments: Any) -> Tensor:
        numbers[-1] += 1
        return multiply(*arguments)

    monkeypatch.setattr(linear._Objective, "multiply_hessian", count)
    return numbers


def test_the_preconditioner_saves_half_of_the_products_and_moves_nothing(counts, monkeypatch):
    monkeypatch.setattr(linear, "_MOST_UNKNOWNS", 0)  # else the plain one ends early
    features, labels = correlated(1000, 48)
    identity = torch.eye(49, dtype=torch.float64)
    even = fit_linear(features, labels, num_classes=4, l2=1e-4)
    counts.append(0)
    monkeypatch.setattr(linear._Objective, "compute_preconditioner", lambda *_: identity)
    plain = fit_linear(features, labels, num_classes=4, l2=1e-4)
    assert 2 * counts[0] < counts[1]
    torch.testing.assert_close(even.weight, plain.weight, atol=2e-3, rtol=0)  # 2 * tolerance / l2
    design = StandardScaler().fit_transform(features.double().numpy())
    reference = LogisticRegression(C=1 / (1e-4 * 1000), tol=1e-10, solver="newton-cg", max_iter=999)
    expected = reference.fit(design, labels.numpy()).predict_proba(design)
    np.testing.assert_allclose(even.predict(features).softmax(1), expected, atol=1e-4, rtol=0)


def test_the_hessian_is_that_of_autograd(monkeypatch):
    monkeypatch.setattr(linear, "_ROWS_AT_ONCE", 60)
    features, labels = correlated(100, 5)
    shares = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    objective = linear._Objective(features.double(), labels, 0.1, shares)
    at = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def evaluate(flat: Tensor) -> Tensor:
        weight, bias = flat.view(4, 6)[:, :-1], flat.view(4, 6)[:, -1]
        each = functional.cross_entropy(features.double() @ weight.T + bias, labels, shares)
        return each + 0.05 * weight.square().sum() + bias.sum().square() / 8

    expected = torch.autograd.functional.hessian(evaluate, at.flatten())
    point = objective.evaluate(at)
    torch.testing.assert_close(objective.compute_hessian(point), expected)
    products = [
        objective.multiply_hessian(point, one.view(4, 6)).flatten()
        for one in torch.eye(24).double()
    ]
    torch.testing.assert_close(torch.stack(products), expected)


def test_a_small_penalty_takes_no_thousands_of_products(counts, monkeypatch):
    """One class of nearly equal images, such as screenshots, and others that overlap."""
    features, labels = correlated(600, 48)
    features[:15] = 3 * features.std(0) + 1e-4 * features[:15]
    others = labels[15:] % 3
    shuffled = torch.randperm(len(others), generator=torch.Generator().manual_seed(0))
    labels = torch.cat([torch.full((15,), 3), others[shuffled]])
    found = fit_linear(features, labels, num_classes=4, l2=1e-5)
    counts.append(0)
    monkeypatch.setattr(linear, "_MOST_UNKNOWNS", 0)
    slow = fit_linear(features, labels, num_classes=4, l2=1e-5)
    assert 2 * counts[0] < counts[1]
    torch.testing.assert_close(found.weight, slow.weight, atol=2e-3, rtol=0)  # 2 * tolerance / l2


def test_few_rows_of_many_features_agree_with_scikit_learn():
    """The span of the rows is enough, and an earlier start outside it changes nothing."""
    rows = torch.arange(0, 1300, 43)  # 31 of 64 features
    scaler = StandardScaler().fit(DIGITS.data[rows])
    reference = LogisticRegression(C=1 / (1e-2 * len(rows)), tol=1e-10, solver="newton-cg")
    reference.fit(scaler.transform(DIGITS.data[rows]), DIGITS.target[rows])
    fit = fit_linear(FEATURES[rows], LABELS[rows], num_classes=10, l2=1e-2)
    found = fit.weight[torch.unique(LABELS[rows])]
    np.testing.assert_allclose(found, reference.coef_, atol=1e-5, rtol=0)
    other = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10, l2=1e-2)
    warm = fit_linear(FEATURES[rows], LABELS[rows], num_classes=10, l2=1e-2, start=other)
    torch.testing.assert_close(warm.weight, fit.weight, atol=2e-5, rtol=0)


def test_rows_in_parts_change_nothing(monkeypatch):
    whole = fit_linear(FEATURES[:200], LABELS[:200], num_classes=10, l2=1e-2)
    monkeypatch.setattr(linear, "_ROWS_AT_ONCE", 60)
    parts = fit_linear(FEATURES[:200], LABELS[:200], num_classes=10, l2=1e-2)
    torch.testing.assert_close(parts.weight, whole.weight, atol=2e-5, rtol=0)


@pytest.mark.parametrize("most_in_float64", [2**27, 0])
def test_features_that_repeat_each_other(monkeypatch, most_in_float64):
    """Twins share a weight, as the penalty prefers: two halves cost half of the square."""
    monkeypatch.setattr(linear, "FLOAT64_ELEMENTS", most_in_float64)
    features, labels = correlated(400, 12)
    twins = torch.cat([features, features, torch.ones(400, 2)], dim=1)
    found = fit_linear(twins, labels, num_classes=4, l2=1e-2)
    single = fit_linear(features, labels, num_classes=4, l2=5e-3)
    halves = single.weight / 2
    torch.testing.assert_close(found.weight[:, :12], halves, atol=2e-3, rtol=0)
    torch.testing.assert_close(found.weight[:, 12:24], halves, atol=2e-3, rtol=0)
    assert found.weight[:, 24:].abs().max() < 1e-3


def test_a_penalty_below_the_rounding_of_collinear_features(monkeypatch):
    """Their float32 covariance plus 1e-9 has no Cholesky factor."""
    monkeypatch.setattr(linear, "FLOAT64_ELEMENTS", 0)
    features, labels = correlated(400, 12)
    found = fit_linear(torch.cat([features, features], dim=1), labels, num_classes=4, l2=1e-9)
    strong = fit_linear(features, labels, num_classes=4, l2=1e-3)
    assert accuracy(found, features.repeat(1, 2), labels) >= accuracy(strong, features, labels) - 1


def test_equal_accuracies_prefer_the_stronger_penalty():
    features = torch.tensor([[-1.0], [1.0], [-1.1], [1.1], [-0.9], [0.9]])
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    best, validation = choose_l2(
        features, labels, torch.tensor([4, 5]), num_classes=2, grid=(1e-3, 1e-1, 1e-2)
    )
    assert best == 1e-1
    assert validation == {1e-1: 100.0, 1e-2: 100.0, 1e-3: 100.0}


def sgd(seed: int = 0, *, epochs: int, learning_rate: float = 0.2) -> LinearClassifier:
    def batches(epoch: int) -> Iterator[SgdRows]:
        order = torch.randperm(1300, generator=torch.Generator().manual_seed(epoch))
        with torch.inference_mode():  # as a caller's frozen encoder would
            for rows in order.split(130):
                yield FEATURES[rows], LABELS[rows], torch.ones(130, dtype=torch.bool)

    scaler = StandardScaler().fit(DIGITS.data[TRAIN])
    (classifier,) = fit_linear_sgd(
        batches,
        [SgdSetting(learning_rate, 1e-3)],
        num_classes=10,
        epochs=epochs,
        seed=seed,
        mean=torch.tensor(scaler.mean_),
        deviation=torch.tensor(scaler.scale_),
    )
    return classifier


def test_sgd_comes_close_to_the_optimum_and_repeats():
    optimum = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10, l2=1e-3)
    classifier = sgd(epochs=60)
    expected = accuracy(optimum, FEATURES[TEST], LABELS[TEST])
    assert accuracy(classifier, FEATURES[TEST], LABELS[TEST]) == pytest.approx(expected, abs=2)
    assert accuracy(sgd(epochs=1, learning_rate=1e-6), FEATURES[TEST], LABELS[TEST]) < 50
    once = sgd(epochs=2)
    assert sgd(epochs=2).weight.equal(once.weight)
    assert not sgd(seed=1, epochs=2).weight.equal(once.weight)


def test_sgd_follows_the_cosine_and_spares_the_bias(monkeypatch):
    monkeypatch.setattr(linear, "MOMENTUM", 0.0)

    # Zero features leave the weights to the decay alone, and the bias to the labels alone.
    def batches(epoch: int) -> list[SgdRows]:
        return [(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool))]

    start, ended = (
        fit_linear_sgd(
            batches,
            [SgdSetting(0.5, 0.1)],
            num_classes=2,
            epochs=epochs,
            seed=3,
            mean=torch.zeros(1),
            deviation=torch.ones(1),
        )[0]
        for epochs in (0, 4)
    )
    rates = [0.5 * (1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in range(4)]
    shrinkage = math.prod(1 - 0.1 * rate for rate in rates)
    torch.testing.assert_close(ended.weight, shrinkage * start.weight)
    first = 0.0  # the bias of class 0; that of class 1 is its opposite
    for rate in rates:
        first -= rate * (1 / (1 + math.exp(-2 * first)) - 3 / 4)
    torch.testing.assert_close(ended.bias, torch.tensor([first, -first]))


def test_many_sgd_classifiers_are_each_what_torch_makes_alone():
    """torch's own SGD, one setting at a time, on all rows or on the kept ones; one diverges."""
    kept = torch.rand(6, 100, generator=torch.Generator().manual_seed(1)) < 0.7
    settings = [SgdSetting(0.1, 1e-2), SgdSetting(1e9, 1.0), SgdSetting(0.02, 1e-3, kept_only=True)]
    common = {"num_classes": 10, "seed": 5}
    scale = {"mean": FEATURES.mean(0).double(), "deviation": torch.full((64,), 7.0).double()}

    def batches(epoch: int) -> list[SgdRows]:
        rows = range(0, 600, 100)
        return [(FEATURES[r : r + 100], LABELS[r : r + 100], kept[i]) for i, r in enumerate(rows)]

    found = fit_linear_sgd(batches, settings, epochs=4, **common, **scale)
    start = fit_linear_sgd(batches, settings[:1], epochs=0, **common, **scale)[0]
    assert not found[1].weight.isfinite().all()
    for fit, setting in ((found[0], settings[0]), (found[2], settings[2])):
        weight, bias = start.weight.clone().requires_grad_(), start.bias.clone().requires_grad_()
        groups = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}]
        decay = setting.weight_decay
        optimiser = torch.optim.SGD(groups, setting.learning_rate, 0.9, weight_decay=decay)
        for epoch in range(4):
            for group in optimiser.param_groups:
                group["lr"] = setting.learning_rate * (1 + math.cos(math.pi * epoch / 4)) / 2
            for features, labels, seen in batches(epoch):
                mine = seen if setting.kept_only else torch.ones_like(seen)
                inputs = (features[mine] - scale["mean"].float()) / 7.0
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(inputs @ weight.T + bias, labels[mine]).backward()
                optimiser.step()
        torch.testing.assert_close(fit.weight, weight.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fit.bias, bias.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    expected = fit_linear(FEATURES[TRAIN], LABELS[TRAIN], num_classes=10, l2=1e-3)
    actual = fit_linear(FEATURES[TRAIN].cuda(), LABELS[TRAIN], num_classes=10, l2=1e-3)
    torch.testing.assert_close(actual.weight.cpu(), expected.weight, atol=1e-3, rtol=0)
    best, _ = choose_l2(FEATURES[TRAIN].cuda(), LABELS[TRAIN], HELD_OUT, num_classes=10)
    assert best == choose_l2(FEATURES[TRAIN], LABELS[TRAIN], HELD_OUT, num_classes=10)[0]


def test_one_scale_is_logistic_regression_on_centred_features():
    """scikit-learn on features that are centred and divided by one number."""
    features, labels = FEATURES[:200], LABELS[:200]
    found = fit_linear(features, labels, num_classes=10, l2=1e-2, one_scale=True)
    design = features.double() - features.double().mean(0)
    design = design / design.square().mean().sqrt()
    reference = LogisticRegression(C=1 / (1e-2 * 200), solver="newton-cg", tol=1e-8, max_iter=1000)
    expected = torch.tensor(reference.fit(design.numpy(), labels.numpy()).predict_proba(design))
    torch.testing.assert_close(found.predict(features).softmax(1), expected, rtol=0.0, atol=1e-3)
