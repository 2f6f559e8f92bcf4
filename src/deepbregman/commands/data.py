"""List datasets, check one, or prepare one: deepbregman data list|check|prepare."""

import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from deepbregman.config import DataSettings
from deepbregman.data.datasets import DATASETS, Dataset, expand_home, find_source
from deepbregman.errors import UserError
from deepbregman.files import Record, create_file
from deepbregman.runs import check_new_file
from deepbregman.terminal import (
    MaybeNumber,
    MaybePath,
    ReportProgress,
    count_words,
    ignore_progress,
    say,
)

from .parameters import Reporter
from .pretrain_options import tell_of_folder

if TYPE_CHECKING:
    from deepbregman.data import Source
    from deepbregman.data.checking import CheckReport

MEASURED_FILES = 10_000
"""Files that the mean and deviation are measured on; of arrays all images are."""
IMAGE_SIZE = 32
"""Image size for a folder or an .npz file, if no other is asked for."""
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


def list_datasets() -> list[Dataset]:
    """List the datasets that are known by name.

    Folders of images, .csv files that name and label images, and .npz files in the layout of
    MedMNIST need no name: give the path.
    """
    return list(DATASETS.values())


def check(name: Name, root: Path = Path("data"), progress: Reporter = None) -> "CheckReport":
    """Check whether a dataset is complete; if not, print what is missing and how to get it.

    The exit code is 0 for a complete dataset and 2 otherwise. The command compares the numbers of
    images and classes with the published ones, and the checksums of CIFAR, STL-10 and of archives
    in the root. It verifies every checksum of an .npz file. It decodes every image of a folder and
    names all that cannot be read, with the reasons; pretraining can leave them out, so they are no
    error.

    Args:
        name: Name of a dataset, a folder of images, a .csv file of labels, or an .npz file.
        root: Folder of the datasets that have a name.

    Returns:
        What was found and the problems; without problems it is complete.
    """
    if name in DATASETS:
        tell_of_folder(name, "dataset")
    find_source(name, with_boxes=True)  # before torch is loaded
    from deepbregman.data.checking import check_data

    return check_data(name, root, progress or ignore_progress)


def prepare(
    name: Name,
    root: Path = Path("data"),
    image_size: MaybeNumber = None,
    cache: MaybePath = None,
    download: bool = True,
    skip_unreadable: bool = False,
    progress: Reporter = None,
) -> Record:
    """Download a dataset if that is possible, verify it, and measure its pixels.

    The numbers of images and the mean and standard deviation of each channel are printed.

    With --cache, the decoded images are also written to one .npz file. Give it to other commands as
    --data; it opens at once. Each image is in a square frame of at most 2.25 times the image size:
    larger images are shrunk to fit, smaller ones are not enlarged, none is cropped. The cache takes
    3 bytes per pixel of the frames and gives the same views as the files, up to this image size.

    Args:
        name: Name of a dataset, a folder of images, or an .npz file.
        root: Folder of the datasets that have a name.
        image_size: Side of the training images in pixels. By default the usual one of the dataset,
            else 32.
        cache: File for the decoded images; it must not exist.
        download: Download missing files.
        skip_unreadable: Leave out images that cannot be read, instead of stopping.
    """
    progress, root = progress or ignore_progress, expand_home(root)
    dataset, _ = find_source(name, with_boxes=True)
    check_new_file(cache, ".npz", "cache")
    if name == "voc":
        return _prepare_voc(root, cache, download, progress)
    if image_size is None:
        image_size = IMAGE_SIZE if dataset is None else dataset.image_size
    DataSettings(image_size=image_size)  # checks it
    from deepbregman.data import open_source, without_unreadable
    from deepbregman.data.checking import check_data

    if dataset is not None and not dataset.downloadable:
        check_data(name, root, progress).require_complete()
    source = open_source(
        name,
        root=root,
        image_size=image_size,
        download=download,
        skip_unreadable=skip_unreadable,
        progress=partial(progress, "checking files"),
    )
    if cache is not None:
        needed = sum(split.images.nbytes for split in source.splits.values()) + (1 << 20)
        free = shutil.disk_usage(cache.parent).free
        if needed > free:
            raise UserError(
                f"--cache {cache}: takes {needed / 1e9:,.1f} GB and {cache.parent} has "
                f"{free / 1e9:,.1f} GB free; name a file on a larger disk, or lower --image-size"
            )
    if skip_unreadable:  # above some number of files, only their headers were read so far
        source = without_unreadable(source, partial(progress, "looking for unreadable images"))
    record = {"image_size": image_size, **_measure(source, skip_unreadable)}
    if cache is not None:
        from deepbregman.data.archives import write_archive

        report = partial(progress, f"writing {cache.name}")
        with create_file(cache) as stream:
            record["num_replaced"] = write_archive(
                source, stream, skip_unreadable=skip_unreadable, progress=report
            )
        record["cache"] = str(cache)
    return record


