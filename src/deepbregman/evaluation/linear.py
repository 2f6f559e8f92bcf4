"""Linear classification of features: a convex problem, so an accuracy that needs no seed.

The objective is the mean cross-entropy plus ``l2 / 2 * ||weight||^2`` on standardised features, the
bias free: scikit-learn's LogisticRegression with ``C = 1 / (l2 * n)``, for 3 classes or more.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .logistic import minimise
from .metrics import top_k_accuracy

L2_GRID = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PATIENCE = 2
"""After so many penalties in a row that are worse than the best, weaker ones are not tried."""
# Up to here (1 GiB) float64 is affordable, and only float64 reaches the optimum when l2 is small.
FLOAT64_ELEMENTS = 2**27


class LinearClassifier(NamedTuple):
    """An affine map of standardised features.

    Attributes:
        weight: (C, d); zero for a class that the training labels lack.
        bias: (C,); minus infinity for a class that the training labels lack.
        mean: (d,), of the training features.
        deviation: (d,), of the training features; 1 for a constant one.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    deviation: Tensor

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits (n, C) of features (n, d)."""
        standardised = (features.to(self.weight) - self.mean) / self.deviation
        return standardised @ self.weight.T + self.bias


class LinearResult(NamedTuple):
    """Test accuracy in per cent, top 1 and top 5 (None below 6 classes), and how l2 was chosen.

    ``validation`` has the held-out accuracies of the penalties that were tried.
    """

    accuracy: float
    top5: float | None
    l2: float
    validation: dict[float, float]


class ChosenFit(NamedTuple):
    """A fit to all of the training set, its penalty chosen by held-out accuracies in per cent."""

    classifier: LinearClassifier
    l2: float
    validation: dict[float, float]


class FewLabelResult(NamedTuple):
    """Test accuracies in per cent; ``deviation`` is the sample's, None for a single value."""

    mean: float
    deviation: float | None
    values: tuple[float, ...]


