"""Records of searches to charts and tables, for the page and for the search's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepbregman.runs import Record
from deepbregman.terminal import count_words

from .charts import (
    GREY,
    PALETTE,
    PLAIN,
    STAR,
    WIDTH,
    Figure,
    begin_chart,
    make_tooltip,
    round_digits,
    save_chart,
    slug,
    specify,
    stack,
)
from .records import is_finite
from .tables import Cell, Row, Table, format_value

BEST_TRIALS = 10
LOST_TRIALS = {"pruned": "stroke", "diverged": "cross"}
"""Marks of trials without a value, at the foot of a slice."""
SLICE_CAPTION = (
    "a dot is a trial, later ones darker, the star the best; at the foot, those without a value"
)
HEIGHT = 210


class Dimension(NamedTuple):
    """The range or the choices of one field of a search."""

    field: str
    bounds: tuple[float, float] | None
    """Ends of an interval; None for a choice."""
    choices: list[str]
    is_log: bool


def read_space(record: Record) -> list[Dimension]:
    """Read the space of a search: ``field=LOW:HIGH:log`` or ``field=A,B`` for each field."""
    space = []
    for words in record["space"]:
        field, _, written = words.partition("=")
        choices = written.split(",")
        if len(choices) > 1:
            space.append(Dimension(field, None, choices, is_log=False))
        else:
            low, high = map(float, written.split(":")[:2])
            space.append(Dimension(field, (low, high), [], written.endswith(":log")))
    return space


def list_completed_trials(record: Record) -> list[Record]:
    """Return the trials with a value of their own, best first.

    The value of a diverged trial is only that of guessing, which the sampler needs.
    """
    done = [row for row in record["trials"] if is_finite(row["value"]) and not row["diverged"]]
    return sorted(done, key=lambda row: (-row["value"], row["trial"]))


def name_state(trial: Record) -> str:
    """Return the state of a trial in a word."""
    return "diverged" if trial["diverged"] else str(trial["state"])


def count_trials(record: Record) -> str:
    """Count the trials, also by their state; one that was stopped and continued counts once."""
    last = {}
    for row in record["trials"]:
        first = row.get("continues")
        last[row["trial"] if first is None else first] = name_state(row)
    found = list(last.values())
    states = ", ".join(f"{found.count(word)} {word}" for word in dict.fromkeys(found))
    return count_words(len(found), "trial") + f" ({states})" * bool(found)


def draw_search(record: Record, key: str) -> list[Figure]:
    """Draw the trials of a search over each field, with the best values that others published."""
    slices = [_draw_slice(record, key, dimension) for dimension in read_space(record)]
    return [figure for figure in slices if figure is not None]


def save_search_figure(paths: Sequence[Path], record: Record) -> None:
    """Write the figure of a search; see :func:`draw_search`."""
    title = f"Search: {record['recipe']} on {Path(str(record['data'])).name}"
    trials = f"{count_trials(record)} by {record['sampler']}"
    objective = f"{record['objective']} on held-out images, %"
    notes = [f"{count_words(record['epochs'], 'epoch')}, {trials}", f"{objective}; {SLICE_CAPTION}"]
    notes[-1] += "; dotted: published" * bool(record.get("published"))
    figures = draw_search(record, "search")
    if not figures:
        return  # no trial has a value yet
    save_chart(paths, stack(figures, title, notes, columns=2))


def _draw_slice(record: Record, key: str, dimension: Dimension) -> Figure | None:
    """Draw the value of every completed trial over one field."""
    import altair as alt

    field, published = dimension.field, record.get("published") or {}
    done = [row for row in list_completed_trials(record) if field in row["values"]]
    if not done:
        return None
    points = [_make_point(row, dimension) | {"value": round_digits(row["value"])} for row in done]
    x, kind = _make_axis(dimension)
    axis = alt.Axis(format=".4~g")  # vega rounds a tick between two equal values away
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=axis)
    words = make_tooltip({"trial:Q": "trial", kind: field, "value:Q": "value"})
    age = alt.Color("trial:Q", scale=alt.Scale(range=["#a6cee8", "#00456b"]), legend=None)
    dots = begin_chart(points).mark_point(filled=True, size=45, opacity=0.85)
    best = begin_chart(points[:1]).mark_point(filled=True, size=170, shape=STAR, opacity=1)
    layers: list[Any] = [
        dots.encode(x=x, y=y, color=age, tooltip=words),
        best.encode(x=x, y=y, color=alt.value(PALETTE[1]), tooltip=words),
    ]
    names = make_tooltip({"trial:Q": "trial", kind: field, "state:N": "state"})
    foot, grey = alt.value(HEIGHT - 7), alt.value(GREY)
    for state, shape in LOST_TRIALS.items():
        lost = [
            _make_point(row, dimension)
            for row in record["trials"]
            if name_state(row) == state and field in row["values"]
        ]
        if lost:
            mark = begin_chart(lost).mark_point(shape=shape, angle=90, size=45, strokeWidth=1.3)
            layers.append(mark.encode(x=x, y=foot, color=grey, tooltip=names))
    if field in published and dimension.bounds is not None:
        line = begin_chart([{"x": published[field], "words": "published best for these images"}])
        rule = line.mark_rule(strokeDash=[2, 3], color=GREY)
        layers.append(rule.encode(x=x, tooltip=make_tooltip({"words:N": "line", kind: field})))
    caption = f"{record['objective']} on held-out images, %; {SLICE_CAPTION}"
    caption += "; dotted: published" * bool(field in published)
    chart = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    return Figure(f"{key}-{slug(field)}", field, caption, specify(chart, field, caption))


def _make_point(row: Record, dimension: Dimension) -> Record:
    x = row["values"][dimension.field]
    if dimension.bounds is None:
        x = str(x).lower() if isinstance(x, bool) else str(x)
    return {"trial": row["trial"], "x": x, "state": name_state(row)}


def _make_axis(dimension: Dimension) -> tuple[Any, str]:
    """Return the axis of a field, and how tooltips name its values."""
    import altair as alt

    if dimension.bounds is None:
        scale, axis = alt.Scale(domain=dimension.choices), alt.Axis(labelAngle=0)
        return alt.X("x:N", title=dimension.field, scale=scale, axis=axis), "x:N"
    # All of the space: a best value at its edge asks for a wider one.
    log: Any = {"type": "log"} if dimension.is_log else {}
    scale = alt.Scale(domain=dimension.bounds, nice=False, padding=8, **log)
    return alt.X("x:Q", title=dimension.field, scale=scale, axis=alt.Axis(format=PLAIN)), "x:Q"


def tabulate_trials(record: Record, key: str) -> Table:
    """Make a table of the best trials and, where known, the importance of each field."""
    fields = [dimension.field for dimension in read_space(record)]
    rows = [
        Row(
            f"trial {row['trial']}",
            (
                Cell(text=f"{row['value']:.2f}"),
                *(Cell(text=format_value(row["values"].get(field))) for field in fields),
            ),
        )
        for row in list_completed_trials(record)[:BEST_TRIALS]
    ]
    if record.get("importance"):
        shares = [Cell(text=format_value(record["importance"].get(field))) for field in fields]
        rows.append(Row("share of the variance (fANOVA)", (Cell(), *shares)))
    columns = (f"{record['objective']}, held out, %", *fields)
    return Table(f"{key}-trials", "Best trials", "trial", columns, tuple(rows))
