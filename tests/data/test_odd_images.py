"""Every odd, damaged or hostile image is used rightly or refused by name; none hangs or crashes.

The truth never comes from the code under test: pixels are those a file was made from, or what its
undamaged original holds.
"""

import io
import os
import random
import signal
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.data import FileImages, StreamingBatches, open_source
from deepbregman.data.decoding import read_size, silence_pillow
from deepbregman.data.folders import explain_ignored, list_folder
from deepbregman.errors import UserError

from .conftest import Frame, decode_frame

SIDE = 24
"""Of the frames that the cases are decoded into; the pictures below fit unless a case says so."""
BOMB = 20_000


class Case(NamedTuple):
    """One file."""

    name: str | bytes
    """Of the file; bytes where it is no text."""
    make: Callable[[Path], None]
    """Puts it there."""
    pixels: np.ndarray | None = None
    """What must come out, (H, W, 3); None where it must not be used, or there is no truth."""
    refusable: bool = True
    """Whether refusing it is right."""
    usable: bool = False
    """Whether a frame without known truth is right: bytes were changed, and no checksum tells."""
    levels: int = 0
    """By how many grey levels the pixels may differ."""
    words: str = ""
    """Which the refusal must hold."""


def picture(height: int = 10, width: int = 14, seed: int = 0) -> np.ndarray:
    """A smooth picture with a mark in one corner, so that every turn and flip is another."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [20 + 8 * x, 30 + 9 * y, 120 + 4 * x - 5 * y + seed]
    pixels = np.stack(planes, axis=2).clip(0, 255).astype(np.uint8)
    pixels[:3, :4] = (250, 10, 10)
    return pixels


def encoded(pixels: Any, format_name: str, **options: Any) -> bytes:
    """Encode pixels, or an image of Pillow's, with Pillow."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, format_name, **options)
    return buffer.getvalue()


