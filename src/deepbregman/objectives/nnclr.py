"""NNCLR (Dwibedi et al. 2021): the positive of a view is another image, its nearest neighbour."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import NNCLRSettings
from deepbregman.method.bregman import cosine_scores
from deepbregman.method.networks import Encoder

from .objective import (
    Gather,
    Objective,
    Outputs,
    Samples,
    ViewGroups,
    build_head,
    build_predictor,
    list_pairs,
)
from .teacher import Bank


class NNCLR(Objective, settings=NNCLRSettings):
    """InfoNCE between the neighbour of one view in a queue and the prediction of another view.

    The queue holds the embeddings of the first view, of past batches only.
    """

    temperature: Tensor

    def __init__(self, settings: NNCLRSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"contrastive": settings.weight})
        self.predictor = build_predictor(widths, settings.predictor_hidden)
        self.queue = Bank(settings.queue, widths.embedding)
        self.register_buffer("temperature", torch.tensor(settings.temperature), persistent=False)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Contrast the neighbours of each main view with the predictions of the others."""
        h, z = self.embed(views.main)
        predicted, z = gather(self.apply_head(self.predictor, z)), gather(z)  # (M, N, d)
        neighbours = self.find_neighbours(z)
        own = torch.arange(z.shape[1], device=z.device)
        losses = []
        for a, b in list_pairs(len(z)):
            logits = cosine_scores(neighbours[a], predicted[b]) / self.temperature  # (N, N)
            losses.append(F.cross_entropy(logits, own))
        if self.training:
            self.queue.push(z[0].detach())
        return Outputs({"contrastive": torch.stack(losses).mean()}, z, None, h.detach())

    @torch.no_grad()
    def find_neighbours(self, z: Tensor) -> Tensor:
        """Return the row of the queue nearest to each embedding: (M, N, d) to (M, N, d)."""
        nearest = self.queue(z.flatten(0, 1)).argmax(dim=1)
        return self.queue.weight[nearest].view_as(z)
