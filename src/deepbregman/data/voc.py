"""Pascal VOC: photographs with boxes, in the layout of the devkit.

::

    VOCdevkit/VOC2007/ImageSets/Main/trainval.txt   a name per line
                      Annotations/000005.xml
                      JPEGImages/000005.jpg
    VOCdevkit/VOC2012/...
"""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepbregman.data.datasets import expand_home
from deepbregman.data.decoding import UnreadableImage, read_size
from deepbregman.data.frames import map_files
from deepbregman.errors import UserError

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
TRAINING = (("VOC2007", "trainval"), ("VOC2012", "trainval"))
TEST = ("VOC2007", "test")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class Objects(NamedTuple):
    """The objects of one image."""

    boxes: Tensor
    """float32 (n, 4): left, top, right, bottom; from 0, the right and the bottom excluded."""
    labels: Tensor  # int64 (n,): positions in CLASSES
    difficult: Tensor
    """bool (n,): objects that count neither as found nor as missed."""


@dataclass(frozen=True, eq=False)
class Detections:
    """Photographs and the objects in them."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    """Year and name of each, such as VOC2007/000005."""
    objects: tuple[Objects, ...]

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True, eq=False)
class Voc:
    """The detection data of a devkit."""

    train: Detections
    """trainval of 2007 and 2012, as far as they are there."""
    test: Detections
    """test of 2007."""
    found: tuple[str, ...]
    """The parts that are there, such as VOC2007 trainval."""
    missing: tuple[str, ...]
    """The parts of the usual protocol that are not."""


def open_voc(root: Path | str) -> Voc:
    """Read the annotations of a devkit and check that every image is there.

    The root is VOCdevkit, or the folder that holds it, with both years, one, or a part of one.
    """
    root = expand_home(Path(root))
    devkit = find_devkit(root)
    parts = (*TRAINING, TEST)
    lists = {(y, s): devkit / y / "ImageSets" / "Main" / f"{s}.txt" for y, s in parts}
    here = [part for part in parts if lists[part].is_file()]
    found = tuple(" ".join(part) for part in here)
    if TEST not in here or len(here) < 2:
        lacking = [lists[TRAINING[0]]] * (here in ([], [TEST])) + [lists[TEST]] * (TEST not in here)
        raise UserError(
            f"{str(root)!r} has {', '.join(found) or 'no split of Pascal VOC'}: detection is "
            "trained on trainval of 2007, 2012 or both and tested on test of 2007, so "
            f"{' and '.join(map(str, lacking))} must be there; unpack that part of the devkit"
        )
    entries = {part: _read_names(lists[part]) for part in here}
    pairs = [(devkit / year, name) for (year, _), names in entries.items() for name in names]
    photographs = _read_all(pairs)
    num_train = sum(len(names) for part, names in entries.items() if part != TEST)
    parted = photographs[:num_train], photographs[num_train:]
    train, test = (Detections(*zip(*part, strict=True)) for part in parted)
    twice = set(train.names) & set(test.names)
    if twice:
        raise UserError(
            f"{lists[TEST]}: {min(twice)} is also among the training images ({len(twice)} are): "
            "an image must not be trained on and tested on; restore the list of the devkit"
        )
    missing = tuple(" ".join(part) for part in parts if part not in here)
    return Voc(train, test, found, missing)


def find_devkit(root: Path) -> Path:
    """Return the folder of the years: VOCdevkit in ``root``, or ``root`` if that alone has any."""
    inside = root / "VOCdevkit"
    return root if not inside.is_dir() and any(root.glob("VOC20??")) else inside


def _read_names(path: Path) -> list[str]:
    try:
        names = path.read_text(encoding="utf-8").split("\n")
        names = [name.strip() for name in names if name.strip()]
        wrong = [name for name in names if not _NAME.fullmatch(name)]
        if wrong:  # a name with a folder could lead to any file
            raise ValueError(f"{wrong[0][:80]!r} is not the name of an image")
        if not names or len(set(names)) < len(names):
            raise ValueError("it names no image, or one twice")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be used ({error}): restore it from the devkit") from None
    return names


def _read_all(pairs: list[tuple[Path, str]]) -> list[tuple[Path, str, Objects]]:
    """Return the path, the name and the objects of each photograph."""

    def read(pair: tuple[Path, str]) -> tuple[Path, str, Objects]:
        year, name = pair
        image = year / "JPEGImages" / f"{name}.jpg"
        objects = _read_annotation(year / "Annotations" / f"{name}.xml", read_size(image))
        return image, f"{year.name}/{name}", objects

    photographs = []
    for (year, name), result in zip(pairs, map_files(read, pairs), strict=True):
        if isinstance(result, UnreadableImage):
            raise UserError(
                f"image {year / 'JPEGImages' / name}.jpg cannot be read ({result.__cause__}): "
                "every image of a list must be there; restore it from the devkit"
            )
        photographs.append(result)
    return photographs


def _read_annotation(path: Path, size: tuple[int, int]) -> Objects:
    """Read the objects of an image; boxes are cut off at its true height and width.

    What the XML says about the size is not used: a few files of the devkit have it wrong.
    """
    try:
        # Decoded here, so that no declared encoding can hide a document type from the search.
        text = path.read_bytes().decode("utf-8-sig")
        if "<!DOCTYPE" in text:
            raise ValueError("it declares a document type, whose entities can fill the memory")
        nodes = ElementTree.fromstring(text).findall("object")
        rows = [_read_object(node, size) for node in nodes]
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise UserError(
            f"annotation {path} cannot be used ({error}): restore it from the devkit"
        ) from None
    return Objects(
        torch.tensor([row[0] for row in rows], dtype=torch.float32).view(-1, 4),
        torch.tensor([row[1] for row in rows], dtype=torch.int64),
        torch.tensor([row[2] for row in rows], dtype=torch.bool),
    )


def _read_object(node: ElementTree.Element, size: tuple[int, int]) -> tuple[list[float], int, bool]:
    """Return a box, a class, and whether it is difficult.

    The box counts from 0 with its end excluded; the devkit counts from 1 and includes the end.
    """
    name = (node.findtext("name") or "").strip()
    if name not in CLASSES:
        raise ValueError(f"{name[:40]!r} is not one of the 20 classes")
    words = [(node.findtext(f"bndbox/{corner}") or "nan").strip() for corner in _CORNERS]
    xmin, ymin, xmax, ymax = map(float, words)
    height, width = size
    box = [max(xmin - 1.0, 0.0), max(ymin - 1.0, 0.0), min(xmax, width), min(ymax, height)]
    # One chain of comparisons, so that a value that is not a number fails it too.
    if not (xmin - 1.0 < xmax and ymin - 1.0 < ymax and box[0] < box[2] and box[1] < box[3]):
        raise ValueError(
            f"the box of a {name} is ({', '.join(words)[:80]}), which is not a box in an image of "
            f"{width} x {height} pixels"
        )
    return box, CLASSES.index(name), (node.findtext("difficult") or "0").strip() == "1"
