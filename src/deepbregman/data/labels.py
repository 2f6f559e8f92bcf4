"""Labels that a user gives to some images: a CSV file, or a folder of classes.

Needs no torch, so that a command can check them before torch is loaded.
"""

import codecs
import csv
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from deepbregman.data.folders import SPLIT_WORDS, Tree, quote_some, read_tree
from deepbregman.errors import UserError
from deepbregman.files import restore_text
from deepbregman.terminal import count_words, join_words

IMAGE_COLUMNS = ("image", "file", "filename", "name", "path", "image_id", "image_name")
LABEL_COLUMNS = ("label", "class")
CHANCE = "probability of "
"""Begins the name of a column that `label` writes, which ends with a class."""


class GivenLabel(NamedTuple):
    """A label of one image."""

    image: str
    """Its name in the data, such as ``train:17`` where it has no file, or its path."""
    label: str
    is_file: bool = False
    """Whether ``image`` is the path of a file that need not lie in the data."""
    is_suggested: bool = False
    """Whether the image is no random one: `label` had suggested it, or predicted its label."""


def read_labels(labels: Mapping[str, str] | Path | str) -> list[GivenLabel]:
    """Read the labels of some images, and refuse too few of them.

    Args:
        labels: the label by the image's name; a CSV file with the columns ``image`` and
            ``label``, where a column ``given`` says ``yes`` for the lines that count, and
            ``suggested``, ``label next`` or ``probability`` tell which images are no random ones;
            or a folder with a sub-folder for each class.
    """
    if isinstance(labels, Mapping):
        given = [GivenLabel(str(image), str(label)) for image, label in labels.items()]
        where = "labels"
    elif not isinstance(labels, Path | str):
        raise UserError(
            f"labels is of the type {type(labels).__name__}: give a dict of images and their "
            "labels, a CSV file, or a folder with a sub-folder for each class"
        )
    else:
        path = Path(labels)
        where = f"labels {str(path)!r}"
        if path.is_dir():
            tree = read_tree(path)
            _check_classes(tree, where)
            groups = tree.groups
            given = [
                GivenLabel(str(image), label, is_file=True)
                for label, images in groups.items()
                for image in images
            ]
        elif path.is_file():
            given = [
                GivenLabel(row["image"], row["label"], is_suggested=was_suggested(row))
                for row in read_table(path)
                if counts_as_given(row)
            ]
        else:
            raise UserError(
                f"{where}: no such file or folder; give a CSV file with the columns image and "
                "label, or a folder with a sub-folder for each class"
            )
    check_counts([label.label for label in given], where)
    return given


def _check_classes(tree: Tree, where: str) -> None:
    """Refuse a folder whose sub-folders are no classes, or that has images beside them."""
    if tree.groups and all(name.lower() in SPLIT_WORDS for name in tree.groups):
        raise UserError(
            f"{where}: its sub-folders {join_words(sorted(tree.groups))} are splits, not classes; "
            "name one of them, or move their classes together"
        )
    if tree.groups and tree.here:
        raise UserError(
            f"{where}: {count_words(len(tree.here), 'image')} ({quote_some(tree.here)}) lie beside "
            "the folders of the classes, and have no label; move each into the folder of its class"
        )


def index_last_parts(names: Sequence[str]) -> dict[str, int]:
    """Find images by the last part of their name, also without the extension, if it is alone."""
    whole = [name.rpartition("/")[2] for name in names]
    found: dict[str, int] = {}
    for last in ([os.path.splitext(name)[0] for name in whole], whole):  # a whole name counts
        counts = Counter(last)
        found |= {name: index for index, name in enumerate(last) if counts[name] == 1}
    return found


def join_accents(name: str) -> str:
    """Write letters that are not English as keyboards do.

    Names from macOS may have the accent apart. A spreadsheet that took UTF-8 for Windows-1252
    writes two or three signs for each such letter.
    """
    if name.isascii():
        return name
    with suppress(UnicodeError):  # raised by all other names
        name = b"".join(map(_encode_as_windows, name)).decode("utf-8")
    return unicodedata.normalize("NFC", name)


def _encode_as_windows(sign: str) -> bytes:
    try:
        return sign.encode("cp1252")
    except UnicodeError:
        return sign.encode("latin-1")  # the five bytes that Windows-1252 leaves out


def refuse_names(
    unknown: Sequence[str], given: int, example: str, own: str | None = None
) -> UserError:
    """Say that some of the labelled names are not images of the data.

    Args:
        own: folder of the run's own images, if the data are others.
    """
    shown = list(map(show_text, unknown))
    why = f"names are relative to the data's folder, such as {example!r}"
    why += f", or to the run's own, {own}" if own else ""
    if len(unknown) < given:
        why += "; delete the lines of images that are gone or cannot be read"
    if shown != list(unknown):
        why = 'the table is not in UTF-8: in a spreadsheet, save it as "CSV UTF-8"'
    return UserError(
        f"labels: {len(unknown)} of {given} names are not images of the data "
        f"({quote_some(shown)}); {why}"
    )


def show_text(text: str) -> str:
    """Replace what was not UTF-8 when it was read."""
    return re.sub(r"[\udc80-\udcff]", "\ufffd", text)


