"""The results of grids and searches to charts, with error bars and published values apart."""

from collections.abc import Sequence
from typing import Any

from deepbregman.reporting.printed import of_metric
from deepbregman.reporting.summaries import seeds_of
from deepbregman.reporting.trials import as_choice, dimension
from deepbregman.runs import Record

from .charts import PALETTE, Figure, chart_of, finished, rounded, slug
from .dots import GREY

LONG_NAME = 26
"""Letters of a series of which two do not fit side by side in half of a page."""
LOG_RATIO = 20.0
"""An axis whose ends lie further apart than this is logarithmic."""


def study_figure(results: Record, printed: Sequence[Record], key: str) -> Figure | None:
    """Draw the arms of a grid; None when none has been judged.

    Args:
        results: what ``results.json`` holds.
        printed: published series on the same data, of which those of the same quantity are drawn.
        key: of the study.
    """
    metric, kind = results["metric"], results["study"]["figure"]
    printed = of_metric(printed, metric)
    measured = [arm for arm in results["arms"] if metric in arm["metrics"]]
    if kind == "drops":
        measured = [arm for arm in measured if metric in arm.get("difference", {})]
    part = "difference" if kind == "drops" else "metrics"
    points = [_point(arm, arm[part][metric]) for arm in measured]
    if not points:
        return None
    unit = "change of linear accuracy, points" if kind == "drops" else f"{metric}, %"
    seeds = seeds_of(point["n"] for point in points)
    caption = f"mean and deviation over seeds, {seeds}" + "; grey: published" * bool(printed)
    words = (results["study"]["title"], f"{unit}; {caption}", results["study"]["x_label"])
    draw = {"line": _line, "bars": _bars, "drops": _drops}[kind]
    spec = draw(points, printed_points(printed), results["study"].get("reference"), words)
    return Figure(f"{key}-arms", unit[0].upper() + unit[1:], caption, spec)


def _point(arm: Record, summary: Record) -> Record:
    mean, deviation = summary["mean"], summary["deviation"] or 0.0
    spread = "" if summary["deviation"] is None else f" ± {deviation:.2f}"
    return {
        **{"name": arm["arm"], "arm": arm["series"], "x": arm["x"], "n": summary["n"]},
        **{"value": rounded(mean), "low": rounded(mean - deviation)},
        **{"high": rounded(mean + deviation), "shown": f"{mean:.2f}{spread} (n={summary['n']})"},
    }


def printed_points(printed: Sequence[Record]) -> list[Record]:
    """Return published series as points."""
    return [
        {"x": x, "value": value, "method": f"published: {part['series']}", "where": part["source"]}
        for part in printed
        for x, value in part["values"].items()
    ]


def _series(points: Sequence[Record]) -> Any:
    """Encode the series as colour: SimCLR and ours alike in every study."""
    import altair as alt

    known = {"SimCLR": PALETTE[1], "with divergence": PALETTE[0]}
    rest = iter([*PALETTE[2:], *PALETTE[2:], *PALETTE[2:]])
    names = list(dict.fromkeys(point["arm"] for point in points))
    scale = alt.Scale(domain=names, range=[known.get(name) or next(rest) for name in names])
    columns = 1 if max(map(len, names)) > LONG_NAME else 0  # 0 is one line
    legend = alt.Legend(
        title=None, orient="bottom", labelLimit=300, symbolOpacity=1, columns=columns
    )
    return alt.Color("arm:N", scale=scale, legend=legend)


_TOOLTIP = {"name:N": "arm", "arm:N": "series", "shown:N": "mean ± deviation"}
_PRINTED = {"method:N": "series", "value:Q": "value", "where:N": "in"}


def _tooltip(names: dict[str, str]) -> list[Any]:
    import altair as alt

    return [alt.Tooltip(name, title=words) for name, words in names.items()]


def _line(
    points: list[Record], printed: list[Record], reference: str | None, words: Sequence[str]
) -> Record:
    """Draw series over an axis of numbers or words; the reference is a level line."""
    import altair as alt

    level = [point for point in points if point["name"] == reference]
    others = [point for point in points if point["name"] != reference] or points
    numeric = all(isinstance(point["x"], int | float) for point in others)
    if numeric:
        ends = [float(point["x"]) for point in others]
        is_log = min(ends) > 0 and max(ends) / min(ends) > LOG_RATIO
        kind: Any = {"type": "log"} if is_log else {"zero": False}
        scale = alt.Scale(nice=False, padding=14, **kind)
        axis = alt.Axis(values=sorted(set(ends)), grid=False, format="~g")
        x: Any = alt.X("x:Q", title=words[2], scale=scale, axis=axis)
        printed = [{**point, "x": float(point["x"])} for point in printed]
    else:
        order = list(dict.fromkeys(str(point["x"]) for point in others))
        axis = alt.Axis(labelAngle=0)
        x = alt.X("x:N", title=words[2], sort=order, scale=alt.Scale(domain=order), axis=axis)
        printed = [point for point in printed if point["x"] in order]
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False))
    base = chart_of(others).encode(x=x, color=_series(points))
    layers: list[Any] = []
    if level:
        flat = chart_of(level).encode(color=_series(points))
        band = flat.mark_rect(opacity=0.15).encode(y=alt.Y("low:Q", title=None), y2="high:Q")
        rule = flat.mark_rule(strokeWidth=1.6).encode(y=y, tooltip=_tooltip(_TOOLTIP))
        layers += [band, rule]
    if printed:
        grey = chart_of(printed).encode(x=x, y=y, detail="method:N")
        shapes = alt.Scale(range=["diamond", "square", "triangle-up"])
        legend = alt.Legend(title=None, orient="bottom", labelLimit=300, columns=1)
        layers.append(grey.mark_line(strokeDash=[2, 3], strokeWidth=1.2, color=GREY))
        layers.append(
            grey.mark_point(size=45, strokeWidth=1.4, color=GREY, filled=False).encode(
                shape=alt.Shape("method:N", scale=shapes, legend=legend),
                tooltip=_tooltip(_PRINTED),
            )
        )
    layers += [
        base.mark_line(strokeWidth=2).encode(y=y),
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=None), y2="high:Q"),
        base.mark_point(filled=True, size=70, opacity=1).encode(y=y, tooltip=_tooltip(_TOOLTIP)),
    ]
    return finished(alt.layer(*layers).properties(width=460, height=260), *words[:2])


