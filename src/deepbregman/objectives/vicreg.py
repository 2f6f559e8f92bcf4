"""VICReg (Bardes et al. 2022): variance, invariance and covariance, each a term of its own."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import VICRegSettings
from deepbregman.method.bregman import widen
from deepbregman.method.losses import list_comparisons
from deepbregman.method.networks import Encoder

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head

EPSILON = 1e-4
"""Added to a variance before its root, whose slope at 0 is infinite."""


class VICReg(Objective, settings=VICRegSettings):
    """Views agree, components vary, and vary apart from each other.

    Scaled as the authors' code is, for which the published weights were chosen: the invariance is
    the mean over components too, and the variance the mean over the views.
    """

    def __init__(self, settings: VICRegSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        weights = {
            "invariance": settings.weight * settings.invariance,
            "variance": settings.weight * settings.variance,
            "covariance": settings.weight * settings.covariance,
        }
        super().__init__(encoder, build_head(encoder, widths), weights)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Compare every pair of main views, and regularise each view."""
        h, z = self.embed(views.main)
        z = gather(z)  # (M, N, d)
        wide = widen(z)
        pairs = list_comparisons(wide, "none")
        terms = {
            "invariance": torch.stack([F.mse_loss(*pair) for pair in pairs]).mean(),
            "variance": torch.stack([lack_of_variance(view) for view in wide]).mean(),
            "covariance": 2.0 * torch.stack([covariance(view) for view in wide]).mean(),
        }
        return Outputs(terms, z, None, h.detach())


def lack_of_variance(z: Tensor) -> Tensor:
    """Mean over the components of ``z`` (N, d) of how much their deviation falls short of 1."""
    deviation = (z.var(dim=0) + EPSILON).sqrt()
    return F.relu(1.0 - deviation).mean()


def covariance(z: Tensor) -> Tensor:
    """Sum of the squared covariances of different components of ``z`` (N, d), divided by d."""
    centred = z - z.mean(dim=0)
    matrix = centred.T @ centred / (len(z) - 1)  # (d, d)
    return (matrix.square().sum() - matrix.diagonal().square().sum()) / z.shape[1]
