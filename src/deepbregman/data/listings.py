"""A list of image files with labels to a source: which can be read, their frame, their splits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepbregman.data.frames import (
    UnreadableImage,
    decode_frame,
    fitted_size,
    map_files,
    read_size,
)
from deepbregman.data.images import FileImages, Progress, Source, Split
from deepbregman.data.splits import grouped_split, stratified_split
from deepbregman.errors import UserError

TEST_FRACTION = 0.2
"""Share of labelled files set aside as test split where there is none."""
FULL_DECODE_LIMIT = 20_000
"""Up to so many files each is decoded on opening; beyond, only its header is read."""
_FRAME_MARGIN = 2.25
"""Frames are this much larger than the training images, so that random crops keep detail, and so
that ImageNet's usual 500 px need no resizing for 224 px before they reach the device."""


class Files(NamedTuple):
    """The image files of one split, in the order they are numbered by."""

    paths: list[Path]
    labels: list[int] | None = None


class Listing(NamedTuple):
    """What a data set of files holds, before any of them is opened."""

    folder: Path
    """Names are relative to it."""
    train: Files
    test: Files | None = None
    classes: tuple[str, ...] | None = None
    groups: list[int] | None = None
    """For each training image the number of its group, such as a lesion: where a test split is set
    aside, no group lies on both sides."""
    num_ignored: int = 0
    sets_test_aside: bool = True
    """Whether a fifth of labelled images is set aside where there is no test split."""


class _Readable(NamedTuple):
    kept: list[bool]
    side: int
    fills_frame: bool


def open_listing(
    listing: Listing,
    *,
    name: str,
    image_size: int,
    seed: int = 0,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
    read_headers: bool = True,
    imbalanced: bool = False,
) -> Source:
    """Check the files of a listing and make a source of them.

    Args:
        listing: The files.
        name: Of the source.
        image_size: Side of the training images; frames are at most 2.25 times that.
        seed: Of the test split, where one is set aside.
        skip_unreadable: Leave unreadable images out instead of stopping at the first.
        progress: Called with the files checked and the files in all.
        read_headers: Read the headers of a set that is too large to decode here. Without, its
            frame has its largest side, and an unreadable file is met when it is decoded.
        imbalanced: Of the source.

    Raises:
        UserError: When there is no training image that can be read, or one cannot be.
    """
    folder, num_train = listing.folder, len(listing.train.paths)
    paths = listing.train.paths + (listing.test.paths if listing.test is not None else [])
    if len(paths) > FULL_DECODE_LIMIT and not read_headers:
        readable = _Readable([True] * len(paths), _largest_side(image_size), False)
    else:
        readable = _check_files(folder, paths, image_size, skip_unreadable, progress)
    kept = iter(readable.kept)
    train = _make_split(folder, listing.train, kept, readable)
    test = None if listing.test is None else _make_split(folder, listing.test, kept, readable)
    if len(train) == 0:
        raise UserError(f"data.source {str(folder)!r}: none of the training images can be read")
    if test is None and train.labels is not None and listing.sets_test_aside:
        if listing.groups is None:
            rest, held = stratified_split(train.labels, len(train), TEST_FRACTION, seed)
        else:
            groups = torch.tensor(listing.groups)[torch.tensor(readable.kept[:num_train])]
            rest, held = grouped_split(train.labels, groups, TEST_FRACTION, seed)
        train, test = train.select(rest), train.select(held)
    return Source(
        name,
        train,
        test,
        classes=listing.classes,
        num_skipped=len(paths) - sum(readable.kept),
        num_ignored=listing.num_ignored,
        imbalanced=imbalanced,
    )


