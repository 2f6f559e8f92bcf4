"""Hard clustering with the learned divergence, and how well clusters agree with labels.

Banerjee et al. (2005): k-means works with any Bregman divergence ``D(x, mu)`` whose second argument
is the centroid, because there the arithmetic mean is the best centroid. For every s

    sum_i D(x_i, s) - sum_i D(x_i, mean) = n D(mean, s) >= 0,

which asks for convexity only, so it holds for the hard form too, whatever subgradient is taken
where two scores tie. The mean of score vectors is the score vector of the cluster's empirical
distribution, phi(p) = max_k E_p[w_k]: a centroid here *is* a distribution of images.

In the hard form D(x, mu) depends on mu through its winner alone. No more clusters can then be told
apart than there are subnetworks that win somewhere; the others stay empty.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.method.bregman import learned_divergence
from deepbregman.training.seeds import derived

_ENTRIES = 2**22  # of a matrix of points and centroids at a time, 32 MiB in float64


class Clusters(NamedTuple):
    """A hard clustering.

    Attributes:
        assignment: (N,) int64, the cluster of each point.
        centroids: (C, K) float64, scores of each cluster's empirical distribution; where a cluster
            is empty, its last one.
        objective: mean divergence of points to their centroids, after the first assignment, and
            then in turn after each update of the centroids and each assignment. Never increases.
    """

    assignment: Tensor
    centroids: Tensor
    objective: tuple[float, ...]


class _Step(NamedTuple):
    assignment: Tensor
    divergence: Tensor  # (N,), to the centroid now assigned
    before: Tensor  # (N,), to the centroid that was assigned before


def bregman_clusters(
    scores: Tensor,
    num_clusters: int,
    smoothing: float = 0.0,
    seed: int = 0,
    *,
    restarts: int = 10,
    max_iterations: int = 300,
    progress: Callable[[int, int], None] | None = None,
) -> Clusters:
    """Cluster points by ``D(point, centroid)``, and keep the best of several starts.

    Starts are drawn as in k-means++, with probability proportional to the divergence from the
    nearest centroid so far. A cluster that runs empty is given the point that is furthest from its
    centroid, as long as that lowers the objective. A start ends when no point changes its cluster.

    Args:
        scores: (N, K) of any floating type; computed in float64.
        num_clusters: C, from 1 to N.
        smoothing: temperature of the smooth form; 0 is the hard form.
        seed: of the starts.
        restarts: how many starts.
        max_iterations: after which a start ends at the latest.
        progress: called with the starts done and the starts in all.

    Returns:
        The clustering with the lowest objective, the first of equals.
    """
    if scores.ndim != 2 or not 1 <= num_clusters <= len(scores):
        raise ValueError(
            f"{num_clusters} clusters of scores of shape {tuple(scores.shape)}: give (N, K) scores "
            "and ask for 1 to N clusters"
        )
    if restarts < 1 or max_iterations < 1:
        raise ValueError(
            f"restarts {restarts} and max_iterations {max_iterations}: both must be at least 1"
        )
    points = scores.double()
    best: Clusters | None = None
    for start in range(restarts):
        generator = torch.Generator().manual_seed(derived(seed, "clusters", start))
        centroids = _scattered(points, num_clusters, smoothing, generator)
        found = _refine(points, centroids, smoothing, max_iterations)
        if best is None or found.objective[-1] < best.objective[-1]:
            best = found
        if progress is not None:
            progress(start + 1, restarts)
    assert best is not None  # there was at least one start
    return best


def _refine(points: Tensor, centroids: Tensor, smoothing: float, max_iterations: int) -> Clusters:
    """Alternate centroids and assignments until no point changes its cluster."""
    step = _assign(points, centroids, smoothing, None)
    objective = [step.divergence.mean().item()]
    for _ in range(max_iterations):
        filled = _fill_empty(step, len(centroids))
        centroids = _means(points, filled, centroids)
        step = _assign(points, centroids, smoothing, filled)
        objective += [step.before.mean().item(), step.divergence.mean().item()]
        if torch.equal(step.assignment, filled):
            break
    return Clusters(step.assignment, centroids, tuple(objective))


def _scattered(
    points: Tensor, num_clusters: int, smoothing: float, generator: torch.Generator
) -> Tensor:
    """Draw the first centroids (C, K) among the points, far from each other."""
    chosen: list[int] = []
    weights = torch.ones_like(points[:, 0])  # the first is drawn evenly
    nearest = torch.full_like(weights, torch.inf)
    for _ in range(num_clusters):
        if not weights.sum() > 0:  # every point is at no divergence from a chosen one
            weights = torch.ones_like(weights)
            weights[chosen] = 0.0
        sums = weights.cumsum(0)
        target = torch.rand((), generator=generator, dtype=torch.float64).to(sums.device) * sums[-1]
        # The first sum beyond the target: a point of weight 0 is never drawn.
        position = min(int(torch.searchsorted(sums, target, right=True)), len(points) - 1)
        chosen.append(position)
        candidate = points[position : position + 1]
        nearest = nearest.minimum(learned_divergence(points, candidate, smoothing)[:, 0])
        weights = nearest
    return points[chosen]


def _assign(points: Tensor, centroids: Tensor, smoothing: float, current: Tensor | None) -> _Step:
    """Assign each point to the nearest centroid; among equals it stays where it is."""
    chunk = max(1, _ENTRIES // len(centroids))
    assignments, divergences, before = [], [], []
    for start in range(0, len(points), chunk):
        matrix = learned_divergence(points[start : start + chunk], centroids, smoothing)  # (n, C)
        least, nearest = matrix.min(dim=1)
        held = least
        if current is not None:
            now = current[start : start + chunk]
            held = matrix.gather(1, now[:, None])[:, 0]
            nearest = torch.where(held <= least, now, nearest)
        assignments.append(nearest)
        divergences.append(least)
        before.append(held)
    return _Step(torch.cat(assignments), torch.cat(divergences), torch.cat(before))


def _fill_empty(step: _Step, num_clusters: int) -> Tensor:
    """Move the furthest points into empty clusters, one each, where that lowers the objective."""
    assignment = step.assignment.clone()
    sizes = torch.bincount(assignment, minlength=num_clusters)
    empty = (sizes == 0).nonzero().flatten().tolist()
    if not empty:
        return assignment
    for position in step.divergence.argsort(descending=True, stable=True).tolist():
        if not empty or not step.divergence[position] > 0:
            break
        if sizes[assignment[position]] > 1:  # or another cluster would run empty
            sizes[assignment[position]] -= 1
            assignment[position] = empty.pop()
    return assignment


def _means(points: Tensor, assignment: Tensor, centroids: Tensor) -> Tensor:
    """Return the mean of each cluster's points, and an empty one's centroid as it was."""
    num_clusters = len(centroids)
    chunk = max(1, _ENTRIES // num_clusters)
    sums = torch.zeros_like(centroids)
    for start in range(0, len(points), chunk):
        # A product adds in a fixed order where a scatter on a GPU does not.
        members = functional.one_hot(assignment[start : start + chunk], num_clusters)
        sums += members.to(points.dtype).T @ points[start : start + chunk]
    sizes = torch.bincount(assignment, minlength=num_clusters)[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp_min(1), centroids)


def purity(labels: Tensor, assignment: Tensor) -> float:
    """Share of points that have the most frequent label of their cluster.

    Args:
        labels: (N,) int64, from 0.
        assignment: (N,) int64, from 0.
    """
    num_labels = int(labels.max()) + 1
    table = torch.bincount(assignment * num_labels + labels)
    table = functional.pad(table, (0, -len(table) % num_labels))
    return table.view(-1, num_labels).amax(dim=1).sum().item() / len(labels)
