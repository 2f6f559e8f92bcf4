"""The results of a study to a table and a figure; published values stand apart from measured."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from deepbregman.runs import Record, replacing

from .figures import PALETTE, STYLE
from .pairs import pairs_figure, pairs_table
from .printed import of_metric, printed_series, printed_title, printed_value
from .summaries import caption, change, diverged_words, reference_words, spread

GREY = "0.45"
COLOURS = {"SimCLR": PALETTE(3), "with divergence": PALETTE(0)}
"""Of series that several studies have; the others take what is left."""
OTHER_COLOURS = [PALETTE(index) for index in (1, 2, 4, 5, 6, 8, 9)]
PUBLISHED_MARKERS = "Ds^v"
SHOWN = (
    *("linear, cached features", "linear, crop and flip"),
    *("knn, cosine, k=20", "knn, divergence, k=20"),
)
"""Metrics of the table; ``results.csv`` has them all."""
LONG_NAME = 26
"""Letters of a series of which three do not fit side by side."""
LOG_RATIO = 20.0
"""An axis whose ends lie further apart than this is logarithmic."""


def study_table(results: Record) -> RenderableType:
    """Draw the arms of a study, their metrics, and what was published."""
    if results["study"]["figure"] == "pairs":
        return pairs_table(results)
    there = dict.fromkeys(name for arm in results["arms"] for name in arm["metrics"])
    metrics = [name for name in SHOWN if name in there]
    printed = printed_series(results)
    beyond = {arm["name"] for arm in results["study"]["arms"] if arm["beyond"]}
    supervised = {arm["name"] for arm in results["study"]["arms"] if arm.get("supervised")}
    table = Table(title=escape(caption(results)), title_justify="left")
    table.add_column("arm", overflow="fold")  # cut short, two arms could look alike
    for name in metrics:
        table.add_column(name, justify="right")
    reference = reference_words(results)
    if reference is not None:
        table.add_column(f"linear, difference to {escape(reference)} [95 %]", justify="right")
    for part in printed:
        table.add_column(
            escape(printed_title(part, results["metric"])), justify="right", style="dim"
        )
    for arm in results["arms"]:
        mark = " (supervised)" * (arm["arm"] in supervised) + " *" * (arm["arm"] in beyond)
        diverged = arm["num_diverged"]
        cells = [escape(arm["arm"]) + mark + f" ({diverged} diverged)" * bool(diverged)]
        cells += [spread(arm["metrics"].get(name)) for name in metrics]
        if reference is not None:
            cells.append(change(arm["difference"].get(results["metric"])))
        cells += [printed_value(part, arm) for part in printed]
        table.add_row(*cells)
    if beyond & {arm["arm"] for arm in results["arms"]}:
        table.caption = "* not in the paper"
    return table


def study_figure(paths: Sequence[Path], results: Record) -> None:
    """Write a study's figure.

    Args:
        paths: of the files; the ending names the format.
        results: what ``results.json`` holds.
    """
    kind = results["study"]["figure"]
    if kind == "pairs":
        pairs_figure(paths, results)
        return
    measured = [arm for arm in results["arms"] if results["metric"] in arm["metrics"]]
    rows = len(measured) + len({arm["series"] for arm in measured})
    size = (6.4, 1.5 + 0.27 * rows) if kind == "bars" else (6.4, 4.0)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=150)
        axes = figure.subplots()
        if measured:
            {"line": _draw_line, "bars": _draw_bars, "drops": _draw_drops}[kind](
                axes, measured, results
            )
        figure.suptitle(results["study"]["title"], fontsize=10.0, fontweight="bold")
        axes.set_title(_conditions(measured, results), fontsize=7.5, color=GREY)
        for path in paths:
            with replacing(path) as file:
                figure.savefig(file, format=path.suffix.removeprefix("."))


def _conditions(measured: list[Record], results: Record) -> str:
    counts = sorted({arm["metrics"][results["metric"]]["n"] for arm in measured})
    seeds = (
        "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    )
    what = "one seed" if seeds == "1" else f"mean and deviation of {seeds} seeds"
    words = caption(results).removeprefix(results["study"]["title"]).strip() + f"; {what}"
    lines = [words, *textwrap.wrap(diverged_words(results), 110)]  # what is not drawn is said
    return "\n".join(lines)


def _value(arm: Record, results: Record) -> tuple[float, float]:
    summary = arm["metrics"][results["metric"]]
    return summary["mean"], summary["deviation"] or 0.0


def _colour(series: str, index: int) -> tuple[float, float, float, float]:
    return COLOURS.get(series, OTHER_COLOURS[index % len(OTHER_COLOURS)])


def _reference(measured: list[Record], results: Record) -> Record | None:
    name = results["study"]["reference"]
    return next((arm for arm in measured if arm["arm"] == name), None)


def _positions(values: list[float | str]) -> dict[str, float]:
    """Place the points of an axis: numbers where they are, words side by side."""
    if all(isinstance(value, int | float) for value in values):
        return {str(value): float(value) for value in values}
    return {str(value): float(index) for index, value in enumerate(dict.fromkeys(values))}


def _draw_line(axes: Axes, measured: list[Record], results: Record) -> None:
    reference = _reference(measured, results)
    points = [arm for arm in measured if arm is not reference]
    places = _positions([arm["x"] for arm in points])
    numeric = all(isinstance(arm["x"], int | float) for arm in points)
    names = list(dict.fromkeys(arm["series"] for arm in points))
    supervised = {arm["series"] for arm in results["study"]["arms"] if arm.get("supervised")}
    for index, name in enumerate(names):
        # Words have room beside them, so that bars at the same place need not hide each other.
        shift = 0.0 if numeric else 0.08 * (index - (len(names) - 1) / 2)
        mine = [arm for arm in points if arm["series"] == name]
        means, deviations = zip(*(_value(arm, results) for arm in mine), strict=True)
        x = [places[str(arm["x"])] + shift for arm in mine]
        axes.errorbar(
            x,
            means,
            deviations,
            marker="o",
            markersize=4,
            capsize=3,
            color=_colour(name, index),
            linestyle="--" if name in supervised else "-",
            label=name,
        )
    if reference is not None:
        mean, deviation = _value(reference, results)
        colour = _colour(reference["series"], 0)
        axes.axhline(mean, color=colour, linewidth=1.2, label=reference["series"])
        axes.axhspan(mean - deviation, mean + deviation, color=colour, alpha=0.12, linewidth=0)
    printed = of_metric(printed_series(results), results["metric"])
    for part, marker in zip(printed, PUBLISHED_MARKERS, strict=False):
        known = {x: y for x, y in part["values"].items() if numeric or x in places}
        x = [float(word) if numeric else places[word] for word in known]
        style: Record = {"color": GREY, "markerfacecolor": "white", "markersize": 4.5}
        axes.plot(
            x,
            list(known.values()),
            linestyle=":" if len(x) > 1 else "none",
            linewidth=0.9,
            marker=marker,
            label=f"published: {part['series']}",
            **style,
        )
    _scale(axes, places, numeric)
    axes.set(xlabel=results["study"]["x_label"], ylabel="linear accuracy, %")
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Explain the marks below the figure, where they hide nothing; each once."""
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    if unique:
        is_long = max(map(len, unique)) > LONG_NAME
        axes.figure.legend(
            list(unique.values()),
            list(unique),
            loc="outside lower center",
            ncols=2 if is_long else 3,
            fontsize=6.5 if is_long else 7.5,
        )


