"""Devices and processes, through Lightning Fabric."""

import atexit
import functools
import inspect
import logging
import os
import platform
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from deepbregman.config import Config
from deepbregman.errors import ReportedElsewhere, UserError, explain_error
from deepbregman.launching import LAUNCHER, current_process, under_torchrun, when_launcher_ends
from deepbregman.method.gathering import gather_with_gradient

STEP_TIMEOUT = timedelta(minutes=10)
"""How long a step may wait for another process that neither answers nor closes its connection."""
HOST_TIMEOUT = timedelta(hours=12)
"""The same of what processes agree on between steps, while the first may download or evaluate."""
PARTING = 5.0
"""Seconds that a process waits, at its end, for what others have not said yet."""
T = TypeVar("T")


def pick_device(accelerator: str = "auto") -> torch.device:
    """Return the device for work of one process; ``auto`` is a CUDA device if there is one."""
    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if accelerator == "auto":
        return torch.device("cuda" if has["cuda"] else "cpu")
    if accelerator not in has:
        raise UserError(f"accelerator {accelerator!r} is not one of auto, {', '.join(has)}")
    if not has[accelerator]:
        name = accelerator.upper()
        raise UserError(
            f"accelerator {accelerator!r}: this machine has no {name} device; use auto or cpu"
        )
    return torch.device(accelerator)


def launch(accelerator: str = "auto") -> Fabric:
    """Start a run's process, or join those that torchrun, srun or ``--devices`` started.

    Precision is not Fabric's business here: it would cast every input of the step, the views'
    random numbers among them, to bfloat16.

    Args:
        accelerator: ``auto``, ``cpu``, ``cuda`` or ``mps``.
    """
    kind = pick_device(accelerator).type
    here = current_process()
    if kind == "cuda" and here.local_processes > torch.cuda.device_count():
        raise UserError(
            f"{here.local_processes} processes on a machine with {torch.cuda.device_count()} "
            "visible GPUs: every process needs one; start fewer (--devices), or use "
            "--accelerator cpu"
        )
    if kind == "mps" and here.processes > 1:
        raise UserError(
            "accelerator 'mps': such a machine trains in one process; leave out --devices"
        )
    if kind == "cuda":
        torch.backends.cudnn.benchmark = True
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # ours says what it needs to
    if here.processes == 1:
        fabric = Fabric(accelerator=kind, devices=1, plugins=[LightningEnvironment()])
        fabric.launch()
        return fabric
    if LAUNCHER in os.environ:  # then nobody is left to stop this process but itself
        when_launcher_ends(functools.partial(os.kill, os.getpid(), signal.SIGTERM))
    fabric = Fabric(
        accelerator=kind,
        devices=here.local_processes,
        num_nodes=here.nodes,
        strategy=_ddp(),
        plugins=[
            TorchElasticEnvironment() if under_torchrun() else SLURMEnvironment(auto_requeue=False)
        ],
    )
    fabric.launch()
    _host_group()
    atexit.unregister(_part)
    atexit.register(_part)
    return fabric


def _part() -> None:
    """Let the threads of the groups finish and go, while there is an interpreter.

    They free what they sent and received a moment after whoever waited for it goes on. One that
    does so while the interpreter is taken down aborts the process, and a run that is complete looks
    as if it had failed. Not after an error that left another process's vote out: to part would be
    to wait for it, for as long as one may wait between steps.
    """
    if not dist.is_initialized():
        return
    deadline = time.monotonic() + PARTING
    while not all(work.is_completed() for work in Vote.under_way):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    _host_group.cache_clear()  # a thread is joined when nobody holds its group any more
    dist.destroy_process_group()


def _ddp() -> DDPStrategy:
    # Buffers are equal by synchronised normalisation, or else those of process 0 count: they need
    # not be sent at every step. torch has renamed the option that says so.
    options = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    new, old = "forward_sync_buffers", "broadcast_buffers"
    sync: dict[str, Any] = {new if new in options else old: False}
    return DDPStrategy(timeout=STEP_TIMEOUT, gradient_as_bucket_view=True, **sync)


@functools.cache
def _host_group() -> dist.ProcessGroup:
    """Make the group for words between hosts, which leaves the GPUs alone; all must call it."""
    group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def together(fabric: Fabric, work: Callable[[], T]) -> T:
    """Do something that may fail in one process only, and let all of them fail if it does.

    The first process that failed raises its error, the others :class:`ReportedElsewhere`; none is
    left waiting for another. The work itself must not wait for other processes.
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
    dist.all_gather_object(codes, code, group=_host_group())
    failed = [rank for rank, other in enumerate(codes) if other]
    if not failed:
        return result
    if mine is not None and failed[0] == fabric.global_rank:
        raise mine
    raise ReportedElsewhere(codes[failed[0]]) from mine


def first_then_others(fabric: Fabric, work: Callable[[], T]) -> T:
    """Do something once on each machine, then in its other processes: what may download a file."""
    done = together(fabric, lambda: [work()] if fabric.local_rank == 0 else [])
    return together(fabric, lambda: done[0] if done else work())


def from_first(fabric: Fabric, value: T) -> T:
    """Return process 0's value in every process."""
    if fabric.world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_host_group())
    return values[0]


