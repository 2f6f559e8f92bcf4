"""Supervised losses on a matrix of divergences, as Deep Divergence Learning trains (ICML 2020).

They see no networks and no formula of a divergence: ``distance[i, j]`` is D(i || j), the anchor is
the row, and the diagonal is never a pair. With a divergence that is not symmetric both directions
of a pair count, each with its own anchor.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .bregman import Number


def _pairs(distance: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masks (N, N) of pairs of one class, without the diagonal, and of two classes."""
    if distance.ndim != 2 or distance.shape != (len(labels), len(labels)):
        raise ValueError(
            f"divergences of shape {tuple(distance.shape)} with {len(labels)} labels: expected "
            "(N, N) and (N,), every sample against every sample"
        )
    same = labels[:, None] == labels
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return same & ~itself, ~same


def contrastive_margin(distance: Tensor, labels: Tensor, margin: Number = 1.0) -> Tensor:
    """Pull pairs of one class together, push the others apart up to a margin.

    ``1/2 (mean of d over pairs of one class + mean of max(margin - d, 0)^2 over the others)``. Each
    kind is averaged by itself, so that the number of classes does not set their balance; a kind of
    which the batch has none counts 0.

    Args:
        distance: (N, N) divergences >= 0.
        labels: (N,) integers.
        margin: beyond which pairs of two classes are left alone.

    Returns:
        A scalar.
    """
    same, different = _pairs(distance, labels)
    attract = (distance * same).sum() / same.sum().clamp_min(1)
    gap = (margin - distance).clamp_min(0.0).square()
    repel = (gap * different).sum() / different.sum().clamp_min(1)
    return 0.5 * (attract + repel)


def triplet_margin(distance: Tensor, labels: Tensor, margin: Number = 1.0) -> Tensor:
    """Mean over all triplets of a batch of ``max(d(a, p) - d(a, n) + margin, 0)``.

    Every anchor a with every p of its class and every n of another. The cube of triplets is never
    formed: with an anchor's negatives sorted, those nearer than ``d(a, p) + margin`` are a prefix,
    whose size and sum are all that is needed. Memory is O(N^2), the value and the gradient exact.

    Args:
        distance: (N, N) divergences >= 0.
        labels: (N,) integers.
        margin: by which a negative is to be further than a positive.

    Returns:
        A scalar; 0 where the batch has no triplet.
    """
    same, different = _pairs(distance, labels)
    negatives, order = distance.masked_fill(~different, torch.inf).sort(dim=1)
    is_negative = different.gather(1, order)
    sums = torch.where(is_negative, negatives, 0.0).cumsum(dim=1)  # (N, N), of the nearest ones
    sums = torch.cat([sums.new_zeros(len(sums), 1), sums], dim=1)  # (N, N + 1)
    reach = distance + margin  # (N, N)
    count = torch.searchsorted(negatives.detach(), reach.detach().contiguous())  # (N, N)
    hinge = count * reach - sums.gather(1, count)
    triplets = (same.sum(dim=1) * different.sum(dim=1)).sum()
    return (hinge * same).sum() / triplets.clamp_min(1)


METRIC_LOSSES: dict[str, Callable[[Tensor, Tensor, Number], Tensor]] = {
    "contrastive": contrastive_margin,
    "triplet": triplet_margin,
}
