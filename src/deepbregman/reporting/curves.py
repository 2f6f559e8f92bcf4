"""Learning curves: every metric that any run has by epoch, a chart for each."""

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from deepbregman.runs import Record

from .charts import (
    HIGHLIGHTED,
    HOVER,
    PALETTE,
    WIDTH,
    Figure,
    as_sentence,
    begin_chart,
    dash,
    encode_arm,
    make_title,
    round_digits,
    slug,
    specify,
)
from .records import RunGroup, collect_metrics

if TYPE_CHECKING:
    import pandas as pd

MAX_POINTS = 2500
"""Largest number of points of a chart; longer curves are thinned, so that the page stays small."""
FEW_EPOCHS = 12
"""Up to this number of epochs every value is marked: a line through one value is invisible."""
MEAN_OF_RUNS = "mean of runs"
TERMS = {
    "total": ("Total loss", "all terms, weighted"),
    "contrastive": ("Contrastive loss", "unweighted mean of the epoch"),
    "divergence": ("Divergence loss", "unweighted mean of the epoch"),
    "usage": ("Usage bonus", "entropy of the subnetworks' use, unweighted"),
}
"""Titles and captions of the loss terms that have plain names; others are titled by theirs."""
HELD_OUT = "accuracy on held-out training images, %"
SEEN = "accuracy on a tenth of the training images, which were trained on without labels, %"
MONITORS = {
    "knn": ("kNN monitor", HELD_OUT),
    "learning_rate": ("Learning rate", "at the end of the epoch"),
}
DIAGNOSTICS = {
    "active_subnetworks": ("Active subnetworks", "that win for some sample of the last batch"),
    "usage_entropy": ("Usage entropy", "of the winners, as a share of log K"),
    "divergences": ("D of positives and negatives", "mean; positives solid, negatives dashed"),
    "effective_rank": ("Effective rank", "of the representations of the last batch"),
    "rankme": ("RankMe", "rank of the sample's representations, by entropy"),
    "lidar": ("LiDAR", "directions that tell images apart more than views"),
    "alpha_req": ("alpha-ReQ", "decay of the eigenvalues; near 1 is between flat and steep"),
    "neighbour_stability": ("Neighbour stability", "share that stay from one measurement on"),
    "long_stability": ("Long stability", "share of neighbours that stay for three measurements"),
    "alignment": ("Alignment", "squared distance of positives; less is closer"),
    "uniformity": ("Uniformity", "log of the mean potential; less is more even"),
    "spread": ("Spread", "about 1 even on the sphere, 0 collapsed"),
    "sigma": ("Sigma", "of the Gaussian kernel, learned"),
    "views_per_second": ("Throughput", "views per second; an image has two or more"),
}
PARTS = {"divergences": {"divergence_positives": "positives", "divergence_negatives": "negatives"}}
NOT_DRAWN = (
    *("epoch", "step", "arm", "run", "images_per_second"),
    *(name for parts in PARTS.values() for name in parts),
)


def draw_curves(groups: Sequence[RunGroup], prefix: str = "") -> tuple[list[Figure], list[Figure]]:
    """Draw every metric that any run has by epoch: the loss terms and monitors, the diagnostics.

    Thin lines are runs, the thick one is the mean of an arm's runs.
    """
    frame = collect_metrics(groups)
    known = {*MONITORS, *DIAGNOSTICS, *NOT_DRAWN}
    found = [name for name in frame.columns if name not in known]
    usual = "unweighted mean of the epoch"
    terms = {n: TERMS.get(n, (as_sentence(n.replace("_", " ")), usual)) for n in found}
    for name in found:  # a term of weight 0 is recorded as 0, and is no curve
        never = frame.groupby(["arm", "run"])[name].transform(lambda values: not values.any())
        frame.loc[never, name] = float("nan")
    first = {name: terms.pop(name) for name in TERMS if name in terms}
    monitors = MONITORS | {"knn": (MONITORS["knn"][0], _describe_monitor(groups))}

    def draw(names: Mapping[str, tuple[str, str]]) -> list[Figure]:
        drawn = (_draw_curve(frame, groups, name, *words, prefix) for name, words in names.items())
        return [figure for figure in drawn if figure is not None]

    return draw(first | terms | monitors), draw(DIAGNOSTICS)


def _describe_monitor(groups: Sequence[RunGroup]) -> str:
    """Say which images the kNN monitor judges: held out, or seen without their labels."""
    seen = [group.name for group in groups if group.config.data.holdout == 0.0]
    if not seen:
        return HELD_OUT
    return SEEN if len(seen) == len(groups) else f"{HELD_OUT}; of {', '.join(seen)}: {SEEN}"


