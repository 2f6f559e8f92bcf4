"""Colours of batches of images: grey, jitter, solarisation, and the split of brightness and colour.

Every image has its own parameters, and no operator waits for the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
SOLARISE_FROM = 0.5
"""Brightness in [0, 1] from which solarisation inverts a channel."""
# CIE 1931 primaries and white (D65) of sRGB, and the constants of CIE L*a*b*.
_TO_XYZ = (
    (0.412453, 0.357580, 0.180423),
    (0.212671, 0.715160, 0.072169),
    (0.019334, 0.119193, 0.950227),
)
_FROM_XYZ = (
    (3.24048134, -1.53715152, -0.49853633),
    (-0.96925495, 1.87599, 0.04155593),
    (0.05564664, -0.20404134, 1.05731107),
)
_WHITE = (0.95047, 1.0, 1.08883)
_KNEE = 6 / 29


def luminance(channels: Sequence[Tensor]) -> Tensor:
    """Return the grey of images, given by one or three channels, with torchvision's weights."""
    if len(channels) == 1:
        return channels[0]
    red, green, blue = channels
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def greyscale_images(images: Tensor, grey: Tensor) -> Tensor:
    """Make the images (B, C, H, W) grey where ``grey`` (B,) is true."""
    level = luminance(images.unbind(dim=1)).unsqueeze(1)
    return torch.where(grey.view(-1, 1, 1, 1), level, images)


