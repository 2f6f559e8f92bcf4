"""List the image files of a dataset, with their classes and splits, without opening any.

For a folder of the user's own, and for ImageNet, Tiny ImageNet and ISIC 2018 in the layouts of
their archives. Needs no torch.
"""

import csv
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from deepbregman.errors import UserError, notify
from deepbregman.terminal import count_words

HAS_HEIF = importlib.util.find_spec("pillow_heif") is not None
"""Whether Pillow's plug-in for HEIC, the format of telephones, is installed."""
SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".avif"),
        *(".ppm", ".pgm"),
        *((".heic", ".heif") if HAS_HEIF else ()),
    }
)
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
}
"""The split by the words for it in a table, or in the name of a file or a folder."""
ISIC_CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
_WNID = re.compile(r"n\d{8}")


NOT_CLASSES = (
    "if these sub-folders are not classes, put one image beside them: then it trains on all"
)
"""What to do if sub-folders are years or places; else a fifth of the images is left out."""


class Files(NamedTuple):
    """The image files of one split, in the order they are numbered by."""

    paths: list[Path]
    labels: list[int] | None = None


class Listing(NamedTuple):
    """The files of a dataset, before any of them is opened."""

    folder: Path
    """Names are relative to it."""
    train: Files
    test: Files | None = None
    classes: tuple[str, ...] | None = None
    groups: list[int] | None = None
    """For each training image the number of its group, such as a lesion: a test split that is
    taken from the training images shares no group with them."""
    ignored: Mapping[str, int] = MappingProxyType({})
    """Files that are not images by their extension, and hidden images: how many of each."""
    takes_test_from_train: bool = True
    """Whether a fifth of labelled images becomes the test split where there is none."""
    read_headers: bool = True
    """Whether every file is looked at on opening, where there are too many to decode."""

    @property
    def has_labels(self) -> bool:
        """Whether every split has labels."""
        return all(files.labels is not None for files in self.splits.values())

    @property
    def splits(self) -> dict[str, Files]:
        """The splits that are there, by name."""
        return {"train": self.train} | ({} if self.test is None else {"test": self.test})


class Tree(NamedTuple):
    """The images of a folder."""

    here: list[Path]
    """Images directly in the folder."""
    groups: dict[str, list[Path]]
    """Images anywhere below each sub-folder that holds any."""
    ignored: Counter[str]


def list_folder(folder: Path) -> Listing:
    """List a folder of images in one of three layouts.

    - ``train/<class>/...`` and ``test/<class>/...`` (or ``val``, where there is no ``test``; the
      words of ``SPLIT_WORDS`` count, in any case); either may also be flat, and is then without
      labels;
    - ``<class>/...``: labelled; a seeded, stratified 20 % becomes the test split;
    - flat: images directly in the folder, without labels and without test split. A single
      sub-folder is taken the same way: one class tells nothing apart. So are images that lie beside
      sub-folders, as in photos of many years; a notice says it.

    Hidden files are passed over, such as the ``._a.jpg`` that macOS adds. Hidden images and files
    that are not images by their extension are counted.
    """
    tree = read_tree(folder)
    names = {SPLIT_WORDS[x.lower()]: x for x in sorted(tree.groups) if x.lower() in SPLIT_WORDS}
    if tree.here and tree.groups and "train" not in names:
        every = sorted([*tree.here, *(path for group in tree.groups.values() for path in group)])
        notify(
            f"{str(folder)!r}: {len(tree.here)} of {len(every)} images lie beside sub-folders with "
            f"images ({quote_some(tree.groups)}), so the sub-folders do not count as classes; if "
            "they should, put every image into one of them",
        )
        tree = Tree(every, {}, tree.ignored)
    trees = [_require_uniform(folder, tree)]
    if _has_splits(folder, tree, names):
        tested = [names[split] for split in ("test", "val") if split in names]
        trees = [
            _require_uniform(folder / name, read_tree(folder / name))
            for name in (names["train"], *tested[:1])
        ]
        known = set(trees[0].groups)
        if len(tested) == 2 and len(known) > 1 and not known & set(trees[1].groups):
            # A test split without classes, as competitions have it, gives way to one with them.
            other = read_tree(folder / tested[1])
            if other.groups and not other.here and set(other.groups) <= known:
                trees[1] = other
    classes = next((tuple(sorted(t.groups)) for t in trees if len(t.groups) > 1), None)
    if len(trees[0].groups) > 1:
        unknown = sorted(set(trees[-1].groups) - set(trees[0].groups))
        if unknown:
            raise UserError(
                f"data.source {str(folder)!r}: the test split has classes that the training split "
                f"does not have ({quote_some(unknown)}); use the same names in both"
            )
    if not tree.here and not tree.groups:
        raise UserError(
            f"data.source {str(folder)!r}: no image in it, and {describe_ignored(tree.ignored)}; "
            f"images end in {' '.join(sorted(SUFFIXES))}{explain_ignored(tree.ignored)}"
        )
    train = _label(trees[0], classes)
    test = _label(trees[1], classes) if len(trees) == 2 else None
    return Listing(folder, train, test, classes, ignored=tree.ignored)


