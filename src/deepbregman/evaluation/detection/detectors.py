"""Faster R-CNN around an encoder's trunk, and the proof that the trunk is really in it."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

from deepbregman.data.voc import CLASSES
from deepbregman.errors import UserError
from deepbregman.evaluation.options import Architecture, Detect
from deepbregman.method.networks import Encoder
from deepbregman.training import checkpoints

STAGES = ("layer1", "layer2", "layer3", "layer4")
ANCHOR_SIDES = (32, 64, 128, 256, 512)
ASPECTS = (0.5, 1.0, 2.0)
SIDE_STEP = 32
"""Step between the sampled short sides, in pixels."""
LONG_SIDE = 1333 / 800
"""The longest long side, in multiples of the longest short side."""


class PredictedBoxes(NamedTuple):
    """The predictions of a detector for one image."""

    boxes: Tensor
    """(n, 4): left, top, right, bottom in pixels of the image."""
    labels: Tensor  # (n,): positions in CLASSES
    scores: Tensor


class _Conv4(nn.Module):
    """The trunk up to its third stage: one feature map, of stride 16."""

    def __init__(self, trunk: ResNet) -> None:
        super().__init__()
        self.conv1, self.bn1 = trunk.conv1, trunk.bn1
        self.relu, self.maxpool = trunk.relu, trunk.maxpool
        self.layer1, self.layer2, self.layer3 = trunk.layer1, trunk.layer2, trunk.layer3
        self.out_channels = _find_width(trunk) // 2

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to features (N, C, H / 16, W / 16)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features: Tensor = self.layer3(self.layer2(self.layer1(x)))
        return features


class _Conv5Head(nn.Module):
    """The trunk's fourth stage on every region, then the norm that MoCo adds, then the mean."""

    def __init__(self, trunk: ResNet) -> None:
        super().__init__()
        self.layer4 = trunk.layer4
        self.norm = nn.BatchNorm2d(_find_width(trunk))

    def forward(self, regions: Tensor) -> Tensor:
        """Map regions (R, C, 14, 14) to features (R, 2 C)."""
        features: Tensor = self.norm(self.layer4(regions))
        return features.mean(dim=(2, 3))


class Detector(FasterRCNN):  # type: ignore[misc]  # torchvision is untyped
    """A Faster R-CNN whose trunk's batch norms can be kept as they were pretrained."""

    frozen_norms: tuple[nn.BatchNorm2d, ...] = ()

    def train(self, mode: bool = True) -> "Detector":
        """Switch between training and evaluation; frozen norms stay in evaluation."""
        super().train(mode)
        for norm in self.frozen_norms:
            norm.eval()
        return self


