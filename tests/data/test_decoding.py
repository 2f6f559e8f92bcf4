from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from deepbregman.data.decoding import UnreadableImage, decode_frame, fit_size, read_size
from deepbregman.errors import UserError


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


def test_small_image_is_not_enlarged(
    tmp_path: Path, save_picture: Callable[..., np.ndarray]
) -> None:
    pixels = save_picture(tmp_path / "a.png", height=5, width=3)
    _check(decode_frame(tmp_path / "a.png", 8), pixels, 8)


@pytest.mark.parametrize(
    ("height", "width", "target"),
    [
        *((40, 20, (12, 6)), (20, 40, (6, 12)), (31, 31, (12, 12)), (13, 7, (12, 6))),
        *((100, 1, (12, 1)), (100, 5, (12, 1)), (1, 100, (1, 12)), (9, 110, (1, 12))),
    ],
)
def test_large_image_is_shrunk_as_pillow_does(
    tmp_path: Path,
    save_picture: Callable[..., np.ndarray],
    height: int,
    width: int,
    target: tuple[int, int],
) -> None:
    pixels = save_picture(tmp_path / "a.png", height=height, width=width)
    shrunk = Image.fromarray(pixels).resize(target[::-1], Image.Resampling.BILINEAR)
    _check(decode_frame(tmp_path / "a.png", 12), np.asarray(shrunk), 12, levels=1)


def test_jpeg_decoded_small_is_close_to_jpeg_decoded_in_full(tmp_path: Path) -> None:
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
def test_jpeg_has_the_pixels_that_pillow_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, side: int, fast: bool
) -> None:
    monkeypatch.setattr("deepbregman.data.decoding._has_fast_kernel", lambda: fast)
    picture = np.random.default_rng(1).integers(0, 256, (31, 47, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=85, **JPEG_KINDS[kind])
    with Image.open(tmp_path / "a.jpg") as image:
        expected = np.asarray(image)
        if side < 47:
            expected = np.asarray(image.resize((33, 22), Image.Resampling.BILINEAR))
    _check(decode_frame(tmp_path / "a.jpg", side), expected, side, levels=int(side < 47 and fast))


def test_jpeg_that_only_pillow_reads(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, suffix: str) -> None:
    picture = np.zeros((8, 16, 3), dtype=np.uint8)
    picture[:4, :8] = (255, 0, 0)
    picture[4:, 8:] = (0, 255, 0)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a{suffix}"
    Image.fromarray(picture).save(path, exif=exif, quality=95)
    # The EXIF standard: from 5 on, rows of the file are columns of the picture.
    size = (16, 8) if orientation >= 5 else (8, 16)
    frame = decode_frame(path, 16)
    assert frame.size == size
    with Image.open(path) as image:
        expected = np.asarray(
            ImageOps.exif_transpose(image.convert("RGB"))
            if suffix == ".tif"
            else ImageOps.exif_transpose(image).convert("RGB")
        )
    _check(frame, expected, 16)
    # Which corner is red, by the standard's own table (row 0 and column 0 of the stored image).
    corner = {
        1: (0, 0),
        2: (0, -1),
        3: (-1, -1),
        4: (-1, 0),
        5: (0, 0),
        6: (0, -1),
        7: (-1, -1),
        8: (-1, 0),
    }[orientation]
    red = frame.pixels[:, : size[0], : size[1]][:, corner[0], corner[1]]
    assert red[0] > 200
    assert red[1] < 60


def test_shrinking_and_turning_together(tmp_path: Path) -> None:
    picture = np.zeros((40, 80, 3), dtype=np.uint8)
    picture[:, :40] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned clockwise: the left half comes to the top
    Image.fromarray(picture).save(tmp_path / "a.jpg", exif=exif)
    pixels, size = decode_frame(tmp_path / "a.jpg", 16)
    assert size == (16, 8)
    assert pixels[:, :6, :8].min() > 240
    assert pixels[:, 10:, :8].max() < 15


def test_both_ways_to_shrink_find_the_same_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (53, 80, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.png")
    found = []
    for fast in (True, False):
        monkeypatch.setattr("deepbregman.data.decoding._has_fast_kernel", lambda fast=fast: fast)
        found.append(decode_frame(tmp_path / "a.png", 16).pixels.astype(int))
    expected = Image.fromarray(picture).resize((16, 11), Image.Resampling.BILINEAR)
    assert np.abs(found[0] - found[1]).max() <= 1
    assert np.array_equal(found[1][:, :11].transpose(1, 2, 0), np.asarray(expected))


def test_palette_grey_and_bilevel(tmp_path: Path) -> None:
    grey = np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    _check(decode_frame(tmp_path / "grey.png", 6), np.stack([grey] * 3, 2), 6)

    indices = np.array([[0, 1], [2, 1]], dtype=np.uint8)
    palette = Image.fromarray(indices).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    palette.putdata(indices.flatten().tolist())
    palette.save(tmp_path / "palette.png")
    colours = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90]], dtype=np.uint8)
    _check(decode_frame(tmp_path / "palette.png", 2), colours[indices], 2)

    Image.fromarray(np.array([[True, False]])).save(tmp_path / "two.png")
    _check(decode_frame(tmp_path / "two.png", 2), np.array([[[255] * 3, [0] * 3]], np.uint8), 2)


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    colour = np.array([[[100, 0, 50, 255], [100, 0, 50, 0], [100, 0, 50, 51]]], dtype=np.uint8)
    Image.fromarray(colour).save(tmp_path / "a.png")
    blended = [round(0.2 * value + 0.8 * 255) for value in (100, 0, 50)]
    expected = np.array([[[100, 0, 50], [255, 255, 255], blended]], dtype=np.uint8)
    _check(decode_frame(tmp_path / "a.png", 3), expected, 3)

    Image.fromarray(colour[..., [0, 3]], mode=None).save(tmp_path / "grey.png")
    pixels, _ = decode_frame(tmp_path / "grey.png", 3)
    assert pixels[:, 0].tolist() == [[100, 255, 224]] * 3


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 128, 129, 257], [32896, 65278, 65406, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"a{suffix}")
    grey = np.array([[0, 0, 1, 1], [128, 254, 254, 255]], dtype=np.uint8)
    _check(decode_frame(tmp_path / f"a{suffix}", 4), np.stack([grey] * 3, 2), 4)