def describe_ignored(ignored: Mapping[str, int]) -> str:
    """Count the files that are not images, in all and of each of the most frequent kinds."""
    kinds = sorted(ignored.items(), key=lambda kind: (-kind[1], kind[0]))
    named = ", ".join(f"{count:,} {kind}" for kind, count in kinds[:6])
    return count_words(sum(ignored.values()), "other file") + (f" ({named})" if named else "")


def explain_ignored(ignored: Mapping[str, int]) -> str:
    """Explain how to read photos in HEIC, which need a plug-in; empty if there are none."""
    kinds = [suffix for suffix in (".heic", ".heif") if suffix in ignored]
    return f"; to read {' and '.join(kinds)}: pip install 'deepbregman[heic]'" if kinds else ""


def has_image(folder: Path) -> bool:
    """Whether any image lies in or below a folder; stops at the first."""
    return any(_is_image(name) for _, names in _walk(folder) for name in names)


def read_tree(folder: Path) -> Tree:
    """Find every image of a folder; hidden files and folders are passed over, images counted."""
    here: list[Path] = []
    groups: dict[str, list[Path]] = {}
    ignored: Counter[str] = Counter()
    for directory, names in _walk(folder):
        images = []
        for name in names:
            suffix = os.path.splitext(name)[1].lower()
            if _is_image(name):
                images.append(name)
            elif suffix in SUFFIXES:
                ignored[f"hidden {suffix}"] += 1
            elif not name.startswith("."):
                ignored[suffix or "no extension"] += 1
        found = here
        if images and directory != folder:
            found = groups.setdefault(directory.relative_to(folder).parts[0], [])
        found.extend(directory / name for name in images)
    return Tree(here, groups, ignored)


def quote_some(names: Iterable[object]) -> str:
    """Quote the first few of some names for an error."""
    quoted = [repr(str(name)) for name in names]
    return ", ".join(quoted[:5]) + (", ..." if len(quoted) > 5 else "")


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder with its files, sorted; links are followed, each folder once."""

    def refuse(error: OSError) -> None:
        raise UserError(
            f"folder {str(folder)!r}: cannot be listed ({error}); check its permissions"
        ) from error

    seen: set[str] = set()
    for directory, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        place = os.path.realpath(directory)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(directory), sorted(files)


def _require_uniform(folder: Path, tree: Tree) -> Tree:
    """Refuse a folder that has some of its images in sub-folders and some not."""
    if tree.here and tree.groups:
        raise UserError(
            f"data.source {str(folder)!r}: has {count_words(len(tree.here), 'image')} beside "
            f"sub-folders with images ({quote_some(tree.groups)}); put every image into a "
            "sub-folder named by its class, or none"
        )
    return tree


def _has_splits(folder: Path, tree: Tree, names: Mapping[str, str]) -> bool:
    """Whether the folder is split into train and test, by the sub-folders' names; no mixture."""
    if "train" not in names:
        return False
    others = sorted(set(tree.groups) - set(names.values()))
    if not others:
        return True
    if all(path.parent == folder / names["train"] for path in tree.groups[names["train"]]):
        return False  # a class of trains among others
    raise UserError(
        f"data.source {str(folder)!r}: has train/<class> but also {quote_some(others)}; keep train "
        "and test (or val) in it and move the rest elsewhere"
    )


