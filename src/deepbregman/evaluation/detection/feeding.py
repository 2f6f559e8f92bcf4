"""Photographs with their objects, decoded by worker processes and brought to the device."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from deepbregman.data import UnreadableImage
from deepbregman.data.batches import keep_batch
from deepbregman.data.frames import decode_whole, quiet_pillow
from deepbregman.data.voc import Detections, Objects
from deepbregman.errors import UserError
from deepbregman.training.seeds import derived, epoch_order


class Photographs(NamedTuple):
    """A batch: each image (3, H, W) of its own size, float32 in [0, 1], with its objects."""

    images: list[Tensor]
    objects: list[Objects]


class _Files(Dataset[list[Tensor | str]]):
    """Files by lists of indices; an error travels as text, not as an exception."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __getitem__(self, indices: list[int]) -> list[Tensor | str]:
        with quiet_pillow():
            return [_decoded(self._paths[index]) for index in indices]


def _decoded(path: Path) -> Tensor | str:
    try:
        return torch.from_numpy(decode_whole(path))
    except UnreadableImage as error:
        return f"image {path} cannot be read ({error.__cause__}): restore it from the devkit"


def batches_of_indices(
    num_images: int, batch_size: int, seed: int, start: int, stop: int
) -> list[list[int]]:
    """Return the images of iterations ``start`` to ``stop``, a function of seed and iteration.

    Epochs follow one another without a gap, so that a batch may end one and begin the next, and
    may be larger than an epoch.
    """
    order = functools.lru_cache(maxsize=2)(
        lambda epoch: epoch_order(num_images, seed, epoch).tolist()
    )
    batches = []
    for iteration in range(start, stop):
        first = iteration * batch_size
        places = (divmod(place, num_images) for place in range(first, first + batch_size))
        batches.append([order(epoch)[offset] for epoch, offset in places])
    return batches


def feed(
    data: Detections, batches: Sequence[list[int]], device: torch.device, workers: int
) -> Iterator[Photographs]:
    """Yield batches of photographs, on the device.

    Args:
        data: to take them from.
        batches: the indices of each.
        device: where they go.
        workers: processes that decode; 0 decodes in this one.
    """
    loader: DataLoader[list[Tensor | str]] = DataLoader(
        _Files(data.paths),
        batch_size=None,  # the sampler yields whole batches
        sampler=batches,
        num_workers=workers,
        collate_fn=keep_batch,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else it would draw from the global one
    )
    for indices, decoded in zip(batches, loader, strict=True):
        images = []
        for image in decoded:
            if isinstance(image, str):
                raise UserError(image)
            images.append(image.to(device, non_blocking=True).float() / 255.0)
        objects = [Objects(*(part.to(device) for part in data.objects[i])) for i in indices]
        yield Photographs(images, objects)


def flipped(batch: Photographs, seed: int, iteration: int) -> Photographs:
    """Mirror each photograph with probability one half, a function of seed and iteration."""
    generator = torch.Generator().manual_seed(derived(seed, "detection flip", iteration))
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


def targets_of(batch: Photographs, train_on_difficult: bool) -> list[dict[str, Tensor]]:
    """Return what torchvision's detectors train on; its class 0 is the background."""
    targets = []
    for boxes, labels, difficult in batch.objects:
        kept = torch.ones_like(difficult) if train_on_difficult else ~difficult
        targets.append({"boxes": boxes[kept], "labels": labels[kept] + 1})
    return targets
