"""Contact sheets: a query on the left, what was found for it on the right; or groups of images."""

import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from deepbregman.files import replace_file

THUMBNAIL = 112
FRAME = 5
GAP = 14
MARGIN = 24
COLUMNS = 10
"""Neighbours in a line; more are continued below."""
TEXT = 13
LINE = 17
HEADING = 26
CELL = THUMBNAIL + 2 * FRAME
INK, FAINT, PAPER = "#1a1a1a", "#6a6a6a", "#ffffff"
# Told apart with every kind of colour vision.
SAME, OTHER, UNKNOWN = "#009e73", "#d55e00", "#c4c4c4"
SYSTEM_FONTS = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc"),
    *("Arial Unicode.ttf", "arial.ttf", "msyh.ttc", "YuGothM.ttc"),
)
"""Fonts of Linux, macOS and Windows, for names with letters that Pillow's own font lacks."""


class Tile(NamedTuple):
    """An image with a few words below it."""

    pixels: npt.NDArray[np.uint8]  # (H, W, 3)
    title: str
    value: str = ""
    """Shown at the right of the title."""
    lines: tuple[str, ...] = ()
    same_class: bool | None = None
    """Whether it is of the query's class; None where that is not known."""


def caption_image(name: str, class_name: str | None) -> tuple[str, ...]:
    """Return the lines of a tile: the class, where it is known, and the name."""
    return (name,) if class_name is None else (class_name, name)


class Strip(NamedTuple):
    """The neighbours by one measure, the nearest first."""

    title: str
    tiles: tuple[Tile, ...]


class Panel(NamedTuple):
    """A query and its strips; without a query, groups of images."""

    query: Tile | None
    strips: tuple[Strip, ...]


def write_contact_sheet(path: Path, panels: Sequence[Panel], caption: str = "") -> None:
    """Write a PNG with a panel for each query, one below the other, under a line of words."""
    sheet = draw_sheet(panels, caption)
    with replace_file(path) as file:
        sheet.save(file, format="PNG")


def draw_sheet(panels: Sequence[Panel], caption: str = "") -> Image.Image:
    """Draw the panels of a contact sheet, under a caption if there is one."""
    has_legend = any(t.same_class is not None for p in panels for s in p.strips for t in s.tiles)
    width = 2 * MARGIN + max(_measure_width(line) for panel in panels for line in _arrange(panel))
    if any(panel.query is not None for panel in panels):
        width += CELL + 3 * GAP
    font = choose_font(caption)
    width = max(width, 2 * MARGIN + round(font.getlength(caption)))
    heights = [_measure_panel(panel) for panel in panels]
    first = MARGIN + (HEADING if caption else 0)
    legend = HEADING + GAP if has_legend else 0
    height = first + MARGIN + sum(heights) + 2 * MARGIN * (len(panels) - 1) + legend
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), caption, font=font, fill=FAINT)
    top = first
    for panel, panel_height in zip(panels, heights, strict=True):
        if top > first:
            draw.line([(MARGIN, top - MARGIN), (width - MARGIN, top - MARGIN)], fill=UNKNOWN)
        _draw_panel(sheet, draw, panel, top)
        top += panel_height + 2 * MARGIN
    if has_legend:
        _draw_legend(draw, height - MARGIN - LINE)
    return sheet


def _draw_panel(sheet: Image.Image, draw: ImageDraw.ImageDraw, panel: Panel, top: int) -> None:
    left = MARGIN
    if panel.query is not None:
        draw.text((MARGIN, top), "query", font=choose_font("query"), fill=INK)
        _draw_tile(sheet, draw, panel.query, MARGIN, top + HEADING)
        left += CELL + 3 * GAP
    for line in _arrange(panel):
        place = left
        for strip in line:
            title = _keep_readable(strip.title)
            draw.text((place, top), title, font=choose_font(title), fill=INK)
            for position, tile in enumerate(strip.tiles):
                row, column = divmod(position, COLUMNS)
                below = top + HEADING + row * (_measure_tiles(strip.tiles) + GAP)
                _draw_tile(sheet, draw, tile, place + column * (CELL + GAP), below)
            place += _measure_width([strip]) + 3 * GAP
        top += _measure_height(line)


def _arrange(panel: Panel) -> list[list[Strip]]:
    """Put strips into lines: small groups share a line, strips of a query do not."""
    lines: list[list[Strip]] = []
    for strip in panel.strips:
        used = sum(len(other.tiles) for other in lines[-1]) if lines else COLUMNS
        if panel.query is None and used + len(strip.tiles) <= COLUMNS:
            lines[-1].append(strip)
        else:
            lines.append([strip])
    return lines


