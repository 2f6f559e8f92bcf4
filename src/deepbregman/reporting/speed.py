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
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 0.7 + 2.6 * len(groups)), dpi=120)
        panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
        for axes, group in zip(panels, groups, strict=True):
            arms = [arm for arm in group["arms"] if arm["name"] != "views alone"][::-1]
            floor = _floor(group)
            shares = [arm["images_per_second"] / floor for arm in arms]
            bars = axes.barh([arm["name"] for arm in arms], shares, color=PALETTE(0))
            words = [
                f"{share:.2f}  ({arm['images_per_second']:,.0f}/s)"
                for share, arm in zip(shares, arms, strict=True)
            ]
            axes.bar_label(bars, words, padding=3)
            axes.axvline(1.0, color="black", linewidth=0.8)
            axes.set(
                title=title(group),
                xlim=(0.0, 1.35),
                xlabel="images per second over the bare encoder",
            )
            axes.grid(axis="y", visible=False)
        figure.suptitle(record["device"])
        with replacing(path) as file:
            figure.savefig(file, format="png")
