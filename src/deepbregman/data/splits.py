"""Seeded splits: a held-out part, and a few labelled images of each class."""

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from deepbregman.errors import UserError


def stratified_split(
    labels: Tensor | None, num_items: int, fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Hold a fraction out, class by class where there are labels.

    Of a class with ``n`` items ``n * fraction`` are held out, rounded down or up: up for the
    largest remainders, until the total is that of the whole set. Beyond that, a class of two or
    more always has an item on either side, and a class of one item is kept.

    Args:
        labels: int64 (num_items,), or None for a plain random split.
        num_items: How many items there are.
        fraction: The share to hold out, 0 <= fraction < 1; with 0 nothing is.
        seed: The same seed gives the same split, whatever the versions of torch and NumPy.

    Returns:
        The indices kept and the indices held out, int64 and ascending.

    Raises:
        UserError: When the fraction is outside its range or the labels do not match the items.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"held-out fraction {fraction}: must be at least 0 and below 1, e.g. 0.1")
    if labels is None:
        labels = torch.zeros(num_items, dtype=torch.int64)
    if labels.shape != (num_items,):
        raise UserError(
            f"labels of shape {tuple(labels.shape)} for {num_items} items: give one label for each"
        )
    _, positions, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    quotas = _quotas(counts.tolist(), Fraction(fraction).limit_denominator(10**6))
    random = _random(seed)
    held = torch.zeros(num_items, dtype=torch.bool)
    for group, quota in enumerate(quotas):
        members = torch.nonzero(positions == group).flatten()
        held[members[torch.from_numpy(random.permutation(len(members))[:quota])]] = True
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def labelled_subset(labels: Tensor, per_class: int, seed: int) -> Tensor:
    """Draw the same number of items of each class.

    Args:
        labels: int64 (N,).
        per_class: How many of each class that occurs, at least 1.
        seed: The same seed gives the same items.

    Returns:
        Indices, int64 (per_class * number of classes,), ascending.

    Raises:
        UserError: When a class has fewer items than that.
    """
    if per_class < 1:
        raise UserError(f"labelled images per class {per_class}: must be at least 1")
    random = _random(seed)
    chosen = []
    for label in torch.unique(labels).tolist():
        members = torch.nonzero(labels == label).flatten()
        if len(members) < per_class:
            raise UserError(
                f"labelled images per class {per_class}: class {label} has only {len(members)}; "
                f"ask for at most {len(members)} per class"
            )
        chosen.append(members[torch.from_numpy(random.permutation(len(members))[:per_class])])
    return torch.cat(chosen).sort().values if chosen else torch.empty(0, dtype=torch.int64)


def _quotas(counts: list[int], fraction: Fraction) -> list[int]:
    """Return how many items to hold out of each class."""
    if fraction == 0:
        return [0] * len(counts)
    shares = [count * fraction for count in counts]
    quotas = [
        max(math.floor(share), 1 if count >= 2 else 0)
        for share, count in zip(shares, counts, strict=True)
    ]
    missing = math.floor(sum(counts) * fraction + Fraction(1, 2)) - sum(quotas)
    by_remainder = sorted(range(len(counts)), key=lambda k: (math.floor(shares[k]) - shares[k], k))
    for k in by_remainder:
        if missing > 0 and quotas[k] < shares[k] and quotas[k] < counts[k] - 1:
            quotas[k] += 1
            missing -= 1
    return quotas


def _random(seed: int) -> np.random.RandomState:
    """Return NumPy's legacy generator: the only one whose stream is promised never to change."""
    return np.random.RandomState(seed)
