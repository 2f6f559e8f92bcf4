"""deepbregman report: a page of runs and studies."""

import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

import tyro
from rich.console import Console

from deepbregman.errors import UserError
from deepbregman.terminal import ReportProgress, say

from .parameters import PythonOnly


class Report(NamedTuple):
    """A page that was written."""

    page: Path
    num_bytes: int
    num_figures: int
    num_tables: int


def report(
    sources: tyro.conf.Positional[tuple[Path, ...]],
    out: Path,
    title: str | None = None,
    progress: PythonOnly[ReportProgress | None] = None,
) -> Report:
    """Write a page of runs and studies, with its figures and tables beside it.

    The page needs no network: OUT/index.html can be opened from the file system or sent by
    mail. Runs that differ only by seed are one arm, with mean and deviation. Figures are also
    in OUT/figures as PNG and SVG, tables in OUT/tables as CSV and LaTeX. No link inside a folder
    is followed.

    Args:
        sources: Folders of runs or of studies, such as runs/*.
        out: Folder to write; must not exist, or be empty.
        title: Of the page; by default it names what is compared.
        progress: Takes the name of the work, how much of it is done, and how much there is.

    Returns:
        The page's file, its size, and how many figures and tables there are.
    """
    place = Path(out).resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"--out {out} exists and is not empty: name another folder, or remove it")
    from deepbregman.reporting.page import read_sources, write_page

    runs, studies = read_sources(sources)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        counts = write_page(temporary, runs, studies, title, progress or _say_nothing)
        temporary.replace(place)  # takes the place of an empty folder
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    page = Path(out) / "index.html"
    return Report(page, page.stat().st_size, *counts)


def _say_nothing(work: str, done: int, total: int) -> None:
    """Take the progress of a caller who does not want it."""


def show(result: Report, console: Console) -> None:
    """Say where the page is."""
    size = f"{result.num_bytes / 1e6:.1f} MB"
    beside = f"{result.num_figures} figures, {result.num_tables} tables beside it"
    say(console, f"report: {result.page} ({size}; {beside})")
