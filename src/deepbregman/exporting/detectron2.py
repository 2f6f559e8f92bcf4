"""detectron2: a ResNet under the names of its backbone, for ``MODEL.WEIGHTS``."""

import io
import re

import torch

from deepbregman.errors import UserError

from .subject import Content, Subject, detached, pixel_statistics, require_resnet

DEPTHS = {"resnet50": 50, "resnet101": 101}
_RENAMED = (
    (re.compile(r"^(conv1|bn1)\."), r"stem.\1."),
    (re.compile(r"^layer(\d)\."), lambda match: f"res{int(match[1]) + 1}."),
    (re.compile(r"\bbn(\d)\."), r"conv\1.norm."),
    (re.compile(r"\bdownsample\.0\."), "shortcut."),
    (re.compile(r"\bdownsample\.1\."), "shortcut.norm."),
)


def backbone_name(name: str) -> str:
    """Translate a tensor's name from torchvision's to detectron2's."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def to_detectron2(subject: Subject) -> Content:
    """Write a ResNet-50 or 101 with the standard stem as detectron2's backbone.

    Counts of batches are left out: the frozen batch normalisation there has none.
    """
    trunk = require_resnet(subject, tuple(DEPTHS), "detectron2")
    if trunk.stem != "standard":
        raise UserError(
            "--format detectron2 holds the standard stem, and this run's encoder has the thumbnail "
            "stem, of images up to 64 px: train with --encoder.stem standard, or export it as "
            "torchvision"
        )
    model = {
        backbone_name(name): tensor
        for name, tensor in detached(trunk.state_dict()).items()
        if not name.endswith("num_batches_tracked")
    }
    buffer = io.BytesIO()
    # By its heuristics detectron2 finds "res2.0." in a detector's "backbone.bottom_up.res2.0.";
    # without them it would go on with random weights, and a line in its log.
    saved = {"model": model, "__author__": "deepbregman", "matching_heuristics": True}
    torch.save(saved, buffer)
    mean, deviation = pixel_statistics(subject.encoder)
    settings = {
        "MODEL.RESNETS.DEPTH": DEPTHS[subject.config.encoder.name],
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
        "MODEL.PIXEL_MEAN": [255.0 * value for value in mean],
        "MODEL.PIXEL_STD": [255.0 * value for value in deviation],
        "INPUT.FORMAT": "RGB",
    }
    usage = (
        "# detectron2 has other defaults for each of these; exact values in FILE.json\n"
        'cfg.MODEL.WEIGHTS = "FILE"\n'
        + "".join(f"cfg.{name} = {_shown(value)}\n" for name, value in settings.items())
    )
    return Content(
        buffer.getvalue(), usage, {**subject.record, "stem": trunk.stem, "detectron2": settings}
    )


def _shown(value: object) -> str:
    return repr([round(x, 3) for x in value] if isinstance(value, list) else value)
