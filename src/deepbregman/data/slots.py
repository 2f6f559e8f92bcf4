"""Memory that worker processes decode batches into, and that a device copies them from."""

import contextlib
import math
import mmap
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

START_METHOD = "fork" if sys.platform == "linux" else "spawn"
"""How the worker processes must be started, so that they see the memory."""


class FrameSlots(Sampler[tuple[int, list[int]]]):
    """Frames for a few batches, in memory that all worker processes share; used in turns.

    Fresh memory for every batch would cost the workers page faults, and one more copy to memory
    that a GPU can read while the host goes on. As a sampler this yields the batches of the coming
    pass, each with the slot to decode it into.

    Args:
        num_slots: One more than can be in use at a time, so that none has to wait for a copy.
    """

    def __init__(self, num_slots: int, batch_size: int, side: int) -> None:
        self.batch_size = batch_size
        self.frames = _share(num_slots, (batch_size, side, side, 3))
        """uint8 (slots, B, side, side, 3), as decoders write it."""
        self.batches: Iterable[list[int]] = ()
        """The indices of the images of each batch of the coming pass."""
        self._free: deque[int] = deque()
        self._copies: dict[int, torch.cuda.Event] = {}
        self._locked: dict[int, bool] = {}

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        # The loader asks for the first batch when all workers have ended the pass before.
        self._free = deque(range(len(self.frames)))
        for indices in self.batches:
            slot = self._free.popleft()
            if slot in self._copies:
                self._copies.pop(slot).synchronize()  # of an earlier step: it has ended by now
            yield slot, indices

    def send(self, slot: int, count: int, device: torch.device) -> Tensor:
        """Copy the first images of a slot to a device, uint8 (n, side, side, 3); free the slot.

        A GPU copies in its current stream, while the host goes on.
        """
        frames, on_gpu = self.frames[slot, :count], device.type == "cuda"
        if on_gpu:
            self._lock(slot, device)
        images = frames.to(device, non_blocking=on_gpu, copy=True)
        if on_gpu:
            self._copies[slot] = torch.cuda.current_stream(device).record_event()
        self._free.append(slot)
        return images

    def _lock(self, slot: int, device: torch.device) -> None:
        """Keep the system from moving a slot; where it refuses, the host waits for each copy."""
        if slot not in self._locked:
            frames = self.frames[slot]
            code = _cudart().cudaHostRegister(frames.data_ptr(), frames.nbytes, 0)
            self._locked[slot] = int(code) == 0
            if not self._locked[slot]:
                # CUDA keeps the refusal, and torch would raise it at the next kernel, whatever that
                # is. So a kernel of our own takes it.
                with contextlib.suppress(RuntimeError):
                    _launch_kernel(device)

    def release(self) -> None:
        """Give up what the GPU knows of this memory, before the memory goes."""
        for copy in self._copies.values():
            copy.synchronize()
        for slot, locked in self._locked.items():
            if locked:
                _cudart().cudaHostUnregister(self.frames[slot].data_ptr())
        self._copies.clear()
        self._locked.clear()


def _share(num_slots: int, shape: tuple[int, ...]) -> Tensor:
    """Make a uint8 tensor (slots, ...) that worker processes see and write to.

    Each slot begins a page, so that it can be locked alone. What a forked process inherits needs no
    room in /dev/shm, which is small in many containers, and takes memory only as far as it is
    written to.
    """
    used = math.prod(shape)
    pages = num_slots, -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
    if START_METHOD == "fork":
        memory = torch.frombuffer(mmap.mmap(-1, math.prod(pages)), dtype=torch.uint8).view(pages)
    else:
        shared: Any = torch.empty(pages, dtype=torch.uint8)  # its method is typed in no release
        shared.share_memory_()
        memory = torch.as_tensor(shared)
    return memory[:, :used].view(num_slots, *shape)


def _cudart() -> Any:
    cuda: Any = torch.cuda  # typed in some releases only
    return cuda.cudart()


def _launch_kernel(device: torch.device) -> None:
    torch.zeros(1, device=device).add_(1)
