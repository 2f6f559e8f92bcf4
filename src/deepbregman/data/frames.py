"""Decode many image files into uint8 frames at once, and measure their colours."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepbregman.data.decoding import Pixels, UnreadableImage, decode_to, silence_pillow
from deepbregman.data.images import FileImages, ImagePlace, Images, Progress
from deepbregman.terminal import ignore_progress

Item = TypeVar("Item")
Result = TypeVar("Result")
Sizes = npt.NDArray[np.int64]
"""Height and width of each image."""
Triple = tuple[float, float, float]

_CHUNK = 4096  # files handed to the threads at a time, so that a million need no million futures
_MEASURED_CHUNK = 64
_MEASURED_ARRAYS, _MEASURED_FILES = 10_000, 1_000  # files must be decoded, and are larger
_SMALLEST_DEVIATION = 1 / 255  # also of a constant channel, so that dividing by it is safe


def _decode_all(
    paths: Sequence[ImagePlace], side: int
) -> tuple[Pixels, list[tuple[int, int] | UnreadableImage]]:
    """Decode files into frames (N, side, side, 3); return the size of each, or why it has none."""
    frames = np.zeros((len(paths), side, side, 3), dtype=np.uint8)
    pairs = list(zip(paths, frames, strict=True))
    return frames, map_files(lambda pair: decode_to(*pair), pairs)


def map_files(
    function: Callable[[Item], Result], items: Sequence[Item], progress: Progress = ignore_progress
) -> list[Result | UnreadableImage]:
    """Return for each item the result of ``function``, or the UnreadableImage that it raised."""

    def attempt(item: Item) -> Result | UnreadableImage:
        try:
            return function(item)
        except UnreadableImage as error:
            return error

    results: list[Result | UnreadableImage] = []
    with silence_pillow(), ThreadPoolExecutor() as pool:
        for start in range(0, len(items), _CHUNK):
            results.extend(pool.map(attempt, items[start : start + _CHUNK]))
            progress(len(results), len(items))
    return results


def collect_sizes(
    results: Sequence[tuple[int, int] | UnreadableImage], skip_unreadable: bool
) -> Sizes:
    """Return sizes (N, 2), 0 and 0 for a file that cannot be read; or raise the first of these."""
    errors = [result for result in results if isinstance(result, UnreadableImage)]
    if errors and not skip_unreadable:
        raise errors[0]
    sizes = [(0, 0) if isinstance(result, UnreadableImage) else result for result in results]
    return np.array(sizes, dtype=np.int64).reshape(-1, 2)


def replace_unreadable(pixels: Pixels, sizes: Sizes, broken: Sequence[int]) -> None:
    """Put the nearest following readable image in the place of each broken one, in place.

    After the last image the first follows. Not all may be broken.
    """
    num_images, missing = len(pixels), set(broken)
    for position in broken:
        donor = (position + 1) % num_images
        while donor in missing:
            donor = (donor + 1) % num_images
        pixels[position], sizes[position] = pixels[donor], sizes[donor]


def decode_frames(
    paths: Sequence[ImagePlace], side: int, skip_unreadable: bool
) -> tuple[Pixels, Sizes, list[int]]:
    """Decode files with a pool of threads; where allowed, replace unreadable ones by others.

    Returns:
        Frames (N, side, side, 3), sizes (N, 2), and the positions of replaced images.

    Raises:
        UnreadableImage: When a file cannot be read and ``skip_unreadable`` is not set, or none can.
    """
    frames, results = _decode_all(paths, side)
    sizes = collect_sizes(results, skip_unreadable)
    broken = np.flatnonzero(sizes[:, 0] == 0).tolist()
    if broken and len(broken) == len(paths):
        collect_sizes(results, skip_unreadable=False)
    replace_unreadable(frames, sizes, broken)
    return frames, sizes, broken


def channel_statistics(
    images: Images, *, max_images: int | None = None, skip_unreadable: bool = False
) -> tuple[Triple, Triple]:
    """Measure each channel over the true pixels of the images, padding excluded.

    Args:
        max_images: Where there are more, measure a random subset of this many, always the same;
            by default 10,000 of an array and 1,000 files.

    Returns:
        The mean and the standard deviation (never below 1/255) of red, green and blue, with
        pixels in [0, 1].
    """
    if max_images is None:
        max_images = _MEASURED_FILES if isinstance(images, FileImages) else _MEASURED_ARRAYS
    chosen = np.random.RandomState(0).permutation(len(images))[:max_images]
    indices = torch.from_numpy(np.sort(chosen))
    count, total, squares = 0, torch.zeros(3).double(), torch.zeros(3).double()
    for part in torch.split(indices, _MEASURED_CHUNK):
        pixels, num_pixels = _read_pixels(images.select(part), skip_unreadable)
        values = pixels.double()  # (n, 3, H, W); padding is zero, so it adds nothing to the sums
        total += values.sum(dim=(0, 2, 3))
        squares += values.square().sum(dim=(0, 2, 3))
        count += num_pixels
    mean = total / max(count, 1)
    deviation = (squares / max(count, 1) - mean.square()).clamp_min(0).sqrt() / 255
    red, green, blue = (mean / 255).tolist()
    deviations = deviation.clamp_min(_SMALLEST_DEVIATION).tolist()
    return (red, green, blue), (deviations[0], deviations[1], deviations[2])


def _read_pixels(images: Images, skip_unreadable: bool) -> tuple[Tensor, int]:
    """Return the pixels of a few images (n, 3, H, W), and how many are not padding."""
    if not isinstance(images, FileImages):
        return images.pixels, int(images.true_sizes().prod(dim=1).sum())
    frames, results = _decode_all(images.paths, images.side)
    num_pixels = int(collect_sizes(results, skip_unreadable).prod(axis=1).sum())
    return torch.from_numpy(frames).permute(0, 3, 1, 2), num_pixels
