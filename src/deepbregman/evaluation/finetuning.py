"""Training all weights of a network on labelled images, and the networks that it starts from."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepbregman.config import OptimiserSettings
from deepbregman.data import Batches
from deepbregman.errors import Diverged, UserError
from deepbregman.method.views import Views, centre_view
from deepbregman.objectives import build_untrained_encoder
from deepbregman.terminal import ReportProgress, ignore_progress
from deepbregman.training.optimisers import learning_rate, split_by_decay
from deepbregman.training.randomness import derive_seed, epoch_order, seed_dropout

from .features import BATCH_SIZE, LabelledFeatures
from .frozen import keep_frozen


@dataclass(frozen=True)
class Budget:
    """Length, batch size, learning rate and weight decay of fine-tuning."""

    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float

    def steps_per_epoch(self, num_images: int) -> int:
        """Count the steps; the images of a last, short batch are left to another epoch's order."""
        return num_images // self.batch(num_images)

    def batch(self, num_images: int) -> int:
        """Return the images in a step: all, where there are fewer than the batch."""
        return min(self.batch_size, num_images)


class Classifier(nn.Module):
    """A feature extractor, images (N, 3, H, W) to features (N, d), and a linear layer on it.

    The linear layer's first weights are small, so that no class is preferred.
    """

    def __init__(
        self, extractor: nn.Module, num_features: int, num_classes: int, seed: int
    ) -> None:
        super().__init__()
        self.extractor = extractor
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "classifier"))
            self.linear = nn.Linear(num_features, num_classes)
            nn.init.normal_(self.linear.weight, std=0.01)
            nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, C)."""
        logits: Tensor = self.linear(self.extractor(images))
        return logits


def finetune(
    network: Classifier,
    batches: Batches,
    labels: Tensor,
    views: Views,
    budget: Budget,
    *,
    seed: int,
    indices: Tensor | None = None,
    mixed: bool = False,
    progress: ReportProgress = ignore_progress,
    title: str = "fine-tuning",
) -> None:
    """Train every weight of a network in place, on random views of labelled images.

    It is SGD with Nesterov momentum 0.9 and a cosine schedule; batch normalisation learns the
    statistics of the new images. The same seed gives the same weights to the bit on a CPU. The host
    waits for the device once an epoch.

    Args:
        labels: int64 (N,) of all images in ``batches``.
        indices: int64 (M,) on the CPU, the images to train on; all when None.
    """
    rows = torch.arange(batches.num_images) if indices is None else indices
    if len(rows) < 2:
        raise UserError(f"{len(rows)} labelled images: batch normalisation needs 2 to train on")
    device, size, steps = labels.device, budget.batch(len(rows)), budget.steps_per_epoch(len(rows))
    schedule = OptimiserSettings(
        name="sgd", learning_rate=budget.learning_rate, schedule="cosine", warmup_epochs=0.0
    )
    optimiser = torch.optim.SGD(
        split_by_decay(network.named_parameters(), budget.weight_decay, decay_all=False),
        budget.learning_rate,
        momentum=0.9,
        nesterov=True,
        fused=device.type == "cuda",
    )

    def order(epoch: int) -> Tensor:
        return rows[epoch_order(len(rows), seed, epoch)[: steps * size]]

    feed = batches.chain((order(epoch) for epoch in range(budget.epochs)), size)
    generator = torch.Generator(device)
    network.train()
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):  # its state belongs to the caller
        for epoch in range(budget.epochs):
            targets = torch.split(labels[order(epoch).to(device)], size)
            total = torch.zeros((), device=device)
            for step in range(steps):
                position = epoch * steps + step
                rate = learning_rate(schedule, position, steps, budget.epochs)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                batch = next(feed)
                generator.manual_seed(derive_seed(seed, "finetuning", position))
                uniforms = views.draw(size, device=device, generator=generator)
                view = views(batch.images, batch.sizes, uniforms)[0]
                seed_dropout(derive_seed(seed, "finetuning dropout", position), device)
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
                    logits = network(view)
                loss = functional.cross_entropy(logits.float(), targets[step])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
                optimiser.step()
                total += loss.detach()
                progress(title, position + 1, budget.epochs * steps)
            _require_finite(total, title, budget.learning_rate)
    network.eval()


def _require_finite(loss: Tensor, title: str, rate: float) -> None:
    """Refuse to go on with a loss that is not finite; the host waits for the device."""
    if not loss.isfinite():
        raise Diverged(
            f"{title}: the loss is {loss.item()}, training has diverged at learning rate {rate:g}; "
            "give a lower one with --learning-rate"
        )


def predict(
    network: nn.Module, batches: Batches, image_size: int, indices: Tensor | None = None
) -> Tensor:
    """Return the logits (M, C) of whole images, resized and centre-cropped; of all by default."""
    rows = torch.arange(batches.num_images) if indices is None else indices
    with keep_frozen(network):
        logits = torch.cat(
            [
                network(centre_view(batch.images, batch.sizes, image_size))
                for batch in batches.iterate(rows, BATCH_SIZE)
            ]
        )
    if not logits.isfinite().all():
        raise Diverged("the outputs of a fine-tuned network are not finite: lower --learning-rate")
    return logits


Start = Callable[[LabelledFeatures, int], tuple[nn.Module, int]]
"""Makes the network that training starts from, given a seed; returns it with its width."""


def from_encoder(labelled: LabelledFeatures, seed: int) -> tuple[nn.Module, int]:
    """Start from the run's encoder."""
    del seed  # nothing is drawn
    encoder = copy.deepcopy(labelled.model.encoder)
    return encoder, encoder.num_features


def from_projection(labelled: LabelledFeatures, seed: int) -> tuple[nn.Module, int]:
    """Start from the encoder and the projection's first layer, as SimCLR-v2 does.

    That is all up to the projection's first activation: Linear, batch norm, ReLU.
    """
    encoder, _ = from_encoder(labelled, seed)
    layers = list(copy.deepcopy(labelled.model.projection).children())
    last = next(i for i, layer in enumerate(layers) if isinstance(layer, nn.ReLU))
    assert isinstance(layers[0], nn.Linear)  # build_projection begins with it
    return nn.Sequential(encoder, nn.Sequential(*layers[: last + 1])), layers[0].out_features


def from_scratch(labelled: LabelledFeatures, seed: int) -> tuple[nn.Module, int]:
    """Start from random weights of the same architecture: what pretraining is compared with."""
    encoder = build_untrained_encoder(
        labelled.model.encoder, labelled.config, *labelled.pixel_statistics, seed
    )
    return encoder, encoder.num_features
