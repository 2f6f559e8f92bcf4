"""Patches and colour spaces, against one image at a time and against the standards' formulas."""

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as reference

from deepbregman.method.colours import lab_to_rgb, rgb_to_lab, split_colours
from deepbregman.method.patches import shuffle_patches


def uniform(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("size", "grid", "side"), [(8, 2, 3), (11, 3, 3), (12, 3, 2)])
def test_patches_are_crops_of_their_cells(size, grid, side):
    images, order = uniform(5, 3, size, size), uniform(5, grid**2, seed=1)
    position = uniform(5, grid**2, 2, seed=2)
    found = shuffle_patches(images, order, position, grid, side)
    cell = size // grid
    seen = set()
    for image in range(5):
        ranked = sorted(range(grid**2), key=lambda place: float(order[image, place]))
        for place, source in enumerate(ranked):
            top, left = (
                cell * at + int(u * (cell - side + 1))
                for at, u in zip(divmod(source, grid), position[image, place].tolist(), strict=True)
            )
            seen.add((top - cell * (source // grid), left - cell * (source % grid)))
            expected = reference.crop(images[image], top, left, side, side)
            assert torch.equal(found[image, place], expected)
    assert len(seen) == (cell - side + 1) ** 2  # every place in a cell occurs


def lab_of(red: float, green: float, blue: float) -> tuple[float, float, float]:
    """CIE 15 and IEC 61966-2-1, one pixel at a time."""
    r, g, b = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
    )
    xyz = (
        (0.412453 * r + 0.357580 * g + 0.180423 * b) / 0.95047,
        0.212671 * r + 0.715160 * g + 0.072169 * b,
        (0.019334 * r + 0.119193 * g + 0.950227 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_lab_is_the_standards():
    images = torch.cat([uniform(4, 3, 3, 3), 0.02 * uniform(2, 3, 3, 3, seed=1)])  # also dark ones
    found = rgb_to_lab(images)
    for pixel, expected in zip(
        found.movedim(1, -1).reshape(-1, 3), images.movedim(1, -1).reshape(-1, 3), strict=True
    ):
        assert pixel.tolist() == pytest.approx(lab_of(*expected.tolist()), abs=1e-4)
    torch.testing.assert_close(lab_to_rgb(found), images, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("rgb", "lab"),
    [
        ((1.0, 1.0, 1.0), (100.0, 0.0, 0.0)),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        ((1.0, 0.0, 0.0), (53.24, 80.09, 67.20)),
        ((0.0, 0.0, 1.0), (32.30, 79.19, -107.86)),
    ],
)
def test_known_colours(rgb, lab):
    pixel = torch.tensor(rgb, dtype=torch.float64).view(3, 1, 1)
    assert rgb_to_lab(pixel).flatten().tolist() == pytest.approx(lab, abs=0.02)


@pytest.mark.parametrize("space", ["lab", "ycbcr"])
def test_brightness_has_no_colour_and_colours_no_brightness(space):
    images = 0.35 + 0.3 * uniform(2, 5, 3, 4, 4)  # pale: none of its colours is cut off
    bright, colour = split_colours(images, space)
    assert bright.shape == colour.shape == images.shape
    assert float((bright - bright.mean(dim=2, keepdim=True)).abs().max()) < 1e-3  # grey
    if space == "lab":
        lab, of_bright, of_colour = (rgb_to_lab(part) for part in (images, bright, colour))
        torch.testing.assert_close(of_bright[:, :, 0], lab[:, :, 0], rtol=0.0, atol=1e-2)
        torch.testing.assert_close(of_colour[:, :, 1:], lab[:, :, 1:], rtol=0.0, atol=1e-2)
        torch.testing.assert_close(of_colour[:, :, 0], torch.full_like(lab[:, :, 0], 50.0))
    else:
        red, green, blue = images.unbind(dim=2)
        expected = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
        torch.testing.assert_close(bright[:, :, 1], expected)
        torch.testing.assert_close(bright + colour - 0.5, images)


@pytest.mark.parametrize("space", ["lab", "ycbcr"])
def test_colours_that_no_pixel_can_have_are_cut_off(space):
    images = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]).view(2, 3, 1, 1)  # blue and yellow
    bright, colour = split_colours(images, space)
    for part in (bright, colour):
        assert part.min() >= 0.0
        assert part.max() <= 1.0
    if space == "ycbcr":  # blue is 0.886 above its grey, yellow as far below
        expected = torch.tensor([[0.386, 0.386, 1.0], [0.614, 0.614, 0.0]])
        torch.testing.assert_close(colour.view(2, 3), expected)
    else:  # a blue of this brightness needs more than all blue, a yellow less than none
        assert colour[:, 2].flatten().tolist() == [1.0, 0.0]
