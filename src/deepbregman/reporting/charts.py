"""Records to Vega-Lite: one specification is the page's interactive chart, its PNG and its SVG.

Charts of the page have no colours for text and grid: its style sheet gives them, for light, dark
and paper alike. Altair is imported where it is used, since that takes half a second.
"""

import io
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepbregman.files import replace_file
from deepbregman.runs import Record
from deepbregman.statistics import Summary, format_difference, format_summary

from .published import list_published_rows
from .records import REFERENCES, RunGroup, average_references, find_rows, list_measures
from .tables import choose_interval, name_measures, summarise_measure

if TYPE_CHECKING:
    import altair as alt

PALETTE: tuple[str, ...] = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#8a8a8a"),
)
"""Okabe and Ito's colours, for every kind of colour vision, without white and black."""
GREY = PALETTE[-1]
DASHES: tuple[list[int], ...] = ([1, 0], [6, 3], [2, 2])
"""Line patterns: an arm whose colour repeats takes the next one."""
PLAIN = "~r"
"""Format of an axis: 20 and 0.001; a logarithmic one would say 2e+1 by itself."""
SHAPES = ("circle", "square", "triangle-up")
"""Dots: an arm whose colour repeats takes the next one."""
WIDTH = 460
"""Width of a chart in a file, in pixels before scaling; on the page it fills its container."""
FIGURE_KINDS = ("svg", "png", "pdf")
"""Files of a figure: for the web, for slides, for papers."""
PNG_SCALE = 2.0
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LONG_ARM = 40
"""A longer name of an arm has a line of the legend alone."""
STAR = "M0,-1L.24,-.32L.95,-.31L.38,.12L.59,.81L0,.4L-.59,.81L-.38,.12L-.95,-.31L-.24,-.32Z"
"""A shape that Vega lacks."""
HOVER = "hover"
"""The parameter of a curve's last layer: dots that show under the pointer."""
HIGHLIGHTED = "highlight == '' || datum.arm == highlight"
CONFIG: Record = {
    "font": FONT,
    "view": {"stroke": None},
    "title": {
        **{"anchor": "start", "fontSize": 14, "fontWeight": 600, "offset": 12},
        **{"subtitleColor": "#666666", "subtitleFontSize": 11},
    },
    "axis": {
        **{"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": 400, "tickCount": 5},
        **{"labelColor": "#555555", "titleColor": "#555555", "gridColor": "#dddddd"},
        **{"domainColor": "#bbbbbb", "tickColor": "#bbbbbb", "labelLimit": 260, "tickSize": 4},
    },
    "axisX": {"grid": False},
    "legend": {
        **{"labelFontSize": 11, "titleFontSize": 11},
        "layout": {"bottom": {"direction": "vertical", "anchor": "start"}},  # one below the other
    },
}


class Figure(NamedTuple):
    """A chart with a name for its files."""

    key: str
    title: str
    caption: str
    spec: Record


def colour(place: int) -> str:
    """Return an arm's colour."""
    return PALETTE[place % len(PALETTE)]


