"""Deep Divergence Learning on images: a supervised baseline (Cilingir et al., ICML 2020).

The paper's table of subnetworks has a row "Deep Divergence" under "linear evaluation". That row is
the kNN accuracy of a supervised network, copied from the supplement of Deep Divergence Learning, so
it cannot be compared with a self-supervised method. The baseline here is trained with the same
encoder, views, batch and epochs. It uses labels, and every row of it is marked so.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from deepbregman.config import Config, override, to_toml
from deepbregman.data import Source, channel_statistics
from deepbregman.data.opening import batch_images
from deepbregman.errors import Diverged, UserError
from deepbregman.evaluation.features import LabelledFeatures
from deepbregman.evaluation.knn import knn_by_cosine, knn_by_divergence
from deepbregman.evaluation.linear import linear_on_cached
from deepbregman.method.losses import METRIC_LOSSES
from deepbregman.method.networks import Model
from deepbregman.objectives import Group, Step, build_step
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.optimisers import build_optimiser, learning_rate
from deepbregman.training.processes import is_mixed
from deepbregman.training.randomness import Share

from .definition import Form, MetricLoss
from .plane import FORMS, SMOOTHING

MARGIN = 1.0
"""Of both losses."""
WatchLoss = Callable[[int, float], None]
"""Called with each epoch and its mean loss."""


class DeepDivergence(NamedTuple):
    """A supervised network and how it was trained."""

    step: Step
    model: Model
    config: Config
    losses: tuple[float, ...]
    """Mean of each epoch."""


def train_deep_divergence(
    source: Source,
    config: Config,
    form: Form,
    loss: MetricLoss,
    device: torch.device,
    watch: WatchLoss | None = None,
) -> DeepDivergence:
    """Train encoder, projection and K subnetworks, with ReLU, on pairs or triplets of labels.

    Every view of every image of a batch is a labelled sample, so the cost is that of pretraining
    with the same configuration. The moment form takes the K outputs as features. The losses of the
    configuration, which is one of :func:`baseline_config`, are not used.
    """
    if source.train.labels is None:
        raise UserError(
            f"data {source.name!r} has no labels: Deep Divergence is supervised; give a labelled "
            "source"
        )
    images, settings = source.train.images, config.training
    batches = batch_images(images, config, device)
    labels = source.train.labels.to(device)
    pixels = channel_statistics(images, skip_unreadable=config.data.skip_unreadable)
    networks = build_step(config, *pixels).to(device)
    networks.to(memory_format=torch.channels_last)
    views, model = networks.views.main, networks.model.train()
    optimiser = build_optimiser(config.optimiser, [Group(model.named_parameters())], device)
    share = Share(config, len(images), device, rank=0, world_size=1)
    steps, mixed = share.steps_per_epoch, is_mixed(config, device)
    losses = []
    for epoch in range(settings.epochs):
        order = share.order(epoch, 0)
        total = torch.zeros((), device=device)
        parts = torch.split(labels[order.to(device)], settings.batch_size)
        feed = batches.iterate(order, settings.batch_size)
        for index, (batch, truth) in enumerate(zip(feed, parts, strict=True)):
            step = epoch * steps + index
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(config.optimiser, step, steps, settings.epochs)
            uniforms = share.draw_uniforms(networks.views, step).main
            share.seed_dropout(step)
            samples = views(batch.images, batch.sizes, uniforms).flatten(0, 1)  # (MN, 3, S, S)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
                scores = model(samples).scores
            distance = FORMS[form](scores, scores)  # (MN, MN)
            value = METRIC_LOSSES[loss](distance, truth.repeat(views.num_views), MARGIN)
            optimiser.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
            optimiser.step()
            total += value.detach()
        losses.append(total.item() / steps)
        if not math.isfinite(losses[-1]):
            raise Diverged(
                f"the loss of epoch {epoch + 1} is not finite: training has diverged; lower "
                f"optimiser.learning_rate ({config.optimiser.learning_rate})"
            )
        if watch is not None:
            watch(epoch + 1, losses[-1])
    return DeepDivergence(networks.eval(), model.eval(), config, tuple(losses))


def baseline_config(config: Config, form: Form) -> Config:
    """Return the configuration that the networks of the baseline are built from."""
    changes = {
        "divergence.weight": config.divergence.weight or 1.0,  # with 0 there are no subnetworks
        "divergence.activation": "relu",
        "divergence.smoothing": SMOOTHING.get(form, 0.0),
        "training.accumulate": 1,
    }
    return override(config, changes)


def evaluate_baseline(
    trained: DeepDivergence, source: Source, form: Form, device: torch.device
) -> dict[str, float]:
    """Measure kNN by the learned divergence, and kNN and linear on features, on the test split.

    Returns:
        Accuracies in per cent, by ``protocol, variant`` as ``deepbregman evaluate`` names them.
    """
    labelled = LabelledFeatures(trained.model, trained.config, source, device)
    neighbours = [*knn_by_cosine(labelled), *knn_by_divergence(labelled, 0, FORMS[form])]
    rows = {f"knn, {arm.variant}": arm.values["top1"] for arm in neighbours}
    linear = linear_on_cached(labelled, 0)
    return rows | {f"linear, {linear.variant}": linear.values["top1"]}


def save_baseline(run: Run, trained: DeepDivergence) -> None:
    """Write the networks and losses into a run, so that other verbs can load it."""
    state = {
        **checkpoints.network_states(trained.step),
        "epoch": float(trained.config.training.epochs),
        "config": to_toml(trained.config),
    }
    checkpoints.save(run.last_checkpoint, state)
    for epoch, value in enumerate(trained.losses, start=1):
        run.append_metrics({"epoch": epoch, "total": value})