def test_cmyk(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a.jpg", quality=100)
    pixels, _ = decode_frame(tmp_path / "a.jpg", 8)
    assert np.abs(pixels[:, 4, 4].astype(int) - [0, 255, 255]).max() <= 3  # cyan


def test_floating_point_is_refused_rather_than_guessed(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(UnreadableImage, match=r"a\.tif.*no fixed range"):
        decode_frame(tmp_path / "a.tif", 4)


def test_damaged_exif_does_not_cost_the_image(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "white").save(tmp_path / "a.jpg", exif=b"Exif\0\0garbage!")
    assert decode_frame(tmp_path / "a.jpg", 8).pixels.min() > 250


@pytest.mark.parametrize("side", [10_000, 20_000])  # Pillow warns of the one, refuses the other
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bomb_is_refused_by_name_before_it_is_decoded(tmp_path: Path, side: int) -> None:
    path = tmp_path / "bomb.png"
    Image.new("1", (side, side)).save(path)
    for read in (read_size, lambda path: decode_frame(path, 8)):
        with pytest.raises(UnreadableImage, match=r"bomb\.png.*Bomb.*pixels"):
            read(path)


def test_every_way_of_being_unreadable_names_the_file(
    tmp_path: Path, truncate: Callable[[Path], None], save_picture: Callable[..., np.ndarray]
) -> None:
    save_picture(tmp_path / "cut.jpg", 64, 64)
    truncate(tmp_path / "cut.jpg")
    save_picture(tmp_path / "cut.png", 64, 64)
    truncate(tmp_path / "cut.png")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("I am not a picture, whatever my name says")
    (tmp_path / "script.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for name in ("cut.jpg", "cut.png", "empty.jpg", "text.jpg", "script.jpg", "gone.jpg"):
        with pytest.raises(UserError) as caught:
            decode_frame(tmp_path / name, 16)
        assert str(tmp_path / name) in str(caught.value)
        assert "--skip-unreadable" in str(caught.value)
        if name in ("empty.jpg", "text.jpg", "script.jpg"):
            assert "not an image" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "fitted"),
    [((10, 10), (10, 10)), ((20, 10), (20, 10)), ((40, 10), (20, 5)), ((1000, 3), (20, 1))],
)
def test_fitted_size(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    assert fit_size(*size, 20) == fitted
    assert fit_size(*size[::-1], 20) == fitted[::-1]
