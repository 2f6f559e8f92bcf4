"""Types of parameters, and the opening of a run, that several commands share."""

import filecmp
import itertools
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import tyro

from deepbregman.config import Config
from deepbregman.errors import UserError, notify
from deepbregman.terminal import ReportProgress, count_words

T = TypeVar("T")
PYTHON_ONLY = "a parameter that the command line does not offer"
PythonOnly = Annotated[T, PYTHON_ONLY]
"""Marks a parameter that only Python can pass, such as a module or an open data source.

The type may be a string, so that its module need not be imported: ``PythonOnly["nn.Module"]``.
"""
if TYPE_CHECKING:
    from deepbregman.data import Source
    from deepbregman.data.folders import Listing
    from deepbregman.evaluation.gallery import OpenedRun
    from deepbregman.runs import Run

    Accelerator = str  # programs choose by text of their own; pick_device checks it
    Devices: TypeAlias = int | str
    MaybeDevices: TypeAlias = int | str | None
    RunFolder: TypeAlias = Run | Path | str
else:
    Accelerator = Literal["auto", "cpu", "cuda"]
    Devices = Annotated[int | Literal["all"], tyro.conf.arg(metavar="INT|all")]
    MaybeDevices = Annotated[int | Literal["all"] | None, tyro.conf.arg(metavar="INT|all")]
    RunFolder = Annotated[Path, tyro.conf.arg(metavar="RUN")]
Reporter: TypeAlias = PythonOnly[ReportProgress | None]
"""A function that is told of progress; the command line draws bars."""


def check_data_and_source(data: object, source: object) -> None:
    """Refuse images where a dataset or source is meant; only ``pretrain`` takes images as data."""
    if data is not None and not isinstance(data, str | Path):
        raise UserError(
            f"data is of the type {type(data).__name__}: name a dataset, a folder or a file; "
            "images of your program go to source=own_data(images, image_size=...)"
        )
    require_source(source)


def require_source(source: object) -> None:
    """Refuse anything but a data source, or None."""
    if source is None:
        return
    from deepbregman.data import Source

    if not isinstance(source, Source):
        raise UserError(
            f"source is of the type {type(source).__name__}: it must be a data source, such as "
            "source=own_data(images, image_size=...)"
        )


def open_images(
    run: "RunFolder",
    data: str | None,
    source: "Source | None",
    accelerator: str,
    devices: int | str,
    encoder: Any,
    skip_unreadable: bool,
    listing: "Listing | None" = None,
) -> "OpenedRun":
    """Check the folder and the dataset, then load torch, the run's networks and its images.

    Args:
        source: the images, already open; then data only names them.
        encoder: a module of the run's structure, or None; its type would load torch.
        listing: the files of the dataset, if they are listed already.
    """
    from deepbregman.runs import Run

    check_data_and_source(data, source)
    opened = Run.open(run)
    if source is None and listing is None:
        check_dataset(opened.config, data, opened.path)
    from deepbregman.evaluation.gallery import open_run

    return open_run(opened, data, source, accelerator, devices, encoder, skip_unreadable, listing)


def check_picture(
    run: "RunFolder",
    data: str | None,
    source: "Source | None",
    path: Path | str | None,
    option: str = "out",
) -> None:
    """Refuse pictures in the folder of the images: they would be images of every later command."""
    from deepbregman.runs import Run

    check_data_and_source(data, source)
    if path is None or source is not None:
        return
    folder = find_folder_around(Path(path), data or Run.open(run).config.data.source)
    if folder is not None:
        raise UserError(
            f"--{option} {path}: pictures in {folder} count as images of the data; name a place "
            "outside this folder"
        )


def find_folder_around(path: Path, data: str) -> Path | None:
    """Return the folder of the images if a path lies in it, and its files count as images."""
    from deepbregman.data.datasets import find_source

    try:
        known, folder = find_source(data)
    except UserError:
        return None  # left to what opens the data
    if known is not None or not folder.is_dir():
        return None
    return folder if path.resolve().is_relative_to(folder.resolve()) else None


def list_images(config: Config, data: str | None) -> "Listing | None":
    """List the files of a dataset that is a folder of images, before torch is loaded.

    For any other dataset it is None, and for a wrong one: the error is left to what opens it.
    """
    from deepbregman.data.datasets import list_source

    try:
        return list_source(data or config.data.source)
    except (OSError, UserError):
        return None