def jitter_images(images: Tensor, factors: Tensor, hue: Tensor | None, order: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, in each image's own order.

    Doing all four operators at each of the four steps and keeping one would cost sixteen. Instead
    the three blends, which differ only in their target, fill three slots in the image's order, and
    hue is done once for all, between the slots before it and those after. A slot on the wrong side
    of hue gets factor 1, which changes nothing. Channels are tensors of their own in between: so
    the compiler makes one kernel of it all.

    Args:
        images: (B, C, H, W) in [0, 1], float32 or float16; may be overwritten.
        factors: (B, 3), of brightness, contrast and saturation; 1 changes nothing.
        hue: (B,) shift in turns, in [-0.5, 0.5]; None saves the work where all shifts are 0.
        order: (B, 4) the operator (0 brightness, 1 contrast, 2 saturation, 3 hue) at each step.

    Returns:
        (B, C, H, W) in [0, 1].
    """
    hue_step = (order == HUE).int().argmax(dim=-1, keepdim=True)  # (B, 1)
    slots = torch.arange(3, device=order.device)
    operators = order.gather(-1, slots + (slots >= hue_step))  # (B, 3)
    factors = factors.gather(-1, operators)
    channels = [channel.contiguous() for channel in images.unbind(dim=1)]  # (B, H, W) each
    if len(channels) == 1:
        hue = None
    if hue is None:
        return torch.stack(_blend(channels, factors, operators), dim=1)
    early = slots < hue_step
    channels = _blend(channels, torch.where(early, factors, 1.0), operators)
    channels = _shift_hue(channels, hue)
    channels = _blend(channels, torch.where(early, 1.0, factors), operators)
    return torch.stack(channels, dim=1)


def _blend(channels: list[Tensor], factors: Tensor, operators: Tensor) -> list[Tensor]:
    """Blend images, given by channels (B, H, W), slot by slot; factors and operators are (B, 3)."""
    for slot in range(3):
        operator = operators[:, slot].view(-1, 1, 1)
        grey = luminance(channels)
        level = grey.mean(dim=(-2, -1), keepdim=True) * (operator == CONTRAST)  # 0 for brightness
        target = torch.where(operator == SATURATION, grey, level)  # (B, H, W)
        # Torchvision's factor * images + (1 - factor) * target in one pass.
        weight = 1 - factors[:, slot].to(grey.dtype).view(-1, 1, 1)
        channels = [channel.lerp_(target, weight).clamp_(0, 1) for channel in channels]
    return channels


def _shift_hue(channels: list[Tensor], hue: Tensor) -> list[Tensor]:
    """Turn the hue of three channels (B, H, W) by ``hue`` (B,) turns; value and saturation stay."""
    red, green, blue = (channel.float() for channel in channels)
    # Much faster on the CPU than aminmax over so short a dimension.
    low = torch.minimum(red, green).minimum(blue)
    high = torch.maximum(red, green).maximum(blue)
    chroma = high - low
    # Where chroma is 0 the hue does not matter: it is multiplied by 0.
    divisor = chroma.clamp_min(1e-20)
    sextant = torch.where(
        high == red,
        (green - blue).div_(divisor),
        torch.where(
            high == green, (blue - red).div_(divisor).add_(2), (red - green).div_(divisor).add_(4)
        ),
    )
    # In [0, 6): 0 is red, 2 green, 4 blue.
    sextant = sextant.add_(6 * hue.view(-1, 1, 1)).remainder_(6)
    # How far each channel stands between low and high is a trapezoid of the distance to its colour;
    # red lies at both ends of the circle, so its distance is taken from the opposite side.
    shares = (
        (sextant - 3).abs_().sub_(1),
        (sextant - 2).abs_().neg_().add_(2),
        (sextant - 4).abs_().neg_().add_(2),
    )
    turned = (torch.addcmul(low, chroma, share.clamp_(0, 1)) for share in shares)
    return [channel.to(channels[0].dtype) for channel in turned]


def solarise_images(images: Tensor, solarised: Tensor) -> Tensor:
    """Invert the bright values of the images (B, C, H, W) where ``solarised`` (B,) is true."""
    inverted = solarised.view(-1, 1, 1, 1) & (images >= SOLARISE_FROM)
    return torch.where(inverted, 1 - images, images)


def _mix(images: Tensor, weights: tuple[tuple[float, ...], ...]) -> Tensor:
    """Mix the channels of images (..., 3, H, W), channel by channel."""
    red, green, blue = images.unbind(dim=-3)
    return torch.stack([a * red + b * green + c * blue for a, b, c in weights], dim=-3)


@torch.no_grad()
def rgb_to_lab(images: Tensor) -> Tensor:
    """Turn sRGB in [0, 1], (..., 3, H, W), into CIE L*a*b*: L in [0, 100], a and b around 0."""
    linear = torch.where(
        images > 0.04045, ((images.clamp_min(0.04045) + 0.055) / 1.055) ** 2.4, images / 12.92
    )
    xyz = _mix(linear, _TO_XYZ)
    x, y, z = (
        torch.where(
            part / white > _KNEE**3,
            (part / white).clamp_min(_KNEE**3) ** (1 / 3),
            part / white / (3 * _KNEE**2) + 4 / 29,
        )
        for part, white in zip(xyz.unbind(dim=-3), _WHITE, strict=True)
    )
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), dim=-3)


@torch.no_grad()
def lab_to_rgb(images: Tensor) -> Tensor:
    """Turn CIE L*a*b* into sRGB, both (..., 3, H, W); colours outside sRGB are cut off."""
    level, a, b = images.unbind(dim=-3)
    y = (level + 16) / 116
    parts = [
        white * torch.where(part > _KNEE, part**3, 3 * _KNEE**2 * (part - 4 / 29))
        for part, white in zip((y + a / 500, y, y - b / 200), _WHITE, strict=True)
    ]
    linear = _mix(torch.stack(parts, dim=-3), _FROM_XYZ)
    return torch.where(
        linear > 0.0031308, 1.055 * linear.clamp_min(0.0031308) ** (1 / 2.4) - 0.055, 12.92 * linear
    ).clamp(0, 1)


@torch.no_grad()
def split_colours(images: Tensor, space: str) -> tuple[Tensor, Tensor]:
    """Split images (..., 3, H, W) into their brightness and their colours, as images again.

    Args:
        images: in [0, 1].
        space: ``lab``: grey of the same L, and the same a and b at L = 50; ``ycbcr``: the weighted
            mean of the channels, and the channels less that mean, around one half.

    Returns:
        Two of the same shape, in [0, 1].
    """
    if space == "lab":
        level, a, b = rgb_to_lab(images).unbind(dim=-3)
        zero = torch.zeros_like(level)
        bright = lab_to_rgb(torch.stack((level, zero, zero), dim=-3))
        return bright, lab_to_rgb(torch.stack((zero + 50, a, b), dim=-3))
    if space != "ycbcr":
        raise ValueError(f"space is {space!r}, but must be lab or ycbcr")
    grey = _mix(images, ((0.299, 0.587, 0.114),) * 3)
    return grey, (images - grey + 0.5).clamp(0, 1)
