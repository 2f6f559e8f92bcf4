"""Decode image files into uint8 frames, one or many at once, and measure their colours."""

import functools
import importlib
import io
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

from deepbregman.data.folders import HAS_AVIF, HAS_HEIF
from deepbregman.data.images import FileImages, ImagePlace, Images, Progress
from deepbregman.errors import UserError
from deepbregman.terminal import ignore_progress

Item = TypeVar("Item")
Result = TypeVar("Result")
Pixels = npt.NDArray[np.uint8]
Sizes = npt.NDArray[np.int64]
"""Height and width of each image."""
Triple = tuple[float, float, float]

_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF")
_MAX_PIXELS = 89_478_485  # Pillow's own limit, a quarter of a GiB at three bytes a pixel
_DRAFT_MARGIN = 2  # a JPEG is decoded at no less than twice the wanted size, then resampled
_CHUNK = 4096  # files handed to the threads at a time, so that a million need no million futures
_MEASURED_CHUNK = 64
_MEASURED_ARRAYS, _MEASURED_FILES = 10_000, 1_000  # files must be decoded, and are larger
_SMALLEST_DEVIATION = 1 / 255  # also of a constant channel, so that dividing by it is safe
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return the formats that are read, with those of a plug-in where it is installed.

    Nothing else is tried: a PostScript file named .jpg must not start an interpreter.
    """
    if HAS_HEIF:
        importlib.import_module("pillow_heif").register_heif_opener()
    return (*_FORMATS, *(("AVIF",) if HAS_AVIF else ()), *(("HEIF",) if HAS_HEIF else ()))


class UnreadableImage(UserError):
    """A file that cannot be read as an image; the message names it."""


class Frame(NamedTuple):
    """A decoded image in its frame."""

    pixels: Pixels
    """(3, side, side), the image top left, zeros elsewhere."""
    size: tuple[int, int]


def fit_size(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the size shrunk, never enlarged, so that its longer side is at most ``side``."""
    longer = max(height, width)
    if longer <= side:
        return height, width
    return max(1, round(height * side / longer)), max(1, round(width * side / longer))


def read_size(path: ImagePlace) -> tuple[int, int]:
    """Return an image's height and width from its header, before any EXIF rotation."""
    with _open_image(path) as image:
        return image.height, image.width


def decode_frame(path: ImagePlace, side: int) -> Frame:
    """Decode a file to RGB in a ``side`` by ``side`` frame of its own; see :func:`decode_to`."""
    pixels = np.zeros((side, side, 3), dtype=np.uint8)
    size = decode_to(path, pixels)
    return Frame(pixels.transpose(2, 0, 1), size)


def decode_whole(path: Path) -> Pixels:
    """Decode a file to RGB (3, H, W) at its own size and as it is stored.

    The EXIF orientation is not applied: boxes are drawn in the coordinates of the stored pixels.
    """
    with _open_image(path) as image:
        image.load()
        return np.array(_to_rgb(image)).transpose(2, 0, 1)


def decode_to(path: ImagePlace, frame: Pixels) -> tuple[int, int]:
    """Decode a file to RGB, top left in a frame of zeros.

    The EXIF orientation is applied. Transparency is laid over white, 16-bit greys are scaled to
    8 bits, and an image of several pages or frames gives its first.

    The frame is (side, side, 3), the order in which decoders give pixels, and stays untouched when
    the file cannot be read. Returned are the height and width of the image in it.

    Raises:
        UnreadableImage: When the file cannot be decoded in full.
    """
    side = len(frame)
    with _open_image(path) as image:
        target = fit_size(image.height, image.width, side)
        box: tuple[float, float, float, float] | None = None
        if target != (image.height, image.width):
            wanted = (target[1] * _DRAFT_MARGIN, target[0] * _DRAFT_MARGIN)
            draft = image.draft(None, wanted)
            box = None if draft is None else draft[1]
        image.load()
        if box is None:  # loading may rotate (TIFF), so the header's size may not be the image's
            target = fit_size(image.height, image.width, side)
        colour = _to_rgb(image)
        if box is not None and box != (0, 0, *colour.size):  # a fraction that ends within a pixel
            colour = colour.resize((target[1], target[0]), Image.Resampling.BILINEAR, box=box)
        method = _TRANSPOSE.get(_read_orientation(image))
        pixels = _shrink(colour, target)
        if method is not None:
            turned = Image.fromarray(np.ascontiguousarray(pixels)).transpose(method)
            pixels = np.asarray(turned)
        height, width = pixels.shape[:2]
        frame[:height, :width] = pixels
        return height, width


