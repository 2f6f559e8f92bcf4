"""Grid studies, of arms and seeds: their records to words and charts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepbregman.runs import Record
from deepbregman.statistics import format_seeds
from deepbregman.terminal import count_words

from .charts import (
    GREY,
    PALETTE,
    WIDTH,
    Figure,
    as_sentence,
    begin_chart,
    draw_dots,
    draw_measures,
    draw_published,
    encode_arm,
    encode_shape,
    make_difference_point,
    make_mean_point,
    make_tooltip,
    round_digits,
    save_chart,
    slug,
    specify,
    stack,
)
from .published import format_series_value, is_on_test_images, list_published_series, select_series
from .records import is_finite

COMPARED: dict[str, str] = {
    "linear, cached features": "linear classifier",
    "linear, crop and flip": "linear classifier, crop and flip",
    "knn, cosine, k=200": "kNN, k = 200",
    "knn, cosine, k=20": "kNN, k = 20",
}
"""Metrics in which recipes are compared in figures; ``results.json`` compares all."""
GROUP_METRICS = {"linear, cached features": "linear", "knn, cosine, k=200": "kNN (k = 200)"}
"""Metrics of figures and tables of methods; 200 neighbours are what others publish."""
PART_METRICS = ("linear, cached features", "knn, cosine, k=20")
"""Metrics of a figure of parts."""
VERDICTS = {"above": PALETTE[2], "not told apart": GREY, "below": PALETTE[1]}
"""What the interval of a difference says, and its colour."""
MANY_RECIPES = 4
"""More recipes than these are not named one by one."""
OURS = "with divergence"
"""Series of the arms with the divergence."""
CONTROLS = "control"
"""Series of the controls of methods: InfoNCE to the same teacher and bank, not the divergence."""
SERIES_COLOURS = {"SimCLR": PALETTE[1], OURS: PALETTE[0]}
"""Colours of series that several studies have; other series take the remaining colours."""
LONG_NAME = 26
"""A longer name has a line of the legend alone: two do not fit into half of a page."""
LOG_RATIO = 20.0
"""An axis whose ends lie further apart than this is logarithmic."""


def is_of_methods(results: Record) -> bool:
    """Whether the arms are methods: alone, with the divergence, and with its control."""
    return bool(results["study"].get("with_divergence"))


def name_reference(results: Record) -> str | None:
    """Name what the arms are compared with; None if nothing is compared."""
    names = {arm["against"] for arm in results["arms"] if arm.get("difference")}
    if not names:
        return None
    if is_of_methods(results):
        return "the method alone"
    return name_arm(results, names.pop()) if len(names) == 1 else "the first of its series"


def name_arm(results: Record, name: str) -> str:
    """Name an arm in a sentence: "none" and "recipe" alone say little."""
    if results["study"].get("recipes"):
        return name  # the user's
    series = next((arm["series"] for arm in results["arms"] if arm["arm"] == name), name)
    plain = "the method alone" if series == "alone" else str(series)
    return {"none": plain, "recipe": str(results["recipe"])}.get(name, name)


def describe_budget(results: Record) -> str:
    """Describe how the budgets of the arms differ; empty where they do not."""
    found = results.get("unequal_budget")
    return f"unequal budget: {'; '.join(map(str, found))}" if found else ""


def describe_diverged(results: Record) -> str:
    """Name the arms with diverged seeds; their means leave these out. Empty without any."""
    found = []
    for arm in results["arms"]:
        if arm.get("num_diverged"):
            begun = sum(row["arm"] == arm["arm"] for row in results["cells"])
            found.append(f"{arm['arm']} ({arm['num_diverged']} of {count_words(begun, 'seed')})")
    return f"diverged: {', '.join(found)}" if found else ""


def format_epochs(results: Record) -> str:
    """Write the number of epochs; arms may have different ones."""
    if results["epochs"] is not None:
        return str(results["epochs"])
    counts = sorted({arm["cost"]["epochs"] for arm in results["arms"] if arm.get("cost")})
    return " or ".join(map(str, counts))


def describe_conditions(results: Record) -> str:
    """Describe recipe, dataset, epochs, and the images of the evaluation."""
    split = "test" if is_on_test_images(results) else "held-out training"
    epochs, data = format_epochs(results), Path(results["data"]).name
    recipe, number = results["recipe"], len(results["study"].get("recipes") or ())
    if number > MANY_RECIPES:
        done = len({arm["x"] for arm in results["arms"] if arm["metrics"]})
        recipe = f"{number} recipes" if done == number else f"{done} of {number} recipes"
    return f"{recipe} on {data}, {epochs} epoch{'s' * (epochs != '1')}, {split} images, top-1 %"


def describe_bars(points: Sequence[Record]) -> str:
    """Describe the bars of differences: one seed has an interval over test images, or none."""
    words = f"bar: 95 % interval of it, {format_seeds(point['n'] for point in points)}"
    has_one = any(point["n"] == 1 for point in points)
    return words + " (of one seed over test images only, where there is a bar)" * has_one


def draw_study(results: Record, key: str) -> list[Figure]:
    """Draw a study of arms and seeds: accuracies, and differences to a reference."""
    kind = results["study"]["figure"]
    if kind == "parts":
        drawn = [_draw_parts(results, key, metric) for metric in PART_METRICS]
    elif kind == "groups":
        drawn = [_draw_groups(results, key, metric) for metric in GROUP_METRICS]
    else:
        drawn = [(_draw_pairs if kind == "pairs" else _draw_arms)(results, key)]
    drawn.append(_draw_differences(results, key))
    return [figure for figure in drawn if figure is not None]


def save_study_figure(paths: Sequence[Path], results: Record) -> None:
    """Write a study's figure; the ending of a path names the format."""
    figures = draw_study(results, "study")
    if results["study"]["figure"] != "pairs":
        figures = [figure for figure in figures if not figure.key.endswith("-differences")]
    if not figures:
        return  # nothing is measured, or compared, yet
    notes = [describe_conditions(results)]  # captions have the number of seeds
    notes += [as_sentence(describe_budget(results))] if describe_budget(results) else []
    diverged = describe_diverged(results)
    notes += [f"{as_sentence(diverged)}, which have no accuracy."] if diverged else []
    if len({figure.caption for figure in figures}) == 1:
        notes.append(figures[0].caption)
    else:
        notes += [f"{figure.title}: {figure.caption}" for figure in figures]
    drawn = {results["metric"], *COMPARED, *GROUP_METRICS}
    notes += [
        f"Published, {part['series']}: {part['source']}."
        for part in list_published_series(results)
        if part.get("metric", results["metric"]) in drawn
    ]
    save_chart(paths, stack(figures, results["study"]["title"], notes, columns=2))


