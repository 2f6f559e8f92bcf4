"""deepbregman search: the images most like a query."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from deepbregman.errors import UserError, require_list, require_seed, require_whole
from deepbregman.reporting.screen import draw_hits, format_distance
from deepbregman.runs import check_new_file
from deepbregman.terminal import MaybePath, MaybeText, ignore_progress, say

from .parameters import (
    Accelerator,
    Devices,
    PythonOnly,
    Reporter,
    RunFolder,
    check_picture,
    find_unknown_names,
    list_images,
    open_images,
)

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.data import Source
    from deepbregman.evaluation.search_index import Answer, SearchResult
    from deepbregman.reporting.sheets import Panel

Measure = Literal["cosine", "divergence"]
TITLES = {
    "cosine": "by cosine of features (1: most similar)",
    "divergence": "by learned divergence D(query || image) (0: most similar)",
}


def search(
    run: Annotated[RunFolder, tyro.conf.Positional],
    queries: Annotated[Sequence[str | Path], tyro.conf.arg(name="query")] = (),
    *,
    data: MaybeText = None,
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10,
    by: Sequence[Measure] = (),
    split: Literal["train", "test", "all"] = "all",
    out: MaybePath = None,
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    progress: Reporter = None,
) -> "SearchResult":
    """Find the images most similar to a query.

    A query never finds itself. To measure how well searches find classes, use deepbregman evaluate
    RUN --protocol retrieval.

    Args:
        run: Folder of a run, as `deepbregman pretrain` writes it.
        queries: Image files, or images of the dataset by position (test:17, train:0) or by name.
        data: A dataset instead of the run's own; it needs no labels.
        k: Number of images to find.
        by: Measure of similarity: cosine of features, or the learned divergence D(query || image).
            By default both, if the run has a divergence.
        split: Images to search.
        out: PNG file for a contact sheet; it must not exist.
        seed: Seed of the random order of equally similar images.
        skip_unreadable: Leave out images that cannot be read; queries must be readable.
        accelerator: Device to compute on; auto takes a GPU if there is one.
        devices: Number of GPUs that compute features together, or all.
        source: Images of your program, by :func:`own_data`, instead of a dataset.
        encoder: If the run trained an encoder of your own: a module of the same structure.
    """
    require_list("queries", queries)
    for query in queries:
        if not isinstance(query, str | Path):
            raise UserError(
                f"queries holds the type {type(query).__name__}: each query is a file, or the name "
                "of an image of the dataset such as train:17; save an image of your program first"
            )
    check_new_file(out, ".png")
    k, seed = require_whole("k", k, 1), require_seed(seed)
    if not queries:
        raise UserError(
            "search needs an image: give --query FILE, or an image of the dataset such as "
            "--query train:17; `deepbregman evaluate RUN --protocol retrieval` measures how well "
            "searches find classes"
        )
    from deepbregman.evaluation.search_index import (
        SearchResult,
        answer_by_index,
        name_index,
        refuse_query,
    )
    from deepbregman.runs import Run

    opened = Run.open(run)
    check_picture(opened, data, source, out)
    words = [str(query) for query in queries]
    listing = None if source is not None else list_images(opened.config, data)
    if listing is not None and (unknown := find_unknown_names(words, listing)):
        raise refuse_query(unknown[0], data or opened.config.data.source)
    key, answers = None, None
    if listing is not None and encoder is None:
        options = {"split": split, "seed": seed, "accelerator": accelerator}
        key = name_index(opened, listing, skip_unreadable=skip_unreadable, **options)
    if key is not None:
        answers = answer_by_index(opened, key, words, data=data, k=k, by=by)
    if answers is None:
        images = open_images(
            opened, data, source, accelerator, devices, encoder, skip_unreadable, listing
        )
        from deepbregman.evaluation.retrieval import search_images  # loads torch

        report = progress or ignore_progress
        answers = search_images(
            images, words, k=k, by=by, split=split, seed=seed, key=key, progress=report
        )
    if out is not None:
        write_sheet(Path(out), answers)
    return SearchResult(answers, out)


def show(result: "SearchResult", console: Console) -> None:
    """Print what was found for each query."""
    for answer in result.answers:
        found = {
            measure: [(image.name, image.class_name, value) for image, value in hits]
            for measure, hits in answer.hits.items()
        }
        name, known = answer.query.name, answer.query.class_name
        if known is not None and not name.startswith(f"{known}/"):
            name = f"{name} ({known})"
        console.print(draw_hits(name, found))
    if result.sheet is not None:
        say(console, f"sheet: {result.sheet}")


def write_sheet(path: Path, answers: "Sequence[Answer]") -> None:
    """Draw the queries and what was found for them, and write the picture."""
    from deepbregman.reporting.sheets import write_contact_sheet

    write_contact_sheet(path, [_make_panel(answer) for answer in answers])


def _make_panel(answer: "Answer") -> "Panel":
    from deepbregman.reporting.sheets import Panel, Strip, Tile, caption_image

    query = answer.query
    strips = []
    for measure, hits in answer.hits.items():
        tiles = []
        for rank, (image, value) in enumerate(hits, start=1):
            judged = image.class_name is not None and query.class_name is not None
            same = image.class_name == query.class_name if judged else None
            lines = caption_image(image.name, image.class_name)
            tiles.append(Tile(image.pixels, str(rank), format_distance(value), lines, same))
        strips.append(Strip(TITLES[measure], tuple(tiles)))
    title, *below = caption_image(query.name, query.class_name)
    return Panel(Tile(query.pixels, title, lines=tuple(below)), tuple(strips))
