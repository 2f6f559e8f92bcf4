"""Boxes 2 and 3 composed: what is trained, without its losses."""

from typing import NamedTuple

from torch import Tensor, nn

from .base_network import Encoder


class Outputs(NamedTuple):
    """What the networks make of a batch: h, z and o of the paper."""

    representation: Tensor
    embedding: Tensor
    scores: Tensor | None


class Model(nn.Module):
    """Encoder, projection and, when the divergence is on, its subnetworks.

    Args:
        encoder: image -> h; the part one keeps.
        projection: h -> z.
        divergence_network: z -> scores, or None for SimCLR.
    """

    def __init__(
        self, encoder: Encoder, projection: nn.Module, divergence_network: nn.Module | None
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.divergence_network = divergence_network

    def forward(self, images: Tensor) -> Outputs:
        """Pass images of one or several views through the networks.

        Args:
            images: (N, 3, H, W)

        Returns:
            h (N, d), z (N, 128) and scores (N, K) or None.
        """
        h = self.encoder(images)
        z = self.projection(h)
        return Outputs(
            h, z, None if self.divergence_network is None else self.divergence_network(z)
        )
