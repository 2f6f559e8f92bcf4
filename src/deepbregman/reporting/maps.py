"""Maps of features side by side, with numbers under each."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from .divergences import save_figure
from .figures import STYLE, draw_map


class Map(NamedTuple):
    """Features of a run, mapped to the plane."""

    title: str
    points: np.ndarray  # (N, 2)
    words: tuple[str, ...]
    """Lines to stand under the map."""


def map_figure(
    paths: Sequence[Path], maps: Sequence[Map], labels: np.ndarray, classes: list[str]
) -> None:
    """Write maps side by side, of the same images.

    Args:
        paths: of the files.
        maps: one for each run.
        labels: (N,)
        classes: their names.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.0 * len(maps), 5.3), dpi=110)
        grid = figure.subplots(1, len(maps), squeeze=False)[0]
        for axes, one in zip(grid, maps, strict=True):
            draw_map(axes, one.points, labels, classes, one.title)
            axes.set_xlabel("\n".join(one.words))
        save_figure(figure, paths)