def _draw_tile(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, tile: Tile, left: int, top: int
) -> None:
    colour = {True: SAME, False: OTHER, None: UNKNOWN}[tile.same_class]
    draw.rectangle((left, top, left + CELL - 1, top + CELL - 1), fill=colour)
    inner = (left + FRAME, top + FRAME)
    sheet.paste(_fit_thumbnail(tile.pixels), inner)
    below = top + CELL + 4
    title = _shorten(tile.title)
    draw.text((left, below), title, font=choose_font(title), fill=INK)
    font = choose_font(tile.value)
    draw.text((left + CELL, below), tile.value, font=font, fill=INK, anchor="ra")
    for line in map(_shorten, tile.lines):
        below += LINE
        draw.text((left, below), line, font=choose_font(line), fill=FAINT)


def _draw_legend(draw: ImageDraw.ImageDraw, top: int) -> None:
    left = MARGIN
    for colour, words in ((SAME, "the query's class"), (OTHER, "another class")):
        draw.rectangle((left, top + 2, left + 11, top + 13), fill=colour)
        font = choose_font(words)
        draw.text((left + 18, top), words, font=font, fill=INK)
        left += 18 + round(font.getlength(words)) + 2 * GAP


def _measure_panel(panel: Panel) -> int:
    strips = sum(map(_measure_height, _arrange(panel)))
    query = 0 if panel.query is None else HEADING + _measure_tiles([panel.query])
    return max(strips - GAP, query)


def _measure_height(line: Sequence[Strip]) -> int:
    """Return the height of strips side by side, with the gap below them."""
    rows = ((-(-len(strip.tiles) // COLUMNS), _measure_tiles(strip.tiles)) for strip in line)
    return HEADING + max(count * (height + GAP) for count, height in rows)


def _measure_width(line: Sequence[Strip]) -> int:
    """Return the width of strips side by side."""
    columns = [min(COLUMNS, len(strip.tiles)) for strip in line]
    return sum(count * (CELL + GAP) - GAP for count in columns) + 3 * GAP * (len(line) - 1)


def _measure_tiles(tiles: Sequence[Tile]) -> int:
    """Return the height of a line of tiles, words included."""
    return CELL + 4 + LINE * (1 + max(len(tile.lines) for tile in tiles))


def _fit_thumbnail(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """Fit an image into a square of paper: small ones in whole pixels, so that they stay sharp."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    scale = THUMBNAIL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    method = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS
    square = Image.new("RGB", (THUMBNAIL, THUMBNAIL), PAPER)
    corner = ((THUMBNAIL - size[0]) // 2, (THUMBNAIL - size[1]) // 2)
    square.paste(image.resize(size, method), corner)
    return square


def _shorten(words: str) -> str:
    """Shorten words from the left until they fit a tile; the end of a path matters most."""
    words = _keep_readable(" ".join(words.encode(errors="replace").decode().split()))
    font = choose_font(words)
    if font.getlength(words) <= CELL:
        return words
    while words and font.getlength("…" + words) > CELL:
        words = words[1:]
    return "…" + words


def choose_font(words: str) -> ImageFont.FreeTypeFont:
    """Return Pillow's own font, or a system font if the words need other letters.

    Pillow's is the same on every machine, but it has only English letters.
    """
    fonts = [_load_own_font()]
    if not words.isascii():
        fonts += [font for font in map(_load_system_font, SYSTEM_FONTS) if font is not None]
    return next((font for font in fonts if _has_all(font, words)), fonts[0])


def _keep_readable(words: str) -> str:
    """Replace letters that no font here has: ``é`` by ``e``, others by ``?``."""
    if _has_all(choose_font(words), words):
        return words
    font = _load_own_font()
    plain = unicodedata.normalize("NFKD", words)
    letters = (letter for letter in plain if not unicodedata.combining(letter))
    return "".join(letter if _has_all(font, letter) else "?" for letter in letters)


def _has_all(font: ImageFont.FreeTypeFont, words: str) -> bool:
    return words.isascii() or not any(_is_missing(font, letter) for letter in set(words))


@cache
def _is_missing(font: ImageFont.FreeTypeFont, letter: str) -> bool:
    """Whether a font draws its sign for an unknown letter; U+10FFFF is no letter at all."""
    return bytes(font.getmask(letter)) == bytes(font.getmask("\U0010ffff"))


@cache
def _load_own_font() -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(TEXT)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


@cache
def _load_system_font(name: str) -> ImageFont.FreeTypeFont | None:
    try:
        return ImageFont.truetype(name, TEXT)
    except OSError:  # not installed
        return None
