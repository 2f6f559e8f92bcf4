"""SwAV (Caron et al. 2020): views of an image are assigned to the same prototypes."""

import torch
from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import SwAVSettings
from deepbregman.method.bregman import balance_scores
from deepbregman.method.losses import cross_view_entropy
from deepbregman.method.networks import Encoder

from .objective import Gather, Group, Objective, Outputs, Samples, ViewGroups, build_head
from .teacher import Bank, Prototypes


class SwAV(Objective, settings=SwAVSettings):
    """Every view, small ones too, predicts the assignment of each main view but itself.

    Assignments are evened out over the joint batch and, later in training, over a queue of
    embeddings of the first main view of past batches.
    """

    temperature: Tensor
    assignment_temperature: Tensor
    progress: Tensor

    def __init__(self, settings: SwAVSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"assignment": settings.weight})
        self.settings = settings
        self.prototypes = Prototypes(settings.prototypes, widths.embedding)
        self.queue = Bank(settings.queue, widths.embedding) if settings.queue else None
        for name in ("temperature", "assignment_temperature"):
            self.register_buffer(name, torch.tensor(getattr(settings, name)), persistent=False)
        self.register_buffer("progress", torch.zeros(()))

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Let the views predict each other's assignments."""
        h, z, every = self.embed_with_small(views, gather)  # z (M, N, d), every (V, N, d)
        scores = self.prototypes(every.flatten(0, 1)).unflatten(0, every.shape[:2])  # (V, N, K)
        targets = torch.stack([self.assign(main) for main in scores[: len(z)].detach()])
        loss = cross_view_entropy(targets, scores, self.temperature)
        if self.queue is not None and self.training:
            self.queue.push(z[0].detach())
        return Outputs({"assignment": loss}, z, None, h.detach())

    @torch.no_grad()
    def assign(self, scores: Tensor) -> Tensor:
        """Turn the scores (N, K) of a view into its assignment to the prototypes, (N, K)."""
        temperature, num_images, counts = self.assignment_temperature, len(scores), None
        if self.queue is not None:
            past = self.prototypes(self.queue.weight)  # (Q, K)
            # Until the queue is used its rows count 0 times: shapes stay, and nothing waits.
            in_use = self.queue.is_full & (self.progress >= self.settings.queue_from)
            counts = torch.cat([scores.new_ones(num_images), in_use.expand(len(past))])
            scores = torch.cat([scores, past])
        rounds = self.settings.assignment_rounds
        balanced = balance_scores(scores, temperature, rounds, counts)
        return (balanced[:num_images] / temperature).softmax(dim=1)

    def after_step(self, progress: float) -> None:
        """Remember how far training is."""
        self.progress.fill_(progress)

    def parameter_groups(self) -> list[Group]:
        """Keep the prototypes as they are at first."""
        return self.set_apart("prototypes", frozen_until=self.settings.freeze_prototypes)
