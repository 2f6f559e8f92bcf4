"""SupCon (Khosla et al. 2020): a contrastive loss with labels, as a reference."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import SupConSettings
from deepbregman.method.bregman import Number, widen
from deepbregman.method.networks import Encoder

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class SupCon(Objective, settings=SupConSettings):
    """Every sample of an image's class is its positive."""

    temperature: Tensor

    def __init__(self, settings: SupConSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"contrastive": settings.weight})
        self.register_buffer("temperature", torch.tensor(settings.temperature), persistent=False)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Contrast the classes of the main views."""
        assert samples.labels is not None  # the settings ask for them
        h, z = self.embed(views.main)
        z = gather(z)  # (M, N, d)
        loss = sup_con(z.flatten(0, 1), samples.labels.repeat(len(z)), self.temperature)
        return Outputs({"contrastive": loss}, z, None, h.detach())


def sup_con(z: Tensor, labels: Tensor, temperature: Number = 0.1) -> Tensor:
    """Mean over the anchors of the mean cross-entropy of their positives among all others.

    It is L_out of the paper. An anchor without another sample of its class counts 0.
    """
    units = F.normalize(widen(z), dim=1)
    logits = units @ units.T / temperature  # (N, N)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    positive = (labels[:, None] == labels) & ~itself
    log_share = logits - logits.masked_fill(itself, -torch.inf).logsumexp(dim=1, keepdim=True)
    of_anchor = (log_share * positive).sum(dim=1) / positive.sum(dim=1).clamp_min(1)
    return -of_anchor.mean()