def check_counts(labels: list[str], where: str) -> None:
    """Refuse labels that nothing can be learned from, or that cannot be judged by holding out."""
    if not labels:
        raise UserError(
            f"{where}: no image has a label; label at least 2 images of two classes, in a table "
            "in the column label"
        )
    counts = Counter(labels)
    if len(counts) == 1:
        raise UserError(
            f"{where}: {count_words(len(labels), 'label')}, all {labels[0]!r}; label images of "
            "a second class, or there is nothing to tell apart"
        )
    if sum(count > 1 for count in counts.values()) < 2:
        single = sorted(label for label, count in counts.items() if count == 1)
        raise UserError(
            f"{where}: only one image of {quote_some(single)}; at least two classes need 2 images "
            "or more, so that one can judge what the others teach"
        )


def read_table(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with a row for each image; ``image`` and ``label`` are among its keys."""
    where = f"labels {str(path)!r}"
    try:
        with path.open("rb") as raw:
            start = raw.read(4)
        if start == b"PK\x03\x04":
            raise UserError(f'{where}: it is no CSV file; in a spreadsheet, save it as "CSV UTF-8"')
        is_wide = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        # A name of a file need not be text. "Unicode text" of a spreadsheet is UTF-16.
        code, errors = ("utf-16", "strict") if is_wide else ("utf-8-sig", "surrogateescape")
        with path.open(newline="", encoding=code, errors=errors) as file:
            first = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=first.count)  # the first of equals
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = [_name_column(name.strip()) for name in next(reader, [])]
            stripped = ([cell.strip() for cell in row] for row in reader)
            rows = [row for row in stripped if any(row)]  # spreadsheets save empty lines, too
    except UnicodeError as error:
        raise UserError(
            f"{where}: it cannot be read as CSV ({error}); save the table in UTF-8"
        ) from None
    except csv.Error as error:
        raise UserError(
            f"{where}: it cannot be read as CSV ({error}){_explain_separators(first)}"
        ) from None
    except OSError as error:
        raise UserError(f"{where}: it cannot be read as CSV ({error})") from None
    kinds = {"image": IMAGE_COLUMNS, "label": LABEL_COLUMNS}
    missing = [kind for kind, names in kinds.items() if not set(names) & set(header)]
    if missing:
        titles = join_words(f"{kind} over the column of {kind}s" for kind in missing)
        raise UserError(
            f"{where}: the first line is {first.strip()[:80]!r}; it must name the columns, "
            f"image and label among them{_explain_separators(first) or f'; write {titles}'}"
        )
    for kind, names in kinds.items():
        header[header.index(next(name for name in names if name in header))] = kind
    table = [dict(zip(header, row + [""] * len(header), strict=False)) for row in rows]
    for row in table:
        row |= {name: restore_text(row[name]) for name in ("image", "label")}
    odd = next((shown for row in table if (shown := show_text(row["label"])) != row["label"]), None)
    if odd is not None:
        raise UserError(
            f"{where}: the label {odd!r} is not in UTF-8: in a spreadsheet, save the table as "
            '"CSV UTF-8"'
        )
    changed = [show_text(row["image"]) for row in table if _was_changed(row)]
    if changed:
        raise UserError(
            f"{where}: the label is not the predicted one for {count_words(len(changed), 'image')} "
            f"({quote_some(changed)}), but the column given does not say yes; write yes in such "
            "lines, so that your labels count"
        )
    return table


def _explain_separators(first: str) -> str:
    """Say what is wrong if the first line has both separators; else say nothing."""
    if "," not in first or ";" not in first:
        return ""
    return (
        "; the table has both , and ; between columns: open it again in the spreadsheet as text "
        'with the comma as separator, and save it as "CSV UTF-8"'
    )


def _name_column(written: str) -> str:
    """Return a column's name in small letters, but a class as it is written."""
    if written.startswith(CHANCE):
        return CHANCE + written.removeprefix(CHANCE).strip()
    return written.lower()


def _was_changed(row: Mapping[str, str]) -> bool:
    """Whether a person changed the label that `label` predicted, and did not say so."""
    predicted = bool(row["label"]) and any(name.startswith(CHANCE) for name in row)
    return (
        predicted
        and not counts_as_given(row)
        and row.get(CHANCE + row["label"]) != row.get("probability")
    )


def counts_as_given(row: Mapping[str, str]) -> bool:
    """Whether a line has a label that a person gave, not one that `label` predicted."""
    return bool(row["image"] and row["label"]) and is_yes(row.get("given", "yes"))


def was_suggested(row: Mapping[str, str]) -> bool:
    """Whether the image of a line is no random one: `label` suggested it, or predicted its label.

    The tables of `label` give a probability of 1 to the labels of the user.
    """
    was_predicted = not re.fullmatch(r"1([.,]0*)?", row.get("probability") or "1")
    return was_predicted or bool(row.get("label next")) or is_yes(row.get("suggested", ""))


def is_yes(word: str) -> bool:
    """Whether a cell, such as one of the column ``given``, says yes."""
    return word.strip().lower() in ("yes", "true", "1")
