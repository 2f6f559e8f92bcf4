"""Whole recipes compared seed by seed: a table, what they cost, and a figure."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from deepbregman.runs import Record, replacing

from .figures import PALETTE, STYLE
from .printed import of_metric, printed_series, printed_value
from .summaries import (
    COMPARED,
    as_sentence,
    caption,
    change,
    costs_known,
    diverged_words,
    spread,
    unequal_words,
)

GREY = "0.45"
WARNING = "#b03a00"
ARM_COLOURS = [PALETTE(index) for index in (3, 0, 1, 2, 4, 5, 6, 8, 9)]
"""The reference's first, which is SimCLR's in other figures."""


def shown_metrics(results: Record) -> list[str]:
    """Return the metrics to show, of those that any arm was judged by."""
    there = {name for arm in results["arms"] for name in arm["metrics"]}
    return [name for name in COMPARED if name in there]


def pairs_table(results: Record) -> Group:
    """Draw every metric of every arm with its difference to the reference, then the costs."""
    reference, printed = results["study"]["reference"], printed_series(results)
    table = Table(title=escape(caption(results)), title_justify="left")
    table.add_column("metric")
    table.add_column("arm", overflow="fold")
    table.add_column("mean ± deviation", justify="right")
    table.add_column(f"difference to {escape(reference)} [95 %]", justify="right")
    if printed:
        table.add_column("published", justify="right", style="dim")
    for metric in shown_metrics(results):
        for index, arm in enumerate(results["arms"]):
            values = [(part, printed_value(part, arm)) for part in of_metric(printed, metric)]
            words = [f"{value} ({part['series']})" for part, value in values if value]
            table.add_row(
                COMPARED[metric] if index == 0 else "",
                escape(arm["arm"]),
                spread(arm["metrics"].get(metric)),
                change(arm["difference"].get(metric)),
                *([escape(", ".join(words))] if printed else []),
                end_section=index == len(results["arms"]) - 1,
            )
    return Group(table, _cost_table(results))


def _cost_table(results: Record) -> Table:
    table = Table(title="What training took", title_justify="left")
    table.add_column("arm", overflow="fold")
    known = costs_known(results)
    for words in (*known.values(), "seconds", "diverged"):
        table.add_column(words, justify="right")
    for arm in results["arms"]:
        cost = arm["cost"]
        counts = ["" if cost.get(name) is None else f"{cost[name]:,}" for name in known]
        diverged = str(arm["num_diverged"])
        table.add_row(escape(arm["arm"]), *counts, spread(cost["seconds"], digits=1), diverged)
    return table


def pairs_figure(paths: Sequence[Path], results: Record) -> None:
    """Draw every seed of every arm and, beside them, the differences to the reference.

    Args:
        paths: of the files; the ending names the format.
        results: what ``results.json`` holds.
    """
    metrics, measured = shown_metrics(results), results["arms"]
    arms = [arm["arm"] for arm in measured]
    num_seeds = len({row["seed"] for row in results["cells"]})
    printed, unequal = printed_series(results), unequal_words(results)
    notes = [
        "Small: a seed each, joined by a grey line; large: mean and sample deviation. Right: mean "
        "difference seed by seed with its 95 % interval by Student's t."
    ]
    if diverged_words(results):
        notes.append(f"{as_sentence(diverged_words(results))}, which have no accuracy.")
    notes += [f"Published, {part['series']}: {part['source']}." for part in printed]
    text = "\n".join(line for note in notes for line in textwrap.wrap(note, 155))
    rows = max(1, len(metrics))
    height = 1.1 + rows * (0.55 + 0.36 * len(arms)) + 0.12 * text.count("\n")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, height), dpi=150)
        grid = figure.subplots(rows, 2, squeeze=False, width_ratios=(1.3, 1.0))
        for axes in grid[1:, 1]:
            axes.sharex(grid[0, 1])
        for metric, (left, right) in zip(metrics, grid, strict=False):
            _draw_seeds(left, results, arms, metric)
            _draw_published(left, results, printed, metric)
            _draw_differences(right, results, metric)
            for axes in (left, right):
                axes.set_ylim(len(arms) - 0.45, -0.55)
                axes.grid(axis="y", visible=False)
            left.set_yticks(range(len(arms)), [_label(arm, metric, num_seeds) for arm in measured])
            right.set_yticks([])
            left.set_title(COMPARED[metric], loc="left", fontsize=8.5)
        grid[-1, 0].set_xlabel("top-1 accuracy, %")
        grid[-1, 1].set_xlabel(f"difference to {results['study']['reference']}, points")
        title = results["study"]["title"]
        figure.suptitle(title, fontsize=10.0, fontweight="bold")
        conditions = caption(results).removeprefix(title).removesuffix(f"; {unequal}").strip()
        conditions += f"; {num_seeds} seed" + "s" * (num_seeds > 1)
        words = "\n".join(textwrap.wrap(conditions, 70))
        grid[0, 1].set_title(words, loc="right", fontsize=7.0, color=GREY)
        if unequal:
            words = "\n".join(textwrap.wrap(as_sentence(unequal), 100))
            figure.suptitle(f"{title}\n{words}", fontsize=8.5, fontweight="bold", color=WARNING)
        figure.supxlabel(text, fontsize=6.0, color=GREY, x=0.01, ha="left", linespacing=1.4)
        for path in paths:
            with replacing(path) as file:
                figure.savefig(file, format=path.suffix.removeprefix("."))


def _label(arm: Record, metric: str, num_seeds: int) -> str:
    """Name an arm, with the number of its seeds where that is not all of them."""
    count = arm["metrics"].get(metric, {"n": 0})["n"]
    return str(arm["arm"]) + f" (n={count})" * bool(count != num_seeds)


def _draw_seeds(axes: Axes, results: Record, arms: list[str], metric: str) -> None:
    """Draw the mean and deviation of each arm and, below them, its seeds, joined by seed."""
    seeds: dict[int, list[tuple[float, float]]] = {}
    for row in results["cells"]:
        if metric in row["metrics"]:
            point = (row["metrics"][metric], arms.index(row["arm"]) + 0.17)
            seeds.setdefault(row["seed"], []).append(point)
            colour = ARM_COLOURS[arms.index(row["arm"]) % len(ARM_COLOURS)]
            style: Record = {"color": colour, "alpha": 0.75, "markeredgewidth": 0.0}
            axes.plot(*point, "o", markersize=3.6, zorder=2, **style)
    for points in seeds.values():
        x, y = zip(*sorted(points, key=lambda point: point[1]), strict=True)
        axes.plot(x, y, color="0.75", linewidth=0.7, zorder=1)
    for place, arm in enumerate(results["arms"]):
        summary = arm["metrics"].get(metric)
        if summary is not None and summary["n"] > 1:
            axes.errorbar(
                summary["mean"],
                place - 0.12,
                xerr=summary["deviation"],
                marker="o",
                markersize=6,
                capsize=3,
                color=ARM_COLOURS[place % len(ARM_COLOURS)],
            )


def _draw_published(axes: Axes, results: Record, printed: list[Record], metric: str) -> None:
    """Mark what was published, hollow and grey and named: it is no seed of ours."""
    for place, arm in enumerate(results["arms"]):
        for part in of_metric(printed, metric):
            if not printed_value(part, arm):
                continue
            point = (part["values"][str(arm["x"])], place - 0.12)
            style: Record = {"color": GREY, "markerfacecolor": "white", "markersize": 5.5}
            axes.plot(*point, "D", **style)
            is_left = point[0] < sum(axes.get_xlim()) / 2
            axes.annotate(
                f"published: {part['series']}",
                point,
                (-3.0 if is_left else 3.0, 6.5),
                textcoords="offset points",
                ha="left" if is_left else "right",
                fontsize=6.5,
                color=GREY,
            )


def _draw_differences(axes: Axes, results: Record, metric: str) -> None:
    """Draw each arm's mean difference with its interval; the reference is the line at zero."""
    axes.axvline(0.0, color="black", linewidth=0.9, zorder=1)
    axes.margins(x=0.12)
    for place, arm in enumerate(results["arms"]):
        summary = arm["difference"].get(metric)
        if summary is None:
            continue
        low, high = summary["interval"] or (summary["mean"], summary["mean"])
        margins = [[summary["mean"] - low], [high - summary["mean"]]]
        colour = ARM_COLOURS[place % len(ARM_COLOURS)]
        axes.errorbar(
            summary["mean"], place, xerr=margins, marker="D", markersize=5, capsize=3, color=colour
        )
        axes.annotate(
            change(summary),
            (1.0, place),
            (0.0, 6.5),
            xycoords=axes.get_yaxis_transform(),  # all in one column, within the panel
            textcoords="offset points",
            ha="right",
            fontsize=6.5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4},
        )
