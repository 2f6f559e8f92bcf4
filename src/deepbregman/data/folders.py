"""A folder of image files: its layout and its classes."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from deepbregman.data.images import Progress, Source
from deepbregman.data.listings import Files, Listing, open_listing
from deepbregman.errors import UserError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm"})


class Tree(NamedTuple):
    """The images of a folder."""

    here: list[Path]
    """Images directly in the folder."""
    groups: dict[str, list[Path]]
    """Images anywhere below each sub-folder that holds any."""
    num_ignored: int
    """Files that are not images by their extension."""


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
    listing = list_folder(folder)
    return open_listing(
        listing,
        name=folder.resolve().name,
        image_size=image_size,
        seed=seed,
        skip_unreadable=skip_unreadable,
        progress=progress,
    )


def list_folder(folder: Path) -> Listing:
    """List a folder in one of the layouts of :func:`open_folder`; no file is opened.

    Raises:
        UserError: When there is no image or the layout is mixed.
    """
    tree = read_tree(folder)
    if _has_splits(folder, tree):
        trees = [read_tree(folder / "train")]
        test_name = next((name for name in ("test", "val") if name in tree.groups), None)
        if test_name is not None:
            trees.append(read_tree(folder / test_name))
    else:
        trees = [tree]
    classes = next((tuple(sorted(t.groups)) for t in trees if len(t.groups) > 1), None)
    if len(trees) == 2 and len(trees[0].groups) > 1:
        _check_classes(folder, trees)
    listed = [_list_images(t, classes) for t in trees]
    if not any(files.paths for files in listed):
        raise UserError(
            f"data.source {str(folder)!r}: no image in it ({tree.num_ignored} other files); images "
            f"end in {' '.join(sorted(SUFFIXES))}"
        )
    test = listed[1] if len(listed) == 2 else None
    return Listing(folder, listed[0], test, classes, num_ignored=tree.num_ignored)


def read_tree(folder: Path) -> Tree:
    """Find every image of a folder; hidden files and folders are passed over.

    Raises:
        UserError: When a folder cannot be listed.
    """
    here: list[Path] = []
    groups: dict[str, list[Path]] = {}
    num_ignored = 0
    try:
        for directory, names in _walk(folder):
            images = [name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES]
            num_ignored += len(names) - len(images)
            found = here
            if images and directory != folder:
                found = groups.setdefault(directory.relative_to(folder).parts[0], [])
            found.extend(directory / name for name in images)
    except OSError as error:
        raise UserError(
            f"data.source {str(folder)!r}: cannot be listed ({error}); check its permissions"
        ) from error
    return Tree(here, groups, num_ignored)


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


def _has_splits(folder: Path, tree: Tree) -> bool:
    """Tell whether the folder is split into train and test, and refuse what is half so."""
    if tree.here and tree.groups:
        raise UserError(
            f"data.source {str(folder)!r}: has {len(tree.here)} images beside sub-folders with "
            f"images ({some(tree.groups)}); put every image into a sub-folder named by its "
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
        f"data.source {str(folder)!r}: has train/<class> but also {some(others)}; keep train and "
        "test (or val) in it and move the rest elsewhere"
    )


def _check_classes(folder: Path, trees: list[Tree]) -> None:
    unknown = sorted(set(trees[1].groups) - set(trees[0].groups))
    if unknown:
        raise UserError(
            f"data.source {str(folder)!r}: the test split has classes that the training split "
            f"has not ({some(unknown)}); name the folders alike in both"
        )


def some(names: Iterable[object]) -> str:
    """Quote the first few of some names for an error."""
    quoted = [repr(str(name)) for name in names]
    return ", ".join(quoted[:5]) + (", ..." if len(quoted) > 5 else "")


def _list_images(tree: Tree, classes: tuple[str, ...] | None) -> Files:
    """Return the images, sorted by class and then by path, with their labels."""
    if tree.here and tree.groups:
        raise UserError(
            f"folder {str(tree.here[0].parent)!r}: has images beside sub-folders with images "
            f"({some(tree.groups)}); put every image into a sub-folder named by its class, or none"
        )
    if tree.here:
        return Files(tree.here)
    if classes is None or not set(tree.groups) <= set(classes):
        return Files([path for name in sorted(tree.groups) for path in tree.groups[name]])
    return by_class(tree, classes)


def by_class(tree: Tree, classes: Iterable[str]) -> Files:
    """Label the images of class folders by the place of their class among ``classes``."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        members = tree.groups.get(name, [])
        paths += members
        labels += [label] * len(members)
    return Files(paths, labels)