def _draw_arms(results: Record, key: str) -> Figure | None:
    """Draw the arms of a grid over an axis; None if none has been evaluated."""
    metric, kind = results["metric"], results["study"]["figure"]
    published = _list_published(results, metric)
    part = "difference" if kind == "drops" else "metrics"
    found = [arm for arm in results["arms"] if metric in (arm.get(part) or {})]
    if not found:
        return None
    beyond = {arm["name"] for arm in results["study"]["arms"] if arm.get("beyond")}
    points = []
    for arm in found:
        point = make_mean_point("", arm["series"], arm[part][metric])
        is_beyond = arm["arm"] in beyond
        points.append({**point, "name": arm["arm"], "x": arm["x"], "beyond": is_beyond})
    unit = "change of linear accuracy, points" if kind == "drops" else f"{metric}, %"
    caption = _caption_means(points, published)
    if kind == "bars" and any(point["beyond"] for point in points):
        caption += "; * not in the paper"
    study, reference = results["study"], results["study"].get("reference")
    if kind == "line":
        chart = _draw_line(points, published, reference, study["x_label"])
    elif kind == "bars":
        chart = _draw_bars(points, published, reference)
    else:  # what each series loses, step by step
        first = [arm["x"] for arm in results["arms"] if arm["arm"] == found[0].get("against")]
        caption += "".join(f"; dashed: '{x}' of the same series" for x in first)
        series, zero = list(dict.fromkeys(point["arm"] for point in points)), [{"value": 0}]
        colour, words = _encode_series(points), _TOOLTIP
        chart = draw_dots(points, "x", colour, words, unit="points", arms=series, levels=zero)
    spec = specify(chart, study["title"], f"{unit}; {caption}")
    return Figure(f"{key}-arms", as_sentence(unit), caption, spec)