def _scale(axes: Axes, places: dict[str, float], numeric: bool) -> None:
    """Tick the values that were trained, on a logarithmic axis where they span it."""
    ends = min(places.values(), default=0.0), max(places.values(), default=0.0)
    if numeric and ends[0] > 0 and ends[1] / ends[0] > LOG_RATIO:
        axes.set_xscale("log")
    elif not numeric:
        axes.set_xlim(ends[0] - 0.4, ends[1] + 0.4)
    axes.xaxis.set_major_locator(FixedLocator(list(places.values())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(list(places))


def _draw_bars(axes: Axes, measured: list[Record], results: Record) -> None:
    """Draw a point for each arm, from top to bottom, groups apart and named."""
    reference = _reference(measured, results)
    beyond = {arm["name"] for arm in results["study"]["arms"] if arm["beyond"]}
    groups = list(dict.fromkeys(arm["series"] for arm in measured if arm is not reference))
    labels: list[str] = []
    heights: list[float] = []
    place = 0.0
    for index, group in enumerate(groups):
        for arm in [arm for arm in measured if arm["series"] == group and arm is not reference]:
            mean, deviation = _value(arm, results)
            axes.errorbar(
                mean,
                place,
                xerr=deviation,
                marker="o",
                markersize=5,
                capsize=3,
                color=_colour(group, index),
                linestyle="none",
            )
            prefix = f"{group}: " if len(groups) > 1 else ""
            labels.append(f"{prefix}{arm['x']}" + " *" * (arm["arm"] in beyond))
            heights.append(place)
            for part in of_metric(printed_series(results), results["metric"]):
                if str(arm["x"]) in part["values"]:
                    axes.plot(
                        part["values"][str(arm["x"])],
                        place,
                        "D",
                        color=GREY,
                        markersize=5,
                        markerfacecolor="white",
                        label=f"published: {part['series']}",
                    )
            place += 1.0
        place += 0.5
    if reference is not None:
        mean, deviation = _value(reference, results)
        style: Record = {"color": COLOURS["SimCLR"], "zorder": 0}
        axes.axvline(mean, linewidth=1.2, label=reference["series"], **style)
        axes.axvspan(mean - deviation, mean + deviation, alpha=0.12, linewidth=0, **style)
    axes.set(yticks=heights, yticklabels=labels, xlabel="linear accuracy, %")
    axes.set_ylim(place - 0.5, -1.0)
    if any(label.endswith("*") for label in labels):
        axes.annotate(
            "* not in the paper",
            (1.0, 0.0),
            (0.0, -22.0),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7.0,
            color=GREY,
        )
    _legend(axes)


def _draw_drops(axes: Axes, measured: list[Record], results: Record) -> None:
    """Draw what each series loses, step after step, as bars side by side."""
    shown = [arm for arm in measured if results["metric"] in arm["difference"]]
    steps = list(dict.fromkeys(arm["x"] for arm in shown))
    series = list(dict.fromkeys(arm["series"] for arm in shown))
    width = 0.8 / max(1, len(series))
    for index, name in enumerate(series):
        mine = [arm for arm in shown if arm["series"] == name]
        x = [steps.index(arm["x"]) + (index - (len(series) - 1) / 2) * width for arm in mine]
        lost = [arm["difference"][results["metric"]] for arm in mine]
        means = [part["mean"] for part in lost]
        deviations = [math.nan if (d := part["deviation"]) is None else d for part in lost]
        axes.bar(x, means, width * 0.92, label=name, color=_colour(name, index))
        axes.errorbar(x, means, deviations, linestyle="none", color="black", capsize=2, linewidth=1)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set(ylabel="change of linear accuracy, points")
    axes.set_xticks(range(len(steps)), steps)
    axes.grid(axis="x", visible=False)
    _legend(axes)
