"""Grid studies, of arms and seeds: their records to tables."""

from collections.abc import Sequence
from pathlib import Path

from deepbregman.files import replace_file
from deepbregman.runs import Record

from .charts import as_sentence
from .grid_charts import (
    COMPARED,
    CONTROLS,
    GROUP_METRICS,
    OURS,
    PART_METRICS,
    describe_budget,
    describe_conditions,
    describe_diverged,
    is_of_methods,
    name_arm,
    name_reference,
)
from .published import CAVEAT, format_series_value, list_published_series, name_series
from .tables import Cell, Row, Table, count_seeds, format_value, make_cell, to_markdown

COSTS: dict[str, str] = {
    "epochs": "epochs",
    "views_per_image": "views per image",
    "view_size": "pixels of a side",
    "weak_views": "weak views",
    "small_views": "small views",
    "samples_per_step": "samples per step",
    "steps": "steps",
}
MEASURED = {
    "images_per_second": ("images/s", "{:,.0f}"),
    "peak_gigabytes": ("peak memory, GB", "{:.1f}"),
}
"""Costs that a run measures in every epoch, their titles and forms."""
MEASURED_NOTE = (
    "Images a second are the median over the last half of the epochs, and fewer where several runs "
    "shared the GPU; the peak of its memory is that of the steps"
)
INTERVAL = (
    "95 % interval of the mean, over seeds and test images where predictions are kept (of one "
    "seed, which has no ±, over test images alone), else over seeds, by Student's t, for these "
    "test images"
)


def tabulate_study(results: Record, key: str) -> list[Table]:
    """Make the tables of a study of arms and seeds: metrics, differences, costs.

    Methods, learning rates and parts have a table of their own before these, with all that counts.
    """
    tables = [_tabulate_arms(results, key)]
    if is_of_methods(results):
        controls = _tabulate_controls(results, key)
        tables = [_tabulate_methods(results, key), *([controls] if controls.rows else []), *tables]
    elif results["study"]["figure"] == "groups":
        tables.insert(0, _tabulate_series(results, key))
    if results["study"]["figure"] == "parts":
        tables.insert(0, _tabulate_parts(results, key))
    if name_reference(results) is not None:
        tables.append(_tabulate_differences(results, key))
    if results["study"]["figure"] == "pairs":
        tables.append(_tabulate_costs(results, key))
    return tables


def save_study_tables(path: Path, results: Record) -> None:
    """Write the tables of a study as Markdown, with its conditions."""
    words = [f"# {results['study']['title']}", f"{describe_conditions(results)}."]
    for note in (describe_budget(results), describe_diverged(results)):
        words += [as_sentence(note) + "."] if note else []
    words += [to_markdown(table) for table in tabulate_study(results, "")]
    with replace_file(path) as file:
        file.write(("\n\n".join(words) + "\n").encode())


_NOT_MEASURED: Record = {"metrics": {}, "difference": {}}


def _tabulate_methods(results: Record, key: str) -> Table:
    """Make a line for each method: alone, with the divergence, their difference, and published."""
    methods = [arm for arm in results["arms"] if arm["series"] != CONTROLS]
    with_divergence = {arm["x"]: arm for arm in methods if arm["series"] == OURS}
    alone = {arm["x"]: arm for arm in methods if arm["series"] != OURS}
    published = list_published_series(results)
    costs = [arm.get("cost") or {} for arm in results["arms"]]
    measured = [name for name in MEASURED if any(cost.get(name) is not None for cost in costs)]
    rows = []
    for x in dict.fromkeys(arm["x"] for arm in methods):
        arm, other = alone.get(x, _NOT_MEASURED), with_divergence.get(x, _NOT_MEASURED)
        either = alone.get(x, other)
        cells = [Cell(text=format_value((either.get("cost") or {}).get("learning_rate")))]
        for metric in GROUP_METRICS:
            cells += [make_cell(part["metrics"].get(metric)) for part in (arm, other)]
            cells.append(make_cell(other["difference"].get(metric)))
        for name in measured:
            values = [(part.get("cost") or {}).get(name) for part in (arm, other)]
            form = MEASURED[name][1]
            cells += [Cell(text="" if value is None else form.format(value)) for value in values]
        cells += _list_published_cells(either, published)
        beside = (f"{mark} with the divergence" for mark in _mark_diverged(other))
        rows.append(Row(str(x), tuple(cells), marks=(*_mark_diverged(arm), *beside)))
    columns = ["learning rate"]
    for name in GROUP_METRICS.values():
        columns += [name, f"{name}, with the divergence", f"{name}, difference"]
    for name in measured:
        columns += [MEASURED[name][0], f"{MEASURED[name][0]}, with the divergence"]
    columns += [f"published: {part['series']}" for part in published]
    caption = (
        f"{describe_conditions(results)}; {count_seeds(rows)}. Differences have the {INTERVAL}"
    )
    caption += f". {MEASURED_NOTE}" * bool(measured)
    where = "; ".join(f"{part['series']}: {part['source']}" for part in published)
    caption += f". Published: {where}. {CAVEAT}" * bool(published)
    title = results["study"]["title"]
    return Table(f"{key}-methods", title, "method", tuple(columns), tuple(rows), caption)


