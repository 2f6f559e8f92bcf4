"""Queries of a search and their answers, and an index by which the next search needs no torch.

Loading torch takes seconds, comparing images takes a moment. So the first search keeps what the
next ones need: names, features, and the tangents of the generator at the scores. The index answers
for images of the folder; for any other image the networks are loaded again.

The index is a file in ``RUN/features``, beside the cache of features. Its name is a digest of all
that the answers depend on: the checkpoint, the files, the options and the versions. So it is never
out of date, and it may be deleted at any time.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepbregman.data.datasets import expand_home
from deepbregman.data.decoding import decode_image
from deepbregman.data.folders import Listing, quote_some
from deepbregman.data.labels import index_last_parts, join_accents
from deepbregman.errors import UserError, notify
from deepbregman.files import digest, digest_files, replace_file
from deepbregman.runs import Run, list_versions

FOLDER = "features"
"""Name of the folder in a run's folder."""
PLACE = re.compile(r"(train|test):(\d{1,18})")
"""A query that names an image by its place in a split."""
LARGEST_BYTES = 2**28
"""Of an index; a larger one is not kept, since reading it would take long."""
_TEXT_FIELDS = ("sizes", "names", "files", "classes", "side", "notice")  # kept as JSON

Pixels = npt.NDArray[np.uint8]
Vectors = npt.NDArray[np.float32] | npt.NDArray[np.float64]


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
    """Find the image that a query names, as split and index; None for a file from elsewhere."""
    place = PLACE.fullmatch(words)
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
    for write in (str, join_accents):  # first as it is
        for name in reversed(list(splits)):  # the test split first
            names = list(map(write, splits[name].names or ()))
            if write(words) in names:
                return name, names.index(write(words))
    last = index_last_parts([name for split in splits.values() for name in split.names or ()])
    if words in last:
        counts = {name: len(split.names or ()) for name, split in splits.items()}
        places = [(name, index) for name, count in counts.items() for index in range(count)]
        return places[last[words]]
    every = [name for split in splits.values() for name in split.names or ()]
    several = [name for name in every if name.rpartition("/")[2] == words]
    if len(several) > 1:
        raise UserError(
            f"query {words!r}: {len(several)} images of {data!r} have this name "
            f"({quote_some(several)}); give one of these names"
        )
    raise refuse_query(words, data)


def refuse_query(words: str, data: str) -> UserError:
    """Say that a query names no image."""
    return UserError(
        f"query {words!r}: neither an image file nor an image of {data!r}; give a file, "
        "the name of an image relative to the data's folder (the last part is enough, if no other "
        "image has it), or its place, such as train:17"
    )


class Planes(NamedTuple):
    """A plane and a point for each image, by which images are compared.

    The height of image j's plane at image i's point is their cosine. For the divergence the planes
    are tangents of the generator: D(i || j) is how far j's plane lies below i's own at i's point.
    A slope that is 1 in one place and 0 elsewhere, as in the hard form, is given by that place.
    """

    slopes: Vectors | npt.NDArray[np.int64]  # (N, m), or (N,) places
    offsets: Vectors  # (N,)
    points: Vectors  # (N, m)


class SearchIndex(NamedTuple):
    """The images of some splits, one split after the other, ready to be searched."""

    sizes: dict[str, int]
    """Number of images of each split."""
    names: list[str]
    files: list[str]
    classes: list[str | None]
    """The class of each image; None where it is not known."""
    side: int
    """Side of the frame that images are shown in."""
    notice: str
    """The note about the images that the user was given; may be empty."""
    order: npt.NDArray[np.int64]
    """(N,) a shuffle of the images, by which ties are ordered."""
    measures: dict[str, Planes]

    def find_row(self, words: str, data: str) -> int | None:
        """Return the row of the image that a query names; None for any other image."""
        ends = dict(zip(self.sizes, accumulate(self.sizes.values()), strict=True))
        parts = {name: slice(ends[name] - size, ends[name]) for name, size in self.sizes.items()}
        known = {
            name: Names(self.sizes[name], self.names[part], self.files[part])
            for name, part in parts.items()
        }
        place = find_place(words, known, data)
        return None if place is None else parts[place[0]].start + place[1]

    def rank(self, measure: str, row: int, k: int) -> list[tuple[int, float]]:
        """Return the k images nearest to one of them, each with its cosine or divergence."""
        planes = self.measures[measure]
        slopes, point = planes.slopes, planes.points[row]
        heights = (point[slopes] if slopes.ndim == 1 else slopes @ point) + planes.offsets  # (N,)
        if measure == "divergence":
            heights = np.minimum(heights - heights[row], 0.0)
        heights = heights.astype(np.float32)
        ranked = self.order[np.argsort(-heights[self.order], kind="stable")[: k + 1]]
        values = np.abs(heights) if measure == "divergence" else heights
        return [(int(i), float(values[i])) for i in ranked if i != row][:k]

    def answer(self, row: int, measures: Sequence[str], k: int) -> Answer:
        """Find the images nearest to one of them."""
        hits = {
            measure: tuple(Hit(self._image(i), value) for i, value in self.rank(measure, row, k))
            for measure in measures
        }
        return Answer(self._image(row), hits)

    def _image(self, row: int) -> Image:
        read = partial(decode_image, Path(self.files[row]), self.side)
        return Image(self.names[row], self.classes[row], read)


