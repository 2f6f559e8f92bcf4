"""Classes as distributions of their images: means of features, and divergences to them.

The scores of an empirical distribution are the mean of its samples' scores, so the mean of a class
stands for the class itself, and ``D(image || class)`` compares a point with a distribution.
"""

import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.method.bregman import prepare_targets

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