def _tabulate_controls(results: Record, key: str) -> Table:
    """Make a line for each method that has a control: the control, and what lies between."""
    controls = {arm["x"]: arm for arm in results["arms"] if arm["series"] == CONTROLS}
    over = {arm["x"]: arm["over_control"] for arm in results["arms"] if arm.get("over_control")}
    rows = []
    for x, arm in controls.items():
        cells = []
        for metric in GROUP_METRICS:
            cells.append(make_cell(arm["metrics"].get(metric)))
            cells.append(make_cell(arm["difference"].get(metric)))
            cells.append(make_cell(over.get(x, {}).get(metric)))
        rows.append(Row(str(x), tuple(cells), marks=_mark_diverged(arm)))
    columns = [
        f"{name}, {words}"
        for name in GROUP_METRICS.values()
        for words in ("control", "control - alone", "divergence - control")
    ]
    caption = "Control: the method with InfoNCE to the same teacher and bank in place of the "
    caption += f"divergence; {count_seeds(rows)}. Differences have the {INTERVAL}"
    title = "Is it the divergence, or its teacher and bank?"
    return Table(f"{key}-controls", title, "method", tuple(columns), tuple(rows), caption)


def _tabulate_series(results: Record, key: str) -> Table:
    """Make a line for each word of the axis, a column for each series, and the best setting."""
    series = list(dict.fromkeys(arm["series"] for arm in results["arms"]))
    metric, rows = results["metric"], []
    for x in dict.fromkeys(arm["x"] for arm in results["arms"]):
        mine = {arm["series"]: arm for arm in results["arms"] if arm["x"] == x}
        cells = [make_cell(mine[s]["metrics"].get(metric) if s in mine else None) for s in series]
        known = [arm for arm in mine.values() if metric in arm["metrics"]]
        known = [arm for arm in known if not arm.get("num_diverged")]  # as --rates reads it
        best = max(known, key=lambda arm: float(arm["metrics"][metric]["mean"]), default=None)
        rate = None if best is None else (best.get("cost") or {}).get("learning_rate")
        diverged = [f"{s}: {mark}" for s, arm in mine.items() for mark in _mark_diverged(arm)]
        rows.append(Row(str(x), (*cells, Cell(text=format_value(rate))), marks=tuple(diverged)))
    caption = f"{COMPARED.get(metric, metric)}; {describe_conditions(results)}; {count_seeds(rows)}"
    columns = (*series, "best learning rate")
    return Table(
        f"{key}-series", results["study"]["title"], "method", columns, tuple(rows), caption
    )


