"""Data sets before a run: what there is, whether it is whole, and a cache that opens at once."""

import shutil
from pathlib import Path

from deepbregman.data import ArrayImages, Progress, Source, channel_statistics, open_source
from deepbregman.data.archives import archive_bytes, write_archive
from deepbregman.data.checking import (
    Report,
    Stage,
    check_counts,
    check_dataset,
    find_path,
    require_complete,
)
from deepbregman.data.checking import check as check_data
from deepbregman.data.datasets import DATASETS, Dataset, expand_home
from deepbregman.data.downloads import download_voc
from deepbregman.errors import UserError
from deepbregman.runs import Record, now, parse_json, replacing, write_json

MEASURED_FILES = 10_000
"""Files that the mean and deviation are measured on; of arrays all images are."""
IMAGE_SIZE = 32
"""For a folder or an .npz file, where no other is asked for."""


def catalogue() -> list[Dataset]:
    """Return what is known of each data set that has a name."""
    return list(DATASETS.values())


def check(name: str, *, root: Path = Path("data"), stage: Stage | None = None) -> Report:
    """Look at a data set by name, a folder of images or an ``.npz`` file.

    Args:
        name: What to look at.
        root: Where the data sets with names lie.
        stage: For progress.

    Returns:
        What was found and the problems; no problem means that it is whole.

    Raises:
        UserError: When there is no such thing, or it cannot be read at all.
    """
    return check_data(name, root, stage or _quiet)


def prepare(
    name: str,
    *,
    root: Path = Path("data"),
    image_size: int | None = None,
    cache: Path | None = None,
    download: bool = True,
    skip_unreadable: bool = False,
    stage: Stage | None = None,
) -> tuple[Record, Path]:
    """Download a data set where possible, verify it, measure its pixels, and perhaps cache it.

    Args:
        name: A data set by name, a folder of images or an ``.npz`` file.
        root: Where the data sets with names lie or are put.
        image_size: Side of the training images; by default what is usual for the data set.
        cache: An ``.npz`` file to write the decoded frames to; must not exist.
        download: Whether to download what is absent.
        skip_unreadable: Leave unreadable images out; those found only while the cache is written
            have another image stand in for them, as in training.
        stage: For progress.

    Returns:
        Counts, mean and deviation of the channels, and the file beside the data that they were
        written to: ``ROOT/NAME.json``, or the path's own name with ``.json``.

    Raises:
        UserError: When it is not complete, or an output is not free or does not fit.
    """
    stage, root = stage or _quiet, expand_home(root)
    dataset = DATASETS.get(name)
    path = None if dataset is not None else find_path(name)
    data = root / name if path is None else path.resolve()  # which turns "." into a name
    record_file = data.with_name(f"{data.name}.json")
    _check_outputs(record_file, cache)
    if name == "voc":
        record = _prepare_voc(root, cache, download, stage)
    else:
        size = IMAGE_SIZE if dataset is None else dataset.image_size
        size = size if image_size is None else image_size
        if dataset is not None and not dataset.downloadable:
            require_complete(name, root, check_dataset(dataset, root, stage))
        source = open_source(
            name if path is None else str(path),
            root=root,
            image_size=size,
            download=download,
            skip_unreadable=skip_unreadable,
            progress=stage("checking files"),
        )
        if dataset is not None and dataset.downloadable:
            report = Report()
            check_counts(dataset, source, report)
            require_complete(name, root, report)
        if cache is not None:
            _check_room(cache, source)
        record = _measure(source, size, skip_unreadable)
        if cache is not None:
            with replacing(cache) as file:
                record["num_replaced"] = write_archive(
                    source,
                    file,
                    skip_unreadable=skip_unreadable,
                    progress=stage(f"writing {cache.name}"),
                )
            record["cache"] = str(cache)
    record_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(record_file, {"name": name, **record, "prepared": now()})
    return record, record_file


def _quiet(words: str) -> Progress:
    return lambda done, total: None


def _check_outputs(record_file: Path, cache: Path | None) -> None:
    """Refuse, before any long work, to write over what was not written here."""
    if record_file.exists():
        try:
            ours = "prepared" in parse_json(record_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            ours = False
        if not ours:
            raise UserError(
                f"{record_file} exists and was not written by `deepbregman data prepare`; rename "
                "it, since the counts and means go there"
            )
    if cache is None:
        return
    if cache.suffix.lower() != ".npz":
        raise UserError(f"--cache {cache}: a cache is an .npz file; give it that ending")
    if cache.exists():
        raise UserError(f"--cache {cache}: exists; remove it or name another file")
    if not cache.parent.is_dir():
        raise UserError(f"--cache {cache}: there is no folder {cache.parent}; make it first")


def _check_room(cache: Path, source: Source) -> None:
    needed, free = archive_bytes(source), shutil.disk_usage(cache.parent).free
    if needed > free:
        raise UserError(
            f"--cache {cache}: takes {needed / 1e9:,.1f} GB and {cache.parent} has "
            f"{free / 1e9:,.1f} GB free; name a file on a larger disk, or lower --image-size"
        )


def _measure(source: Source, image_size: int, skip_unreadable: bool) -> Record:
    images = source.train.images
    num_measured = len(images)
    if not isinstance(images, ArrayImages):
        num_measured = min(num_measured, MEASURED_FILES)
    mean, deviation = channel_statistics(
        images, max_images=num_measured, skip_unreadable=skip_unreadable
    )
    return {
        "images": {part: len(split) for part, split in source.splits.items()},
        "num_classes": None if source.classes is None else len(source.classes),
        "num_skipped": source.num_skipped,
        "image_size": image_size,
        "frame": list(images.frame),
        "mean": list(mean),
        "deviation": list(deviation),
        "num_measured": num_measured,
    }


def _prepare_voc(root: Path, cache: Path | None, download: bool, stage: Stage) -> Record:
    """Download and verify Pascal VOC, whose photographs are read one by one with their boxes."""
    if cache is not None:
        raise UserError("--cache: voc has boxes, and detection reads its files; leave --cache out")
    dataset = DATASETS["voc"]
    report = check_dataset(dataset, root, stage)
    if report.problems and download:
        download_voc(root)
        report = check_dataset(dataset, root, stage)
    require_complete("voc", root, report)
    counts = {part: count[0] for part, count in dataset.counts.items()}
    return {"images": counts, "num_classes": dataset.num_classes}
