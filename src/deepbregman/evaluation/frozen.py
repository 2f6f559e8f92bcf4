"""Pass images through frozen networks, on one device or on several."""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import Config
from deepbregman.data import Batch, Batches, Images, Progress
from deepbregman.data.opening import batch_images
from deepbregman.method.networks import Model
from deepbregman.terminal import ignore_progress

BatchOutputs = tuple[Tensor | None, ...]
"""The outputs for a batch: the same number of tensors for every batch, on the batch's device."""
Work = Callable[[Model, Batch, int], BatchOutputs]
"""Takes the networks on the batch's device, the batch, and its number among all, from 0."""


@contextmanager
def keep_frozen(module: nn.Module) -> Iterator[None]:
    """Run a block with a module in evaluation mode, without gradient, and assert that it stays so.

    Parameters and buffers (running statistics of batch normalisation among them) are compared
    afterwards; a difference is an error, since every number measured in the block would be wrong.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    try:
        with torch.no_grad():
            yield
        training = [name for name, part in module.named_modules() if part.training]
        after = module.state_dict()
        changed = [
            name for name in {**before, **after} if not _are_same(before.get(name), after.get(name))
        ]
        if training or changed:
            raise RuntimeError(
                f"a frozen network was touched: in training mode {training}, changed {changed}"
            )
    finally:
        for part, mode in modes.items():
            part.training = mode


def _are_same(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether two tensors are equal to the bit, NaN being equal to itself."""
    if before is None or after is None or before.shape != after.shape:
        return False
    return before.dtype == after.dtype and torch.allclose(before, after, 0, 0, equal_nan=True)


class DeviceShare(NamedTuple):
    """The part of the images that one of several devices works on."""

    batches: Batches
    device: torch.device
    numbers: range
    """Numbers of its batches, among those of all devices."""


class SharedBatches:
    """Images that several devices share: they take turns, batch after batch.

    A batch has the images that it would have on a single device, so that devices of one kind
    compute the same numbers together as one of them alone.
    """

    def __init__(
        self, images: Images, config: Config, devices: Sequence[torch.device], batch_size: int
    ) -> None:
        self.num_images, self.batch_size = len(images), batch_size
        self.num_batches = math.ceil(len(images) / batch_size)
        everything = torch.split(torch.arange(len(images)), batch_size)
        used = devices[: max(1, self.num_batches)]
        self.shares = []
        for place, device in enumerate(used):
            numbers = range(place, self.num_batches, len(used))
            rows = [everything[number] for number in numbers]
            part = images.select(torch.cat(rows)) if len(used) > 1 else images
            batches = batch_images(part, config, device, sharing=len(used))
            self.shares.append(DeviceShare(batches, device, numbers))


def map_batches(
    model: Model,
    batches: Batches | SharedBatches,
    batch_size: int,
    work: Work,
    progress: Progress = ignore_progress,
) -> list[BatchOutputs]:
    """Apply a function to the frozen networks and every batch; return the outputs in order.

    The work must not change the networks, of which every device has a copy.
    """
    if isinstance(batches, SharedBatches):
        return _map_shares(model, batches, work, progress)
    found = []
    done = 0
    with keep_frozen(model):
        for number, batch in enumerate(
            batches.iterate(torch.arange(batches.num_images), batch_size)
        ):
            found.append(work(model, batch, number))
            done += len(batch.images)
            progress(done, batches.num_images)
    return found


def _map_shares(
    model: Model, batches: SharedBatches, work: Work, progress: Progress
) -> list[BatchOutputs]:
    """Run a thread for each device.

    The first error of a thread stops the others, as Ctrl-C does, each after its batch.
    """
    shares, device = batches.shares, batches.shares[0].device
    networks = [model, *(copy.deepcopy(model).to(share.device) for share in shares[1:])]
    # All loaders fork their workers here: no other thread of ours may hold a lock meanwhile.
    feeds = [
        share.batches.iterate(torch.arange(share.batches.num_images), batches.batch_size)
        for share in shares
    ]
    found: dict[int, BatchOutputs] = {}
    done, lock, stop = 0, threading.Lock(), threading.Event()

    def serve(share: DeviceShare, network: Model, feed: Iterator[Batch]) -> None:
        nonlocal done
        # Page-locked memory is that of the thread's current GPU.
        on_gpu = share.device.type == "cuda"
        current = torch.cuda.device(share.device) if on_gpu else nullcontext()
        with current, keep_frozen(network):
            for number, batch in zip(share.numbers, feed, strict=True):
                if stop.is_set():
                    return
                outputs = work(network, batch, number)
                there = [None if x is None else x.to(device, non_blocking=True) for x in outputs]
                with lock:
                    found[number] = tuple(there)
                    done += len(batch.images)
                    progress(done, batches.num_images)

    with ThreadPoolExecutor(len(shares), thread_name_prefix="features-") as pool:
        tasks = [pool.submit(serve, *each) for each in zip(shares, networks, feeds, strict=True)]
        try:
            for task in as_completed(tasks):
                task.result()
        finally:
            stop.set()
    return [found[number] for number in range(batches.num_batches)]
