"""W-MSE (Ermolov et al. 2021): views agree after whitening, which forbids them to collapse."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import WMSESettings
from deepbregman.method.bregman import widen
from deepbregman.method.losses import list_comparisons
from deepbregman.method.networks import Encoder

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class WMSE(Objective, settings=WMSESettings):
    """Whitens each view in random sub-batches, and brings the views of an image together."""

    def __init__(self, settings: WMSESettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"distance": settings.weight})
        self.settings = settings

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw the order in which images are put into sub-batches, for each round."""
        shape = (self.settings.rounds, num_images)
        return torch.rand(shape, device=device, generator=generator)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Compare every pair of main views, whitened."""
        assert samples.random is not None  # `draw` made it
        h, z = self.embed(views.main)
        z = gather(z)  # (M, N, d)
        wide = widen(z)
        shape = (len(wide), -1, self.settings.whitening_batch, wide.shape[2])  # (M, N / n, n, d)
        losses = []
        for order in samples.random.argsort(dim=1):
            parts = wide[:, order].view(shape)
            white = F.normalize(whiten(parts, self.settings.shrinkage), dim=-1).flatten(1, 2)
            losses += [
                (first - second).square().sum(dim=1).mean()
                for first, second in list_comparisons(white, "none")
            ]
        return Outputs({"distance": torch.stack(losses).mean()}, z, None, h.detach())


def whiten(z: Tensor, shrinkage: float = 0.0) -> Tensor:
    """Give ``z`` (..., n, d) mean 0 and covariance 1, by the Cholesky factor of its covariance.

    Args:
        z: n samples, n > d.
        shrinkage: share of the identity in the covariance.

    Returns:
        The same shape; not a number where the covariance has no inverse.
    """
    centred = z - z.mean(dim=-2, keepdim=True)
    matrix = centred.mT @ centred / (z.shape[-2] - 1)  # (..., d, d)
    identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    # Without its own check, for which the host would wait.
    factor, failed = torch.linalg.cholesky_ex(matrix.lerp(identity, shrinkage))
    factor = torch.where((failed == 0)[..., None, None], factor, torch.nan)
    white: Tensor = torch.linalg.solve_triangular(factor, centred.mT, upper=False).mT
    return white
