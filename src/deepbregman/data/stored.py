"""What tar shards, Parquet tables and Hugging Face datasets share: their index, splits and labels.

``formats.py`` finds out which of them a dataset is. Needs no torch.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from deepbregman.data.folders import SPLIT_WORDS, quote_some
from deepbregman.errors import UserError, abbreviate
from deepbregman.terminal import count_words

HUB = "hf:"
"""Begins the name of a dataset of the Hugging Face hub."""
IMAGES = ("image", "img", "images", "picture")
"""Names of a column, or of a key, of images."""
LABELS = ("label", "labels", "target", "fine_label", "class")
"""Names of a column, or of a key, of labels; the first that is there."""


class Store(ABC):
    """Holds many images that are not files of their own, such as the rows of a table."""

    title: str
    """What they are the rows of, for errors and lists."""
    shards: npt.NDArray[np.int64] | None = None
    """(N,) the part of the store that each image lies in, where parts are best read in turn."""

    @abstractmethod
    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Name an image, for errors and lists."""
        return f"{self.title}[{index}]"

    @abstractmethod
    def read(self, index: int) -> bytes | Image.Image:
        """Return an image, encoded as in a file, or decoded."""

    @abstractmethod
    def identity(self) -> str:
        """Return a text that changes when any of the images does."""


class StoredSplit(NamedTuple):
    """The images of one split, not decoded."""

    store: Store
    labels: npt.NDArray[np.int64] | None
    names: tuple[str, ...] | None = None


class StoredData(NamedTuple):
    """The index of a dataset."""

    name: str
    splits: dict[str, StoredSplit]
    """``train``, and ``test`` where there is one."""
    classes: tuple[str, ...] | None


def list_parts(path: Path, suffix: str) -> list[Path]:
    """List the files of a suffix in a folder, two levels deep, or the one file that is named."""
    if path.suffix.lower() == suffix and not path.is_dir():  # Spark names folders so
        if not path.is_file():
            raise UserError(
                f"data.source {str(path)!r}: no such file; give a {suffix} file of this machine, "
                "or the folder of all of them; patterns and addresses are not read"
            )
        return [path]
    if not path.is_dir():
        return []
    found = [*path.glob(f"*{suffix}"), *path.glob(f"*/*{suffix}")]
    return sorted(part for part in found if not part.name.startswith(".") and part.is_file())


def group_by_split(path: Path, parts: Sequence[Path]) -> dict[str, list[Path]]:
    """Sort files into train and test by the words in their names, or in those of their folders.

    :func:`choose_splits` says which one is the test split. Without such words all is train.
    """
    groups: dict[str, list[Path]] = {}
    for part in parts:
        inside = part.relative_to(path).as_posix() if path.is_dir() else part.name
        words = [SPLIT_WORDS[w] for w in re.split(r"[-_./ ]+", inside.lower()) if w in SPLIT_WORDS]
        groups.setdefault(words[0] if words else "", []).append(part)
    unnamed = groups.pop("", [])
    if unnamed and groups:
        raise UserError(
            f"data.source {str(path)!r}: {quote_some(unnamed)} names no split, while others name "
            f"{', '.join(sorted(groups))}; put train, test or val into every file name, or none"
        )
    train = groups.get("train", unnamed)
    if not train:
        raise UserError(
            f"data.source {str(path)!r}: has {', '.join(sorted(groups))} but no train; name the "
            "files to train on train-..."
        )
    return {**groups, "train": train}


NO_LABEL = (None, -1, "-1")
"""Labels of an image without a label, as test splits of benchmarks have them."""
Labels = Sequence[str | int] | None
Part = TypeVar("Part")


def _has_any(labels: Labels) -> bool:
    return labels is not None and any(label not in NO_LABEL for label in labels)


def read_splits(
    names: Collection[str], read: Callable[[str], Part], labels_of: Callable[[Part], Labels]
) -> dict[str, Part]:
    """Read ``train`` and ``test``, and ``val`` only if :func:`choose_splits` may take it."""
    found = {name: read(name) for name in ("train", "test") if name in names}
    if "val" in names and not ("test" in found and _has_any(labels_of(found["test"]))):
        found["val"] = read("val")
    return found


def choose_splits(splits: Mapping[str, Labels]) -> dict[str, tuple[str, Labels]]:
    """Return for ``train`` and ``test`` the name of the split and its labels.

    ``val`` is the test split where there is no ``test``, or where only ``val`` has labels.
    """
    known = {name: labels if _has_any(labels) else None for name, labels in splits.items()}
    tests = [name for name in ("test", "val") if name in known]
    labelled = [name for name in tests if known[name] is not None]
    chosen = {"train": "train"}
    if tests:
        chosen["test"] = (labelled or tests)[0]
    return {role: (name, known[name]) for role, name in chosen.items()}


def refuse_gaps(highest: int, num_images: int) -> None:
    """Refuse class numbers far above the number of images: each number would be a class."""
    if highest >= limit_classes(num_images):
        raise UserError(
            f"a label is {highest}, of {count_words(num_images, 'image')}: classes are numbered "
            "from 0 without large gaps; renumber them, or give their names as text"
        )


def limit_classes(num_images: int) -> int:
    """Return the largest plausible number of classes; more are taken for a mistake."""
    return max(1000, 10 * num_images)


def find_column(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the first of some names that a table has as a column, in any case."""
    known = {column.lower(): column for column in columns} | {column: column for column in columns}
    return next((known[name] for name in names if name in known), None)


def number_labels(
    splits: Mapping[str, Sequence[str | int] | None], names: Sequence[str] | None = None
) -> tuple[dict[str, npt.NDArray[np.int64] | None], tuple[str, ...] | None]:
    """Number the labels of some splits from 0, texts in their order, and name the classes."""
    given = [label for labels in splits.values() if labels is not None for label in labels]
    for label in given:
        is_nan = isinstance(label, float) and not math.isfinite(label)
        if label is None or is_nan or not isinstance(label, Hashable):
            raise UserError(
                f"a label is {abbreviate(label)}: each image has one class, a whole number or a "
                "word; mend the labels, or leave them out to pretrain without"
            )
    known: set[str | int] = set(given)
    if not known:
        return dict.fromkeys(splits), None
    if all(isinstance(label, int) for label in known):
        order: dict[str | int, int] = {label: int(label) for label in known}
        if min(order.values()) < 0:
            raise UserError(
                f"the label {min(order.values())} is below 0: classes count from 0; give every "
                "image of a split a label, or all of them -1"
            )
        count = 1 + max(order.values())
        classes = tuple(names or ()) if names and len(names) >= count else None
        if classes is None:
            refuse_gaps(count - 1, len(given))
        classes = classes or tuple(str(number) for number in range(count))
    else:
        classes = tuple(sorted(map(str, known)))
        order = {label: classes.index(str(label)) for label in known}

    def number(labels: Sequence[str | int] | None) -> npt.NDArray[np.int64] | None:
        return None if labels is None else np.array([order[x] for x in labels], dtype=np.int64)

    return {name: number(labels) for name, labels in splits.items()}, classes
