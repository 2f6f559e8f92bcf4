"""Hard clustering with any Bregman divergence, learned or classical (Banerjee et al., 2005)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_ITERATIONS = 300


class Clustering(NamedTuple):
    """What a clustering ended with."""

    assignment: Tensor  # (N,) int64
    centroids: Tensor  # (k, d)
    objective: float  # sum over rows of D(row || its centroid)


def bregman_clustering(
    rows: Tensor,
    num_clusters: int,
    divergence: Callable[[Tensor, Tensor], Tensor],
    *,
    seed: int = 0,
    restarts: int = 10,
) -> Clustering:
    """Assign rows to the centroid of least divergence, and repeat with the means, until it settles.

    For every Bregman divergence the mean of a cluster is the point of least total divergence as the
    second argument, so k-means carries over word for word: the objective never rises. A row may
    stand for an empirical distribution (its mean scores or features), and the mean of such rows
    stands for the mixture of the distributions.

    Args:
        rows: (N, d).
        num_clusters: k, 1 to N.
        divergence: maps rows (N, d) and centroids (k, d) to D(row || centroid), (N, k).
        seed: of the first centroids: rows, each drawn with a probability proportional to its
            divergence from the nearest one drawn before.
        restarts: of which the least objective is taken.

    Returns:
        The best clustering; computed in float64.

    Raises:
        ValueError: If the number of clusters or of restarts is out of range.
    """
    if not 1 <= num_clusters <= len(rows):
        raise ValueError(f"{num_clusters} clusters of {len(rows)} rows: ask for 1 to {len(rows)}")
    if restarts < 1:
        raise ValueError(f"restarts is {restarts}: it must be 1 or more")
    rows = rows.detach().double()
    generator = torch.Generator().manual_seed(seed)
    found = [
        _settle(rows, _first_centroids(rows, num_clusters, divergence, generator), divergence)
        for _ in range(restarts)
    ]
    return min(found, key=lambda clustering: clustering.objective)


def _first_centroids(
    rows: Tensor,
    num_clusters: int,
    divergence: Callable[[Tensor, Tensor], Tensor],
    generator: torch.Generator,
) -> Tensor:
    chosen = rows[torch.randint(len(rows), (1,), generator=generator)]  # (1, d)
    while len(chosen) < num_clusters:
        weights = divergence(rows, chosen).amin(dim=1).cpu()  # (N,)
        if weights.sum() == 0.0:  # the hard form sees no difference: any row is as good
            weights = torch.ones_like(weights)
        drawn = torch.multinomial(weights, 1, generator=generator)
        chosen = torch.cat([chosen, rows[drawn]])
    return chosen


def _settle(
    rows: Tensor, centroids: Tensor, divergence: Callable[[Tensor, Tensor], Tensor]
) -> Clustering:
    assignment = torch.full((len(rows),), -1, device=rows.device)
    for _ in range(LARGEST_ITERATIONS):
        distance = divergence(rows, centroids)  # (N, k)
        nearest = distance.argmin(dim=1)
        if torch.equal(nearest, assignment):
            break
        assignment = nearest
        member = torch.nn.functional.one_hot(assignment, len(centroids)).to(rows.dtype)  # (N, k)
        size = member.sum(dim=0).unsqueeze(1)
        # A cluster that lost its rows keeps its centroid.
        centroids = torch.where(size > 0, member.T @ rows / size.clamp_min(1), centroids)
    objective = divergence(rows, centroids).gather(1, assignment.unsqueeze(1)).sum().item()
    return Clustering(assignment, centroids, objective)
