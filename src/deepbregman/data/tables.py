"""A dataset whose images are named, and labelled, by a CSV file. Needs no torch."""

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from deepbregman.data.folders import (
    SPLIT_WORDS,
    Files,
    Listing,
    list_folder,
    quote_some,
    read_tree,
)
from deepbregman.data.labels import (
    check_counts,
    counts_as_given,
    index_last_parts,
    join_accents,
    read_table,
    show_text,
)
from deepbregman.errors import UserError, notify
from deepbregman.terminal import count_words

TABLE_SUFFIX = ".csv"


def is_listed(path: Path) -> bool:
    """Whether a dataset is a folder, or a table that names its images."""
    return path.is_dir() or path.suffix.lower() == TABLE_SUFFIX


def list_images(path: Path) -> Listing:
    """List the image files of a folder, or those that a table names."""
    return list_folder(path) if path.is_dir() else list_table(path)


def list_table(table: Path) -> Listing:
    """List the labelled images of a CSV file with the columns ``image`` and ``label``.

    An image is named by its path, which may begin at the table's folder; or by its file name
    alone, with or without the extension, if only one image below that folder has it. A column
    ``split`` may say which images are for testing (``test``, or ``val`` where there is no
    ``test``). Images without a label are left out; a notice counts them.
    """
    where = f"data.source {str(table)!r}"
    if not table.is_file():
        raise UserError(
            f"{where}: no such file; give a CSV file with the columns image and label, or a folder"
        )
    rows = read_table(table)
    given = [row for row in rows if counts_as_given(row)]
    paths = _find_images(table, [row["image"] for row in given])
    found: dict[Path, tuple[str, str]] = {}
    for row, path in zip(given, paths, strict=True):
        place = row["label"], _read_split(row.get("split", ""), where)
        if found.setdefault(path, place) != place:
            raise UserError(
                f"{where}: {row['image']!r} is {_join(found[path])} and {_join(place)}; give "
                "each image one label and one split"
            )
    check_counts([label for label, _ in found.values()], where)
    if len(given) < len(rows):
        notify(
            f"{where}: {len(rows) - len(given):,} of its {len(rows):,} images have no label and "
            "are left out; to pretrain on all images, name their folder",
        )
    splits = {split for _, split in found.values()}
    tested = next((split for split in ("test", "val") if split in splits), None)
    known = sorted({label for label, split in found.values() if split == "train"})
    numbers = {label: number for number, label in enumerate(known)}
    strange = {label for label, split in found.values() if split == tested} - set(numbers)
    if strange:
        raise UserError(
            f"{where}: the test split has classes that the training split does not have "
            f"({quote_some(sorted(strange))}); give each class training images"
        )

    def choose(split: str) -> Files:
        mine = sorted(path for path in found if found[path][1] == split)
        return Files(mine, [numbers[found[path][0]] for path in mine])

    folder = Path(os.path.commonpath([table.absolute().parent, *(path.parent for path in found)]))
    return Listing(folder, choose("train"), choose(tested) if tested else None, tuple(known))


def _find_images(table: Path, names: Sequence[str]) -> list[Path]:
    """Find the files that a table names."""
    folder = table.absolute().parent
    places = {name: Path(os.path.normpath(folder / os.path.expanduser(name))) for name in names}
    missing = [name for name, path in places.items() if not path.is_file()]
    if missing:
        tree = read_tree(folder)
        paths = list(chain(tree.here, *tree.groups.values()))
        whole = [join_accents(path.name) for path in paths]
        last = index_last_parts(whole)
        ends = {*whole, *(os.path.splitext(name)[0] for name in whole)}
        known = {name: last.get(join_accents(name)) for name in missing}
        places |= {name: paths[index] for name, index in known.items() if index is not None}
        unknown = [name for name, index in known.items() if index is None]
        several = [name for name in unknown if join_accents(name) in ends]
        none = [name for name in unknown if join_accents(name) not in ends]
        wrong = [
            f"{count_words(len(some), 'name')} ({quote_some(map(show_text, some))}) {what}"
            for some, what in (
                (none, "belong to no image in or below its folder: correct or delete these lines"),
                (several, "belong to several images: write the path from the table's folder"),
            )
            if some
        ]
        if wrong:
            raise UserError(f"data.source {str(table)!r}: {'; '.join(wrong)}")
    return [places[name] for name in names]


def _read_split(word: str, where: str) -> str:
    split = SPLIT_WORDS.get(word.lower()) if word else "train"
    if split is None:
        raise UserError(
            f"{where}: the column split says {word!r}; write one of {', '.join(SPLIT_WORDS)}, or "
            "leave the column out"
        )
    return split


def _join(place: tuple[str, str]) -> str:
    return f"{place[0]!r} ({place[1]})"
