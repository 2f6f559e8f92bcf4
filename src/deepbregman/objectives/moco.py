"""MoCo (He et al. 2020; Chen et al. 2020, 2021): InfoNCE to the keys of a slow teacher.

Version 2 has a queue of past keys as negatives, version 3 a predictor, and the batch's keys in
place of the queue; both are settings of one class.
"""

import torch
from torch import Tensor, nn

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import MoCoSettings
from deepbregman.method.losses import info_nce
from deepbregman.method.networks import Encoder

from .momentum import MomentumObjective
from .objective import Gather, Outputs, Samples, ViewGroups, build_predictor, list_pairs
from .teacher import Bank


class MoCo(MomentumObjective, settings=MoCoSettings):
    """Find the key of an image's other view among the keys of a queue, or of the batch."""

    temperature: Tensor

    def __init__(self, settings: MoCoSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(settings, encoder, widths, {"contrastive": settings.weight})
        hidden, norm = settings.predictor_hidden, widths.projection_output_norm
        self.symmetric = self.teaches_same_views = settings.symmetric
        self.predictor = build_predictor(widths, hidden, norm) if hidden else nn.Identity()
        self.queue = Bank(settings.queue, widths.embedding) if settings.queue else None
        self.register_buffer("temperature", torch.tensor(settings.temperature), persistent=False)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Contrast queries with the teacher's keys of other views."""
        main = views.main
        queried, taught = (main, main) if self.symmetric else (main[:1], main[1:])
        h, z = self.embed(queried)
        queries = gather(self.apply_head(self.predictor, z))  # (M, N, d)
        keys = self.teach(taught, gather)  # (M', N, d)
        pairs = list_pairs(len(keys)) if self.symmetric else [(0, b) for b in range(len(keys))]
        # A copy, since the push below changes the rows before the gradient is computed.
        negatives = None if self.queue is None else self.queue.weight.clone()
        losses = [
            info_nce(
                queries[a],
                keys[b],
                negatives,
                temperature=self.temperature,
                in_batch=negatives is None,
            )
            for a, b in pairs
        ]
        if self.queue is not None and self.training:
            self.queue.push(keys.flatten(0, 1))
        return Outputs({"contrastive": torch.stack(losses).mean()}, queries, keys, h.detach())
