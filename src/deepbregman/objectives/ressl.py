"""ReSSL (Zheng et al. 2021): a strong view relates to past images as the teacher's weak one does.

It is the matched divergence with a bank of the teacher's embeddings as subnetworks, and nothing
else. The published loss is a cross-entropy, which is larger by the entropy of the target.
"""

import torch
from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import RelationSettings, ReSSLSettings
from deepbregman.method.losses import match_divergence
from deepbregman.method.networks import Encoder

from .momentum import MomentumObjective
from .objective import Gather, Outputs, Samples, ViewGroups
from .teacher import Bank


class ReSSL(MomentumObjective, settings=ReSSLSettings):
    """The divergence of each main view to the teacher's weak views, over a bank of past targets."""

    temperature: Tensor
    target_temperature: Tensor

    def __init__(
        self, settings: RelationSettings, encoder: Encoder, widths: EncoderSettings
    ) -> None:
        super().__init__(settings, encoder, widths, {"relation": settings.weight})
        self.bank = Bank(settings.queue, widths.embedding)
        for name in ("temperature", "target_temperature"):
            self.register_buffer(name, torch.tensor(getattr(settings, name)), persistent=False)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Match the relations of the main views to those of the weak ones."""
        assert views.weak is not None  # the configuration has made sure
        h, z = self.embed(views.main)
        z, targets = gather(z), self.teach(views.weak, gather)  # (M, N, d) and (M', N, d)
        # A copy, since the push below changes the rows before the gradient is computed.
        bank = self.bank.weight.clone()
        losses = [self.compare(view, target, bank) for view in z for target in targets]
        if self.training:
            self.bank.push(targets.flatten(0, 1))
        terms = {name: torch.stack([each[name] for each in losses]).mean() for name in losses[0]}
        return Outputs(terms, z, targets, h.detach())

    def compare(self, z: Tensor, target: Tensor, bank: Tensor) -> dict[str, Tensor]:
        """Compute the loss terms of one view (N, d) and one target (N, d)."""
        relation = match_divergence(
            z,
            target,
            bank,
            temperature=self.temperature,
            target_temperature=self.target_temperature,
        )
        return {"relation": relation}
