"""Training a classifier and the network under it, on labelled images: one engine for every arm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional

from deepbregman.config import Optimiser
from deepbregman.data import Batches
from deepbregman.errors import UserError
from deepbregman.method.transformation import Views, centre_view
from deepbregman.training.optimisers import learning_rate, parameter_groups
from deepbregman.training.seeds import derived, epoch_order

from .features import BATCH_SIZE, frozen


class Diverged(UserError):
    """The loss, or what the network predicts, is not finite."""


@dataclass(frozen=True)
class Budget:
    """How long and how fast a network is trained."""

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
    """A feature extractor and a linear layer on it.

    Args:
        extractor: maps images (N, 3, H, W) to features (N, d).
        num_features: d.
        num_classes: C.
        seed: of the linear layer's weights, which are small: at first no class is preferred.
    """

    def __init__(
        self, extractor: nn.Module, num_features: int, num_classes: int, seed: int
    ) -> None:
        super().__init__()
        self.extractor = extractor
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived(seed, "classifier"))
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
    console: Console | None = None,
    title: str = "",
) -> None:
    """Train every weight of a network in place, on random views of labelled images.

    SGD with Nesterov momentum 0.9, the learning rate falling along a cosine; batch normalisation
    learns the statistics of the new images. The same seed gives the same weights to the bit on a
    CPU. The host waits for the device once an epoch.

    Args:
        network: to train, on the device of the labels.
        batches: the images.
        labels: int64 (N,) of all images in ``batches``.
        views: one view of an image is trained on.
        budget: epochs, batch and rates.
        seed: of the order and the views.
        indices: int64 (M,) on the CPU, the images to train on; all when None.
        mixed: run the network in bfloat16 where it is safe to.
        console: for progress; quiet when None.
        title: of the progress.

    Raises:
        Diverged: When the loss of an epoch is not finite.
    """
    rows = torch.arange(batches.num_images) if indices is None else indices
    if len(rows) < 2:
        raise UserError(f"{len(rows)} labelled images: batch normalisation needs 2 to train on")
    device, size, steps = labels.device, budget.batch(len(rows)), budget.steps_per_epoch(len(rows))
    schedule = Optimiser(
        name="sgd", learning_rate=budget.learning_rate, schedule="cosine", warmup_epochs=0.0
    )
    optimiser = torch.optim.SGD(
        parameter_groups(network, budget.weight_decay, decay_all=False),
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
    with progress_bar(console, title, budget.epochs * steps) as advance:
        for epoch in range(budget.epochs):
            targets = torch.split(labels[order(epoch).to(device)], size)
            total = torch.zeros((), device=device)
            for step in range(steps):
                position = epoch * steps + step
                rate = learning_rate(schedule, position, steps, budget.epochs)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                batch = next(feed)
                generator.manual_seed(derived(seed, "finetuning", position))
                uniforms = views.draw(size, device=device, generator=generator)
                view = views(batch.images, batch.sizes, uniforms)[0]
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
                    logits = network(view)
                loss = functional.cross_entropy(logits.float(), targets[step])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
                optimiser.step()
                total += loss.detach()
                advance()
            _require_finite(total, title, budget)
    network.eval()


def predict(
    network: nn.Module, batches: Batches, image_size: int, indices: Tensor | None = None
) -> Tensor:
    """Return the logits (M, C) of whole images, resized and centre-cropped, in float32.

    Args:
        network: of a finished training; it is frozen meanwhile.
        batches: the images.
        image_size: side of the view.
        indices: int64 (M,) on the CPU, the images; all when None.
    """
    rows = torch.arange(batches.num_images) if indices is None else indices
    with frozen(network):
        logits = torch.cat(
            [
                network(centre_view(batch.images, batch.sizes, image_size))
                for batch in batches.iterate(rows, BATCH_SIZE)
            ]
        )
    if not logits.isfinite().all():
        raise Diverged("a fine-tuned network predicts no numbers: lower --learning-rate")
    return logits


@contextmanager
def progress_bar(console: Console | None, title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while a block runs, on a terminal; the block is handed what moves it on by one."""
    console = console or Console(quiet=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(title), total=total)
        yield lambda: progress.advance(task)


def _require_finite(loss: Tensor, title: str, budget: Budget) -> None:
    if not loss.isfinite():
        raise Diverged(
            f"{title or 'fine-tuning'}: the loss is {loss.item()}, training has diverged at "
            f"learning rate {budget.learning_rate:g}; give a lower one with --learning-rate"
        )