def _label(tree: Tree, classes: tuple[str, ...] | None) -> Files:
    """Return the images, sorted by class and then by path, with their labels."""
    if tree.here:
        return Files(tree.here)
    if classes is None or not set(tree.groups) <= set(classes):
        return Files([path for name in sorted(tree.groups) for path in tree.groups[name]])
    return _label_by_folder(tree, classes)


def _label_by_folder(tree: Tree, classes: Iterable[str]) -> Files:
    """Label the images of class folders by the place of their class among ``classes``."""
    pairs = [
        (path, label) for label, name in enumerate(classes) for path in tree.groups.get(name, ())
    ]
    return Files([path for path, _ in pairs], [label for _, label in pairs])


def _label_by_table(
    found: Mapping[str, Path], table: Path, rows: Iterable[tuple[int, str, int]]
) -> Files:
    """Label images by the lines of a table (number, name, label), which names each image once."""
    labels: dict[str, int] = {}
    for number, name, label in rows:
        if name not in found:
            raise _line_error(table, number, f"names {name!r}, which is not in the images' folder")
        if name in labels:
            raise _line_error(table, number, f"names {name!r} a second time")
        labels[name] = label
    missing = sorted(set(found) - set(labels))
    if missing:
        raise UserError(
            f"{str(table)!r} has no line for {count_words(len(missing), 'image')} "
            f"({quote_some(missing)})"
        )
    names = sorted(labels)
    return Files([found[name] for name in names], [labels[name] for name in names])


def _line_error(table: Path, number: int, words: str) -> UserError:
    return UserError(f"{str(table)!r}, line {number}: it {words}")


def list_imagenet(folder: Path) -> Listing:
    """List ImageNet (ILSVRC 2012): ``train/<wnid>/...`` and ``val/<wnid>/...``.

    Classes are in the order of their WordNet numbers, as usual. Some of the 1,000 are enough, and
    without ``val`` there is no test split; ``deepbregman data check imagenet`` counts.
    """
    train = _read_wordnet_folders(folder / "train")
    test = _read_wordnet_folders(folder / "val") if (folder / "val").is_dir() else None
    classes = tuple(sorted(train.groups))
    unknown = [] if test is None else sorted(set(test.groups) - set(classes))
    if unknown:
        raise UserError(
            f"{str(folder / 'val')!r} has classes that train does not have "
            f"({quote_some(unknown)}); unpack them into train or remove them from val"
        )
    return Listing(
        folder,
        _label_by_folder(train, classes),
        None if test is None else _label_by_folder(test, classes),
        classes,
        takes_test_from_train=False,  # a number on a part of train would pass for one on val
        # A million headers take minutes to read and tell nothing new: its largest images are
        # larger than any frame.
        read_headers=False,
    )


def _read_wordnet_folders(folder: Path) -> Tree:
    tree = read_tree(folder)
    where = repr(str(folder))
    if tree.here:
        raise UserError(
            f"{where} has {count_words(len(tree.here), 'image')} directly in it "
            f"({quote_some(path.name for path in tree.here)}); move each into a folder named by "
            "its class, n01440764 and so on: torchvision.datasets.ImageNet does so for the archives"
        )
    if not tree.groups:
        raise UserError(f"{where} has no image in it; unpack it")
    strange = [name for name in sorted(tree.groups) if not _WNID.fullmatch(name)]
    if strange:
        raise UserError(
            f"{where} has folders that are not classes of ImageNet ({quote_some(strange)}; they "
            "are called n01440764 and so on); give a folder of other classes by its path"
        )
    return tree


def list_tiny_imagenet(folder: Path) -> Listing:
    """List Tiny ImageNet as its archive is unpacked.

    Training images are ``train/<wnid>/images/*.JPEG``. The labelled test split is the archive's
    ``val``, by ``val/val_annotations.txt``: the labels of its ``test`` were never published.
    Classes are those of ``wnids.txt`` in ascending order, named as in ``words.txt`` where it is
    there.
    """
    wnids = sorted(line for line in _read_lines(folder / "wnids.txt") if line)
    if not wnids or len(set(wnids)) != len(wnids):
        raise UserError(f"{str(folder / 'wnids.txt')!r} names no class, or one twice")
    tree = read_tree(folder / "train")
    if odd := sorted(set(wnids) ^ set(tree.groups)):
        raise UserError(
            f"{str(folder / 'train')!r} does not have the classes that wnids.txt names: only one "
            f"of the two has {quote_some(odd)}"
        )
    table = folder / "val" / "val_annotations.txt"
    images = {path.name: path for path in read_tree(folder / "val" / "images").here}
    test = _label_by_table(images, table, _read_annotations(table, wnids))
    names = {}
    if (folder / "words.txt").is_file():
        lines = _read_lines(folder / "words.txt")
        names = dict(line.split("\t", 1) for line in lines if "\t" in line)
    classes = tuple(names.get(wnid, wnid) for wnid in wnids)
    return Listing(folder, _label_by_folder(tree, wnids), test, classes)


