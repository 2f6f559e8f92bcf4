"""BYOL (Grill et al. 2020): a view predicts how a slow teacher embeds another view."""

import torch
from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import BYOLSettings
from deepbregman.method.losses import paired_cosines
from deepbregman.method.networks import Encoder

from .momentum import MomentumObjective
from .objective import Gather, Outputs, Samples, ViewGroups, build_predictor, list_pairs


class BYOL(MomentumObjective, settings=BYOLSettings):
    """The squared distance of a prediction to the teacher's embedding, both of unit norm.

    Nothing pushes images apart: the predictor and the slow teacher keep it from collapse.
    """

    teaches_same_views = True

    def __init__(self, settings: BYOLSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(settings, encoder, widths, {"prediction": settings.weight})
        self.predictor = build_predictor(widths, settings.predictor_hidden)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Let each main view predict the teacher's embeddings of the others."""
        h, z = self.embed(views.main)
        predicted = gather(self.apply_head(self.predictor, z))  # (M, N, d)
        targets = self.teach(views.main, gather)  # (M, N, d)
        cosines = [paired_cosines(predicted[a], targets[b]) for a, b in list_pairs(len(targets))]
        loss = 2.0 - 2.0 * torch.stack(cosines).mean()
        return Outputs({"prediction": loss}, predicted, targets, h.detach())
