"""A memory of every image of the dataset, and contrast with it, as several methods need."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MemoryBank(nn.Module):
    """A unit vector for each image: a running mean of its embeddings, random at first."""

    rows: Tensor

    def __init__(self, num_images: int, width: int, momentum: float = 0.5) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("rows", F.normalize(torch.randn(num_images, width), dim=1))

    def recall(self, indices: Tensor) -> Tensor:
        """Return the vectors (B, d) of images (B,)."""
        return self.rows.index_select(0, indices)

    @torch.no_grad()
    def remember(self, indices: Tensor, units: Tensor) -> None:
        """Move the vectors of different images (B,) towards their embeddings, units (B, d)."""
        mixed = self.recall(indices).lerp(units.to(self.rows.dtype), 1.0 - self.momentum)
        self.rows.index_copy_(0, indices, F.normalize(mixed, dim=1))

    def choose(self, random: Tensor) -> Tensor:
        """Turn uniforms (m,) in [0, 1) into places of images (m,), which may repeat."""
        return (random * len(self.rows)).long().clamp_max(len(self.rows) - 1)


class MemoryContrast(nn.Module):
    """Tells an image's own vector in a memory from those of others drawn at random.

    By noise-contrastive estimation (``nce``) each pair is judged by itself: own or noise? The
    normaliser of the softmax over all images is estimated from the first batch and kept, as the
    paper on instance discrimination does. By ``softmax`` the own vector is found among the others.
    """

    temperature: Tensor
    log_normaliser: Tensor
    batches: Tensor

    def __init__(self, num_images: int, temperature: float, loss: str) -> None:
        super().__init__()
        self.num_images, self.loss = num_images, loss
        self.register_buffer("temperature", torch.tensor(temperature), persistent=False)
        self.register_buffer("log_normaliser", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))  # batches it has seen

    def forward(self, units: Tensor, own: Tensor, others: Tensor, itself: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            units: (N, d) embeddings, normalised.
            own: (N, d) vectors of the same images.
            others: (m, d) vectors of others.
            itself: (N, m), where one of the others is the image itself, by chance.
        """
        positive = (units * own).sum(dim=1) / self.temperature  # (N,)
        negative = units @ others.T / self.temperature  # (N, m)
        if self.loss == "softmax":
            rest = negative.masked_fill(itself, -torch.inf).logsumexp(dim=1)
            return F.softplus(rest - positive).mean()
        log_normaliser = self._find_log_normaliser(negative.detach())
        noise = math.log(len(others) / self.num_images)  # m P_n
        of_own = F.logsigmoid(positive - log_normaliser - noise)
        of_others = F.logsigmoid(log_normaliser + noise - negative).sum(dim=1)
        return -(of_own + of_others).mean()

    @torch.no_grad()
    def _find_log_normaliser(self, negative: Tensor) -> Tensor:
        """Return the logarithm of the normaliser, which the first batch sets."""
        estimate = negative.logsumexp((0, 1)) + math.log(self.num_images / negative.numel())
        chosen = torch.where(self.batches > 0, self.log_normaliser, estimate)
        if self.training:
            self.log_normaliser.copy_(chosen)
            self.batches.add_(1)
        return chosen