def _tabulate_parts(results: Record, key: str) -> Table:
    """Make a line for each arm, by the part that it changes: accuracies and their differences."""
    rows = []
    for arm in results["arms"]:
        cells = []
        for metric in PART_METRICS:
            difference = (arm.get("difference") or {}).get(metric)
            cells.append(make_cell(arm["metrics"].get(metric)))
            cells.append(make_cell(difference) if arm["against"] else Cell())
        rows.append(Row(f"{arm['series']}: {arm['x']}", tuple(cells), marks=_mark_diverged(arm)))
    columns = [word for m in PART_METRICS for word in (COMPARED[m], f"{COMPARED[m]}, difference")]
    caption = f"{describe_conditions(results)}; {count_seeds(rows)}. Differences to "
    caption += f"{name_reference(results)} have the {INTERVAL}"
    title = results["study"]["title"]
    return Table(f"{key}-parts", title, "part", tuple(columns), tuple(rows), caption)


def _tabulate_arms(results: Record, key: str) -> Table:
    columns = list(dict.fromkeys(name for arm in results["arms"] for name in arm["metrics"]))
    published = list_published_series(results)
    definitions = {arm["name"]: arm for arm in results["study"]["arms"]}
    # Where the paper has none of the arms, the note of the study says so once.
    marks_beyond = not all(arm.get("beyond") for arm in definitions.values())
    rows = []
    for arm in results["arms"]:
        cells = [make_cell(arm["metrics"].get(name)) for name in columns]
        meant, defined = name_arm(results, arm["arm"]), definitions.get(arm["arm"], {})
        marks = _mark_diverged(arm)
        marks = (meant, *marks) if meant != arm["arm"] else marks
        marks += ("supervised",) if defined.get("supervised") else ()
        marks += ("not in the paper",) if marks_beyond and defined.get("beyond") else ()
        row = Row(arm["arm"], (*cells, *_list_published_cells(arm, published)), marks=marks)
        rows.append(row._replace(note=count_seeds([row])))
    columns += [name_series(part, results["metric"]) for part in published]
    words = ("Top-1, per cent; mean ± sample deviation over seeds", count_seeds(rows))
    caption = ", ".join(filter(None, words))  # where all seeds diverged, there is no number
    title = results["study"]["title"]
    return Table(f"{key}-arms", title, "arm", tuple(columns), tuple(rows), caption)


def _mark_diverged(arm: Record) -> tuple[str, ...]:
    return (f"{arm['num_diverged']} diverged",) if arm.get("num_diverged") else ()


def _list_published_cells(arm: Record, published: Sequence[Record]) -> list[Cell]:
    return [
        Cell(text=format_series_value(part, arm), note=part["source"], is_published=True)
        for part in published
    ]


def describe_intervals(rows: Sequence[Row]) -> str:
    """Describe the cells of differences: what the deviation and the interval are of."""
    words = "mean ± sample deviation of the differences seed by seed"
    return f"{words}, {count_seeds(rows)}, and the {INTERVAL}"


def _tabulate_differences(results: Record, key: str) -> Table:
    arms = [arm for arm in results["arms"] if arm.get("difference")]
    columns = list(dict.fromkeys(name for arm in arms for name in arm["difference"]))
    rows = []
    for arm in arms:
        cells = [make_cell(arm["difference"].get(name)) for name in columns]
        row, other = Row(arm["arm"], tuple(cells)), name_arm(results, arm["against"])
        rows.append(row._replace(note=f"to {other}, {count_seeds([row])}"))
    caption = f"Points of top-1; {describe_intervals(rows)}"
    title = f"Difference to {name_reference(results)}"
    return Table(f"{key}-differences", title, "arm", tuple(columns), tuple(rows), caption)


def _tabulate_costs(results: Record, key: str) -> Table:
    costs = {arm["arm"]: arm["cost"] for arm in results["arms"] if arm.get("cost")}
    names = [name for name in COSTS if any(cost.get(name) for cost in costs.values())]
    rows = []
    for arm, cost in costs.items():
        settings = [Cell(text=format_value(cost.get(name))) for name in names]
        rows.append(Row(arm, (*settings, make_cell(cost.get("seconds")))))
    caption = (
        "Samples are views, weak and small ones not counted; seconds are the wall time of training"
    )
    columns = (*(COSTS[name] for name in names), "seconds")
    return Table(f"{key}-costs", "Cost of training", "arm", columns, tuple(rows), caption)
