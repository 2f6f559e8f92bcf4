"""Records to Vega-Lite: one specification gives the interactive chart and its PNG and SVG.

Charts of the page have no colours for text and grid: its style sheet gives them, for light, dark
and paper alike. Altair is imported where it is used: half a second.
"""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deepbregman.runs import Record

from .arms import Arm, Subject, is_number

if TYPE_CHECKING:
    import altair as alt

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
"""Okabe and Ito's, told apart with every kind of colour vision; less what white or black hides."""
DASHES: tuple[list[int], ...] = ([1, 0], [6, 3], [2, 2])
"""Of arms that have a colour for the second and the third time."""
MAX_POINTS = 2500
"""Of a chart; longer curves are thinned, so that a page of long runs stays small."""
FEW_EPOCHS = 12
"""Up to so many, every value is marked; a line through one would not be seen at all."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
CURVES = {
    "total": ("Total loss", "contrastive and divergence loss, weighted"),
    "contrastive": ("Contrastive loss", "unweighted mean of the epoch"),
    "divergence": ("Divergence loss", "unweighted mean of the epoch"),
    "knn": ("kNN monitor", "accuracy on held-out training images, %"),
    "learning_rate": ("Learning rate", "at the end of the epoch"),
}
DIAGNOSTICS = {
    "active_subnetworks": ("Active subnetworks", "that win for some sample of the last batch"),
    "usage_entropy": ("Usage entropy", "of the winners, as a share of log K"),
    "divergences": ("D of positives and negatives", "mean; positives solid, negatives dashed"),
    "effective_rank": ("Effective rank", "of the representations of the last batch"),
    "alignment": ("Alignment", "squared distance of positives; less is closer"),
    "uniformity": ("Uniformity", "log of the mean potential; less is more even"),
    "spread": ("Spread", "about 1 even on the sphere, 0 collapsed"),
    "images_per_second": ("Throughput", "views per second of the training loop"),
}
PARTS = {"divergences": {"divergence_positives": "positives", "divergence_negatives": "negatives"}}
LOSSES = ("contrastive", "divergence")
HOVER = "hover"
"""The parameter of a curve's last layer: dots that show under the pointer."""
HIGHLIGHTED = "highlight == '' || datum.arm == highlight"


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