def name_index(run: Run, listing: Listing, **options: object) -> str | None:
    """Return the digest of all that answers depend on; None where a file cannot be looked at."""
    files = [file for split in listing.splits.values() for file in split.paths]
    try:
        checkpoints = [run.path / "config.toml", *sorted(run.checkpoints.iterdir())]
        known = json.dumps([options, list_versions(), digest_files(checkpoints)])
        shown = json.dumps([listing.classes, {n: s.labels for n, s in listing.splits.items()}])
        return digest(known.encode(), digest_files(files).encode(), shown.encode())
    except OSError:  # the search that loads the run explains the error
        return None


def write_index(folder: Path, networks: str, key: str, index: SearchIndex) -> None:
    """Keep an index, unless it is too large or the folder cannot be written to.

    Its name begins with the digest of the run's networks, as those of all files of the folder do.
    """
    from safetensors.numpy import save

    arrays: dict[str, npt.NDArray[np.generic]] = {"order": index.order}
    for measure, planes in index.measures.items():
        parts = planes._asdict()
        if planes.points is planes.slopes:
            del parts["points"]
        arrays |= {f"{measure}.{name}": np.ascontiguousarray(a) for name, a in parts.items()}
    if sum(array.nbytes for array in arrays.values()) > LARGEST_BYTES:
        return
    words = {name: getattr(index, name) for name in _TEXT_FIELDS}
    content = save(arrays, {"index": json.dumps(words)})
    with suppress(OSError):  # a full disk: the next search loads the run again
        folder.mkdir(exist_ok=True)
        with replace_file(folder / f"{networks}-{key}.safetensors") as file:
            file.write(content)


def read_index(run: Run, key: str) -> SearchIndex | None:
    """Read an index; None if there is none, or if it is damaged."""
    from safetensors import SafetensorError, safe_open

    folder = run.path / FOLDER
    for path in sorted(folder.glob(f"*-{key}.safetensors")) if not folder.is_symlink() else ():
        try:
            with safe_open(path, framework="np") as file:
                words = json.loads(file.metadata()["index"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            measures = {}
            for measure in ("cosine", "divergence"):
                if (slopes := arrays.get(f"{measure}.slopes")) is not None:
                    points = arrays.get(f"{measure}.points", slopes)
                    measures[measure] = Planes(slopes, arrays[f"{measure}.offsets"], points)
            with suppress(OSError):  # the folder of another user
                os.utime(path)  # it was used
            return SearchIndex(order=arrays["order"], measures=measures, **words)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            continue
    return None


def answer_by_index(
    run: Run, key: str, queries: Sequence[str], *, data: str | None, k: int, by: Sequence[str]
) -> list[Answer] | None:
    """Answer queries by a kept index; None if it cannot, and for errors of the user."""
    index = read_index(run, key)
    if index is None:
        return None
    source = data or run.config.data.source
    try:
        rows = [index.find_row(query, source) for query in queries]
    except UserError:
        return None
    known = [row for row in rows if row is not None]
    measures = [name for name in index.measures if name in by or not by]
    if len(known) < len(rows) or k >= len(index.names) or not set(by) <= set(measures):
        return None
    if index.notice:
        notify(f"{index.notice} of {source}")
    return [index.answer(row, measures, k) for row in known]
