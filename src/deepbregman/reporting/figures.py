"""Figures that a command draws once: the quickstart's, maps of features, planes, rings, speeds."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageColor

from deepbregman.runs import Record
from deepbregman.statistics import format_spread

from .charts import (
    GREY,
    PALETTE,
    STAR,
    Figure,
    begin_chart,
    round_digits,
    save_chart,
    specify,
    stack,
)
from .screen import find_bare_speed, name_group, read_speed

TEN_COLOURS = (*PALETTE[:6], "#000000", "#a6761d", "#7570b3", GREY)
"""Colours of up to ten classes; more classes repeat them."""
SHAPES = ("circle", "triangle-up", "square", "diamond", "triangle-down", "cross")
"""Shapes of classes in figures where colours mean something else."""
VIRIDIS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
ZERO = "#c9c9c9"
"""Colour of regions where a divergence is exactly zero."""
LEVELS = 16
"""Steps of colour of a map, whose edges are its contours."""


class FeatureMap(NamedTuple):
    """Features of a run, mapped to the plane."""

    title: str
    points: np.ndarray  # (N, 2)
    words: tuple[str, ...] = ()


class PlaneMap(NamedTuple):
    """A value for every point of a grid in the plane."""

    title: str
    values: np.ndarray  # (G, G), of the points (x[j], y[i])
    is_partition: bool = False
    """Whole numbers, regions rather than heights."""


def _make_figure(chart: Any, title: str) -> Figure:
    return Figure("", title, "", specify(chart, title, ""))


def _list_dots(points: np.ndarray, **fields: Iterable[object]) -> list[Record]:
    """Return the data of points (N, 2), with further fields as text."""
    rows: list[Record] = [{"x": round_digits(x), "y": round_digits(y)} for x, y in points]
    for name, values in fields.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = str(value)
    return rows


def _make_axis(
    channel: Any, field: str, values: np.ndarray, *, is_bare: bool = False, margin: float = 0.04
) -> Any:
    """Return an axis with all values and a margin; without numbers if ``is_bare``."""
    import altair as alt

    low, high = float(values.min()), float(values.max())
    margin *= high - low or 1.0
    scale = alt.Scale(domain=[low - margin, high + margin], nice=False, zero=False)
    axis = None if is_bare else alt.Axis(grid=False)
    return channel(f"{field}:Q", title=None, scale=scale, axis=axis)


def _encode_class(field: str, names: Sequence[str], legend: Any = None) -> Any:
    import altair as alt

    colours = [TEN_COLOURS[index % len(TEN_COLOURS)] for index in range(len(names))]
    scale = alt.Scale(domain=list(names), range=colours)
    return alt.Color(f"{field}:N", scale=scale, legend=legend)


def draw_feature_map(one: FeatureMap, labels: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draw a map of features, coloured by label, with a legend and each name amid its class."""
    import altair as alt

    points: list[Record] = []
    names: list[Record] = []
    for index, name in enumerate(classes):
        chosen = one.points[labels == index]
        points += _list_dots(chosen, **{"class": [name] * len(chosen)})
        if len(chosen):
            names += _list_dots(np.median(chosen, axis=0)[None], **{"class": [name]})
    x = _make_axis(alt.X, "x", one.points[:, 0], is_bare=True)
    y = _make_axis(alt.Y, "y", one.points[:, 1], is_bare=True)
    dots = begin_chart(points).mark_circle(size=12, opacity=0.8)
    legend = alt.Legend(
        title=None,
        orient="bottom",
        direction="horizontal",
        columns=max(1, 70 // (4 + max(map(len, classes)))),  # letters that fit below the map
        symbolSize=60,
        symbolOpacity=1,
        labelLimit=360,
    )
    words = begin_chart(names).encode(x=x, y=y, text="class:N")
    layers = [
        dots.encode(x=x, y=y, color=_encode_class("class", classes, legend)),
        words.mark_text(fontSize=13, fontWeight="bold", stroke="white", strokeWidth=4),
        words.mark_text(fontSize=13, fontWeight="bold", color="#1c2026"),
    ]
    return _make_figure(alt.layer(*layers).properties(width=400, height=400), one.title)


def save_map_figure(
    paths: Sequence[Path], maps: Sequence[FeatureMap], labels: np.ndarray, classes: Sequence[str]
) -> None:
    """Write maps side by side, of the same images."""
    figures = [draw_feature_map(one, labels, classes) for one in maps]
    notes = [f"{one.title}: {'; '.join(one.words)}" for one in maps if one.words]
    save_chart(paths, stack(figures, "Features, mapped to the plane", notes, columns=len(maps)))


def save_quickstart_figure(
    path: Path,
    metrics: Sequence[Record],
    maps: Sequence[FeatureMap],
    labels: np.ndarray,
    classes: Sequence[str],
) -> None:
    """Write the quickstart's figure: learning curves, and maps of features before and after."""
    import altair as alt

    x = alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False))

    def curve(name: str) -> list[Record]:
        return [
            {"epoch": row["epoch"], "value": round_digits(row[name]), "term": name}
            for row in metrics
            if row.get(name)
        ]

    losses = [*curve("contrastive"), *curve("divergence")]
    scale = alt.Scale(domain=["contrastive", "divergence"], range=list(PALETTE[:2]))
    legend = alt.Legend(title=None, orient="top-right")
    lines = begin_chart(losses).mark_line(strokeWidth=2)
    lines = lines.encode(x=x, y=y, color=alt.Color("term:N", scale=scale, legend=legend))
    line = begin_chart(curve("knn")).mark_line(
        strokeWidth=2, point={"color": PALETTE[2]}, color=PALETTE[2]
    )
    size = {"width": 400, "height": 220}
    figures = [
        _make_figure(alt.layer(lines).properties(**size), "Losses"),
        _make_figure(
            alt.layer(line.encode(x=x, y=y)).properties(**size),
            "kNN on held-out training images, %",
        ),
        *(draw_feature_map(one, labels, classes) for one in maps),
    ]
    save_chart([path], stack(figures, "Quickstart: digits", [], columns=2))


