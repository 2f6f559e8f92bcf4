"""SimCLR (Chen et al. 2020): a contrastive loss on the embeddings of an image's views."""

import torch
from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import SimCLRSettings
from deepbregman.method.losses import CONTRASTIVE_LOSSES, contrast_sets
from deepbregman.method.networks import Encoder

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class SimCLR(Objective, settings=SimCLRSettings):
    """NT-Xent or NT-Logistic between views, or between sets of views."""

    temperature: Tensor

    def __init__(self, settings: SimCLRSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"contrastive": settings.weight})
        self.loss = CONTRASTIVE_LOSSES[settings.loss]
        self.sets = settings.sets
        # A buffer, so that one compiled step serves all values.
        self.register_buffer("temperature", torch.tensor(settings.temperature), persistent=False)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Contrast the main views with each other."""
        h, z = self.embed(views.main)
        z = gather(z)  # (M, N, d)
        loss = contrast_sets(self.loss, z, self.sets, self.temperature)
        return Outputs({"contrastive": loss}, z, None, h.detach())
