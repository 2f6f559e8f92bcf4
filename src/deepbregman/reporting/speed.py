"""Benchmark records to a table and a figure."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

from deepbregman.runs import Record, replacing

from .figures import PALETTE, STYLE


def _floor(group: Record) -> float:
    return float(next(a["images_per_second"] for a in group["arms"] if a["name"] == "bare encoder"))


def title(group: Record) -> str:
    """Name a group of arms."""
    return f"{group['encoder']}, batch {group['batch_size']}, {group['image_size']} px"


def speed_table(group: Record) -> Table:
    """Draw the arms of one encoder and batch size."""
    table = Table(title=title(group), title_justify="left")
    table.add_column("arm")
    for name in ("images/s", "ms/step", "over bare", "spread", "first step", "memory"):
        table.add_column(name, justify="right")
    floor = _floor(group)
    for arm in group["arms"]:
        table.add_row(
            arm["name"],
            f"{arm['images_per_second']:,.0f}",
            f"{arm['milliseconds']:.2f}",
            f"{arm['images_per_second'] / floor:.3f}",
            f"{arm['spread']:.2f}x",
            f"{arm['first_step_seconds']:.1f} s",
            f"{arm['peak_gigabytes']:.2f} GB",
        )
    return table


def speed_figure(path: Path, record: Record) -> None:
    """Write a bar chart of every arm over the bare encoder, a panel per group."""
    groups = record["groups"]
    shown = [[arm for arm in group["arms"] if "views" not in arm["name"]] for group in groups]
    heights = [len(arms) + 2.0 for arms in shown]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 0.6 + 0.32 * sum(heights)), dpi=120)
        panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, group, arms in zip(panels, groups, shown, strict=True):
            floor = _floor(group)
            names = [arm["name"] for arm in arms[::-1]]
            speeds = [arm["images_per_second"] for arm in arms[::-1]]
            colours = [PALETTE(7) if name == "bare encoder" else PALETTE(0) for name in names]
            bars = axes.barh(names, [speed / floor for speed in speeds], color=colours, height=0.7)
            words = [f"{speed / floor:.2f}   {speed:,.0f} / s" for speed in speeds]
            axes.bar_label(bars, words, padding=4)
            axes.set(title=title(group), xlim=(0.0, 1.35), xticks=[0.0, 0.25, 0.5, 0.75, 1.0])
            axes.grid(axis="y", visible=False)
            axes.set_axisbelow(True)
        panels[-1].set_xlabel("images per second, as a share of the bare encoder's")
        figure.suptitle(record["device"])
        with replacing(path) as file:
            figure.savefig(file, format="png")