def save_plane_figure(
    paths: Sequence[Path],
    maps: Sequence[PlaneMap],
    *,
    x: np.ndarray,
    y: np.ndarray,
    points: np.ndarray,
    labels: np.ndarray,
    chosen: int,
) -> None:
    """Write maps of divergences to the sample x0, which is ``chosen``, the samples over them."""
    samples = _list_dots(points, **{"class": labels})
    figures = [_draw_plane(one, x, y, samples, chosen) for one in maps]
    title = "Divergence from every point of the plane to a sample x0"
    save_chart(paths, stack(figures, title, [], columns=3, aligned=True))


def _draw_plane(
    one: PlaneMap, x: np.ndarray, y: np.ndarray, samples: list[Record], chosen: int
) -> Figure:
    import altair as alt

    # An image: a rectangle for every point of the grid would be megabytes of SVG.
    top = float(np.quantile(one.values, 0.98)) or 1.0
    pixels = _colour_regions(one.values) if one.is_partition else _colour_heights(one.values, top)
    corners = {"x": float(x[0]), "x2": float(x[-1]), "y": float(y[0]), "y2": float(y[-1])}
    across = _make_axis(alt.X, "x", x, margin=0.0)
    up = _make_axis(alt.Y, "y", y, margin=0.0)
    image = begin_chart([{**corners, "url": _encode_png(pixels)}]).mark_image(aspect=False)
    layers: list[Any] = [image.encode(x=across, x2="x2:Q", y=up, y2="y2:Q", url="url:N")]
    if not one.is_partition:  # invisible points; they give the chart its legend
        ends = [{"x": float(x[0]), "y": float(y[0]), "value": value} for value in (0.0, top)]
        scale = alt.Scale(domain=[0.0, top], range=list(VIRIDIS))
        legend = alt.Legend(title=None, format=".2~g", gradientLength=200)
        colour = alt.Color("value:Q", scale=scale, legend=legend)
        layers.append(begin_chart(ends).mark_point(opacity=0).encode(x=across, y=up, color=colour))
    names = sorted({sample["class"] for sample in samples})
    shapes = alt.Scale(domain=names, range=[SHAPES[i % len(SHAPES)] for i in range(len(names))])
    marks = begin_chart(samples).mark_point(
        filled=True, size=18, fill="white", stroke="#1c2026", strokeWidth=0.5, opacity=0.9
    )
    shape = alt.Shape("class:N", scale=shapes, legend=None)
    layers.append(marks.encode(x=across, y=up, shape=shape))
    target = begin_chart([samples[chosen]]).encode(x=across, y=up)
    layers.append(target.mark_point(size=160, filled=True, color="red", opacity=1, shape=STAR))
    words: dict[str, Any] = {"text": "x0", "dx": 14, "dy": -12, "fontWeight": "bold"}
    layers.append(target.mark_text(**words, stroke="white", strokeWidth=3))
    layers.append(target.mark_text(**words, color="red"))
    return _make_figure(alt.layer(*layers).properties(width=260, height=260), one.title)


