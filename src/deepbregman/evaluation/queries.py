"""Queries of a search and their answers; needs no torch."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepbregman.data.datasets import expand_home
from deepbregman.errors import UserError

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Image:
    """An image that was searched for or found."""

    name: str
    class_name: str | None
    """None if the class is not known."""
    read: Callable[[], Pixels]
    """Decodes it."""

    @cached_property
    def pixels(self) -> Pixels:
        """(H, W, 3)."""
        return self.read()


class Hit(NamedTuple):
    """One of a query's nearest images."""

    image: Image
    value: float
    """Its cosine with the query, or the divergence D(query || image)."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The nearest images of one query."""

    query: Image
    hits: dict[str, tuple[Hit, ...]]
    """For each measure, the nearest images in order."""


class SearchResult(NamedTuple):
    """The answers to the queries."""

    answers: list[Answer]
    sheet: Path | None = None
    """The picture that was drawn."""


class Names(NamedTuple):
    """The names by which a query can refer to the images of a split."""

    size: int
    """Number of images: ``test:17`` is the place of one."""
    names: Sequence[str] | None
    files: Sequence[Path | str]
    """Empty where the images are not files."""


def find_place(words: str, splits: Mapping[str, Names], data: str) -> tuple[str, int] | None:
    """Find the image that a query names, as split and index; None for a file from elsewhere.

    Args:
        data: the name of the dataset, for errors.
    """
    place = re.fullmatch(r"(train|test):(\d{1,18})", words)
    if place is not None:
        name, index = place[1], int(place[2])
        size = splits[name].size if name in splits else 0
        if index >= size:
            raise UserError(
                f"query {words!r}: the {name} split of {data!r} has {size} images, counted from 0"
            )
        return name, index
    path = expand_home(Path(words))
    if path.is_file():
        real = os.path.realpath(path)
        for name, split in splits.items():
            for index, other in enumerate(split.files):
                if os.path.basename(other) == path.name and os.path.realpath(other) == real:
                    return name, index
        return None
    for name in reversed(list(splits)):  # the test split first
        names = splits[name].names
        if names is not None and words in names:
            return name, names.index(words)
    raise UserError(
        f"query {words!r}: neither an image file nor an image of {data!r}; give a file, "
        "the name of an image relative to the data's folder, or its place, such as train:17"
    )