def decoded(content: bytes) -> np.ndarray:
    """Decode plainly with Pillow."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def written(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    """One chunk of a PNG."""
    check = zlib.crc32(kind + data) if crc is None else crc
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG by hand, for what Pillow does not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + b"".join(extra)
        + chunk(b"IDAT", zlib.compress(rows, 1))
        + chunk(b"IEND", b"")
    )


PICTURE = picture()
GREY = PICTURE[..., 1]
FORMATS: dict[str, tuple[str, bytes]] = {
    "jpeg": ("jpg", encoded(PICTURE, "JPEG", quality=95, subsampling=0)),
    "progressive": ("jpeg", encoded(PICTURE, "JPEG", quality=95, progressive=True)),
    "png": ("png", encoded(PICTURE, "PNG")),
    "bmp": ("bmp", encoded(PICTURE, "BMP")),
    "webp": ("webp", encoded(PICTURE, "WEBP", lossless=True)),
    "lossy": ("webp", encoded(PICTURE, "WEBP", quality=90)),
    "tiff": ("tif", encoded(PICTURE, "TIFF")),
    "deflated": ("tiff", encoded(PICTURE, "TIFF", compression="tiff_deflate")),
    "ppm": ("ppm", encoded(PICTURE, "PPM")),
    "gif": ("png", encoded(Image.fromarray(PICTURE).quantize(64), "GIF")),
}
LOSSLESS = ("png", "bmp", "webp", "tiff", "deflated", "ppm")


def _whole() -> Iterator[Case]:
    suffixes = [suffix for suffix, _ in FORMATS.values()]
    for (kind, (suffix, content)), wrong in zip(
        FORMATS.items(), suffixes[2:] + suffixes[:2], strict=True
    ):
        truth = PICTURE if kind in LOSSLESS else decoded(content)
        yield Case(f"{kind}.{suffix}", written(content), truth, refusable=False)
        yield Case(f"{kind}-named.{wrong}", written(content), truth, refusable=False)
        yield Case(f"{kind}-upper.{suffix.upper()}", written(content), truth, refusable=False)


def _damaged() -> Iterator[Case]:
    for kind, (suffix, content) in FORMATS.items():
        truth = decoded(content)
        cuts = [0, 1, 12, *(round(len(content) * part) for part in (0.3, 0.6, 0.8, 0.95))]
        cuts += [len(content) - 2, len(content) - 1]
        for cut in cuts:  # the last bytes may tell nothing; any other loss must be noticed
            yield Case(f"{kind}-cut-{cut}.{suffix}", written(content[:cut]), truth)
        for seed in range(6):
            chance, spoilt = random.Random(f"{kind} {seed}"), bytearray(content)
            for _ in range(1 + seed):
                spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
            name = f"{kind}-flip-{seed}.{suffix}"
            yield Case(name, written(bytes(spoilt)), usable=True)
        zeros = content[: len(content) // 3] + bytes(len(content) - len(content) // 3)
        yield Case(f"{kind}-zeros.{suffix}", written(zeros), usable=True)
        yield Case(f"{kind}-tail.{suffix}", written(content + b"<?php ?>" * 9), truth)


def _no_images() -> Iterator[Case]:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    for name, content in {
        "text.jpg": b"I am a text.\n" * 40,
        "page.png": b"<!DOCTYPE html><html><body>404</body></html>",
        "drawing.png": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        "script.jpg": script,
        "archive.png": b"PK\x03\x04" + bytes(60),
        "noise.webp": random.Random(1).randbytes(500),
        "zeros.bmp": bytes(500),
        "pointer.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
        "program.tif": b"\x7fELF" + bytes(200),
    }.items():
        yield Case(name, written(content), words="not an image")


def _modes() -> Iterator[Case]:
    grey = np.stack([GREY] * 3, axis=2)
    yield Case("grey.png", written(encoded(GREY, "PNG")), grey, False)
    yield Case("grey.tif", written(encoded(GREY, "TIFF")), grey, False)
    yield Case("grey.jpg", written(encoded(GREY, "JPEG", quality=100)), grey, False, levels=3)
    yield Case("grey.ppm", written(encoded(GREY, "PPM")), grey, False)
    two = GREY > 60
    for kind in ("PNG", "BMP", "TIFF", "PPM"):
        truth = np.stack([two * np.uint8(255)] * 3, axis=2)
        name = f"two.{kind.lower().replace('tiff', 'tif')}"
        yield Case(name, written(encoded(two, kind)), truth, False)
    palette = Image.frombytes("P", (2, 2), bytes([0, 1, 2, 1]))
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    table = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90]], dtype=np.uint8)
    truth = table[[[0, 1], [2, 1]]]
    for kind in ("PNG", "BMP", "TIFF", "GIF"):
        name = f"palette-{kind}.{'tif' if kind == 'TIFF' else 'bmp' if kind == 'BMP' else 'png'}"
        yield Case(name, written(encoded(palette, kind)), truth, False)
    white = truth.copy()
    white[0, 1] = white[1, 1] = 255
    for kind in ("PNG", "GIF"):
        content = encoded(palette, kind, transparency=1)
        yield Case(f"transparent-{kind}.png", written(content), white, False)
    alpha = np.full((*GREY.shape, 1), 51, dtype=np.uint8)
    over_white = (PICTURE * 0.2 + 255 * 0.8).round().astype(np.uint8)
    for kind, suffix in (("PNG", "png"), ("TIFF", "tif"), ("WEBP", "webp")):
        options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
        content = encoded(np.concatenate([PICTURE, alpha], axis=2), kind, **options)
        yield Case(f"rgba.{suffix}", written(content), over_white, False, levels=1)
    content = encoded(np.concatenate([GREY[..., None], alpha], axis=2), "PNG")
    yield Case(
        "la.png", written(content), np.stack([over_white[..., 1]] * 3, axis=2), False, levels=1
    )
    key = chunk(b"tRNS", struct.pack(">HHH", *PICTURE[0, 0]))
    rows = b"".join(b"\0" + row.tobytes() for row in PICTURE)
    keyed = PICTURE.copy()
    keyed[(PICTURE[0, 0] == PICTURE).all(axis=2)] = 255
    yield Case("colour-key.png", written(png(14, 10, 8, 2, rows, key)), keyed, False)
    deep = PICTURE.astype(np.uint16) * 257  # 8 bits twice: what 16 bits of the same colour are
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    yield Case("deep-rgb.png", written(png(14, 10, 16, 2, rows)), PICTURE, False)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep[..., 1])
    yield Case("deep-grey.png", written(png(14, 10, 16, 0, rows)), grey, False)
    yield Case("deep-grey.tif", written(encoded(deep[..., 1], "TIFF")), grey, False)
    rows = b"".join(b"\0" + bytes([0x1B]) for _ in range(4))  # 0, 1, 2, 3 in two bits each
    quarters = np.tile(np.array([0, 85, 170, 255], np.uint8)[None, :, None], (4, 1, 3))
    yield Case("two-bits.png", written(png(4, 4, 2, 0, rows)), quarters, False)
    cyan = np.tile(np.array([0, 255, 255], np.uint8), (8, 8, 1))
    flat = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    yield Case("cmyk.jpg", written(encoded(flat, "JPEG", quality=100)), cyan, False, levels=3)
    yield Case("cmyk.tif", written(encoded(flat, "TIFF")), cyan, False)
    floats = encoded(np.full((4, 4), 0.5, np.float32), "TIFF")
    yield Case("floats.tif", written(floats), words="no fixed range")
    for value in (70_000, -1):
        wide = encoded(np.full((4, 4), value, np.int32), "TIFF")
        yield Case(f"value{value}.tif", written(wide), words="outside 0..65535")


def _stored_as(upright: np.ndarray, orientation: int) -> np.ndarray:
    """Rows and columns as a camera stores them that notes this EXIF orientation."""
    turned = upright.transpose(1, 0, 2) if orientation >= 5 else upright
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (0,), 7: (0, 1), 8: (1,)}
    return np.ascontiguousarray(np.flip(turned, flips.get(orientation, ())))


def _notes() -> Iterator[Case]:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = _stored_as(PICTURE, orientation)
        for kind, suffix, options, levels in (
            ("PNG", "png", {}, 0),
            ("TIFF", "tif", {}, 0),
            ("WEBP", "webp", {"lossless": True}, 0),
            ("JPEG", "jpg", {"quality": 100, "subsampling": 0}, 6),
        ):
            content = encoded(stored, kind, exif=exif, **options)
            name = f"turned-{orientation}.{suffix}"
            yield Case(name, written(content), PICTURE, False, levels=levels)
    for value in (0, 9, 65535):
        exif = Image.Exif()
        exif[0x0112] = value
        content = encoded(PICTURE, "PNG", exif=exif)
        yield Case(f"turned-{value}.png", written(content), PICTURE, False)
    for kind, suffix in (("PNG", "png"), ("TIFF", "tif"), ("WEBP", "webp")):
        options = {"lossless": True} if kind == "WEBP" else {}
        profile = encoded(PICTURE, kind, icc_profile=b"no profile at all", **options)
        yield Case(f"profile.{suffix}", written(profile), PICTURE, False)
    for name, exif_bytes in {"garbage": b"garbage!", "cut": b"MM\0*\0\0\0\x08\0\x99"}.items():
        content = encoded(PICTURE, "PNG", exif=b"Exif\0\0" + exif_bytes)
        yield Case(f"exif-{name}.png", written(content), PICTURE, False)
    rows = b"".join(b"\0" + row.tobytes() for row in PICTURE)
    balloon = zlib.compress(bytes(20_000_000), 1)
    text = chunk(b"zTXt", b"Comment\0\0" + balloon)
    yield Case("text-bomb.png", written(png(14, 10, 8, 2, rows, text)), PICTURE)
    icc = chunk(b"iCCP", b"icc\0\0" + balloon)
    yield Case("profile-bomb.png", written(png(14, 10, 8, 2, rows, icc)), PICTURE)


def _several() -> Iterator[Case]:
    others = [Image.fromarray(picture(seed=seed)) for seed in (50, 90)]
    first = Image.fromarray(PICTURE)
    more: dict[str, Any] = {"save_all": True, "append_images": others}
    yield Case("pages.tif", written(encoded(first, "TIFF", **more)), PICTURE, False)
    yield Case("moving.png", written(encoded(first, "PNG", **more)), PICTURE, False)
    moving = encoded(first, "WEBP", lossless=True, **more)
    yield Case("moving.webp", written(moving), PICTURE, False)
    moving = encoded(first.quantize(64), "GIF", save_all=True, append_images=others)
    yield Case("moving-gif.png", written(moving), decoded(moving), False)
    pair = encoded(first, "MPO", quality=100, subsampling=0, **more)
    yield Case("pair.jpg", written(pair), PICTURE, False, levels=6)


def _sizes() -> Iterator[Case]:
    dot = np.array([[[1, 2, 3]]], dtype=np.uint8)
    for kind, suffix in (("PNG", "png"), ("BMP", "bmp"), ("TIFF", "tif"), ("PPM", "ppm")):
        yield Case(f"dot.{suffix}", written(encoded(dot, kind)), dot, False)
    line = np.full((1, 5000, 3), 77, dtype=np.uint8)
    for kind, suffix in (("PNG", "png"), ("JPEG", "jpg"), ("TIFF", "tif"), ("WEBP", "webp")):
        content = encoded(line, kind)
        yield Case(f"wide.{suffix}", written(content), line[:, :SIDE], False, levels=2)
        content = encoded(line.transpose(1, 0, 2), kind)
        truth = line[:, :SIDE].transpose(1, 0, 2)
        yield Case(f"tall.{suffix}", written(content), truth, False, levels=2)
    small = encoded(PICTURE, "BMP")
    huge = struct.pack("<ii", BOMB, BOMB)
    frame = struct.pack("<HHHH", 0, 0, 60_000, 60_000)
    gif = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff," + frame + b"\0\2\2D\1\0;"
    canvas = struct.pack("<I", 16_382)[:3] * 2
    vp8x = b"VP8X\x0a\0\0\0\0\0\0\0" + canvas
    riff = FORMATS["webp"][1][12:]
    webp = b"RIFF" + struct.pack("<I", 4 + len(vp8x) + len(riff)) + b"WEBP" + vp8x + riff
    pair = struct.pack("<HHIIHHII", 256, 4, 1, BOMB, 257, 4, 1, BOMB)
    tiff = bytearray(FORMATS["tiff"][1])
    for tag, side in ((256, 14), (257, 10)):
        for size, code in ((4, "<HHII"), (3, "<HHIHxx")):
            known = struct.pack(code, tag, size, 1, side)
            tiff = tiff.replace(known, struct.pack("<HHII", tag, 4, 1, BOMB))
    assert pair[:12] in tiff
    jpeg = bytearray(FORMATS["jpeg"][1])
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", 60_000, 60_000)
    declared = {
        "bomb.png": png(BOMB, BOMB, 1, 0, bytes(BOMB * (1 + BOMB // 8))),  # whole, one bit a pixel
        "declared.png": png(BOMB, BOMB, 8, 2, b"\0"),
        "declared-most.png": png(2**31 - 1, 2**31 - 1, 8, 6, b"\0"),
        "declared.bmp": small[:18] + huge + small[26:],
        "declared.tif": bytes(tiff),
        "declared.jpg": bytes(jpeg),
        "declared.ppm": b"P6 %d %d 255\n" % (BOMB, BOMB) + bytes(100),
        "declared-gif.png": gif,
    }
    for name, content in declared.items():
        yield Case(f"bomb-{name}", written(content), words="pixels")
    yield Case("bomb-declared.webp", written(webp))  # libwebp sees the lie before there is a size
    none = png(1, 1, 8, 2, b"\0\0\0\0").replace(struct.pack(">II", 1, 1), bytes(8))
    yield Case("no-size.png", written(none))


def _named() -> Iterator[Case]:
    content = written(FORMATS["png"][1])
    for name in (
        *("a b.png", " lead.png", "new\nline.png", "tab\there.png", "quote'\".png", "-dash.png"),
        *("--help.png", "été.png", "日本 語.png", "\u202egnp.png", "%s%n{0}.png", "$(touch x).png"),
        *("; rm -rf x.png", "[bold]x.png", "\x1b[2J.png", "bell\x07.png", "back\\slash.png"),
        *("e\u0301.png", "emoji\U0001f600.png", "a" * 251 + ".png", "~.png", "*.png", "#.png"),
        *(b"latin-\xe9t\xe9.png", b"\xff\xfe.png", b"surrogate-\xed\xa0\x80.png"),
    ):
        yield Case(name, content, PICTURE, False)


def _make_socket(path: Path) -> None:
    place = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(place)


def _no_files() -> Iterator[Case]:
    words = "not a regular file"
    yield Case("pipe.png", os.mkfifo, words=words)
    yield Case("socket.png", _make_socket, words=words)
    yield Case("zero.png", lambda path: path.symlink_to("/dev/zero"), words=words)
    yield Case("terminal.png", lambda path: path.symlink_to("/dev/null"), words=words)
    yield Case("folder.png", lambda path: path.mkdir(), words=words)
    yield Case("dangling.png", lambda path: path.symlink_to("gone"), words="No such file")
    yield Case("loop.png", lambda path: path.symlink_to(path.name), words="symbolic links")
    yield Case("gone.png", lambda path: None, words="No such file")

    def link(path: Path) -> None:
        target = path.with_name(".target")
        target.write_bytes(FORMATS["png"][1])
        path.symlink_to(target.name)

    yield Case("link.png", link, PICTURE, False)


CASES: tuple[Case, ...] = tuple(
    case
    for cases in (
        *(_whole, _damaged, _no_images, _modes, _notes, _several, _sizes, _named, _no_files),
    )
    for case in cases()
)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fail instead of waiting for ever."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _put(case: Case, folder: Path) -> Path:
    path = folder / os.fsdecode(case.name)
    case.make(path)
    return path


def _decode(path: Path) -> Frame | UserError:
    try:
        with silence_pillow():
            return decode_frame(path, SIDE)
    except UserError as error:
        return error


def _judge(case: Case, path: Path, found: Frame | UserError) -> None:
    if isinstance(found, UserError):
        assert case.refusable, str(found)
        assert repr(str(path)) in str(found)
        assert case.words in str(found)
        assert "--skip-unreadable" in str(found)
        assert len(str(found).splitlines()) == 1
        return
    assert case.usable or case.pixels is not None, "must be refused"
    (height, width), pixels = found.size, found.pixels
    assert (pixels.shape, pixels.dtype) == ((3, SIDE, SIDE), np.uint8)
    assert 1 <= height <= SIDE
    assert 1 <= width <= SIDE
    assert not pixels[:, height:].any()
    assert not pixels[:, :, width:].any()
    if case.pixels is not None:
        assert (height, width) == case.pixels.shape[:2]
        inside = pixels[:, :height, :width].astype(int)
        assert np.abs(inside - case.pixels.transpose(2, 0, 1)).max() <= case.levels


@pytest.mark.usefixtures("little_memory")  # the bombs take 1.2 GB or more
@pytest.mark.parametrize("case", CASES, ids=[repr(case.name)[:40] for case in CASES])
def test_is_used_rightly_or_refused_by_name(case, tmp_path):
    path = _put(case, tmp_path)
    with time_limit(120):
        _judge(case, path, _decode(path))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", [case.name for case in CASES if "bomb-" in str(case.name)])
def test_header_of_a_bomb_is_enough_to_refuse_it(name, tmp_path):
    path = _put(next(case for case in CASES if case.name == name), tmp_path)
    with time_limit(120), silence_pillow(), pytest.raises(UserError):
        read_size(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All of them in one folder, with a folder that links to its parent."""
    place = tmp_path_factory.mktemp("odd")
    for case in CASES:
        _put(case, place)
    (place / "round").symlink_to(place)
    return place