def _draw_curve(
    frame: "pd.DataFrame",
    groups: Sequence[RunGroup],
    name: str,
    title: str,
    caption: str,
    prefix: str,
) -> Figure | None:
    parts = PARTS.get(name, {name: ""})
    points = [
        point | ({"kind": kind} if kind else {})
        for metric, kind in parts.items()
        if metric in frame.columns
        for point in _list_curve_points(frame, groups, metric)
    ]
    if not points:
        return None
    arms = {point["arm"] for point in points}
    places = tuple((group.name, group.place) for group in groups if group.name in arms)
    epochs = tuple(sorted({point["epoch"] for point in points}))
    is_short = len(epochs) <= FEW_EPOCHS
    spec = _make_curve_template(places, epochs if is_short else (), has_kinds=len(parts) > 1)
    values = {point["value"] for point in points}
    if len(values) == 1:  # Vega rounds the one tick of such an axis to a whole number
        spec = copy.deepcopy(spec)
        for layer in spec["layer"]:
            layer["encoding"]["y"]["axis"] = {"values": list(values), "format": ".4~g"}
    spec = spec | {"data": {"values": points}, "title": make_title(title, caption)}
    return Figure(f"{prefix}{slug(name)}", title, caption, spec)


def _list_curve_points(
    frame: "pd.DataFrame", groups: Sequence[RunGroup], metric: str
) -> list[dict[str, Any]]:
    """Return a metric of every run by epoch, and the mean of arms that have several runs."""
    import pandas as pd

    num_runs = {group.name: len(group.runs) for group in groups}
    runs = frame[["arm", "run", "epoch", metric]].dropna()
    sizes = runs["arm"].map(num_runs)
    several = runs[sizes > 1]
    means = several.groupby(["arm", "epoch"], sort=False)[metric].agg(["mean", "count"])
    means = means.reset_index().rename(columns={"mean": metric}).assign(run=MEAN_OF_RUNS)
    is_of_all = means["count"] == means["arm"].map(num_runs)
    means = means[is_of_all].drop(columns="count")  # only epochs that all runs have
    curves = pd.concat([runs.assign(faint=sizes > 1), means.assign(faint=False)])
    series = curves.groupby(["arm", "run"], sort=False)
    step = max(1, math.ceil(series.size().max() * series.ngroups / MAX_POINTS)) if len(runs) else 1
    kept = curves[series.cumcount(ascending=False) % step == 0]  # the last epoch among them
    return [
        {"arm": row.arm, "run": row.run, "epoch": int(row.epoch), "value": round_digits(value)}
        | ({"faint": 1} if row.faint else {})
        for row, value in zip(kept.itertuples(), kept[metric], strict=True)
    ]


@cache
def _make_curve_template(
    arms: tuple[tuple[str, int], ...], epochs: tuple[int, ...], *, has_kinds: bool
) -> Record:
    """Return the specification of curves without their points; Altair takes long to make one.

    Args:
        epochs: to mark, where they are few.
        has_kinds: with solid and dashed lines, for positives and negatives.
    """
    import altair as alt

    places = dict(arms)
    value = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False, nice=True))
    ticks: Any = {"tickMinStep": 1}
    if epochs:
        ticks = {"values": epochs, "tickCount": len(epochs), "format": "d"}
    epoch = alt.X("epoch:Q", title="epoch", axis=alt.Axis(**ticks))
    base = begin_chart([]).encode(x=epoch, y=value, color=encode_arm(places))
    if has_kinds:
        kinds = alt.Scale(domain=["positives", "negatives"], range=[[1, 0], [5, 3]])
        legend = alt.Legend(title=None, orient="bottom")
        base = base.encode(strokeDash=alt.StrokeDash("kind:N", scale=kinds, legend=legend))
    elif any(place >= len(PALETTE) for place in places.values()):
        strokes = alt.Scale(domain=list(places), range=[dash(place) for place in places.values()])
        base = base.encode(strokeDash=alt.StrokeDash("arm:N", scale=strokes, legend=None))
    shown: Any = (
        alt.when(f"!({HIGHLIGHTED})")
        .then(alt.value(0.05))
        .when("datum.faint")
        .then(alt.value(0.5))
        .otherwise(alt.value(1.0))
    )
    width = alt.condition("datum.faint", alt.value(1.0), alt.value(2.2))
    layers = [base.mark_line().encode(detail=["run:N"], strokeWidth=width, opacity=shown)]
    if epochs:
        size = alt.condition("datum.faint", alt.value(12), alt.value(30))
        marks = base.mark_point(filled=True).encode(size=size, opacity=shown)
        if has_kinds:
            shapes = alt.Scale(domain=kinds.domain, range=["circle", "diamond"])
            marks = marks.encode(shape=alt.Shape("kind:N", scale=shapes, legend=legend))
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
    words += [f"'value': format({point}.value, '.5~g')"]
    dots = (
        base.mark_point(filled=True, size=55, tooltip=alt.ExprRef(f"{{{', '.join(words)}}}"))
        .encode(
            opacity=alt.condition(hover, alt.value(1.0), alt.value(0.0)),
            strokeDash=alt.value([1, 0]),
        )
        .add_params(hover)
    )
    return specify(alt.layer(*layers, dots).properties(width=WIDTH, height=210), "", "")
