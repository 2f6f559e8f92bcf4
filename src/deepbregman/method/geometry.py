"""Geometric operators and blur on a batch of images, each image with its own parameters.

Each equals torchvision's functional operator on float images.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def crop_boxes(
    area: Tensor,
    aspect: Tensor,
    position: Tensor,
    sizes: Tensor,
    area_range: tuple[float, float],
    aspect_range: tuple[float, float],
) -> Tensor:
    """Choose crop boxes as torchvision's RandomResizedCrop does, all its attempts at once.

    Args:
        area: (M, N, attempts) uniforms in [0, 1).
        aspect: (M, N, attempts) uniforms in [0, 1).
        position: (M, N, 2) uniforms in [0, 1).
        sizes: (N, 2) height and width of each image.
        area_range: Least and greatest share of the image's area.
        aspect_range: Least and greatest width / height.

    Returns:
        (M, N, 4) int64: top, left, height and width of a box within the image.
    """
    smallest, largest = area_range
    narrow, wide = aspect_range
    image_height, image_width = sizes.float().unbind(-1)  # (N,) each
    pixels = (image_height * image_width).unsqueeze(-1) * (smallest + (largest - smallest) * area)
    ratio = torch.exp(math.log(narrow) + math.log(wide / narrow) * aspect)
    sides = torch.stack((pixels / ratio, pixels * ratio), dim=-1).sqrt().round()
    valid = ((sides > 0) & (sides <= sizes.unsqueeze(-2))).all(dim=-1)  # (M, N, attempts)
    first = valid.int().argmax(dim=-1)[..., None, None]  # argmax takes the first of equals
    chosen = sides.gather(-2, first.expand(-1, -1, 1, 2)).squeeze(-2)  # (M, N, 2)
    # Where no attempt was valid: the greatest central box whose aspect is within the range.
    found = valid.any(dim=-1, keepdim=True)
    limits = torch.stack((image_width / narrow, image_height * wide), dim=-1).round().clamp_min(1)
    chosen = torch.where(found, chosen, torch.minimum(sizes, limits))
    free = sizes - chosen
    random = torch.minimum((position * (free + 1)).floor(), free)
    start = torch.where(found, random, (free / 2).floor())
    return torch.cat((start, chosen), dim=-1).long()


def resample(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    height: Tensor,
    width: Tensor,
    size: int,
    flipped: Tensor | None = None,
) -> Tensor:
    """Crop and resize as two batched matrix products, one along each side.

    Args:
        images: (N, C, H, W) uint8.
        top: (M, N), and so are left, height, width and flipped (bool).
        left: Left edge of the box.
        height: Height of the box.
        width: Width of the box.
        size: Height and width of the result.
        flipped: Which results to mirror, left to right; None for none.

    Returns:
        (M, N, C, size, size) float32 in [0, 1] up to rounding, contiguous.
    """
    num_views, num_images = top.shape
    channels = images.shape[1]
    mirror = None if flipped is None else flipped.T
    rows = _triangle_weights(top.T, height.T, size, images.shape[2]).div_(255)  # (N, M, size, H)
    columns = _triangle_weights(left.T, width.T, size, images.shape[3], mirror)  # (N, M, size, W)
    # With rows outside channels both products work on whole matrices, all views of an image share
    # the image, and nothing is copied between them.
    source = images.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    half = torch.bmm(rows.flatten(1, 2), source.flatten(2))  # (N, M * size, C * W)
    half = half.view(num_images * num_views, size * channels, -1)
    full = torch.bmm(half, columns.flatten(0, 1).mT)  # (N * M, size * C, size)
    full = full.view(num_images, num_views, size, channels, size)
    return full.permute(1, 0, 3, 2, 4).contiguous()  # (M, N, C, size, size)


def _triangle_weights(
    start: Tensor, extent: Tensor, size: int, length: int, mirrored: Tensor | None = None
) -> Tensor:
    """Return the weights (..., size, length) with which each source pixel enters each target pixel.

    It is bilinear interpolation with antialiasing: a triangle around the target's centre, reaching
    one source pixel or, when shrinking, one target pixel; cut off at the box's edges, normalised.
    ``start``, ``extent`` and ``mirrored`` (...) are the box's, along one side.
    """
    extent = extent.float()[..., None, None]  # (..., 1, 1)
    scale = extent / size
    source = torch.arange(length, device=start.device) + 0.5 - start[..., None, None]
    # A pixel outside the box is infinitely far away, which gives it the weight 0.
    source = torch.where((source > 0) & (source < extent), source, torch.inf)  # (..., 1, length)
    target = torch.arange(size, device=start.device).unsqueeze(-1) + 0.5  # (size, 1)
    if mirrored is not None:
        target = torch.where(mirrored[..., None, None], size - target, target)
    distance = (source - target * scale).abs_().div_(scale.clamp_min(1))  # (..., size, length)
    weights = distance.neg_().add_(1).clamp_min_(0)
    return weights.div_(weights.sum(dim=-1, keepdim=True))


def rotate(images: Tensor, angle: Tensor) -> Tensor:
    """Rotate square ``images`` (B, C, H, H) by ``angle`` (B,) degrees; what comes in is black."""
    cosine, sine = angle.deg2rad().cos(), angle.deg2rad().sin()
    zero = torch.zeros_like(sine)
    matrix = torch.stack((cosine, -sine, zero, sine, cosine, zero), dim=-1).view(-1, 2, 3)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def blur(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Blur ``images`` (B, C, H, H) by Gaussians of ``sigma`` (B,), reflecting at the edges.

    Sigma 0 changes nothing. The kernel, 2 * radius + 1 pixels wide, becomes a matrix: a pixel
    enters a target at its own distance and at those of its reflections in the two edges.
    """
    last = images.shape[-1] - 1
    index = torch.arange(last + 1, device=images.device)
    row, column = index.unsqueeze(1), index
    precision = 0.5 / sigma.square().clamp_min(1e-12).view(-1, 1, 1)
    # The pixels of the edges themselves are not repeated, so they have no reflection in their edge.
    weights = torch.zeros((), device=images.device)
    for distance, exists in (
        (row - column, column >= 0),
        (row + column, column > 0),
        (2 * last - row - column, column < last),
    ):
        reached = (distance.abs() <= radius) & exists  # (H, H)
        weights = weights + torch.exp(-precision * distance.square()) * reached  # (B, H, H)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    blurred = torch.bmm(images.flatten(1, 2), weights.mT).view_as(images)
    return torch.matmul(weights.unsqueeze(1), blurred)
