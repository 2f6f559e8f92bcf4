"""Box 2 of the figure: view -> representation h (encoder) -> embedding z (projection)."""

from collections.abc import Callable, Sequence

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

LARGEST_THUMBNAIL = 64
"""Up to this side, in pixels, the automatic stem keeps the resolution."""

STEMS = ("auto", "thumbnail", "standard")


class Encoder(nn.Module):
    """Images to representations: normalisation, then a trunk without classifier.

    The normalisation is part of the module (buffers in its state), so that whoever loads an
    encoder cannot feed it pixels of another scale.

    Args:
        trunk: maps (N, 3, H, W) to (N, d).
        num_features: d.
        mean: of each channel, for pixels in [0, 1].
        deviation: of each channel.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        trunk: nn.Module,
        num_features: int,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        deviation: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.num_features = num_features
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("deviation", torch.tensor(deviation).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Encode images.

        Args:
            images: (N, 3, H, W), uint8 in 0..255 or floating point in [0, 1].

        Returns:
            (N, d)
        """
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255.0
        images = (images - self.mean) / self.deviation
        representation: Tensor = self.trunk(images.contiguous(memory_format=torch.channels_last))
        return representation


class ResNet(torchvision.models.ResNet):  # type: ignore[misc]  # torchvision is untyped
    """torchvision's residual network without its classifier, and with a choice of stem.

    Args:
        block: the residual block's class.
        layers: number of blocks of each of the four stages.
        stem: ``standard``, a 7x7 convolution of stride 2 and max-pooling, or ``thumbnail``, a 3x3
            convolution of stride 1, for images whose resolution must be kept.
    """

    def __init__(
        self, block: type[BasicBlock | Bottleneck], layers: Sequence[int], stem: str
    ) -> None:
        super().__init__(block, list(layers))
        self.num_features = 512 * block.expansion
        self.fc = nn.Identity()
        if stem == "thumbnail":
            self.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.maxpool = nn.Identity()


def _resnet(
    block: type[BasicBlock | Bottleneck], *layers: int
) -> Callable[[str], tuple[nn.Module, int]]:
    def build(stem: str) -> tuple[nn.Module, int]:
        trunk = ResNet(block, layers, stem)
        return trunk, trunk.num_features

    return build


def _small(stem: str) -> tuple[nn.Module, int]:
    """Build a convolutional trunk for thumbnails, a second or so per epoch on a CPU."""
    del stem  # it has none to choose
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((32, 1), (64, 2), (128, 1), (128, 2)):
        layers += [
            nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), channels


TRUNKS: dict[str, Callable[[str], tuple[nn.Module, int]]] = {
    "resnet18": _resnet(BasicBlock, 2, 2, 2, 2),
    "resnet34": _resnet(BasicBlock, 3, 4, 6, 3),
    "resnet50": _resnet(Bottleneck, 3, 4, 6, 3),
    "resnet101": _resnet(Bottleneck, 3, 4, 23, 3),
    "small": _small,
}
"""Name -> a function from the stem to (trunk, width of h)."""


def build_encoder(
    name: str,
    image_size: int,
    stem: str = "auto",
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    deviation: Sequence[float] = (1.0, 1.0, 1.0),
) -> Encoder:
    """Build an untrained encoder.

    Args:
        name: ``resnet18``, ``resnet34``, ``resnet50``, ``resnet101``, or ``small``, four
            convolutions for thumbnails.
        image_size: side of the views.
        stem: ``thumbnail``, ``standard``, or ``auto``: thumbnail for views of up to 64 px.
        mean: of each channel, for pixels in [0, 1].
        deviation: of each channel.
    """
    if name not in TRUNKS:
        raise ValueError(f"encoder {name!r} is not one of {', '.join(TRUNKS)}")
    if stem not in STEMS:
        raise ValueError(f"stem {stem!r} is not one of {', '.join(STEMS)}")
    if stem == "auto":
        stem = "thumbnail" if image_size <= LARGEST_THUMBNAIL else "standard"
    trunk, num_features = TRUNKS[name](stem)
    return Encoder(trunk, num_features, mean, deviation)


def build_projection(
    in_features: int, hidden_features: int = 1024, out_features: int = 128, norm: bool = True
) -> nn.Sequential:
    """Build the projection head: Linear, batch norm, ReLU, Linear.

    Args:
        in_features: width of h.
        hidden_features: width of the hidden layer; the paper's 1024.
        out_features: width of z.
        norm: whether the hidden layer is batch-normalised.
    """
    return nn.Sequential(
        nn.Linear(in_features, hidden_features, bias=not norm),
        nn.BatchNorm1d(hidden_features) if norm else nn.Identity(),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_features, out_features),
    )
