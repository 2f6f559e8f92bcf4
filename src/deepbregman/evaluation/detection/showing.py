"""What a person looks at: a table of classes, and photographs with boxes drawn on them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.table import Table

from deepbregman.data.frames import decode_whole
from deepbregman.data.voc import CLASSES, Detections
from deepbregman.runs import replacing

from .metric import Found

SHOWN = 6
"""Photographs in the picture."""
COLUMNS = 3
LEAST_SCORE = 0.5
"""Detections below are not drawn; where all are below, the best one is."""
CELL = (480, 380)
TRUTH, DETECTION, HARD = "#ffffff", "#ff8c1a", "#9a9a9a"


def class_table(per_class: Mapping[tuple[str, str, int], Mapping[str, float]]) -> Table:
    """Draw AP50 by class, a column for each architecture and arm: the mean over seeds.

    Args:
        per_class: (architecture, arm, seed) -> class -> AP50 in per cent.
    """
    columns: dict[str, list[Mapping[str, float]]] = {}
    for (architecture, arm, _), values in per_class.items():
        columns.setdefault(f"{architecture.upper()}, {arm}", []).append(values)
    table = Table(title="AP50 by class, %", title_justify="left")
    table.add_column("class")
    for variant in columns:
        table.add_column(variant, justify="right")
    present = [name for name in CLASSES if any(name in values for values in per_class.values())]
    means = [
        {name: fmean(seed[name] for seed in seeds) for name in present if name in seeds[0]}
        for seeds in columns.values()
    ]
    for name in present:
        table.add_row(name, *(f"{mean[name]:.1f}" if name in mean else "" for mean in means))
    table.add_section()
    table.add_row("mean", *(f"{fmean(mean.values()):.1f}" if mean else "" for mean in means))
    return table


def draw_detections(path: Path, data: Detections, found: Sequence[Found]) -> None:
    """Write a picture of a few test photographs, evenly taken, with objects and detections.

    Objects are white (grey where difficult), detections orange with class and score.
    """
    count = min(SHOWN, len(data))
    chosen = [round(position * (len(data) - 1) / max(count - 1, 1)) for position in range(count)]
    columns = min(COLUMNS, count)
    lines = -(-count // columns)
    sheet = Image.new("RGB", (columns * CELL[0], lines * CELL[1]), "#202020")
    for position, index in enumerate(dict.fromkeys(chosen)):
        cell = _photograph(data, index, found[index])
        corner = (position % columns * CELL[0], position // columns * CELL[1])
        offset = ((CELL[0] - cell.width) // 2, (CELL[1] - cell.height) // 2)
        sheet.paste(cell, (corner[0] + offset[0], corner[1] + offset[1]))
    with replacing(path) as file:
        sheet.save(file, format="png")


def _photograph(data: Detections, index: int, found: Found) -> Image.Image:
    pixels = decode_whole(data.paths[index]).transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    scale = min((CELL[0] - 8) / image.width, (CELL[1] - 8) / image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=13)
    boxes, labels, difficult = (part.tolist() for part in data.objects[index])
    for box, label, hard in zip(boxes, labels, difficult, strict=True):
        colour = HARD if hard else TRUTH
        place = tuple(scale * value for value in box)
        draw.rectangle(place, outline=colour, width=2)
        words = CLASSES[label]
        _label(draw, (place[2] - draw.textlength(words, font) - 6, place[3] - 18), words, colour)
    least = min(LEAST_SCORE, float(found.scores.max()) if len(found.scores) else 0.0)
    for box, label, score in zip(*(part.tolist() for part in found), strict=True):
        if score >= least:
            place = tuple(scale * value for value in box)
            draw.rectangle(place, outline=DETECTION, width=2)
            _label(draw, (place[0], place[1]), f"{CLASSES[label]} {score:.2f}", DETECTION)
    return image


def _label(draw: ImageDraw.ImageDraw, corner: tuple[float, float], words: str, colour: str) -> None:
    font = ImageFont.load_default(size=13)
    left, top = max(corner[0], 0.0), max(corner[1], 0.0)
    draw.rectangle((left, top, left + draw.textlength(words, font) + 6, top + 17), fill=colour)
    draw.text((left + 3, top + 1), words, fill="black", font=font)
