"""Tensors of all processes together, with gradient: what makes a loss that of the joint batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_last_rows = 0  # rows that all processes gathered


class _Gather(torch.autograd.Function):
    """Stacks a tensor of every process; what flows back is summed over the processes."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        every = mine.new_empty((dist.get_world_size(), *mine.shape))
        dist.all_gather(list(every.unbind()), mine.contiguous())
        return every

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed[dist.get_rank()]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is untyped
def gather_with_gradient(mine: Tensor) -> Tensor:
    """Stack a tensor of every process to (W, ...), with gradient.

    Every process that computes the same loss of what it gathered sends its gradient back, so that
    W times the gradient arrives; DDP's mean over the W processes makes it the joint batch's.
    """
    every: Tensor = _Gather.apply(mine)
    return every


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is untyped
def _check_rows(mine: Tensor) -> None:
    """Refuse another number of rows than the other processes have: they would wait for ever.

    Every process sends its number each time. A process reads those of the others only when its own
    has changed, so that the host does not wait for the device in each step. All had the same
    number last time: if two differ now, one of them has changed, and notices.
    """
    global _last_rows
    rows = torch.full((1,), len(mine), device=mine.device)
    every = rows.new_empty(dist.get_world_size(), 1)
    dist.all_gather(list(every.unbind()), rows)
    if len(mine) == _last_rows:
        return
    numbers = every.flatten().tolist()
    if len(set(numbers)) > 1:
        raise ValueError(
            f"the processes gather {', '.join(map(str, numbers))} rows: each must have the "
            "same number; leave out the last, short batch (drop_last=True)"
        )
    _last_rows = len(mine)


def gather(mine: Tensor) -> Tensor:
    """Join the rows of all processes, with gradient: give it to a loss as ``gather=``.

    The loss is then that of the joint batch, in every process. Use it with
    ``DistributedDataParallel``, whose mean over the processes makes the gradients those of the
    joint batch; a loop of your own that sums gradients must divide them by the number of processes.
    In one process, or without ``torch.distributed``, nothing changes.

    Args:
        mine: (n, ...), with the same n in every process: drop the last, short batch.

    Returns:
        (N, ...), the rows of process 0 first.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return mine
    _check_rows(mine)
    joined: Tensor = gather_with_gradient(mine).flatten(0, 1)
    return joined
