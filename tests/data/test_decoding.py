from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from deepbregman.data.decoding import fit_size

from .conftest import decode_frame


def _check(
    frame: tuple[np.ndarray, tuple[int, int]], expected: np.ndarray, side: int, levels: int = 0
) -> None:
    """Compare a frame with the (H, W, 3) pixels that it should hold, to so many grey levels."""
    pixels, (height, width) = frame
    assert (height, width) == expected.shape[:2]
    assert pixels.shape == (3, side, side)
    inside = pixels[:, :height, :width].astype(int)
    assert np.abs(inside - expected.transpose(2, 0, 1)).max() <= levels
    assert not pixels[:, height:].any()
    assert not pixels[:, :, width:].any()


@pytest.mark.parametrize(
    ("height", "width", "target"),
    [
        *((40, 20, (12, 6)), (20, 40, (6, 12)), (31, 31, (12, 12)), (13, 7, (12, 6))),
        *((100, 1, (12, 1)), (100, 5, (12, 1)), (1, 100, (1, 12)), (9, 110, (1, 12))),
    ],
)
def test_large_image_is_shrunk_as_pillow_does(tmp_path, save_picture, height, width, target):
    pixels = save_picture(tmp_path / "a.png", height=height, width=width)
    shrunk = Image.fromarray(pixels).resize(target[::-1], Image.Resampling.BILINEAR)
    _check(decode_frame(tmp_path / "a.png", 12), np.asarray(shrunk), 12, levels=1)


def test_jpeg_decoded_small_is_close_to_jpeg_decoded_in_full(tmp_path):
    # 65 pixels at a quarter are 17, of which the last is mostly beyond the edge.
    ramp = np.linspace(0, 255, 65).astype(np.uint8)[None].repeat(65, axis=0)
    Image.fromarray(np.stack([ramp, ramp.T, 255 - ramp], axis=2)).save(
        tmp_path / "a.jpg", quality=100, subsampling=0
    )
    with Image.open(tmp_path / "a.jpg") as image:
        full = np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR))
    pixels, size = decode_frame(tmp_path / "a.jpg", 8)
    assert size == (8, 8)
    assert np.abs(pixels.astype(int) - full.transpose(2, 0, 1)).max() <= 4


def test_jpeg_that_is_shrunk_much_keeps_its_detail(tmp_path):
    """Decoded at no more than the wanted size, noise would be off by four times as much."""
    noise = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((480, 360), Image.Resampling.BICUBIC).save(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as image:
        full = np.asarray(image.resize((60, 45), Image.Resampling.BILINEAR)).astype(float)
    pixels = decode_frame(tmp_path / "a.jpg", 60).pixels[:, :45].transpose(1, 2, 0)
    assert np.abs(pixels - full).mean() < 4.0


JPEG_KINDS: dict[str, dict[str, Any]] = {
    "420": {"subsampling": 2},
    "422": {"subsampling": 1},
    "444": {"subsampling": 0},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 2},
    "RGB": {"keep_rgb": True},
}


@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("side", [48, 33])  # as it is, and shrunk a little
@pytest.mark.parametrize("fast", [True, False])
def test_jpeg_has_the_pixels_that_pillow_decodes(tmp_path, monkeypatch, kind, side, fast):
    monkeypatch.setattr("deepbregman.data.decoding._has_fast_kernel", lambda: fast)
    picture = np.random.default_rng(1).integers(0, 256, (31, 47, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=85, **JPEG_KINDS[kind])
    with Image.open(tmp_path / "a.jpg") as image:
        expected = np.asarray(image)
        if side < 47:
            expected = np.asarray(image.resize((33, 22), Image.Resampling.BILINEAR))
    _check(decode_frame(tmp_path / "a.jpg", side), expected, side, levels=int(side < 47 and fast))


def test_jpeg_that_only_pillow_reads(tmp_path):
    """Bytes too many are a warning of libjpeg, and no reason to refuse the image."""
    Image.new("RGB", (20, 10), "red").save(tmp_path / "a.jpg")
    content = (tmp_path / "a.jpg").read_bytes()
    content = content[:-2] + bytes(40) + content[-2:]
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(content)
    with Image.open(tmp_path / "a.jpg") as image:
        expected = np.asarray(image)
    _check(decode_frame(tmp_path / "a.jpg", 20), expected, 20)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_shrinking_and_turning_together(tmp_path, suffix):
    picture = np.zeros((40, 80, 3), dtype=np.uint8)
    picture[:, :40] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned clockwise: the left half comes to the top
    Image.fromarray(picture).save(tmp_path / f"a{suffix}", exif=exif)
    pixels, size = decode_frame(tmp_path / f"a{suffix}", 16)
    assert size == (16, 8)
    assert pixels[:, :6, :8].min() > 240
    assert pixels[:, 10:, :8].max() < 15


def test_both_ways_to_shrink_find_the_same_pixels(tmp_path, monkeypatch):
    picture = np.random.default_rng(0).integers(0, 256, (53, 80, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.png")
    found = []
    for fast in (True, False):
        monkeypatch.setattr("deepbregman.data.decoding._has_fast_kernel", lambda fast=fast: fast)
        found.append(decode_frame(tmp_path / "a.png", 16).pixels.astype(int))
    expected = Image.fromarray(picture).resize((16, 11), Image.Resampling.BILINEAR)
    assert np.abs(found[0] - found[1]).max() <= 1
    assert np.array_equal(found[1][:, :11].transpose(1, 2, 0), np.asarray(expected))


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path, suffix):
    values = np.array([[0, 128, 129, 257], [32896, 65278, 65406, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"a{suffix}")
    grey = np.array([[0, 0, 1, 1], [128, 254, 254, 255]], dtype=np.uint8)
    _check(decode_frame(tmp_path / f"a{suffix}", 4), np.stack([grey] * 3, 2), 4)


@pytest.mark.parametrize(
    ("size", "fitted"),
    [((10, 10), (10, 10)), ((20, 10), (20, 10)), ((40, 10), (20, 5)), ((1000, 3), (20, 1))],
)
def test_fitted_size(size, fitted):
    assert fit_size(*size, 20) == fitted
    assert fit_size(*size[::-1], 20) == fitted[::-1]
