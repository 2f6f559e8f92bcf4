"""Ranking a bank of images by its likeness to a query, and how good the ranking is.

The query is the first argument of the learned divergence, ``D(query || item)``, as for kNN. That is
the gap which the item's winning subnetwork leaves in the query's own scores: all items of a row
are judged by one phi(query), so they can be ranked, and an item (or a set of items) takes the place
of the distribution that the query is compared with.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepbregman.method.bregman import learned_divergence
from deepbregman.training.seeds import epoch_order

from .features import Features
from .knn import Neighbours, cosine_to, nearest_by

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Of scores (N, K) and (M, K), the first from the second: (N, M)."""
MEASURES = ("cosine", "divergence")
_ENTRIES = 2**24  # of a matrix of queries and bank at a time: 64 MiB of similarities


class Quality(NamedTuple):
    """How good rankings are, over all queries that have something to find."""

    mean_average_precision: float
    precision: float
    """Share of the first k that have the query's label, averaged."""
    num_queries: int


def described(features: Features, measure: str) -> Tensor:
    """Return what a measure compares: the encoder's features (N, d), or the scores (N, K)."""
    if measure == "cosine":
        return features.representation
    if features.scores is None:
        raise ValueError("there are no scores to measure a divergence of: measure the cosine")
    return features.scores


def ranking(
    measure: str | Divergence,
    queries: Tensor,
    bank: Tensor,
    k: int,
    *,
    smoothing: float = 0.0,
    seed: int = 0,
) -> Neighbours:
    """Find the k nearest of a bank for each query.

    In the hard form a query is at divergence 0 from a whole cell of the bank. Equals are ranked by
    a seeded shuffle of the bank, so that the bank's own order, often that of its classes, has no
    part in it.

    Args:
        measure: ``cosine``, ``divergence``, or another divergence of scores.
        queries: (Q, d) features, or (Q, K) scores.
        bank: (B, d) or (B, K).
        k: from 1 to B.
        smoothing: of the divergence; 0 is the hard form.
        seed: of the shuffle.

    Returns:
        Similarities (Q, k), the divergence's negated; and indices (Q, k) into the bank.
    """
    order = epoch_order(len(bank), seed, 0).to(bank.device)
    found = nearest_by(_likeness(measure, bank[order], smoothing), queries, k)
    return Neighbours(found.similarities, order[found.indices])


def ranking_quality(
    measure: str,
    queries: Tensor,
    query_labels: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    *,
    k: int = 10,
    smoothing: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """Judge the rankings of the whole bank: an item is relevant if it has the query's label.

    The average precision of a query is the precision at the rank of each relevant item, averaged
    over them. Where items tie its expectation over their orders is meant; one seeded shuffle of the
    bank stands for it, the same for all queries. Queries whose label the bank does not have are
    left out. Memory does not grow with the number of queries.

    Args:
        measure: ``cosine`` or ``divergence``.
        queries: (Q, d) features, or (Q, K) scores.
        query_labels: (Q,)
        bank: (B, d) or (B, K).
        bank_labels: (B,)
        k: of the precision among the first k, from 1 to B.
        smoothing: of the divergence; 0 is the hard form.
        seed: of the shuffle.
        progress: called with the queries done and the queries in all.
    """
    if not 1 <= k <= len(bank):
        raise ValueError(
            f"k is {k}, but it must be between 1 and the size of the bank, {len(bank)}"
        )
    order = epoch_order(len(bank), seed, 0).to(bank.device)
    likeness, labels = _likeness(measure, bank[order], smoothing), bank_labels[order]
    ranks = torch.arange(1, len(bank) + 1, device=bank.device)
    averages, precisions, num_queries = 0.0, 0.0, 0
    chunk = max(1, _ENTRIES // len(bank))
    for start in range(0, len(queries), chunk):
        similarities = likeness(queries[start : start + chunk])  # (c, B)
        if similarities.isnan().any():
            raise ValueError(
                "a similarity is NaN, but a ranking needs an order: check the features"
            )
        ranked = similarities.sort(dim=1, descending=True, stable=True).indices
        relevant = labels[ranked] == query_labels[start : start + chunk, None]  # (c, B)
        found = relevant.cumsum(dim=1)
        total = found[:, -1]
        answerable = total > 0
        precision = torch.where(relevant, found.double() / ranks, 0.0)
        average = precision.sum(dim=1) / total.clamp_min(1)
        averages += average[answerable].sum().item()
        precisions += (found[:, k - 1].double() / k)[answerable].sum().item()
        num_queries += int(answerable.sum())
        if progress is not None:
            progress(min(start + chunk, len(queries)), len(queries))
    if num_queries == 0:
        raise ValueError("no query has its label in the bank: there is nothing to find")
    return Quality(averages / num_queries, precisions / num_queries, num_queries)


def _likeness(
    measure: str | Divergence, bank: Tensor, smoothing: float
) -> Callable[[Tensor], Tensor]:
    """Return the function from queries (c, ...) to their similarities with the bank (c, B)."""
    if measure == "cosine":
        return cosine_to(bank)
    if measure == "divergence":
        measure = partial(learned_divergence, smoothing=smoothing)
    if isinstance(measure, str):
        raise ValueError(f"measure {measure!r} is not one of {', '.join(MEASURES)}")
    divergence, exact = measure, bank.double()  # float32 would rank what is nearly alike at random

    def likeness(queries: Tensor) -> Tensor:
        return -divergence(queries.double(), exact).float()

    return likeness
