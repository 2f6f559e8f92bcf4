"""Reference accuracies: the most frequent class, and the same classifier on raw pixels."""

from collections.abc import Sequence
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from deepbregman.data import stratified_split
from deepbregman.method.networks import Encoder, Model
from deepbregman.runs import Record

from .features import LabelledFeatures, compute_features
from .inputs import Evaluation
from .knn import cosine_neighbours, vote
from .linear import WEIGHTED, fit_best

SIDE = 16
"""Pixels that larger images are averaged to; more change little and take long."""
LARGEST_TRAIN = 20_000
"""Training images of the classifiers on pixels; of more a sample is taken, class by class."""
WITH_REFERENCES = ("knn", "linear")
"""Protocols whose rows get references."""


def add_references(rows: Sequence[Record], protocol: str, evaluation: Evaluation) -> list[Record]:
    """Return rows of a protocol with ``chance`` and ``raw_pixels``, of the row's own metric."""
    labelled = evaluation.labelled
    chance, pixels = guess(labelled), PixelClassifiers(labelled, evaluation.options.seed)
    found = []
    for row in rows:
        metric = row["metric"]
        if protocol == "linear":
            on_pixels = pixels.linear(weighted=row["variant"].endswith(WEIGHTED))
        else:
            on_pixels = pixels.knn(row["details"]["k"])
        found.append({**row, "chance": chance[metric], "raw_pixels": on_pixels[metric]})
    return found


def guess(labelled: LabelledFeatures) -> dict[str, float]:
    """Measure the answer that is always the most frequent classes of the training images."""
    counts = torch.bincount(labelled.train.labels, minlength=labelled.num_classes)
    logits = counts.double().expand(len(labelled.test.labels), -1)  # (n, C)
    return labelled.measure(logits.argmax(dim=1), logits)


class PixelClassifiers:
    """The classifiers of the protocols on the pixels themselves, each fitted once."""

    def __init__(self, labelled: LabelledFeatures, seed: int) -> None:
        self.labelled, self.seed = labelled, seed
        self.knn, self.linear = cache(self._measure_knn), cache(self._measure_linear)

    def _measure_knn(self, k: int) -> dict[str, float]:
        """Measure the vote of the k images of the largest cosine."""
        train, labels, test = self._pixels
        neighbours = cosine_neighbours(test, train, min(k, len(train)))
        return self.labelled.measure(vote(neighbours, labels, self.labelled.num_classes))

    def _measure_linear(self, weighted: bool = False) -> dict[str, float]:
        """Measure a linear classifier, its penalty chosen as the protocol chooses it."""
        train, labels, test = self._pixels
        count = self.labelled.num_classes
        fit, _ = fit_best(train, labels, count, self.seed, weighted=weighted)
        logits = fit.predict(test)
        return self.labelled.measure(logits.argmax(dim=1), logits)

    @cached_property
    def _pixels(self) -> tuple[Tensor, Tensor, Tensor]:
        """Training pixels (N, d) with labels (N,), and test pixels (T, d)."""
        labelled, size = self.labelled, self.labelled.config.data.image_size
        side = min(SIDE, size)
        trunk = nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten())
        model = Model(Encoder(trunk, 3 * side**2), nn.Sequential(), None).to(labelled.device)
        train, test = (
            compute_features(model, part.shared_batches, size).representation
            for part in (labelled.train, labelled.test)
        )
        labels = labelled.train.labels
        if len(labels) > LARGEST_TRAIN:
            share = LARGEST_TRAIN / len(labels)
            _, kept = stratified_split(labels.cpu(), len(labels), share, self.seed)
            train, labels = train[kept.to(train.device)], labels[kept.to(labels.device)]
        return train, labels, test
