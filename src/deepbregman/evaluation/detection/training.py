"""Fine-tuning a detector: photographs with their objects, and SGD that can stop at any step."""

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset

from deepbregman.data import UnreadableImage
from deepbregman.data.batches import ignore_job_signals, keep_batch
from deepbregman.data.decoding import decode_whole, silence_pillow
from deepbregman.data.memory import count_cpus
from deepbregman.data.slots import START_METHOD
from deepbregman.data.voc import Detections, Objects
from deepbregman.errors import Diverged, UserError
from deepbregman.evaluation.options import Detect
from deepbregman.runs import Record
from deepbregman.training import checkpoints
from deepbregman.training.faults import Interrupted, watch_signals
from deepbregman.training.randomness import derive_seed, epoch_order

from .detectors import Detector, PredictedBoxes

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
WARMUP = 100
"""Iterations over which the learning rate rises, or a tenth of them all, if that is less."""
MILESTONES = (3 / 4, 11 / 12)
"""Shares of the iterations after which the learning rate is divided by 10."""
SETTLING = 200
"""Batches over which the statistics of batch norms are averaged at the end, as MoCo does."""


class Photographs(NamedTuple):
    """A batch: each image (3, H, W) of its own size, float32 in [0, 1], with its objects."""

    images: list[Tensor]
    objects: list[Objects]


class _Files(Dataset[list[Tensor | str]]):
    """Files by lists of indices; an error travels as text, not as an exception."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __getitem__(self, indices: list[int]) -> list[Tensor | str]:
        with silence_pillow():
            return [_decode(self._paths[index]) for index in indices]


def _decode(path: Path) -> Tensor | str:
    try:
        return torch.from_numpy(decode_whole(path))
    except UnreadableImage as error:
        return f"image {path} cannot be read ({error.__cause__}): restore it from the devkit"


def order_batches(
    num_images: int, batch_size: int, seed: int, start: int, stop: int
) -> list[list[int]]:
    """Return the images of iterations ``start`` to ``stop``, a function of seed and iteration.

    Epochs follow one another without a gap, so that a batch may end one and begin the next, and
    may be larger than an epoch.
    """
    first, skipped = divmod(start * batch_size, num_images)
    last = math.ceil(stop * batch_size / num_images)
    orders = [epoch_order(num_images, seed, epoch) for epoch in range(first, last)]
    if not orders:
        return []
    wanted = torch.cat(orders)[skipped:][: (stop - start) * batch_size]
    batches: list[list[int]] = wanted.view(-1, batch_size).tolist()
    return batches


def load_batches(
    data: Detections, batches: Sequence[list[int]], device: torch.device, workers: int
) -> Iterator[Photographs]:
    """Yield batches of photographs, by their indices, on the device; 0 workers decode here."""
    workers = min(workers, count_cpus())
    loader: DataLoader[list[Tensor | str]] = DataLoader(
        _Files(data.paths),
        batch_size=None,  # the sampler yields whole batches
        sampler=batches,
        num_workers=workers,
        collate_fn=keep_batch,
        pin_memory=device.type == "cuda",
        multiprocessing_context=START_METHOD if workers else None,
        worker_init_fn=functools.partial(ignore_job_signals, os.getpid()),
        generator=torch.Generator(),  # the global generator stays untouched
    )
    for indices, decoded in zip(batches, loader, strict=True):
        images = []
        for image in decoded:
            if isinstance(image, str):
                raise UserError(image)
            images.append(image.to(device, non_blocking=True).float() / 255.0)
        objects = [Objects(*(part.to(device) for part in data.objects[i])) for i in indices]
        yield Photographs(images, objects)


def flip_batch(batch: Photographs, seed: int, iteration: int) -> Photographs:
    """Mirror each photograph with probability one half, a function of seed and iteration."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "detection flip", iteration))
    chosen = (torch.rand(len(batch.images), generator=generator) < 0.5).tolist()
    images, objects = list(batch.images), list(batch.objects)
    for position in (position for position, mirror in enumerate(chosen) if mirror):
        image, (boxes, labels, difficult) = images[position], objects[position]
        left, top, right, bottom = boxes.unbind(dim=1)
        width = image.shape[2]
        mirrored = torch.stack([width - right, top, width - left, bottom], dim=1)
        images[position] = image.flip(2)
        objects[position] = Objects(mirrored, labels, difficult)
    return Photographs(images, objects)


def make_targets(batch: Photographs) -> list[dict[str, Tensor]]:
    """Return what torchvision's detectors train on; its class 0 is the background.

    Difficult objects are among them, as in detectron2; tests never count these.
    """
    return [{"boxes": boxes, "labels": labels + 1} for boxes, labels, _ in batch.objects]


