"""Check whether a dataset is complete: counts, checksums, and files that can be decoded."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deepbregman.data.archives import open_archive, verify_checksums
from deepbregman.data.datasets import DATASETS, Dataset, expand_home, find_source
from deepbregman.data.decoding import UnreadableImage, measure_decoded, read_size
from deepbregman.data.downloads import list_checksums
from deepbregman.data.folders import (
    NOT_CLASSES,
    Listing,
    describe_ignored,
    explain_ignored,
    quote_some,
)
from deepbregman.data.formats import index_stored, is_stored
from deepbregman.data.frames import map_files
from deepbregman.data.images import ArrayImages, ImagePlace, StoredImage
from deepbregman.data.stored import StoredSplit
from deepbregman.data.tables import is_listed, list_images
from deepbregman.data.voc import find_devkit
from deepbregman.errors import UserError
from deepbregman.terminal import ReportProgress, count_words

_MOST_CLASSES_SHOWN = 20
_LARGEST_FRAME = 512  # a file is decoded whole whatever its frame; this bounds the memory


@dataclass
class CheckReport:
    """The contents of a dataset, and the problems with it."""

    name: str
    root: Path
    rows: list[tuple[str, str]] = field(default_factory=list)
    """What, and how much of it there is."""
    problems: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Images that cannot be read, each with the reason."""
    notes: list[str] = field(default_factory=list)
    """What pretraining leaves out or takes for classes, and how to change that."""

    def count(self, what: str, found: int, expected: Sequence[int]) -> None:
        """Note a number of images, and whether it is as published."""
        good = found in expected
        self.rows.append((what, f"{found:,}" if good else f"{found:,} of {expected[0]:,}"))
        if not good:
            self.problems.append(f"{what}: {found:,} images instead of {expected[0]:,}")

    def require_complete(self) -> None:
        """Raise an error that names what is missing and how to get it, if anything is."""
        if not self.problems:
            return
        name, root, num_more = self.name, self.root, len(self.problems) - 5
        found = "; ".join(self.problems[:5])
        found += f"; and {num_more} more problems" if num_more > 0 else ""
        if name not in DATASETS:
            raise UserError(f"{name}: {found}")
        dataset = DATASETS[name]
        layout = f" Layout under {str(root)!r}: {dataset.layout}." * bool(dataset.layout)
        prepare = f", or let `deepbregman data prepare {name} --root {root}` download it"
        raise UserError(
            f"{name} is not complete under {str(root)!r}: {found}. Get it: {dataset.fetch}"
            f"{prepare * dataset.downloadable}.{layout}"
        )


def check_data(name: str, root: Path, progress: ReportProgress) -> CheckReport:
    """Look at a dataset by name, a folder of images or an ``.npz`` file.

    Counts and labels are compared with what was published for datasets of image files, checksums
    for the others, and for archives that lie in the root.
    """
    dataset, path = find_source(name, with_boxes=True)
    root = expand_home(root)
    if dataset is None:
        report = CheckReport(name, root)
        if is_stored(path) or is_listed(path):
            _check_images(path, report, progress)
        else:
            _check_archive(path, report, progress)
        return report
    report = CheckReport(name, root, [("what", dataset.title), ("terms", dataset.terms)])
    if dataset.list_files is not None:
        try:
            _check_listing(dataset, dataset.list_files(dataset.find(root)), report)
        except UserError as error:
            report.problems.append(str(error))
    elif name == "voc":
        _check_voc(dataset, root, report)
    else:
        _check_checksums(list_checksums(name), report, progress, required=True)
        if not report.problems:
            report.rows += [(split, f"{count[0]:,}") for split, count in dataset.counts.items()]
    _check_checksums(dataset.archives, report, progress, required=False)
    return report


def _check_images(path: Path, report: CheckReport, progress: ReportProgress) -> None:
    """Count the images of each class of a folder, a table or shards, and decode all of them."""
    found = index_stored(path) if is_stored(path) else list_images(path)
    places: list[ImagePlace] = []
    for name, split in found.splits.items():
        if isinstance(split, StoredSplit):
            labels = None if split.labels is None else split.labels.tolist()
            mine: list[ImagePlace] = [StoredImage(split.store, i) for i in range(len(split.store))]
        else:
            labels, mine = split.labels, list(split.paths)
        title = "images" if len(found.splits) == 1 else name
        _count_classes(title, len(mine), labels, found.classes, report)
        places += mine
    if isinstance(found, Listing):
        if found.classes and found.test is None and path.is_dir():
            report.notes.append(f"sub-folders count as classes; {NOT_CLASSES}")
        if found.ignored:
            words = f"{describe_ignored(found.ignored)}{explain_ignored(found.ignored)}"
            report.notes.append(f"not images: {words}")
    sizes = map_files(_decode_and_measure, places, partial(progress, "decoding"))
    pairs = list(zip(places, sizes, strict=True))
    broken = {str(place): e.reason for place, e in pairs if isinstance(e, UnreadableImage)}
    known = [size for size in sizes if not isinstance(size, UnreadableImage)]
    report.rows.append(("unreadable", f"{len(broken):,}"))
    report.unreadable = broken
    if not known:
        report.problems.append(f"no image can be read ({quote_some(broken)}): replace the files")
        return
    report.rows.append(("sizes", _format_sizes(known)))
    if broken:
        report.notes.append(
            f"{count_words(len(broken), 'image')} cannot be read: "
            "the recipe auto leaves such images out, others do with --skip-unreadable"
        )


