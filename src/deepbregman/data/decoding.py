"""Decode an image file into a uint8 frame, whatever its format; needs no torch."""

import functools
import importlib
import io
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from deepbregman.data.folders import HAS_HEIF
from deepbregman.errors import UserError

if TYPE_CHECKING:
    from deepbregman.data.images import ImagePlace

Pixels = npt.NDArray[np.uint8]

_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF", "AVIF")
_MAX_PIXELS = 89_478_485  # Pillow's own limit, a quarter of a GiB at three bytes a pixel
_DRAFT_MARGIN = 2  # a JPEG is decoded at no less than twice the wanted size, then resampled
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
def _list_formats() -> tuple[str, ...]:
    """Return the formats that can be read, including that of the plug-in for HEIC.

    Nothing else is tried: a PostScript file named .jpg must not start an interpreter.
    """
    if HAS_HEIF:
        importlib.import_module("pillow_heif").register_heif_opener()
    return (*_FORMATS, "HEIF") if HAS_HEIF else _FORMATS


class UnreadableImage(UserError):
    """A file that cannot be read as an image; the message names it."""

    reason: str = ""
    """Why not, without the name."""


def fit_size(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the size shrunk, never enlarged, so that its longer side is at most ``side``."""
    longer = max(height, width)
    if longer <= side:
        return height, width
    return max(1, round(height * side / longer)), max(1, round(width * side / longer))


def read_size(path: "ImagePlace") -> tuple[int, int]:
    """Return an image's height and width from its header, before any EXIF rotation."""
    with _open_image(path) as image:
        return image.height, image.width


def decode_whole(path: Path) -> Pixels:
    """Decode a file to RGB (3, H, W) at its own size and as it is stored.

    The EXIF orientation is not applied: boxes are drawn in the coordinates of the stored pixels.
    """
    with _open_image(path) as image:
        image.load()
        return np.array(_to_rgb(image)).transpose(2, 0, 1)


def decode_image(place: "ImagePlace", side: int) -> Pixels:
    """Decode an image to RGB (H, W, 3), shrunk until its longer side is at most ``side``.

    The EXIF orientation is applied. Transparency is laid over white, 16-bit greys are scaled to
    8 bits, and an image of several pages or frames gives its first.

    Raises:
        UnreadableImage: When the image cannot be decoded in full.
    """
    with _open_image(place) as image:
        pixels = _decode_shrunk(image, side)
        method = _TRANSPOSE.get(_read_orientation(image))
        if method is None:
            return pixels
        return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).transpose(method))


def measure_decoded(place: "ImagePlace", side: int) -> tuple[int, int]:
    """Decode an image as :func:`decode_image`, and return its height and width."""
    height, width = decode_image(place, side).shape[:2]
    return height, width


def decode_to(place: "ImagePlace", frame: Pixels) -> tuple[int, int]:
    """Decode an image, top left in a frame (side, side, 3) whose rest becomes black.

    Returned are its height and width in the frame, which stays untouched when it cannot be read.
    """
    pixels = decode_image(place, len(frame))
    height, width = pixels.shape[:2]
    frame[:height, :width] = pixels
    frame[:height, width:] = 0
    frame[height:] = 0
    return height, width


def _decode_shrunk(image: Image.Image, side: int) -> Pixels:
    """Decode to RGB (H, W, 3), whose longer side is at most ``side``; nothing is turned."""
    stored = image.size
    target = fit_size(image.height, image.width, side)
    box: tuple[float, float, float, float] | None = None
    if target != (image.height, image.width):
        wanted = (target[1] * _DRAFT_MARGIN, target[0] * _DRAFT_MARGIN)
        draft = image.draft(None, wanted)
        box = None if draft is None else draft[1]
    if image.size == stored and (pixels := _decode_jpeg(image)) is not None:
        return _shrink(pixels, target)
    image.load()
    colour = _to_rgb(image)
    if box is not None and box != (0, 0, *colour.size):  # a fraction that ends within a pixel
        colour = colour.resize((target[1], target[0]), Image.Resampling.BILINEAR, box=box)
    return _shrink(colour, target)


def _decode_jpeg(image: Image.Image) -> Pixels | None:
    """Return the pixels (H, W, 3) of a JPEG file in colour; None where Pillow must read the image.

    They are Pillow's in less time: it keeps four bytes for each pixel, and copies them.
    """
    if not isinstance(image, ImageFile.ImageFile) or image.fp is None:
        return None
    if image.format != "JPEG" or image.mode != "RGB":
        return None
    image.fp.seek(0)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(image.fp.read())
    except ValueError:  # damaged, or of a rare kind: Pillow decides
        return None
    return pixels


def _has_fast_kernel() -> bool:
    """Whether torch shrinks bytes faster than Pillow: on ARM it takes three times as long.

    torch is not loaded for this, which would take far longer than to shrink some images by Pillow.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _shrink(image: Image.Image | Pixels, target: tuple[int, int]) -> Pixels:
    """Resize to (H, W, 3) with antialiasing by Pillow's filter, or torch's kernel of the same."""
    size = (image.height, image.width) if isinstance(image, Image.Image) else image.shape[:2]
    if size == target:
        return np.asarray(image)
    if 1 in target or not _has_fast_kernel():  # torch's kernel repeats the first pixel on some CPUs
        picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
        return np.asarray(picture.resize((target[1], target[0]), Image.Resampling.BILINEAR))
    import torch
    from torch.nn import functional

    pixels = np.require(np.asarray(image), requirements="W")  # torch wants to be able to write
    batch = torch.from_numpy(pixels).permute(2, 0, 1)[None]  # (1, 3, H, W), channels last
    resized = functional.interpolate(batch, target, mode="bilinear", antialias=True)
    shrunk: Pixels = resized[0].permute(1, 2, 0).numpy()
    return shrunk


@contextmanager
def silence_pillow() -> Iterator[None]:
    """Silence Pillow's warnings about odd metadata; what matters is raised as an error here.

    Entered once around many files, by the thread that owns the pool: the filters are global.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def _open_encoded(place: "ImagePlace") -> Image.Image:
    if isinstance(place, Path):
        if not stat.S_ISREG(place.stat().st_mode):  # a pipe would be waited for, perhaps for ever
            raise ValueError("not a regular file")
        return Image.open(place, formats=_list_formats())
    found = place.read()
    if isinstance(found, bytes):
        return Image.open(io.BytesIO(found), formats=_list_formats())
    return found


@contextmanager
def _open_image(path: "ImagePlace") -> Iterator[Image.Image]:
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
            reason = "not an image that Pillow can read, or damaged from its first bytes"
        what, fix = ("image file", "the file") if isinstance(path, Path) else ("image", "it")
        advice = (
            f"replace or remove {fix}, or leave such files out with --skip-unreadable, in a study "
            "or a search with --set data.skip_unreadable=true"
        )
        if not isinstance(path, Path):
            advice = getattr(path.store, "advice", advice)
        unreadable = UnreadableImage(f"{what} {str(path)!r}: cannot be read ({reason}); {advice}")
        unreadable.reason = reason
        raise unreadable from error


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
        scaled = (values.astype(np.uint32) * 255 + 32767) // 65535  # products are below 2^24
        return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        colour = Image.alpha_composite(Image.new("RGBA", colour.size, "white"), colour)
        return colour.convert("RGB")
    return image.convert("RGB")


def _read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 if it is missing or damaged."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the pixels are fine: a broken note about them is no reason to refuse them
        return 1
