"""Labels from a few labels: classifiers, calibration, the expected accuracy, what to label next."""

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor

from deepbregman.evaluation.classes import FeatureBank
from deepbregman.evaluation.features import Features
from deepbregman.evaluation.few import Task
from deepbregman.evaluation.predicting import (
    Candidate,
    _draw_folds,
    expect_accuracy,
    fit_temperature,
    predict_labels,
    suggest_images,
)
from deepbregman.method.bregman import soft_divergence
from deepbregman.statistics import wilson_interval

from ..conftest import normal


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blobs(seed: int, num_classes: int = 3, each: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around a centre for each class, and their labels."""
    labels = torch.arange(num_classes).repeat(each)
    centres = 4.0 * draw(num_classes, 8, seed=seed)
    return centres[labels] + draw(len(labels), 8, seed=seed + 1), labels


def some_known(labels: torch.Tensor, count: int) -> torch.Tensor:
    shown = labels.clone()
    shown[count:] = -1
    return shown


@given(st.integers(1, 500), st.data())
def test_wilson_is_that_of_scipy(n, data):
    found = data.draw(st.integers(0, n))
    expected = binomtest(found, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(found / n, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


class TestClassifiers:
    train = Features(draw(7, 5), draw(7, 4, seed=1))
    queries = Features(draw(6, 5, seed=2), draw(6, 4, seed=3))
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 2])

    def ask(self, candidate: Candidate) -> Tensor:
        bank = FeatureBank.gather(self.queries.representation)
        return candidate.logits(Task(self.train, self.labels, self.queries, 3, 0.5, bank))

    def test_neighbours_vote_by_their_cosine(self):
        found = self.ask(Candidate("knn", 3))
        for query, logits in zip(self.queries.representation, found, strict=True):
            cosines = torch.cosine_similarity(query[None].double(), self.train.representation)
            best = cosines.topk(3)
            votes = torch.full((3,), 1 / 3, dtype=torch.float64)
            for value, index in zip(best.values, best.indices, strict=True):
                votes[self.labels[index]] += math.exp((value - best.values[0]) / 0.1)
            assert logits.softmax(0) == pytest.approx(votes / votes.sum(), abs=1e-5)

    @pytest.mark.parametrize("num_classes", [2, 3])
    def test_linear_has_the_probabilities_of_scikit_learn(self, num_classes):
        """The penalty is that of `fit_linear`, on features that are divided by one number."""
        known, labels = self.train.representation.double(), self.labels % num_classes
        middle = known.mean(dim=0)
        scale = (known - middle).square().mean().sqrt()
        design, asked = (
            ((rows - middle) / scale).numpy() for rows in (known, self.queries.representation)
        )
        fit = LogisticRegression(C=1 / (1e-2 * 7), tol=1e-10, solver="newton-cg")
        expected = torch.from_numpy(fit.fit(design, labels.numpy()).predict_proba(asked))
        bank = FeatureBank.gather(self.queries.representation)
        task = Task(self.train, labels, self.queries, num_classes, 0.5, bank)
        found = Candidate("linear", 1e-2).logits(task).softmax(dim=1)
        torch.testing.assert_close(found, expected, atol=0.01, rtol=0)  # it stops early

    def test_a_class_is_the_distribution_of_its_images(self):
        found = self.ask(Candidate("divergence"))
        for kind in range(3):
            members = self.train.scores[self.labels == kind].double()[None]  # a set
            expected = -soft_divergence(self.queries.scores.double(), members, 0.5)[:, 0]
            assert found[:, kind] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("truth", [0.3, 1.0, 5.0])
def test_the_temperature_is_found(truth):
    logits = 3.0 * truth * draw(4000, 4).double()
    generator = torch.Generator().manual_seed(1)
    labels = torch.multinomial((logits / truth).softmax(1), 1, generator=generator)[:, 0]
    assert fit_temperature(logits, labels) == pytest.approx(truth, rel=0.06)


def test_a_few_right_answers_are_not_certain():
    labels = torch.arange(10) % 2
    logits = 10.0 * torch.nn.functional.one_hot(labels, 2).double()
    best = (logits / fit_temperature(logits, labels)).softmax(1).max()
    assert best == pytest.approx(11 / 12, abs=1e-3)


def test_the_best_of_many_guessers_is_expected_to_guess():
    """Twenty coins: the best is right far more often than half, but only by chance."""
    generator = torch.Generator().manual_seed(0)
    raw, corrected, equal = [], [], torch.ones(40).double()
    for seed in range(20):
        correct = torch.rand(20, 40, generator=generator) < 0.5
        raw.append(correct.double().mean(dim=1).max().item())
        corrected.append(
            expect_accuracy(correct, torch.zeros(20, 40), seed, choosing=equal, counted=equal)
        )
    assert sum(raw) / 20 > 0.62
    assert sum(corrected) / 20 == pytest.approx(0.5, abs=0.04)


def test_one_classifier_needs_no_correction():
    correct = torch.rand(1, 200, generator=torch.Generator().manual_seed(0)) < 0.7
    share = correct.double().mean().item()
    equal = torch.ones(200).double()
    found = expect_accuracy(correct, torch.zeros(1, 200), 0, choosing=equal, counted=equal)
    assert found == pytest.approx(share, abs=0.01)


def test_weights_count_in_the_choice_and_in_the_estimate():
    # The first is right on the 90 common images only, the second on the 10 rare ones and 45 others.
    correct = torch.zeros(2, 100, dtype=torch.bool)
    correct[0, :90] = True
    correct[1, 45:] = True
    weights = torch.cat([torch.full((90,), 100 / 180), torch.full((10,), 100 / 20)]).double()
    losses, equal = torch.zeros(2, 100), torch.ones(100).double()
    for choosing, counted, expected in (
        (equal, equal, 0.9),
        (equal, weights, 0.5),
        (weights, weights, 0.75),
        (weights, equal, 0.55),
    ):
        found = expect_accuracy(correct, losses, 0, choosing=choosing, counted=counted)
        assert found == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("better", [0, 1])
def test_losses_decide_among_classifiers_that_are_equally_often_right(better):
    """Both are right on the images that choose; of the others, the second alone."""
    correct = torch.ones(2, 100, dtype=torch.bool)
    correct[0, 50:] = False
    choosing = (torch.arange(100) < 50).double()
    losses = torch.ones(2, 100)
    losses[better] = 0.5
    found = expect_accuracy(correct, losses, 0, choosing=choosing, counted=1.0 - choosing)
    assert found == pytest.approx(float(better))


def test_folds_are_ten_or_five_and_of_one_size():
    for count, folds in ((3, 3), (499, 10), (500, 5)):
        sizes = torch.bincount(_draw_folds(count, 0))
        assert len(sizes) == folds
        assert sizes.max() - sizes.min() <= 1


def test_a_rare_class_counts_as_much_where_that_is_asked_for():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(1200, generator=generator) < 0.15).long()
    points = torch.randn(1200, 2, generator=generator) + 1.5 * labels[:, None]
    known, recalls = some_known(labels, 200), []
    for balanced in (False, True):
        features = Features(points, None)
        found = predict_labels(features, known, num_classes=2, kinds=("linear",), balanced=balanced)
        chosen = found.judged[0]
        assert chosen.classifier.weighted == balanced
        # Both classes: the mean of their shares is the balanced accuracy, the rest is counting.
        assert chosen.balanced == pytest.approx(sum(found.class_accuracies) / 2)
        sizes = torch.bincount(labels[:200])
        right = sum(n * share for n, share in zip(sizes, found.class_accuracies, strict=True))
        assert chosen.accuracy == pytest.approx(float(right) / 200)
        predicted, truth = found.probabilities[200:].argmax(1), labels[200:]
        for expected, score in (
            (found.expected, accuracy_score(truth, predicted)),
            (found.expected_balanced, balanced_accuracy_score(truth, predicted)),
        ):
            assert expected.low <= 100 * score <= expected.high
        recalls.append(balanced_accuracy_score(truth, predicted))
    assert recalls[1] > recalls[0] + 0.05


@pytest.mark.parametrize("informative", ["features", "scores"])
def test_the_kind_that_fits_is_chosen(informative):
    points, labels = blobs(0)
    noise = draw(*points.shape, seed=5)
    features = Features(points, noise) if informative == "features" else Features(noise, points)
    found = predict_labels(features, some_known(labels, 30), num_classes=3, smoothing=1.0)
    chosen = found.judged[0].classifier.kind
    assert (chosen == "divergence") == (informative == "scores")
    rest = found.probabilities[30:].argmax(dim=1) == labels[30:]
    accuracy = 100.0 * rest.double().mean().item()
    assert accuracy > 90.0
    assert found.expected.low <= accuracy <= found.expected.high
    assert found.probabilities.sum(dim=1) == pytest.approx(torch.ones(len(labels)))
    assert torch.equal(found.probabilities[:30].argmax(dim=1), labels[:30])
    assert found.probabilities[:30].max(dim=1).values.min() == 1.0
    accuracies = [one.accuracy for one in found.judged]
    assert accuracies == sorted(accuracies, reverse=True)


def test_noise_is_expected_to_be_labelled_by_chance():
    labels = torch.arange(120) % 3
    points = Features(draw(120, 8, seed=1), None)
    found = predict_labels(points, some_known(labels, 60), num_classes=3)
    assert {one.classifier.kind for one in found.judged} == {"knn", "linear", "bank"}
    assert found.expected.low < 100 / 3 < found.expected.high
    assert found.probabilities[60:].max(dim=1).values.mean() < 0.5


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_what_few_random_labels_promise_is_kept(apart):
    """Ten classes and twenty labels: some classes have one label, and some have none."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (500,), generator=generator)
    points = apart * draw(10, 8)[labels] + draw(500, 8, seed=1)
    found = []
    for seed in range(50):
        shown = torch.full_like(labels, -1)
        chosen = torch.randperm(500, generator=generator)[:20]
        shown[chosen] = labels[chosen]
        kinds, rest = ("knn", "bank"), shown < 0
        said = predict_labels(Features(points, None), shown, num_classes=10, kinds=kinds, seed=seed)
        right = 100.0 * (said.probabilities.argmax(1) == labels)[rest].double().mean().item()
        found.append(
            (said.expected.value - right, said.expected.low <= right <= said.expected.high)
        )
    errors, kept = zip(*found, strict=True)
    assert sum(errors) / len(errors) == pytest.approx(0.0, abs=4.0)  # two deviations of the mean
    assert sum(kept) / len(kept) >= 0.85


def test_images_that_were_suggested_teach_but_are_no_sample():
    """Three clear classes, of which 20 images were drawn, and ten images between all of them."""
    points, labels = blobs(0, each=20)
    points[50:] = points[:50].mean(dim=0)
    suggested = torch.arange(60) >= 50
    shown = torch.where(suggested, labels, some_known(labels, 20))
    features = Features(points, None)
    options = {"num_classes": 3, "kinds": ("knn",)}
    plain = predict_labels(features, shown, **options)
    found = predict_labels(features, shown, suggested=suggested, **options)
    assert torch.equal(found.probabilities, plain.probabilities)
    assert found.expected.value == 100.0
    assert found.expected_balanced.value == pytest.approx(100.0)
    assert plain.expected.value < 95.0
    size = 20 / (1 + 10 / 9)  # of ten folds
    assert found.expected.low == pytest.approx(100 * wilson_interval(1.0, size)[0])
    # Where nothing was drawn, what was suggested is all there is.
    shown = torch.where(suggested, labels, -1)
    plain = predict_labels(features, shown, **options)
    found = predict_labels(features, shown, suggested=suggested, **options)
    assert found.expected == plain.expected


def test_a_class_whose_labels_were_mostly_suggested_counts_as_much_as_others():
    """Rare classes are what suggestions are for."""
    labels = torch.tensor([0] * 450 + [1] * 450 + [2] * 100)
    points = 0.3 * normal(1000, 16)
    points[:, 0] += torch.where(labels == 1, 3.0, -3.0)  # nothing tells the third from the first
    places = torch.cat([torch.arange(40), torch.arange(450, 490), torch.arange(900, 910)])
    shown = torch.full_like(labels, -1).index_put((places,), labels[places])
    suggested = torch.zeros(1000, dtype=torch.bool).index_fill(0, torch.arange(902, 910), True)
    features, options = Features(points, None), {"num_classes": 3, "kinds": ("knn",)}
    for known in (None, suggested):
        found = predict_labels(features, shown, suggested=known, **options)
        assert found.class_accuracies == (100.0, 100.0, 0.0)
        assert found.expected_balanced.value == pytest.approx(200 / 3, abs=0.5)


def test_a_class_with_one_label_is_taught_and_counts_as_wrong():
    points, labels = blobs(0, each=20)
    shown = some_known(labels, 30)
    shown[(labels == 2) & (torch.arange(60) > 2)] = -1  # it keeps one label
    found = predict_labels(Features(points, None), shown, num_classes=3, kinds=("knn",))
    right = found.probabilities.argmax(1) == labels
    assert right[labels == 2].double().mean() > 0.8
    assert found.class_accuracies == (100.0, 100.0, None)
    assert found.judged[0].accuracy == pytest.approx(100 * 20 / 21)
    assert found.judged[0].balanced == 100.0
    assert found.expected.value < 97.0


def test_a_fold_may_hold_all_labels_of_a_class():
    points, labels = blobs(0, num_classes=2, each=20)
    chosen = torch.cat([(labels == 0).nonzero()[:12, 0], (labels == 1).nonzero()[:2, 0]])
    shown = torch.full_like(labels, -1)
    shown[chosen] = labels[chosen]
    both = (shown[shown >= 0] == 1).nonzero().flatten()
    seed = next(s for s in itertools.count() if len(set(_draw_folds(14, s)[both].tolist())) == 1)
    found = predict_labels(Features(points, None), shown, num_classes=2, seed=seed)
    assert found.class_accuracies == (100.0, 0.0)
    assert torch.equal(found.probabilities.argmax(1), labels)


def test_two_labels_of_each_of_many_classes_are_no_reason_to_warn():
    """scikit-learn takes so many classes for a regression."""
    points, labels = blobs(4, num_classes=24, each=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The number of unique classes")
        found = predict_labels(Features(points, None), some_known(labels, 48), num_classes=24)
    assert len(found.probabilities) == 72


def test_two_labels_of_a_class_are_enough():
    points, labels = blobs(3, num_classes=2, each=10)
    found = predict_labels(Features(points, None), some_known(labels, 4), num_classes=2)
    assert found.expected.high - found.expected.low > 30  # four labels tell little


def test_the_most_frequent_label_is_judged_by_the_same_folds():
    """Ten equally frequent classes: one of them is right for a tenth, whatever 20 labels say."""
    accuracies = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(10, (30,), generator=generator)
        points = Features(torch.randn(30, 4, generator=generator), None)
        shown = some_known(labels, 20)
        found = predict_labels(points, shown, num_classes=10, kinds=("knn",), seed=seed)
        folds, right = _draw_folds(20, seed), 0
        for place in range(20):
            others = labels[:20][folds != folds[place]].tolist()
            right += max(sorted(set(others)), key=others.count) == int(labels[place])
        chance = 100 / len(set(labels[:20].tolist()))
        assert found.guess.accuracy == pytest.approx(max(5.0 * right, chance))
        accuracies.append(5.0 * right)
    assert sum(accuracies) / 40 == pytest.approx(10.0, abs=3.0)  # their largest share: 22


@pytest.mark.parametrize("balanced", [False, True])
def test_equally_many_labels_of_each_class_are_compared_with_chance(balanced):
    """The class of a held-out image is the rarest of the others: no fold would guess it."""
    labels = torch.arange(4).repeat(10)
    points = Features(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), None)
    found = predict_labels(points, some_known(labels, 20), num_classes=4, balanced=balanced)
    assert (found.guess.accuracy, found.guess.balanced) == (25.0, 25.0)


def test_small_fits_take_one_thread(monkeypatch):
    """On a busy machine several threads of BLAS wait for each other."""
    seen, fit = [], LogisticRegression.fit

    def look(self: LogisticRegression, *arguments: Any) -> LogisticRegression:
        seen.extend(p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas")
        return fit(self, *arguments)

    monkeypatch.setattr(LogisticRegression, "fit", look)
    points, labels = blobs(0)
    with threadpool_limits(2, user_api="blas"):
        predict_labels(Features(points, None), some_known(labels, 12), num_classes=3)
    assert set(seen) == {1}


class TestSuggestions:
    def test_the_uncertain_come_first_and_copies_only_once(self):
        points = torch.eye(6)[[0, 1, 2, 2, 3, 4]] + 0.0
        certainty = torch.tensor([1.0, 0.99, 0.5, 0.5, 0.6, 0.9])
        probabilities = torch.stack([certainty, 1 - certainty], dim=1)
        labelled = torch.tensor([True, False, False, False, False, False])
        found = suggest_images(points, probabilities, labelled, 4)
        assert found[0] in (2, 3)
        assert found[1:] == [4, 5, 1]  # the copy of the first teaches nothing more
        assert sorted(suggest_images(points, probabilities, labelled, 99)) == [1, 2, 3, 4, 5]

    def test_uncertain_is_what_two_classes_are_nearly_as_probable_for(self):
        probabilities = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.3, 0.3], [0.5, 0.5, 0.0]])
        labelled = torch.tensor([True, False, False])
        assert suggest_images(torch.eye(3), probabilities, labelled, 2) == [2, 1]

    def test_far_from_the_labelled_among_equally_uncertain(self):
        points = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
        labelled = torch.tensor([True, False, False])
        assert suggest_images(points, torch.full((3, 2), 0.5), labelled, 1) == [2]