SUBCOMMANDS = {"list": list_datasets, "check": check, "prepare": prepare}


def show_list_datasets(datasets: list[Dataset], console: Console) -> None:
    """Print a table of the datasets."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name")
    for title in ("train", "test", "unlabelled", "classes", "size"):
        table.add_column(title, justify="right")
    table.add_column("downloadable")
    for dataset in datasets:
        counts = [
            sum(count[0] for split, count in dataset.counts.items() if kind in split)
            for kind in ("train", "test", "unlabelled")
        ]
        table.add_row(
            f"[bold]{dataset.name}[/bold]",
            *(f"{count:,}" if count else "" for count in counts),
            f"{dataset.num_classes:,}",
            dataset.size,
            "yes" if dataset.downloadable else "no",
        )
    console.print(table, highlight=False)
    say(console, "\ndeepbregman data check NAME shows where a dataset belongs and how to get it.")


def show_check(report: "CheckReport", console: Console) -> None:
    """Print what was found; problems are an error."""
    _print_rows(console, report.rows)
    for name, reason in report.unreadable.items():
        say(console, f"{name}: {reason}", "yellow")
    report.require_complete()
    for note in report.notes:
        say(console, note, "yellow")
    if not report.unreadable:
        say(console, f"{report.name}: complete")
    if report.name not in DATASETS:
        say(console, f"next: deepbregman pretrain {shlex.quote(report.name)}")


def show_prepare(record: Record, console: Console) -> None:
    """Print the counts and colours, and what was written."""
    rows = [(split, f"{count:,}") for split, count in record["images"].items()]
    if record["num_classes"] is not None:
        rows.append(("classes", f"{record['num_classes']:,}"))
    if "mean" in record:
        rows.append(("frame", " x ".join(map(str, record["frame"]))))
        for key in ("mean", "deviation"):
            rows.append((key, ", ".join(f"{value:.4f}" for value in record[key])))
        rows.append(("left out", f"{record['num_skipped']:,} unreadable"))
    _print_rows(console, rows)
    if "cache" in record:
        if record["num_replaced"]:
            replaced = count_words(record["num_replaced"], "image")
            say(console, f"{replaced} could not be decoded; the cache has others instead")
        say(console, f"wrote {record['cache']}")
        say(console, f"next: deepbregman pretrain RECIPE --data {shlex.quote(record['cache'])}")


def _print_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    width = max((len(what) for what, _ in rows), default=0)
    for what, words in rows:
        say(console, f"{what:<{width}}  {words}")


def _prepare_voc(
    root: Path, cache: Path | None, download: bool, progress: ReportProgress
) -> Record:
    """Download and verify Pascal VOC, whose photographs are read one by one with their boxes."""
    if cache is not None:
        raise UserError("--cache: voc has boxes, and detection reads its files; leave --cache out")
    from deepbregman.data.checking import check_data
    from deepbregman.data.downloads import download_voc

    report = check_data("voc", root, progress)
    if report.problems and download:
        download_voc(root)
        report = check_data("voc", root, progress)
    report.require_complete()
    dataset = DATASETS["voc"]
    counts = {split: count[0] for split, count in dataset.counts.items()}
    return {"images": counts, "num_classes": dataset.num_classes}


def _measure(source: "Source", skip_unreadable: bool) -> Record:
    from deepbregman.data import FileImages, channel_statistics

    images = source.train.images
    most = MEASURED_FILES if isinstance(images, FileImages) else len(images)
    num_measured = min(len(images), most)
    mean, deviation = channel_statistics(
        images, max_images=num_measured, skip_unreadable=skip_unreadable
    )
    return {
        "images": {name: len(split) for name, split in source.splits.items()},
        "num_classes": None if source.classes is None else len(source.classes),
        "num_skipped": len(source.skipped),
        "frame": list(images.frame),
        "mean": list(mean),
        "deviation": list(deviation),
        "num_measured": num_measured,
    }
