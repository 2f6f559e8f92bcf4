"""ISIC 2018, task 3: seven kinds of skin lesions, in the layout of the challenge's archives."""

import csv
from collections.abc import Iterator
from pathlib import Path

from deepbregman.data.folders import read_tree, some
from deepbregman.data.listings import Files, Listing
from deepbregman.errors import UserError

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
_FETCH = "fetch it again from https://challenge.isic-archive.com/data/#2018"


def list_isic(root: Path) -> Listing:
    """List ``root/isic2018``, or ``root`` itself, which holds the unpacked archives.

    - ``ISIC2018_Task3_Training_Input/*.jpg``, labelled by the one-hot rows of
      ``ISIC2018_Task3_Training_GroundTruth/ISIC2018_Task3_Training_GroundTruth.csv``;
    - ``ISIC2018_Task3_Test_Input`` and ``ISIC2018_Task3_Test_GroundTruth`` alike, where they are
      there: the test split;
    - ``ISIC2018_Task3_Training_LesionGroupings.csv``, where it is there: without the official
      test split, a seeded fifth is set aside, and no lesion lies on both sides.

    Raises:
        UserError: When a part is missing or the parts contradict each other.
    """
    inside = root / "isic2018"
    folder = inside if inside.is_dir() else root
    train = _read_part(folder, "Training")
    parts = [folder / f"ISIC2018_Task3_Test_{part}" for part in ("Input", "GroundTruth")]
    present = [part for part in parts if part.is_dir()]
    if len(present) == 1:
        absent = next(part for part in parts if part not in present)
        raise UserError(
            f"data.source 'isic2018': {str(present[0])!r} is there but {str(absent)!r} is not; "
            f"{_FETCH}, or remove the half to have a test split set aside from the training images"
        )
    test = _read_part(folder, "Test") if present else None
    return Listing(folder, train, test, CLASSES, groups=_read_lesions(folder, train))


def _read_part(folder: Path, part: str) -> Files:
    images = folder / f"ISIC2018_Task3_{part}_Input"
    truth = f"ISIC2018_Task3_{part}_GroundTruth"
    if not images.is_dir():
        raise UserError(
            f"data.source 'isic2018': {str(images)!r} is not there; unpack the archives of "
            "https://challenge.isic-archive.com/data/#2018 (task 3) in data.root, or set data.root "
            "to the folder that holds them"
        )
    found = {path.stem: path for path in read_tree(images).here}
    table = folder / truth / f"{truth}.csv"
    labels: dict[str, int] = {}
    for number, row in _read_rows(table, ("image", *CLASSES)):
        name = row["image"]
        if name not in found:
            raise _problem(table, number, f"names {name!r}, which is not in {str(images)!r}")
        if name in labels:
            raise _problem(table, number, f"names {name!r} a second time")
        labels[name] = _label(table, number, row)
    bare = sorted(set(found) - set(labels))
    if bare:
        raise UserError(
            f"data.source 'isic2018': {str(table)!r} has no row for {len(bare)} images "
            f"({some(bare)}); {_FETCH}"
        )
    names = sorted(labels)
    if not names:
        raise UserError(f"data.source 'isic2018': {str(images)!r} has no image in it; {_FETCH}")
    return Files([found[name] for name in names], [labels[name] for name in names])


def _read_lesions(folder: Path, train: Files) -> list[int] | None:
    """Number the lesion of each training image, or None without the table of lesions."""
    table = folder / "ISIC2018_Task3_Training_LesionGroupings.csv"
    if not table.is_file():
        return None
    lesions = {
        row["image"]: row["lesion_id"] for _, row in _read_rows(table, ("image", "lesion_id"))
    }
    bare = [path.stem for path in train.paths if not lesions.get(path.stem)]
    if bare:
        raise UserError(
            f"data.source 'isic2018': {str(table)!r} has no lesion for {len(bare)} images "
            f"({some(bare)}); {_FETCH}, or remove the file to split without regard to lesions"
        )
    known = {lesion: number for number, lesion in enumerate(sorted(set(lesions.values())))}
    return [known[lesions[path.stem]] for path in train.paths]


def _read_rows(table: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a table with the number of their line."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"data.source 'isic2018': {str(table)!r} has no column {some(missing)}; "
                    f"{_FETCH}"
                )
            for row in reader:
                yield reader.line_num, row
    except FileNotFoundError:
        raise UserError(f"data.source 'isic2018': {str(table)!r} is not there; {_FETCH}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"data.source 'isic2018': {str(table)!r} cannot be read ({error}); {_FETCH}"
        ) from error


def _label(table: Path, number: int, row: dict[str, str]) -> int:
    """Return the place of the single one among zeros."""
    try:
        values = [float(row[name]) for name in CLASSES]
    except ValueError:
        raise _problem(table, number, "holds something other than numbers") from None
    if sorted(values) != [0.0] * (len(CLASSES) - 1) + [1.0]:
        raise _problem(
            table,
            number,
            f"has {values.count(1.0)} ones among {', '.join(CLASSES)}, where exactly one is 1 and "
            "the others are 0",
        )
    return values.index(1.0)


def _problem(table: Path, number: int, words: str) -> UserError:
    return UserError(f"data.source 'isic2018': {str(table)!r}, line {number}: it {words}; {_FETCH}")
