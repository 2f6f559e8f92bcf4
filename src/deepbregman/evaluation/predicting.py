"""Predict the labels of images from labels for a few: classifiers that compete.

There are nearest neighbours by cosine, a linear classifier, the nearest class by the learned
divergence ``D(image || class)``, where a class is the empirical distribution of its labelled
images, and the nearest class by the divergence over a bank of all images. Cross-validation on the
labelled images chooses. Its folds are drawn without regard to the classes. So the images of the
other folds are a random choice, as the labelled images are, and some classes may be missing. The
accuracy of the best of several is higher than it would be on other images, so it is corrected by
the bootstrap of Tsamardinos et al. (2018): choose on a resample, judge on what the resample left
out. Accuracy is counted twice, by images and as the mean over the classes; the first one chooses,
unless classes are to count the same.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.data import Progress
from deepbregman.statistics import wilson_interval
from deepbregman.terminal import ignore_progress

from .classes import FeatureBank
from .features import Features
from .few import Task
from .knn import VOTE_TEMPERATURE, cosine_neighbours, normalise_rows
from .linear import measure_scale

KINDS = ("knn", "linear", "divergence", "bank")
NEIGHBOURS = (5, 20)
"""A single neighbour would be equally sure of all images."""
PENALTIES = (1e-1, 1e-2, 1e-3)
FOLDS = 10
MANY_LABELS = 500
"""With this number of labels or more, half the folds are enough."""
RESAMPLES = 1000
_ENTRIES = 2**24  # entries of a matrix of images that are computed at a time


class Candidate(NamedTuple):
    """A kind of classifier with its setting: k of knn, the penalty of linear.

    Beside those of ``KINDS`` there is "guess", which knows only how frequent the labels are.
    """

    kind: str
    setting: float = 0.0
    weighted: bool = False
    """Whether every class counts the same in the loss of linear."""

    @property
    def title(self) -> str:
        """Its name for people."""
        if self.kind == "guess":
            return "most frequent label"
        if self.kind == "knn":
            return f"{self.setting:g} nearest by cosine"
        if self.kind == "linear":
            return f"linear, penalty {self.setting:g}" + ", weighted classes" * self.weighted
        over = " over a bank of images" if self.kind == "bank" else ""
        return f"nearest class by divergence{over}"

    def logits(self, task: Task) -> Tensor:
        """Learn from the known images and return the logits (Q, C) of the queries, float64."""
        known, asked = task.known.representation, task.queries.representation
        if self.kind == "guess":
            counts = torch.bincount(task.labels.cpu(), minlength=task.num_classes)
            return counts.double().log().repeat(len(asked), 1)
        if self.kind == "bank":
            return task.bank_logits()
        if self.kind == "divergence":
            return task.divergence_logits()
        if self.kind == "linear":
            return _linear_logits(known, task.labels, asked, self.setting, self.weighted)
        found = cosine_neighbours(asked, known, int(self.setting))
        nearest = found.similarities[:, :1]
        weights = ((found.similarities - nearest) / VOTE_TEMPERATURE).exp().double()  # (Q, k)
        totals = weights.new_zeros(len(weights), task.num_classes)
        totals.scatter_add_(1, task.labels.to(weights.device)[found.indices], weights)
        # One vote of weight 1 is shared by all classes.
        return (totals + 1.0 / task.num_classes).log()


def _linear_logits(
    known: Tensor, labels: Tensor, asked: Tensor, l2: float, weighted: bool
) -> Tensor:
    """Fit as `fit_linear` does, not to the last digit: cross-validation fits dozens of times."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    values = known.cpu().double()
    mean, deviation = measure_scale(values, one_scale=True)
    weights = "balanced" if weighted else None
    fit = LogisticRegression(C=1.0 / (l2 * len(values)), max_iter=1000, class_weight=weights)
    # Several threads gain nothing here, and on a busy machine they wait for each other.
    with warnings.catch_warnings(), threadpool_limits(1, user_api="blas"):
        # It warns if each class has two labels.
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        fit.fit(((values - mean) / deviation).numpy(), labels.cpu().numpy())
    design = (asked.cpu().double() - mean) / deviation
    logits = torch.from_numpy(fit.decision_function(design.numpy()))
    return logits if logits.ndim == 2 else torch.stack([-logits / 2, logits / 2], dim=1)