def from_all(fabric: Fabric, value: T) -> list[T]:
    """Return the value of each process in every process."""
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(values, value, group=_host_group())
    return values


class Vote:
    """Lets all processes stop after the same step, whichever of them a signal reached first.

    A process's signals become known to all one step later, so that no step waits for the vote.
    """

    under_way: ClassVar[set[Any]] = set()
    """Votes that somebody has not waited for."""

    def __init__(self, fabric: Fabric) -> None:
        self._alone = fabric.world_size == 1
        self._pending: tuple[Tensor, Any] | None = None
        self.outcome = 0
        """The signal that all have agreed to stop by, or 0."""

    def cast(self, received: list[int]) -> None:
        """Say which signals this process has received; every process must, after each step."""
        if self._alone:
            self.outcome = received[0] if received else 0
            return
        self.close()
        ballot = torch.tensor(received[:1] or [0])
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=_host_group(), async_op=True)
        self._pending = ballot, work
        self.under_way.add(work)

    def close(self) -> None:
        """Wait for the vote under way."""
        if self._pending is not None:
            ballot, work = self._pending
            work.wait()
            self.under_way.discard(work)
            self.outcome = self.outcome or int(ballot)
            self._pending = None


def is_mixed(config: Config, device: torch.device) -> bool:
    """Whether the networks run in bfloat16 mixed precision: by choice, or on a GPU."""
    wanted = config.training.precision
    return wanted == "bf16-mixed" or (wanted == "auto" and device.type == "cuda")


def compile_step(step: nn.Module, config: Config, fabric: Fabric) -> None:
    """Compile a step in place, by choice or on a GPU.

    On one GPU its kernels are replayed as CUDA graphs: a step of a small network is over before the
    host could launch them one by one.
    """
    wanted, on_gpu = config.training.compile, fabric.device.type == "cuda"
    if wanted == "yes" or (wanted == "auto" and on_gpu):
        # A process that trains many configurations, as a study does, compiles as many graphs; past
        # the limit torch would silently fall back to slow steps.
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 2048
        # What is left in float32, subnetworks and losses, is meant to be exact.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        graphs = on_gpu and fabric.world_size == 1
        step.compile(mode="reduce-overhead" if graphs else "default")


def gather_views(mine: Tensor) -> Tensor:
    """Join (M, n, d) of every process to (M, N, d), with gradient."""
    every: Tensor = gather_with_gradient(mine)  # (W, M, n, d)
    return every.transpose(0, 1).flatten(1, 2)  # (M, W * n, d)


def device_name(device: torch.device) -> str:
    """Name the hardware for the record."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


class SynchronisedNorm(_BatchNorm):
    """Batch normalisation whose mean and variance are those of every process's batch together.

    Equal to ordinary batch normalisation of the joint batch: outputs, gradients and running
    statistics. Each process sends its count, mean and centred sum of squares, which combine without
    the cancellation that sums of squares suffer from. torch's own needs GPUs.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"input has {input.ndim} dimensions: at least (N, C) is needed")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise.

        Args:
            input: (N, C, ...)

        Returns:
            The same shape and type.
        """
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=False,
                eps=self.eps,
            )
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(input)

    def _normalise(self, input: Tensor) -> Tensor:
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(input.ndim) if dim != 1]
        broadcast = (1, -1, *(1,) * (input.ndim - 2))
        own_mean = values.mean(others)  # (C,)
        own_squares = (values - own_mean.view(broadcast)).square().sum(others)  # (C,)
        count = values.new_full((1,), values.numel() / values.shape[1])
        every: Tensor = gather_with_gradient(
            torch.cat([count, own_mean, own_squares])
        )  # (W, 1 + 2C)
        counts = every[:, :1].detach()  # (W, 1)
        means, squares = every[:, 1:].chunk(2, dim=1)  # (W, C) each
        total = counts.sum()
        mean = (counts * means).sum(dim=0) / total  # (C,)
        variance = (squares + counts * (means - mean).square()).sum(dim=0) / total  # (C,)
        self._remember(mean.detach(), variance.detach() * (total / (total - 1)))
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        result: Tensor = (values - mean.view(broadcast)) * scale.view(broadcast)
        if self.bias is not None:
            result = result + self.bias.view(broadcast)
        return result.to(input.dtype)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of a batch, as torch does."""
        if self.num_batches_tracked is None or self.running_mean is None:
            return
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = (
            torch.tensor(self.momentum, device=mean.device)
            if self.momentum is not None
            else 1.0 / self.num_batches_tracked
        )
        self.running_mean.lerp_(mean, share.to(mean.dtype))
        self.running_var.lerp_(variance, share.to(mean.dtype))


def synchronise_norms(module: nn.Module, device: torch.device) -> None:
    """Replace every batch normalisation inside a module; parameters and their names stay.

    Args:
        module: with batch normalisation somewhere inside.
        device: that it will run on; on a GPU torch's own fused kernels are taken.
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
