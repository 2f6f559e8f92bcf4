"""Colour operators on a batch of float images in [0, 1], each image with its own parameters.

Each equals torchvision's functional operator on float images. Images have one channel or three;
with one, saturation, hue and greyscale change nothing, as in torchvision.
"""

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def luminance(images: Tensor) -> Tensor:
    """Return ``images`` (B, C, H, W) in grey, (B, 1, H, W), with torchvision's weights."""
    if images.shape[1] == 1:
        return images
    red, green, blue = torch.split(images, 1, dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def greyscale(images: Tensor, grey: Tensor) -> Tensor:
    """Make the images (B, C, H, W) grey where ``grey`` (B,) is true."""
    return torch.where(grey.view(-1, 1, 1, 1), luminance(images), images)


def jitter(images: Tensor, factors: Tensor, hue: Tensor | None, order: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, in each image's own order.

    Doing all four operators at each of the four steps and keeping one would cost sixteen. Instead
    the three blends, which differ only in their target, fill three slots in the image's order, and
    hue is done once for all, between the slots before it and those after. A slot on the wrong side
    of hue gets factor 1, which changes nothing.

    Args:
        images: (B, C, H, W) in [0, 1], contiguous; overwritten.
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
    if images.shape[1] == 1:
        factors = torch.where(operators == SATURATION, 1.0, factors)
        hue = None
    if hue is None:
        return _blends(images, factors, operators)
    early = slots < hue_step
    images = _blends(images, torch.where(early, factors, 1.0), operators)
    images = _shift_hue(images, hue)
    return _blends(images, torch.where(early, 1.0, factors), operators)


def _blends(images: Tensor, factors: Tensor, operators: Tensor) -> Tensor:
    """Blend ``images`` (B, C, H, W) in place, slot by slot; factors and operators are (B, 3)."""
    for slot in range(3):
        operator = operators[:, slot].view(-1, 1, 1, 1)
        grey = luminance(images)
        level = grey.mean(dim=(-2, -1), keepdim=True) * (operator == CONTRAST)  # 0 for brightness
        target = torch.where(operator == SATURATION, grey, level)  # (B, 1, H, W)
        # Torchvision's factor * images + (1 - factor) * target in one pass.
        images.lerp_(target, 1 - factors[:, slot].view(-1, 1, 1, 1)).clamp_(0, 1)
    return images


def _shift_hue(images: Tensor, hue: Tensor) -> Tensor:
    """Turn the hue of ``images`` (B, 3, H, W) by ``hue`` (B,) turns; value and saturation stay."""
    red, green, blue = images.unbind(dim=1)  # (B, H, W) each
    # Much faster on the CPU than aminmax over so short a dimension.
    low = torch.minimum(red, green).minimum(blue)
    high = torch.maximum(red, green).maximum(blue)
    chroma = high - low
    divisor = chroma.clamp_min(1e-20)  # where chroma is 0 any hue will do: it is multiplied by 0
    sextant = torch.where(
        high == red,
        (green - blue).div_(divisor),
        torch.where(
            high == green,
            (blue - red).div_(divisor).add_(2),
            (red - green).div_(divisor).add_(4),
        ),
    )
    sextant = sextant.add_(6 * hue.view(-1, 1, 1)).remainder_(
        6
    )  # in [0, 6): 0 red, 2 green, 4 blue
    # How far each channel stands between low and high is a trapezoid of the distance to its colour;
    # red lies at both ends of the circle, so its distance is taken from the opposite side.
    shares = (
        (sextant - 3).abs_().sub_(1),
        (sextant - 2).abs_().neg_().add_(2),
        (sextant - 4).abs_().neg_().add_(2),
    )
    return torch.stack([torch.addcmul(low, chroma, x.clamp_(0, 1)) for x in shares], dim=1)
