"""Classes as distributions of their images: means of features, and divergences to them.

The scores of an empirical distribution are the mean of its samples' scores, so the mean of a class
stands for the class itself, and ``D(image || class)`` compares a point with a distribution.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.method.bregman import prepare_targets, split_rows

_MEMBERS = 2**24  # entries of a one-hot matrix at a time


def class_means(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the mean (C, d) of each class's rows, in float64; every class must have some."""
    labels = labels.to(values.device)
    sizes = torch.bincount(labels, minlength=num_classes)[:, None]
    sums, start = values.new_zeros(num_classes, values.shape[1], dtype=torch.float64), 0
    for part in split_rows(values):
        sums += sum_classes(part.double(), labels[start : start + len(part)], num_classes)
        start += len(part)
    return sums / sizes


def sum_classes(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the sum (C, d) of each class's rows; zero where there are none."""
    sums = values.new_zeros(num_classes, values.shape[1])
    if values.device.type == "cpu":
        return sums.index_add_(0, labels, values)
    chunk = max(1, _MEMBERS // num_classes)
    for start in range(0, len(values), chunk):
        # A product adds in a fixed order where index_add_ on a GPU does not.
        members = functional.one_hot(labels[start : start + chunk], num_classes)
        sums += members.to(values.dtype).T @ values[start : start + chunk]
    return sums


def divergence_to(scores: Tensor, distributions: Tensor, smoothing: float) -> Tensor:
    """Return ``D(image || distribution)`` (N, C); distributions are their mean scores (C, K)."""
    diverge = prepare_targets(distributions, smoothing)
    return torch.cat([diverge(part) for part in split_rows(scores)])


def mean_cosines(known: Tensor, labels: Tensor, queries: Tensor, num_classes: int) -> Tensor:
    """Return the cosine (Q, C) of each query (Q, d) with the mean direction of each class."""
    return _normalise(queries) @ _mean_directions(known, labels, num_classes).T


def _mean_directions(known: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    return _normalise(class_means(_normalise(known), labels, num_classes))


def _normalise(vectors: Tensor) -> Tensor:
    return functional.normalize(vectors.double(), dim=1)


class FeatureBank(NamedTuple):
    """Images without labels, by which other images are compared: a divergence for any encoder.

    An image has a score for each image b of the bank: ``<h - mean, b - mean>``, where features are
    of unit length. The vector of its scores is divided by its length. ``D(p || q)`` is half the
    squared distance of two such vectors, the Bregman divergence of half the squared norm; for two
    images it is 1 minus the cosine of their scores. The products of score vectors need only the
    covariance of the bank, ``sum_b <x, b> <b, y> = K x'Cy``. So d numbers stand for K scores.
    """

    mean: Tensor
    """(d,) float64, of the features of the bank, each of unit length."""
    root: Tensor
    """(d, d) float64; ``root @ root.T`` is the covariance C of the bank."""

    @classmethod
    def gather(cls, features: Tensor) -> "FeatureBank":
        """Make a bank of all images with features (N, d)."""
        width = features.shape[1]
        parts = split_rows(features)
        mean = features.new_zeros(width, dtype=torch.float64)
        covariance = features.new_zeros(width, width, dtype=torch.float64)
        for part in parts:
            mean += _normalise(part).sum(dim=0) / len(features)
        for part in parts:
            centred = _normalise(part) - mean
            covariance += centred.T @ centred / len(features)
        variances, directions = torch.linalg.eigh(covariance)
        return cls(mean, directions * variances.clamp_min(0.0).sqrt())

    def centre(self, features: Tensor) -> Tensor:
        """Return the features, of unit length, without the mean of the bank: (N, d) float64."""
        return _normalise(features) - self.mean

    def score(self, features: Tensor) -> Tensor:
        """Return vectors (N, d) of unit length whose products are those of the score vectors."""
        return _normalise(self.centre(features) @ self.root)

    def class_logits(
        self, known: Tensor, labels: Tensor, queries: Tensor, num_classes: int
    ) -> Tensor:
        """Return ``1 - D(image || class)`` of features (Q, C).

        A class is the vector of unit length with the smallest sum of divergences to its images.
        """
        classes = _mean_directions(self.score(known), labels, num_classes)  # (C, d)
        return torch.cat([self.score(part) @ classes.T for part in split_rows(queries)])
