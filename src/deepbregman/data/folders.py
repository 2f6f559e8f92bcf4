"""A folder of image files: its layout, its classes, and which files can be read."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepbregman.data.frames import (
    UnreadableImage,
    decode_frame,
    fitted_size,
    map_files,
    read_size,
)
from deepbregman.data.images import FileImages, Progress, Source, Split
from deepbregman.data.splits import stratified_split
from deepbregman.errors import UserError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm"})
TEST_FRACTION = 0.2
"""Share of a labelled folder set aside as test split where the folder has none."""
FULL_DECODE_LIMIT = 20_000
"""Up to so many files each is decoded on opening; beyond, only its header is read."""
_FRAME_MARGIN = 2.25
"""Frames are this much larger than the training images, so that random crops keep detail, and so
that ImageNet's usual 500 px need no resizing for 224 px before they reach the device."""


class _Tree(NamedTuple):
    here: list[Path]
    """Images directly in the folder."""
    groups: dict[str, list[Path]]
    """Images anywhere below each sub-folder that holds any."""
    num_ignored: int


class _Readable(NamedTuple):
    kept: list[bool]
    side: int
    fills_frame: bool


def open_folder(
    folder: Path,
    *,
    image_size: int,
    seed: int = 0,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> Source:
    """Open a folder of images in one of three layouts.

    - ``train/<class>/...`` and ``test/<class>/...`` (or ``val``, where there is no ``test``);
      either may also be flat, and is then without labels;
    - ``<class>/...``: labelled; a seeded, stratified 20 % is set aside as test split;
    - flat: images directly in the folder, without labels and without test split. A single
      sub-folder is taken the same way: one class tells nothing apart.

    Hidden files are passed over; files that are not images by their extension are counted.

    Args:
        folder: The folder.
        image_size: Side of the training images; frames are at most 2.25 times that.
        seed: Of the test split, where one is set aside.
        skip_unreadable: Leave unreadable images out instead of stopping at the first.
        progress: Called with the files checked and the files in all.

    Raises:
        UserError: When there is no image, the layout is mixed, or an image is unreadable.
    """
    tree = _read_tree(folder)
    if _has_splits(folder, tree):
        trees = [_read_tree(folder / "train")]
        test_name = next((name for name in ("test", "val") if name in tree.groups), None)
        if test_name is not None:
            trees.append(_read_tree(folder / test_name))
    else:
        trees = [tree]
    classes = next((tuple(sorted(t.groups)) for t in trees if len(t.groups) > 1), None)
    if len(trees) == 2 and len(trees[0].groups) > 1:
        _check_classes(folder, trees)
    listings = [_list_images(t, classes) for t in trees]
    paths = [path for listing in listings for path, _ in listing]
    if not paths:
        raise UserError(
            f"data.source {str(folder)!r}: no image in it ({tree.num_ignored} other files); images "
            f"end in {' '.join(sorted(SUFFIXES))}"
        )
    readable = _check_files(folder, paths, image_size, skip_unreadable, progress)
    kept = iter(readable.kept)
    splits = [_make_split(folder, listing, kept, readable) for listing in listings]
    train, test = splits[0], splits[1] if len(splits) == 2 else None
    if len(train) == 0:
        raise UserError(f"data.source {str(folder)!r}: none of the training images can be read")
    if test is None and train.labels is not None:
        rest, held = stratified_split(train.labels, len(train), TEST_FRACTION, seed)
        train, test = train.select(rest), train.select(held)
    num_skipped = len(paths) - sum(readable.kept)
    return Source(folder.resolve().name, train, test, None, classes, num_skipped, tree.num_ignored)


def open_files(paths: Sequence[Path], *, image_size: int) -> FileImages:
    """Take single files as images, in the frames that a folder of them would have.

    Args:
        paths: The files.
        image_size: Side of the training images.

    Raises:
        UserError: When a file cannot be read as an image; there is no going on without it.
    """
    side = math.ceil(_FRAME_MARGIN * image_size)
    sizes = map_files(lambda path: decode_frame(path, side).size, paths)
    for path, size in zip(paths, sizes, strict=True):
        if isinstance(size, UnreadableImage):
            raise UserError(
                f"image file {str(path)!r}: cannot be read ({size.__cause__}); give another file"
            ) from size
    return FileImages(tuple(paths), side)


def _read_tree(folder: Path) -> _Tree:
    here: list[Path] = []
    groups: dict[str, list[Path]] = {}
    num_ignored = 0
    try:
        for directory, names in _walk(folder):
            for name in names:
                if Path(name).suffix.lower() not in SUFFIXES:
                    num_ignored += 1
                elif directory == folder:
                    here.append(directory / name)
                else:
                    group = directory.relative_to(folder).parts[0]
                    groups.setdefault(group, []).append(directory / name)
    except OSError as error:
        raise UserError(
            f"data.source {str(folder)!r}: cannot be listed ({error}); check its permissions"
        ) from error
    return _Tree(here, groups, num_ignored)


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder with its visible files, sorted; links are followed, each folder once."""
    seen: set[str] = set()
    for directory, folders, files in os.walk(folder, followlinks=True, onerror=_stop):
        place = os.path.realpath(directory)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(directory), sorted(name for name in files if not name.startswith("."))


def _stop(error: OSError) -> None:
    raise error


def _has_splits(folder: Path, tree: _Tree) -> bool:
    """Tell whether the folder is split into train and test, and refuse what is half so."""
    if tree.here and tree.groups:
        raise UserError(
            f"data.source {str(folder)!r}: has {len(tree.here)} images beside sub-folders with "
            f"images ({_some(tree.groups)}); put every image into a sub-folder named by its "
            "class, or none"
        )
    if "train" not in tree.groups:
        return False
    others = sorted(set(tree.groups) - {"train", "test", "val"})
    if not others:
        return True
    if all(path.parent == folder / "train" for path in tree.groups["train"]):
        return False  # a class of trains among others
    raise UserError(
        f"data.source {str(folder)!r}: has train/<class> but also {_some(others)}; keep train and "
        "test (or val) in it and move the rest elsewhere"
    )


def _check_classes(folder: Path, trees: list[_Tree]) -> None:
    unknown = sorted(set(trees[1].groups) - set(trees[0].groups))
    if unknown:
        raise UserError(
            f"data.source {str(folder)!r}: the test split has classes that the training split "
            f"has not ({_some(unknown)}); name the folders alike in both"
        )


def _some(names: list[str] | dict[str, list[Path]]) -> str:
    shown = [repr(name) for name in list(names)[:5]]
    return ", ".join(shown) + (", ..." if len(names) > 5 else "")


def _list_images(tree: _Tree, classes: tuple[str, ...] | None) -> list[tuple[Path, int | None]]:
    """Return the images, sorted by class and then by path, with their labels."""
    if tree.here and tree.groups:
        raise UserError(
            f"folder {str(tree.here[0].parent)!r}: has images beside sub-folders with images "
            f"({_some(tree.groups)}); put every image into a sub-folder named by its class, or none"
        )
    if tree.here:
        return [(path, None) for path in tree.here]
    if classes is None or not set(tree.groups) <= set(classes):
        return [(path, None) for name in sorted(tree.groups) for path in tree.groups[name]]
    return [
        (path, label) for label, name in enumerate(classes) for path in tree.groups.get(name, [])
    ]


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
    side = min(max(max(size) for size in known), math.ceil(_FRAME_MARGIN * image_size))
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


def _make_split(
    folder: Path,
    listing: list[tuple[Path, int | None]],
    kept: Iterator[bool],
    readable: _Readable,
) -> Split:
    items = [item for item, keep in zip(listing, kept, strict=False) if keep]
    labels: Tensor | None = None
    if items and items[0][1] is not None:
        labels = torch.tensor([label for _, label in items], dtype=torch.int64)
    paths = tuple(path for path, _ in items)
    names = tuple(path.relative_to(folder).as_posix() for path in paths)
    return Split(FileImages(paths, readable.side, readable.fills_frame), labels, names)
