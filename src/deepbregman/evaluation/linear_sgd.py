"""Linear classification by SGD, for features that change every epoch; many settings at once."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .linear import LinearClassifier


class Setting(NamedTuple):
    """How one classifier is trained."""

    learning_rate: float
    """Of the first epoch; a cosine over the epochs takes it towards 0."""
    weight_decay: float
    """On the weights, not on the bias."""
    kept_only: bool = False
    """Learn from the kept rows only, so that the others can judge the setting."""


Rows = tuple[Tensor, Tensor, Tensor]
"""Features (b, d), labels (b,), and which rows are kept (b,), bool."""


def fit_linear_sgd(
    batches: Callable[[int], Iterable[Rows]],
    settings: Sequence[Setting],
    *,
    in_features: int,
    num_classes: int,
    epochs: int,
    seed: int,
    device: torch.device | str,
    mean: Tensor,
    deviation: Tensor,
    momentum: float = 0.9,
) -> list[LinearClassifier]:
    """Fit one classifier for each setting, all on the same features in one pass over them.

    Features of augmented images cost a pass through the encoder and classifiers next to nothing, so
    a choice among settings is as cheap as one. The classifiers do not touch one another: one that
    diverges leaves the others as they are. The host never waits inside an epoch.

    Args:
        batches: Maps an epoch to its rows, of augmented images.
        settings: One for each classifier, M.
        in_features: Number of features, d.
        num_classes: Number of classes, C.
        epochs: Passes over ``batches``.
        seed: Of the initial weights, the same for every classifier.
        device: Where to train.
        mean: (d,), subtracted from the features.
        deviation: (d,), divides the features; nowhere zero.
        momentum: Of SGD.

    Returns:
        The classifiers, in the order of the settings.
    """
    # Drawn on the host, so that every device starts from the same weights.
    initial = torch.randn(num_classes, in_features, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode(False):
        weight = (0.01 * initial).to(device).repeat(len(settings), 1, 1)  # (M, C, d)
        bias = torch.zeros(len(settings), num_classes, device=device)  # (M, C)
        rates, decays, kept_only = (
            torch.tensor(column, device=device)[:, None] for column in zip(*settings, strict=True)
        )  # (M, 1) each
        velocity, bias_velocity = torch.zeros_like(weight), torch.zeros_like(bias)
        mean, deviation = mean.to(weight, copy=True), deviation.to(weight, copy=True)
    for epoch in range(epochs):
        rate = rates * ((1 + math.cos(math.pi * epoch / epochs)) / 2)  # (M, 1)
        for features, labels, kept in batches(epoch):
            # A generator that yields inside no_grad or inference_mode would switch ours off too.
            with torch.inference_mode(False), torch.enable_grad():
                inputs = (features.detach().to(weight) - mean) / deviation  # (b, d)
                targets = labels.to(device, torch.long, copy=True)
                shares = (kept.to(device, copy=True) | ~kept_only).to(weight)  # (M, b)
                slope, bias_slope = _slopes(weight, bias, inputs, targets, shares)
                velocity.mul_(momentum).add_(slope + decays[:, :, None] * weight)
                bias_velocity.mul_(momentum).add_(bias_slope)
                weight.sub_(rate[:, :, None] * velocity)
                bias.sub_(rate * bias_velocity)
    return [LinearClassifier(w, b, mean, deviation) for w, b in zip(weight, bias, strict=True)]


def _slopes(
    weight: Tensor, bias: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """Differentiate each classifier's mean cross-entropy over the rows that it has a share in."""
    weight, bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
    logits = functional.linear(inputs, weight.flatten(0, 1), bias.flatten())  # (b, M * C)
    logits = logits.view(len(inputs), *bias.shape).transpose(1, 2)  # (b, C, M)
    losses = functional.cross_entropy(
        logits, targets[:, None].expand(-1, len(bias)), reduction="none"
    ).T  # (M, b)
    means = (losses * shares).sum(dim=1) / shares.sum(dim=1).clamp_min(1.0)  # (M,)
    slope, bias_slope = torch.autograd.grad(means.sum(), [weight, bias])
    return slope, bias_slope
