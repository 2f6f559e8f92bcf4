"""Images that are decoded when asked for: which can be read, their frame, and their splits.

They are files of a listing, or lie in a store such as a table.
"""

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepbregman.data.decoding import UnreadableImage, fit_size, measure_decoded, read_size
from deepbregman.data.folders import Files, Listing, quote_some
from deepbregman.data.frames import Sizes, collect_sizes, map_files
from deepbregman.data.images import (
    FileImages,
    ImagePlace,
    Progress,
    Source,
    Split,
    StoredImages,
    spread_places,
)
from deepbregman.data.splits import grouped_split, stratified_split
from deepbregman.data.stored import Store, StoredData
from deepbregman.errors import UserError
from deepbregman.files import digest, digest_files, find_user_cache, replace_file
from deepbregman.terminal import count_words, ignore_progress

TEST_FRACTION = 0.2
"""Share of labelled images that becomes the test split where there is none."""
FULL_DECODE_LIMIT = 20_000
"""Up to this number, files are decoded on opening; of more, only the headers are read."""
CACHED_FROM = 1000
"""With this number of files or more, their sizes are kept in the user's cache."""
_SAMPLE = 256  # images of a store that are looked at
_FRAME_MARGIN = 2.25
"""Frames are this much larger than the training images, so that random crops keep detail, and so
that ImageNet's usual 500 px need no resizing for 224 px before they reach the device."""


class _Readable(NamedTuple):
    kept: list[bool]
    side: int
    fills_frame: bool


def open_listing(
    listing: Listing,
    name: str,
    image_size: int,
    skip_unreadable: bool = False,
    progress: Progress = ignore_progress,
) -> Source:
    """Check the files of a listing and make a source of them, in frames of 2.25 times the image.

    Where there are too many files to decode and the headers are not to be read, the frame has its
    largest side, and an unreadable file is met when it is decoded.
    """
    folder, num_train = listing.folder, len(listing.train.paths)
    paths = [path for files in listing.splits.values() for path in files.paths]
    if len(paths) > FULL_DECODE_LIMIT and not listing.read_headers:
        readable = _Readable([True] * len(paths), find_largest_side(image_size), False)
    else:
        readable = _check_files(folder, paths, image_size, skip_unreadable, progress)
    kept = readable.kept
    train = _make_split(folder, listing.train, kept[:num_train], readable)
    test = None
    if listing.test is not None:
        test = _make_split(folder, listing.test, kept[num_train:], readable)
    skipped = _list_relative_names(folder, compress(paths, (not good for good in kept)))
    if len(train) == 0:
        raise UserError(
            f"data.source {str(folder)!r}: none of the training images can be read "
            f"({quote_some(skipped)})"
        )
    if listing.takes_test_from_train:
        groups = None
        if listing.groups is not None:
            groups = torch.tensor(listing.groups)[torch.tensor(kept[:num_train])]
        train, test = ensure_test_split(train, test, groups)
    return Source(
        name, train, test, classes=listing.classes, skipped=skipped, ignored=listing.ignored
    )


def open_stored(
    data: StoredData,
    image_size: int,
    skip_unreadable: bool = False,
    progress: Progress = ignore_progress,
) -> Source:
    """Make a source of an indexed dataset.

    A sample of the images is looked at. With ``skip_unreadable`` and up to 20,000 images every one
    is decoded, and those that cannot be are left out.
    """
    splits: dict[str, Split] = {}
    skipped: tuple[str, ...] = ()
    for name, part in data.splits.items():
        images = frame_store(part.store, image_size, skip_unreadable)
        labels = None if part.labels is None else torch.from_numpy(part.labels)
        # Images without names have those of their rows, to be found in the table again.
        names = part.names or tuple(map(part.store.name, range(len(part.store))))
        split = Split(images, labels, names)
        if skip_unreadable and len(split) <= FULL_DECODE_LIMIT:
            split, broken = _leave_out_undecodable(split, progress)
            skipped += broken
        if len(split) == 0:
            count = count_words(len(part.store), "image")
            raise UserError(f"data.source {data.name!r}: none of {count} of {name} can be read")
        splits[name] = split
    train, test = ensure_test_split(splits["train"], splits.get("test"))
    return Source(data.name, train, test, classes=data.classes, skipped=skipped)


