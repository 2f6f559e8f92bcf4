"""Patches of images, for methods that look at parts: shuffled ones, and overlapping ones."""

import torch
from torch import Tensor


@torch.no_grad()
def shuffle_patches(
    images: Tensor, order: Tensor, position: Tensor, grid: int, side: int
) -> Tensor:
    """Cut images into cells, take a patch somewhere in each, and shuffle the patches.

    Args:
        images: (B, C, S, S)
        order: (B, P) uniforms in [0, 1), P = grid ** 2; their ranks shuffle the patches.
        position: (B, P, 2) uniforms in [0, 1): where in the cell the patch lies.
        grid: cells along each side; pixels that are left over at the bottom and right are lost.
        side: of a patch, at most that of a cell.

    Returns:
        (B, P, C, side, side): patch i is taken from the cell of the i-th smallest of ``order``.
    """
    cell = images.shape[-1] // grid
    picked = order.argsort(dim=1)  # (B, P)
    free = cell - side + 1
    start = (position * free).floor().long().clamp_max(free - 1)  # (B, P, 2)
    corner = torch.stack((picked // grid, picked % grid), dim=-1) * cell + start  # (B, P, 2)
    steps = torch.arange(side, device=images.device)
    rows, columns = corner[..., 0, None] + steps, corner[..., 1, None] + steps  # (B, P, side)
    batch = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    patches = images.movedim(1, -1)[batch, rows[..., :, None], columns[..., None, :]]
    return patches.movedim(-1, 2)  # (B, P, C, side, side)


def cut_patches(images: Tensor, side: int, stride: int) -> Tensor:
    """Cut overlapping patches out of images (B, C, S, S); return (B, G, G, C, side, side).

    Pixels that are left over at the bottom and right are lost.
    """
    patches = images.unfold(2, side, stride).unfold(3, side, stride)  # (B, C, G, G, side, side)
    return patches.movedim(1, 3)
