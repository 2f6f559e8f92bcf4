"""Batches of images that all live on the device."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from deepbregman.data.batches import Batch, check_order, split_order
from deepbregman.data.frames import decode_frames
from deepbregman.data.images import ArrayImages, FileImages, Images, Progress

_CHUNK = 2048


class ResidentBatches:
    """All images in the memory of the device; a batch is one indexing kernel and no wait.

    Args:
        images: The images; files are decoded here, with a pool of threads.
        device: Where they are to live.
        skip_unreadable: Put the nearest following readable image in the place of one that cannot
            be decoded, instead of stopping; positions, and so labels, stay where they are.
        progress: Called with the files decoded and the files in all.
    """

    resident = True

    def __init__(
        self,
        images: Images,
        device: torch.device,
        *,
        skip_unreadable: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.skipped: frozenset[int] = frozenset()
        if isinstance(images, FileImages):
            images, self.skipped = _decode_all(images, device, skip_unreadable, progress)
        self._pixels = images.pixels.to(device)
        self._sizes = None if images.sizes is None else images.sizes.to(device)
        self._device = device
        self.num_images = len(images)

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Yield ``order``, int64 (M,) on the CPU, in consecutive batches; the last may be short."""
        check_order(order, batch_size, self.num_images)
        for indices in split_order(_to_device(order, self._device), batch_size):
            sizes = None if self._sizes is None else self._sizes.index_select(0, indices)
            yield Batch(self._pixels.index_select(0, indices), sizes)

    def chain(self, orders: Iterable[Tensor], batch_size: int) -> Iterator[Batch]:
        """Yield several orders one after the other."""
        for order in orders:
            yield from self.iterate(order, batch_size)


def _decode_all(
    images: FileImages, device: torch.device, skip_unreadable: bool, progress: Progress | None
) -> tuple[ArrayImages, frozenset[int]]:
    """Decode files piece by piece straight into the memory of the device."""
    total = len(images)
    skipped: set[int] = set()
    pixels = torch.empty((total, 3, images.side, images.side), dtype=torch.uint8, device=device)
    sizes = torch.empty((total, 2), dtype=torch.int64)
    for start in range(0, total, _CHUNK):
        paths = images.paths[start : start + _CHUNK]
        stop = start + len(paths)
        frames, fitted, broken = decode_frames(paths, images.side, skip_unreadable)
        skipped.update(start + position for position in broken)
        pixels[start:stop].copy_(torch.from_numpy(frames).permute(0, 3, 1, 2))
        sizes[start:stop] = torch.from_numpy(fitted)
        if progress is not None:
            progress(stop, total)
    return ArrayImages(pixels, None if images.fills_frame else sizes), frozenset(skipped)


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
