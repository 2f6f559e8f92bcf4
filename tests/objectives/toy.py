"""Two methods with all that one can have.

One has a momentum teacher on a weak view, a queue and a predictor; the other labels, a memory of
every image, and randomness of its own.
"""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman.config import EncoderSettings, ObjectiveSettings
from deepbregman.method.networks import Encoder, build_projection
from deepbregman.objectives import Gather, Group, Objective, Outputs, Samples, ViewGroups


@dataclass(frozen=True)
class ToySettings(ObjectiveSettings):
    groups = ("weak_views", "small_views")
    fewest_views = 1
    name: Literal["toy"] = "toy"
    momentum: float = 0.9
    queue: int = 24


class Toy(Objective, settings=ToySettings):
    queue: Tensor

    def __init__(self, settings: ToySettings, encoder: Encoder, widths: EncoderSettings) -> None:
        width = widths.embedding
        projection = build_projection(encoder.num_features, widths.projection_hidden, width)
        super().__init__(encoder, projection, {"match": settings.weight, "repel": 0.5})
        self.momentum = settings.momentum
        self.predictor = build_projection(width, 5, width)
        self.teacher = copy.deepcopy(nn.Sequential(encoder, projection)).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(settings.queue, width), dim=1))

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        h, z = self.embed(views.main)
        with self.autocast():
            predicted = self.predictor(z.flatten(0, 1)).unflatten(0, z.shape[:2])
            with torch.no_grad():
                weak = self.teacher(views.weak.flatten(0, 1)).unflatten(0, views.weak.shape[:2])
        student, teacher = gather(predicted), gather(weak).detach()
        targets = F.normalize(teacher, dim=2)
        cosines = (F.normalize(student, dim=2) * targets[0]).sum(2)
        negatives = F.normalize(gather(z), dim=2) @ self.queue.clone().T
        terms = {"match": -cosines.mean(), "repel": negatives.logsumexp(2).mean()}
        self.queue.copy_(torch.cat([targets.flatten(0, 1), self.queue])[: len(self.queue)])
        return Outputs(terms, student, teacher, h.detach())

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        share = (1.0 - self.momentum) * (1.0 + math.cos(math.pi * progress)) / 2.0
        student = [*self.encoder.parameters(), *self.projection.parameters()]
        for slow, fast in zip(self.teacher.parameters(), student, strict=True):
            slow.lerp_(fast, share)

    def parameter_groups(self) -> list[Group]:
        return [
            Group([*self.encoder.named_parameters(), *self.projection.named_parameters()]),
            Group(self.predictor.named_parameters(), rate=10.0, scheduled=False),
        ]

    def metrics(self) -> dict[str, Tensor]:
        return {"queue_norm": self.queue.norm(dim=1).mean()}


@dataclass(frozen=True)
class InformedSettings(ObjectiveSettings):
    needs_labels = True
    needs_indices = True
    name: Literal["informed"] = "informed"


class Informed(Objective, settings=InformedSettings):
    memory: Tensor

    def __init__(
        self, settings: InformedSettings, encoder: Encoder, widths: EncoderSettings
    ) -> None:
        width = widths.embedding
        projection = build_projection(encoder.num_features, widths.projection_hidden, width)
        super().__init__(encoder, projection, {"classify": settings.weight, "recall": 0.5})

    def size_by(self, num_images: int, num_classes: int) -> None:
        width = self.projection[-1].out_features
        self.classifier = nn.Linear(width, num_classes)
        self.register_buffer("memory", torch.zeros(num_images, width))

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        return torch.rand(num_images, device=device, generator=generator)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        indices, labels, random, _ = samples
        assert indices is not None
        assert labels is not None
        assert random is not None
        h, z = self.embed(views.main)
        student = gather(z)
        scores = self.classifier(student)  # (M, N, C)
        losses = [F.cross_entropy(view, labels, reduction="none") for view in scores]
        last = self.memory.index_select(0, indices)  # (N, d)
        recall = (student - last).square().mean()
        self.memory.index_copy_(0, indices, student[0].detach())
        terms = {"classify": (torch.stack(losses) * random).mean(), "recall": recall}
        return Outputs(terms, student, None, h.detach())
