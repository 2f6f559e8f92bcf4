"""deepbregman cluster: groups of images."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from deepbregman.errors import require_whole
from deepbregman.reporting.screen import draw_metrics, draw_rows, format_distance
from deepbregman.runs import check_new_file
from deepbregman.terminal import (
    MaybeNumber,
    MaybePath,
    MaybeText,
    count_words,
    ignore_progress,
    say,
)

from .parameters import (
    Accelerator,
    Devices,
    PythonOnly,
    Reporter,
    RunFolder,
    check_picture,
    open_images,
)

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.data import Source
    from deepbregman.evaluation.clustering import Clustering, TypicalCluster

DISTANCES = {
    "features": "distance from the mean of its cluster, 1 - cosine",
    "divergence": "divergence D(image || mean of its cluster)",
}
"""Distance by which images are typical; see `rank_members`."""


def cluster(
    run: Annotated[RunFolder, tyro.conf.Positional],
    clusters: MaybeNumber = None,
    *,
    data: MaybeText = None,
    by: Sequence[Literal["features", "divergence"]] = (),
    seeds: int = 3,
    split: Literal["train", "test", "all"] = "all",
    out: MaybePath = None,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    progress: Reporter = None,
) -> "Clustering":
    """Cluster images by k-means of features and by the learned divergence.

    With labels, the command also prints the agreement of clusters and classes: NMI, ARI and purity
    in per cent, mean and standard deviation over the seeds. To record it for a report, use
    deepbregman evaluate RUN --protocol cluster.

    Args:
        run: Folder of a run, as `deepbregman pretrain` writes it.
        clusters: Number of clusters. By default the number of classes; without labels the square
            root of the number of images, at most 12.
        data: A dataset instead of the run's own; labels are not needed.
        by: features: k-means of normalised features. divergence: Bregman clustering of the
            subnetworks' scores, by D(image || centroid). By default both, if the run has a
            divergence.
        seeds: Number of clusterings; each is the best of ten starts.
        split: Images to cluster.
        out: CSV file for the cluster of each image, by the best seed; it must not exist. Beside it,
            NAME-features.png and NAME-divergence.png show the most typical images of each cluster.
        skip_unreadable: Leave out images that cannot be read, instead of stopping.
        accelerator: Device to compute on; auto takes a GPU if there is one.
        devices: Number of GPUs that compute features together, or all.
        source: Images of your program, by :func:`own_data`, instead of a dataset.
        encoder: If the run trained an encoder of your own: a module of the same structure.

    Returns:
        The clusters, and their agreement with the classes where there are labels.
    """
    if out is not None:
        out = Path(out)
        check_new_file(out, ".csv")
        for method in ("features", "divergence"):
            check_new_file(_name_sheet(out, method), ".png")
    seeds = require_whole("seeds", seeds, 1)
    check_picture(run, data, source, out)
    images = open_images(run, data, source, accelerator, devices, encoder, skip_unreadable)
    from deepbregman.evaluation.clustering import cluster_images

    report = progress or ignore_progress
    found = cluster_images(
        images, clusters, by=by, seeds=seeds, split=split, out=out, progress=report
    )
    sheets = []
    for method, groups in found.typical.items():
        assert out is not None
        sheets.append(_name_sheet(out, method))
        write_sheet(sheets[-1], method, groups)
    return replace(found, sheets=tuple(sheets))


def _name_sheet(out: Path, method: str) -> Path:
    return out.with_name(f"{out.stem}-{method}.png")


def write_sheet(path: Path, method: str, clusters: "Sequence[TypicalCluster]") -> None:
    """Draw the most typical images of each cluster, a strip each."""
    from deepbregman.evaluation.clustering import METHODS
    from deepbregman.reporting.sheets import Panel, Strip, Tile, caption_image, write_contact_sheet

    strips = []
    for number, size, images in clusters:
        tiles = []
        for rank, image in enumerate(images, start=1):
            lines = caption_image(image.name, image.class_name)
            tiles.append(Tile(image.pixels, str(rank), format_distance(image.distance), lines))
        title = f"cluster {number}: {count_words(size, 'image')}, the most typical"
        strips.append(Strip(title, tuple(tiles)))
    caption = f"{METHODS[method]}; below an image: its rank, and its {DISTANCES[method]}"
    write_contact_sheet(path, [Panel(None, tuple(strips))], caption)


def show(found: "Clustering", console: Console) -> None:
    """Print the sizes of the clusters, their agreement with labels, and what was written."""
    from deepbregman.evaluation.clustering import METHODS

    parts = {METHODS[name]: part for name, part in found.partitions.items()}
    rows = [
        (variant, format_distance(min(part.objectives)), " ".join(map(str, part.sizes)))
        for variant, part in parts.items()
    ]
    columns = ("clusters by", "distance within", "sizes, from cluster 0 on")
    count = len(next(iter(parts.values())).sizes)
    table = draw_rows(f"{count} clusters of {len(found.names):,} images", columns, rows)
    table.columns[2].justify = "left"
    console.print(table)
    if found.rows:
        seeds = count_words(found.rows[0]["n"], "seed")
        console.print(draw_metrics(found.rows, f"agreement with the labels, {seeds}"))
    for variant, part in parts.items():
        empty = part.sizes.count(0)
        if empty:
            say(
                console,
                f"warning: {variant}: {empty} of {len(part.sizes)} clusters are empty; the "
                "images do not differ enough to fill them",
                "yellow",
            )
    if found.table is not None:
        say(console, f"clusters: {found.table}")
    else:
        say(console, "--out clusters.csv writes the cluster of each image, and sheets of images")
    for sheet in found.sheets:
        say(console, f"sheet: {sheet}")
