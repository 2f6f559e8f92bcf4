"""What is exported, and what an exporter makes of it."""

from typing import NamedTuple

from torch import Tensor

from deepbregman.config import Config
from deepbregman.errors import UserError
from deepbregman.method.base_network import Encoder, ResNet
from deepbregman.runs import Record

VERSION = 1
"""Of the record that goes with the weights."""


class Subject(NamedTuple):
    """A trained encoder, in evaluation mode on the CPU, and what is known about it."""

    encoder: Encoder
    config: Config
    record: Record


class Content(NamedTuple):
    """What an exporter made."""

    data: bytes
    usage: str
    """How the file is loaded; ``FILE`` stands for its name."""
    sidecar: Record | None = None
    """What the file cannot hold; None when all is inside."""


def pixel_statistics(encoder: Encoder) -> tuple[list[float], list[float]]:
    """Return the mean and the deviation of each channel, for pixels in [0, 1]."""
    return encoder.mean.flatten().tolist(), encoder.deviation.flatten().tolist()


def detached(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each with its own memory in the usual order."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}


def require_resnet(subject: Subject, names: tuple[str, ...], format_name: str) -> ResNet:
    """Return the trunk of a ResNet that is known by name, or refuse any other encoder.

    Args:
        subject: to export.
        names: that fit.
        format_name: of the format, for the error.
    """
    name = subject.config.encoder.name
    if name not in names or not isinstance(subject.encoder.trunk, ResNet):
        others = ["safetensors"]
        if isinstance(subject.encoder.trunk, ResNet) and name != "custom":
            others = ["torchvision", "timm", *others]
        elif name.startswith("timm:"):
            others = ["timm", *others]
        fitting = f"{', '.join(others)} or onnx"
        raise UserError(
            f"--format {format_name} holds {', '.join(names)}, and this run's encoder is {name}: "
            f"export it as {fitting}"
        )
    return subject.encoder.trunk