class Judged(NamedTuple):
    """A classifier and how it did on labelled images that it had not learned from."""

    classifier: Candidate
    accuracy: float
    """In per cent."""
    balanced: float
    """Mean of the accuracies of the classes, in per cent."""
    log_loss: float
    """Mean, of the calibrated probabilities."""
    temperature: float
    """Divides the logits; chosen so that the probabilities are right."""


class ExpectedAccuracy(NamedTuple):
    """The accuracy to expect on other images, in per cent, with a 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
    """Labels for all images."""

    probabilities: Tensor
    """(N, C) float64 on the CPU; those of labelled images are 0 and 1."""
    judged: list[Judged]
    """The classifiers that were tried, the chosen one first."""
    guess: Judged
    """The most frequent label for every image, judged in the same way; to compare."""
    expected: ExpectedAccuracy
    expected_balanced: ExpectedAccuracy
    """The mean over the classes."""
    class_accuracies: tuple[float | None, ...]
    """Of the labelled images of each class, the share that the chosen classifier, which had not
    learned from them, got right; in per cent. None of a class with one label."""


@dataclass(frozen=True, eq=False)
class _Examples:
    """The n labelled images that classifiers learn from."""

    features: Features
    targets: Tensor
    """(n,) int64 on the CPU, from 0 to C - 1; every class has an image."""
    num_classes: int
    """C."""
    smoothing: float
    bank: FeatureBank

    def ask(self, classifier: Candidate, rows: Tensor, queries: Features) -> Tensor:
        """Let a classifier learn from some of the images, and return its logits (Q, C) of others.

        Args:
            rows: (n,) bool, the images that it learns from. A class of which none is among them is
                never its answer.
        """
        present, truth = torch.unique(self.targets[rows], return_inverse=True)
        known, count = self.features.select(rows), len(present)
        found = torch.zeros(len(queries.representation), 1).double()  # nothing to tell apart
        if count > 1:
            task = Task(known, truth, queries, count, self.smoothing, self.bank)
            found = classifier.logits(task).cpu()
        absent = found.amin(dim=1, keepdim=True) - 1e-9  # never the answer
        logits = absent.repeat(1, self.num_classes)
        logits[:, present] = found
        return logits

    def cross_validate(
        self, classifiers: Sequence[Candidate], folds: Tensor, progress: Progress
    ) -> Tensor:
        """Return the logits (M, n, C) that M classifiers learned from the other folds.

        Args:
            folds: (n,) the fold of each image.
        """
        num_folds = int(folds.max()) + 1
        shape = (len(classifiers), len(folds), self.num_classes)
        logits = torch.empty(shape, dtype=torch.float64)
        for fold in range(num_folds):
            here = folds == fold
            for index, classifier in enumerate(classifiers):
                logits[index, here] = self.ask(classifier, ~here, self.features.select(here))
            progress(fold + 1, num_folds)
        return logits


def predict_labels(
    features: Features,
    labels: Tensor,
    *,
    num_classes: int,
    smoothing: float = 0.0,
    kinds: Sequence[str] = KINDS,
    balanced: bool = False,
    suggested: Tensor | None = None,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> Prediction:
    """Predict the labels of images from those of a few among them.

    A class with one label is never found where that label is held out, so it counts as wrong. This
    happens about as often as an image is of a class that has no label at all (Good, 1953). In the
    mean over the classes it does not count.

    Args:
        labels: (N,) int64; -1 for an image without label. Two classes have at least 2, which
            ``check_counts`` makes sure of.
        kinds: which of ``KINDS`` may compete; ``divergence`` only where there are scores.
        balanced: Every class counts the same, in linear classifiers and in the choice.
        suggested: (N,) bool, labelled images that were not chosen at random. They teach, but say
            little of other images, so the expected accuracy leaves them out, unless no others are
            labelled.
    """
    labels = labels.cpu()
    places = (labels >= 0).nonzero().flatten()
    taught, targets = torch.unique(labels[places], return_inverse=True)
    bank = FeatureBank.gather(features.representation)
    examples = _Examples(features.select(places), targets, len(taught), smoothing, bank)
    folds = _draw_folds(len(places), seed)
    fold_sizes = torch.bincount(folds)
    possible = [kind for kind in kinds if kind != "divergence" or features.scores is not None]
    tried = _list_classifiers(possible, len(places) - int(fold_sizes.max()), balanced)
    tried.append(Candidate("guess"))
    held_out = examples.cross_validate(tried, folds, progress)
    sizes = torch.bincount(targets).double()
    weights = _weigh_classes(targets, sizes > 1)
    equal = torch.ones_like(weights)
    drawn = equal.clone() if suggested is None else (~suggested[places]).double()
    drawn = drawn if (drawn * weights).any() else equal
    *judged, (guess, _, _) = [
        _judge(*pair, targets, weights) for pair in zip(tried, held_out, strict=True)
    ]
    # Where all classes have equally many labels, holding one out makes its class the rarest: the
    # guess would always be wrong.
    chance = 100.0 / len(taught)
    guess = guess._replace(
        accuracy=max(guess.accuracy, chance), balanced=100.0 / int((sizes > 1).sum())
    )
    hits = torch.stack([right for _, right, _ in judged])  # (M, n)
    losses = torch.stack([lost for _, _, lost in judged])  # (M, n)

    def rank(index: int) -> tuple[float, float]:
        one = judged[index][0]
        return -(one.balanced if balanced else one.accuracy), one.log_loss

    order = sorted(range(len(judged)), key=rank)
    best = judged[order[0]][0]
    shares = torch.zeros_like(sizes).scatter_add_(0, targets, hits[order[0]]) / sizes
    accuracies = {
        int(label): 100.0 * float(share)
        for label, share, size in zip(taught, shares, sizes, strict=True)
        if size > 1
    }
    logits = examples.ask(best.classifier, torch.ones_like(targets, dtype=torch.bool), features)
    probabilities = torch.zeros(len(labels), num_classes, dtype=torch.float64)
    probabilities[:, taught] = (logits / best.temperature).softmax(dim=1)
    probabilities[places] = functional.one_hot(labels[places], num_classes).double()
    choosing = weights if balanced else equal
    expect = partial(_expect_interval, hits, losses, choosing, len(fold_sizes), seed)
    return Prediction(
        probabilities=probabilities,
        judged=[judged[index][0] for index in order],
        guess=guess,
        expected=expect(drawn),
        expected_balanced=expect(_weigh_classes(targets, sizes > 1, drawn)),
        class_accuracies=tuple(accuracies.get(place) for place in range(num_classes)),
    )


def _weigh_classes(targets: Tensor, counted: Tensor, drawn: Tensor | None = None) -> Tensor:
    """Return weights (n,) of labels by which each class counts the same; their mean is 1.

    Args:
        counted: (C,) whether a class counts.
        drawn: (n,) 1 for labels that count, else 0; by default all. A class without any is left
            out.
    """
    drawn = torch.ones(len(targets), dtype=torch.float64) if drawn is None else drawn
    totals = torch.bincount(targets, weights=drawn, minlength=len(counted))
    weights = counted[targets] * drawn / totals[targets].clamp_min(1.0)
    return weights * len(targets) / weights.sum()


def _judge(
    classifier: Candidate, logits: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Judged, Tensor, Tensor]:
    """Judge held-out logits (n, C); also return what is right, 1 or 0, and the losses (n,)."""
    temperature = fit_temperature(logits, targets)
    right = (logits.argmax(dim=1) == targets).double()
    losses = functional.cross_entropy(logits / temperature, targets, reduction="none")
    accuracy, balanced = 100.0 * right.mean().item(), 100.0 * (weights * right).mean().item()
    return Judged(classifier, accuracy, balanced, losses.mean().item(), temperature), right, losses


def _expect_interval(
    correct: Tensor, losses: Tensor, choosing: Tensor, num_folds: int, seed: int, counted: Tensor
) -> ExpectedAccuracy:
    share = expect_accuracy(correct, losses, seed, choosing=choosing, counted=counted)
    # As many equal weights would be as informative (Kish).
    size = float(counted.sum().square() / counted.square().sum())
    # Other labels would also teach another classifier: the variance of Nadeau and Bengio (2003),
    # who derive it for repeated random splits.
    size /= 1.0 + num_folds / (num_folds - 1)
    low, high = wilson_interval(share, size)
    return ExpectedAccuracy(100 * share, 100 * low, 100 * high)


def _draw_folds(count: int, seed: int) -> Tensor:
    """Return the fold (n,) of each labelled image.

    Folds that had the same share of each class would teach a classifier how frequent the classes
    are among the very images that judge it.
    """
    wanted = FOLDS if count < MANY_LABELS else FOLDS // 2
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator) % min(wanted, count)


def _list_classifiers(kinds: Sequence[str], num_train: int, balanced: bool) -> list[Candidate]:
    settings: dict[str, Sequence[float]] = {
        "knn": [k for k in NEIGHBOURS if k <= num_train] or [num_train],
        "linear": PENALTIES,
        "divergence": (0.0,),
        "bank": (0.0,),
    }
    return [
        Candidate(kind, setting, weighted=balanced and kind == "linear")
        for kind in kinds
        for setting in settings[kind]
    ]


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature that makes probabilities of held-out logits (n, C) right.

    It minimises the cross-entropy. As Platt (1999) does, the target of the true class is a little
    below 1, ``(n + 1) / (n + 2)``: n images that are all right make no answer certain.
    """
    from scipy.optimize import minimize_scalar

    n, num_classes = logits.shape
    targets = torch.full_like(logits, 1.0 / ((n + 2) * (num_classes - 1)))
    targets.scatter_(1, labels[:, None], (n + 1) / (n + 2))
    scale = max(float(logits.std()), 1e-12)  # divergences may be small throughout

    def loss(log_temperature: float) -> float:
        scaled = logits / (scale * math.exp(log_temperature))
        return functional.cross_entropy(scaled, targets).item()

    found = minimize_scalar(loss, bounds=(-8.0, 8.0), method="bounded")
    return scale * math.exp(float(found.x))


