"""PIRL (Misra and van der Maaten 2020): an image and its jigsaw puzzle share an embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import PIRLSettings
from deepbregman.method.bregman import Number, widen
from deepbregman.method.networks import Encoder
from deepbregman.method.patches import shuffle_patches

from .memory import MemoryBank
from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class PIRL(Objective, settings=PIRLSettings):
    """The first view stays whole, the second is cut into patches and shuffled.

    Both are compared with the image's vector in a memory. The patches' embeddings are joined in
    shuffled order. The head is not told the order, so training teaches it to ignore the order.
    """

    temperature: Tensor

    def __init__(self, settings: PIRLSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        share, weight = settings.puzzle_share, settings.weight
        weights = {"puzzle": weight * share, "image": weight * (1.0 - share)}
        super().__init__(encoder, build_head(encoder, widths), weights)
        self.settings, self.width = settings, widths.embedding
        self.patch_head = nn.Linear(encoder.num_features, self.width)
        self.puzzle_head = nn.Linear(settings.grid**2 * self.width, self.width)
        self.register_buffer("temperature", torch.tensor(settings.temperature), persistent=False)

    def size_by(self, num_images: int, num_classes: int) -> None:
        """Make the memory."""
        self.bank = MemoryBank(num_images, self.width, self.settings.momentum)

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw order and place of each image's patches, and the negatives."""
        count = 3 * num_images * self.settings.grid**2 + self.settings.negatives
        return torch.rand(count, device=device, generator=generator)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Compare an image and its puzzle with the memory, then update it."""
        assert samples.indices is not None  # the settings ask for them
        assert samples.random is not None  # `draw` made it
        h, z = self.embed(views.main[:1])
        drawn = samples.random[: -self.settings.negatives].view(len(samples.indices), -1, 3)
        mine = drawn[samples.first : samples.first + z.shape[1]]  # (n, P, 3)
        puzzle = self._embed_puzzle(views.main[1], mine)  # (n, d)
        both = gather(torch.cat([z, puzzle[None]]))
        units = F.normalize(widen(both), dim=2)  # (2, N, d): image, puzzle
        own = self.bank.recall(samples.indices)
        places = self.bank.choose(samples.random[-self.settings.negatives :])
        others, itself = self.bank.recall(places), samples.indices[:, None] == places
        image, shuffled = (
            contrast_with_memory(u, own, others, itself, self.temperature) for u in units
        )
        if self.training:
            self.bank.remember(samples.indices, units[0].detach())
        return Outputs({"puzzle": shuffled, "image": image}, units, own[None], h.detach())

    def _embed_puzzle(self, images: Tensor, random: Tensor) -> Tensor:
        """Cut images (n, 3, S, S) into puzzles and embed these, (n, d).

        ``random`` (n, P, 3) are uniforms in [0, 1): the order of the patches, and their places.
        """
        grid = self.settings.grid
        side = self.settings.piece_side(images.shape[-1])
        patches = shuffle_patches(images, random[..., 0], random[..., 1:], grid, side)
        with self.autocast():
            found = self.patch_head(self.encoder(patches.flatten(0, 1)))  # (n * P, d)
            embedding: Tensor = self.puzzle_head(found.view(len(images), -1))
        return embedding


def contrast_with_memory(
    units: Tensor, own: Tensor, others: Tensor, itself: Tensor, temperature: Number = 0.07
) -> Tensor:
    """Noise-contrastive loss of PIRL (Eq. 4 and 5): own is recognised, each of the others is not.

    Args:
        units: (N, d) embeddings, normalised.
        own: (N, d) vectors of the same images.
        others: (m, d) vectors of other images.
        itself: (N, m), where one of the others is the image itself, by chance; such are left out.

    Returns:
        A scalar: the mean over the images of ``-log h(own) - sum_j log(1 - h(other j))``, where h
        is the share of exp(similarity / tau) in the sum of its own and those of all others.
    """
    positive = (units * own).sum(dim=1) / temperature  # (N,)
    negative = (units @ others.T / temperature).masked_fill(itself, -torch.inf)  # (N, m)
    rest = negative.logsumexp(dim=1)  # (N,)
    of_own = -F.softplus(rest - positive)
    of_others = -F.softplus(negative - rest[:, None]).sum(dim=1)
    return -(of_own + of_others).mean()