def test_folder_of_all_opens_without_the_bad_ones(folder):
    with time_limit(120):
        source = open_source(str(folder), image_size=16, skip_unreadable=True)
    assert source.train.names is not None
    kept = {os.fsencode(name) for name in source.train.names}
    for case in CASES:
        name = os.fsencode(case.name)
        if not case.refusable:
            assert name in kept
        elif case.pixels is None and not case.usable:
            assert name not in kept
    listed = [case for case in CASES if os.path.lexists(folder / os.fsdecode(case.name))]
    folders = [case for case in listed if (folder / os.fsdecode(case.name)).is_dir()]
    assert len(kept) + len(source.skipped) == len(listed) - len(folders)


def test_workers_survive_all(folder):
    paths = tuple(folder / os.fsdecode(case.name) for case in CASES)
    alone = [_decode(path) for path in paths]
    good = [i for i, found in enumerate(alone) if isinstance(found, Frame)]
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))
    batches = StreamingBatches(
        FileImages(paths, SIDE), torch.device("cpu"), num_workers=2, skip_unreadable=True
    )
    with time_limit(120):
        parts = list(batches.iterate(order, 64))
    assert len(batches.skipped) == len(paths) - len(good)
    images = torch.cat([part.images for part in parts])
    place = {index: position for position, index in enumerate(order.tolist())}
    for index in good:
        found = alone[index]
        assert isinstance(found, Frame)
        assert np.array_equal(images[place[index]].numpy(), found.pixels)


