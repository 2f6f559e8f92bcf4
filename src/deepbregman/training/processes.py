"""The processes of a run, through Lightning Fabric."""

import atexit
import functools
import inspect
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from deepbregman.config import Config
from deepbregman.data.memory import count_cpus
from deepbregman.errors import ReportedElsewhere, UserError, explain_error
from deepbregman.launching import LAUNCHER, find_process, under_torchrun, when_launcher_ends
from deepbregman.method.gathering import gather_with_gradient
from deepbregman.terminal import count_words

from .devices import pick_device
from .fabric import (
    DDPStrategy,
    Fabric,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

STEP_TIMEOUT = timedelta(minutes=10)
"""How long a step waits for another process that is silent but still connected."""
HOST_TIMEOUT = timedelta(hours=12)
"""The same between steps, where process 0 may download data or evaluate meanwhile."""
LEAVE_SECONDS = 5.0
"""How long a process waits at its end for messages that other processes have not sent yet."""
T = TypeVar("T")


def launch(accelerator: str = "auto") -> Fabric:
    """Start a run's process, or join those that torchrun, srun or ``--devices`` started.

    Fabric does not set the precision: it would cast every input of the step to bfloat16, the random
    numbers of the views included.
    """
    kind = pick_device(accelerator).type
    here = find_process()
    if kind == "cuda" and here.local_processes > torch.cuda.device_count():
        raise UserError(
            f"{here.local_processes} processes on a machine with "
            f"{count_words(torch.cuda.device_count(), 'visible GPU')}: every process needs one; "
            "start fewer (--devices), let all tasks of srun see all GPUs of their "
            "node (--gres, not --gpus-per-task), or use --accelerator cpu"
        )
    if kind == "cuda":
        torch.backends.cudnn.benchmark = True
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # no tips
    _limit_threads(here.local_processes)
    if here.processes == 1:
        fabric = Fabric(accelerator=kind, devices=1, plugins=[LightningEnvironment()])
        fabric.launch()
        return fabric
    if LAUNCHER in os.environ:  # without its launcher, nothing would stop this process
        when_launcher_ends(functools.partial(os.kill, os.getpid(), signal.SIGTERM))
    # Buffers need not be sent at every step: synchronised normalisation keeps them equal, and
    # without it those of process 0 are saved. torch has renamed this option.
    options = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    new, old = "forward_sync_buffers", "broadcast_buffers"
    sync: dict[str, Any] = {new if new in options else old: False}
    fabric = Fabric(
        accelerator=kind,
        devices=here.local_processes,
        num_nodes=here.nodes,
        strategy=DDPStrategy(timeout=STEP_TIMEOUT, gradient_as_bucket_view=True, **sync),
        plugins=[
            TorchElasticEnvironment() if under_torchrun() else SLURMEnvironment(auto_requeue=False)
        ],
    )
    fabric.launch()
    _open_host_group()
    atexit.unregister(_leave_groups)
    atexit.register(_leave_groups)
    return fabric


def _limit_threads(local_processes: int) -> None:
    """Let a process compute on its share of the CPUs, unless the user has chosen.

    torch starts a thread for every CPU of the machine, also in each of several processes and in a
    container that may use a few of them.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), count_cpus(local_processes)))


def _leave_groups() -> None:
    """End the threads of the process groups before the interpreter shuts down.

    These threads free their buffers a moment after a message has arrived. A thread that does so
    during the shutdown aborts the process, and a complete run looks as if it had failed. After an
    error, the vote of another process may never come. Then the groups are left as they are, because
    destroying them would wait for that vote.
    """
    if not dist.is_initialized():
        return
    deadline = time.monotonic() + LEAVE_SECONDS
    while not all(work.is_completed() for work in Vote.under_way):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    _open_host_group.cache_clear()  # a thread ends when nothing refers to its group any more
    dist.destroy_process_group()


@functools.cache
def _open_host_group() -> dist.ProcessGroup:
    """Make the group for messages between hosts, without the GPUs; every process must call it."""
    group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def run_together(fabric: Fabric, work: Callable[[], T]) -> T:
    """Run a function in every process; if it fails in one, it fails in all.

    The first process that failed raises its error and the others :class:`ReportedElsewhere`, so
    that none waits for another forever. The function itself must not wait for other processes.
    """
    if fabric.world_size == 1:
        return work()
    mine: Exception | None = None
    try:
        result = work()
    except Exception as error:
        mine = error
    code = 0 if mine is None else (explain_error(mine) or ("", 1))[1]
    codes: list[Any] = [0] * fabric.world_size
    dist.all_gather_object(codes, code, group=_open_host_group())
    failed = [rank for rank, other in enumerate(codes) if other]
    if not failed:
        return result
    if mine is not None and failed[0] == fabric.global_rank:
        raise mine
    raise ReportedElsewhere(codes[failed[0]]) from mine


def run_in_first(fabric: Fabric, work: Callable[[], T]) -> T | None:
    """Run a function in process 0 alone; if it fails there, it fails in all. Others get None."""
    return run_together(fabric, lambda: work() if fabric.is_global_zero else None)


def ask_first(fabric: Fabric, work: Callable[[], T]) -> T:
    """Run a function in process 0 alone, and return its value in every process."""
    return broadcast(fabric, run_in_first(fabric, work))  # type: ignore[return-value]  # process 0's


def run_first_then_others(fabric: Fabric, work: Callable[[], T]) -> T:
    """Run a function in one process of each machine, then in the others: it may download a file."""
    done = run_together(fabric, lambda: [work()] if fabric.local_rank == 0 else [])
    return run_together(fabric, lambda: done[0] if done else work())


def broadcast(fabric: Fabric, value: T) -> T:
    """Return process 0's value in every process."""
    if fabric.world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_open_host_group())
    return values[0]


