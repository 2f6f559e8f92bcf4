"""The protocol ``few``: classes known by 1 to 20 labelled images each, without training.

With a functional divergence the labelled images of a class are one empirical distribution, and an
image belongs to the class at the smallest ``D(image || distribution)``. Beside it stand the same
rule with single images in place of the distribution, the nearest class by the divergence over a
bank of features, the mean of features by cosine, centred and not, and a linear classifier, all on
the same draws of labels.
"""

from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from deepbregman.errors import UserError
from deepbregman.runs import Record
from deepbregman.training.randomness import derive_seed

from .classes import FeatureBank, class_means, divergence_to, mean_cosines
from .features import Features, LabelledFeatures
from .inputs import Evaluation
from .knn import rank_bank, select_features
from .linear import fit_linear
from .results import Measurement, make_rows

PENALTY = 1e-2
"""Penalty of the linear classifier; there are too few labels to choose one."""


class Task(NamedTuple):
    """A few labelled images, and what to classify by them."""

    known: Features
    labels: Tensor
    """(n,), from 0 to C - 1, of the known images."""
    queries: Features
    num_classes: int
    smoothing: float
    bank: FeatureBank

    def divergence_logits(self) -> Tensor:
        """Return ``-D(image || class)`` (Q, C), float64: a class is its images' distribution."""
        known, asked = (select_features(part, "divergence") for part in (self.known, self.queries))
        means = class_means(known, self.labels, self.num_classes)
        return -divergence_to(asked, means, self.smoothing)

    def bank_logits(self) -> Tensor:
        """Return ``1 - D(image || class)`` (Q, C), float64, by the divergence over the bank."""
        known, asked = self.known.representation, self.queries.representation
        return self.bank.class_logits(known, self.labels, asked, self.num_classes)


Rule = Callable[[Task], Tensor]
"""Predicts the classes (Q,) of the queries."""


def nearest_mean(task: Task, *, measure: str, centred: bool = False) -> Tensor:
    """Predict the class of the mean of largest cosine."""
    known, asked = (select_features(part, measure) for part in (task.known, task.queries))
    if centred:
        known, asked = task.bank.centre(known), task.bank.centre(asked)
    return mean_cosines(known, task.labels, asked, task.num_classes).argmax(dim=1)


def nearest_image(task: Task, *, measure: str) -> Tensor:
    """Predict the class of the nearest labelled image."""
    asked, bank = (select_features(part, measure) for part in (task.queries, task.known))
    nearest = rank_bank(measure, asked, bank, 1, smoothing=task.smoothing).indices[:, 0]
    return task.labels[nearest]


def linear_rule(task: Task) -> Tensor:
    """Predict by a linear classifier with one penalty."""
    rows, count = task.known.representation, task.num_classes
    fit = fit_linear(rows, task.labels, num_classes=count, l2=PENALTY, one_scale=True)
    return fit.predict(task.queries.representation).argmax(dim=1)


BY_EMBEDDING = "nearest mean, cosine of embeddings"
RULES: dict[str, Rule] = {
    "linear": linear_rule,
    "nearest image, cosine": partial(nearest_image, measure="cosine"),
    "nearest mean, cosine": partial(nearest_mean, measure="cosine"),
    "nearest mean, cosine of centred features": partial(
        nearest_mean, measure="cosine", centred=True
    ),
    "nearest class, divergence over a bank": lambda task: task.bank_logits().argmax(dim=1),
    BY_EMBEDDING: partial(nearest_mean, measure="embedding"),
    "nearest image, divergence": partial(nearest_image, measure="divergence"),
    "nearest distribution, divergence": lambda task: task.divergence_logits().argmax(dim=1),
}
BY_DIVERGENCE = ("nearest image, divergence", "nearest distribution, divergence")


def draw_labels(labels: Tensor, count: int, seed: int) -> Tensor:
    """Draw ``count`` random images of each class: their indices, class by class, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    labels, drawn = labels.cpu(), []
    for label in torch.unique(labels).tolist():
        places = (labels == label).nonzero().flatten()
        drawn.append(places[torch.randperm(len(places), generator=generator)[:count]])
    return torch.cat(drawn)


def check_few(evaluation: Evaluation) -> None:
    """Refuse to draw more images of a class than it has."""
    source, most = evaluation.labelled.source, max(evaluation.options.few.labels_per_class)
    present, counts = torch.unique(source.train.known_labels, return_counts=True)
    if int(counts.min()) < most:
        name = source.class_name(int(present[int(counts.argmin())]))
        raise UserError(
            f"few.labels_per_class has {most}, and class {name!r} has {int(counts.min())} training "
            "images: give smaller numbers with --few.labels-per-class"
        )


def few(evaluation: Evaluation) -> list[Record]:
    """Classify the test images by a few labelled training images of each class.

    A value is the mean over the draws of a seed; all rules see the same draws.
    """
    labelled, settings = evaluation.labelled, evaluation.options.few
    work = len(evaluation.options.each_seed) * len(settings.labels_per_class) * settings.draws
    seeds, done = [], 0
    for seed in evaluation.options.each_seed:
        measured = []
        for count in settings.labels_per_class:
            found: list[dict[str, dict[str, float]]] = []
            for draw in range(settings.draws):
                found.append(measure_draw(labelled, count, derive_seed(seed, f"few {count}", draw)))
                done += 1
                evaluation.progress("few labels", done, work)
            measured += _average(labelled, count, found)
        seeds.append(measured)
    return make_rows(seeds)


def measure_draw(labelled: LabelledFeatures, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Measure every rule that the run allows on one draw of labels."""
    train, test = labelled.train, labelled.test
    rows = draw_labels(train.labels, count, seed).to(train.labels.device)
    # A class without an image has no distribution: count the others only.
    present, labels = torch.unique(train.labels[rows], return_inverse=True)
    known = train.features.select(rows)
    smoothing = labelled.config.divergence.smoothing
    task = Task(known, labels, test.features, len(present), smoothing, train.feature_bank)
    found = {}
    for name, rule in RULES.items():
        if name in BY_DIVERGENCE and known.scores is None:
            continue
        if name == BY_EMBEDDING and known.embedding is None:
            continue
        found[name] = labelled.measure(present[rule(task)])
    return found


def _average(
    labelled: LabelledFeatures, count: int, found: list[dict[str, dict[str, float]]]
) -> list[Measurement]:
    words = f"{count} label{'s' * (count > 1)} per class"
    num_classes = len(torch.unique(labelled.train.labels))
    counts, details = (count * num_classes, len(labelled.test.labels)), {"draws": len(found)}
    measured = []
    for name, first in found[0].items():
        values = {metric: fmean(draw[name][metric] for draw in found) for metric in first}
        measured.append(Measurement(f"{words}, {name}", values, *counts, details))
    return measured