def _list_published(results: Record, metric: str) -> list[Record]:
    """List the published values of a metric as points over the axis."""
    return [
        {"x": x, "value": value, "method": f"published: {part['series']}", "where": part["source"]}
        for part in select_series(list_published_series(results), metric)
        for x, value in part["values"].items()
    ]


def _caption_means(points: Sequence[Record], published: Sequence[Record]) -> str:
    seeds = format_seeds(point["n"] for point in points)
    return f"mean and deviation over seeds, {seeds}" + "; grey: published" * bool(published)


_TOOLTIP = {"name:N": "arm", "arm:N": "series", "shown:N": "mean ± deviation"}


def _encode_series(points: Sequence[Record]) -> Any:
    """Encode the series as colour; SimCLR and ours have the same in every study."""
    import altair as alt

    names = list(dict.fromkeys(point["arm"] for point in points))
    others = [name for name in names if name not in SERIES_COLOURS]
    rest = {name: PALETTE[2 + index % (len(PALETTE) - 2)] for index, name in enumerate(others)}
    scale = alt.Scale(domain=names, range=[(SERIES_COLOURS | rest)[name] for name in names])
    columns = 1 if max(map(len, names)) > LONG_NAME else 0  # 0 is one line
    legend = alt.Legend(
        title=None, orient="bottom", labelLimit=300, symbolOpacity=1, columns=columns
    )
    return alt.Color("arm:N", scale=scale, legend=legend)


def _draw_groups(results: Record, key: str, metric: str) -> Figure | None:
    """Draw a line for each word of the axis, with a dot for each series; None for no value.

    The words are in the order of the values of the first series.
    """
    found = [arm for arm in results["arms"] if metric in arm["metrics"]]
    if not found:
        return None
    points = [
        make_mean_point("", arm["series"], arm["metrics"][metric])
        | {"name": arm["arm"], "x": arm["x"]}
        for arm in found
    ]
    series = list(dict.fromkeys(point["arm"] for point in points))
    places = {(point["x"], point["arm"]): point["value"] for point in points}
    points.sort(key=lambda point: -places.get((point["x"], series[0]), 0.0))
    words = {str(point["x"]) for point in points}
    published = [mark for mark in _list_published(results, metric) if mark["x"] in words]
    caption = _caption_means(points, published)
    chart = draw_dots(
        points, "x", _encode_series(points), _TOOLTIP, arms=series, published=published
    )
    title = f"{COMPARED.get(metric, metric)}, %"
    spec = specify(chart, title, caption)
    return Figure(f"{key}-{slug(metric)}", title, caption, spec)


