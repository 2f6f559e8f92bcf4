"""CMC (Tian et al. 2020): the brightness of an image and its colours are two views of it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import CMCSettings
from deepbregman.method.bregman import widen
from deepbregman.method.networks import Encoder

from .memory import MemoryBank, MemoryContrast
from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class CMC(Objective, settings=CMCSettings):
    """Brightness finds the image's colours in a memory, and colours its brightness.

    The encoder has a trunk for brightness and one for colours, each of full width, where those of
    the paper have half of it. It splits images itself, so that it takes ordinary images afterwards.
    When the representation of one is projected, zeros take the place of the other.
    """

    def __init__(self, settings: CMCSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"contrastive": settings.weight})
        self.settings, self.width = settings, widths.embedding

    def size_by(self, num_images: int, num_classes: int) -> None:
        """Make the two memories."""
        settings = self.settings
        self.bright_bank = MemoryBank(num_images, self.width, settings.momentum)
        self.colour_bank = MemoryBank(num_images, self.width, settings.momentum)
        self.bright_contrast = MemoryContrast(num_images, settings.temperature, settings.loss)
        self.colour_contrast = MemoryContrast(num_images, settings.temperature, settings.loss)

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw the negatives."""
        return torch.rand(self.settings.negatives, device=device, generator=generator)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Find each in the memory of the other, then update both."""
        assert samples.indices is not None  # the settings ask for them
        assert samples.random is not None  # `draw` made it
        shape = views.main.shape[:2]
        with self.autocast():
            h = self.encoder(views.main.flatten(0, 1))  # (M * n, 2h)
            bright, colour = h.chunk(2, dim=1)
            nothing = torch.zeros_like(bright)
            halves = [torch.cat([bright, nothing], 1), torch.cat([nothing, colour], 1)]
            z = self.projection(torch.cat(halves))
        z = z.view(2 * shape[0], shape[1], -1)
        units = F.normalize(widen(gather(z)), dim=2)  # (2M, N, d)
        brights, colours = units.chunk(2)  # (M, N, d) each
        places = self.bright_bank.choose(samples.random)
        itself = samples.indices[:, None] == places
        losses = []
        for finder, bank, contrast in (
            (brights, self.colour_bank, self.bright_contrast),
            (colours, self.bright_bank, self.colour_contrast),
        ):
            own, others = bank.recall(samples.indices), bank.recall(places)
            losses.append(torch.stack([contrast(f, own, others, itself) for f in finder]).mean())
        if self.training:
            self.bright_bank.remember(samples.indices, brights.detach().mean(dim=0))
            self.colour_bank.remember(samples.indices, colours.detach().mean(dim=0))
        h = h.detach().view(*shape, -1)
        return Outputs({"contrastive": losses[0] + losses[1]}, units, None, h)
