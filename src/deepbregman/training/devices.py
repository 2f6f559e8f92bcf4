"""The device that work runs on.

Apart from ``processes.py``, because what needs one device need not load Lightning Fabric.
"""

import platform

import torch

from deepbregman.config import Config
from deepbregman.errors import UserError


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


def device_name(device: torch.device) -> str:
    """Name the hardware for the record."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


def is_mixed(config: Config, device: torch.device) -> bool:
    """Whether the networks run in bfloat16 mixed precision, which is the default on a GPU."""
    wanted = config.training.precision
    return wanted == "bf16-mixed" or (wanted == "auto" and device.type == "cuda")
