"""SimSiam (Chen and He 2021): one view predicts the other, and nothing pushes images apart."""

import torch
from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import SimSiamSettings
from deepbregman.method.losses import paired_cosines
from deepbregman.method.networks import Encoder

from .objective import (
    Gather,
    Group,
    Objective,
    Outputs,
    Samples,
    ViewGroups,
    build_head,
    build_predictor,
    list_pairs,
)


class SimSiam(Objective, settings=SimSiamSettings):
    """The cosine of a prediction with the embedding of another view, without gradient in that.

    The stopped gradient and the predictor, whose learning rate does not fall, keep it from
    collapse.
    """

    def __init__(
        self, settings: SimSiamSettings, encoder: Encoder, widths: EncoderSettings
    ) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"prediction": settings.weight})
        self.predictor = build_predictor(widths, settings.predictor_hidden)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Let each main view predict the others."""
        h, z = self.embed(views.main)
        predicted, z = gather(self.apply_head(self.predictor, z)), gather(z)  # (M, N, d)
        cosines = [paired_cosines(predicted[a], z[b].detach()) for a, b in list_pairs(len(z))]
        return Outputs({"prediction": -torch.stack(cosines).mean()}, z, None, h.detach())

    def parameter_groups(self) -> list[Group]:
        """Keep the predictor's learning rate where it starts."""
        return self.set_apart("predictor", scheduled=False)