def dash(place: int) -> list[int]:
    """Return an arm's pattern of strokes."""
    return DASHES[place // len(PALETTE) % len(DASHES)]


def as_sentence(words: str) -> str:
    """Begin with a capital, and leave the rest as it is."""
    return words[:1].upper() + words[1:]


def slug(words: str) -> str:
    """Make the name of a file out of words, in any language."""
    return re.sub(r"[\W_]+", "-", words.lower()).strip("-") or "unnamed"


def round_digits(value: float) -> float:
    """Keep six digits: more are not seen, and the page carries every one."""
    return float(f"{value:.6g}")


def begin_chart(points: Sequence[Record]) -> "alt.Chart":
    """Begin a chart of points, which go into its specification."""
    import altair as alt

    data: Any = alt.Data  # has no types of its own
    return alt.Chart(data(values=list(points)))


def make_tooltip(names: Mapping[str, str]) -> list[Any]:
    """Name the fields that show under the pointer, with their titles."""
    import altair as alt

    return [alt.Tooltip(name, title=words) for name, words in names.items()]


def encode_arm(places: Mapping[str, int]) -> "alt.Color":
    """Encode the arm as colour, the same in every chart."""
    import altair as alt

    scale = alt.Scale(domain=list(places), range=[colour(place) for place in places.values()])
    return alt.Color("arm:N", scale=scale, legend=_list_arms(places))


def _list_arms(names: Iterable[str]) -> "alt.Legend":
    """Make the legend of arms; two channels with the same one share it."""
    import altair as alt

    columns = 1 if max(map(len, names)) > LONG_ARM else 3
    limit = 720 // columns  # pixels
    return alt.Legend(
        title=None, orient="bottom", columns=columns, labelLimit=limit, symbolOpacity=1
    )


def encode_shape(places: Mapping[str, int]) -> "alt.Shape | str":
    """Encode the arm as the shape of its dot where colours repeat; else every dot is a circle."""
    import altair as alt

    turns = [place // len(PALETTE) for place in places.values()]
    if not any(turns):
        return SHAPES[0]
    scale = alt.Scale(domain=list(places), range=[SHAPES[turn % len(SHAPES)] for turn in turns])
    return alt.Shape("arm:N", scale=scale, legend=_list_arms(places))


def highlight_arm(shown: float = 1.0) -> Any:
    """Let the arm that is chosen in the legend stand out."""
    import altair as alt

    return alt.condition(HIGHLIGHTED, alt.value(shown), alt.value(0.07))


def specify(chart: Any, title: str, subtitle: str) -> Record:
    """Make the specification of a chart as it is written to a file; see :func:`fit_to_page`."""
    import altair as alt

    chart = chart.add_params(alt.param(name="highlight", value=""))
    spec: Record = chart.properties(background="white").to_dict()
    spec.pop("$schema", None)  # Altair's version; the bundle may have another
    return spec | {"title": make_title(title, subtitle), "config": CONFIG}


def make_title(title: str, subtitle: str) -> Record:
    """Return the title of a chart in a file, in lines that fit."""
    return {"text": textwrap.wrap(title, 66), "subtitle": textwrap.wrap(subtitle, 88)}


def fit_to_page(spec: Record, *, legend: bool = True) -> Record:
    """Fit a specification to its container; the title is the page's.

    Args:
        legend: keep the legend of the chart; else the page has one for several charts.
    """
    shown = {key: value for key, value in spec.items() if key != "title"}
    if not legend:
        shown["layer"] = [
            layer | {"encoding": {n: _without_legend(e) for n, e in layer["encoding"].items()}}
            for layer in shown["layer"]
        ]
    return shown | {"width": "container", "background": None}


def _without_legend(encoding: Any) -> Any:
    has_legend = isinstance(encoding, dict) and "legend" in encoding
    return encoding | {"legend": None} if has_legend else encoding


def fit_to_file(spec: Record) -> Record:
    """Leave out what only answers to a pointer: invisible marks, which are most of a file."""
    params = [param for param in spec["params"] if param["name"] != HOVER]
    if len(params) == len(spec["params"]):
        return spec
    return spec | {"params": params, "layer": spec["layer"][:-1]}


def stack(
    figures: Sequence[Figure],
    title: str,
    notes: Sequence[str],
    columns: int,
    *,
    aligned: bool = False,
) -> Record:
    """Put charts together into one specification, in rows of ``columns``.

    ``aligned`` charts of one size begin at the same place in their column.
    """
    parts = []
    for figure in figures:
        part = fit_to_file(figure.spec)
        kept = {key: part[key] for key in part if key not in ("params", "config", "background")}
        parts.append(kept | {"title": {"text": figure.title.split("\n"), "fontSize": 12}})
    rows = [parts[start : start + columns] for start in range(0, len(parts), columns)]
    own = {"scale": {"color": "independent", "shape": "independent"}}
    width = 66 * min(columns, len(parts))
    lines = [line for words in notes for line in textwrap.wrap(words, round(width * 1.3))]
    grid: Record = {"vconcat": [{"hconcat": row, "spacing": 24, "resolve": own} for row in rows]}
    return {
        "title": {"text": textwrap.wrap(title, width), "subtitle": lines, "offset": 16},
        **({"concat": parts, "columns": columns} if aligned else grid),
        "resolve": own,
        **{"spacing": 24, "background": "white", "config": CONFIG},
        "params": [{"name": "highlight", "value": ""}],
    }


def name_figures(folder: Path, name: str) -> list[Path]:
    """Name the files of a figure, one of each kind."""
    return [folder / f"{name}.{kind}" for kind in FIGURE_KINDS]


def save_chart(paths: Sequence[Path], spec: Record) -> None:
    """Write a chart once for each path, as SVG, PNG or PDF by the ending."""
    import vl_convert
    from PIL import Image

    svg = vl_convert.vegalite_to_svg(fit_to_file(spec))
    for path in paths:
        with replace_file(path) as file:
            if path.suffix == ".png":
                png = vl_convert.svg_to_png(svg, scale=PNG_SCALE)
                Image.open(io.BytesIO(png)).convert("RGB").save(file, "PNG", optimize=True)
            else:
                file.write(vl_convert.svg_to_pdf(svg) if path.suffix == ".pdf" else svg.encode())


def draw_evaluations(groups: Sequence[RunGroup], data: str, key: str, title: str) -> Figure:
    """Draw the evaluations of arms on one dataset: means, deviations, runs, published values."""
    columns = [measure for measure in list_measures(groups) if measure.data == data]
    names = dict(zip(columns, name_measures(columns), strict=True))
    means, runs = [], []
    for measure in columns:
        for group in groups:
            summary = summarise_measure(group, measure).summary
            if summary is None:
                continue
            means.append(make_mean_point(names[measure], group.name, summary))
            runs += [
                {"measure": names[measure], "arm": group.name, "run": run.name}
                | {"value": round_digits(row["value"])}
                for run, row in find_rows(group, measure)
                if len(group.runs) > 1
            ]
    published = [
        {"measure": names[measure], "value": value, "method": row.method, "where": row.where}
        for row in list_published_rows(groups, columns)
        for measure, value in zip(columns, row.values, strict=True)
        if value is not None
    ]
    references = [
        {"measure": names[measure], "reference": name, "value": round_digits(value)}
        for measure in columns
        for name, value in average_references(groups, measure).items()
    ]
    caption = "mean, deviation over seeds (bar) and every run (small)"
    caption += "; dotted: most frequent class; dashed: raw pixels" * bool(references)
    caption += "; diamonds: published, other settings" * bool(published)
    places = {group.name: group.place for group in groups}
    chart = draw_measures(means, runs, published, places, references)
    return Figure(key, title, caption, specify(chart, title, caption))


def make_mean_point(measure: str, arm: str, summary: Summary) -> Record:
    """Return the point of a mean with the ends of its deviation."""
    mean, deviation = summary["mean"], summary["deviation"] or 0.0
    ends = mean - deviation, mean + deviation
    return _make_point(measure, arm, summary, ends, format_summary(summary))


def make_difference_point(measure: str, arm: str, difference: Summary) -> Record:
    """Return the point of a paired difference with the ends of its interval."""
    summary = choose_interval(difference)
    ends = summary["interval"] or [summary["mean"]] * 2
    return _make_point(measure, arm, summary, ends, format_difference(summary))


def _make_point(
    measure: str, arm: str, summary: Summary, ends: Sequence[float], shown: str
) -> Record:
    return {
        "measure": measure,
        "arm": arm,
        "value": round_digits(summary["mean"]),
        "n": summary["n"],
        "low": round_digits(ends[0]),
        "high": round_digits(ends[1]),
        "shown": shown,
    }


def draw_dots(
    points: Sequence[Record],
    row: str,
    colour: Any,
    words: Mapping[str, str],
    *,
    unit: str = "%",
    shape: "alt.Shape | str" = SHAPES[0],
    arms: Sequence[str] = (),
    levels: Sequence[Record] = (),
    runs: Sequence[Record] = (),
    published: Sequence[Record] = (),
    references: Sequence[Record] = (),
    lines: Mapping[str, str] | None = None,
    ends: tuple[float, float] | None = None,
) -> Any:
    """Draw every point as a dot with a bar from ``low`` to ``high``, in the line of its ``row``.

    Args:
        words: fields that show under the pointer, with their titles.
        lines: the rows in their order, and what is written beside each; one without a point is a
            heading. By default the rows of the points, by their names.
        arms: where they are given, the dots of one line lie below each other, by arm.
        levels: values to mark across all lines.
        references: values to mark across one line each.
        ends: of the axis, where some bars are far longer than the rest; these are cut there.
    """
    import altair as alt

    names = list(dict.fromkeys(point[row] for point in points))
    order = list(lines or names)
    style: dict[str, Any] = {}
    if lines:
        heading = f"indexof({json.dumps(names)}, datum.value) < 0"
        style = {
            "labelExpr": f"({json.dumps(lines)})[datum.value]",
            "labelFontWeight": {"condition": {"test": heading, "value": "bold"}, "value": "normal"},
        }
    axis = alt.Axis(grid=True, tickBand="extent", **style)
    scale = alt.Scale(domain=order)
    y = alt.Y(f"{row}:N", sort=order, title=None, scale=scale, axis=axis)
    reach: Any = {"domain": ends, "nice": False} if ends else {"zero": False}
    x = alt.X("value:Q", title=unit, scale=alt.Scale(**reach), axis=alt.Axis(grid=True))
    shared: dict[str, Any] = {"y": y, "color": colour}
    if arms:
        shared["yOffset"] = alt.YOffset("arm:N", sort=arms, scale=alt.Scale(domain=arms))
    layers: list[Any] = []
    if levels:
        rule = begin_chart(levels).mark_rule(strokeDash=[4, 3], opacity=0.7, color=GREY)
        layers.append(rule.encode(x=x))
    if references:
        layers.append(_draw_references(references, row, order).encode(x=x))
    base = begin_chart(points).encode(**shared)
    layers += [
        base.mark_rule(strokeWidth=2, clip=True).encode(
            x=alt.X("low:Q"), x2="high:Q", opacity=highlight_arm(0.55)
        ),
        base.mark_point(filled=True, size=70).encode(
            x=x,
            shape=alt.ShapeValue(shape) if isinstance(shape, str) else shape,
            opacity=highlight_arm(),
            tooltip=make_tooltip(words),
        ),
    ]
    if runs:
        tooltip = make_tooltip({"run:N": "run", "measure:N": "measure", "value:Q": "value"})
        small = begin_chart(runs).encode(**shared).mark_tick(thickness=1.5, size=9)
        layers.append(small.encode(x=x, opacity=highlight_arm(0.6), tooltip=tooltip))
    if published:
        layers.append(draw_published(published).encode(x=x, y=y))
    height = len(order) * (max(34, 13 * len(arms)) if arms else 24)
    return alt.layer(*layers).properties(width=WIDTH, height=height)


def _draw_references(references: Sequence[Record], row: str, order: Sequence[str]) -> Any:
    """Draw each reference as a line across its row; each kind has its own pattern."""
    import altair as alt

    scale = alt.Scale(domain=list(REFERENCES.values()), range=[[1, 3], [6, 3]])
    rule = begin_chart(references).mark_rule(strokeWidth=1.5, color=GREY)
    words = make_tooltip({"reference:N": "for comparison", "value:Q": "value"})
    return rule.encode(
        y=alt.Y(f"{row}:N", sort=list(order), title=None, bandPosition=0.08),
        y2=alt.Y2(f"{row}:N", bandPosition=0.92),
        strokeDash=alt.StrokeDash("reference:N", scale=scale, legend=None),
        tooltip=words,
    )


def draw_measures(
    means: list[Record],
    runs: list[Record],
    published: list[Record],
    places: Mapping[str, int],
    references: Sequence[Record] = (),
) -> Any:
    """Draw a line for each measure, with a dot for the mean of each arm and its runs."""
    return draw_dots(
        means,
        "measure",
        encode_arm(places),
        {"arm:N": "arm", "measure:N": "measure", "shown:N": "mean ± deviation"},
        shape=encode_shape(places),
        arms=list(places),
        runs=runs,
        published=published,
        references=references,
    )


def draw_published(published: Sequence[Record]) -> "alt.Chart":
    """Mark published values, hollow and grey: they are no arm."""
    names = {"method:N": "published", "value:Q": "value", "where:N": "in"}
    mark = begin_chart(published).mark_point(
        shape="diamond", size=75, strokeWidth=1.6, filled=False
    )
    chart: alt.Chart = mark.encode(tooltip=make_tooltip(names))
    chart.mark.color = GREY
    return chart
