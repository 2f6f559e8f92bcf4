"""The record of a search to a table and a figure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from deepbregman.runs import Record, replacing

from .figures import PALETTE, STYLE
from .trials import as_choice, completed, dimension, fate, fates, searched

BEST_ROWS = 5
COLUMNS = 3
GREY = "0.45"
WITHOUT_VALUE = {"pruned": "|", "diverged": "x"}
"""Marks of the trials that came to nothing, at the foot of a slice."""


def search_table(record: Record) -> Table:
    """Draw the best trials and, where it is known, how much each field mattered."""
    number = len(record["trials"])
    title = f"{record['recipe']} on {record['data']}: best of {number} trials ({fates(record)})"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("trial", justify="right")
    table.add_column(f"{record['objective']}, held out, %", justify="right")
    for name in searched(record):
        table.add_column(name, justify="right", overflow="fold")  # cut short, two could look alike
    for row in completed(record)[:BEST_ROWS]:
        values = [row["values"][name] for name in searched(record)]
        words = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        table.add_row(str(row["trial"]), f"{row['value']:.2f}", *words)
    if record["importance"]:
        shares = [f"{record['importance'].get(name, 0.0):.2f}" for name in searched(record)]
        table.add_section()
        table.add_row("", "importance", *shares, style="dim")
    return table


def search_figure(paths: Sequence[Path], record: Record, published: Mapping[str, float]) -> None:
    """Write a search's figure: a slice through every field, and how much each mattered.

    Args:
        paths: of the files; the ending names the format.
        record: what ``trials.json`` holds.
        published: field -> the best value that somebody else found.
    """
    names = searched(record)
    panels = len(names) + bool(record["importance"])
    columns = 2 if panels == 4 else min(COLUMNS, panels)
    rows = math.ceil(panels / columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * columns, 0.5 + 2.9 * rows), dpi=150)
        grid = figure.subplots(rows, columns, squeeze=False)
        axes = list(grid.flat)
        for axis, name in zip(axes, names, strict=False):
            _draw_slice(axis, record, name, published.get(name))
        for axis in axes[: len(names)]:
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel(f"{record['objective']} accuracy, held out, %")
        if record["importance"]:
            _draw_importance(axes[len(names)], record["importance"])
        for axis in axes[panels:]:
            axis.set_visible(False)
        handles, labels = axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(
                handles, labels, loc="outside lower center", ncols=len(handles), fontsize=7.5
            )
        words = f"{record['recipe']} on {record['data']}, {record['epochs']} epochs, "
        figure.suptitle(
            f"{words}{len(record['trials'])} trials by {record['sampler']} ({fates(record)})",
            fontsize=9.0,
        )
        for path in paths:
            with replacing(path) as file:
                figure.savefig(file, format=path.suffix.removeprefix("."))


def _draw_slice(axes: Axes, record: Record, name: str, published: float | None) -> None:
    """Draw the value of every completed trial over one field, later trials darker."""
    done = completed(record)
    words = next(words for words in record["space"] if words.startswith(f"{name}="))
    bounds, choices, is_log = dimension(words)

    def place(row: Record) -> float:
        value = row["values"][name]
        return float(value) if bounds else choices.index(as_choice(value))

    x, y = [place(row) for row in done], [row["value"] for row in done]
    age = [row["trial"] for row in done]
    if done:
        axes.scatter(
            x,
            y,
            c=age,
            cmap="Blues",
            vmin=-0.5 * max(1, max(age)),
            s=18,
            linewidths=0.4,
            edgecolors="0.3",
            label="trial (later is darker)",
        )
        axes.scatter(
            x[:1],
            y[:1],
            marker="*",
            s=110,
            color=PALETTE(3),
            zorder=3,
            label="best",
            linewidths=0.4,
            edgecolors="black",
        )
    for what, marker in WITHOUT_VALUE.items():
        lost = [row for row in record["trials"] if fate(row) == what and name in row["values"]]
        if lost:
            axes.scatter(
                [place(row) for row in lost],
                [0.03] * len(lost),
                transform=axes.get_xaxis_transform(),  # at the foot, where no accuracy is read off
                marker=marker,
                s=40 if marker == "|" else 22,
                color=GREY,
                linewidths=1.0,
                label=f"{what} (no value)",
                zorder=1,
            )
    if published is not None:
        axes.axvline(published, color=GREY, linestyle=":", label="published best for these images")
    if bounds is None:
        axes.set_xticks(range(len(choices)), choices)
        axes.set_xlim(-0.5, len(choices) - 0.5)
    else:  # all of the space: a best value at its edge asks for a wider one
        low, high = bounds
        if is_log:
            axes.set_xscale("log")
            room = (high / low) ** 0.04
            axes.set_xlim(low / room, high * room)
        else:
            axes.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.set_xlabel(name)


def _draw_importance(axes: Axes, importance: Mapping[str, float]) -> None:
    names = list(importance)[::-1]
    axes.barh(names, [importance[name] for name in names], color=PALETTE(7), height=0.5)
    axes.set(xlim=(0.0, 1.0), xlabel="share of variance (fANOVA)", title="importance")
    axes.set_yticks(range(len(names)), [name.replace(".", ".\n") for name in names], fontsize=7.5)
    axes.set_ylim(-0.8, len(names) - 0.2)
    axes.grid(axis="y", visible=False)
