"""deepbregman cluster: groups of images."""

from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from .options import Accelerator, parse, progress_bars, say


def command(arguments: list[str]) -> None:
    """Group images by k-means of features and by the learned divergence."""

    def options(
        run: tyro.conf.Positional[Path],
        clusters: int | None = None,
        data: str | None = None,
        by: tuple[Literal["features", "divergence"], ...] = (),
        seeds: int = 3,
        split: Literal["train", "test", "all"] = "all",
        out: Path | None = None,
        skip_unreadable: bool = False,
        accelerator: Accelerator = "auto",
    ) -> None:
        """Group the images of a source, and see how the groups agree with labels, if there are any.

        NMI, ARI and purity also go into RUN/result.json.

        Args:
            run: Folder of the run.
            clusters: How many; the number of classes when there are labels.
            data: A source in place of the run's own; labels are not needed.
            by: features: k-means of normalised features. divergence: Bregman clustering of scores.
                All that the run has when not given.
            seeds: How many times to cluster; each takes the best of ten starts.
            split: Which images.
            out: CSV file for the cluster of each image, by the best seed; must not exist.
            skip_unreadable: Go on without images that cannot be read.
            accelerator: Where to compute; auto takes a GPU if there is one.
        """
        from deepbregman.evaluation.cluster import METHODS, cluster
        from deepbregman.reporting.applications import cluster_table, metric_table

        with progress_bars() as report:
            found = cluster(
                run,
                clusters,
                data=data,
                by=by,
                seeds=seeds,
                split=split,
                out=out,
                skip_unreadable=skip_unreadable,
                accelerator=accelerator,
                report=report,
            )
        console = Console()
        parts = {METHODS[name]: part for name, part in found.partitions.items()}
        shown = {variant: (part.sizes, part.objectives) for variant, part in parts.items()}
        console.print(cluster_table(shown, f"{run}: clusters of {len(found.names):,} images"))
        if found.rows:
            repeated = f"{seeds} seeds" if seeds > 1 else "1 seed"
            console.print(metric_table(found.rows, f"agreement with the labels, {repeated}"))
        for variant, part in parts.items():
            empty = part.sizes.count(0)
            if empty:
                say(
                    console,
                    f"warning: {variant}: {empty} of {len(part.sizes)} clusters are empty; no more "
                    "can be told apart",
                )
        if out is not None:
            say(console, f"clusters: {out}")

    parse(options, "cluster", arguments)
