"""deepbregman report: runs and studies to a page."""

from pathlib import Path

import tyro
from rich.console import Console

from .options import parse, progress_bars, say


def command(arguments: list[str]) -> None:
    """Write a page of runs and studies."""

    def options(
        sources: tyro.conf.Positional[tuple[Path, ...]],
        out: Path,
        title: str | None = None,
    ) -> None:
        """Write one HTML page of runs and studies, with its figures and tables beside it.

        The page needs no network: OUT/index.html can be opened from the file system or sent by
        mail. Runs that differ only by seed are one arm, with mean and deviation. Figures are also
        in OUT/figures as PNG and SVG, tables in OUT/tables as CSV and LaTeX.

        Args:
            sources: Folders of runs or of studies, such as runs/*.
            out: Folder to write; must not exist, or be empty.
            title: Of the page; by default it names what is compared.
        """
        from deepbregman.reporting.page.writing import report

        with progress_bars() as progress:
            written = report(sources, out, title=title, progress=progress)
        say(
            Console(),
            f"report: {written.page} ({written.num_bytes / 1e6:.1f} MB; "
            f"{written.num_figures} figures, {written.num_tables} tables beside it)",
        )

    parse(options, "report", arguments)