def _colour_heights(values: np.ndarray, top: float) -> np.ndarray:
    """Colour heights (G, G) in steps; a region of zeros is grey."""
    steps = np.floor(np.clip(values / top, 0.0, 1.0) * LEVELS).clip(max=LEVELS - 1) / (LEVELS - 1)
    stops = np.linspace(0.0, 1.0, len(VIRIDIS))
    channels = zip(*map(ImageColor.getrgb, VIRIDIS), strict=True)
    pixels = np.stack([np.interp(steps, stops, channel) for channel in channels], axis=-1)
    zero = values <= 1e-6 * top
    if zero.mean() > 0.002:  # a region, not the point x0 alone
        pixels[zero] = ImageColor.getrgb(ZERO)
    return pixels.astype(np.uint8)


def _colour_regions(values: np.ndarray) -> np.ndarray:
    """Colour whole numbers (G, G), each lightly."""
    _, regions = np.unique(values, return_inverse=True)
    colours = np.array([ImageColor.getrgb(colour) for colour in TEN_COLOURS])
    light = 255 - (255 - colours) * 0.45
    return light[regions.reshape(values.shape) % len(light)].astype(np.uint8)


def _encode_png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    large = np.repeat(np.repeat(pixels[::-1], 4, axis=0), 4, axis=1)  # a row is a line upwards
    Image.fromarray(large).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def save_ring_figure(
    paths: Sequence[Path],
    *,
    points: np.ndarray,
    labels: np.ndarray,
    clusters: Mapping[str, np.ndarray],
    rows: Sequence[Record],
) -> None:
    """Write the figure of the rings: the distributions, two clusterings, and every arm's ARI.

    Args:
        points: (N, S, 2), the held-out distributions of the first seed.
        clusters: arm -> (N,) clusters found, for the arms to show.
        rows: arms with mean, deviation and n of the ARI, and whether each is a baseline; grey.
    """
    import altair as alt

    means = points.mean(axis=1)
    rings = [int(index) for index in np.unique(labels)]
    every = np.concatenate([means, *(points[labels == ring][0] for ring in rings)])
    x = _make_axis(alt.X, "x", every[:, 0])
    y = _make_axis(alt.Y, "y", every[:, 1])
    names = [str(ring) for ring in rings]
    shapes = alt.Scale(domain=names, range=list(SHAPES[: len(rings)]))
    size = {"width": 230, "height": 230}

    colour = _encode_class("cluster", names)
    layers = []
    for ring in rings:  # every point of one distribution of each ring
        one = points[labels == ring][0]
        marks = begin_chart(_list_dots(one, cluster=[ring] * len(one)))
        layers.append(marks.mark_point(size=14, strokeWidth=0.7, filled=False))
    layers.append(begin_chart(_list_dots(means, cluster=labels)).mark_circle(size=14, opacity=1))
    first = alt.layer(*(layer.encode(x=x, y=y, color=colour) for layer in layers))
    title = "Means by ring; hollow: one distribution of each"
    figures = [_make_figure(first.properties(**size), title)]
    for arm, found in clusters.items():
        marks = begin_chart(_list_dots(means, cluster=found, ring=labels))
        marks = marks.mark_point(filled=True, size=24, opacity=0.9).encode(
            x=x,
            y=y,
            color=_encode_class("cluster", [str(index) for index in np.unique(found)]),
            shape=alt.Shape("ring:N", scale=shapes, legend=None),
        )
        figures.append(_make_figure(alt.layer(marks).properties(**size), f"Clusters by {arm}"))
    bars = [
        {
            "name": row["arm"],
            "value": round_digits(row["mean"]),
            "baseline": row["is_baseline"],
            "low": round_digits(row["mean"] - (row["deviation"] or 0.0)),
            "high": round_digits(row["mean"] + (row["deviation"] or 0.0)),
            "words": format_spread(row["mean"], row["deviation"], 3),
        }
        for row in rows
    ]
    chart = _draw_bars(bars, "adjusted Rand index", [min(0.0, *(b["low"] for b in bars)), 1.2])
    figures.append(_make_figure(chart.properties(width=560), "Agreement with the rings"))
    bars_show = "mean and deviation" if rows[0]["n"] > 1 else "value"
    notes = [f"colour: cluster, shape: ring; bars: {bars_show}, runs: {rows[0]['n']}"]
    save_chart(paths, stack(figures, "Rings of distributions", notes, columns=3))


