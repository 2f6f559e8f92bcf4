"""Which labels a semi-supervised protocol may see: a share of them, or those of a given list."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from deepbregman.data import Source, stratified_split
from deepbregman.errors import UserError

from .subject import class_name


def labelled_share(source: Source, share: float, seed: int) -> Tensor:
    """Draw a share of the labelled training images, class by class.

    Of a class with ``n`` images ``n * share`` are drawn, rounded down or up so that the total is
    that of the whole set; below a share of 1 a class always keeps an image back. A class whose part
    is below one image is an error: rounding it up would quietly give more labels than asked for.

    Args:
        source: with labels.
        share: above 0, up to 1.
        seed: the same seed draws the same images.

    Returns:
        Indices into the training split, int64 and ascending.
    """
    labels = source.train.labels
    assert labels is not None
    if share == 1:
        return torch.arange(len(labels))
    present, counts = torch.unique(labels, return_counts=True)
    exact = Fraction(share).limit_denominator(10**6)
    smallest = int(counts.argmin())
    count = int(counts[smallest])
    if count * exact < 1:
        empty = [int(c) for c, n in zip(present, counts.tolist(), strict=True) if n * exact < 1]
        others = f" ({len(empty)} classes are so small)" if len(empty) > 1 else ""
        raise UserError(
            f"--labels {share:g} leaves class {class_name(source, int(present[smallest]))} without "
            f"a label, since it has {count} images{others}: the smallest share that works is "
            f"{_rounded_up(Fraction(1, count)):g}"
        )
    return stratified_split(labels, len(labels), share, seed)[1]


def labelled_list(source: Source, file: Path) -> Tensor:
    """Read the names of the labelled training images from a file, one on each line.

    A name is a path in the data folder or the end of one, such as the bare file name, and must fit
    exactly one training image. Empty lines are passed over; a name twice counts once.

    Args:
        source: with labels and file names.
        file: the list.

    Returns:
        Indices into the training split, int64 and ascending.
    """
    if source.train.names is None:
        raise UserError(
            f"--labelled-list {file}: the images of {source.name} have no file names; it needs a "
            "folder of images, or use --labels"
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--labelled-list {file} cannot be read: {error}") from None
    wanted = dict.fromkeys(line.strip().removeprefix("./") for line in lines if line.strip())
    if not wanted:
        raise UserError(f"--labelled-list {file} names no image: write one name on each line")
    found = _matches(list(wanted), source.train.names)
    missing = [name for name in wanted if not found[name]]
    if missing:
        tested = source.test.names if source.test is not None and source.test.names else ()
        in_test = sum(bool(places) for places in _matches(missing, tested).values())
        held = f"; {in_test} of them are test images, which are not to be trained on"
        raise UserError(
            f"--labelled-list {file}: {len(missing)} of its {len(wanted)} names are no training "
            f"image of {source.name}, such as {_some(missing)}{held if in_test else ''}; correct "
            "the list, or give the data folder that it was made for"
        )
    twice = [name for name in wanted if len(found[name]) > 1]
    if twice:
        raise UserError(
            f"--labelled-list {file}: {len(twice)} of its names fit several training images, such "
            f"as {_some(twice)}; write them with their folders"
        )
    chosen = torch.tensor(sorted({places[0] for places in found.values()}), dtype=torch.int64)
    _require_every_class(source, chosen, file)
    return chosen


def _matches(wanted: Sequence[str], names: Sequence[str]) -> dict[str, list[int]]:
    """Find the position of the name that each wanted name is, or of those it is the end of."""
    by_file: dict[str, list[str]] = {}
    for name in wanted:
        by_file.setdefault(PurePosixPath(name).name, []).append(name)
    whole: dict[str, list[int]] = {}
    ends: dict[str, list[int]] = {name: [] for name in wanted}
    for position, path in enumerate(names):
        for name in by_file.get(path.rpartition("/")[2], ()):
            if path == name:
                whole[name] = [position]
            elif path.endswith(f"/{name}"):
                ends[name].append(position)
    return ends | whole


def _require_every_class(source: Source, chosen: Tensor, file: Path) -> None:
    labels = source.train.labels
    assert labels is not None
    absent = sorted(set(labels.tolist()) - set(labels[chosen].tolist()))
    if absent:
        names = ", ".join(class_name(source, label) for label in absent[:5])
        raise UserError(
            f"--labelled-list {file} names no image of {len(absent)} classes ({names}): a "
            "classifier cannot learn a class that it never sees; list at least one of each"
        )


def _rounded_up(value: Fraction) -> float:
    """Return a number of four digits that is no smaller."""
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3]))
