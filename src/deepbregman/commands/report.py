"""deepbregman report: a page of runs and studies."""

import secrets
import shutil
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from rich.console import Console

from deepbregman.errors import UserError
from deepbregman.files import check_new_folder
from deepbregman.terminal import MaybeText, count_words, ignore_progress, say

from .parameters import Reporter, check_picture


class Report(NamedTuple):
    """A page that was written."""

    page: Path
    num_bytes: int
    num_figures: int
    num_tables: int


def report(
    sources: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FOLDER ...", help_behavior_hint=""),
    ],
    out: Path,
    title: MaybeText = None,
    progress: Reporter = None,
) -> Report:
    """Write a page of runs and studies, with its figures and tables beside it.

    The page is OUT/index.html. It needs no network and can be sent by mail. Runs that differ only
    by their seed are one arm, with mean and standard deviation. Figures are also written to
    OUT/figures as SVG, PNG and PDF, tables to OUT/tables as CSV and LaTeX. Links inside the folders
    are not followed.

    Args:
        sources: Folders of runs or studies, such as runs/*.
        out: Folder to write, new or empty.
        title: Title of the page. By default it names the arms and studies.
        progress: Called with the name of the work, how much is done, and how much there is.

    Returns:
        The page's file, its size, and how many figures and tables there are.
    """
    if Path(out).suffix.lower() in (".html", ".htm"):
        raise UserError(
            f"--out {out}: a report is a folder, with the page as index.html and its figures and "
            f"tables beside it; name a folder, such as {Path(out).with_suffix('')}"
        )
    check_new_folder(Path(out))
    place = Path(out).resolve()
    from deepbregman.reporting.page import write_page
    from deepbregman.reporting.sections import read_sources

    runs, studies = read_sources(sources)
    for run in runs:
        check_picture(run.path, None, None, out)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        counts = write_page(temporary, runs, studies, title, progress or ignore_progress)
        temporary.replace(place)  # takes the place of an empty folder
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            error.filename = str(out)
        raise
    page = Path(out) / "index.html"
    return Report(page, page.stat().st_size, *counts)


def show(result: Report, console: Console) -> None:
    """Print where the page is."""
    size = f"{result.num_bytes / 1e6:.1f} MB"
    beside = f"{count_words(result.num_figures, 'figure')} and "
    beside += f"{count_words(result.num_tables, 'table')} beside it"
    say(console, f"report: {result.page} ({size}; {beside})")
