"""Networks: view -> representation h -> embedding z -> scores of K subnetworks."""

import difflib
import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .colours import split_colours
from .convolutions import use_fast_gradients
from .patches import cut_patches

LARGEST_THUMBNAIL = 64
"""Up to this side, in pixels, the automatic stem keeps the resolution."""

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101")
"""Architectures of torchvision."""

STEMS = ("auto", "thumbnail", "standard")

Norm = Literal["output", "standard", "hidden", "none"]
"""Which part of a subnetwork is batch-normalised."""

TIMM = "timm:"
"""Prefix of the names of architectures of timm."""


class Encoder(nn.Module):
    """Images to representations: normalisation, then a trunk without classifier.

    The normalisation is part of the module (buffers in its state), so that a loaded encoder
    cannot get pixels of another scale.

    Args:
        trunk: maps (N, 3, H, W) to (N, d).
        num_features: d.
        mean: of each channel, for pixels in [0, 1]; the deviation likewise.
        patch: side of the patches that the trunk is trained on, if it never sees more: larger
            images are cut into patches that overlap by half, and encoded to their mean.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        trunk: nn.Module,
        num_features: int,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        deviation: Sequence[float] = (1.0, 1.0, 1.0),
        patch: int | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.num_features = num_features
        self.patch = patch
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("deviation", torch.tensor(deviation).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Encode images (N, 3, H, W), uint8 in 0..255 or floating point in [0, 1], to (N, d)."""
        if not isinstance(images, Tensor):
            raise TypeError(
                f"images is of the type {type(images).__name__}: give a tensor (N, 3, H, W), such "
                "as torchvision.io.decode_image(path, 'RGB')[None]"
            )
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"images of shape {tuple(images.shape)}: expected (N, 3, H, W); if channels are "
                "last, give images.permute(0, 3, 1, 2)"
            )
        if self.patch is not None:
            return self.encode_patches(images).mean(dim=1)
        return self._encode(self.normalise(images))

    def encode_patches(self, images: Tensor) -> Tensor:
        """Encode the patches of images one by one: (N, P, d); a small image is one patch."""
        assert self.patch is not None
        side = min(self.patch, images.shape[-1])
        patches = cut_patches(images, side, self.patch // 2)  # (N, G, G, 3, side, side)
        num_patches = patches.shape[1] * patches.shape[2]
        found = self._encode(self.normalise(patches.flatten(0, 2)))  # (N * P, d)
        return found.view(-1, num_patches, self.num_features)

    def _encode(self, images: Tensor) -> Tensor:
        with use_fast_gradients(images):
            representation: Tensor = self.trunk(images)
        return representation

    def encode_with_maps(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Encode images as ``forward`` does, and return the feature maps of each stage as well.

        Returns:
            (N, d), and (N, C, G, G) of each stage, the finest first; C is in ``stage_widths``.
        """
        images, trunk = self.normalise(images), cast(Any, self.trunk)
        if not self.stage_widths:
            raise ValueError(f"a {type(trunk).__name__} has no stages: only {', '.join(TRUNKS)} do")
        with use_fast_gradients(images):
            found: tuple[Tensor, list[Tensor]] = trunk.forward_with_maps(images)
        return found

    @property
    def stage_widths(self) -> tuple[int, ...]:
        """Channels of the feature maps of each stage; empty of a trunk without stages."""
        return getattr(self.trunk, "stage_widths", ())

    def normalise(self, images: Tensor) -> Tensor:
        """Bring pixels to the scale that the trunk was trained on."""
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255.0
        elif not images.is_floating_point():  # in 0..255, most likely, which would not be scaled
            raise ValueError(
                f"images of {images.dtype}: give uint8 in 0..255, or floating point in [0, 1]"
            )
        images = (images.to(self.mean.dtype) - self.mean) / self.deviation
        return images.contiguous(memory_format=torch.channels_last)


SMALL_STAGES = ((32, 1), (64, 2), (128, 1), (128, 2))
"""Width and stride of each convolution of the small trunk."""


class SmallTrunk(nn.Sequential):
    """Convolutions for thumbnails, pooled: an epoch takes a second or so on a CPU.

    Each ReLU ends a stage.
    """

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width, stride in SMALL_STAGES:
            layers += [
                nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.num_features = channels
        self.stage_widths = tuple(width for width, _ in SMALL_STAGES)

    def forward_with_maps(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return (N, d), and the map of each convolution."""
        found, maps = images, []
        for part in self:
            found = part(found)
            if isinstance(part, nn.ReLU):
                maps.append(found)
        return found, maps


class ColourTrunk(nn.Module):
    """Two trunks of one kind: one sees the brightness of images, the other their colours.

    :func:`~deepbregman.method.colours.split_colours` says what ``space`` may be.
    """

    def __init__(self, bright: nn.Module, colour: nn.Module, space: str) -> None:
        super().__init__()
        self.bright, self.colour, self.space = bright, colour, space

    def forward(self, images: Tensor) -> Tensor:
        """Return both representations side by side: images in [0, 1] to (N, 2d)."""
        # Pixels of photos have a deviation near 1/4: the trunks get them with mean 0, deviation 1.
        parts = (4.0 * (part - 0.5) for part in split_colours(images, self.space))
        trunks = (self.bright, self.colour)
        found = [
            trunk(part.contiguous(memory_format=torch.channels_last))
            for trunk, part in zip(trunks, parts, strict=True)
        ]
        return torch.cat(found, dim=1)


TRUNKS = (*RESNETS, "small")


def measure_width(trunk: nn.Module, image_size: int) -> int:
    """Find the width d of a trunk by showing it two black images, in evaluation mode.

    If it fails on them, or makes anything but (2, d) of them, that is a ValueError.
    """
    shape = (2, 3, image_size, image_size)
    there = next((parameter.device for parameter in trunk.parameters()), None)
    images = torch.zeros(shape, device=there).contiguous(memory_format=torch.channels_last)
    training = trunk.training
    try:
        with torch.no_grad():
            found = trunk.eval()(images)
    except (RuntimeError, AssertionError, ValueError, TypeError, IndexError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"it fails on images of shape {shape}: {reason}") from error
    finally:
        trunk.train(training)
    if not isinstance(found, Tensor):
        raise ValueError(f"it returns a {type(found).__name__}: it must return a tensor (N, d)")
    if found.ndim != 2 or len(found) != 2 or not found.shape[1] or not found.is_floating_point():
        raise ValueError(
            f"it makes {found.dtype} of shape {tuple(found.shape)} of images of shape {shape}: it "
            "must make floating-point vectors, (2, d)"
        )
    return found.shape[1]


def _import_timm() -> ModuleType:
    try:
        import timm
    except ImportError:
        raise ImportError(
            "timm is not installed: pip install 'deepbregman[timm]', or choose one of "
            f"{', '.join(TRUNKS)}"
        ) from None
    return timm


def create_timm(
    name: str, image_size: int, pretrained: bool = False
) -> tuple[nn.Module, dict[str, int]]:
    """Create an architecture of timm, pooled and without classifier.

    Args:
        image_size: side of the images; a transformer is built for it if its class takes a size.
        pretrained: with timm's weights, fitted to the image size, rather than random ones.

    Returns:
        The model, and the options beside ``num_classes=0`` that it was created with.
    """
    create = functools.partial(
        _import_timm().create_model, name, pretrained=pretrained, num_classes=0
    )
    options = {"img_size": image_size}
    try:
        return create(**options), options
    except TypeError:  # it takes no img_size: convolutions, for any size or for one
        return create(), {}


def _build_timm_trunk(name: str, image_size: int) -> tuple[nn.Module, int]:
    """Build a trunk of timm; its width is measured, since ``num_features`` is not always right."""
    timm = _import_timm()
    if not timm.is_model(name):  # so a name that timm would look up on a server is refused, too
        near = difflib.get_close_matches(name, timm.list_models(), n=4)
        guess = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"timm {timm.__version__} has no architecture {name!r}{guess}")
    try:
        trunk, _ = create_timm(name, image_size)
        patches = getattr(trunk, "patch_embed", None)
        if isinstance(patches, timm.layers.PatchEmbed) and image_size % patches.patch_size[0]:
            raise ValueError(f"its patches of {patches.patch_size[0]} px would not cover them")
        width = measure_width(trunk, image_size)
    except (RuntimeError, AssertionError, ValueError) as error:
        made_for = timm.get_pretrained_cfg(name).input_size[-1]
        raise ValueError(
            f"{name} cannot take images of {image_size} px ({error}); it was made for {made_for} px"
        ) from None
    return trunk, width


def build_encoder(
    name: str,
    image_size: int,
    stem: str = "auto",
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    deviation: Sequence[float] = (1.0, 1.0, 1.0),
) -> Encoder:
    """Build an untrained encoder.

    Args:
        name: ``resnet18``, ``resnet34``, ``resnet50``, ``resnet101``, ``small``, four
            convolutions for thumbnails, or ``timm:NAME``, an architecture of timm.
        stem: of a ResNet: ``thumbnail``, ``standard``, or ``auto``: thumbnail for images of up to
            64 px.
        mean: of each channel, for pixels in [0, 1]; the deviation likewise.
    """
    if stem not in STEMS:
        raise ValueError(f"stem {stem!r} is not one of {', '.join(STEMS)}")
    if name.startswith(TIMM):
        if stem != "auto":
            raise ValueError(f"stem {stem!r} is for ResNets by name; {name} takes auto only")
        trunk, num_features = _build_timm_trunk(name.removeprefix(TIMM), image_size)
        return Encoder(trunk, num_features, mean, deviation)
    if name not in TRUNKS:
        raise ValueError(f"encoder {name!r} is not one of {', '.join(TRUNKS)}, {TIMM}NAME")
    if stem == "auto":
        stem = "thumbnail" if image_size <= LARGEST_THUMBNAIL else "standard"
    if name in RESNETS:
        from .resnet import LAYERS, ResNet  # loads torchvision, which others do not need

        resnet = ResNet(*LAYERS[name], stem)
        return Encoder(resnet, resnet.num_features, mean, deviation)
    small = SmallTrunk()
    return Encoder(small, small.num_features, mean, deviation)


def build_projection(
    in_features: int,
    hidden_features: int = 1024,
    out_features: int = 128,
    norm: bool = True,
    layers: int = 2,
    output_norm: bool = False,
) -> nn.Sequential:
    """Build a head of linear layers, each but the last with batch norm and ReLU.

    Args:
        layers: linear layers, 2 or more.
        output_norm: batch-normalise what comes out as well, without a learned gain and shift.
    """
    parts: list[nn.Module] = []
    for width in (in_features, *(hidden_features,) * (layers - 2)):
        parts += [
            nn.Linear(width, hidden_features, bias=not norm),
            nn.BatchNorm1d(hidden_features) if norm else nn.Identity(),
            nn.ReLU(inplace=True),
        ]
    parts.append(nn.Linear(hidden_features, out_features, bias=not output_norm))
    if output_norm:
        parts.append(nn.BatchNorm1d(out_features, affine=False))
    return nn.Sequential(*parts)


class BregmanNetwork(nn.Module):
    """K subnetworks, each Linear(d, hidden), Linear(hidden, 1), with batch normalisation.

    All K are evaluated by one operation. Without an activation, dropout or hidden normalisation
    the two layers of a subnetwork compose to one affine map, so the weights are multiplied first,
    (d, K) in all, and the (N, K, hidden) activations are never formed: the function and its
    gradients are those of the two layers, the memory O(NK).

    Args:
        in_features: d, width of the embedding.
        num_subnetworks: K, the paper's kappa.
        hidden_features: width of each subnetwork's hidden layer.
        norm: batch normalisation of the ``output`` (K channels; the paper), the same without a
            learned gain and shift (``standard``: every score keeps mean 0 and deviation 1, so that
            a temperature means the same throughout), of the ``hidden`` layer (K * hidden
            channels), or ``none``.
        activation: ``None`` (the paper: linear) or ``"relu"`` (the authors' code).
        dropout: probability of dropping a hidden unit (the authors' code: 0.2).
        normalise_input: L2-normalise z first.
    """

    def __init__(
        self,
        in_features: int = 128,
        num_subnetworks: int = 100,
        hidden_features: int = 32,
        norm: Norm = "output",
        activation: Literal["relu"] | None = None,
        dropout: float = 0.0,
        normalise_input: bool = False,
    ) -> None:
        super().__init__()
        for name, count in (
            ("in_features", in_features),
            ("num_subnetworks", num_subnetworks),
            ("hidden_features", hidden_features),
        ):
            if count < 1:
                raise ValueError(f"{name} is {count}: it must be 1 or more")
        if norm not in get_args(Norm):
            raise ValueError(f"norm {norm!r} is not one of {', '.join(get_args(Norm))}")
        if activation not in (None, "relu"):
            raise ValueError(f"activation {activation!r} is not None or 'relu'")
        self.num_subnetworks = num_subnetworks
        self.activation = activation
        self.normalise_input = normalise_input
        self.weight1 = nn.Parameter(torch.empty(in_features, num_subnetworks, hidden_features))
        self.bias1 = nn.Parameter(torch.empty(num_subnetworks, hidden_features))
        self.weight2 = nn.Parameter(torch.empty(num_subnetworks, hidden_features))
        self.bias2 = nn.Parameter(torch.empty(num_subnetworks))
        self.dropout = nn.Dropout(dropout)
        self.norm = norm
        self.norm_hidden = (
            nn.BatchNorm1d(num_subnetworks * hidden_features) if norm == "hidden" else nn.Identity()
        )
        self.norm_output = (
            nn.BatchNorm1d(num_subnetworks, affine=norm == "output")
            if norm in ("output", "standard")
            else nn.Identity()
        )
        self.is_affine = activation is None and dropout == 0.0 and norm != "hidden"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every subnetwork as ``nn.Linear`` would, each on its own draw."""
        in_features, _, hidden_features = self.weight1.shape
        for parameter, fan_in in (
            (self.weight1, in_features),
            (self.bias1, in_features),
            (self.weight2, hidden_features),
            (self.bias2, hidden_features),
        ):
            nn.init.uniform_(parameter, -1.0 / math.sqrt(fan_in), 1.0 / math.sqrt(fan_in))

    def forward(self, z: Tensor) -> Tensor:
        """Score embeddings: (N, d) to (N, K)."""
        if z.ndim != 2 or z.shape[1] != len(self.weight1):
            raise ValueError(
                f"embeddings of shape {tuple(z.shape)}: expected (N, {len(self.weight1)}), by "
                "in_features"
            )
        # In full precision also under autocast: in bfloat16 the largest score is often a tie.
        with torch.autocast(z.device.type, enabled=False):
            return self._score(z.to(self.weight1.dtype))

    def _score(self, z: Tensor) -> Tensor:
        if self.normalise_input:
            z = F.normalize(z, dim=1)
        if self.is_affine:
            weight = (self.weight1 * self.weight2).sum(dim=2)  # (d, K)
            bias = (self.bias1 * self.weight2).sum(dim=1) + self.bias2  # (K,)
            scores = torch.addmm(bias, z, weight)  # (N, K)
        else:
            hidden = torch.addmm(self.bias1.flatten(), z, self.weight1.flatten(1))  # (N, K * H)
            hidden = self.norm_hidden(hidden)
            if self.activation == "relu":
                hidden = F.relu(hidden)
            hidden = self.dropout(hidden).view(-1, *self.weight2.shape)  # (N, K, H)
            scores = (hidden * self.weight2).sum(dim=2) + self.bias2  # (N, K)
        normalised: Tensor = self.norm_output(scores)
        return normalised


def embed_patches(projection: nn.Module, parts: Tensor) -> Tensor:
    """Embed images by the mean of their patches' embeddings: (N, P, h) to (N, d)."""
    z: Tensor = projection(parts.flatten(0, 1))
    return z.view(*parts.shape[:2], -1).mean(dim=1)


class ModelOutputs(NamedTuple):
    """The outputs of the networks for a batch: h, z and o of the paper."""

    representation: Tensor  # (N, h)
    embedding: Tensor  # (N, d)
    scores: Tensor | None  # (N, K)


class Model(nn.Module):
    """The networks that are evaluated: encoder, projection and, with a divergence, its subnetworks.

    Args:
        encoder: image -> h; the part one keeps.
        projection: h -> z.
        divergence_network: z -> scores, or None without a divergence.
        sigma: width of the Gaussian kernel on divergences, as set or as learned; None without a
            divergence.
    """

    def __init__(
        self,
        encoder: Encoder,
        projection: nn.Sequential,
        divergence_network: nn.Module | None,
        sigma: float | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.divergence_network = divergence_network
        self.sigma = sigma

    def forward(self, images: Tensor) -> ModelOutputs:
        """Pass images (N, 3, H, W) through the networks."""
        if self.encoder.patch is None:
            h = self.encoder(images)
            z = self.projection(h)
        else:  # as in training: the mean of embeddings, not the embedding of a mean
            parts = self.encoder.encode_patches(images)  # (N, P, h)
            h, z = parts.mean(dim=1), embed_patches(self.projection, parts)
        network = self.divergence_network
        return ModelOutputs(h, z, None if network is None else network(z))
