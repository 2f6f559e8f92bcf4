"""deepbregman explore: a page to look at the images as the encoder sees them."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

import tyro
from rich.console import Console

from deepbregman.data.labels import read_table
from deepbregman.errors import UserError, require_known, require_seed
from deepbregman.runs import Run, check_new_file
from deepbregman.terminal import MaybeNumber, MaybePath, MaybeText, ignore_progress, say

from .parameters import (
    Accelerator,
    Devices,
    PythonOnly,
    Reporter,
    RunFolder,
    check_data_and_source,
    find_names_in_run,
    open_images,
)

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.data import Source
    from deepbregman.evaluation.exploring import Exploration
    from deepbregman.reporting.explorer import Explorer

Format = Literal["html", "parquet"]
TITLES = {"cosine": "nearest by cosine", "divergence": "nearest by divergence D(image ‖ other)"}


class Explored(NamedTuple):
    """The file that was written."""

    path: Path
    num_images: int
    map_method: str


def explore(
    run: Annotated[RunFolder, tyro.conf.Positional],
    out: Path,
    *,
    data: MaybeText = None,
    labels: MaybePath = None,
    clusters: MaybeNumber = None,
    split: Literal["train", "test", "all"] = "all",
    format: Format = "html",
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    progress: Reporter = None,
) -> Explored:
    """Write a page with a map of all images: zoom, click, compare, filter, select.

    The page is one file and needs no network. It shows up to 50,000 images. For each it shows the
    most similar ones by cosine and by the learned divergence, and for each subnetwork the images
    that it scores highest. UMAP makes the map if deepbregman[explore] is installed, else t-SNE.

    Args:
        run: Folder of a run, as `deepbregman pretrain` writes it.
        out: File to write, .html or .parquet; it must not exist.
        data: A dataset instead of the run's own; labels are not needed.
        labels: CSV file that `deepbregman label` wrote, to colour images by their labels and
            probabilities, or to show which ones to label.
        clusters: Number of groups to colour by. By default the number of classes; without labels
            the square root of the number of images, at most 12.
        split: Images to show.
        format: html: the page. parquet: a table in the layout that Embedding Atlas reads.
        seed: Seed of the map, the clusters, and the sample where there are too many images.
        skip_unreadable: Leave out images that cannot be read, instead of stopping.
        accelerator: Device to compute on; auto takes a GPU if there is one.
        devices: Number of GPUs that compute features together, or all.
        source: Images of your program, by :func:`own_data`, instead of a dataset.
        encoder: If the run trained an encoder of your own: a module of the same structure.
    """
    out = Path(out)
    seed = require_seed(seed)
    formats = get_args(Format)
    require_known("format", format, formats)
    other = out.suffix.removeprefix(".")
    if other in formats and other != format:
        raise UserError(
            f"--out {out}: --format is {format}; add --format {other}, or give the file a name "
            f"with the ending .{format}"
        )
    check_new_file(out, f".{format}")
    if format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("--format parquet needs pyarrow: pip install 'deepbregman[explore]'")
    check_data_and_source(data, source)
    table = None if labels is None else Path(labels)
    in_run: dict[str, Path] = {}
    if table is not None:
        if not table.is_file():
            what = "a folder, and explore needs a CSV file" if table.is_dir() else "no such file"
            raise UserError(f"labels {str(labels)!r}: {what}; `deepbregman label --out` writes it")
        rows = read_table(table)  # refuses it before torch is loaded, which takes seconds
        if data is not None and source is None:
            named = {row["image"] for row in rows if row["image"]}
            in_run = find_names_in_run(Run.open(run).config, data, named, shown=True)
    images = open_images(run, data, source, accelerator, devices, encoder, skip_unreadable)
    from deepbregman.evaluation.exploring import explore_images, read_pixels
    from deepbregman.reporting.explorer import (
        LARGE_SIDE,
        MOST_LARGE,
        choose_thumbnail_side,
        draw_large,
        draw_sheets,
        write_page,
        write_parquet,
    )

    report = progress or ignore_progress
    found = explore_images(
        images,
        labels=table,
        in_run=in_run,
        clusters=clusters,
        split=split,
        seed=seed,
        progress=report,
    )
    page = _make_page(images.loaded.run, found, images.data)
    side = choose_thumbnail_side(len(found.names))
    pixels = read_pixels(found, side, report)
    if format == "parquet":
        write_parquet(out, page, pixels)
    else:
        pictures = found.gallery.pictures(page.queue[:MOST_LARGE], LARGE_SIDE)
        larger = {place: each for place, each in pictures.items() if max(each.shape) > side}
        page = page._replace(large=draw_large(larger))
        write_page(out, page, draw_sheets(pixels, side))
    return Explored(out, len(found.names), found.map_method)


def show(explored: Explored, console: Console) -> None:
    """Name the file and how to look at it."""
    path, count, method = explored
    size = path.stat().st_size / 1e6
    say(console, f"wrote {path}: {count:,} images placed by {method}, {size:.1f} MB")
    if path.suffix == ".parquet":
        say(
            console,
            f"look at it: embedding-atlas {path} --x projection_x --y projection_y --neighbors "
            "neighbors --image image",
        )
    else:
        say(console, "open it in a browser; it needs no network")


def _make_page(run: Run, found: "Exploration", data: str) -> "Explorer":
    """Turn what was computed into what the page shows."""
    import numpy as np

    from deepbregman.reporting.explorer import Column, Explorer, Neighbours, Subnetworks

    def category(title: str, labels: "list[str | None]") -> Column:
        known = sorted({label for label in labels if label is not None})
        has_none = None in labels
        names = ("no label", *known) if has_none else tuple(known)
        places = {name: place for place, name in enumerate(names)}
        values = [places["no label" if label is None else label] for label in labels]
        return Column(title, np.array(values), names, has_none)

    columns = []  # the map is coloured by the first
    given, labels, suggested, queue = found.given, {}, [], []
    if given is not None:
        is_predicted = given.probabilities is not None
        if any(given.labels):
            title = "predicted label" if is_predicted else "your label"
            columns.append(category(title, given.labels))
        if is_predicted:
            columns.append(Column("confidence", np.array(given.probabilities)))
        if queue := given.queue:
            asked, kinds = np.isin(np.arange(len(found.names)), queue), ("others", "yes")
            columns.append(Column("label next", asked, kinds, has_none=True))
        suggested = [place for place, was_suggested in enumerate(given.suggested) if was_suggested]
        pairs = enumerate(zip(given.labels, given.by_user, strict=True))
        labels = {place: label for place, (label, known) in pairs if known and label is not None}
    if found.classes is not None:
        columns.append(category("class", list(found.classes)))
    numbers = tuple(map(str, range(int(found.clusters.max()) + 1)))
    columns.append(Column("cluster", found.clusters, numbers))
    subnetworks = None
    winners = found.winners
    if winners is not None:
        ranks = {number: place for place, number in enumerate(sorted(set(winners.winner)))}
        names = tuple(str(number) for number in ranks)
        places = np.array([ranks[number] for number in winners.winner])
        columns.append(Column("winning subnetwork", places, names))
        subnetworks = Subnetworks(*winners[1:])
    neighbours = tuple(
        Neighbours(TITLES[measure], *ranked) for measure, ranked in found.ranked.items()
    )
    facts = (f"{len(found.names):,} images of {data}", f"run {run.path}", f"by {found.map_method}")
    return Explorer(
        "Images as the encoder sees them",
        facts,
        found.names,
        found.points,
        tuple(columns),
        neighbours,
        subnetworks,
        labels,
        tuple(suggested),
        tuple(queue),
    )
