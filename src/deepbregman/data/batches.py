"""Batches of uint8 images on the training device, in exactly the order asked for."""

import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from deepbregman.data.frames import UnreadableImage, decode_into, replace_unreadable
from deepbregman.data.images import ArrayImages, FileImages, Images, Progress
from deepbregman.data.workers import BatchOrder, Decoded, FrameDataset, unchanged
from deepbregman.errors import UserError, nearest

_RESIDENT_SHARE = 0.4
"""Images live on the device when they take at most this share of its free memory."""
_CHUNK = 2048


class Batch(NamedTuple):
    """Some images on the device."""

    images: Tensor
    """uint8 (B, 3, H, W); streamed ones are channels-last in memory."""
    sizes: Tensor | None
    """int64 (B, 2): height and width of each in its frame; None: all fill it."""


class Batches(Protocol):
    """Images that can be gone through in any order."""

    @property
    def num_images(self) -> int:
        """How many images there are."""

    @property
    def num_skipped(self) -> int:
        """How many unreadable files have been replaced by their neighbours so far."""

    @property
    def resident(self) -> bool:
        """Whether all of them are on the device."""

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Yield ``order``, int64 (M,) on the CPU, in consecutive batches; the last may be short."""


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
        self.num_skipped = 0
        if isinstance(images, FileImages):
            images, self.num_skipped = _decode_all(images, device, skip_unreadable, progress)
        self._pixels = images.pixels.to(device)
        self._sizes = None if images.sizes is None else images.sizes.to(device)
        self._device = device
        self.num_images = len(images)

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Yield ``order``, int64 (M,) on the CPU, in consecutive batches; the last may be short."""
        _check_order(order, batch_size, self.num_images)
        for indices in _split(_to_device(order, self._device), batch_size):
            sizes = None if self._sizes is None else self._sizes.index_select(0, indices)
            yield Batch(self._pixels.index_select(0, indices), sizes)


