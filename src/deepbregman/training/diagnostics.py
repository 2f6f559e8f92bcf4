"""Numbers that tell whether training is healthy, and the words for when it is not."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.objectives import Step, StepOutputs

COLLAPSED_RANK = 2.0
COLLAPSED_SPREAD = 0.05


def alignment(z1: Tensor, z2: Tensor) -> Tensor:
    """Mean squared distance of positives (N, d) on the sphere (Wang and Isola 2020); 0 is best."""
    return (F.normalize(z1, dim=1) - F.normalize(z2, dim=1)).square().sum(dim=1).mean()


def uniformity(z: Tensor) -> Tensor:
    """Log of the mean Gaussian potential of all pairs of ``z`` (N, d) on the sphere (ibid.)."""
    z = F.normalize(z, dim=1)
    squared = (2.0 - 2.0 * z @ z.T).clamp_min(0.0)  # (N, N)
    others = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    return ((-2.0 * squared).exp() * others).sum().div(others.sum()).log()


def effective_rank(h: Tensor) -> Tensor:
    """Exponential of the entropy of the singular values of centred ``h`` (Roy, Vetterli 2007)."""
    values = torch.linalg.svdvals(h - h.mean(dim=0))
    share = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    entropy: Tensor = torch.special.entr(share).sum()
    return entropy.exp()


def spread(z: Tensor) -> Tensor:
    """Deviation of ``z`` (N, d) on the sphere: about 1 spread evenly, 0 in one point."""
    return F.normalize(z, dim=1).std(dim=0, correction=0).square().sum().sqrt()


def diagnose(step: Step, outputs: StepOutputs) -> dict[str, float]:
    """Compute every diagnostic of a batch, whose representations are those of every process."""
    z, h = outputs.student.float(), outputs.representation[0].float()
    targets = [] if outputs.teacher is None else [outputs.teacher[0].float()]
    partners = [*z[1:], *targets]  # none of a single view without a target
    found = {
        **({"alignment": alignment(z[0], partners[0])} if partners else {}),
        "uniformity": uniformity(z[0]),
        "spread": torch.minimum(spread(z[0]), spread(h)),
        "effective_rank": effective_rank(h),
        **step.diagnose(outputs),
        **step.metrics(),
    }
    if shared := found.keys() & {"total", *outputs.terms}:
        raise ValueError(f"loss terms may not be called {', '.join(shared)}: diagnostics are")
    return {name: float(value) for name, value in found.items()}


def find_collapse(record: dict[str, float]) -> list[str]:
    """Say whether the representations of a batch have collapsed, by what diagnose found."""
    rank, deviation = record["effective_rank"], record["spread"]
    if rank >= COLLAPSED_RANK and deviation >= COLLAPSED_SPREAD:
        return []
    return [
        f"representations have collapsed (effective rank {rank:.1f}, spread {deviation:.3f}): "
        "lower the learning rate or raise objective.weight"
    ]
