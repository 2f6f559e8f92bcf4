"""Mean and deviation of each colour channel."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from deepbregman.data.frames import UnreadableImage, decode_into
from deepbregman.data.images import ArrayImages, FileImages, Images

Triple = tuple[float, float, float]
_CHUNK = 64
_MAX_ARRAYS, _MAX_FILES = 10_000, 1_000  # files are decoded for it, and are larger
_SMALLEST_DEVIATION = 1 / 255
"""Also the deviation of a constant channel, so that dividing by it is safe."""


def channel_statistics(
    images: Images,
    *,
    max_images: int | None = None,
    seed: int = 0,
    skip_unreadable: bool = False,
) -> tuple[Triple, Triple]:
    """Measure each channel over the true pixels of the images, padding excluded.

    Args:
        images: The training images.
        max_images: Measure a seeded subset of this many where there are more; by default 10,000
            of an array and 1,000 files.
        seed: Of that subset.
        skip_unreadable: Leave unreadable files out instead of stopping at the first.

    Returns:
        The mean and the standard deviation (never below 1/255) of red, green and blue, with
        pixels in [0, 1].

    Raises:
        UserError: When a file cannot be read.
    """
    if max_images is None:
        max_images = _MAX_FILES if isinstance(images, FileImages) else _MAX_ARRAYS
    if len(images) > max_images:
        chosen = np.random.RandomState(seed).permutation(len(images))[:max_images]
        indices = torch.from_numpy(np.sort(chosen))
    else:
        indices = torch.arange(len(images))
    count, total, squares = 0, torch.zeros(3).double(), torch.zeros(3).double()
    for pixels, num_pixels in _chunks(images, indices, skip_unreadable):
        values = pixels.double()  # (n, 3, H, W); padding is zero, so it adds nothing to the sums
        total += values.sum(dim=(0, 2, 3))
        squares += values.square().sum(dim=(0, 2, 3))
        count += num_pixels
    mean = total / max(count, 1)
    deviation = (squares / max(count, 1) - mean.square()).clamp_min(0).sqrt() / 255
    return _triple(mean / 255), _triple(deviation.clamp_min(_SMALLEST_DEVIATION))


def _triple(values: Tensor) -> Triple:
    red, green, blue = values.tolist()
    return red, green, blue


def _chunks(images: Images, indices: Tensor, skip: bool) -> Iterator[tuple[Tensor, int]]:
    """Yield the chosen images, a few at a time, with their number of true pixels."""
    for part in torch.split(indices, _CHUNK):
        if isinstance(images, FileImages):
            yield _decoded(images.select(part), skip)
            continue
        chunk: ArrayImages = images.select(part)
        height, width = chunk.pixels.shape[2:]
        if chunk.sizes is None:
            yield chunk.pixels, len(chunk) * height * width
        else:
            yield chunk.pixels, int(chunk.sizes.prod(dim=1).sum())


def _decoded(images: FileImages, skip: bool) -> tuple[Tensor, int]:
    pixels = np.zeros((len(images), images.side, images.side, 3), dtype=np.uint8)
    num_pixels = 0
    for size in decode_into(images.paths, pixels):
        if not isinstance(size, UnreadableImage):
            num_pixels += size[0] * size[1]
        elif not skip:
            raise size
    return torch.from_numpy(pixels).permute(0, 3, 1, 2), num_pixels