@functools.cache
def _has_fast_kernel() -> bool:
    """Whether torch shrinks bytes faster than Pillow: on ARM it takes three times as long."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _shrink(image: Image.Image, target: tuple[int, int]) -> Pixels:
    """Resize to (H, W, 3) with antialiasing by Pillow's filter, or torch's kernel of the same."""
    if (image.height, image.width) == target:
        return np.array(image)
    if 1 in target or not _has_fast_kernel():  # torch's repeats the first pixel on some CPUs
        return np.asarray(image.resize((target[1], target[0]), Image.Resampling.BILINEAR))
    batch = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]  # (1, 3, H, W), channels last
    resized = functional.interpolate(batch, target, mode="bilinear", antialias=True)
    shrunk: Pixels = resized[0].permute(1, 2, 0).numpy()
    return shrunk


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


@contextmanager
def silence_pillow() -> Iterator[None]:
    """Silence Pillow's warnings about odd metadata; what matters is raised as an error here.

    Entered once around many files, by the thread that owns the pool: the filters are global.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def _open_encoded(place: ImagePlace) -> Image.Image:
    if isinstance(place, Path):
        if not stat.S_ISREG(place.stat().st_mode):  # a pipe would be waited for, perhaps for ever
            raise ValueError("not a regular file")
        return Image.open(place, formats=_formats())
    found = place.read()
    return Image.open(io.BytesIO(found), formats=_formats()) if isinstance(found, bytes) else found


@contextmanager
def _open_image(path: ImagePlace) -> Iterator[Image.Image]:
    """Open an image for a ``with`` block; any error in the block becomes UnreadableImage."""
    try:
        with _open_encoded(path) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise Image.DecompressionBombError(
                    f"{image.width} x {image.height} pixels, more than {_MAX_PIXELS:,} are refused"
                )
            yield image
    except Exception as error:  # decoders of damaged files raise nearly everything there is
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image, or damaged from its first bytes"
        what, fix = ("image file", "the file") if isinstance(path, Path) else ("image", "it")
        advice = f"replace or remove {fix}, or leave such files out with --skip-unreadable"
        if not isinstance(path, Path):
            advice = getattr(path.store, "advice", advice)
        raise UnreadableImage(
            f"{what} {str(path)!r}: cannot be read ({reason}); {advice}"
        ) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB, transparency over white."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits in one of several byte orders, or in 32 bits
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("grey values outside 0..65535; save it with 8 or 16 bits")
        scaled = (values.astype(np.uint32) * 255 + 32767) // 65535  # at most 2^24, in 4 bytes each
        return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        colour = Image.alpha_composite(Image.new("RGBA", colour.size, "white"), colour)
        return colour.convert("RGB")
    return image.convert("RGB")


def _read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 where there is none or where the EXIF block is damaged."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the pixels are fine: a broken note about them is no reason to refuse them
        return 1


def channel_statistics(
    images: Images,
    *,
    max_images: int | None = None,
    skip_unreadable: bool = False,
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
    if len(images) > max_images:
        chosen = np.random.RandomState(0).permutation(len(images))[:max_images]
        indices = torch.from_numpy(np.sort(chosen))
    else:
        indices = torch.arange(len(images))
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