def test_permission_denied(tmp_path):
    path = tmp_path / "locked.png"
    path.write_bytes(FORMATS["png"][1])
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # who may read everything: be somebody else for a moment
        os.seteuid(65534)
    try:
        found = _decode(path)
    finally:
        os.seteuid(user)
    assert isinstance(found, UserError)
    assert "Permission denied" in str(found)


def test_avif_is_read(tmp_path):
    grey = np.full((16, 12, 3), 128, dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "a.avif")
    assert list_folder(tmp_path).train.paths == [tmp_path / "a.avif"]
    frame = decode_frame(tmp_path / "a.avif", 16)
    assert frame.size == (16, 12)
    np.testing.assert_allclose(frame.pixels[:, :, :12], 128, atol=3)


def test_heic_is_read_as_a_telephone_holds_it(tmp_path):
    plugin = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")
    plugin.register_heif_opener()
    pixels = np.zeros((32, 64, 3), dtype=np.uint8)
    pixels[:, :32, 0] = pixels[:, 32:, 2] = 200  # red, then blue
    exif = Image.Exif()
    exif[0x0112] = 6  # the telephone was held upright: turn clockwise, so that red is above
    Image.fromarray(pixels).save(tmp_path / "a.heic", quality=95, exif=exif.tobytes())
    Image.fromarray(pixels).save(tmp_path / "b.HEIF", format="HEIF", quality=95)
    assert [path.name for path in list_folder(tmp_path).train.paths] == ["a.heic", "b.HEIF"]
    upright, flat = (decode_frame(tmp_path / name, 64) for name in ("a.heic", "b.HEIF"))
    assert upright.size == (64, 32)
    np.testing.assert_allclose(upright.pixels[:, 8, 16], (200, 0, 0), atol=12)
    np.testing.assert_allclose(upright.pixels[:, 56, 16], (0, 0, 200), atol=12)
    assert flat.size == (32, 64)
    np.testing.assert_allclose(flat.pixels[:, 16, 56], (0, 0, 200), atol=12)
    source = open_source(str(tmp_path), image_size=32)
    assert len(source.train) == 2
    (tmp_path / "a.heic").write_bytes((tmp_path / "a.heic").read_bytes()[:200])
    with pytest.raises(UserError, match=r"a\.heic"):
        decode_frame(tmp_path / "a.heic", 64)


def test_photos_that_need_a_plug_in_name_it():
    words = explain_ignored({".heic": 3, ".txt": 1})
    assert words == "; to read .heic: pip install 'deepbregman[heic]'"
    assert explain_ignored({".txt": 1}) == ""
