"""Figures of divergences: clustered distributions, and maps of D(x || x0) over the plane."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from deepbregman.runs import Record, replacing

from .figures import PALETTE, STYLE

MARKERS = ("o", "^", "s", "D", "v", "P", "X")
"""Of classes, so that clusters can have the colours."""


def save_figure(figure: Figure, paths: Sequence[Path]) -> None:
    """Write a figure once for each path; the ending names the format."""
    for path in paths:
        with replacing(path) as file:
            figure.savefig(file, format=path.suffix.removeprefix("."))


def ring_figure(
    paths: Sequence[Path],
    *,
    points: np.ndarray,
    labels: np.ndarray,
    clusters: Mapping[str, np.ndarray],
    rows: Sequence[Record],
) -> None:
    """Write the figure of the rings: the distributions, two clusterings, and every arm's ARI.

    Args:
        paths: of the files.
        points: (N, S, 2), the held-out distributions of the first seed.
        labels: (N,), their rings.
        clusters: arm -> (N,) clusters found, for the arms to show.
        rows: arms with mean, deviation and n of the ARI, and whether each is a baseline; grey.
    """
    means = points.mean(axis=1)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 7.0), dpi=110)
        grid = figure.add_gridspec(2, 1 + len(clusters), height_ratios=(1.0, 0.85))
        first = figure.add_subplot(grid[0, 0])
        for index in np.unique(labels):
            colour = PALETTE(int(index))
            mine, one = means[labels == index], points[labels == index][0]
            first.scatter(mine[:, 0], mine[:, 1], s=9.0, color=colour, linewidths=0)
            hollow: Record = {"facecolors": "none", "edgecolors": [colour], "linewidths": 0.6}
            first.scatter(one[:, 0], one[:, 1], s=9.0, **hollow)
        title = "Held-out distributions: means, by ring;\nall points of one of each (hollow)"
        _plane(first, title)
        for place, (arm, found) in enumerate(clusters.items(), start=1):
            axes = figure.add_subplot(grid[0, place], sharex=first, sharey=first)
            for index in np.unique(labels):
                mine = means[labels == index]
                colours = [PALETTE(3 + int(cluster)) for cluster in found[labels == index]]
                axes.scatter(
                    mine[:, 0],
                    mine[:, 1],
                    s=13.0,
                    c=colours,
                    marker=MARKERS[int(index)],
                    linewidths=0,
                )
            _plane(axes, f"Clusters by {arm}\n(colour: cluster, marker: ring)")
        bars = figure.add_subplot(grid[1, :])
        names = [row["arm"] for row in rows][::-1]
        values = [row["mean"] for row in rows][::-1]
        errors = [row["deviation"] or 0.0 for row in rows][::-1]
        fills = [PALETTE(7) if row["is_baseline"] else PALETTE(0) for row in rows][::-1]
        bars.barh(names, values, xerr=errors, color=fills, height=0.65, capsize=3)
        for place, (value, error) in enumerate(zip(values, errors, strict=True)):
            words = f"{value:.3f} ± {error:.3f}"
            bars.annotate(words, (max(value + error, 0.0) + 0.015, place), va="center", fontsize=8)
        bars.set(xlim=(min(0.0, *values), 1.2), xticks=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
        runs = rows[0]["n"]
        bars.set(title=f"Agreement with the rings, mean and deviation; runs: {runs}")
        bars.set_xlabel("adjusted Rand index")
        bars.grid(axis="y", visible=False)
        bars.set_axisbelow(True)
        save_figure(figure, paths)


def _plane(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9.0)
    axes.set_aspect("equal")
    axes.grid(False)


class Panel(NamedTuple):
    """One map over the plane."""

    title: str
    values: np.ndarray  # (G, G), of the points (x[j], y[i])
    is_partition: bool = False
    """Whole numbers, regions rather than heights."""


def plane_figure(
    paths: Sequence[Path],
    panels: Sequence[Panel],
    *,
    x: np.ndarray,
    y: np.ndarray,
    points: np.ndarray,
    labels: np.ndarray,
    chosen: int,
) -> None:
    """Write contour maps of divergences to a chosen sample, the samples over them.

    Args:
        paths: of the files.
        panels: the maps, three in a row.
        x: (G,) abscissae of the maps.
        y: (G,) ordinates.
        points: (N, 2) samples.
        labels: (N,) their classes.
        chosen: index of the sample x0.
    """
    num_rows = -(-len(panels) // 3)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 3.5 * num_rows), dpi=110)
        grid = figure.subplots(num_rows, 3, squeeze=False).flatten()
        for axes, panel in zip(grid, panels, strict=False):
            if panel.is_partition:
                _, regions = np.unique(panel.values, return_inverse=True)
                count = int(regions.max()) + 1
                soft = ListedColormap([mpl.colormaps["Pastel1"](i % 9) for i in range(count)])
                image = regions.reshape(panel.values.shape)
                # As an image also in SVG, where it would be a path for every cell.
                axes.pcolormesh(x, y, image, cmap=soft, rasterized=True)
            else:
                top = float(np.quantile(panel.values, 0.98)) or 1.0
                levels = np.linspace(0.0, top, 16)
                drawn = axes.contourf(x, y, panel.values, levels, cmap="viridis", extend="max")
                axes.contour(x, y, panel.values, levels[1::3], colors="white", linewidths=0.4)
                zero = panel.values <= 1e-6 * top
                if zero.mean() > 0.002:  # a region, not the point x0 alone
                    axes.contourf(x, y, zero, [0.5, 1.5], colors="none", hatches=["//"])
                figure.colorbar(drawn, ax=axes, shrink=0.75, format="%.2g")
            for index in np.unique(labels):
                mine = points[labels == index]
                marker = MARKERS[int(index) % len(MARKERS)]
                axes.scatter(
                    mine[:, 0],
                    mine[:, 1],
                    s=10.0,
                    marker=marker,
                    color=PALETTE((int(index) + 1) % 10),
                    edgecolors="white",
                    linewidths=0.3,
                )
            axes.plot(
                *points[chosen],
                marker="*",
                markersize=15,
                color="red",
                markeredgecolor="white",
                linestyle="none",
            )
            axes.annotate(
                "x0",
                tuple(points[chosen]),
                (7.0, 7.0),
                textcoords="offset points",
                color="red",
                weight="bold",
            )
            axes.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
            _plane(axes, panel.title)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        save_figure(figure, paths)
