"""Fine-tuning a detector: SGD in steps, stopped and continued at any iteration."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepbregman.data.voc import Detections
from deepbregman.errors import UserError
from deepbregman.runs import Record
from deepbregman.training import checkpoints
from deepbregman.training.interruption import Interrupted, watch_signals
from deepbregman.training.seeds import derived

from .feeding import Photographs, batches_of_indices, feed, flipped, targets_of
from .metric import Found
from .models import Detector

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
WARMUP = 100
"""Iterations over which the learning rate rises, or a tenth of them all, if that is less."""
MILESTONES = (3 / 4, 11 / 12)
"""Shares of the iterations after which the learning rate is divided by 10."""
SETTLING = 200
"""Batches over which the statistics of batch norms are averaged at the end, as MoCo does."""


@dataclass(frozen=True)
class Plan:
    """How a detector is fine-tuned."""

    iterations: int
    batch_size: int
    learning_rate: float
    clip_gradient: float
    train_on_difficult: bool
    seed: int
    workers: int
    save_seconds: float


def learning_rate(plan: Plan, iteration: int) -> float:
    """Return the learning rate of an iteration, from 0: it rises linearly, then falls in steps."""
    warmup = min(WARMUP, plan.iterations // 10)
    rise = min(1.0, (iteration + 1) / (warmup + 1))
    falls = sum(iteration >= round(share * plan.iterations) for share in MILESTONES)
    return plan.learning_rate * rise * 0.1**falls


def build_optimiser(detector: nn.Module) -> torch.optim.SGD:
    """Build SGD; the weights and biases of batch norms are not decayed, as in detectron2."""
    norms = {
        parameter
        for module in detector.modules()
        if isinstance(module, _BatchNorm)
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in detector.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p not in norms], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p in norms], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM)


def fine_tune(
    detector: Detector,
    data: Detections,
    plan: Plan,
    *,
    device: torch.device,
    checkpoint: Path,
    settings: Record,
    report: Callable[[int, float], None],
) -> None:
    """Train a detector to the end, from its checkpoint if there is one, and settle its norms.

    Args:
        detector: on the device.
        data: to train on.
        plan: how.
        device: of the detector.
        checkpoint: file that is written now and then, on a signal, and at the end of training.
        settings: everything the numbers depend on; a checkpoint with others is refused.
        report: told the number of iterations done and the loss.
    """
    optimiser = build_optimiser(detector)
    done = _restore(checkpoint, settings, detector, optimiser) if checkpoint.exists() else 0
    batches = batches_of_indices(len(data), plan.batch_size, plan.seed, done, plan.iterations)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        detector.train()
        last_saved = time.monotonic()
        with watch_signals() as received:
            for iteration, batch in enumerate(feed(data, batches, device, plan.workers), done):
                loss = _step(detector, optimiser, batch, plan, iteration)
                report(iteration + 1, loss)
                is_due = time.monotonic() - last_saved >= plan.save_seconds
                if received or is_due or iteration + 1 == plan.iterations:
                    _save(checkpoint, settings, detector, optimiser, iteration + 1)
                    last_saved = time.monotonic()
                if received:
                    advice = "continue by giving the same command again"
                    raise Interrupted(checkpoint.parent, received[0], advice)
        settle_norms(detector, data, plan, device)


def _losses(detector: Detector, batch: Photographs, plan: Plan, iteration: int) -> Tensor:
    # The size of the images and the sampled regions come from torch's global generator: seeded by
    # the iteration, they are the same whether a run was stopped before or not.
    torch.manual_seed(derived(plan.seed, "detection", iteration))
    batch = flipped(batch, plan.seed, iteration)
    losses: dict[str, Tensor] = detector(batch.images, targets_of(batch, plan.train_on_difficult))
    return torch.stack(list(losses.values())).sum()


def _step(
    detector: Detector,
    optimiser: torch.optim.SGD,
    batch: Photographs,
    plan: Plan,
    iteration: int,
) -> float:
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(plan, iteration)
    loss = _losses(detector, batch, plan, iteration)
    value = loss.item()
    if not torch.isfinite(torch.tensor(value)):
        raise UserError(
            f"the loss is {value} at iteration {iteration + 1}: the detector has diverged; lower "
            f"the learning rate ({plan.learning_rate}, for batches of {plan.batch_size}), or bound "
            "the gradient"
        )
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    if plan.clip_gradient:
        torch.nn.utils.clip_grad_norm_(detector.parameters(), plan.clip_gradient)
    optimiser.step()
    return value


@torch.no_grad()
def settle_norms(detector: Detector, data: Detections, plan: Plan, device: torch.device) -> None:
    """Replace the running statistics of trained batch norms by averages over the last weights.

    A running average lags behind weights that move, and in small batches it is mostly noise.
    """
    norms = [
        module
        for module in detector.modules()
        if isinstance(module, _BatchNorm) and module not in set(detector.frozen_norms)
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
    detector.train()
    count = min(SETTLING, plan.iterations)
    batches = batches_of_indices(len(data), plan.batch_size, plan.seed, 0, count)
    for iteration, batch in enumerate(feed(data, batches, device, plan.workers)):
        _losses(detector, batch, plan, iteration)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@torch.no_grad()
def detect_all(
    detector: Detector,
    data: Detections,
    *,
    device: torch.device,
    workers: int,
    report: Callable[[int], None],
) -> list[Found]:
    """Return the detections in every image, in the pixels of its file; one image at a time."""
    detector.eval()
    found = []
    for batch in feed(data, [[index] for index in range(len(data))], device, workers):
        (output,) = detector(batch.images)
        labels = output["labels"].cpu() - 1
        found.append(Found(output["boxes"].cpu(), labels, output["scores"].cpu()))
        report(len(found))
    return found


def _save(
    path: Path,
    settings: Record,
    detector: Detector,
    optimiser: torch.optim.SGD,
    iteration: int,
) -> None:
    state = {
        "settings": settings,
        "detector": detector.state_dict(),
        "optimiser": optimiser.state_dict(),
        "iteration": iteration,
    }
    checkpoints.save(path, state)


def _restore(path: Path, settings: Record, detector: Detector, optimiser: torch.optim.SGD) -> int:
    saved = checkpoints.load(path)
    check_settings(saved.get("settings", {}), settings, path)
    checkpoints.load_strictly(detector, saved["detector"], str(path))
    optimiser.load_state_dict(saved["optimiser"])
    return int(saved["iteration"])


def check_settings(before: Record, now: Record, path: Path) -> None:
    """Refuse to go on from, or to take for finished, what was made with other settings."""
    changed = [
        f"{name} was {before.get(name)}, is {value}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if changed:
        raise UserError(
            f"{path} was made with other settings ({'; '.join(changed)}): give the same again, or "
            f"remove the folder {path.parent} to begin anew"
        )