def _draw_bars(bars: Sequence[Record], unit: str, ends: Sequence[float]) -> Any:
    """Draw a bar for each name, its words behind it, and its deviation where it has ends."""
    import altair as alt

    scale = alt.Scale(domain=list(ends), nice=False)
    # Without its own count the configuration's would leave out every second value.
    ticks = alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1], tickCount=6, grid=True)

    def x(field: str) -> Any:
        return alt.X(f"{field}:Q", title=unit, scale=scale, axis=ticks)

    fill = alt.condition("datum.baseline", alt.value(GREY), alt.value(PALETTE[0]))
    base = begin_chart(bars).encode(y=alt.Y("name:N", title=None, sort=[b["name"] for b in bars]))
    layers: list[Any] = [base.mark_bar(height=13).encode(x=x("value"), color=fill)]
    has_ends = "low" in bars[0]
    if has_ends:
        rule = base.mark_rule(strokeWidth=1.5, color="#1c2026")
        layers.append(rule.encode(x=x("low"), x2="high:Q"))
    words = base.mark_text(align="left", dx=6, fontSize=11, color="#333333").encode(text="words:N")
    layers.append(words.encode(x=x("high" if has_ends else "value")))
    return alt.layer(*layers).properties(height=22 * len(bars))


def save_speed_figure(path: Path, record: Record) -> None:
    """Write bars of every arm of a benchmark over the bare encoder, a panel for each group."""
    figures = []
    for group in record["groups"]:
        floor = find_bare_speed(group)
        bars = []
        for arm in group["arms"]:
            if "views" in arm["name"]:
                continue
            speed = read_speed(arm)
            words = f"{speed / floor:.2f}  ({speed:,.0f} / s)"
            bars.append(
                {"name": arm["name"], "value": round_digits(speed / floor), "words": words}
                | {"baseline": arm["name"] == "bare encoder"}
            )
        chart = _draw_bars(bars, "share of the bare encoder's views per second", [0.0, 1.35])
        figures.append(_make_figure(chart.properties(width=560), name_group(group)))
    save_chart(
        [path], stack(figures, f"Speed of a training step, {record['device']}", [], columns=1)
    )
