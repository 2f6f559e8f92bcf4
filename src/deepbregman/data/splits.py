"""Seeded splits: a part held out, by items or by whole groups.

They are drawn by NumPy's legacy generator, the only one whose stream is promised never to change.
"""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def stratified_split(
    labels: Tensor | None, num_items: int, fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Hold a fraction out, class by class where there are labels.

    Of a class with ``n`` items ``n * fraction`` are held out, rounded down or up: up for the
    largest remainders, until the total is that of the whole set. Beyond that, a class of two or
    more always has an item on either side, and a class of one item is kept.

    Args:
        labels: int64 (num_items,), or None for a plain random split.
        fraction: The share to hold out, 0 <= fraction < 1; with 0 nothing is.
        seed: The same seed gives the same split, whatever the versions of torch and NumPy.

    Returns:
        The indices kept and the indices held out, int64 and ascending.
    """
    if labels is None:
        labels = torch.zeros(num_items, dtype=torch.int64)
    _, positions, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    quotas = _find_quotas(counts.tolist(), Fraction(fraction).limit_denominator(10**6))
    random = np.random.RandomState(seed)
    held = torch.zeros(num_items, dtype=torch.bool)
    for group, quota in enumerate(quotas):
        members = torch.nonzero(positions == group).flatten()
        held[members[torch.from_numpy(random.permutation(len(members))[:quota])]] = True
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def grouped_split(
    labels: Tensor, groups: Tensor, fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Hold a fraction out, class by class, whole groups at a time.

    Two photographs of one lesion are nearly one image, so a test split that shares lesions with
    the training split measures memory. A group counts for the class that most of its items have.
    The groups of a class are gone through in a seeded order, and one is held out when that brings
    the items held out nearer to what :func:`stratified_split` would hold out: off by at most half
    a group. A class of two or more groups always has one on either side, which may cost up to one
    group more; a class of one group is kept.

    Labels and groups are int64 (N,); the result is as of :func:`stratified_split`.
    """
    _, classes = torch.unique(labels, return_inverse=True)
    numbers, members = torch.unique(groups, return_inverse=True)
    num_classes = int(classes.max()) + 1 if len(classes) else 0
    table = torch.zeros((len(numbers), num_classes), dtype=torch.int64)
    table.index_put_((members, classes), torch.ones_like(classes), accumulate=True)
    sizes, main = table.sum(dim=1).numpy(), table.numpy().argmax(axis=1)
    counts = np.bincount(main, weights=sizes, minlength=num_classes).astype(int).tolist()
    random = np.random.RandomState(seed)
    held = np.zeros(len(numbers), dtype=bool)
    quotas = _find_quotas(counts, Fraction(fraction).limit_denominator(10**6))
    for label, quota in enumerate(quotas):
        candidates = np.flatnonzero(main == label)
        chosen = _choose_groups(sizes[candidates], quota, random.permutation(len(candidates)))
        held[candidates[chosen]] = True
    out = torch.from_numpy(held)[members]
    return torch.nonzero(~out).flatten(), torch.nonzero(out).flatten()


def _choose_groups(
    sizes: npt.NDArray[np.int64], target: int, order: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Choose groups, in an order, whose sizes add up to about ``target``: some, but not all."""
    chosen = np.zeros(len(sizes), dtype=bool)
    if target == 0 or len(sizes) < 2:
        return chosen
    total = 0
    for group in order:
        if abs(total + sizes[group] - target) < abs(total - target):
            chosen[group], total = True, total + sizes[group]
    if chosen.all() or not chosen.any():
        smallest = order[sizes[order].argmin()]
        chosen[smallest] = not chosen[smallest]
    return chosen


def _find_quotas(counts: list[int], fraction: Fraction) -> list[int]:
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
