"""Contact sheets: their size, their frames, and that they are the same every time."""

import numpy as np
import pytest
from PIL import Image

from deepbregman.reporting import sheets
from deepbregman.reporting.sheets import CELL, FRAME, GAP, MARGIN, Panel, Strip, Tile


def tile(seed: int, same: bool | None = None, lines: tuple[str, ...] = ("cat", "a.png")) -> Tile:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    return Tile(pixels, "1", "0.123", lines, same)


def panel(count: int, strips: int = 1, same: bool | None = None) -> Panel:
    tiles = tuple(tile(index, same) for index in range(count))
    return Panel(tile(99), tuple(Strip(f"by {index}", tiles) for index in range(strips)))


ROW = CELL + 4 + 3 * sheets.LINE  # a frame, then rank, class and name


@pytest.mark.parametrize(
    ("panels", "columns", "content"),
    [
        ([panel(3)], 3, sheets.HEADING + ROW),
        ([panel(10, strips=2)], 10, 2 * (sheets.HEADING + ROW) + GAP),
        ([panel(13)], 10, sheets.HEADING + 2 * ROW + GAP),
        ([panel(2), panel(2)], 2, 2 * (sheets.HEADING + ROW) + 2 * MARGIN),
        ([panel(2, same=True)], 2, sheets.HEADING + ROW + sheets.HEADING + GAP),
    ],
)
def test_the_size_follows_from_what_is_shown(panels, columns, content):
    width, height = sheets.draw_sheet(panels).size
    assert height == content + 2 * MARGIN
    assert width == 2 * MARGIN + CELL + 3 * GAP + columns * CELL + (columns - 1) * GAP


def test_a_caption_stands_above_all_and_is_never_cut():
    words = "k-means, cosine features; the number at an image is its distance" * 2
    plain, sheet = (np.asarray(sheets.draw_sheet([panel(2)], text)) for text in ("", words))
    assert len(sheet) == len(plain) + sheets.HEADING
    line, below = np.split(sheet, [MARGIN + sheets.HEADING])
    assert (below[:, : plain.shape[1]] == plain[MARGIN:]).all()
    dark = np.flatnonzero((line < 200).any(axis=(0, 2)))
    assert dark[0] - MARGIN < 5
    assert 0 <= sheet.shape[1] - MARGIN - dark[-1] < 5


def test_small_groups_stand_side_by_side():
    """Forty pairs of duplicates one below the other would be a sheet that nobody can look at."""
    tiles = tuple(tile(index) for index in range(8))
    groups = [Strip(f"group {size}", tiles[:size]) for size in (2, 2, 2, 8, 3)]
    sheet = sheets.draw_sheet([Panel(None, tuple(groups))])
    assert sheet.height == 2 * MARGIN + 3 * (sheets.HEADING + ROW) + 2 * GAP
    assert sheet.width == 2 * MARGIN + 8 * CELL + 7 * GAP  # of the eight, which leave no room
    pixels, top = np.asarray(sheet), MARGIN + sheets.HEADING
    pair = 2 * CELL + GAP + 3 * GAP
    for left in (0, CELL + GAP, pair, pair + CELL + GAP, 2 * pair, 2 * pair + CELL + GAP):
        assert "#" + bytes(pixels[top, MARGIN + left]).hex() == sheets.UNKNOWN
    assert (pixels[top, MARGIN + pair - 3 * GAP : MARGIN + pair] == 255).all()


def test_frames_say_whose_class_it_is_and_images_are_in_them():
    tiles = tuple(tile(index, same) for index, same in enumerate((True, False, None)))
    sheet = np.asarray(sheets.draw_sheet([Panel(tile(9), (Strip("by", tiles),))]))
    top = MARGIN + sheets.HEADING
    lefts = [MARGIN + CELL + 3 * GAP + column * (CELL + GAP) for column in range(3)]
    colours = ["#" + bytes(sheet[top, left]).hex() for left in lefts]
    assert colours == [sheets.SAME, sheets.OTHER, sheets.UNKNOWN]
    for left, shown in zip(lefts, tiles, strict=True):
        inside = sheet[top + FRAME :, left + FRAME :][: sheets.THUMBNAIL, : sheets.THUMBNAIL]
        height = round(20 * sheets.THUMBNAIL / 30)
        start = (sheets.THUMBNAIL - height) // 2
        image = Image.fromarray(shown.pixels)
        size = (sheets.THUMBNAIL, height)
        expected = np.asarray(image.resize(size, Image.Resampling.NEAREST))
        assert np.array_equal(inside[start : start + height], expected)
        assert (inside[:start] == 255).all()


def test_the_same_sheet_is_written_again(tmp_path):
    for name in ("a.png", "b.png"):
        sheets.write_contact_sheet(tmp_path / name, [panel(4, same=False)])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        image.load()
        assert image.format == "PNG"


@pytest.mark.parametrize("words", ["x" * 500, "写真/ネコ.png", "a\nb", "\udcff.png", ""])
def test_any_name_fits(words):
    fitted = sheets._shorten(words)
    assert sheets.choose_font(fitted).getlength(fitted) <= CELL
    assert words[-3:] in fitted or not words.isascii() or "\n" in words
    sheets.draw_sheet([Panel(tile(0), (Strip("by", (tile(1, None, (words,)),)),))])


def test_names_in_other_languages_are_readable(monkeypatch):
    """Without a font of the system, letters that Pillow's font lacks are replaced, not boxes."""
    monkeypatch.setattr(sheets, "SYSTEM_FONTS", ())
    assert sheets._shorten("Küche/é.png") == "Kuche/e.png"
    assert sheets._shorten("猫.png") == "?.png"
    assert sheets._shorten("plain.png") == "plain.png"


def test_a_font_of_the_system_is_taken_if_it_has_the_letters(monkeypatch):
    rich = sheets._load_own_font().font_variant(size=sheets.TEXT)
    monkeypatch.setattr(sheets, "_load_system_font", lambda _: rich)
    monkeypatch.setattr(
        sheets, "_is_missing", lambda font, letter: font is not rich and not letter.isascii()
    )
    assert sheets._shorten("Küche") == "Küche"
    assert sheets.choose_font("Küche") is rich
    assert sheets.choose_font("Kuche") is sheets._load_own_font()
