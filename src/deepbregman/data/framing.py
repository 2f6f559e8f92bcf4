"""Frames and splits for images of a store: what a listing of files gets from its files."""

from collections.abc import Sequence

import numpy as np
import torch

from deepbregman.data.frames import (
    UnreadableImage,
    collect_sizes,
    decode_frame,
    fit_size,
    map_files,
    read_size,
)
from deepbregman.data.images import (
    FileImages,
    ImagePlace,
    Progress,
    Source,
    Split,
    Store,
    StoredImages,
)
from deepbregman.data.listings import FULL_DECODE_LIMIT, TEST_FRACTION, largest_side
from deepbregman.data.splits import stratified_split
from deepbregman.data.stored import StoredData, StoredSplit, sample_places
from deepbregman.errors import UserError


def open_stored(
    data: StoredData,
    *,
    image_size: int,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> Source:
    """Make a source of an indexed dataset.

    A sample of the images is looked at. With ``skip_unreadable`` and up to 20,000 images every one
    is decoded, and those that cannot be are left out.
    """
    train = _open_split(data.train, image_size, skip_unreadable, progress)
    test = None
    if data.test is not None:
        test = _open_split(data.test, image_size, skip_unreadable, progress)
    counts = [len(part.store) for part in (data.train, data.test) if part is not None]
    kept = [len(part) for part in (train, test) if part is not None]
    train, test = take_test(train, test)
    return Source(data.name, train, test, classes=data.classes, num_skipped=sum(counts) - sum(kept))


def _open_split(
    part: StoredSplit, image_size: int, skip_unreadable: bool, progress: Progress | None
) -> Split:
    images = frame_store(part.store, image_size, skip_unreadable)
    labels = None if part.labels is None else torch.from_numpy(part.labels)
    split = Split(images, labels, part.names)
    if not skip_unreadable or len(split) > FULL_DECODE_LIMIT:
        return split
    side = images.side
    results = map_files(lambda place: decode_frame(place, side).size, images.places, progress)
    good = [i for i, size in enumerate(results) if not isinstance(size, UnreadableImage)]
    if not good:
        raise UserError(f"none of the {len(split)} images of {part.store.name(0)!r} can be read")
    return split if len(good) == len(split) else split.select(torch.tensor(good))


def take_test(train: Split, test: Split | None) -> tuple[Split, Split | None]:
    """Take a seeded, stratified fifth of labelled images for a test split, if there is none."""
    if test is not None or train.labels is None:
        return train, test
    rest, chosen = stratified_split(train.labels, len(train), TEST_FRACTION, seed=0)
    return train.select(rest), train.select(chosen)


def frame_store(store: Store, image_size: int, skip_unreadable: bool = False) -> FileImages:
    """Choose the frame of a store's images by a sample of them, which is all where they are few."""
    places = StoredImages(store, np.arange(len(store)))
    sample = [places[i] for i in sample_places(len(store))]
    sizes = collect_sizes(map_files(read_size, sample), skip_unreadable)
    known = [(height, width) for height, width in sizes.tolist() if height]
    whole = len(known) == len(store)
    side = largest_side(image_size)
    if whole:
        side = min(side, max(max(size) for size in known))
    fills = whole and all(fit_size(height, width, side) == (side, side) for height, width in known)
    return FileImages(places, side, fills)


def median_side(places: Sequence[ImagePlace]) -> int:
    """Return the median of the shorter sides of a sample of images, in pixels."""
    sizes = map_files(read_size, [places[i] for i in sample_places(len(places))])
    sides = sorted(min(size) for size in sizes if not isinstance(size, UnreadableImage))
    if not sides:
        raise UserError(f"none of {len(sizes)} images can be read, the first is {places[0]}")
    return sides[len(sides) // 2]
