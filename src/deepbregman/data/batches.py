"""Batches of uint8 images on the training device, in exactly the order asked for.

Images that fit live on the device; others are streamed to it, decoded by worker processes.
"""

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from deepbregman.data.decoding import UnreadableImage, decode_to, silence_pillow
from deepbregman.data.frames import decode_frames, replace_unreadable
from deepbregman.data.images import ArrayImages, FileImages, ImagePlace, Images, StoredImages
from deepbregman.data.memory import count_cpus, find_free_memory
from deepbregman.data.slots import START_METHOD, FrameSlots
from deepbregman.errors import UserError, explain_no_workers
from deepbregman.launching import ANNOUNCEMENTS

_CHUNK = 2048  # files decoded at a time into the memory of the device
_RESIDENT_SHARE = 0.4
"""Images live on the device when they take at most this share of its free memory."""


class Batch(NamedTuple):
    """Some images on the device."""

    images: Tensor
    """uint8 (B, 3, H, W); streamed ones are channels-last in memory."""
    sizes: Tensor | None
    """int64 (B, 2): height and width of each in its frame; None: all fill it."""
    indices: Tensor | None = None
    """int64 (B,): their places in the dataset, where the method that trains asks for them."""


def cut_orders(orders: Iterable[Tensor], batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Bring each order to a device whole, and cut it there into consecutive parts."""
    for order in orders:
        if len(order) == 0:
            continue  # torch would make one empty part of it
        staged = _stage(order, device).to(device, non_blocking=True)
        yield from torch.split(staged, batch_size)


def _stage(values: Tensor, device: torch.device) -> Tensor:
    """Bring a few numbers to where a GPU can copy them from while the host goes on."""
    return values.pin_memory() if device.type == "cuda" else values


class ResidentBatches:
    """All images in the memory of the device; a batch is one indexing kernel and no wait.

    Files are decoded here. With ``skip_unreadable`` the nearest following readable image takes the
    place of one that cannot be decoded; positions, and so labels, stay where they are.
    """

    resident = True

    def __init__(
        self, images: Images, device: torch.device, *, skip_unreadable: bool = False
    ) -> None:
        self.skipped: frozenset[int] = frozenset()
        """The indices of unreadable files that others have replaced."""
        if isinstance(images, FileImages):
            images, self.skipped = _decode_to_device(images, device, skip_unreadable)
        self._pixels = images.pixels.to(device)
        self._sizes = None if images.sizes is None else images.sizes.to(device)
        self._device = device
        self.num_images = len(images)

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Yield ``order``, int64 (M,) on the CPU, in consecutive batches; the last may be short."""
        return self.chain([order], batch_size)

    def chain(self, orders: Iterable[Tensor], batch_size: int) -> Iterator[Batch]:
        """Yield several orders one after the other."""
        for indices in cut_orders(orders, batch_size, self._device):
            sizes = None if self._sizes is None else self._sizes.index_select(0, indices)
            yield Batch(self._pixels.index_select(0, indices), sizes)


def _decode_to_device(
    images: FileImages, device: torch.device, skip_unreadable: bool
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
    return ArrayImages(pixels, None if images.fills_frame else sizes), frozenset(skipped)


class _Decoded(NamedTuple):
    """A batch as a worker hands it over; errors travel as text, not as exceptions."""

    slot: int
    """Where its images are."""
    sizes: npt.NDArray[np.int64]  # (B, 2): height and width of each
    broken: list[tuple[int, str]]
    """Index and message of each unreadable file; another replaces it, unless all are."""


class _FrameDataset(Dataset[_Decoded]):
    """Files by lists of indices, decoded into a slot.

    Paths are kept in one array of bytes: a million Python objects would be copied into every
    worker, page by page, as their reference counts change.
    """

    def __init__(self, images: FileImages, frames: Tensor) -> None:
        self._stored = images.paths if isinstance(images.paths, StoredImages) else None
        if isinstance(images.paths, tuple):
            names = [os.fsencode(path) for path in images.paths]
            self._names = np.frombuffer(b"".join(names), dtype=np.uint8)
            self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self._frames = frames

    def __getitem__(self, batch: tuple[int, list[int]]) -> _Decoded:
        slot, indices = batch
        pixels = self._frames[slot, : len(indices)].numpy()
        sizes = np.zeros((len(indices), 2), dtype=np.int64)
        broken: dict[int, str] = {}
        with silence_pillow():
            for position, index in enumerate(indices):
                try:
                    sizes[position] = decode_to(self._place(index), pixels[position])
                except UnreadableImage as error:
                    broken[position] = str(error)
        if len(broken) < len(indices):
            replace_unreadable(pixels, sizes, list(broken))
        messages = [(indices[position], message) for position, message in broken.items()]
        return _Decoded(slot, sizes, messages)

    def _place(self, index: int) -> ImagePlace:
        if self._stored is not None:
            return self._stored[index]
        start = int(self._ends[index - 1]) if index else 0
        return Path(os.fsdecode(self._names[start : int(self._ends[index])].tobytes()))


def keep_batch(batch: Any) -> Any:
    """Collate nothing: what a worker made is a whole batch."""
    return batch


def ignore_job_signals(owner: int, worker: int) -> None:
    """Let a worker process go on when a signal asks all processes of a job to end.

    A terminal sends Ctrl-C to all of them, SLURM every signal. The training process still needs
    its workers then: it ends its step and saves. After that it ends them itself, by SIGTERM if
    need be. So SIGTERM counts if the process ``owner`` sent it; only Linux tells who did.
    """
    for name in ("SIGINT", *ANNOUNCEMENTS):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # later threads inherit this
        threading.Thread(target=_wait_for, args=(owner,), daemon=True, name="signal-watch").start()


def _wait_for(owner: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != owner:
        pass
    os._exit(0)


class StreamingBatches:
    """Images that stay on the host: files decoded by worker processes, or an array indexed.

    The batches depend on the order alone, not on the number of workers, and at most two batches
    a worker are waiting. The global random state is not touched.

    With ``skip_unreadable`` the nearest following readable image of the batch takes the place of
    one that cannot be decoded. With 0 workers this process decodes.
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
        self.num_images = len(images)
        self._images = images
        self._device = device
        self._fills_frame = isinstance(images, FileImages) and images.fills_frame
        self.num_workers = num_workers
        self._skip_unreadable = skip_unreadable
        self._broken: set[int] = set()
        self._turn = 0
        self._slots: FrameSlots | None = None
        self._end_workers: Callable[[], object] = lambda: None

    @property
    def skipped(self) -> frozenset[int]:
        """The indices of unreadable files that have been met and replaced so far."""
        return frozenset(self._broken)

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Yield ``order``, int64 (M,) on the CPU, in consecutive batches; the last may be short."""
        return self.chain([order], batch_size)

    def chain(self, orders: Iterable[Tensor], batch_size: int) -> Iterator[Batch]:
        """Yield several orders one after the other; workers read ahead across their ends.

        One pass at a time: beginning another ends this one. Workers start in the thread that calls
        this; the batches may be taken in another.
        """
        parts = cut_orders(orders, batch_size, torch.device("cpu"))
        if not isinstance(self._images, FileImages):
            return self._iterate_arrays(self._images, parts)
        self._turn += 1
        try:
            slots = self._open_slots(self._images, batch_size)
            slots.batches = lists = (part.tolist() for part in parts)
            decoded = iter(self._loader)
        except OSError as error:
            raise UserError(explain_no_workers(error)) from error
        return self._iterate_files(slots, decoded, lists, self._turn)

    def _open_slots(self, images: FileImages, batch_size: int) -> FrameSlots:
        """Return slots for batches of this size; where those are smaller, start workers anew."""
        if self._slots is not None and batch_size <= self._slots.batch_size:
            return self._slots
        self._end_workers()
        workers = self.num_workers
        self._slots = FrameSlots(2 * workers + 2, batch_size, images.side)
        self._loader: DataLoader[_Decoded] = DataLoader(
            _FrameDataset(images, self._slots.frames),
            batch_size=None,  # the sampler yields whole batches
            sampler=self._slots,
            num_workers=workers,
            collate_fn=keep_batch,
            prefetch_factor=2 if workers else None,
            persistent_workers=workers > 0,
            multiprocessing_context=START_METHOD if workers else None,
            worker_init_fn=partial(ignore_job_signals, os.getpid()),
            generator=torch.Generator(),  # the global generator stays untouched
        )
        # An outside reference keeps the loader out of reference cycles (a traceback makes one):
        # the garbage collector closes the pipes of the workers before it waits for them.
        self._end_workers = finalizer = weakref.finalize(self, _release, self._loader, self._slots)
        finalizer.atexit = False
        return self._slots

    def _iterate_arrays(self, images: ArrayImages, parts: Iterator[Tensor]) -> Iterator[Batch]:
        for indices in parts:
            yield Batch(
                self._take(images.pixels, indices),
                None if images.sizes is None else self._take(images.sizes, indices),
            )

    def _take(self, values: Tensor, indices: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return values.index_select(0, indices).to(self._device)
        # Page-locked memory comes from a cache that waits for the copy before it is used again.
        staged = torch.empty((len(indices), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
        torch.index_select(values, 0, indices, out=staged)
        return staged.to(self._device, non_blocking=True)

    def _iterate_files(
        self,
        slots: FrameSlots,
        decoded: Iterator[_Decoded],
        lists: Generator[list[int], None, None],
        turn: int,
    ) -> Iterator[Batch]:
        # The loader would keep the orders of a pass that is left early, and with them their owner.
        with contextlib.closing(lists):
            batches = self._transfer(slots, decoded)
            while turn == self._turn:  # else the batches are those of another pass
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch
        raise RuntimeError("another pass over these batches began before this ended")

    def _transfer(self, slots: FrameSlots, loader: Iterator[_Decoded]) -> Iterator[Batch]:
        """Bring batches to the device; on a GPU the next one travels while this one is used."""
        cuda: Any = torch.cuda  # its streams and events are typed in some releases only
        stream = cuda.Stream(self._device) if self._device.type == "cuda" else None
        ready: tuple[Batch, torch.cuda.Event] | None = None
        for decoded in loader:
            self._note_unreadable(decoded)
            if stream is None:
                yield self._to_device(slots, decoded)
                continue
            with cuda.stream(stream):
                batch = self._to_device(slots, decoded)
                event = cuda.Event()
                event.record(stream)
            if ready is not None:
                yield _hand_over(*ready)
            ready = batch, event
        if ready is not None:
            yield _hand_over(*ready)

    def _to_device(self, slots: FrameSlots, decoded: _Decoded) -> Batch:
        images = slots.send(decoded.slot, len(decoded.sizes), self._device).permute(0, 3, 1, 2)
        if self._fills_frame:
            return Batch(images, None)
        sizes = _stage(torch.from_numpy(decoded.sizes), self._device)
        return Batch(images, sizes.to(self._device, non_blocking=True))

    def _note_unreadable(self, decoded: _Decoded) -> None:
        replaced = len(decoded.broken) < len(decoded.sizes)
        if decoded.broken and not (self._skip_unreadable and replaced):
            raise UnreadableImage(decoded.broken[0][1])
        self._broken.update(index for index, _ in decoded.broken)


def _hand_over(batch: Batch, arrived: torch.cuda.Event) -> Batch:
    """Let the current stream use a batch that another one copied, without the host waiting."""
    current = torch.cuda.current_stream(batch.images.device)
    current.wait_event(arrived)
    for tensor in batch:
        if tensor is not None:
            tensor.record_stream(current)  # its memory must not be reused yet
    return batch


def _release(loader: DataLoader[_Decoded], slots: FrameSlots) -> None:
    """Drop the last reference to the loader, which ends its workers, and free the slots."""
    slots.release()


Batches = ResidentBatches | StreamingBatches


def open_batches(
    images: Images,
    device: torch.device,
    *,
    resident: Literal["auto", "yes", "no"] = "auto",
    num_workers: int = 2,
    local_processes: int = 1,
    skip_unreadable: bool = False,
) -> Batches:
    """Put images on the device when they fit, and stream them otherwise.

    Args:
        resident: ``auto`` is yes when they take at most 0.4 of the free memory of the device, or
            are an array in the memory of the CPU that is the device.
        num_workers: Processes that decode files when streaming; fewer where the CPUs are fewer.
        local_processes: Processes of the job that share the CPUs of this machine.
    """
    in_place = isinstance(images, ArrayImages) and device.type == images.pixels.device.type
    free = _find_free_memory(device)
    if resident == "yes" and not in_place and images.nbytes > free:
        raise UserError(
            f"data.resident 'yes': the images take {images.nbytes / 1e9:.1f} GB and {device} has "
            f"{free / 1e9:.1f} GB free; use 'auto' or 'no', or a smaller data.image_size"
        )
    fits = in_place or images.nbytes <= _RESIDENT_SHARE * free
    if resident == "yes" or (resident == "auto" and fits):
        return ResidentBatches(images, device, skip_unreadable=skip_unreadable)
    num_workers = min(num_workers, count_cpus(local_processes))
    return StreamingBatches(
        images, device, num_workers=num_workers, skip_unreadable=skip_unreadable
    )


def _find_free_memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else find_free_memory()
