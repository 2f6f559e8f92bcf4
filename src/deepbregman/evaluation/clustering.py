"""Clustering of a run's data: k-means of features, and by the learned divergence of scores.

Banerjee et al. (2005): k-means works with any Bregman divergence ``D(x, mu)`` whose second argument
is the centroid, because there the arithmetic mean is the best centroid. For every s

    sum_i D(x_i, s) - sum_i D(x_i, mean) = n D(mean, s) >= 0,

which asks for convexity only, so it holds for the hard form too, whatever subgradient is taken
where two scores tie. The mean of score vectors is the score vector of the cluster's empirical
distribution, phi(p) = max_k E_p[w_k]: a centroid here *is* a distribution of images.

In the hard form D(x, mu) depends on mu through its winner alone. There are then no more distinct
clusters than there are subnetworks that win somewhere; the others stay empty.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.errors import UserError
from deepbregman.files import create_csv
from deepbregman.method.bregman import learned_divergence, prepare_points
from deepbregman.runs import Record
from deepbregman.terminal import ReportProgress, ignore_progress
from deepbregman.training.randomness import derive_seed

from .classes import sum_classes
from .features import Features
from .gallery import Gallery, OpenedRun, open_gallery
from .inputs import Evaluation
from .linear import FLOAT64_ELEMENTS
from .results import Measurement, make_rows
from .search_index import Image

METHODS = {"features": "k-means, cosine features", "divergence": "Bregman, learned divergence"}
"""Method, and the name of its variant in rows."""
CONTROL = "embedding"
"""k-means of the embeddings, from which scores are computed; only an evaluation asks for it."""
MOST_BY_DEFAULT = 12
"""Largest number of clusters if there are no classes, or one."""
RESTARTS = 10
"""Starts, of which the best is kept."""
MAX_ITERATIONS = 300
SHOWN_IMAGES = 10
"""Images of a cluster in its picture."""
SHOWN_CLUSTERS = 60
"""Clusters in a picture, the largest first."""
_ENTRIES = 2**22  # entries of a matrix of points and centroids at a time: 32 MiB in float64


class Clusters(NamedTuple):
    """A hard clustering.

    Attributes:
        assignment: (N,) int64, the cluster of each point.
        centroids: (C, K) float64, scores of each cluster's empirical distribution; where a cluster
            is empty, its last one.
        objective: mean divergence of points to their centroids after each assignment. Never
            increases.
    """

    assignment: Tensor
    centroids: Tensor
    objective: tuple[float, ...]


class _Step(NamedTuple):
    assignment: Tensor
    divergence: Tensor  # (N,), to the centroid assigned


Diverge = Callable[[Tensor], Iterator[Tensor]]
"""From centroids (C, K) to the divergences (n, C) of the points, a part of them at a time."""


def bregman_clusters(
    scores: Tensor, num_clusters: int, smoothing: float = 0.0, seed: int = 0
) -> Clusters:
    """Cluster points by ``D(point, centroid)``, and keep the best of several starts.

    Starts are drawn as in k-means++, with probability proportional to the divergence from the
    nearest centroid so far. A cluster that runs empty is given the point that is furthest from its
    centroid, as long as that lowers the objective. A start ends when no point changes its cluster.

    Args:
        scores: (N, K) of any floating type; computed in float64.
        num_clusters: C, from 1 to N.
        smoothing: temperature of the smooth form; 0 is the hard form.

    Returns:
        The clustering with the lowest objective, the first of equals.
    """
    _check_count(scores, num_clusters)
    points = scores.double()
    diverge = prepare_divergence(points, num_clusters, smoothing)
    found = []
    for start in range(RESTARTS):
        generator = torch.Generator().manual_seed(derive_seed(seed, "clusters", start))
        centroids = _draw_starts(points, num_clusters, diverge, generator)
        found.append(_refine(points, centroids, diverge))
    return min(found, key=lambda clusters: clusters.objective[-1])


def euclidean_clusters(points: Tensor, num_clusters: int, seed: int = 0) -> Clusters:
    """Cluster points (N, d) by their squared distance, as scikit-learn's ``KMeans`` does.

    The draws of the starts, the steps and the rule to stop are its own; the work is done where the
    points are. The centroids are those of points whose mean is 0.
    """
    _check_count(points, num_clusters)
    points = points - points.mean(dim=0)  # large squares would cancel
    diverge = prepare_distance(points, num_clusters)
    tolerance = 1e-4 * points.var(dim=0, correction=0).mean().item()
    generator = np.random.RandomState(seed)
    found = []
    for _ in range(RESTARTS):
        centroids = _draw_greedily(points, num_clusters, diverge, generator)
        found.append(_refine(points, centroids, diverge, tolerance))
    return min(found, key=lambda clusters: clusters.objective[-1])


def _check_count(points: Tensor, num_clusters: int) -> None:
    if points.ndim != 2 or not 1 <= num_clusters <= len(points):
        raise ValueError(
            f"{num_clusters} clusters of points of shape {tuple(points.shape)}: give (N, K) points "
            "and ask for 1 to N clusters"
        )


def prepare_divergence(points: Tensor, num_clusters: int, smoothing: float) -> Diverge:
    """Prepare the learned divergence of points (N, K) from centroids."""
    parts = torch.split(points, max(1, _ENTRIES // num_clusters))
    prepared = [prepare_points(part, smoothing) for part in parts]
    largest = points.abs().max() + smoothing * math.log(points.shape[1])  # largest term
    return lambda centroids: (_drop_rounding(diverge(centroids), largest) for diverge in prepared)


def prepare_distance(points: Tensor, num_clusters: int) -> Diverge:
    """Prepare the squared distance of points (N, d) from centroids."""
    parts = torch.split(points, max(1, _ENTRIES // num_clusters))
    prepared = [(part, part.square().sum(dim=1, keepdim=True)) for part in parts]

    def diverge(centroids: Tensor) -> Iterator[Tensor]:
        squares = centroids.square().sum(dim=1)
        for part, norms in prepared:
            sums = norms + squares  # (n, C)
            yield _drop_rounding(sums - 2 * (part @ centroids.T), sums)

    return diverge


def _drop_rounding(differences: Tensor, size: Tensor) -> Tensor:
    """Set differences to 0 where rounding alone can explain them.

    Otherwise equal points would move into clusters that should stay empty.

    Args:
        size: of the numbers whose differences they are.
    """
    rounding = 10 * torch.finfo(differences.dtype).eps * size
    return differences.masked_fill(differences <= rounding, 0.0)


def _refine(
    points: Tensor, centroids: Tensor, diverge: Diverge, tolerance: float | None = None
) -> Clusters:
    """Alternate centroids and assignments until no point changes its cluster.

    With a tolerance, also until the squares of the centroids' moves sum to no more than that.
    """
    step = _assign(diverge(centroids), None)
    objective = [step.divergence.mean()]
    for _ in range(MAX_ITERATIONS):
        filled = _fill_empty(step, len(centroids))
        before, centroids = centroids, _average_clusters(points, filled, centroids)
        step = _assign(diverge(centroids), filled)
        objective.append(step.divergence.mean())
        is_done = (step.assignment == filled).all()
        if tolerance is not None:
            is_done |= (centroids - before).square().sum() <= tolerance
        if is_done:
            break
    return Clusters(step.assignment, centroids, tuple(torch.stack(objective).tolist()))


def _draw_starts(
    points: Tensor, num_clusters: int, diverge: Diverge, generator: torch.Generator
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
        nearest = nearest.minimum(torch.cat(list(diverge(candidate)))[:, 0])
        weights = nearest
    return points[chosen]


def _draw_greedily(
    points: Tensor, num_clusters: int, diverge: Diverge, generator: np.random.RandomState
) -> Tensor:
    """Draw the first centroids as scikit-learn does: of a few candidates the best each time."""
    count, trials = len(points), 2 + int(math.log(num_clusters))
    first = int(generator.choice(count, p=np.full(count, 1.0 / count)))
    chosen = torch.tensor([first], device=points.device)
    nearest = torch.cat(list(diverge(points[chosen])))[:, 0]  # (N,)
    for _ in range(num_clusters - 1):
        shares = torch.from_numpy(generator.uniform(size=trials)).to(nearest)
        sums = nearest.cumsum(0)
        candidates = torch.searchsorted(sums, shares * nearest.sum()).clamp_max(count - 1)
        distances = torch.cat(list(diverge(points[candidates]))).minimum(nearest[:, None])
        best = distances.sum(dim=0).argmin()
        nearest = distances[:, best]
        chosen = torch.cat([chosen, candidates[best][None]])
    return points[chosen]


def _assign(divergences: Iterator[Tensor], current: Tensor | None) -> _Step:
    """Assign each point to the nearest centroid; among equals it stays where it is."""
    assignments, divergence, start = [], [], 0
    for matrix in divergences:  # (n, C)
        least, nearest = matrix.min(dim=1)
        if current is not None:
            now = current[start : start + len(matrix)]
            stays = matrix.gather(1, now[:, None])[:, 0] <= least
            nearest = torch.where(stays, now, nearest)
        assignments.append(nearest)
        divergence.append(least)
        start += len(matrix)
    return _Step(torch.cat(assignments), torch.cat(divergence))


def _fill_empty(step: _Step, num_clusters: int) -> Tensor:
    """Move the furthest point into each empty cluster, if that lowers the objective."""
    assignment = step.assignment.clone()
    sizes = torch.bincount(assignment, minlength=num_clusters)
    empty = (sizes == 0).nonzero().flatten().tolist()
    if not empty:
        return assignment
    for position in step.divergence.argsort(descending=True, stable=True).tolist():
        if not empty or not step.divergence[position] > 0:
            break
        if sizes[assignment[position]] > 1:  # its cluster must not run empty
            sizes[assignment[position]] -= 1
            assignment[position] = empty.pop()
    return assignment


def _average_clusters(points: Tensor, assignment: Tensor, centroids: Tensor) -> Tensor:
    """Return the mean of each cluster's points, and an empty one's centroid as it was."""
    num_clusters = len(centroids)
    sums = sum_classes(points, assignment, num_clusters)
    sizes = torch.bincount(assignment, minlength=num_clusters)[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp_min(1), centroids)


def purity(labels: Tensor, assignment: Tensor) -> float:
    """Return the share of points that have the most frequent label of their cluster."""
    from sklearn.metrics.cluster import contingency_matrix

    return float(contingency_matrix(labels, assignment).max(axis=0).sum() / len(labels))


class Partition(NamedTuple):
    """The clusters of one method, over the seeds."""

    assignment: Tensor
    """(N,) int64 on the CPU, of the seed with the lowest objective."""
    sizes: tuple[int, ...]
    """Of each cluster, the largest first."""
    objectives: tuple[float, ...]
    """For each seed, the mean squared distance or the mean divergence to the centroid."""


@dataclass(frozen=True, eq=False)
class TypicalImage(Image):
    """An image that is typical of its cluster."""

    distance: float
    """One minus the cosine with the cluster's mean, or the divergence D(image || mean)."""