def slug(words: str) -> str:
    """Make the name of a file out of words."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "unnamed"


def rounded(value: float) -> float:
    """Keep six digits: more are not seen, and the page carries every one."""
    return float(f"{value:.6g}")


def curve_figures(
    arms: Sequence[Arm], names: dict[str, tuple[str, str]], prefix: str = ""
) -> list[Figure]:
    """Draw metrics by epoch, a chart each, for those that any run has.

    Args:
        arms: with a colour each; thin lines are runs, the thick one is their mean.
        names: metric -> title and caption.
        prefix: of the files' names.
    """
    figures = []
    for name, (title, caption) in names.items():
        parts = PARTS.get(name, {name: ""})
        points = [
            point | ({"kind": kind} if kind else {})
            for metric, kind in parts.items()
            for point in _points(arms, metric)
        ]
        if points:
            key = f"{prefix}{slug(name)}"
            there = [arm for arm in arms if any(point["arm"] == arm.name for point in points)]
            spec = _curve(points, there, title, caption, len(parts) > 1)
            figures.append(Figure(key, title, caption, spec))
    return figures


def _points(arms: Sequence[Arm], metric: str) -> list[Record]:
    """Return a metric of every run by epoch, and the mean of arms that have several runs."""
    series: list[tuple[str, str, dict[int, float]]] = []
    for arm in arms:
        curves = [_curve_of(run, metric) for run in arm.runs]
        series += [(arm.name, run.name, c) for run, c in zip(arm.runs, curves, strict=True) if c]
        if len(curves) > 1:
            common = [epoch for epoch in curves[0] if all(epoch in c for c in curves)]
            mean = {epoch: sum(c[epoch] for c in curves) / len(curves) for epoch in common}
            series.append((arm.name, "", mean))
    longest = max((len(curve) for _, _, curve in series), default=0)
    step = max(1, math.ceil(longest * len(series) / MAX_POINTS))
    points = []
    for arm_name, run_name, curve in series:
        epochs = list(curve)
        for index, epoch in enumerate(epochs):
            if (len(epochs) - 1 - index) % step == 0:
                point: Record = {"arm": arm_name, "epoch": epoch, "value": rounded(curve[epoch])}
                points.append(point | ({"run": run_name} if run_name else {"run": "mean of runs"}))
    alone = {arm.name for arm in arms if len(arm.runs) == 1}
    for point in points:
        if point["run"] != "mean of runs" and point["arm"] not in alone:
            point["faint"] = 1
    return points


def _curve_of(run: Subject, metric: str) -> dict[int, float]:
    if metric in LOSSES and not any(row.get(metric) for row in run.metrics):
        return {}  # its weight is 0
    return {row["epoch"]: row[metric] for row in run.metrics if is_number(row.get(metric))}


def arm_colour(arms: Sequence[Arm]) -> "alt.Color":
    """Encode the arm as colour, the same in every chart."""
    import altair as alt

    scale = alt.Scale(domain=[arm.name for arm in arms], range=[colour(arm.place) for arm in arms])
    legend = alt.Legend(title=None, orient="bottom", columns=3, labelLimit=240, symbolOpacity=1)
    return alt.Color("arm:N", scale=scale, legend=legend)


def arm_dash(arms: Sequence[Arm]) -> "alt.StrokeDash":
    """Encode the arm as a pattern of strokes, where there are more arms than colours."""
    import altair as alt

    scale = alt.Scale(domain=[arm.name for arm in arms], range=[dash(arm.place) for arm in arms])
    return alt.StrokeDash("arm:N", scale=scale, legend=None)


def opacity(shown: float = 1.0, hidden: float = 0.07) -> "alt.Opacity | Any":
    """Let the arm that is chosen in the legend stand out."""
    import altair as alt

    return alt.condition(HIGHLIGHTED, alt.value(shown), alt.value(hidden))


def chart_of(points: list[Record]) -> "alt.Chart":
    """Begin a chart of points, which go into its specification."""
    import altair as alt

    data: Any = alt.Data  # has no types of its own
    return alt.Chart(data(values=points))


def finished(
    chart: "alt.LayerChart | alt.FacetChart | alt.Chart", title: str, subtitle: str
) -> Record:
    """Make a specification of a chart, as it is exported; see :func:`on_page`."""
    import altair as alt

    chart = chart.add_params(alt.param(name="highlight", value=""))
    spec: Record = chart.properties(
        title=alt.TitleParams(title, subtitle=subtitle), background="white"
    ).to_dict()
    spec.pop("$schema", None)  # of Altair; the bundle's Vega-Lite may be another
    spec["config"] = CONFIG
    return spec


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


def on_page(spec: Record, *, legend: bool = True) -> Record:
    """Fit a specification to its container; the title is the page's.

    Args:
        spec: of a :class:`Figure`.
        legend: with the chart's own; without, the page has one for all charts of some arms.
    """
    shown = {key: value for key, value in spec.items() if key != "title"}
    if not legend:
        shown["layer"] = [
            layer | {"encoding": {n: _bare(e) for n, e in layer["encoding"].items()}}
            for layer in shown["layer"]
        ]
    return shown | {"width": "container", "background": None}


def _bare(encoding: Any) -> Any:
    has_legend = isinstance(encoding, dict) and "legend" in encoding
    return encoding | {"legend": None} if has_legend else encoding


def on_paper(spec: Record) -> Record:
    """Leave out what only answers to a pointer: invisible marks, which are most of a file."""
    params = [param for param in spec["params"] if param["name"] != HOVER]
    if len(params) == len(spec["params"]):
        return spec
    return spec | {"params": params, "layer": spec["layer"][:-1]}


def _curve(
    points: list[Record], arms: Sequence[Arm], title: str, subtitle: str, has_kinds: bool
) -> Record:
    import altair as alt

    value = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False, nice=True))
    epochs = sorted({point["epoch"] for point in points})
    is_short = len(epochs) <= FEW_EPOCHS
    ticks: Any = {"values": epochs, "format": "d"} if is_short else {"tickMinStep": 1}
    epoch = alt.X("epoch:Q", title="epoch", axis=alt.Axis(**ticks))
    base = chart_of(points).encode(x=epoch, y=value, color=arm_colour(arms))
    if has_kinds:
        kinds = alt.Scale(domain=["positives", "negatives"], range=[[1, 0], [5, 3]])
        legend = alt.Legend(title=None, orient="bottom")
        base = base.encode(strokeDash=alt.StrokeDash("kind:N", scale=kinds, legend=legend))
    elif any(arm.place >= len(PALETTE) for arm in arms):
        base = base.encode(strokeDash=arm_dash(arms))
    shown: Any = (
        alt.when(f"!({HIGHLIGHTED})")
        .then(alt.value(0.05))
        .when("datum.faint")
        .then(alt.value(0.5))
        .otherwise(alt.value(1.0))
    )
    width = alt.condition("datum.faint", alt.value(1.0), alt.value(2.2))
    layers = [base.mark_line().encode(detail=["run:N"], strokeWidth=width, opacity=shown)]
    if is_short:
        size = alt.condition("datum.faint", alt.value(12), alt.value(30))
        marks = base.mark_point(filled=True).encode(size=size, opacity=shown)
        layers.append(marks.encode(strokeDash=alt.value([1, 0])))
    hover = alt.selection_point(
        name=HOVER,
        fields=["run", "arm", "epoch"],
        nearest=True,
        on="pointerover",
        clear="pointerout",
        empty=False,
    )
    # Vega-Lite looks for the words of a tooltip in the wrong place where the nearest point is
    # chosen: there, a datum is the mark whose datum is the point.
    point = "(datum.datum || datum)"
    words = [f"'{name}': {point}.{name}" for name in ("arm", "run", "epoch")]
    words += [f"'of': {point}.kind"] if has_kinds else []
    words += [f"'{title}': format({point}.value, '.5~g')"]
    dots = (
        base.mark_point(filled=True, size=55, tooltip=alt.ExprRef(f"{{{', '.join(words)}}}"))
        .encode(
            opacity=alt.condition(hover, alt.value(1.0), alt.value(0.0)),
            strokeDash=alt.value([1, 0]),
        )
        .add_params(hover)
    )
    chart = alt.layer(*layers, dots).properties(width=460, height=210)
    return finished(chart, title, subtitle)