def _draw_parts(results: Record, key: str, metric: str) -> Figure | None:
    """Draw the difference of each arm to the reference, below the part of the recipe it changes."""
    import altair as alt

    points, lines = [], {}
    for arm in results["arms"]:
        difference = (arm.get("difference") or {}).get(metric)
        if difference is None:
            continue
        lines[f"part {arm['series']}"], lines[arm["arm"]] = arm["series"], str(arm["x"])
        point = make_difference_point("", arm["series"], difference)
        verdict = "not told apart"
        if point["low"] < point["high"]:  # one seed has an interval only if predictions are kept
            verdict = "below" if point["high"] < 0 else "above" if point["low"] > 0 else verdict
        points.append({**point, "name": arm["arm"], "verdict": verdict})
    if not points:
        return None
    means = [0.0, *(point["value"] for point in points)]
    margin = max(1.0, 0.3 * (max(means) - min(means)))  # the interval of two seeds may be huge
    reference = name_reference(results)
    levels: list[Record] = [{"value": 0.0, "word": reference}]
    for point in points:
        if point["name"] in ("none", "recipe"):
            levels.append({**point, "word": name_arm(results, point["name"])})
    scale = alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values()))
    legend = alt.Legend(title=None, orient="bottom", symbolOpacity=1, columns=3)
    chart = draw_dots(
        points,
        "name",
        alt.Color("verdict:N", scale=scale, legend=legend),
        {"name:N": "arm", "arm:N": "part", "shown:N": "difference"},
        unit="points",
        levels=levels,
        lines=lines,
        ends=(min(means) - margin, max(means) + margin),
    )
    sides: Any = (("right", -3), ("left", 3))  # of its line, so that two names never meet
    levels.sort(key=lambda level: float(level["value"]))
    for level, (side, away) in zip(levels, sides, strict=False):
        words = begin_chart([level]).mark_text(align=side, dx=away, dy=-7, color=GREY)
        chart += words.encode(x=alt.X("value:Q"), y=alt.value(0), text="word:N")
    title = f"Difference to {reference}: {COMPARED[metric]}"
    caption = "each line changes one part of the recipe; difference seed by seed, "
    caption += f"{describe_bars(points)}; a long bar is cut at the edge"
    return Figure(f"{key}-{slug(metric)}", title, caption, specify(chart, title, caption))


def _draw_line(
    points: list[Record], published: list[Record], reference: str | None, x_label: str
) -> Any:
    """Draw series over an axis of numbers or words; the reference is a level line."""
    import altair as alt

    level = [point for point in points if point["name"] == reference]
    others = [point for point in points if point["name"] != reference] or points
    if all(is_finite(point["x"]) for point in others):
        ends = [float(point["x"]) for point in others]
        is_log = min(ends) > 0 and max(ends) / min(ends) > LOG_RATIO
        kind: Any = {"type": "log"} if is_log else {"zero": False}
        scale = alt.Scale(nice=False, padding=14, **kind)
        ticks = sorted(set(ends))
        crowded = len(ticks) > 8
        written: Any = {"labelExpr": "'' + datum.value", "labelOverlap": crowded}
        # Vega leaves out every second value where there are more than the count.
        axis = alt.Axis(values=ticks, tickCount=len(ticks), grid=False, **written)
        x: Any = alt.X("x:Q", title=x_label, scale=scale, axis=axis)
        published = [{**point, "x": float(point["x"])} for point in published]
    else:
        order = list(dict.fromkeys(str(point["x"]) for point in others))
        axis = alt.Axis(labelAngle=0)
        x = alt.X("x:N", title=x_label, sort=order, scale=alt.Scale(domain=order), axis=axis)
        published = [point for point in published if point["x"] in order]
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False))
    ends_of_bar = {"y": alt.Y("low:Q", title=None), "y2": "high:Q"}
    colour = _encode_series(points)
    layers: list[Any] = []
    if level:
        flat = begin_chart(level).encode(color=colour)
        layers.append(flat.mark_rect(opacity=0.15).encode(**ends_of_bar))
        layers.append(flat.mark_rule(strokeWidth=1.6).encode(y=y, tooltip=make_tooltip(_TOOLTIP)))
    if published:
        shapes = alt.Scale(range=["diamond", "square", "triangle-up"])
        legend = alt.Legend(title=None, orient="bottom", labelLimit=300, columns=1)
        shape = alt.Shape("method:N", scale=shapes, legend=legend)
        lines = begin_chart(published).mark_line(strokeDash=[2, 3], strokeWidth=1.2, color=GREY)
        layers.append(lines.encode(x=x, y=y, detail="method:N"))
        layers.append(draw_published(published).encode(x=x, y=y, shape=shape))
    base = begin_chart(others).encode(x=x, color=colour)
    layers += [
        base.mark_line(strokeWidth=2).encode(y=y),
        base.mark_rule(strokeWidth=2, opacity=0.6).encode(**ends_of_bar),  # may lie on another
        base.mark_point(filled=True, size=70, opacity=1).encode(
            y=y, tooltip=make_tooltip(_TOOLTIP)
        ),
    ]
    return alt.layer(*layers).properties(width=WIDTH, height=260)