def expect_accuracy(
    correct: Tensor, losses: Tensor, seed: int, *, choosing: Tensor, counted: Tensor
) -> float:
    """Estimate the accuracy, from 0 to 1, of the best of several classifiers on other images.

    Args:
        correct: (M, n) bool, whether each of M classifiers was right on each held-out image.
        losses: (M, n), which decide among classifiers that are equally often right.
        choosing: (n,), weights of the images in the accuracy that chooses.
        counted: (n,), weights of the images in the accuracy that is estimated.
    """
    num_images = correct.shape[1]
    random = np.random.default_rng(seed)
    drawn = random.multinomial(num_images, [1.0 / num_images] * num_images, size=RESAMPLES)
    counts = torch.from_numpy(drawn).double()  # (R, n)
    right = correct.double()
    inside = counts @ (choosing * right).T  # (R, M)
    ties = counts @ losses.double().T
    least = 0.5 * float(choosing[choosing > 0].min())  # below what one image counts
    inside -= least * (ties - ties.min()) / (ties.max() - ties.min()).clamp_min(1e-12)
    outside = (counts == 0).double() * counted
    judged = (outside @ right.T).gather(1, inside.argmax(dim=1, keepdim=True))[:, 0]
    estimate = float(judged.sum() / outside.sum().clamp_min(1e-12))
    return min(estimate, float((right @ counted).max() / counted.sum()))


def suggest_images(
    representation: Tensor, probabilities: Tensor, labelled: Tensor, count: int
) -> list[int]:
    """List the images whose labels would teach most, the most useful first.

    One after the other, it takes the image with the largest product of its uncertainty, one minus
    the gap between the two most probable classes, and its distance by cosine from the nearest image
    that is labelled or listed already. So near-duplicates are not listed twice.

    Args:
        representation: (N, d), of which ``labelled`` (N,) are left out.
    """
    first, second = probabilities.topk(2, dim=1).values.T
    uncertainty = (1.0 - (first - second)).to(representation.device).float()
    labelled = labelled.to(representation.device)
    uncertainty[labelled] = -1.0  # never listed
    points = normalise_rows(representation)
    nearest = torch.full_like(uncertainty, -1.0)
    for part in torch.split(points[labelled], max(1, _ENTRIES // len(points))):
        nearest = nearest.maximum((points @ part.T).amax(dim=1))
    chosen: list[int] = []
    for _ in range(min(count, int((~labelled).sum()))):
        value = uncertainty * (1.0 - nearest).clamp_min(1e-6)
        place = int(value.argmax())
        chosen.append(place)
        uncertainty[place] = -1.0
        nearest = nearest.maximum(points @ points[place])
    return chosen
