"""Run folders to figures."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deepbregman.runs import Record, replacing

STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9.0,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
PALETTE = mpl.colormaps["tab10"]


def draw_losses(axes: Axes, metrics: list[Record]) -> None:
    """Draw the two losses by epoch."""
    epochs = [row["epoch"] for row in metrics]
    for index, name in enumerate(("contrastive", "divergence")):
        values = [row[name] for row in metrics]
        if any(values):
            axes.plot(epochs, values, color=PALETTE(index), label=name)
    axes.set(xlabel="epoch", ylabel="loss", title="Losses")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def draw_monitor(axes: Axes, metrics: list[Record]) -> None:
    """Draw the kNN monitor and, where there are any, the active subnetworks by epoch."""
    judged = [row for row in metrics if "knn" in row]
    axes.plot(
        [row["epoch"] for row in judged],
        [row["knn"] for row in judged],
        marker="o",
        markersize=3.0,
        color=PALETTE(2),
    )
    axes.set(xlabel="epoch", ylabel="accuracy, %", title="kNN on held-out training images")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_map(
    axes: Axes, points: np.ndarray, labels: np.ndarray, classes: list[str], title: str
) -> None:
    """Draw a two-dimensional map of features, (N, 2), coloured by label."""
    for index, name in enumerate(classes):
        chosen = points[labels == index]
        axes.scatter(chosen[:, 0], chosen[:, 1], s=7.0, color=PALETTE(index % 10), linewidths=0)
        if len(chosen):
            middle = np.median(chosen, axis=0)
            axes.annotate(
                name,
                (float(middle[0]), float(middle[1])),
                ha="center",
                va="center",
                weight="bold",
                bbox={"boxstyle": "round,pad=0.15", "color": "white", "alpha": 0.75},
            )
    axes.set(title=title, xticks=[], yticks=[])
    axes.grid(False)


def quickstart_figure(
    path: Path,
    metrics: list[Record],
    maps: list[tuple[str, np.ndarray]],
    labels: np.ndarray,
    classes: list[str],
) -> None:
    """Write the quickstart's figure: learning curves, and maps of features before and after.

    Args:
        path: of the PNG.
        metrics: of the run.
        maps: title and points (N, 2) of each map.
        labels: (N,)
        classes: their names.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 7.0), dpi=120)
        axes = figure.subplots(2, 2)
        draw_losses(axes[0, 0], metrics)
        draw_monitor(axes[0, 1], metrics)
        for axis, (title, points) in zip(axes[1], maps, strict=True):
            draw_map(axis, points, labels, classes, title)
        with replacing(path) as file:
            figure.savefig(file, format="png")