def _draw_bars(points: list[Record], published: list[Record], reference: str | None) -> Any:
    """Draw a dot with its deviation for each arm; the mean of the reference goes through all."""
    groups = dict.fromkeys(point["arm"] for point in points if point["name"] != reference)
    for point in points:
        prefix = f"{point['arm']}: " if len(groups) > 1 and point["name"] != reference else ""
        point["label"] = f"{prefix}{point['x']}" + " *" * point["beyond"]
    known = {str(point["x"]): point["label"] for point in points}
    published = [{**p, "label": known[p["x"]]} for p in published if p["x"] in known]
    levels = [{"value": point["value"]} for point in points if point["name"] == reference]
    colour = _encode_series(points)
    return draw_dots(points, "label", colour, _TOOLTIP, levels=levels, published=published)


def _draw_pairs(results: Record, key: str) -> Figure | None:
    """Draw every seed, mean and deviation of whole recipes; None if none has been evaluated."""
    published = list_published_series(results)
    means: list[Record] = []
    runs, marks = [], []
    for metric, name in COMPARED.items():
        for arm in results["arms"]:
            summary = arm["metrics"].get(metric)
            if summary is None:
                continue
            means.append(make_mean_point(name, arm["arm"], summary))
            marks += [
                {"measure": name, "value": part["values"][str(arm["x"])]}
                | {"method": part["series"], "where": part["source"]}
                for part in select_series(published, metric)
                if format_series_value(part, arm)
            ]
        runs += [
            {"measure": name, "arm": row["arm"], "run": row.get("run") or f"seed {row['seed']}"}
            | {"value": round_digits(row["metrics"][metric])}
            for row in results["cells"]
            if is_finite((row.get("metrics") or {}).get(metric))
        ]
    if not means:
        return None
    seeds = format_seeds(point["n"] for point in means)
    caption = f"top-1, %; mean, deviation over seeds (bar) and every seed (small), {seeds}"
    caption += "; diamonds: published, other settings" * bool(marks)
    chart = draw_measures(means, runs, marks, _number_arms(results))
    spec = specify(chart, results["study"]["title"], caption)
    return Figure(f"{key}-arms", "Arms", caption, spec)


def _number_arms(results: Record) -> dict[str, int]:
    return {arm["arm"]: place for place, arm in enumerate(results["arms"])}


def _draw_differences(results: Record, key: str) -> Figure | None:
    """Draw the differences to the reference with their intervals; None when there are none."""
    import altair as alt

    reference, kind = name_reference(results), results["study"]["figure"]
    if reference is None or kind in ("drops", "parts"):  # their first figures are of differences
        return None
    main: str = results["metric"]
    shown = COMPARED if kind == "pairs" else {main: COMPARED.get(main, main)}
    points = [
        make_difference_point(name, arm["arm"], arm["difference"][metric])
        for metric, name in shown.items()
        for arm in results["arms"]
        if (arm.get("difference") or {}).get(metric)
    ]
    if not points:
        return None
    several = len({point["measure"] for point in points}) > 1
    names = list(dict.fromkeys(point["arm"] for point in points))
    colour: Any = alt.value(PALETTE[0])  # black would not be seen on a dark page
    shape: Any = "diamond"
    if several:
        places = {n: p for n, p in _number_arms(results).items() if n in names}
        colour = encode_arm(places)
        if max(places.values()) >= len(PALETTE):  # colours repeat
            shape = encode_shape(places)
    chart = draw_dots(
        points,
        "measure" if several else "arm",
        colour,
        {"arm:N": "arm", "measure:N": "measure", "shown:N": "difference"},
        unit="points",
        shape=shape,
        arms=names if several else (),
        levels=[{"value": 0}],
    )
    title = f"Difference to {reference}"
    caption = f"points of top-1; mean of the differences seed by seed, {describe_bars(points)}"
    return Figure(f"{key}-differences", title, caption, specify(chart, title, caption))