def _read_annotations(table: Path, wnids: list[str]) -> Iterator[tuple[int, str, int]]:
    """Yield the lines of a table, separated by tabs: name, class and four sides of a box."""
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    for number, line in enumerate(_read_lines(table), start=1):
        name, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0]
        if wnid not in labels:
            what = f"names {wnid!r}, which is no class of wnids.txt" if wnid else "has no class"
            raise _line_error(table, number, what)
        yield number, name, labels[wnid]


def _read_lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not there" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        raise UserError(f"{str(path)!r} {reason}") from error


def list_isic(folder: Path) -> Listing:
    """List task 3 of ISIC 2018, seven kinds of skin lesions, as its archives are unpacked.

    - ``ISIC2018_Task3_Training_Input/*.jpg``, labelled by the one-hot rows of
      ``ISIC2018_Task3_Training_GroundTruth/ISIC2018_Task3_Training_GroundTruth.csv``;
    - ``ISIC2018_Task3_Test_Input`` and ``ISIC2018_Task3_Test_GroundTruth``, where they are
      there: the test split;
    - ``ISIC2018_Task3_Training_LesionGroupings.csv``, where it is there: without the official
      test split, a seeded fifth becomes the test split, and no lesion lies on both sides.
    """
    train = _read_isic_part(folder, "Training")
    parts = (folder / f"ISIC2018_Task3_Test_{part}" for part in ("Input", "GroundTruth"))
    test = _read_isic_part(folder, "Test") if any(part.is_dir() for part in parts) else None
    groups = _read_lesions(folder, train)
    return Listing(folder, train, test, ISIC_CLASSES, groups=groups)


def _read_isic_part(folder: Path, part: str) -> Files:
    images = folder / f"ISIC2018_Task3_{part}_Input"
    truth = f"ISIC2018_Task3_{part}_GroundTruth"
    table = folder / truth / f"{truth}.csv"
    rows = (
        (number, row["image"], _read_one_hot(table, number, row))
        for number, row in _read_rows(table, ("image", *ISIC_CLASSES))
    )
    return _label_by_table({path.stem: path for path in read_tree(images).here}, table, rows)


def _read_lesions(folder: Path, train: Files) -> list[int] | None:
    """Number the lesion of each training image, or None without the table of lesions."""
    table = folder / "ISIC2018_Task3_Training_LesionGroupings.csv"
    if not table.is_file():
        return None
    rows = _read_rows(table, ("image", "lesion_id"))
    lesions = {row["image"]: row["lesion_id"] for _, row in rows}
    missing = [path.stem for path in train.paths if not lesions.get(path.stem)]
    if missing:
        raise UserError(
            f"{str(table)!r} has no lesion for {count_words(len(missing), 'image')} "
            f"({quote_some(missing)})"
        )
    known = {lesion: number for number, lesion in enumerate(sorted(set(lesions.values())))}
    return [known[lesions[path.stem]] for path in train.paths]


def _read_rows(table: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{str(table)!r} has no column {quote_some(missing)}")
            for row in reader:
                yield reader.line_num, row
    except FileNotFoundError:
        raise UserError(f"{str(table)!r} is not there") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{str(table)!r} cannot be read ({error})") from error


def _read_one_hot(table: Path, number: int, row: dict[str, str]) -> int:
    """Return the place of the single one among zeros."""
    try:
        values = [float(row[name]) for name in ISIC_CLASSES]
    except ValueError:
        raise _line_error(table, number, "holds something other than numbers") from None
    if sorted(values) != [0.0] * (len(ISIC_CLASSES) - 1) + [1.0]:
        what = f"has {values.count(1.0)} ones among {', '.join(ISIC_CLASSES)}"
        raise _line_error(table, number, f"{what}: exactly one is 1 and the others are 0")
    return values.index(1.0)
