"""Tiny ImageNet in the layout of its archive, ``tiny-imagenet-200.zip``."""

from pathlib import Path

from deepbregman.data.folders import by_class, read_tree, some
from deepbregman.data.listings import Files, Listing
from deepbregman.errors import UserError

FOLDER = "tiny-imagenet-200"


def list_tiny_imagenet(root: Path) -> Listing:
    """List ``root/tiny-imagenet-200``, or ``root`` itself, as it is unpacked.

    Training images are ``train/<wnid>/images/*.JPEG``. The labelled test split is the archive's
    ``val``, by ``val/val_annotations.txt``: the labels of its ``test`` were never published.
    Classes are those of ``wnids.txt`` in ascending order, named as in ``words.txt`` where it is
    there.

    Raises:
        UserError: When a part is missing or the parts contradict each other.
    """
    folder = root / FOLDER if (root / FOLDER).is_dir() else root
    wnids = sorted(line for line in read_lines(folder / "wnids.txt") if line)
    if not wnids or len(set(wnids)) != len(wnids):
        raise UserError(
            f"data.source 'tiny-imagenet': {str(folder / 'wnids.txt')!r} names no class, or one "
            "twice; unpack the archive again"
        )
    tree = read_tree(folder / "train")
    missing, unknown = set(wnids) - set(tree.groups), set(tree.groups) - set(wnids)
    if missing or unknown:
        what = f"no images of {some(sorted(missing))}" if missing else f"{some(sorted(unknown))}"
        rule = "which wnids.txt names" if missing else "which wnids.txt does not name"
        raise UserError(
            f"data.source 'tiny-imagenet': {str(folder / 'train')!r} has {what}, {rule}; unpack "
            "the archive again"
        )
    test = _read_annotations(folder / "val", {wnid: i for i, wnid in enumerate(wnids)})
    return Listing(folder, by_class(tree, wnids), test, _class_names(folder, wnids))


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file of the archive, without the blanks around them.

    Raises:
        UserError: When the file is missing or is no text.
    """
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not there" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        raise UserError(
            f"data.source 'tiny-imagenet': {str(path)!r} {reason}; unpack tiny-imagenet-200.zip in "
            "data.root, or set data.root to the folder that holds tiny-imagenet-200"
        ) from error


def _read_annotations(folder: Path, labels: dict[str, int]) -> Files:
    """Read ``val_annotations.txt``: name, class and four sides of a box, apart by tabs."""
    table, images = folder / "val_annotations.txt", folder / "images"
    found = {path.name: path for path in read_tree(images).here}
    labelled: dict[str, int] = {}
    for number, line in enumerate(read_lines(table), start=1):
        fields = line.split("\t")
        name, wnid = fields[0], fields[1] if len(fields) > 1 else ""
        problem = None
        if wnid not in labels:
            problem = f"names {wnid!r}, which is no class of wnids.txt" if wnid else "has no class"
        elif name not in found:
            problem = f"names {name!r}, which is not in {str(images)!r}"
        elif name in labelled:
            problem = f"names {name!r} a second time"
        if problem is not None:
            raise UserError(
                f"data.source 'tiny-imagenet': {str(table)!r}, line {number}: it {problem}; unpack "
                "the archive again"
            )
        labelled[name] = labels[wnid]
    bare = sorted(set(found) - set(labelled))
    if bare:
        raise UserError(
            f"data.source 'tiny-imagenet': {str(table)!r} has no line for {len(bare)} images "
            f"({some(bare)}); unpack the archive again"
        )
    names = sorted(labelled)
    return Files([found[name] for name in names], [labelled[name] for name in names])


def _class_names(folder: Path, wnids: list[str]) -> tuple[str, ...]:
    path = folder / "words.txt"
    if not path.is_file():
        return tuple(wnids)
    words = dict(line.split("\t", 1) for line in read_lines(path) if "\t" in line)
    return tuple(words.get(wnid, wnid) for wnid in wnids)
