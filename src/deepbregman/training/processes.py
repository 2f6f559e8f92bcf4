"""Devices and processes, through Lightning Fabric."""

import os
import platform
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from deepbregman.config import Config
from deepbregman.errors import UserError


def pick_device(accelerator: str = "auto") -> torch.device:
    """Return the device for work of one process: ``cpu``, ``cuda``, or a GPU if there is one."""
    if accelerator not in ("auto", "cpu", "cuda"):
        raise UserError(f"accelerator {accelerator!r} is not one of auto, cpu, cuda")
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("accelerator 'cuda': this machine has no CUDA device; use auto or cpu")
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def launch(accelerator: str = "auto") -> Fabric:
    """Start a run's process, or join those that torchrun started.

    Precision is not Fabric's business here: it would cast every input of the step, the views'
    random numbers among them, to bfloat16.

    Args:
        accelerator: ``auto``, ``cpu`` or ``cuda``.
    """
    kind = pick_device(accelerator).type
    if kind == "cuda":
        torch.backends.cudnn.benchmark = True
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // here
    fabric = Fabric(accelerator=kind, devices=here, num_nodes=nodes)
    fabric.launch()
    return fabric


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
        graphs = on_gpu and fabric.world_size == 1
        step.compile(mode="reduce-overhead" if graphs else "default")


def gathering(fabric: Fabric) -> Callable[[Tensor], Tensor]:
    """Return a function that joins (M, n, d) of every process to (M, N, d), with gradient."""

    def gather(mine: Tensor) -> Tensor:
        every = fabric.all_gather(mine, sync_grads=True)  # (W, M, n, d)
        assert isinstance(every, Tensor)
        return every.transpose(0, 1).flatten(1, 2)  # (M, W * n, d)

    return gather


def device_name(device: torch.device) -> str:
    """Name the hardware for the record."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
