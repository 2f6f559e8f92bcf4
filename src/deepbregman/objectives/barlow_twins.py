"""Barlow Twins (Zbontar et al. 2021): the cross-correlation of two views becomes the identity."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import BarlowTwinsSettings
from deepbregman.method.bregman import widen
from deepbregman.method.losses import list_comparisons
from deepbregman.method.networks import Encoder

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class BarlowTwins(Objective, settings=BarlowTwinsSettings):
    """Equal components correlate, different ones do not; neither negatives nor a teacher."""

    off_diagonal: Tensor

    def __init__(
        self, settings: BarlowTwinsSettings, encoder: Encoder, widths: EncoderSettings
    ) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"redundancy": settings.weight})
        self.register_buffer("off_diagonal", torch.tensor(settings.off_diagonal), persistent=False)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Compare every pair of main views."""
        h, z = self.embed(views.main)
        z = gather(z)  # (M, N, d)
        losses = [
            redundancy(first, second, self.off_diagonal)
            for first, second in list_comparisons(widen(z), "none")
        ]
        return Outputs({"redundancy": torch.stack(losses).mean()}, z, None, h.detach())


def redundancy(z1: Tensor, z2: Tensor, off_diagonal: Tensor | float) -> Tensor:
    """Squared distance of the cross-correlation of two views (N, d) from the identity."""
    first, second = (F.batch_norm(z, None, None, training=True) for z in (z1, z2))
    correlation = first.T @ second / len(z1)  # (d, d)
    diagonal = correlation.diagonal()
    others = correlation.square().sum() - diagonal.square().sum()
    return (diagonal - 1.0).square().sum() + off_diagonal * others
