"""Linear classification by SGD, for features that change every epoch."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from .linear import LinearClassifier


def fit_linear_sgd(
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]],
    *,
    in_features: int,
    num_classes: int,
    epochs: int,
    learning_rate: float,
    weight_decay: float,
    seed: int,
    device: torch.device | str,
    mean: Tensor,
    deviation: Tensor,
    momentum: float = 0.9,
) -> LinearClassifier:
    """Fit by SGD on features that change every epoch; the host never waits inside an epoch.

    Args:
        batches: Maps an epoch to its (features (b, d), labels (b,)), of augmented images.
        in_features: Number of features, d.
        num_classes: Number of classes, C.
        epochs: Passes over ``batches``.
        learning_rate: Of the first epoch; a cosine over the epochs takes it towards 0.
        weight_decay: On the weights, not on the bias.
        seed: Of the initial weights.
        device: Where to train.
        mean: (d,), subtracted from the features.
        deviation: (d,), divides the features; nowhere zero.
        momentum: Of SGD.
    """
    # Drawn on the host, so that every device starts from the same weights.
    initial = torch.randn(num_classes, in_features, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode(False):
        weight = (0.01 * initial).to(device).requires_grad_()
        bias = torch.zeros(num_classes, device=device, requires_grad=True)
        mean, deviation = mean.to(weight, copy=True), deviation.to(weight, copy=True)
    optimiser = torch.optim.SGD([weight], learning_rate, momentum, weight_decay=weight_decay)
    optimiser.add_param_group({"params": [bias], "weight_decay": 0.0})
    for epoch in range(epochs):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
        for features, labels in batches(epoch):
            # A generator that yields inside no_grad or inference_mode would switch ours off too.
            with torch.inference_mode(False), torch.enable_grad():
                inputs = (features.detach().to(weight) - mean) / deviation  # (b, d)
                targets = labels.to(device, torch.long, copy=True)
                loss = functional.cross_entropy(inputs @ weight.T + bias, targets)
                weight.grad, bias.grad = torch.autograd.grad(loss, [weight, bias])
                optimiser.step()
    return LinearClassifier(weight.detach(), bias.detach(), mean, deviation)
