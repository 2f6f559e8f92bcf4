"""Instance discrimination (Wu et al. 2018): every image is a class, kept in a memory."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import InstDiscSettings
from deepbregman.method.bregman import widen
from deepbregman.method.networks import Encoder

from .memory import MemoryBank, MemoryContrast
from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class InstDisc(Objective, settings=InstDiscSettings):
    """Each view finds its image's vector in a memory; one view of an image is enough.

    The vector is also the target that a divergence compares with, unless a teacher stands beside
    the method. Negatives are drawn once for all images of a batch.
    """

    def __init__(
        self, settings: InstDiscSettings, encoder: Encoder, widths: EncoderSettings
    ) -> None:
        weights = {"discrimination": settings.weight}
        if settings.proximal > 0.0:
            weights["proximal"] = settings.weight * settings.proximal
        super().__init__(encoder, build_head(encoder, widths), weights)
        self.settings, self.width = settings, widths.embedding

    def size_by(self, num_images: int, num_classes: int) -> None:
        """Make the memory."""
        settings = self.settings
        self.bank = MemoryBank(num_images, self.width, settings.momentum)
        self.contrast = MemoryContrast(num_images, settings.temperature, settings.loss)

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw the negatives."""
        return torch.rand(self.settings.negatives, device=device, generator=generator)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Find every main view in the memory, then update it."""
        assert samples.indices is not None  # the settings ask for them
        assert samples.random is not None  # `draw` made it
        h, z = self.embed(views.main)
        units = F.normalize(widen(gather(z)), dim=2)  # (M, N, d)
        own, places = self.bank.recall(samples.indices), self.bank.choose(samples.random)
        others, itself = self.bank.recall(places), samples.indices[:, None] == places
        losses = [self.contrast(view, own, others, itself) for view in units]
        terms = {"discrimination": torch.stack(losses).mean()}
        if "proximal" in self.weights:
            terms["proximal"] = (units - own).square().sum(dim=2).mean()
        if self.training:
            self.bank.remember(samples.indices, units.detach().mean(dim=0))
        return Outputs(terms, units, own[None], h.detach())
