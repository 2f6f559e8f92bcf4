"""Cluster a run's data: by k-means of features, and by the learned divergence of scores."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepbregman.errors import UserError
from deepbregman.runs import Record, Run, check_new_file, write_csv

from .clustering import bregman_clusters, purity
from .features import Features
from .galleries import Gallery, Report, Setting, chosen, open_gallery, open_setting
from .linear import FLOAT64_ELEMENTS
from .rows import Measured, rows_of

METHODS = {"features": "k-means, cosine features", "divergence": "Bregman, learned divergence"}
"""What to cluster by, and the variant's name in the rows."""
RESTARTS = 10


class Partition(NamedTuple):
    """The clusters of one method, over the seeds."""

    assignment: Tensor
    """(N,) int64 on the CPU, of the seed with the lowest objective."""
    sizes: tuple[int, ...]
    """Images in each cluster of that seed."""
    objectives: tuple[float, ...]
    """Of each seed: the mean squared distance, or the mean divergence, to the centroid."""


@dataclass(frozen=True, eq=False)
class Clustering:
    """What clustering a set of images gave."""

    names: tuple[str, ...]
    partitions: dict[str, Partition]
    """By ``features`` and ``divergence``."""
    rows: list[Record]
    """Agreement with the labels; empty where there are none."""


def cluster(
    run: Run | Path | str,
    clusters: int | None = None,
    *,
    data: str | None = None,
    by: Sequence[str] = (),
    seeds: int = 3,
    split: str = "all",
    out: Path | str | None = None,
    skip_unreadable: bool = False,
    accelerator: str = "auto",
    encoder: nn.Module | None = None,
    report: Report | None = None,
) -> Clustering:
    """Group images without labels; with labels, also see how well the groups agree with them.

    Args:
        run: a run, or its folder.
        clusters: how many; the number of classes when None.
        data: a source; the run's own when None. Labels are not needed.
        by: ``features``: k-means of L2-normalised features; ``divergence``: Bregman hard
            clustering of scores, D(image || centroid); all that the run has when empty.
        seeds: how many times to cluster, with seeds 0, 1, ...; each takes the best of 10 starts.
        split: ``train``, ``test`` or ``all``.
        out: a ``.csv`` file to write each image's clusters to; must not exist.
        skip_unreadable: go on without images that cannot be read; a ``Notice`` says how many.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        encoder: a module of the same structure, for a run whose encoder was your own.
        report: called with what is being done, how much is done, and how much there is.

    Returns:
        The clusters, and rows of protocol ``cluster``, also written into the run's result: ``NMI``,
        ``ARI`` and ``purity`` in per cent, mean and deviation over the seeds.
    """
    if out is not None:
        check_new_file(Path(out), ".csv")
    if seeds < 1:
        raise UserError(f"seeds is {seeds}: it must be at least 1")
    setting = open_setting(run, data, skip_unreadable, accelerator, encoder)
    methods = chosen(by, tuple(METHODS), setting)
    count = _count(setting, split, clusters)
    gallery = open_gallery(setting, split, report)
    partitions: dict[str, Partition] = {}
    measured: list[list[Measured]] = [[] for _ in range(seeds)]
    replaced = sum(len(batches.skipped) for batches in gallery.batches.values())
    for method in methods:
        runs = []
        for seed in range(seeds):
            runs.append(_partition(method, gallery.features, count, setting, seed))
            if report is not None:
                report(METHODS[method], seed + 1, seeds)
        objectives = tuple(objective for _, objective in runs)
        best = runs[objectives.index(min(objectives))][0]
        sizes = torch.bincount(best, minlength=count).tolist()
        partitions[method] = Partition(best, tuple(sizes), objectives)
        if gallery.labels is not None:
            variant = METHODS[method] + ("" if split == "all" else f", {split} split")
            for rest, (found, _) in zip(measured, runs, strict=True):
                values = _agreement(gallery.labels.cpu(), found)
                told = {"split": split, "clusters": count}
                rest.append(Measured(variant, values, 0, len(found), replaced, told))
    rows = rows_of(measured)
    if rows:
        rows = setting.kept(rows, "cluster", 0)
    if out is not None:
        _write(Path(out), gallery, setting, partitions)
    return Clustering(gallery.names, partitions, rows)


def _count(setting: Setting, split: str, clusters: int | None) -> int:
    splits = setting.splits(split)
    size = sum(map(len, splits.values()))
    if clusters is None:
        labels = [part.labels for part in splits.values() if part.labels is not None]
        if len(labels) < len(splits):
            raise UserError(
                f"data {setting.data!r} has no labels, so the number of clusters is not known: "
                "give it with --clusters"
            )
        clusters = len(set(torch.cat(labels).tolist()))
    if not 1 <= clusters <= size:
        raise UserError(f"clusters is {clusters}: it must be between 1 and the {size} images")
    return clusters


def _partition(
    method: str, features: Features, count: int, setting: Setting, seed: int
) -> tuple[Tensor, float]:
    """Cluster once; return the assignment (N,) on the CPU and the mean objective."""
    if method == "divergence":
        assert features.scores is not None  # chosen() has made sure
        smoothing = setting.config.divergence.smoothing
        found = bregman_clusters(features.scores, count, smoothing, seed, restarts=RESTARTS)
        return found.assignment.cpu(), found.objective[-1]
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    # On the host, since k-means is; in float64 where that is affordable, as linear.py has it.
    vectors = features.representation.cpu()
    vectors = vectors.double() if vectors.numel() <= FLOAT64_ELEMENTS else vectors
    points = functional.normalize(vectors, dim=1).numpy()
    with warnings.catch_warnings():  # fewer distinct images than clusters; the sizes show it
        warnings.simplefilter("ignore", ConvergenceWarning)
        kmeans = KMeans(count, n_init=RESTARTS, random_state=seed).fit(points)
    return torch.from_numpy(kmeans.labels_).long(), float(kmeans.inertia_) / len(points)


def _agreement(labels: Tensor, found: Tensor) -> dict[str, float]:
    """Return how well clusters agree with classes, in per cent."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    metrics = {
        "NMI": normalized_mutual_info_score,
        "ARI": adjusted_rand_score,
        "purity": purity,
    }
    return {name: 100.0 * float(metric(labels, found)) for name, metric in metrics.items()}


def _write(path: Path, gallery: Gallery, setting: Setting, parts: dict[str, Partition]) -> None:
    """Write a line for each image: its name, its class where known, its cluster by each method."""
    labels = None if gallery.labels is None else gallery.labels.tolist()
    clusters = {method: part.assignment.tolist() for method, part in parts.items()}
    rows: list[Record] = []
    for index, name in enumerate(gallery.names):
        known = {"class": setting.class_name(labels[index])} if labels else {}
        found = {method: column[index] for method, column in clusters.items()}
        rows.append({"image": name, **known, **found})
    write_csv(path, rows)
