"""Check whether a dataset is complete: counts, checksums, and files that can be decoded."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deepbregman.data.archives import open_archive, verify_checksums
from deepbregman.data.datasets import DATASETS, Dataset, expand_home, find_source
from deepbregman.data.downloads import list_checksums, open_download
from deepbregman.data.folders import Files, Listing, list_folder, quote_some
from deepbregman.data.frames import UnreadableImage, decode_frame, map_files, read_size
from deepbregman.data.images import ArrayImages, Progress, Source
from deepbregman.data.voc import find_devkit
from deepbregman.errors import UserError
from deepbregman.terminal import ReportProgress

_CHUNK_BYTES = 1 << 22
_MOST_CLASSES_SHOWN = 20
_LARGEST_FRAME = 512  # a file is decoded whole whatever its frame; this bounds the memory


@dataclass
class Report:
    """What was found of a dataset, and what is wrong with it."""

    name: str
    root: Path
    rows: list[tuple[str, str]] = field(default_factory=list)
    """What, and how much of it there is."""
    problems: list[str] = field(default_factory=list)

    def count(self, what: str, found: int, expected: Sequence[int]) -> None:
        """Note a number of images, and whether it is as published."""
        good = found in expected
        self.rows.append((what, f"{found:,}" if good else f"{found:,} of {expected[0]:,}"))
        if not good:
            self.problems.append(f"{what}: {found:,} images instead of {expected[0]:,}")

    def require_complete(self) -> None:
        """Raise a paragraph that says what is missing and how to get it, if anything is."""
        if not self.problems:
            return
        name, root, num_more = self.name, self.root, len(self.problems) - 5
        found = "; ".join(self.problems[:5])
        found += f"; and {num_more} more problems" if num_more > 0 else ""
        if name not in DATASETS:
            raise UserError(f"{name}: {found}")
        dataset = DATASETS[name]
        layout = f" Layout under {str(root)!r}: {'; '.join(dataset.layout)}." * bool(dataset.layout)
        prepare = f", or let `deepbregman data prepare {name} --root {root}` download it"
        raise UserError(
            f"{name} is not complete under {str(root)!r}: {found}. Get it: {dataset.fetch}"
            f"{prepare * dataset.downloadable}.{layout}"
        )


def check_data(name: str, root: Path, progress: ReportProgress) -> Report:
    """Look at a dataset by name, a folder of images or an ``.npz`` file.

    Counts and labels are compared with what was published for datasets of image files, checksums
    for the others, and for archives that lie in the root.
    """
    dataset, path = find_source(name, with_boxes=True)
    root = expand_home(root)
    if dataset is None:
        report = Report(name, root)
        (_check_folder if path.is_dir() else _check_archive)(path, report, progress)
        return report
    report = Report(name, root, [("what", dataset.title), ("terms", dataset.terms)])
    if dataset.list_files is not None:
        try:
            _check_listing(dataset, dataset.list_files(dataset.find(root)), report)
        except UserError as error:
            report.problems.append(str(error))
    elif name == "digits":
        report.rows += check_counts(dataset, root, open_download(name, root, False)).rows
    elif name == "voc":
        _check_voc(dataset, root, report)
    else:
        _check_checksums(list_checksums(name), report, progress, required=True)
        if not report.problems:
            report.rows += [(split, f"{count[0]:,}") for split, count in dataset.counts.items()]
    _check_checksums(dataset.archives, report, progress, required=False)
    return report


def check_counts(dataset: Dataset, root: Path, source: Source) -> Report:
    """Compare the numbers of images of an open dataset with what was published."""
    report = Report(dataset.name, root)
    for name, expected in dataset.counts.items():
        split = source.splits.get(name)
        report.count(name, 0 if split is None else len(split), expected)
    return report


def _check_folder(folder: Path, report: Report, progress: ReportProgress) -> None:
    """Count the images of each class of a folder, and decode every one of them."""
    listing = list_folder(folder)
    splits = listing.splits
    for name, files in splits.items():
        _count_classes(name if len(splits) == 2 else "images", files, listing.classes, report)
    paths = [path for files in splits.values() for path in files.paths]
    sizes = map_files(read_size, paths, partial(progress, "reading headers"))
    decoded = map_files(
        lambda path: decode_frame(path, _LARGEST_FRAME).size, paths, partial(progress, "decoding")
    )
    broken = [p for p, r in zip(paths, decoded, strict=True) if isinstance(r, UnreadableImage)]
    known = [size for size in sizes if not isinstance(size, UnreadableImage)]
    if known:
        report.rows.append(("sizes", _size_range(known)))
    report.rows.append(("other files", f"{listing.num_ignored:,}"))
    report.rows.append(("unreadable", f"{len(broken):,}"))
    if broken:
        report.problems.append(
            f"{len(broken)} images cannot be read ({quote_some(broken)}); replace or remove them, "
            "or go on without them with --skip-unreadable"
        )


def _check_archive(path: Path, report: Report, progress: ReportProgress) -> None:
    """Verify the checksums of an ``.npz`` file, and count the images of each class."""
    verify_checksums(path, partial(progress, "verifying checksums"))
    source = open_archive(path)
    for name, split in source.splits.items():
        if isinstance(split.images, ArrayImages):
            labels = None if split.labels is None else split.labels.tolist()
            _count_classes(name, labels or len(split), source.classes, report)
            sizes = split.images.true_sizes().tolist()
            report.rows.append((f"{name} sizes", _size_range(sizes)))


def _size_range(sizes: Sequence[Sequence[int]]) -> str:
    heights, widths = zip(*sizes, strict=True)
    low, high = (min(heights), min(widths)), (max(heights), max(widths))
    if low == high:
        return f"{low[0]} x {low[1]} px"
    return f"from {low[0]} x {low[1]} to {high[0]} x {high[1]} px"


def _count_classes(
    name: str, found: Files | list[int] | int, classes: tuple[str, ...] | None, report: Report
) -> None:
    """Note the images of a split, of each class where there are few and of the extremes else."""
    if isinstance(found, Files):
        found = len(found.paths) if found.labels is None else found.labels
    if isinstance(found, int):
        report.rows.append((name, f"{found:,}, without labels"))
        return
    counts = Counter(found)
    report.rows.append((name, f"{len(found):,} in {len(counts):,} classes"))
    ordered = sorted(counts.items())
    if len(ordered) > _MOST_CLASSES_SHOWN:
        ordered = [min(ordered, key=lambda item: item[1]), max(ordered, key=lambda item: item[1])]
    for label, count in ordered:
        report.rows.append((f"  {label if classes is None else classes[label]}", f"{count:,}"))


def _check_listing(dataset: Dataset, listing: Listing, report: Report) -> None:
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


def _check_voc(dataset: Dataset, root: Path, report: Report) -> None:
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
    files: Mapping[str, str], report: Report, progress: ReportProgress, *, required: bool
) -> None:
    root = report.root
    absent = [root / name for name in files if not (root / name).is_file()]
    if absent and required:
        verb = "is" if len(absent) == 1 else "are"
        report.problems.append(f"{quote_some(absent)} {verb} not there")
    for name, md5 in files.items():
        path = root / name
        if path in absent:
            continue
        good = _md5(path, partial(progress, f"verifying {name}")) == md5
        report.rows.append((name, "checksum right" if good else "checksum wrong"))
        if not good:
            report.problems.append(f"{str(path)!r} is damaged: its checksum is not {md5}")


def _md5(path: Path, progress: Progress) -> str:
    """Return the checksum that was published; it guards against damage, not against malice."""
    digest, total, done = hashlib.md5(usedforsecurity=False), path.stat().st_size, 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
            done += len(piece)
            progress(done, total)
    return digest.hexdigest()