def ensure_test_split(
    train: Split, test: Split | None, groups: Tensor | None = None
) -> tuple[Split, Split | None]:
    """If there is no test split, make one of a fifth of the labelled images, drawn by class.

    Groups (N,), such as photographs of one lesion, are never divided.
    """
    if test is not None or train.labels is None:
        return train, test
    if groups is None:
        rest, chosen = stratified_split(train.labels, len(train), TEST_FRACTION, seed=0)
    else:
        rest, chosen = grouped_split(train.labels, groups, TEST_FRACTION, seed=0)
    return train.select(rest), train.select(chosen)


def frame_store(store: Store, image_size: int, skip_unreadable: bool = False) -> FileImages:
    """Choose the frame of a store's images by a sample of them, which is all where they are few."""
    places = StoredImages(store, np.arange(len(store)))
    sample = [places[i] for i in spread_places(len(store), _SAMPLE)]
    sizes = collect_sizes(map_files(read_size, sample), skip_unreadable)
    known = [(height, width) for height, width in sizes.tolist() if height]
    whole = len(known) == len(store)
    side = find_largest_side(image_size)
    if whole:
        side = min(side, max(max(size) for size in known))
    fills = whole and all(fit_size(height, width, side) == (side, side) for height, width in known)
    return FileImages(places, side, fills)


