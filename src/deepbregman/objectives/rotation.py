"""Prediction of rotations, a loss term beside any method (E-SSL, Dangovski et al. 2022).

The views of a method teach the encoder what does not change an image. This term teaches it
something that does.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman.config import RotationSettings
from deepbregman.method.bregman import widen
from deepbregman.method.networks import build_projection

from .objective import Gather, Group, Objective

QUARTERS = 4


class RotationTerm(nn.Module):
    """Small view m is turned by m quarters; a head on the representation says by how many.

    The head sees the joint batch, so that its batch normalisation needs no synchronising.
    """

    def __init__(self, settings: RotationSettings, in_features: int) -> None:
        super().__init__()
        self.head = build_projection(in_features, settings.hidden, QUARTERS)
        self.weights = {"rotation": settings.weight}

    def forward(self, objective: Objective, small: Tensor, gather: Gather) -> dict[str, Tensor]:
        """Compute the cross-entropy of the turns of this process's views (M, n, 3, S, S)."""
        turned = torch.stack([view.rot90(turn, (-2, -1)) for turn, view in enumerate(small)])
        with objective.autocast():
            h: Tensor = objective.encoder(turned.flatten(0, 1))
        joint = widen(gather(h.view(*small.shape[:2], -1)))  # (M, N, h)
        turns = torch.arange(len(joint), device=h.device).repeat_interleave(joint.shape[1])
        return {"rotation": F.cross_entropy(self.head(joint.flatten(0, 1)), turns % QUARTERS)}

    def parameter_groups(self) -> list[Group]:
        """List the parameters of the head."""
        return [Group(list(self.named_parameters(prefix="rotation")))]