def without_unreadable(
    source: Source,
    progress: Progress | None = None,
    names: Sequence[str] = ("train", "test"),
) -> Source:
    """Leave out the files that cannot be decoded, of a set too large for that on opening.

    What is left keeps its split: an image that was trained on is not tested on.

    Args:
        source: whose files were opened with ``skip_unreadable``.
        progress: Called with the files decoded and the files in all, for each split.
        names: Of the splits to look through.

    Returns:
        The source itself where nothing is to be left out.
    """
    splits = {name: split for name in names if (split := getattr(source, name)) is not None}
    if source.num_skipped + sum(map(len, splits.values())) <= FULL_DECODE_LIMIT:
        return source
    found = {name: _decodable(split, progress) for name, split in splits.items()}
    num_skipped = sum(map(len, splits.values())) - sum(map(len, found.values()))
    if num_skipped == 0:
        return source
    if len(found["train"]) == 0:
        raise UserError(f"data {source.name!r}: none of the training images can be read")
    left: dict[str, Any] = {**found, "num_skipped": source.num_skipped + num_skipped}
    return replace(source, **left)


def _decodable(split: Split, progress: Progress | None) -> Split:
    images = split.images
    if not isinstance(images, FileImages):
        return split
    sizes = map_files(lambda path: decode_frame(path, images.side).size, images.paths, progress)
    good = [i for i, size in enumerate(sizes) if not isinstance(size, UnreadableImage)]
    return split if len(good) == len(split) else split.select(torch.tensor(good, dtype=torch.int64))


def open_files(paths: Sequence[Path], *, image_size: int) -> FileImages:
    """Take single files as images, in the frames that a folder of them would have.

    Args:
        paths: The files.
        image_size: Side of the training images.

    Raises:
        UserError: When a file cannot be read as an image; there is no going on without it.
    """
    side = _largest_side(image_size)
    sizes = map_files(lambda path: decode_frame(path, side).size, paths)
    for path, size in zip(paths, sizes, strict=True):
        if isinstance(size, UnreadableImage):
            raise UserError(
                f"image file {str(path)!r}: cannot be read ({size.__cause__}); give another file"
            ) from size
    return FileImages(tuple(paths), side)


def _largest_side(image_size: int) -> int:
    return math.ceil(_FRAME_MARGIN * image_size)


def _check_files(
    folder: Path,
    paths: list[Path],
    image_size: int,
    skip_unreadable: bool,
    progress: Progress | None,
) -> _Readable:
    """Open every file, decode it where there are not too many, and choose the frame."""
    decode_all = len(paths) <= FULL_DECODE_LIMIT
    sizes = map_files(read_size, paths, None if decode_all else progress)
    known = _sizes_or_stop(sizes, skip_unreadable)
    if not known:
        raise UserError(f"data.source {str(folder)!r}: none of its {len(paths)} images can be read")
    side = min(max(max(size) for size in known), _largest_side(image_size))
    if decode_all:
        sizes = map_files(lambda path: decode_frame(path, side).size, paths, progress)
        known = _sizes_or_stop(sizes, skip_unreadable)
    fills = all(fitted_size(*size, side) == (side, side) for size in known)
    return _Readable([not isinstance(size, UnreadableImage) for size in sizes], side, fills)


def _sizes_or_stop(
    sizes: list[tuple[int, int] | UnreadableImage], skip_unreadable: bool
) -> list[tuple[int, int]]:
    for size in sizes:
        if isinstance(size, UnreadableImage) and not skip_unreadable:
            raise size
    return [size for size in sizes if not isinstance(size, UnreadableImage)]


def _make_split(folder: Path, files: Files, kept: Iterator[bool], readable: _Readable) -> Split:
    """Make a split of the files that are kept, using up as many of ``kept``."""
    keep = list(islice(kept, len(files.paths)))
    paths = tuple(path for path, good in zip(files.paths, keep, strict=True) if good)
    labels = None
    if files.labels is not None:
        labels = torch.tensor(files.labels, dtype=torch.int64)[torch.tensor(keep, dtype=torch.bool)]
    prefix = len(str(folder / "x")) - 1  # a million calls of relative_to take longer than listing
    names = tuple(path.as_posix()[prefix:] for path in paths)
    return Split(FileImages(paths, readable.side, readable.fills_frame), labels, names)
