"""What arms were judged by, as dots with their deviations; published values stand apart."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from deepbregman.runs import Record

from .arms import Arm
from .charts import Figure, arm_colour, chart_of, finished, opacity, rounded
from .measures import measures, published_rows, summary, titles, values

if TYPE_CHECKING:
    import altair as alt

GREY = "#8a8a8a"


def evaluation_figure(arms: Sequence[Arm], data: str, key: str, title: str) -> Figure:
    """Draw what the arms were judged by on one source: means, deviations, runs and published."""
    columns = [measure for measure in measures(arms) if measure.data == data]
    names = dict(zip(columns, titles(columns), strict=True))
    means, runs = [], []
    for measure in columns:
        for arm in arms:
            cell = summary(arm, measure)
            if cell.spread is None:
                continue
            mean, deviation, n = cell.spread
            point: Record = {"measure": names[measure], "arm": arm.name, "value": rounded(mean)}
            runs += [
                {**point, "run": run.name, "value": rounded(row["value"])}
                for run, row in values(arm, measure)
                if len(arm.runs) > 1
            ]
            ends = (mean - (deviation or 0.0), mean + (deviation or 0.0))
            point |= {"low": rounded(ends[0]), "high": rounded(ends[1]), "n": n}
            means.append(point | {"shown": f"{cell.shown} (n={n})"})
    printed = [
        {
            "measure": names[measure],
            "value": float(cell.text),
            "method": row.name,
            "where": row.note,
        }
        for row in published_rows(arms, columns)
        for measure, cell in zip(columns, row.cells, strict=True)
        if cell.text
    ]
    caption = "mean, deviation over seeds (bar) and every run (small)" + (
        "; diamonds: published, other settings" if printed else ""
    )
    spec = dot_chart(means, runs, printed, list(names.values()), arms, title, caption)
    return Figure(key, title, caption, spec)


def dot_chart(
    means: list[Record],
    runs: list[Record],
    printed: list[Record],
    order: Sequence[str],
    arms: Sequence[Arm],
    title: str,
    subtitle: str,
) -> Record:
    """Draw a line for each measure, with a dot, a bar and small dots for each arm."""
    import altair as alt

    y = alt.Y(
        "measure:N", sort=list(order), title=None, axis=alt.Axis(grid=True, tickBand="extent")
    )
    names = [arm.name for arm in arms]
    offset = alt.YOffset("arm:N", sort=names, scale=alt.Scale(domain=names))
    x = alt.X("value:Q", title="%", scale=alt.Scale(zero=False), axis=alt.Axis(grid=True))
    shared: dict[str, Any] = {"y": y, "yOffset": offset, "color": arm_colour(arms)}
    base = chart_of(means).encode(**shared)
    layers: list[Any] = [
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q", opacity=opacity(0.55)),
        base.mark_point(filled=True, size=70).encode(
            x=x,
            opacity=opacity(),
            tooltip=[alt.Tooltip(name, title=words) for name, words in _DOT.items()],
        ),
    ]
    if runs:
        words = [alt.Tooltip("run:N"), alt.Tooltip("measure:N"), alt.Tooltip("value:Q")]
        small = chart_of(runs).encode(**shared)
        layers.append(
            small.mark_tick(thickness=1.5, size=9).encode(x=x, opacity=opacity(0.6), tooltip=words)
        )
    if printed:
        layers.append(published_layer(printed).encode(x=x, y=y))
    height = len(order) * max(34, 11 * len(arms))
    return finished(alt.layer(*layers).properties(width=460, height=height), title, subtitle)


_DOT = {"arm:N": "arm", "measure:N": "measure", "shown:N": "mean ± deviation"}


def published_layer(printed: Iterable[Record]) -> "alt.Chart":
    """Mark published values, hollow and grey: they are no arm."""
    import altair as alt

    names = {"method:N": "published", "value:Q": "value", "where:N": "in"}
    mark: alt.Chart = (
        chart_of(list(printed))
        .mark_point(shape="diamond", size=75, strokeWidth=1.6, color=GREY, filled=False)
        .encode(tooltip=[alt.Tooltip(name, title=words) for name, words in names.items()])
    )
    return mark