class TypicalCluster(NamedTuple):
    """A cluster and its most typical images, the most typical first."""

    number: int
    size: int
    images: list[TypicalImage]


@dataclass(frozen=True, eq=False)
class Clustering:
    """The clusters of a set of images."""

    names: tuple[str, ...]
    partitions: dict[str, Partition]
    """The clusters by ``features`` and by ``divergence``."""
    rows: list[Record]
    """Agreement with the labels; empty where there are none."""
    table: Path | None = None
    typical: dict[str, list[TypicalCluster]] = field(default_factory=dict)
    """For each method, the most typical images of each cluster; empty if no file is written."""
    sheets: tuple[Path, ...] = ()


def cluster_images(
    opened: OpenedRun,
    clusters: int | None,
    *,
    by: Sequence[str],
    seeds: int,
    split: str,
    out: Path | None,
    progress: ReportProgress = ignore_progress,
) -> Clustering:
    """Group images; with labels, also measure the agreement; see :func:`deepbregman.cluster`."""
    methods = opened.choose_measures(by, tuple(METHODS))
    gallery = open_gallery(opened, split, progress)
    num_classes = 0 if gallery.labels is None else len(torch.unique(gallery.labels))
    count = count_clusters(clusters, num_classes, len(gallery.names))
    smoothing = opened.loaded.config.divergence.smoothing
    partitions: dict[str, Partition] = {}
    rows: list[Record] = []
    for method in methods:
        runs = []
        for seed in range(seeds):
            runs.append(_cluster_once(method, gallery.features, count, smoothing, seed))
            progress(METHODS[method], seed + 1, seeds)
        objectives = tuple(objective for _, objective in runs)
        best = number_by_size(runs[objectives.index(min(objectives))][0], count)
        sizes = torch.bincount(best, minlength=count).tolist()
        partitions[method] = Partition(best, tuple(sizes), objectives)
        if gallery.labels is not None:
            measure = partial(_measure, METHODS[method], split, gallery.labels.cpu(), count)
            rows += make_rows([[measure(found)] for found, _ in runs])
    if out is None:
        return Clustering(gallery.names, partitions, rows)
    typical = {
        method: find_typical(gallery, method, part.assignment, smoothing)
        for method, part in partitions.items()
    }
    columns: dict[str, Sequence[object]] = {"image": gallery.names}
    if gallery.labels is not None:
        columns["class"] = gallery.classes
    columns |= {method: part.assignment.tolist() for method, part in partitions.items()}
    lines = zip(*columns.values(), strict=True)
    create_csv(out, [dict(zip(columns, line, strict=True)) for line in lines])
    return Clustering(gallery.names, partitions, rows, out, typical)


