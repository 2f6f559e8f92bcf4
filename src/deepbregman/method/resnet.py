"""Residual networks of torchvision, as trunks of an encoder."""

from collections.abc import Sequence

import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck


class ResNet(torchvision.models.ResNet):  # type: ignore[misc]  # torchvision is untyped
    """torchvision's residual network without its classifier, and with a choice of stem.

    Args:
        layers: number of blocks of each of the four stages.
        stem: ``standard``, a 7x7 convolution of stride 2 and max-pooling, or ``thumbnail``, a 3x3
            convolution of stride 1, for images whose resolution must be kept.
    """

    def __init__(
        self, block: type[BasicBlock | Bottleneck], layers: Sequence[int], stem: str
    ) -> None:
        super().__init__(block, list(layers))
        self.stem = stem
        self.num_features = 512 * block.expansion
        self.stage_widths = tuple(width * block.expansion for width in (64, 128, 256, 512))
        self.fc = nn.Identity()
        if stem == "thumbnail":
            self.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.maxpool = nn.Identity()

    def forward_with_maps(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return (N, d), and the maps of the four stages."""
        found = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        maps = []
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            found = stage(found)
            maps.append(found)
        return self.avgpool(found).flatten(1), maps


LAYERS: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
}