class StreamingBatches:
    """Images that stay on the host: files decoded by worker processes, or an array indexed.

    The batches depend on the order alone, not on the number of workers, and at most two batches
    a worker are waiting. The global random state is not touched.

    Args:
        images: The images.
        device: Where the batches go.
        num_workers: Processes that decode files; 0 decodes in this one.
        skip_unreadable: Put the nearest following readable image of the batch in the place of one
            that cannot be decoded, instead of stopping.
    """

    resident = False

    def __init__(
        self,
        images: Images,
        device: torch.device,
        *,
        num_workers: int = 2,
        skip_unreadable: bool = False,
    ) -> None:
        if num_workers < 0:
            raise UserError(f"data.num_workers {num_workers}: must be 0 or more")
        self.num_images = len(images)
        self._arrays = images if isinstance(images, ArrayImages) else None
        self._device = device
        self._skip_unreadable = skip_unreadable
        self._broken: set[int] = set()
        self._turn = 0
        if isinstance(images, FileImages):
            self._order = BatchOrder()
            self._loader: DataLoader[Decoded] = DataLoader(
                FrameDataset(images),
                batch_size=None,  # the sampler yields whole batches
                sampler=self._order,
                num_workers=num_workers,
                collate_fn=unchanged,
                pin_memory=device.type == "cuda",
                prefetch_factor=2 if num_workers else None,
                persistent_workers=num_workers > 0,
                generator=torch.Generator(),  # else each pass would draw from the global one
            )
            # An outside reference keeps the loader out of reference cycles (a traceback makes
            # one): the garbage collector closes the pipes of the workers before it waits for them.
            weakref.finalize(self, _let_go, self._loader).atexit = False

    @property
    def num_skipped(self) -> int:
        """How many different unreadable files have been met and replaced so far."""
        return len(self._broken)

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Yield ``order``, int64 (M,) on the CPU, in consecutive batches; the last may be short.

        One pass at a time: beginning another ends this one.
        """
        _check_order(order, batch_size, self.num_images)
        if self._arrays is None:
            yield from self._iterate_files(order, batch_size)
            return
        for indices in _split(order, batch_size):
            sizes = self._arrays.sizes
            yield Batch(
                self._take(self._arrays.pixels, indices),
                None if sizes is None else self._take(sizes, indices),
            )

    def _take(self, values: Tensor, indices: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return values.index_select(0, indices).to(self._device)
        # Page-locked memory comes from a cache that waits for the copy before it is used again.
        staged = torch.empty((len(indices), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
        torch.index_select(values, 0, indices, out=staged)
        return staged.to(self._device, non_blocking=True)

    def _iterate_files(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        self._turn += 1
        turn = self._turn
        self._order.batches = [part.tolist() for part in _split(order, batch_size)]
        for batch in self._transferred(self._loader):
            yield batch
            if turn != self._turn:
                raise RuntimeError("another pass over these batches began before this one ended")

    def _transferred(self, loader: Iterable[Decoded]) -> Iterator[Batch]:
        """Bring batches to the device; on a GPU the next one travels while this one is used."""
        cuda: Any = torch.cuda  # its streams and events are typed in some releases only
        stream = cuda.Stream(self._device) if self._device.type == "cuda" else None
        ready: tuple[Batch, torch.cuda.Event] | None = None
        for decoded in loader:
            self._note_unreadable(decoded)
            if stream is None:
                yield self._to_device(decoded)
                continue
            with cuda.stream(stream):
                batch = self._to_device(decoded)
                event = cuda.Event()
                event.record(stream)
            if ready is not None:
                yield _handed_over(*ready)
            ready = batch, event
        if ready is not None:
            yield _handed_over(*ready)

    def _to_device(self, decoded: Decoded) -> Batch:
        sizes = decoded.sizes
        return Batch(
            decoded.pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2),
            None if sizes is None else sizes.to(self._device, non_blocking=True),
        )

    def _note_unreadable(self, decoded: Decoded) -> None:
        if decoded.broken and not (self._skip_unreadable and decoded.replaced):
            raise UnreadableImage(decoded.broken[0][1])
        self._broken.update(index for index, _ in decoded.broken)


def _handed_over(batch: Batch, arrived: torch.cuda.Event) -> Batch:
    """Let the current stream use a batch that another one copied, without the host waiting."""
    current = torch.cuda.current_stream(batch.images.device)
    current.wait_event(arrived)
    for tensor in batch:
        if tensor is not None:
            tensor.record_stream(current)  # or its memory could be given away while in use
    return batch


def open_batches(
    images: Images,
    device: torch.device,
    *,
    resident: str = "auto",
    num_workers: int = 2,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> Batches:
    """Put images on the device when they fit, and stream them otherwise.

    Args:
        images: The images.
        device: Where the batches are wanted.
        resident: ``yes``, ``no``, or ``auto``: yes when they take at most 0.4 of the free memory
            of the device, or are an array in the memory of the CPU that is the device.
        num_workers: Processes that decode files when streaming.
        skip_unreadable: Replace what cannot be decoded by its neighbour instead of stopping.
        progress: Called with the files decoded and the files in all, when resident.

    Raises:
        UserError: When ``resident`` is not one of the three, or is ``yes`` and they do not fit.
    """
    choices = ("auto", "yes", "no")
    if resident not in choices:
        raise UserError(
            f"data.resident {resident!r}: not one of {', '.join(choices)}"
            f"{nearest(resident, choices)}"
        )
    in_place = isinstance(images, ArrayImages) and device.type == images.pixels.device.type
    free = _free_memory(device)
    if resident == "yes" and not in_place and images.nbytes > free:
        raise UserError(
            f"data.resident 'yes': the images take {images.nbytes / 1e9:.1f} GB and {device} has "
            f"{free / 1e9:.1f} GB free; use 'auto' or 'no', or a smaller data.image_size"
        )
    fits = in_place or images.nbytes <= _RESIDENT_SHARE * free
    if resident == "yes" or (resident == "auto" and fits):
        return ResidentBatches(images, device, skip_unreadable=skip_unreadable, progress=progress)
    return StreamingBatches(
        images, device, num_workers=num_workers, skip_unreadable=skip_unreadable
    )


def _let_go(loader: DataLoader[Decoded]) -> None:
    """Do nothing but give up the reference to the loader, whose workers end with it."""


def _decode_all(
    images: FileImages, device: torch.device, skip_unreadable: bool, progress: Progress | None
) -> tuple[ArrayImages, int]:
    """Decode files piece by piece straight into the memory of the device."""
    total, num_skipped = len(images), 0
    pixels = torch.empty((total, 3, images.side, images.side), dtype=torch.uint8, device=device)
    sizes = torch.empty((total, 2), dtype=torch.int64)
    for start in range(0, total, _CHUNK):
        paths = images.paths[start : start + _CHUNK]
        stop = start + len(paths)
        frames = np.zeros((len(paths), images.side, images.side, 3), dtype=np.uint8)
        results = decode_into(paths, frames)
        errors = [result for result in results if isinstance(result, UnreadableImage)]
        if errors and not (skip_unreadable and len(errors) < len(paths)):
            raise errors[0]
        fitted = np.array([(0, 0) if isinstance(r, UnreadableImage) else r for r in results])
        broken = [i for i, result in enumerate(results) if isinstance(result, UnreadableImage)]
        replace_unreadable(frames, fitted, broken)
        num_skipped += len(broken)
        pixels[start:stop].copy_(torch.from_numpy(frames).permute(0, 3, 1, 2))
        sizes[start:stop] = torch.from_numpy(fitted)
        if progress is not None:
            progress(stop, total)
    return ArrayImages(pixels, None if images.fills_frame else sizes), num_skipped


def _check_order(order: Tensor, batch_size: int, num_images: int) -> None:
    """Refuse on the host what the device would only report by dying."""
    if batch_size < 1:
        raise ValueError(f"batch size {batch_size}: must be at least 1")
    if order.dtype != torch.int64 or order.ndim != 1 or order.device.type != "cpu":
        raise ValueError(f"order of type {order.dtype} on {order.device}: int64 (M,) on the CPU")
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < num_images:
        raise IndexError(f"order reaches outside 0..{num_images - 1}")


def _split(order: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Cut into consecutive parts; nothing gives none, where torch gives an empty one."""
    return torch.split(order, batch_size) if len(order) else ()


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _free_memory(device: torch.device) -> int:
    """Return the free bytes of the device; for a CPU those that Linux could make free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    memory = Path("/proc/meminfo")
    if memory.is_file():
        for line in memory.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