def number_by_size(assignment: Tensor, count: int) -> Tensor:
    """Number clusters anew, (N,): 0 is the largest."""
    sizes = torch.bincount(assignment, minlength=count)
    return sizes.argsort(descending=True, stable=True).argsort()[assignment]


def count_clusters(clusters: int | None, num_classes: int, num_images: int) -> int:
    """Return the number of clusters: as given, or by the classes, or by the number of images."""
    if num_images < 2:
        raise UserError("there is one image, and clusters need 2 or more: give a larger dataset")
    if clusters is None:
        few = max(2, min(MOST_BY_DEFAULT, math.isqrt(num_images)))
        clusters = num_classes if num_classes > 1 else few
    if not isinstance(clusters, Integral) or not 2 <= clusters <= num_images:
        raise UserError(
            f"clusters is {clusters!r}: it must be a whole number from 2 to {num_images}, the "
            "number of images"
        )
    return int(clusters)


def _cluster_once(
    method: str, features: Features, count: int, smoothing: float, seed: int
) -> tuple[Tensor, float]:
    """Cluster once; return the assignment (N,) on the CPU and the mean objective."""
    if method == "divergence":
        assert features.scores is not None  # choose_measures has made sure
        found = bregman_clusters(features.scores, count, smoothing, seed)
    else:
        part = features.embedding if method == CONTROL else features.representation
        assert part is not None
        vectors = part.double() if part.numel() <= FLOAT64_ELEMENTS else part
        found = euclidean_clusters(functional.normalize(vectors, dim=1), count, seed)
    return found.assignment.cpu(), found.objective[-1]


