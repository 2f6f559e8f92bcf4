"""Batches of images that do not fit on the device: decoded or copied as they are needed."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from deepbregman.data.batches import Batch, check_order, split_order
from deepbregman.data.frames import UnreadableImage
from deepbregman.data.images import ArrayImages, FileImages, Images
from deepbregman.data.workers import BatchOrder, Decoded, FrameDataset, unchanged
from deepbregman.errors import UserError


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
    def skipped(self) -> frozenset[int]:
        """The indices of unreadable files that have been met and replaced so far."""
        return frozenset(self._broken)

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Yield ``order``, int64 (M,) on the CPU, in consecutive batches; the last may be short.

        One pass at a time: beginning another ends this one.
        """
        return self.chain([order], batch_size)

    def chain(self, orders: Iterable[Tensor], batch_size: int) -> Iterator[Batch]:
        """Yield several orders one after the other, without a pause in between.

        The workers go on to the next order while the last batches of this one are used. One pass at
        a time: beginning another ends this one.
        """
        parts = self._parts(orders, batch_size)
        if self._arrays is None:
            yield from self._iterate_files(parts)
            return
        for indices in parts:
            sizes = self._arrays.sizes
            yield Batch(
                self._take(self._arrays.pixels, indices),
                None if sizes is None else self._take(sizes, indices),
            )

    def _parts(self, orders: Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
        for order in orders:
            check_order(order, batch_size, self.num_images)
            yield from split_order(order, batch_size)

    def _take(self, values: Tensor, indices: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return values.index_select(0, indices).to(self._device)
        # Page-locked memory comes from a cache that waits for the copy before it is used again.
        staged = torch.empty((len(indices), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
        torch.index_select(values, 0, indices, out=staged)
        return staged.to(self._device, non_blocking=True)

    def _iterate_files(self, parts: Iterator[Tensor]) -> Iterator[Batch]:
        self._turn += 1
        turn = self._turn
        self._order.batches = (part.tolist() for part in parts)
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


def _let_go(loader: DataLoader[Decoded]) -> None:
    """Do nothing but give up the reference to the loader, whose workers end with it."""
