"""deepbregman search: the images most like a query."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from deepbregman.errors import UserError
from deepbregman.runs import check_new_file

from .options import Accelerator, parse, progress_bars, say

if TYPE_CHECKING:
    from deepbregman.evaluation.search import Answer, Image
    from deepbregman.reporting.sheets import Panel

TITLES = {
    "cosine": "by cosine of features (1 is alike)",
    "divergence": "by learned divergence D(query ‖ image) (0 is alike)",
}


def command(arguments: list[str]) -> None:
    """Find the images most like a query, or measure how well searches find classes."""

    def options(
        run: tyro.conf.Positional[Path],
        query: tuple[str, ...] = (),
        data: str | None = None,
        k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10,
        by: tuple[Literal["cosine", "divergence"], ...] = (),
        split: Literal["train", "test", "all"] = "train",
        out: Path | None = None,
        seed: int = 0,
        skip_unreadable: bool = False,
        accelerator: Accelerator = "auto",
    ) -> None:
        """Find the images of a source that are most like each query.

        Without a query, every image of the test split searches the training split; mean average
        precision and precision at k, by the labels, are printed and go into RUN/result.json.

        Args:
            run: Folder of the run.
            query: Image files, or images of the data by place (test:17, train:0) or by name.
            data: A source in place of the run's own; labels are not needed with a query.
            k: How many to find.
            by: cosine of features, divergence of scores with the query as first argument; all that
                the run has when not given.
            split: Where to look for queries.
            out: PNG file for a contact sheet; must not exist.
            seed: Of the shuffle that decides among equals.
            skip_unreadable: Go on without images that cannot be read.
            accelerator: Where to compute; auto takes a GPU if there is one.
        """
        from deepbregman.evaluation.search import evaluate_search, search
        from deepbregman.reporting.applications import (
            Found,
            metric_table,
            search_table,
            shown_value,
        )

        console = Console()
        if out is not None:
            check_new_file(out, ".png")
        if not query:
            if out is not None or split != "train":
                raise UserError(
                    "no --query: --out and --split are for queries; without one the test split "
                    "searches the training split, and only numbers come of it"
                )
            with progress_bars() as report:
                rows = evaluate_search(
                    run,
                    data=data,
                    k=k,
                    by=by,
                    seed=seed,
                    skip_unreadable=skip_unreadable,
                    accelerator=accelerator,
                    report=report,
                )
            sizes = (
                f"{rows[0]['details']['num_queries']:,} queries, {rows[0]['num_train']:,} images"
            )
            console.print(metric_table(rows, f"{run} searching {rows[0]['data']}: {sizes}"))
            return
        with progress_bars() as report:
            answers = search(
                run,
                query,
                data=data,
                k=k,
                by=by,
                split=split,
                seed=seed,
                skip_unreadable=skip_unreadable,
                accelerator=accelerator,
                report=report,
            )
        if out is not None:
            from deepbregman.reporting.sheets import contact_sheet

            contact_sheet(out, [_panel(answer) for answer in answers])
        for answer in answers:
            found = {
                measure: [
                    Found(image.name, image.class_name, shown_value(value)) for image, value in hits
                ]
                for measure, hits in answer.hits.items()
            }
            known = answer.query.class_name
            title = answer.query.name + (f" ({known})" if known is not None else "")
            console.print(search_table(title, found))
        if out is not None:
            say(console, f"sheet: {out}")

    parse(options, "search", arguments)


def _panel(answer: "Answer") -> "Panel":
    from deepbregman.reporting.applications import shown_value
    from deepbregman.reporting.sheets import Panel, Strip, Tile

    query = answer.query
    strips = []
    for measure, hits in answer.hits.items():
        tiles = []
        for rank, (image, value) in enumerate(hits, start=1):
            judged = image.class_name is not None and query.class_name is not None
            same = image.class_name == query.class_name if judged else None
            words = shown_value(value)
            tiles.append(Tile(image.pixels, str(rank), words, _words(image), same))
        strips.append(Strip(TITLES[measure], tuple(tiles)))
    title, *lines = _words(query)
    return Panel(Tile(query.pixels, title, lines=tuple(lines)), tuple(strips))


def _words(image: "Image") -> tuple[str, ...]:
    """Return the class, where it is known, and the name."""
    return (image.name,) if image.class_name is None else (image.class_name, image.name)