def find_unknown_names(names: Iterable[str], listing: "Listing") -> list[str]:
    """Return the names that cannot be those of listed images, of places in the data, or of files.

    Only the last part of a name is looked at; it may lack its extension.
    """
    from deepbregman.data.labels import join_accents
    from deepbregman.evaluation.search_index import PLACE

    paths = [path for files in listing.splits.values() for path in files.paths]
    known = {join_accents(name) for path in paths for name in (path.name, path.stem)}

    def is_known(name: str) -> bool:
        return join_accents(Path(name).name) in known or PLACE.fullmatch(name) is not None

    return [
        name
        for name in names
        if not is_known(name) and not os.path.isfile(os.path.expanduser(name))
    ]


def find_names_in_run(
    config: Config, data: str, names: set[str], *, shown: bool = False
) -> dict[str, Path]:
    """Find which labelled names are of images in the run's own folder, not in other data.

    Where both folders have a name, for different photos, the labels are of the folder that has all
    names; if both have, of the one whose images all have names of the other. Else it cannot be
    known.

    Args:
        shown: whether the labels are only shown; they are then of the data where it is not known.

    Returns:
        The file in the run's own folder, by name.
    """
    from deepbregman.data.datasets import find_source
    from deepbregman.data.folders import quote_some

    try:
        (known, own), (new, folder) = find_source(config.data.source), find_source(data)
    except UserError:
        return {}  # left to what opens the data
    is_folder = new is None and folder.is_dir()
    if known is not None or not own.is_dir() or (is_folder and own.samefile(folder)):
        return {}
    here = {name for name in names if is_folder and (folder / name).is_file()}
    there = {name for name in names if (own / name).is_file()}
    both = sorted(
        name for name in here & there if not filecmp.cmp(folder / name, own / name, shallow=False)
    )
    taken = there - here
    if both:
        words = f"{count_words(len(both), 'labelled name')} ({quote_some(both)})"
        words = f"{own} and {folder} both have {words} for different photos"
        has_all = [each for each, found in ((folder, here), (own, there)) if found == names]
        whose, why = has_all[0] if len(has_all) == 1 else None, "which has all labelled names"
        if len(has_all) == 2:
            whose, why = _find_smaller(folder, own), f"{why} and fewer others"
        if whose is None and not shown:
            raise UserError(
                f"{words}: write the folder before such names, as in {str(own / both[0])!r}; "
                f"or, if they are of {own}, move the photos of {folder} into a sub-folder of it"
            )
        if whose is None:
            whose, why = folder, "which is shown"
        if whose == own:
            taken |= set(both)
        notify(f"{words}: the labels are taken for {whose}, {why}")
    return {name: own / name for name in taken}


def _find_smaller(folder: Path, other: Path) -> Path | None:
    """Return the folder whose images all have names that the other has, beside more; or None."""
    from deepbregman.data.folders import read_tree

    def name_images(place: Path) -> set[Path]:
        tree = read_tree(place)
        found = itertools.chain(tree.here, *tree.groups.values())
        return {path.relative_to(place) for path in found}

    names, others = name_images(folder), name_images(other)
    return folder if names < others else other if others < names else None


def check_dataset(
    config: Config,
    data: str | Path | None = None,
    run: Path | None = None,
    *,
    resuming: bool = False,
) -> None:
    """Refuse a wrong dataset before torch is loaded, which takes seconds.

    Args:
        data: a dataset instead of that of the configuration.
        run: a run whose dataset it is: it may be looked at from another folder.
        resuming: the run goes on with its own dataset, so that none may be named instead.
    """
    from deepbregman.data import check_source
    from deepbregman.data.datasets import DATASETS

    spec = config.data.source if data is None else str(data)
    try:
        check_source(spec, Path(config.data.root))
    except UserError as error:
        is_path = spec != "custom" and spec not in DATASETS
        if data is not None or run is None or not is_path or Path(spec).exists():
            raise
        raise UserError(f"{error}; {_find_again(Path(spec), run, resuming)}") from None


def _find_again(data: Path, run: Path, resuming: bool) -> str:
    """Say how to reach a run's dataset, which is not where its configuration has it."""
    for folder in run.resolve().parents[:3]:  # as runs/mine, runs/mine/best or mine
        is_run = (folder / data / "config.toml").is_file()  # of the same name as the images
        if not data.is_absolute() and (folder / data).exists() and not is_run:
            place = shlex.quote(os.path.relpath(folder / data))
            other = "" if resuming else f", or look at the images with --data {place}"
            return f"{run} names it as seen from {folder}: start the command there{other}"
    fix = "move it back" if resuming else "give its new place with --data"
    return f"if it has moved since {run} was trained, {fix}"