def cluster(evaluation: Evaluation) -> list[Record]:
    """Cluster the test images into as many groups as there are classes, and compare the two."""
    labelled = evaluation.labelled
    test, smoothing = labelled.test, labelled.config.divergence.smoothing
    truth = test.labels.cpu()
    count = len(torch.unique(truth))
    methods = {"features": METHODS["features"]}
    if test.features.embedding is not None:
        methods[CONTROL] = "k-means, cosine embeddings"
    if test.features.scores is not None:
        methods["divergence"] = METHODS["divergence"]
    rows: list[Record] = []
    for done, (method, variant) in enumerate(methods.items(), start=1):
        measured = []
        for seed in evaluation.options.each_seed:
            found, _ = _cluster_once(method, test.features, count, smoothing, seed)
            measured.append([_measure(variant, "test", truth, count, found)])
        rows += make_rows(measured)
        evaluation.progress("clusters", done, len(methods))
    return rows


def _measure(variant: str, split: str, labels: Tensor, count: int, found: Tensor) -> Measurement:
    """Measure how well clusters agree with classes."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    metrics = {"NMI": normalized_mutual_info_score, "ARI": adjusted_rand_score, "purity": purity}
    values = {name: 100.0 * float(metric(labels, found)) for name, metric in metrics.items()}
    name = variant + ("" if split == "all" else f", {split} split")
    details = {"split": split, "clusters": count}
    return Measurement(name, values, 0, len(found), details)


def rank_members(
    method: str, features: Features, members: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Order the images of a cluster by their distance from its mean, and return both."""
    if method == "divergence":
        assert features.scores is not None
        points = features.scores[members].double()
        distances = learned_divergence(points, points.mean(dim=0, keepdim=True), smoothing)[:, 0]
    else:
        points = functional.normalize(features.representation[members].double(), dim=1)
        distances = 1.0 - points @ functional.normalize(points.mean(dim=0), dim=0)
    ordered = distances.sort(stable=True)
    return members[ordered.indices], ordered.values


def find_typical(
    gallery: Gallery, method: str, assignment: Tensor, smoothing: float
) -> list[TypicalCluster]:
    """Collect the most typical images of the largest clusters; empty clusters are left out."""
    assignment = assignment.to(gallery.features.representation.device)
    sizes = torch.bincount(assignment)
    largest = sizes.argsort(descending=True, stable=True)[:SHOWN_CLUSTERS].tolist()
    clusters = []
    for number in largest:
        members = (assignment == number).nonzero().flatten()
        if len(members):
            ranked = rank_members(method, gallery.features, members, smoothing)
            found, far = (part[:SHOWN_IMAGES].tolist() for part in ranked)
            shown = gallery.show(found)
            images = [TypicalImage(*shown[i], d) for i, d in zip(found, far, strict=True)]
            clusters.append(TypicalCluster(number, len(members), images))
    return clusters
