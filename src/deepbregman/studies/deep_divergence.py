"""Deep Divergence Learning on images: a supervised baseline (Cilingir et al., ICML 2020).

The paper's table of subnetworks prints a row "Deep Divergence" under "linear evaluation". That row
is the kNN accuracy of a supervised network, copied from the supplement of Deep Divergence Learning;
it is no like-for-like baseline of a self-supervised method. Here is one that can be trained at the
same encoder, views, batch and epochs. It sees the labels, and every row of it says so.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from deepbregman.config import Config, override, to_toml
from deepbregman.data import Source, channel_statistics
from deepbregman.data.opening import batch_images
from deepbregman.errors import Diverged, UserError
from deepbregman.evaluation.features import LabelledFeatures
from deepbregman.evaluation.inputs import open_labelled
from deepbregman.evaluation.knn import knn_by_cosine, knn_by_divergence
from deepbregman.evaluation.linear import linear_on_cached
from deepbregman.method.losses import METRIC_LOSSES
from deepbregman.method.networks import Model
from deepbregman.objectives import Group, Step, build_step
from deepbregman.runs import Record, Run, now, provenance
from deepbregman.training import checkpoints
from deepbregman.training.optimisers import build_optimiser, learning_rate
from deepbregman.training.processes import device_name, is_mixed, pick_device
from deepbregman.training.randomness import count_steps, derive_seed, epoch_order, seed_dropout

from .definition import Form, Judge, MetricLoss
from .divergence_learning import FORMS, SMOOTHING

Watch = Callable[[int, float], None]


class DeepDivergence(NamedTuple):
    """A supervised network and what it was trained with."""

    step: Step
    model: Model
    config: Config
    losses: tuple[float, ...]
    """Mean of each epoch."""


def deep_divergence(
    source: Source,
    config: Config,
    *,
    form: Form = "max",
    loss: MetricLoss = "triplet",
    num_subnetworks: int | None = None,
    margin: float = 1.0,
    epochs: int | None = None,
    seed: int | None = None,
    device: torch.device | None = None,
    watch: Watch | None = None,
) -> DeepDivergence:
    """Train encoder, projection and K subnetworks, with ReLU, on pairs or triplets of labels.

    Every view of every image of a batch is a labelled sample, so the cost is that of pretraining
    with the same configuration. The moment form takes the K outputs as features.

    Args:
        source: whose training split has labels.
        config: encoder, views, batch and optimiser; its losses are not used.
        form: of the divergence: ``max`` (Eq. 6), ``smooth`` or ``moment``.
        loss: ``contrastive`` or ``triplet``.
        num_subnetworks: K, in place of the configuration's.
        margin: of the loss.
        epochs: in place of the configuration's.
        seed: likewise.
        device: the CPU when None.
        watch: is told each epoch and its mean loss.

    Returns:
        The networks, in evaluation mode, with the configuration that builds them again.
    """
    if source.train.labels is None:
        raise UserError(
            f"data {source.name!r} has no labels: Deep Divergence is supervised; give a labelled "
            "source"
        )
    device = device or torch.device("cpu")
    config = configured(config, form, num_subnetworks, epochs, seed)
    images, settings = source.train.images, config.training
    batches = batch_images(images, config, device)
    labels = source.train.labels.to(device)
    pixels = channel_statistics(images, skip_unreadable=config.data.skip_unreadable)
    networks = build_step(config, *pixels).to(device)
    networks.to(memory_format=torch.channels_last)
    views, model = networks.views.main, networks.model.train()
    optimiser = build_optimiser(config.optimiser, [Group(model.named_parameters())], device)
    steps = count_steps(config, len(images))
    generator = torch.Generator(device)
    mixed = is_mixed(config, device)
    losses = []
    for epoch in range(settings.epochs):
        order = epoch_order(len(images), config.seed, epoch)[: steps * settings.batch_size]
        total = torch.zeros((), device=device)
        parts = torch.split(labels[order.to(device)], settings.batch_size)
        feed = batches.iterate(order, settings.batch_size)
        for index, (batch, truth) in enumerate(zip(feed, parts, strict=True)):
            step = epoch * steps + index
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(config.optimiser, step, steps, settings.epochs)
            generator.manual_seed(derive_seed(config.seed, "views", step))
            uniforms = views.draw(len(truth), device=device, generator=generator)
            seed_dropout(derive_seed(config.seed, "dropout", step), device)
            samples = views(batch.images, batch.sizes, uniforms).flatten(0, 1)  # (MN, 3, S, S)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
                scores = model(samples).scores
            distance = FORMS[form](scores, scores)  # (MN, MN)
            value = METRIC_LOSSES[loss](distance, truth.repeat(views.num_views), margin)
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


def configured(
    config: Config,
    form: Form,
    num_subnetworks: int | None = None,
    epochs: int | None = None,
    seed: int | None = None,
) -> Config:
    """Return the configuration that the networks of the baseline are built from."""
    if form not in FORMS:
        raise UserError(f"form {form!r} is not one of {', '.join(FORMS)}")
    changes: Record = {
        "divergence.weight": config.divergence.weight or 1.0,  # SimCLR's has no subnetworks
        "divergence.activation": "relu",
        "divergence.smoothing": SMOOTHING.get(form, 0.0),
        "training.accumulate": 1,
    }
    given = {
        "divergence.num_subnetworks": num_subnetworks,
        "training.epochs": epochs,
        "seed": seed,
    }
    return override(config, changes | {k: v for k, v in given.items() if v is not None})


def judged(
    found: DeepDivergence, source: Source, *, form: Form, device: torch.device | None = None
) -> dict[str, float]:
    """Measure kNN by the learned divergence, and kNN and linear on features, on the test split.

    Returns:
        Accuracies in per cent, by ``protocol, variant`` as ``deepbregman evaluate`` names them.
    """
    device = device or torch.device("cpu")
    labelled = LabelledFeatures(found.model, found.config, source, device)
    neighbours = [*knn_by_cosine(labelled), *knn_by_divergence(labelled, 0, FORMS[form])]
    rows = {f"knn, {arm.variant}": arm.values["top1"] for arm in neighbours}
    linear = linear_on_cached(labelled, 0)
    return rows | {f"linear, {linear.variant}": linear.values["top1"]}


def deep_divergence_cell(
    config: Config,
    form: Form,
    loss: MetricLoss,
    folder: Path,
    *,
    source: Source | None = None,
    judge: Judge = "test",
    margin: float = 1.0,
    accelerator: str = "auto",
    watch: Watch | None = None,
) -> Record:
    """Train and judge the baseline as one cell of a study, and leave an ordinary run folder.

    The folder is made when all is done, so a cell that was cut short leaves nothing; its networks
    can be loaded, evaluated and embedded like any run's.

    Args:
        config: of the cell, its number of subnetworks, epochs and seed included.
        form: of the divergence.
        loss: of the training.
        folder: of the run, new or empty.
        source: the data, already open; the configuration's when None.
        judge: what the test split of the source is, for the record.
        margin: of the loss.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        watch: is told each epoch and its mean loss.

    Returns:
        ``state``, ``judge``, ``supervised`` and ``metrics``, or ``why`` it diverged; also in the
        folder's ``result.json``, under ``study``.
    """
    Run.check_free(folder)
    source = source or open_labelled(config)
    device = pick_device(accelerator)
    record = provenance(device_name(device))
    outcome: Record = {
        "state": "done",
        "judge": judge,
        "supervised": True,
        "form": form,
        "loss": loss,
        "margin": margin,
        "metrics": {},
    }
    try:
        found = deep_divergence(
            source, config, form=form, loss=loss, margin=margin, device=device, watch=watch
        )
    except Diverged as error:
        outcome |= {"state": "diverged", "why": str(error)}
        run = Run.create(folder, configured(config, form), record)
        run.add_result(study=outcome, finished=now())
        return outcome
    outcome["metrics"] = judged(found, source, form=form, device=device)
    run = Run.create(folder, found.config, record)
    epochs = found.config.training.epochs
    state = {
        **checkpoints.network_states(found.step),
        "epoch": float(epochs),
        "config": to_toml(found.config),
    }
    checkpoints.save(run.last_checkpoint, state)
    for epoch, value in enumerate(found.losses, start=1):
        run.append_metrics({"epoch": epoch, "total": value})
    run.add_result(study=outcome, finished=now())
    return outcome
