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
    drawn = [_draw_panel(panel) for panel in panels]
    heading = [_write(caption, FAINT)] if caption else []
    width = 2 * MARGIN + max(part.width for part in (*heading, *drawn))
    top = MARGIN + sum(part.height for part in heading)
    below = MARGIN + (HEADING + GAP) * has_legend
    height = top + sum(part.height for part in drawn) + 2 * MARGIN * (len(drawn) - 1) + below
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    for part in heading:
        sheet.paste(part, (MARGIN, MARGIN))
    for place, part in enumerate(drawn):
        if place:
            draw.line([(MARGIN, top - MARGIN), (width - MARGIN, top - MARGIN)], fill=UNKNOWN)
        sheet.paste(part, (MARGIN, top))
        top += part.height + 2 * MARGIN
    if has_legend:
        _draw_legend(draw, height - MARGIN - LINE)
    return sheet


def _put_together(parts: Sequence[Image.Image], gap: int, *, across: bool = False) -> Image.Image:
    """Put pictures one below the other, or side by side, with a gap between them."""
    sides = [part.width if across else part.height for part in parts]
    length = sum(sides) + gap * (len(parts) - 1)
    other = max(part.height if across else part.width for part in parts)
    whole = Image.new("RGB", (length, other) if across else (other, length), PAPER)
    place = 0
    for part, side in zip(parts, sides, strict=True):
        whole.paste(part, (place, 0) if across else (0, place))
        place += side + gap
    return whole


def _write(words: str, colour: str) -> Image.Image:
    """Write a heading."""
    font = choose_font(words)
    line = Image.new("RGB", (round(font.getlength(words)), HEADING), PAPER)
    ImageDraw.Draw(line).text((0, 0), words, font=font, fill=colour)
    return line


def _draw_panel(panel: Panel) -> Image.Image:
    lines = [
        _put_together([_draw_strip(strip) for strip in line], 3 * GAP, across=True)
        for line in _arrange(panel)
    ]
    found = _put_together(lines, GAP)
    if panel.query is None:
        return found
    query = _put_together([_write("query", INK), _draw_tile(panel.query)], 0)
    return _put_together([query, found], 3 * GAP, across=True)


def _draw_strip(strip: Strip) -> Image.Image:
    tiles = [_draw_tile(tile) for tile in strip.tiles]
    rows = [
        _put_together(tiles[start : start + COLUMNS], GAP, across=True)
        for start in range(0, len(tiles), COLUMNS)
    ]
    return _put_together([_write(_keep_readable(strip.title), INK), _put_together(rows, GAP)], 0)


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


def _draw_tile(tile: Tile) -> Image.Image:
    whole = Image.new("RGB", (CELL, CELL + 4 + LINE * (1 + len(tile.lines))), PAPER)
    draw = ImageDraw.Draw(whole)
    colour = {True: SAME, False: OTHER, None: UNKNOWN}[tile.same_class]
    draw.rectangle((0, 0, CELL - 1, CELL - 1), fill=colour)
    whole.paste(_fit_thumbnail(tile.pixels), (FRAME, FRAME))
    draw.text((CELL, CELL + 4), tile.value, font=choose_font(tile.value), fill=INK, anchor="ra")
    for place, words in enumerate(map(_shorten, (tile.title, *tile.lines))):
        top, fill = CELL + 4 + place * LINE, FAINT if place else INK
        draw.text((0, top), words, font=choose_font(words), fill=fill)
    return whole


def _draw_legend(draw: ImageDraw.ImageDraw, top: int) -> None:
    left = MARGIN
    for colour, words in ((SAME, "the query's class"), (OTHER, "another class")):
        draw.rectangle((left, top + 2, left + 11, top + 13), fill=colour)
        font = choose_font(words)
        draw.text((left + 18, top), words, font=font, fill=INK)
        left += 18 + round(font.getlength(words)) + 2 * GAP


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
