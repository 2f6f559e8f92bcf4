"""Accuracies in per cent, from predictions."""

import torch
from torch import Tensor


def top_k_accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    """Return how often the label is among the k largest logits.

    Args:
        logits: (n, C).
        labels: (n,).
        k: at most C.
    """
    hits = logits.topk(k, dim=1).indices == labels.to(logits.device)[:, None]  # (n, k)
    return 100.0 * hits.any(dim=1).double().mean().item()


def balanced_accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Return the mean over classes of the share of each class that is found.

    A class without a label here is left out of the mean.

    Args:
        predicted: (n,), classes.
        labels: (n,).
    """
    labels = labels.to(predicted.device)
    present, members = torch.unique(labels, return_inverse=True)
    totals = torch.zeros(len(present), dtype=torch.float64, device=predicted.device)
    found = totals.clone().index_add_(0, members, (predicted == labels).double())
    counts = totals.index_add_(0, members, torch.ones_like(members, dtype=torch.float64))
    return 100.0 * (found / counts).mean().item()


def accuracies(
    labels: Tensor, *, predicted: Tensor, logits: Tensor | None = None, balanced: bool = False
) -> dict[str, float]:
    """Measure ``top1``; ``top5`` from logits of 6 classes or more; ``balanced`` where asked for.

    Args:
        labels: (n,).
        predicted: (n,), classes.
        logits: (n, C), or None where nothing but the winner is known.
        balanced: whether the classes are so uneven that their mean is wanted too.
    """
    values = {"top1": 100.0 * (predicted == labels.to(predicted.device)).double().mean().item()}
    if logits is not None and logits.shape[1] > 5:
        values["top5"] = top_k_accuracy(logits, labels, 5)
    if balanced:
        values["balanced"] = balanced_accuracy(predicted, labels)
    return values