def find_median_side(places: Sequence[ImagePlace]) -> int:
    """Return the median of the shorter sides of a sample of images, of those that can be read."""
    sizes = map_files(read_size, [places[i] for i in spread_places(len(places), _SAMPLE)])
    sides = sorted(min(size) for size in sizes if not isinstance(size, UnreadableImage))
    if not sides:
        raise UserError(f"none of {count_words(len(sizes), 'image')} can be read: {sizes[0]}")
    return sides[len(sides) // 2]


def without_unreadable(source: Source, progress: Progress = ignore_progress) -> Source:
    """Leave out the files that cannot be decoded, of a dataset too large for that on opening.

    What is left keeps its split: an image that was trained on is not tested on. Where nothing is
    to be left out, the source itself is returned.
    """
    num_images = sum(map(len, source.splits.values()))
    if len(source.skipped) + num_images <= FULL_DECODE_LIMIT:
        return source
    found, skipped = {}, source.skipped
    for name, split in source.splits.items():
        found[name], broken = _leave_out_undecodable(split, progress)
        skipped += broken
    if len(skipped) == len(source.skipped):
        return source
    if len(found["train"]) == 0:
        raise UserError(f"data {source.name!r}: none of the training images can be read")
    left: dict[str, Any] = {**found, "skipped": skipped}
    return replace(source, **left)


def _leave_out_undecodable(split: Split, progress: Progress) -> tuple[Split, tuple[str, ...]]:
    """Return the images that can be decoded, and the names of the others."""
    images = split.images
    if not isinstance(images, FileImages):
        return split, ()
    sizes = map_files(partial(measure_decoded, side=images.side), images.paths, progress)
    good = torch.tensor([not isinstance(size, UnreadableImage) for size in sizes], dtype=torch.bool)
    if good.all():
        return split, ()
    broken = (~good).nonzero().flatten().tolist()
    names = images.paths if split.names is None else split.names
    return split.select(good.nonzero().flatten()), tuple(str(names[i]) for i in broken)


def open_files(paths: Sequence[Path], *, image_size: int) -> FileImages:
    """Take single files as images, in the frames that a folder of them would have."""
    side = find_largest_side(image_size)
    sizes = map_files(partial(measure_decoded, side=side), paths)
    for path, size in zip(paths, sizes, strict=True):
        if isinstance(size, UnreadableImage):
            raise UserError(
                f"image file {str(path)!r}: cannot be read ({size.__cause__}); give another file"
            ) from size
    return FileImages(tuple(paths), side)


def find_largest_side(image_size: int) -> int:
    """Return the side of the frame that files are decoded into, if they are as large."""
    return math.ceil(_FRAME_MARGIN * image_size)


def _check_files(
    folder: Path, paths: list[Path], image_size: int, skip_unreadable: bool, progress: Progress
) -> _Readable:
    """Find which files can be read, and choose the frame.

    Few files are decoded in full; of many the headers are read. What was found is kept for the
    next time, and only files that could not be read are tried again.
    """
    decodes = len(paths) <= FULL_DECODE_LIMIT
    cache = _name_cache(folder, paths, decodes) if len(paths) >= CACHED_FROM else None
    sizes = _load_sizes(cache, len(paths))
    before = sizes.copy()
    unknown = np.flatnonzero(sizes[:, 0] == 0)
    results = map_files(
        read_size, [paths[i] for i in unknown], ignore_progress if decodes else progress
    )
    sizes[unknown] = collect_sizes(results, skip_unreadable)
    if not sizes.any():
        why = isinstance(results[0], UnreadableImage) and results[0].__cause__
        raise UserError(
            f"data.source {str(folder)!r}: none of its {count_words(len(paths), 'image')} can be "
            f"read ({why or 'unknown'}); give a folder with other images"
        )
    side = min(int(sizes.max()), find_largest_side(image_size))
    if decodes:
        unknown = unknown[sizes[unknown, 0] > 0]
        results = map_files(
            partial(measure_decoded, side=side), [paths[i] for i in unknown], progress
        )
        broken = collect_sizes(results, skip_unreadable)[:, 0] == 0
        sizes[unknown[broken]] = 0
    if cache is not None and not np.array_equal(sizes, before):
        _save_sizes(cache, sizes)
    known = [size for size in sizes.tolist() if size[0]]
    fills = all(fit_size(height, width, side) == (side, side) for height, width in known)
    return _Readable((sizes[:, 0] > 0).tolist(), side, fills)


def _name_cache(folder: Path, paths: Sequence[Path], decodes: bool) -> Path | None:
    """Name a file of the user's cache by the folder and its present contents."""
    owner, what = digest(os.fsencode(folder.absolute())), "decoded" if decodes else "headers"
    try:
        return find_user_cache("sizes") / f"{owner}-{what}-{digest_files(paths)}.npy"
    except (OSError, RuntimeError):  # a file is gone, or there is no home: nothing is kept
        return None


def _load_sizes(cache: Path | None, count: int) -> Sizes:
    """Return what is known of each file: its height and width, or 0 and 0."""
    if cache is not None:
        with suppress(OSError, ValueError, EOFError):
            sizes = np.load(cache, allow_pickle=False)
            if sizes.dtype == np.int64 and sizes.shape == (count, 2) and (sizes >= 0).all():
                return np.array(sizes)
    return np.zeros((count, 2), dtype=np.int64)


def _save_sizes(cache: Path, sizes: Sizes) -> None:
    """Keep the sizes instead of earlier ones of the folder; if that fails, do without."""
    owner = cache.name.partition("-")[0]
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(cache) as file:
            np.save(file, sizes, allow_pickle=False)
        for pattern in (f"{owner}-*", f".{owner}-*"):  # hidden: left behind by a killed process
            for other in cache.parent.glob(pattern):
                if other != cache:
                    other.unlink(missing_ok=True)


def _make_split(folder: Path, files: Files, keep: list[bool], readable: _Readable) -> Split:
    paths = tuple(path for path, good in zip(files.paths, keep, strict=True) if good)
    labels = None
    if files.labels is not None:
        labels = torch.tensor(files.labels, dtype=torch.int64)[torch.tensor(keep, dtype=torch.bool)]
    names = _list_relative_names(folder, paths)
    return Split(FileImages(paths, readable.side, readable.fills_frame), labels, names)


def _list_relative_names(folder: Path, paths: Iterable[Path]) -> tuple[str, ...]:
    prefix = len(str(folder / "x")) - 1  # a million calls of relative_to take longer than listing
    return tuple(path.as_posix()[prefix:] for path in paths)
