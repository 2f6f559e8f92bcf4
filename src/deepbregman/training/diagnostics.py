"""Numbers that tell whether training is healthy, and the words for when it is not."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.method.bregman import learned_divergence, of_distribution

COLLAPSED_RANK = 2.0
COLLAPSED_SPREAD = 0.05
FEW_ACTIVE = 0.1


def alignment(z1: Tensor, z2: Tensor) -> Tensor:
    """Mean squared distance of positives on the sphere (Wang and Isola 2020); 0 is perfect.

    Args:
        z1: (N, d)
        z2: (N, d)
    """
    return (F.normalize(z1, dim=1) - F.normalize(z2, dim=1)).square().sum(dim=1).mean()


def uniformity(z: Tensor) -> Tensor:
    """Log of the mean Gaussian potential of all pairs on the sphere (ibid.); lower spreads more.

    Args:
        z: (N, d)
    """
    z = F.normalize(z, dim=1)
    squared = (2.0 - 2.0 * z @ z.T).clamp_min(0.0)  # (N, N)
    others = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    return ((-2.0 * squared).exp() * others).sum().div(others.sum()).log()


def effective_rank(h: Tensor) -> Tensor:
    """Exponential of the entropy of the singular values of centred features (Roy, Vetterli 2007).

    Args:
        h: (N, d)
    """
    values = torch.linalg.svdvals(h - h.mean(dim=0))
    share = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    entropy: Tensor = torch.special.entr(share).sum()
    return entropy.exp()


def spread(z: Tensor) -> Tensor:
    """Deviation on the sphere, all directions together: about 1 spread evenly, 0 in one point.

    Args:
        z: (N, d)
    """
    return F.normalize(z, dim=1).std(dim=0, correction=0).square().sum().sqrt()


def usage(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Count the subnetworks that win somewhere, and the entropy of who wins.

    Args:
        scores: (N, K)

    Returns:
        The number of active subnetworks, and the entropy of the winners as a share of log K.
    """
    num_subnetworks = scores.shape[1]
    wins = F.one_hot(scores.argmax(dim=1), num_subnetworks).sum(dim=0)  # (K,)
    entropy = torch.special.entr(wins / wins.sum()).sum()
    return (wins > 0).sum(), entropy / torch.tensor(max(num_subnetworks, 2)).log()


def diagnose(
    representation: Tensor, embedding: Tensor, scores: Tensor | None, smoothing: float
) -> dict[str, float]:
    """Compute every diagnostic of a batch.

    Args:
        representation: (M, N, d)
        embedding: (M, N, 128)
        scores: (M, N, K), or None when the divergence is off.
        smoothing: T of the smooth form, 0 for the hard form.
    """
    z = embedding.float()
    found = {
        "alignment": alignment(z[0], z[1]),
        "uniformity": uniformity(z[0]),
        "spread": torch.minimum(spread(z[0]), spread(representation[0].float())),
        "effective_rank": effective_rank(representation[0].float()),
    }
    if scores is not None:
        first, second = of_distribution(scores[0]), of_distribution(scores[1])
        distance = learned_divergence(first, second, smoothing)  # (N, N)
        positive = distance.diagonal().mean()
        count = len(distance)
        negative = (distance.sum() - distance.diagonal().sum()) / (count * max(1, count - 1))
        active, entropy = usage(scores.flatten(0, 1))
        found |= {
            "divergence_positives": positive,
            "divergence_negatives": negative,
            "active_subnetworks": active,
            "usage_entropy": entropy,
        }
    return {name: float(value) for name, value in found.items()}


def warnings(found: dict[str, float], num_subnetworks: int, num_samples: int) -> list[str]:
    """Say what looks wrong in the diagnostics of a batch.

    Args:
        found: by :func:`diagnose`.
        num_subnetworks: K.
        num_samples: in the batch, all views counted; no more subnetworks than that can win.
    """
    words = []
    if found["effective_rank"] < COLLAPSED_RANK or found["spread"] < COLLAPSED_SPREAD:
        words.append(
            f"representations have collapsed (effective rank {found['effective_rank']:.1f}, spread "
            f"{found['spread']:.3f}): lower the learning rate or raise contrastive.weight"
        )
    active = found.get("active_subnetworks")
    if active is not None and active < FEW_ACTIVE * min(num_subnetworks, num_samples):
        words.append(
            f"only {active:.0f} of {num_subnetworks} subnetworks are in use; try divergence.norm "
            "output, divergence.smoothing above 0, or a divergence.usage_bonus"
        )
    return words
