"""The protocol ``ood``: detect out-of-distribution images, without training on any.

Each score says how far an image is from the training images. Two of them know the classes. The
area under the ROC curve is the probability that an image of the other kind is further away than a
test image.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePath

import torch
from torch import Tensor

from deepbregman.data import ArrayImages, Split
from deepbregman.data.datasets import check_source
from deepbregman.runs import Record
from deepbregman.training.randomness import derive_seed

from .classes import class_means, divergence_to
from .features import Features, LabelledFeatures
from .inputs import Evaluation
from .knn import rank_bank, select_features
from .options import NOISE
from .results import Measurement, make_rows

MOST_NOISE = 10_000
"""Images of noise, at most; otherwise as many as there are test images."""
_RIDGE = 1e-6  # share of the mean variance that is added, so that no variance is 0

Distance = Callable[[Features], Tensor]
"""Features (N, ...) -> distances (N,) from the training images."""


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the AUROC, in per cent, of distances (N,) of the training kind and (M,) of others."""
    from sklearn.metrics import roc_auc_score

    distances = torch.cat([inside, outside]).double().cpu()
    is_outside = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    return 100.0 * float(roc_auc_score(is_outside.numpy(), distances.numpy()))


def mahalanobis_to(
    features: Tensor, labels: Tensor, num_classes: int
) -> Callable[[Tensor], Tensor]:
    """Return the squared Mahalanobis distance to the nearest class (Lee et al., 2018)."""
    rows = features.double()
    means = class_means(rows, labels, num_classes)  # (C, d)
    rows = rows - means[labels]
    covariance = rows.T @ rows / len(rows)
    variance = float(covariance.diagonal().mean())
    # Without any variance, such as with one image of each class, the distance is Euclidean.
    covariance.diagonal().add_(_RIDGE * variance if variance > 0 else 1.0)
    factor = torch.linalg.cholesky(covariance)

    def whiten(points: Tensor) -> Tensor:
        whitened: Tensor = torch.linalg.solve_triangular(factor, points.T, upper=False)
        return whitened.T

    centres = whiten(means)
    return lambda points: torch.cdist(whiten(points.double()), centres).square().amin(dim=1)


def list_distances(labelled: LabelledFeatures, neighbours: int) -> dict[str, Distance]:
    """Return every distance from the training images that the run allows, by name."""
    train, smoothing = labelled.train.features, labelled.config.divergence.smoothing
    labels = labelled.train.labels
    k = min(neighbours, len(labels))

    def neighbour(measure: str) -> Distance:
        bank = select_features(train, measure)
        rank = partial(rank_bank, measure, bank=bank, k=k, smoothing=smoothing)
        return lambda features: -rank(select_features(features, measure)).similarities[:, -1]

    def gaussian(targets: Tensor, count: int) -> Distance:
        to_nearest = mahalanobis_to(train.representation, targets, count)
        return lambda features: to_nearest(features.representation)

    def distribution(targets: Tensor, count: int) -> Distance:
        assert train.scores is not None
        means = class_means(train.scores, targets, count)
        to_means = partial(divergence_to, distributions=means, smoothing=smoothing)
        return lambda features: to_means(select_features(features, "divergence")).amin(dim=1)

    # Classes without an image have no distribution.
    present, targets = torch.unique(labels, return_inverse=True)
    one = torch.zeros_like(labels)
    found = {f"cosine, neighbour {k}": neighbour("cosine")}
    if train.embedding is not None:
        found[f"cosine of embeddings, neighbour {k}"] = neighbour("embedding")
    found |= {
        "Mahalanobis, one Gaussian": gaussian(one, 1),
        "Mahalanobis, nearest class": gaussian(targets, len(present)),
    }
    if train.scores is not None:
        found |= {
            f"divergence, neighbour {k}": neighbour("divergence"),
            "divergence, training distribution": distribution(one, 1),
            "divergence, nearest class": distribution(targets, len(present)),
        }
    return found


def draw_noise(count: int, side: int, seed: int) -> Split:
    """Draw images whose every byte is random."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "noise images"))
    pixels = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    return Split(ArrayImages(pixels))


def check_ood(evaluation: Evaluation) -> None:
    """Refuse a dataset that is not there."""
    _ = evaluation.labelled
    for name in evaluation.options.ood.against:
        if name != NOISE:
            check_source(name, Path(evaluation.loaded.config.data.root))


def ood(evaluation: Evaluation) -> list[Record]:
    """Measure how well each distance tells the test images from other images.

    The seed matters for noise only.
    """
    labelled, settings = evaluation.labelled, evaluation.options.ood
    config, num_test = labelled.config, len(labelled.test.labels)
    distances = list_distances(labelled, settings.neighbours)
    inside = {name: distance(labelled.test.features) for name, distance in distances.items()}
    stems = Counter(PurePath(other).stem for other in settings.against)
    rows: list[Record] = []
    for place, other in enumerate(settings.against, start=1):
        splits: Iterable[Split]
        if other == NOISE:
            count, seeds = min(num_test, MOST_NOISE), evaluation.options.each_seed
            splits = (draw_noise(count, config.data.image_size, seed) for seed in seeds)
        else:
            source, _ = evaluation.loaded.open_images(other, None, evaluation.progress)
            splits = [source.test or source.train]
            if source.skipped_notice:
                evaluation.say(f"{source.skipped_notice} of {other}")
        stem = PurePath(other).stem
        title = stem if stems[stem] == 1 else other
        measured = []
        for split in splits:
            outside = labelled.of(split).features
            details = {"against": other, "num_outside": len(split)}
            areas = {n: {"AUROC": auroc(inside[n], d(outside))} for n, d in distances.items()}
            measured.append(
                [
                    Measurement(f"{title}: {name}", area, *labelled.counts, details)
                    for name, area in areas.items()
                ]
            )
        rows += make_rows(measured)
        evaluation.progress("out of distribution", place, len(settings.against))
    return rows