def build_detector(
    encoder: Encoder, architecture: Architecture, options: Detect, *, mixed: bool = False
) -> Detector:
    """Build a detector of the 20 classes around the modules of an encoder's trunk.

    Args:
        encoder: a ResNet with the standard stem; its normalisation of pixels is taken over.
        architecture: ``c4``, MoCo's: one feature map of stride 16, and the fourth stage as head of
            every region; ``fpn``: a feature pyramid and a head of two linear layers.
    """
    trunk = require_fitting(encoder)
    low, high = options.image_side
    settings: dict[str, Any] = {
        "min_size": [*range(low, high, SIDE_STEP), high],  # the last is the one of the test
        "max_size": round(high * LONG_SIDE),
        "image_mean": encoder.mean.flatten().tolist(),
        "image_std": encoder.deviation.flatten().tolist(),
        "box_batch_size_per_image": options.regions,
        "rpn_post_nms_top_n_train": 2 * options.proposals,
        "rpn_post_nms_top_n_test": options.proposals,
    }
    if architecture == "c4":
        detector = Detector(
            _Conv4(trunk),
            rpn_anchor_generator=AnchorGenerator((ANCHOR_SIDES,), (ASPECTS,)),
            rpn_pre_nms_top_n_train=12_000,
            rpn_pre_nms_top_n_test=6_000,
            box_roi_pool=MultiScaleRoIAlign(["0"], output_size=14, sampling_ratio=2),
            box_head=_Conv5Head(trunk),
            box_predictor=FastRCNNPredictor(_find_width(trunk), 1 + len(CLASSES)),
            **settings,
        )
    else:
        widths = [_find_width(trunk) // 2**power for power in (3, 2, 1, 0)]
        outputs = {stage: str(position) for position, stage in enumerate(STAGES)}
        detector = Detector(
            BackboneWithFPN(trunk, outputs, widths, out_channels=256),
            num_classes=1 + len(CLASSES),
            rpn_anchor_generator=AnchorGenerator(
                tuple((side,) for side in ANCHOR_SIDES), (ASPECTS,) * len(ANCHOR_SIDES)
            ),
            **settings,
        )
    if options.norm == "frozen":
        names = set(map_trunk_names(detector).values())
        detector.frozen_norms = tuple(
            module
            for name, module in detector.named_modules()
            if isinstance(module, nn.BatchNorm2d) and f"{name}.running_mean" in names
        )
        for module in detector.frozen_norms:
            module.requires_grad_(False)
    if mixed:
        for module in (detector.backbone, detector.rpn.head, detector.roi_heads.box_head):
            _run_in_bfloat16(module)
    return detector


def require_fitting(encoder: Encoder) -> ResNet:
    """Return the trunk of an encoder, or refuse one that no detector can be built on."""
    fits = (
        "detection takes a ResNet (encoder.name resnet18, resnet34, resnet50 or resnet101) with "
        "the standard stem: pretrain one with encoder.stem standard, or data.image_size above 64"
    )
    trunk = encoder.trunk
    if not isinstance(trunk, ResNet):
        kind = type(trunk)  # its package too: timm has a class ResNet of its own
        package = kind.__module__.partition(".")[0]
        raise UserError(f"this encoder is a {kind.__name__} of {package}: {fits}")
    if trunk.conv1.kernel_size != (7, 7) or not isinstance(trunk.maxpool, nn.MaxPool2d):
        raise UserError(
            "this encoder has the thumbnail stem, whose first stage would keep all of a "
            f"photograph's 800 pixels: {fits}"
        )
    return trunk


def _find_width(trunk: ResNet) -> int:
    """Return the number of channels that the last stage gives."""
    last = trunk.layer4[-1]
    return int((last.bn3 if hasattr(last, "bn3") else last.bn2).num_features)


def _run_in_bfloat16(module: nn.Module) -> None:
    """Let a module compute in bfloat16 and hand on float32.

    Autocast around the whole detector would not do: torchvision gives anchors and boxes the type
    of the features, and eight bits place a corner at 800 pixels only to the nearest 4.
    """
    inner = module.forward

    def forward(*inputs: Any) -> Any:
        with torch.autocast(next(module.parameters()).device.type, dtype=torch.bfloat16):
            outputs = inner(*inputs)
        return _as_float32(outputs)

    module.forward = forward


def _as_float32(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.float()
    if isinstance(outputs, dict):  # the levels of a pyramid
        return OrderedDict((name, _as_float32(output)) for name, output in outputs.items())
    return type(outputs)(_as_float32(output) for output in outputs)


def map_trunk_names(detector: Detector) -> dict[str, str]:
    """Return, for each tensor of the trunk's state, its name in the detector's."""
    places = ("backbone.body.", "roi_heads.box_head.layer4.", "backbone.")
    names = {}
    for name in detector.state_dict():
        place = next((place for place in places if name.startswith(place)), None)
        if place is None or name.startswith("backbone.fpn."):
            continue
        kept = "layer4." if "layer4" in place else ""
        names[kept + name.removeprefix(place)] = name
    return names


def load_trunk(detector: Detector, state: dict[str, Tensor], origin: str) -> int:
    """Copy a trunk's state into a detector, check that it arrived, and count its tensors."""
    names, mine = map_trunk_names(detector), detector.state_dict()
    expected = {name: mine[place] for name, place in names.items()}
    problems = checkpoints.list_misfits(expected, state)
    if not problems:
        with torch.no_grad():
            for name, place in names.items():
                mine[place].copy_(state[name])
        problems = [f"{name} did not arrive" for name in find_differences(detector, state)]
    if problems:
        raise UserError(
            f"{origin} does not fit the detector: {checkpoints.join_misfits(problems)}; nothing "
            "was trained"
        )
    return len(names)


def find_differences(detector: Detector, state: dict[str, Tensor]) -> list[str]:
    """Return the tensors of a trunk's state that the detector does not hold, value by value."""
    names, mine = map_trunk_names(detector), detector.state_dict()
    return [
        name
        for name, tensor in state.items()
        if name not in names or not torch.equal(mine[names[name]].cpu(), tensor.cpu())
    ]