def _bars(
    points: list[Record], printed: list[Record], reference: str | None, words: Sequence[str]
) -> Record:
    """Draw a dot with its deviation for each arm; the reference's mean goes through all."""
    import altair as alt

    groups = dict.fromkeys(point["arm"] for point in points if point["name"] != reference)
    for point in points:
        prefix = f"{point['arm']}: " if len(groups) > 1 and point["name"] != reference else ""
        point["label"] = f"{prefix}{point['x']}"
    known = {str(point["x"]): point["label"] for point in points}
    printed = [{**p, "label": known[p["x"]]} for p in printed if p["x"] in known]
    y = alt.Y("label:N", title=None, sort=[p["label"] for p in points], axis=alt.Axis(grid=True))
    x = alt.X("value:Q", title="%", scale=alt.Scale(zero=False), axis=alt.Axis(grid=True))
    base = chart_of(points).encode(y=y, color=_series(points))
    layers: list[Any] = []
    level = [
        {"value": point["value"], "arm": point["arm"]}
        for point in points
        if point["name"] == reference
    ]
    if level:
        flat = chart_of(level).encode(x=x, color=_series(points))
        layers.append(flat.mark_rule(strokeDash=[4, 3], opacity=0.6))
    layers += [
        base.mark_rule(strokeWidth=2, opacity=0.55).encode(
            x=alt.X("low:Q", title="%"), x2="high:Q"
        ),
        base.mark_point(filled=True, size=75, opacity=1).encode(x=x, tooltip=_tooltip(_TOOLTIP)),
    ]
    if printed:
        grey = chart_of(printed).encode(x=x, y=y, tooltip=_tooltip(_PRINTED))
        layers.append(
            grey.mark_point(shape="diamond", size=75, strokeWidth=1.6, color=GREY, filled=False)
        )
    height = 24 * len(points)
    return finished(alt.layer(*layers).properties(width=460, height=height), *words[:2])


def _drops(
    points: list[Record], printed: list[Record], reference: str | None, words: Sequence[str]
) -> Record:
    """Draw what each series loses, step by step, as bars side by side."""
    import altair as alt

    order = list(dict.fromkeys(str(point["x"]) for point in points))
    x = alt.X("x:N", title=None, sort=order, axis=alt.Axis(labelAngle=0))
    series = list(dict.fromkeys(point["arm"] for point in points))
    offset = alt.XOffset("arm:N", sort=series)
    base = chart_of(points).encode(x=x, xOffset=offset)
    layers = [
        base.mark_bar().encode(
            y=alt.Y("value:Q", title=None), color=_series(points), tooltip=_tooltip(_TOOLTIP)
        ),
        base.mark_rule(strokeWidth=1.4, color=GREY).encode(y=alt.Y("low:Q"), y2="high:Q"),
        # A bar of no height is not seen, and would look like one that is missing.
        base.mark_tick(thickness=1.4, size=12, color=GREY).encode(y=alt.Y("value:Q")),
    ]
    return finished(alt.layer(*layers).properties(width=460, height=260), *words[:2])


def search_figures(
    record: Record, judged: Sequence[Record], fields: Sequence[str], key: str
) -> list[Figure]:
    """Draw the value of every judged trial over each field that was searched."""
    import altair as alt

    figures = []
    for field, space in zip(fields, record["space"], strict=True):
        points = [
            {"trial": row["trial"], "x": row["values"][field], "value": rounded(row["value"])}
            for row in judged
            if field in row["values"]
        ]
        if not points:
            continue
        bounds, choices, is_log = dimension(space)
        if bounds is None:
            points = [{**point, "x": as_choice(point["x"])} for point in points]
            axis = alt.Axis(labelAngle=0)
            x: Any = alt.X("x:N", title=field, scale=alt.Scale(domain=choices), axis=axis)
        else:  # all of the space: a best value at its edge asks for a wider one
            kind: Any = {"type": "log"} if is_log else {}
            scale = alt.Scale(domain=bounds, nice=False, padding=8, **kind)
            x = alt.X("x:Q", title=field, scale=scale)
        best = {"size": alt.condition("datum.rank == 0", alt.value(160), alt.value(45))}
        for rank, point in enumerate(points):
            point["rank"] = rank
        of_field = "x:N" if bounds is None else "x:Q"
        names = {"trial:Q": "trial", of_field: field, "value:Q": "value"}
        chart = (
            chart_of(points)
            .mark_point(filled=True, opacity=0.75, color=PALETTE[0])
            .encode(
                x=x,
                y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
                tooltip=_tooltip(names),
                color=alt.condition(
                    "datum.rank == 0", alt.value(PALETTE[1]), alt.value(PALETTE[0])
                ),
                **best,
            )
        )
        caption = (
            f"{record['objective']} on held-out images, %; a dot is a trial, the large one the best"
        )
        spec = finished(chart.properties(width=460, height=210), field, caption)
        figures.append(Figure(f"{key}-{slug(field)}", field, caption, spec))
    return figures
