"""Classes as distributions of their images: means of features, and divergences to them.

The scores of an empirical distribution are the mean of its samples' scores, so the mean of a class
stands for the class itself, and ``D(image || class)`` compares a point with a distribution.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.method.bregman import cosine_scores, prepare_targets
from deepbregman.training.randomness import epoch_order

BANK_SIZE = 1024
_ENTRIES = 2**24  # scores at a time: 128 MiB in float64


def class_means(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the mean (C, d) of each class's rows, in float64; every class must have some.

    Args:
        labels: (n,), from 0 to C - 1.
    """
    labels = labels.to(values.device)
    sizes = torch.bincount(labels, minlength=num_classes)[:, None]
    return sum_classes(values.double(), labels, num_classes) / sizes


def sum_classes(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the sum (C, d) of each class's rows; zero where there are none."""
    sums = values.new_zeros(num_classes, values.shape[1])
    chunk = max(1, _ENTRIES // num_classes)
    for start in range(0, len(values), chunk):
        # A product adds in a fixed order where a scatter on a GPU does not.
        members = functional.one_hot(labels[start : start + chunk], num_classes)
        sums += members.to(values.dtype).T @ values[start : start + chunk]
    return sums


def divergence_to(scores: Tensor, distributions: Tensor, smoothing: float) -> Tensor:
    """Return ``D(image || distribution)`` (N, C), in float64 and a part at a time.

    Args:
        distributions: (C, K), the mean scores of each distribution.
        smoothing: temperature of the smooth form; 0 is the hard form.
    """
    parts = torch.split(scores, max(1, _ENTRIES // scores.shape[1]))
    diverge = prepare_targets(distributions.double(), smoothing)
    return torch.cat([diverge(part.double()) for part in parts])


class FeatureBank(NamedTuple):
    """Some images without labels, whose features are the subnetworks of a divergence.

    The scores of an image are the cosines of its feature with theirs, all centred. In the smooth
    form at T = 1 an image is a distribution over the bank, and ``D(a || b)`` is the
    Kullback-Leibler divergence of a's from b's.
    """

    mean: Tensor
    """(d,), of the features of the bank."""
    rows: Tensor
    """(K, d) float64, centred."""

    @classmethod
    def draw(cls, features: Tensor, size: int = BANK_SIZE, seed: int = 0) -> "FeatureBank":
        """Draw images from features (N, d); all where they are few."""
        order = epoch_order(len(features), seed, 0)[:size].to(features.device)
        drawn = features[order].double()
        mean = drawn.mean(dim=0)
        return cls(mean, drawn - mean)

    def log_shares(self, features: Tensor) -> Tensor:
        """Return the logarithm of the distribution of each image over the bank, (N, K)."""
        scores = cosine_scores(features.double() - self.mean, self.rows)
        return functional.log_softmax(scores, dim=1)

    def class_logits(
        self, known: Tensor, labels: Tensor, queries: Tensor, num_classes: int
    ) -> Tensor:
        """Return ``-D(class || image)`` of features (Q, C), up to a number for each image.

        A class is the mixture of its images' distributions. No other point has a smaller sum of
        divergences to them, so it is their centre.
        """
        mixtures = class_means(self.log_shares(known).exp(), labels, num_classes).log()  # (C, K)
        parts = torch.split(queries, max(1, _ENTRIES // len(self.rows)))
        return torch.cat([self.log_shares(part).exp() @ mixtures.T for part in parts])
