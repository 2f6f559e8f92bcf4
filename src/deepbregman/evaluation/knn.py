"""Weighted k-nearest-neighbour classification of cached features.

The search (`nearest_by`) and the vote (`vote`) are separate: the search takes any similarity, so
that the learned divergence shares it with the cosine, and one search serves every smaller k.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# A vote counts in units of 2^-40 of the nearest neighbour's weight: sums of integers are exact, so
# ties are ties on every device, in whatever order a GPU adds. Room for k = 2^22.
_VOTE_UNIT = 2.0**40


class Neighbours(NamedTuple):
    """The k most similar bank entries of every query, the most similar first.

    Attributes:
        similarities: (Q, k), float32, descending.
        indices: (Q, k), int64, into the bank; the lower index first where similarities are equal.
    """

    similarities: Tensor
    indices: Tensor


def nearest_by(
    similarity: Callable[[Tensor], Tensor], queries: Tensor, k: int, chunk: int = 256
) -> Neighbours:
    """Find the k most similar bank entries of every query, under any similarity.

    Equal similarities are ordered by bank index, also where k cuts through them, so the result
    depends neither on the device nor on the chunk.

    Args:
        similarity: Maps a chunk of queries (c, ...) to its similarities with the bank (c, B).
        queries: (Q, ...), cut along the first dimension.
        k: Neighbours per query, 1 to B.
        chunk: Queries at a time; memory is proportional to ``chunk * B``.

    Returns:
        The neighbours, (Q, k).

    Raises:
        ValueError: If there are no queries, k or chunk is out of range, or a similarity is NaN.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, but it must be at least 1: pass a positive number")
    if len(queries) == 0:
        raise ValueError("queries is empty, but a search needs at least one: pass some features")
    parts = [_largest(similarity(part), k) for part in torch.split(queries, chunk)]
    similarities, indices = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Neighbours(similarities, indices)


def cosine_neighbours(queries: Tensor, bank: Tensor, k: int, *, chunk: int = 256) -> Neighbours:
    """Find the k bank entries of the largest cosine similarity, in float32.

    Args:
        queries: (Q, d).
        bank: (B, d). A zero vector has similarity 0 to everything.
        k: Neighbours per query, 1 to B.
        chunk: Queries at a time; memory is proportional to ``chunk * B``.

    Returns:
        The neighbours, (Q, k).
    """
    # Half precision would turn near neighbours into ties.
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        return nearest_by(cosine_to(bank), queries, k, chunk)


def cosine_to(bank: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function from queries (c, d) to their cosines with a bank (B, d), in float32."""
    targets = functional.normalize(bank.float(), dim=1).T  # (d, B)

    def cosine(part: Tensor) -> Tensor:
        return functional.normalize(part.float(), dim=1) @ targets  # (c, B)

    return cosine


def vote(
    neighbours: Neighbours,
    bank_labels: Tensor,
    num_classes: int,
    *,
    temperature: float = 0.1,
    k: int | None = None,
) -> Tensor:
    """Let the neighbours vote with weight ``exp(similarity / temperature)`` (Wu et al., 2018).

    Args:
        neighbours: What a search returned, with K columns.
        bank_labels: (B,), integers in [0, num_classes).
        num_classes: Number of classes, C.
        temperature: The smaller, the more the nearest neighbour decides; positive.
        k: Only the first k of the K neighbours vote; all of them by default.

    Returns:
        The winning class of every query, (Q,) int64; the lowest class where several win.
    """
    available = neighbours.indices.shape[1]
    k = available if k is None else k
    if not 1 <= k <= available:
        raise ValueError(
            f"k is {k}, but the search kept {available} neighbours: "
            f"vote with 1 to {available}, or search for more"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, but it must be positive: try 0.1")
    similarities = neighbours.similarities[:, :k].double()  # (Q, k)
    # A factor common to a row leaves its winner alone, and exp of a non-positive cannot overflow.
    weights = ((similarities - similarities.amax(1, keepdim=True)) / temperature).exp()
    ballots = (weights * _VOTE_UNIT).round().long()  # (Q, k)
    labels = bank_labels.to(ballots.device).long()[neighbours.indices[:, :k]]  # (Q, k)
    totals = ballots.new_zeros(len(ballots), num_classes).scatter_add_(1, labels, ballots)
    return totals.argmax(dim=1)


def knn_accuracy(
    queries: Tensor,
    query_labels: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    num_classes: int | None = None,
) -> float:
    """Measure the accuracy of the weighted cosine kNN classifier.

    For several k, search once with `cosine_neighbours` and call `vote` for each.

    Args:
        queries: (Q, d).
        query_labels: (Q,).
        bank: (B, d).
        bank_labels: (B,).
        k: Neighbours per query, 1 to B.
        temperature: Of the vote.
        num_classes: Number of classes; by default one more than the largest label.

    Returns:
        Accuracy in per cent.
    """
    if num_classes is None:
        num_classes = 1 + int(max(query_labels.max(), bank_labels.max()))
    neighbours = cosine_neighbours(queries, bank, k)
    predictions = vote(neighbours, bank_labels, num_classes, temperature=temperature)
    return 100.0 * (predictions == query_labels.to(predictions.device)).double().mean().item()


def _largest(similarities: Tensor, k: int) -> Neighbours:
    """Take the k largest of every row (c, B), the lower index first among equals."""
    size = similarities.shape[1]
    if not 1 <= k <= size:
        raise ValueError(
            f"k is {k}, but it must be between 1 and the size of the bank, {size}: "
            "lower k or enlarge the bank"
        )
    if similarities.isnan().any():
        raise ValueError("a similarity is NaN, but neighbours need an order: check the features")
    # topk leaves the order of equals open. So select on an integer that has no equals: the float's
    # bits, made monotone, above the reversed index. Adding 0.0 merges -0.0 with 0.0.
    bits = (similarities.float() + 0.0).contiguous().view(torch.int32)
    monotone = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # (c, B)
    positions = torch.arange(size, device=similarities.device)
    keys = monotone * 2**32 + (size - 1 - positions)
    indices = positions[keys.topk(k, dim=1).indices]  # (c, k)
    return Neighbours(similarities.float().gather(1, indices), indices)
