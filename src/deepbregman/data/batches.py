"""What batches are: uint8 images on the training device, in exactly the order asked for."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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
    def skipped(self) -> frozenset[int]:
        """The indices of unreadable files that have been replaced by their neighbours so far."""

    @property
    def resident(self) -> bool:
        """Whether all of them are on the device."""

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Yield ``order``, int64 (M,) on the CPU, in consecutive batches; the last may be short."""

    def chain(self, orders: Iterable[Tensor], batch_size: int) -> Iterator[Batch]:
        """Yield several orders one after the other; streaming reads ahead across their ends."""


def check_order(order: Tensor, batch_size: int, num_images: int) -> None:
    """Refuse on the host what the device would only report by dying."""
    if batch_size < 1:
        raise ValueError(f"batch size {batch_size}: must be at least 1")
    if order.dtype != torch.int64 or order.ndim != 1 or order.device.type != "cpu":
        raise ValueError(f"order of type {order.dtype} on {order.device}: int64 (M,) on the CPU")
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < num_images:
        raise IndexError(f"order reaches outside 0..{num_images - 1}")


def split_order(order: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Cut into consecutive parts; nothing gives none, where torch gives an empty one."""
    return torch.split(order, batch_size) if len(order) else ()