def standardisation(features: Tensor, one_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation, (d,) each, of features (n, d); a constant one has 1."""
    mean, deviation = features.mean(dim=0), features.std(dim=0, correction=0)
    if one_scale:
        deviation = deviation.square().mean().sqrt().expand_as(deviation)
    # Constant up to the rounding of the float32 in which features are cached.
    constant = deviation <= torch.finfo(torch.float32).eps * mean.abs()
    return mean, deviation.masked_fill(constant, 1.0)


def fit_linear(
    features: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    l2: float = 1e-3,
    max_iterations: int = 2000,
    start: LinearClassifier | None = None,
    one_scale: bool = False,
) -> LinearClassifier:
    """Fit multinomial logistic regression by full-batch L-BFGS, on the features' device.

    Args:
        features: (n, d).
        labels: (n,), integers in [0, num_classes).
        num_classes: Number of classes, C.
        l2: Strength of the penalty on the weights; positive, which makes the optimum unique.
        max_iterations: A limit; stopping short of the optimum gives a RuntimeWarning.
        start: Where to start, to save iterations; the optimum does not depend on it.
        one_scale: Divide all features by one deviation, so that a handful of rows cannot blow up
            the features that happen to be nearly constant among them.

    Returns:
        The classifier, in float64 unless the features are too many.
    """
    if not l2 > 0:
        raise ValueError(f"l2 is {l2}, but a unique optimum needs it positive: try 1e-6")
    if len(features) == 0 or not features.isfinite().all():
        raise ValueError("features are empty or not finite, but a fit needs numbers: check them")
    # What the caller computed in inference mode cannot be differentiated through; a copy can.
    with torch.inference_mode(False), torch.enable_grad():
        present, targets = torch.unique(labels.to(features.device).long(), return_inverse=True)
        if present[0] < 0 or present[-1] >= num_classes:
            raise ValueError(
                f"labels run from {present[0]} to {present[-1]}, but num_classes is {num_classes}: "
                "number the classes from 0 and count them all"
            )
        wide = features.numel() <= FLOAT64_ELEMENTS and features.device.type != "mps"
        values = features.detach().to(torch.float64 if wide else torch.float32, copy=True)
        mean, deviation = standardisation(values, one_scale)
        design = values.sub_(mean).div_(deviation)  # (n, d)
        # An absent class would send its bias to minus infinity: solve without it, then say so.
        weight, bias = design.new_zeros(len(present), design.shape[1]), mean.new_zeros(len(present))
        if start is not None:
            weight.copy_(start.weight[present])
            bias.copy_(start.bias[present].nan_to_num(neginf=0.0))
        minimise(design, targets, weight, bias, l2, max_iterations)
        all_weight = weight.new_zeros(num_classes, weight.shape[1])
        all_bias = bias.new_full((num_classes,), -math.inf)
        all_weight[present], all_bias[present] = weight.detach(), bias.detach()
        return LinearClassifier(all_weight, all_bias, mean, deviation)


def choose_l2(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    *,
    num_classes: int,
    grid: Sequence[float] = L2_GRID,
) -> tuple[float, dict[float, float]]:
    """Choose the penalty by the accuracy on a part held out of the training set.

    From the strongest to the weakest, each fit starting where the last ended, until ``PATIENCE``
    in a row have done worse than the best so far: too weak a penalty overfits, a weaker one more,
    and the weakest take nearly all of the time. Those left are not tried.

    Args:
        features: (n, d), all of the training set.
        labels: (n,).
        held_out: (m,), indices of the held-out part; the fits see the other n - m rows only.
        num_classes: Number of classes.
        grid: The penalties to try.

    Returns:
        The best penalty (the strongest among equals) and the held-out accuracy in per cent of every
        penalty that was tried, from the strongest to the weakest.
    """
    held_out, labels = held_out.to(features.device), labels.to(features.device)
    kept = torch.ones(len(features), dtype=torch.bool, device=features.device)
    kept[held_out] = False
    if len(grid) == 0 or kept.all() or not kept.any():
        raise ValueError(
            f"{len(held_out)} of {len(features)} rows are held out for {len(grid)} penalties, but "
            "both parts and the grid must not be empty: pass a proper subset and a grid"
        )
    validation: dict[float, float] = {}
    fit: LinearClassifier | None = None
    rows = features[kept], labels[kept]  # once: of ImageNet they are 9 GB
    best, num_worse = -math.inf, 0
    for l2 in sorted(grid, reverse=True):
        fit = fit_linear(*rows, num_classes=num_classes, l2=l2, start=fit)
        accuracy = top_k_accuracy(fit.predict(features[held_out]), labels[held_out])
        validation[l2] = accuracy
        best, num_worse = max(best, accuracy), num_worse + 1 if accuracy < best else 0
        if num_worse == PATIENCE:
            break
    # max keeps the first of equals, and the strongest comes first.
    return max(validation, key=lambda l2: validation[l2]), validation


def fit_chosen(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    *,
    num_classes: int,
    grid: Sequence[float] = L2_GRID,
) -> ChosenFit:
    """Choose l2 on the held-out part, then fit again to all of the training set.

    Args:
        features: (n, d).
        labels: (n,).
        held_out: (m,), indices into the training set.
        num_classes: Number of classes.
        grid: The penalties to try.
    """
    l2, validation = choose_l2(features, labels, held_out, num_classes=num_classes, grid=grid)
    return ChosenFit(fit_linear(features, labels, num_classes=num_classes, l2=l2), l2, validation)


def linear_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    num_classes: int,
    held_out: Tensor,
    grid: Sequence[float] = L2_GRID,
) -> LinearResult:
    """Choose l2 on the held-out part, refit on all of the training set, test once.

    Args:
        train_features: (n, d).
        train_labels: (n,).
        test_features: (t, d).
        test_labels: (t,).
        num_classes: Number of classes.
        held_out: (m,), indices into the training set.
        grid: The penalties to try.
    """
    fit = fit_chosen(train_features, train_labels, held_out, num_classes=num_classes, grid=grid)
    logits = fit.classifier.predict(test_features)  # (t, C)
    top5 = top_k_accuracy(logits, test_labels, 5) if num_classes > 5 else None
    return LinearResult(top_k_accuracy(logits, test_labels), top5, fit.l2, fit.validation)


def few_label_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    subsets: Sequence[Tensor],
    *,
    num_classes: int,
    l2: float,
) -> FewLabelResult:
    """Fit on each small subset of the training set and test.

    Args:
        train_features: (n, d).
        train_labels: (n,).
        test_features: (t, d).
        test_labels: (t,).
        subsets: Indices into the training set, (m,) each.
        num_classes: Number of classes.
        l2: The penalty of every fit; chosen elsewhere, since a small subset cannot be split.
    """
    if len(subsets) == 0:
        raise ValueError("subsets is empty, but a mean needs a value: pass at least one subset")
    train_labels, values = train_labels.to(train_features.device), []
    for rows in (subset.to(train_features.device) for subset in subsets):
        few = train_features[rows], train_labels[rows]
        fit = fit_linear(*few, num_classes=num_classes, l2=l2, one_scale=True)
        values.append(top_k_accuracy(fit.predict(test_features), test_labels))
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return FewLabelResult(statistics.fmean(values), deviation, tuple(values))
