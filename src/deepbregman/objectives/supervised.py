"""Supervised learning by cross-entropy: with labels, as a reference for methods without."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import SupervisedSettings
from deepbregman.method.bregman import widen
from deepbregman.method.networks import Encoder

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class Supervised(Objective, settings=SupervisedSettings):
    """A classifier of the embeddings of views; projection and classifier are one network."""

    def __init__(
        self, settings: SupervisedSettings, encoder: Encoder, widths: EncoderSettings
    ) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"cross_entropy": settings.weight})
        self.smoothing = settings.label_smoothing
        self.width = widths.embedding

    def size_by(self, num_images: int, num_classes: int) -> None:
        """Make the classifier."""
        self.classifier = nn.Linear(self.width, num_classes)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Classify every main view."""
        assert samples.labels is not None  # the settings ask for them
        h, z = self.embed(views.main)
        z = gather(z)  # (M, N, d)
        scores = self.classifier(F.relu(widen(z)))  # (M, N, C)
        losses = [
            F.cross_entropy(view, samples.labels, label_smoothing=self.smoothing) for view in scores
        ]
        return Outputs({"cross_entropy": torch.stack(losses).mean()}, z, None, h.detach())
