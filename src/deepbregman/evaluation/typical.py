"""The images that are most typical of each cluster: those nearest to its mean."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.method.bregman import learned_divergence

from .features import Features
from .gallery import Gallery, OpenedRun, Pixels

SHOWN = 10
"""Images of a cluster."""
MOST_CLUSTERS = 60
"""Of a picture, the largest first."""


class TypicalImage(NamedTuple):
    """An image that is typical of its cluster."""

    name: str
    class_name: str | None
    pixels: Pixels
    distance: float
    """One minus the cosine with the cluster's mean, or the divergence D(image || mean)."""


class TypicalCluster(NamedTuple):
    """A cluster and its most typical images, the most typical first."""

    number: int
    size: int
    images: list[TypicalImage]


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
    opened: OpenedRun, gallery: Gallery, method: str, assignment: Tensor
) -> list[TypicalCluster]:
    """Collect the most typical images of the largest clusters; empty clusters are left out."""
    features, smoothing = gallery.features, opened.loaded.config.divergence.smoothing
    assignment = assignment.to(features.representation.device)
    sizes = torch.bincount(assignment)
    largest = sizes.argsort(descending=True, stable=True)[:MOST_CLUSTERS].tolist()
    ranked = {}
    for number in largest:
        members = (assignment == number).nonzero().flatten()
        if len(members):
            found, far = rank_members(method, features, members, smoothing)
            ranked[number] = found[:SHOWN].tolist(), far[:SHOWN].tolist()
    pixels = gallery.pixels([i for indices, _ in ranked.values() for i in indices])
    names = gallery.names
    labels = None if gallery.labels is None else gallery.labels.tolist()

    def collect(indices: Sequence[int], distances: Sequence[float]) -> list[TypicalImage]:
        return [
            TypicalImage(
                names[i], None if labels is None else opened.class_name(labels[i]), pixels[i], far
            )
            for i, far in zip(indices, distances, strict=True)
        ]

    return [
        TypicalCluster(number, int(sizes[number]), collect(*found))
        for number, found in ranked.items()
    ]