def gather_values(fabric: Fabric, value: T) -> list[T]:
    """Return the values of all processes, in every process."""
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(values, value, group=_open_host_group())
    return values


class Vote:
    """Makes all processes stop after the same step when a signal reaches any of them.

    All processes learn of a signal one step later, so that no step waits for the vote.
    """

    under_way: ClassVar[set[Any]] = set()

    def __init__(self, fabric: Fabric) -> None:
        self._alone = fabric.world_size == 1
        self._pending: tuple[Tensor, Any] | None = None
        self.outcome = 0
        """The signal that stops all processes, or 0."""

    def cast(self, received: list[int]) -> None:
        """Send the signals that this process has received; every process does after each step."""
        if self._alone:
            self.outcome = received[0] if received else 0
            return
        self.close()
        ballot = torch.tensor(received[:1] or [0])
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=_open_host_group(), async_op=True)
        self._pending = ballot, work
        self.under_way.add(work)

    def close(self) -> None:
        """Wait for the outcome of the last vote."""
        if self._pending is not None:
            ballot, work = self._pending
            work.wait()
            self.under_way.discard(work)
            self.outcome = self.outcome or int(ballot)
            self._pending = None


def start_compilers(config: Config, fabric: Fabric) -> None:
    """Start the processes that compile kernels, where a step will be compiled for a GPU.

    Each has to import torch, so they get ready while images are opened and the step is traced.
    """
    if not is_compiled(config, fabric) or fabric.device.type != "cuda":
        return
    with suppress(Exception):  # these names are torch's own; without them it starts them later
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
        AsyncCompile.wakeup()


def is_compiled(config: Config, fabric: Fabric) -> bool:
    """Whether steps are compiled: as configured, or by default on a GPU."""
    wanted = config.training.compile
    return wanted == "yes" or (wanted == "auto" and fabric.device.type == "cuda")


def compile_step(step: nn.Module, config: Config, fabric: Fabric) -> bool:
    """Compile a step in place where it is to be compiled; its first call compiles it.

    On one GPU its kernels are replayed as CUDA graphs, because the host launches the kernels of a
    small network more slowly than the GPU runs them. Returns whether the step is compiled.
    """
    is_wanted = is_compiled(config, fabric)
    if is_wanted:
        # A study trains many configurations in one process and compiles a graph for each. Beyond
        # the limit torch would silently take slow steps.
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 2048
        # Subnetworks and losses stay in float32 to be exact.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        graphs = fabric.device.type == "cuda" and fabric.world_size == 1
        # A batch has one size in a run. Torch would take a size that differs from the last run's
        # as unknown, and make slower kernels.
        step.compile(mode="reduce-overhead" if graphs else "default", dynamic=False)
    return is_wanted


def gather_views(mine: Tensor) -> Tensor:
    """Join (M, n, d) of every process to (M, N, d), with gradient."""
    every: Tensor = gather_with_gradient(mine)  # (W, M, n, d)
    return every.transpose(0, 1).flatten(1, 2)  # (M, W * n, d)


class SynchronisedNorm(_BatchNorm):
    """Batch normalisation by the mean and variance of the joint batch of all processes.

    Outputs, gradients and running statistics equal those of ordinary batch normalisation of the
    joint batch. Each process sends its count, mean and centred sum of squares: plain sums of
    squares would lose digits when the mean is subtracted. torch's own class needs GPUs.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (N, C, ...)."""
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(input)

    def _normalise(self, input: Tensor) -> Tensor:
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(input.ndim) if dim != 1]
        shape = (1, -1, *(1,) * (input.ndim - 2))
        own_mean = values.mean(others)  # (C,)
        own_squares = (values - own_mean.view(shape)).square().sum(others)  # (C,)
        count = values.new_full((1,), values.numel() / values.shape[1])
        own = torch.cat([count, own_mean, own_squares])
        every: Tensor = gather_with_gradient(own)  # (W, 1 + 2C)
        counts = every[:, :1].detach()  # (W, 1)
        means, squares = every[:, 1:].chunk(2, dim=1)  # (W, C) each
        total = counts.sum()
        mean = (counts * means).sum(dim=0) / total  # (C,)
        variance = (squares + counts * (means - mean).square()).sum(dim=0) / total  # (C,)
        self._remember(mean.detach(), variance.detach() * (total / (total - 1)))
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        result: Tensor = (values - mean.view(shape)) * scale.view(shape)
        if self.bias is not None:
            result = result + self.bias.view(shape)
        return result.to(input.dtype)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of a batch, as torch does."""
        if self.num_batches_tracked is None or self.running_mean is None:
            return
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked
        if self.momentum is not None:
            share = torch.full_like(share, self.momentum)
        self.running_mean.lerp_(mean, share.to(mean.dtype))
        self.running_var.lerp_(variance, share.to(mean.dtype))


def synchronise_norms(module: nn.Module, device: torch.device) -> None:
    """Replace every batch normalisation inside a module by a synchronised one.

    Parameters and their names stay. On a GPU the replacement is torch's own, which is faster.
    """
    for name, child in module.named_children():
        if not isinstance(child, _BatchNorm):
            synchronise_norms(child, device)
            continue
        if type(child) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            raise UserError(
                f"training.sync_norm is true, but the encoder's {type(child).__name__} does more "
                "than normalise and cannot be replaced: set training.sync_norm to false, choose "
                "another encoder, or train in one process"
            )
        if device.type == "cuda":
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm  # untyped
            setattr(module, name, convert(child))
            continue
        replacement = SynchronisedNorm(
            child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
        )
        for attribute in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(replacement, attribute, getattr(child, attribute))
        replacement.training = child.training
        setattr(module, name, replacement)
