"""SSL-HSIC (Li et al. 2021): embeddings depend on which image it is, and little on each other."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import SSLHSICSettings
from deepbregman.method.bregman import widen
from deepbregman.method.networks import Encoder

from .momentum import MomentumObjective
from .objective import Gather, Outputs, Samples, ViewGroups, build_predictor, list_pairs

EPSILON = 1e-12
"""Added to the self-dependence before its root, whose slope at 0 is infinite."""


class SSLHSIC(MomentumObjective, settings=SSLHSICSettings):
    """Maximises the dependence of embeddings on the image, less the root of their own.

    Both are the Hilbert-Schmidt independence criterion with the inverse multiquadric kernel, by
    random Fourier features that are drawn anew at each step.
    """

    teaches_same_views = True

    def __init__(
        self, settings: SSLHSICSettings, encoder: Encoder, widths: EncoderSettings
    ) -> None:
        weights = {
            "dependence": -settings.weight,
            "self_dependence": settings.weight * settings.gamma,
        }
        super().__init__(settings, encoder, widths, weights)
        self.predictor = build_predictor(widths, settings.predictor_hidden)
        self.num_features, self.width = settings.features, widths.embedding
        self.kernel_scale = settings.kernel_scale

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw directions, lengths and phases of two sets of Fourier features: (2, D, d + 2)."""
        normal, uniform = (
            draw((2, self.num_features, count), device=device, generator=generator)
            for draw, count in ((torch.randn, self.width + 1), (torch.rand, 1))
        )
        return torch.cat([normal, uniform], dim=2)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Let each main view depend on the image as the teacher's embeddings of the others do."""
        assert samples.random is not None  # `draw` made it
        h, z = self.embed(views.main)
        predicted = gather(self.apply_head(self.predictor, z))  # (M, N, d)
        targets = self.teach(views.main, gather)  # (M, N, d)
        units = [F.normalize(widen(part), dim=2) for part in (predicted, targets)]
        first, second = (
            [fourier_features(part, draw, self.kernel_scale) for part in units]
            for draw in samples.random
        )  # twice (M, N, D) of the student and of the teacher
        of_image, of_itself = [], []
        for a, b in list_pairs(len(targets)):
            one, other = (torch.stack([f[0][a], f[1][b]]) for f in (first, second))  # (2, N, D)
            of_image.append(dependence_on_image(one))
            hsic = self_dependence(one.flatten(0, 1), other.flatten(0, 1))
            of_itself.append((hsic + EPSILON).sqrt())
        terms = {
            "dependence": torch.stack(of_image).mean(),
            "self_dependence": torch.stack(of_itself).mean(),
        }
        return Outputs(terms, predicted, targets, h.detach())


def fourier_features(z: Tensor, draw: Tensor, scale: float) -> Tensor:
    """Map embeddings to features whose products estimate ``c / sqrt(c^2 + |z - z'|^2)``.

    The kernel is a mean of Gaussians, exp(-t |z - z'|^2) with t of the gamma distribution of shape
    1/2 and rate c^2. So a frequency is a normal vector times a normal number, divided by c.

    Args:
        draw: (D, d + 2): the normal vectors, the normal numbers, and uniforms for the phases.
    """
    draw = draw.to(z.dtype)
    direction, length, phase = draw[:, :-2], draw[:, -2:-1], draw[:, -1]
    angles = z @ (direction * length / scale).T + 2.0 * math.pi * phase
    return math.sqrt(2.0 / len(draw)) * angles.cos()


def dependence_on_image(features: Tensor) -> Tensor:
    """HSIC of embeddings with the image they come from, up to a constant factor.

    The mean kernel of different views of one image less the mean kernel of all pairs.

    Args:
        features: (M, N, D) of M >= 2 views.
    """
    count, num_images = features.shape[:2]
    together = features.sum(dim=0).square().sum() - features.square().sum()
    own = together / (num_images * count * (count - 1))
    return own - features.mean(dim=(0, 1)).square().sum()


def self_dependence(first: Tensor, second: Tensor) -> Tensor:
    """HSIC of embeddings with themselves: ``trace(K H L H) / n^2``.

    Args:
        first: (n, D) features, whose products are K.
        second: (n, D) independent features of the same embeddings, whose products are L.
    """
    centred = [part - part.mean(dim=0) for part in (first, second)]
    return (centred[0].T @ centred[1]).square().sum() / len(first) ** 2