def _decode_and_measure(path: ImagePlace) -> tuple[int, int]:
    """Decode an image; return its height and width as it is shown."""
    shown_height, shown_width = measure_decoded(path, _LARGEST_FRAME)
    height, width = read_size(path)
    # The header has the size as stored. An upright photo may be stored lying, with a note (EXIF)
    # that decoding has followed.
    is_turned = (shown_height - shown_width) * (height - width) < 0
    return (width, height) if is_turned else (height, width)


def _check_archive(path: Path, report: CheckReport, progress: ReportProgress) -> None:
    """Verify the checksums of an ``.npz`` file, and count the images of each class."""
    progress("verifying checksums", 0, 1)
    verify_checksums(path)
    source = open_archive(path)
    for name, split in source.splits.items():
        assert isinstance(split.images, ArrayImages)
        labels = None if split.labels is None else split.labels.tolist()
        _count_classes(name, len(split), labels, source.classes, report)
        report.rows.append((f"{name} sizes", _format_sizes(split.images.true_sizes().tolist())))


def _format_sizes(sizes: Sequence[Sequence[int]]) -> str:
    """Write the range of widths and of heights; the sizes are (height, width)."""
    heights, widths = ((min(sides), max(sides)) for sides in zip(*sizes, strict=True))
    ranges = (f"{low}" if low == high else f"{low} to {high}" for low, high in (widths, heights))
    return "{} px wide, {} px high".format(*ranges)


def _count_classes(
    name: str,
    num_images: int,
    labels: list[int] | None,
    classes: tuple[str, ...] | None,
    report: CheckReport,
) -> None:
    """Note the images of a split, of each class where there are few and of the extremes else."""
    if labels is None:
        report.rows.append((name, f"{num_images:,}, without labels"))
        return
    counts = Counter(labels)
    report.rows.append((name, f"{num_images:,} in {count_words(len(counts), 'class')}"))
    ordered = sorted(counts.items())
    if len(ordered) > _MOST_CLASSES_SHOWN:
        ordered = [min(ordered, key=lambda item: item[1]), max(ordered, key=lambda item: item[1])]
    for label, count in ordered:
        report.rows.append((f"  {label if classes is None else classes[label]}", f"{count:,}"))


def _check_listing(dataset: Dataset, listing: Listing, report: CheckReport) -> None:
    report.rows.append(("folder", str(listing.folder)))
    num_classes = len(set(listing.train.labels or ()))
    report.rows.append(("classes", f"{num_classes:,}"))
    if num_classes != dataset.num_classes:
        report.problems.append(f"{num_classes:,} classes instead of {dataset.num_classes:,}")
    for name, files in (("train", listing.train), ("test", listing.test)):
        if files is None and listing.takes_test_from_train:
            report.rows.append((name, "absent; a fifth of the training images becomes it"))
        else:
            report.count(name, 0 if files is None else len(files.paths), dataset.counts[name])


def _check_voc(dataset: Dataset, root: Path, report: CheckReport) -> None:
    for part, expected in dataset.counts.items():
        year, image_set = part.split()
        folder = find_devkit(root) / f"VOC{year}"
        names = folder / "ImageSets" / "Main" / f"{image_set}.txt"
        if not names.is_file():
            report.problems.append(f"{str(names)!r} is not there")
            continue
        images = names.read_text(encoding="utf-8", errors="replace").split()
        report.count(part, len(images), expected)
        for kind, suffix in (("JPEGImages", ".jpg"), ("Annotations", ".xml")):
            present = {path.stem for path in (folder / kind).glob(f"*{suffix}")}
            missing = [image for image in images if image not in present]
            if missing:
                report.problems.append(
                    f"{len(missing):,} of {part} are not in {str(folder / kind)!r} "
                    f"({quote_some(name + suffix for name in missing)})"
                )


def _check_checksums(
    files: Mapping[str, str], report: CheckReport, progress: ReportProgress, *, required: bool
) -> None:
    """Compare MD5 sums, which guard against damage, not against malice."""
    absent = [report.root / name for name in files if not (report.root / name).is_file()]
    if absent and required:
        verb = "is" if len(absent) == 1 else "are"
        report.problems.append(f"{quote_some(absent)} {verb} not there")
    for name, md5 in files.items():
        path = report.root / name
        if path in absent:
            continue
        progress(f"verifying {name}", 0, 1)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False))
        progress(f"verifying {name}", 1, 1)
        good = digest.hexdigest() == md5
        report.rows.append((name, "checksum right" if good else "checksum wrong"))
        if not good:
            report.problems.append(f"{str(path)!r} is damaged: its checksum is not {md5}")
