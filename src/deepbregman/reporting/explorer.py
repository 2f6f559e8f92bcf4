"""The explorer: one page with a map of images, their thumbnails and what is most like each."""

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from deepbregman.files import create_file

from .page import hash_source, load_parts, to_json

PER_SHEET = 1024
ACROSS = 32
QUALITY = 80
SIDES = ((2_000, 96), (5_000, 64), (15_000, 48))
"""Largest number of images, and the side of their thumbnails; of more it is ``SMALLEST_SIDE``."""
SMALLEST_SIDE = 32
LARGE_SIDE = 320
"""Longer side of the pictures of images to label."""
MOST_LARGE = 500

Pixels = npt.NDArray[np.uint8]


class Column(NamedTuple):
    """Something known of each image, to colour by."""

    title: str
    values: npt.NDArray[Any]
    """(N,): places in ``categories``, or numbers."""
    categories: tuple[str, ...] | None = None
    has_none: bool = False
    """Whether the first category stands for images of which it is not known."""


class Neighbours(NamedTuple):
    """The images most like each image by one measure."""

    title: str
    indices: npt.NDArray[np.int32]
    """(N, k), the nearest first; -1 where there are no more."""
    values: npt.NDArray[np.float32]


class Subnetworks(NamedTuple):
    """How the subnetworks score the images."""

    numbers: tuple[int, ...]
    wins: tuple[int, ...]
    """How many images each scores higher than the others do."""
    highest: npt.NDArray[np.int32]
    """(S, T): the images that each scores highest."""
    scores: npt.NDArray[np.uint8] | None
    """(N, S): from 0 for the lowest of a subnetwork's scores to 255 for its highest."""


class Explorer(NamedTuple):
    """All that the page shows."""

    title: str
    facts: tuple[str, ...]
    names: tuple[str, ...]
    points: npt.NDArray[np.float32]  # (N, 2)
    columns: tuple[Column, ...]
    neighbours: tuple[Neighbours, ...]
    subnetworks: Subnetworks | None
    labels: Mapping[int, str] = MappingProxyType({})
    """Labels that the user has given, by the place of the image."""
    suggested: tuple[int, ...] = ()
    """Places of images that are no random ones; the table of labels that the page saves says so."""
    queue: tuple[int, ...] = ()
    """Places of images to label, one after the other."""
    large: Mapping[int, bytes] = MappingProxyType({})
    """Larger pictures of some images, whole, as JPEG files."""


def choose_thumbnail_side(count: int) -> int:
    """Choose the side of thumbnails so that the page stays small: 60 MB for 50,000 is the aim."""
    return next((side for most, side in SIDES if count <= most), SMALLEST_SIDE)


def make_thumbnail(pixels: Pixels, side: int) -> Image.Image:
    """Cut the middle of an image to a square of a side."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    enlarges = max(image.size) < side
    method = Image.Resampling.NEAREST if enlarges else Image.Resampling.BOX
    return ImageOps.fit(image, (side, side), method)


def draw_sheets(images: Iterable[Pixels], side: int) -> Iterator[bytes]:
    """Draw thumbnails into sheets of ``PER_SHEET``, as JPEG files."""
    tiles: list[Image.Image] = []

    def finish() -> bytes:
        rows = -(-len(tiles) // ACROSS)
        sheet = Image.new("RGB", (ACROSS * side, rows * side))
        for place, tile in enumerate(tiles):
            sheet.paste(tile, (place % ACROSS * side, place // ACROSS * side))
        tiles.clear()
        return encode_jpeg(sheet)

    for pixels in images:
        tiles.append(make_thumbnail(pixels, side))
        if len(tiles) == PER_SHEET:
            yield finish()
    if tiles:
        yield finish()


def encode_jpeg(image: Image.Image) -> bytes:
    """Return an image as a JPEG file."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def draw_large(images: Mapping[int, Pixels]) -> dict[int, bytes]:
    """Draw whole images, as JPEG files."""
    drawn = {}
    for place, pixels in images.items():
        image = Image.fromarray(np.ascontiguousarray(pixels))
        image.thumbnail((LARGE_SIDE, LARGE_SIDE))
        drawn[place] = encode_jpeg(image)
    return drawn


