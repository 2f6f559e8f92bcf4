"""DINO (Caron et al. 2021): the student's distribution over prototypes follows the teacher's."""

import torch
from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import DINOSettings
from deepbregman.method.losses import cross_view_entropy
from deepbregman.method.networks import Encoder

from .momentum import MomentumObjective
from .objective import Gather, Group, Outputs, Samples, ViewGroups
from .teacher import Prototypes, Teacher


class DINO(MomentumObjective, settings=DINOSettings):
    """Every view, small ones too, predicts the teacher's distribution of each main view but itself.

    The teacher's scores are centred, so that no prototype takes everything, and divided by a low
    temperature, so that not all prototypes are used alike.
    """

    teaches_same_views = True
    centre: Tensor
    temperature: Tensor
    target_temperature: Tensor

    def __init__(self, settings: DINOSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(settings, encoder, widths, {"distillation": settings.weight})
        self.settings = settings
        self.prototypes = Prototypes(settings.prototypes, widths.embedding)
        self.teacher_prototypes = Teacher(self.prototypes)
        self.register_buffer("temperature", torch.tensor(settings.temperature), persistent=False)
        self.register_buffer("centre", torch.zeros(settings.prototypes))
        self.register_buffer("target_temperature", torch.tensor(self.temperature_at(0.0)))

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Let the views predict the teacher's distributions."""
        h, z, every = self.embed_with_small(views, gather)  # z (M, N, d), every (V, N, d)
        targets = self.teach(views.main, gather)  # (M, N, d)
        scores = self.prototypes(every.flatten(0, 1)).unflatten(0, every.shape[:2])  # (V, N, K)
        loss = cross_view_entropy(self.compute_targets(targets), scores, self.temperature)
        return Outputs({"distillation": loss}, z, targets, h.detach())

    @torch.no_grad()
    def compute_targets(self, targets: Tensor) -> Tensor:
        """Turn the teacher's embeddings (M, N, d) into distributions (M, N, K); move the centre."""
        scores: Tensor = self.teacher_prototypes(targets.flatten(0, 1))  # (M * N, K)
        shares = ((scores - self.centre) / self.target_temperature).softmax(dim=1)
        if self.training:
            self.centre.lerp_(scores.mean(dim=0), 1.0 - self.settings.centre_momentum)
        return shares.view(*targets.shape[:2], -1)

    def temperature_at(self, progress: float) -> float:
        """Return the teacher's temperature, which rises linearly at first."""
        first, last = self.settings.first_target_temperature, self.settings.target_temperature
        warmup = self.settings.target_warmup
        return last if progress >= warmup else first + (last - first) * progress / warmup

    def after_step(self, progress: float) -> None:
        """Let the teacher follow, its prototypes too, and set its temperature."""
        super().after_step(progress)
        self.teacher_prototypes.update(self.prototypes, self.momentum)
        self.target_temperature.fill_(self.temperature_at(progress))

    def parameter_groups(self) -> list[Group]:
        """Keep the prototypes, the last layer, as they are at first."""
        return self.set_apart("prototypes", frozen_until=self.settings.freeze_prototypes)
