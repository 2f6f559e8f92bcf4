"""The device that work runs on.

Apart from ``processes.py``, because what needs one device need not load Lightning Fabric.
"""

import platform

import torch

from deepbregman.config import Config
from deepbregman.errors import UserError, require_known


def pick_device(accelerator: str = "auto") -> torch.device:
    """Return the device for work of one process; ``auto`` is a CUDA device if there is one."""
    require_known("accelerator", accelerator, ("auto", "cpu", "cuda"))
    has_gpu = torch.cuda.is_available()
    if accelerator == "cuda" and not has_gpu:
        raise UserError("accelerator 'cuda': this machine has no CUDA device; use auto or cpu")
    return torch.device("cuda" if has_gpu and accelerator != "cpu" else "cpu")


def pick_devices(accelerator: str = "auto", devices: int | str = 1) -> list[torch.device]:
    """Return the devices for work that several may share, the one of ``pick_device`` first.

    Args:
        devices: how many; ``all`` is every visible GPU. Of a CPU there may be any number: threads
            that share it, for tests.
    """
    first = pick_device(accelerator)
    if not (devices == "all" or (isinstance(devices, int) and devices >= 1)):
        raise UserError(f"devices is {devices!r}: it must be a number from 1 on, or all")
    if first.type != "cuda":
        return [first] * (1 if devices == "all" else int(devices))
    visible = torch.cuda.device_count()
    count = visible if devices == "all" else int(devices)
    if count > visible:
        raise UserError(
            f"devices is {count}: this process sees {visible} GPUs (CUDA_VISIBLE_DEVICES limits "
            "them); use that many, or all"
        )
    here = torch.cuda.current_device() if count > 1 else 0
    others = [index for index in range(visible) if index != here]
    return [first, *(torch.device("cuda", index) for index in others[: count - 1])]


def device_name(device: torch.device) -> str:
    """Name the hardware for the record."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


def is_mixed(config: Config, device: torch.device) -> bool:
    """Whether the networks run in bfloat16 mixed precision, which is the default on a GPU."""
    wanted = config.training.precision
    return wanted == "bf16-mixed" or (wanted == "auto" and device.type == "cuda")


def reset_peak_memory(device: torch.device) -> None:
    """Measure the peak of a GPU's memory from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def measure_peak_memory(device: torch.device) -> dict[str, float]:
    """Return ``peak_gigabytes`` that tensors took on a GPU; of other devices nothing is known.

    The allocator counts on the host, so the host does not wait for the device.
    """
    if device.type != "cuda":
        return {}
    return {"peak_gigabytes": torch.cuda.max_memory_allocated(device) / 1e9}