def learning_rate(options: Detect, iteration: int) -> float:
    """Return the learning rate of an iteration, from 0: it rises linearly, then falls in steps."""
    warmup = min(WARMUP, options.iterations // 10)
    rise = min(1.0, (iteration + 1) / (warmup + 1))
    falls = sum(iteration >= round(share * options.iterations) for share in MILESTONES)
    return options.learning_rate * rise * 0.1**falls


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
    options: Detect,
    seed: int,
    *,
    device: torch.device,
    checkpoint: Path,
    settings: Record,
    report: Callable[[int, float], None],
) -> None:
    """Train a detector to the end, from its checkpoint if it has one; then average its norms.

    Args:
        seed: of the order, the flips and what torchvision draws.
        checkpoint: file that is written now and then, on a signal, and at the end of training.
        settings: everything the numbers depend on; a checkpoint with others is refused.
    """
    optimiser, done = build_optimiser(detector), 0
    if checkpoint.exists():
        saved = checkpoints.load(checkpoint)
        check_settings(saved.get("settings", {}), settings, checkpoint)
        checkpoints.load_strictly(detector, saved["detector"], str(checkpoint))
        optimiser.load_state_dict(saved["optimiser"])
        done = int(saved["iteration"])
    batches = order_batches(len(data), options.batch_size, seed, done, options.iterations)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        detector.train()
        last_saved = time.monotonic()
        with watch_signals() as received:
            for iteration, batch in enumerate(
                load_batches(data, batches, device, options.workers), done
            ):
                for group in optimiser.param_groups:
                    group["lr"] = learning_rate(options, iteration)
                loss = _compute_loss(detector, batch, seed, iteration)
                value = loss.item()  # once: after the step the host would wait for all of it
                if not math.isfinite(value):
                    raise Diverged(
                        f"the loss is {value} at iteration {iteration + 1}: the detector has "
                        f"diverged; lower the learning rate ({options.learning_rate}, for batches "
                        f"of {options.batch_size}), or bound the gradient"
                    )
                optimiser.zero_grad()
                torch.autograd.backward(loss)
                if options.clip_gradient:
                    nn.utils.clip_grad_norm_(detector.parameters(), options.clip_gradient)
                optimiser.step()
                report(iteration + 1, value)
                is_due = time.monotonic() - last_saved >= options.save_seconds
                if received or is_due or iteration + 1 == options.iterations:
                    networks = {"detector": detector.state_dict(), "settings": settings}
                    progress = {"optimiser": optimiser.state_dict(), "iteration": iteration + 1}
                    checkpoints.save(checkpoint, networks | progress)
                    last_saved = time.monotonic()
                if received:
                    raise Interrupted(received[0], "the same command continues it")
        settle_norms(detector, data, options, seed, device)


def _compute_loss(detector: Detector, batch: Photographs, seed: int, iteration: int) -> Tensor:
    # The size of the images and the sampled regions come from torch's global generator: seeded by
    # the iteration, they are the same whether a run was stopped before or not.
    torch.manual_seed(derive_seed(seed, "detection", iteration))
    batch = flip_batch(batch, seed, iteration)
    losses: dict[str, Tensor] = detector(batch.images, make_targets(batch))
    return torch.stack(list(losses.values())).sum()


@torch.no_grad()
def settle_norms(
    detector: Detector, data: Detections, options: Detect, seed: int, device: torch.device
) -> None:
    """Replace the running statistics of trained batch norms by averages over the last weights.

    A running average lags behind weights that move, and in small batches it is mostly noise.
    """
    norms = [
        module
        for module in detector.modules()
        if isinstance(module, _BatchNorm) and module not in set(detector.frozen_norms)
    ]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
    detector.train()
    count = min(SETTLING, options.iterations)
    batches = order_batches(len(data), options.batch_size, seed, 0, count)
    for iteration, batch in enumerate(load_batches(data, batches, device, options.workers)):
        _compute_loss(detector, batch, seed, iteration)


@torch.no_grad()
def detect_all(
    detector: Detector,
    data: Detections,
    *,
    device: torch.device,
    workers: int,
    report: Callable[[int], None],
) -> list[PredictedBoxes]:
    """Return the detections in every image, in the pixels of its file; one image at a time."""
    detector.eval()
    found = []
    for batch in load_batches(data, [[index] for index in range(len(data))], device, workers):
        (output,) = detector(batch.images)
        labels = output["labels"].cpu() - 1
        found.append(PredictedBoxes(output["boxes"].cpu(), labels, output["scores"].cpu()))
        report(len(found))
    return found


def check_settings(before: Record, now: Record, path: Path) -> None:
    """Refuse a checkpoint or a result that was made with other settings."""
    changed = [
        f"{name} was {before.get(name)}, is {value}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if changed:
        raise UserError(
            f"{path} was made with other settings ({'; '.join(changed)}): give the same again, or "
            f"remove the folder {path.parent} to start again"
        )