def write_page(path: Path, explorer: Explorer, sheets: Iterable[bytes]) -> None:
    """Write the page: one file that needs no other and no network."""
    page = render(explorer, list(sheets))
    with create_file(path) as file:
        file.write(page.encode("utf-8", "replace"))


def render(explorer: Explorer, sheets: Sequence[bytes]) -> str:
    """Put the page together."""
    import jinja2

    template, style, script = load_parts("explorer")
    blocks = {"points": explorer.points.astype("<f4").tobytes()}
    for number, column in enumerate(explorer.columns):
        kind = "<f4" if column.categories is None else "<u2"
        blocks[f"column-{number}"] = column.values.astype(kind).tobytes()
    for number, each in enumerate(explorer.neighbours):
        blocks[f"indices-{number}"] = each.indices.astype("<i4").tobytes()
        blocks[f"values-{number}"] = each.values.astype("<f4").tobytes()
    found = explorer.subnetworks
    if found is not None:
        blocks["highest-scores"] = found.highest.astype("<i4").tobytes()
        if found.scores is not None:
            blocks["scores"] = found.scores.tobytes()
    blocks |= {f"sheet-{number}": sheet for number, sheet in enumerate(sheets)}
    blocks |= {f"large-{place}": picture for place, picture in explorer.large.items()}
    data = {
        "names": [name.encode("utf-8", "replace").decode() for name in explorer.names],
        "columns": [
            {"title": column.title, "categories": column.categories, "none": column.has_none}
            for column in explorer.columns
        ],
        "labels": sorted(explorer.labels.items()),
        "suggested": explorer.suggested,
        "queue": explorer.queue,
        "large": list(explorer.large),
        "k": explorer.neighbours[0].indices.shape[1] if explorer.neighbours else 0,
        "neighbours": [{"title": each.title} for each in explorer.neighbours],
        "subnetworks": None
        if found is None
        else {
            "numbers": found.numbers,
            "wins": found.wins,
            "each": found.highest.shape[1],
            "has_scores": found.scores is not None,
        },
        "thumbnails": {
            "side": choose_thumbnail_side(len(explorer.names)),
            "across": ACROSS,
            "each": PER_SHEET,
        },
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        title=explorer.title,
        facts=explorer.facts,
        style=style,
        script=script,
        policy=hash_source(script),
        data=to_json(data),
        blocks={name: base64.b64encode(part).decode() for name, part in blocks.items()},
    )


def write_parquet(path: Path, explorer: Explorer, thumbnails: Iterable[Pixels]) -> None:
    """Write a table in the layout that Embedding Atlas reads.

    Columns ``projection_x`` and ``projection_y`` are the map, ``neighbors`` the nearest images by
    the first measure, as rows of the table, and ``image`` holds thumbnails.
    """
    import pyarrow
    from pyarrow import parquet

    side = choose_thumbnail_side(len(explorer.names))
    pictures = [encode_jpeg(make_thumbnail(pixels, side)) for pixels in thumbnails]
    names = [name.encode("utf-8", "replace").decode() for name in explorer.names]
    images = [{"bytes": file, "path": name} for file, name in zip(pictures, names, strict=True)]
    arrays: dict[str, Any] = {
        "name": pyarrow.array(names),
        "image": pyarrow.array(images),
        "projection_x": pyarrow.array(explorer.points[:, 0].astype(np.float32)),
        "projection_y": pyarrow.array(explorer.points[:, 1].astype(np.float32)),
    }
    for column in explorer.columns:
        values: Any = column.values
        if column.categories is not None:
            words = [each.encode("utf-8", "replace").decode() for each in column.categories]
            known = [None, *words[1:]] if column.has_none else words
            values = [known[int(place)] for place in column.values]
        arrays[column.title] = pyarrow.array(values)
    for number, each in enumerate(explorer.neighbours):
        distances = each.values if number else 1.0 - each.values  # the first is a cosine
        rows = [
            {"ids": ids[ids >= 0].tolist(), "distances": far[ids >= 0].tolist()}
            for ids, far in zip(each.indices, distances, strict=True)
        ]
        arrays["neighbors" if number == 0 else f"neighbors_{number + 1}"] = pyarrow.array(rows)
    with create_file(path) as file:
        parquet.write_table(pyarrow.table(arrays), file)
