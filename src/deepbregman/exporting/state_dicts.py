"""torchvision and timm: the trunk's tensors under the names these libraries give them."""

import io

import torch
from torch import nn

from deepbregman.errors import UserError
from deepbregman.method.base_network import TIMM, ResNet, create_timm

from .subject import Content, Subject, detached, pixel_statistics, require_resnet

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101")
THUMBNAIL_STEM = (
    "model.conv1 = torch.nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)\n"
    "model.maxpool = torch.nn.Identity()\n"
)
"""What a ResNet of torchvision or timm lacks to hold an encoder trained on thumbnails."""
LOAD = 'model.load_state_dict(torch.load("FILE", weights_only=True))\n'


def to_torchvision(subject: Subject) -> Content:
    """Write the trunk of a ResNet as torchvision's network without its classifier."""
    trunk = require_resnet(subject, RESNETS, "torchvision")
    name = subject.config.encoder.name
    usage = (
        "import torch, torchvision\n"
        f"model = torchvision.models.{name}()\n"
        f"{_stem(trunk)}model.fc = torch.nn.Identity()  # or: strict=False, which misses fc.*\n"
        f"{LOAD}{_pixels(subject)}"
    )
    return Content(_saved(trunk), usage, {**subject.record, "stem": trunk.stem})


def to_timm(subject: Subject) -> Content:
    """Write the trunk as timm's network with ``num_classes=0``; ResNets have the same names."""
    trunk, name = subject.encoder.trunk, subject.config.encoder.name
    image_size = subject.config.data.image_size
    options: dict[str, int] = {}
    surgery = ""
    if name.startswith(TIMM):
        name = name.removeprefix(TIMM)
        options = create_timm(name, image_size)[1]
    elif name in RESNETS and isinstance(trunk, ResNet):
        surgery = _stem(trunk)
    else:
        raise UserError(
            f"--format timm holds {', '.join(RESNETS)} and {TIMM}NAME, and this run's encoder is "
            f"{name}: export it as safetensors or onnx"
        )
    arguments = "".join(f", {key}={value}" for key, value in options.items())
    usage = (
        "import timm, torch\n"
        f'model = timm.create_model("{name}", num_classes=0{arguments})\n'
        f"{surgery}{LOAD}{_pixels(subject)}"
    )
    mean, deviation = pixel_statistics(subject.encoder)
    settings = {
        "architecture": name,
        "num_classes": 0,
        "num_features": subject.encoder.num_features,
        "model_args": options,
        "pretrained_cfg": {
            "input_size": [3, image_size, image_size],
            "mean": mean,
            "std": deviation,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
        },
    }
    stem = {"stem": trunk.stem} if isinstance(trunk, ResNet) else {}
    return Content(_saved(trunk), usage, {**subject.record, **stem, "timm": settings})


def _saved(trunk: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(detached(trunk.state_dict()), buffer)
    return buffer.getvalue()


def _stem(trunk: ResNet) -> str:
    return THUMBNAIL_STEM if trunk.stem == "thumbnail" else ""


def _pixels(subject: Subject) -> str:
    mean, deviation = pixel_statistics(subject.encoder)
    return (
        f"# images: RGB, {subject.config.data.image_size} px, in [0, 1], minus "
        f"{[round(x, 4) for x in mean]}, over {[round(x, 4) for x in deviation]}; exact values in "
        "FILE.json\n"
    )
