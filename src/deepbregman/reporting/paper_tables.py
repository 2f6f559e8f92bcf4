"""The record of the study ``tables`` to tables in Markdown, CSV and LaTeX, and to a figure."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from deepbregman.files import replace_file, write_csv
from deepbregman.runs import Record

from .charts import (
    Figure,
    draw_dots,
    encode_arm,
    encode_shape,
    make_difference_point,
    save_chart,
    slug,
    specify,
)
from .grid_charts import describe_bars
from .grid_tables import describe_intervals
from .published import CAVEAT, find_published
from .records import Measure
from .tables import (
    Cell,
    Row,
    Table,
    count_seeds,
    make_cell,
    mark_best,
    to_csv,
    to_latex,
    to_markdown,
)

GROUPS: dict[str, tuple[str, ...]] = {
    "accuracy": ("knn", "linear", "semi", "supervised"),
    "transfer": ("transfer",),
    "retrieval": ("retrieval",),
    "clusters": ("cluster",),
    "few labels": ("few",),
    "other images": ("ood",),
    "corruptions": ("corruptions",),
}
"""Tables of a dataset, and the protocols in each."""
METRICS = {"top1": "top-1"} | {name: name for name in ("balanced", "mAP", "AUROC", "NMI", "ARI")}
"""Metrics that tables show; ``results.json`` has all."""
MAIN = {
    ("knn", "cosine, k=20"): "kNN",
    ("linear", "cached features"): "linear",
    ("semi", "1 % labels, from encoder"): "1 % labels",
    ("semi", "10 % labels, from encoder"): "10 % labels",
    ("transfer", "linear, cached features"): "transfer, linear",
    ("transfer", "fine-tuned"): "transfer, fine-tuned",
    ("retrieval", "cosine"): "retrieval",
    ("cluster", "k-means, cosine features, test split"): "clusters",
    ("few", "5 labels per class, nearest mean, cosine"): "5 labels per class",
    ("corruptions", "linear, mean of all"): "corrupted, linear",
}
"""Quantities in the figure of differences and the tables in short."""


def tabulate_quantities(results: Record, prefix: str = "") -> list[Table]:
    """Make the tables of a record: quantities in rows, arms in columns, differences after them."""
    tables = []
    for data in dict.fromkeys(quantity["data"] for quantity in results["quantities"]):
        groups = {"in short": [q for q in _choose_main(results) if q["data"] == data]}
        for group, protocols in GROUPS.items():
            groups[group] = [
                quantity
                for quantity in results["quantities"]
                if quantity["data"] == data
                if quantity["protocol"] in protocols
                if quantity["metric"] in METRICS
                # Left out, since they repeat others: 200 neighbours, and the middle strength.
                if not quantity["variant"].endswith(("k=200", " 2"))
            ]
        for group, found in groups.items():
            if found:
                tables.append(_tabulate_values(results, data, group, found))
            compared = [quantity for quantity in found if quantity["differences"]]
            if compared:
                tables.append(_tabulate_differences(results, data, group, compared))
        measures = [
            row
            for row in results.get("by_divergence", [])
            if row["data"] == data and row["metric"] in METRICS and _is_shown(row)
        ]
        if measures:
            tables.append(_tabulate_measures(results, data, measures))
        classes = [row for row in results.get("classes", []) if row["data"] == data]
        if classes:
            tables.append(_tabulate_classes(results, data, classes))
    if results["runs"]:
        tables.append(_tabulate_costs(results["runs"]))
    return [table._replace(key=f"{prefix}{table.key}") for table in tables]


def _name_quantity(quantity: Record) -> str:
    if "title" in quantity:
        return f"{quantity['title']}, {METRICS[quantity['metric']]}"
    start = "" if quantity["protocol"] in ("few", "ood", "corruptions") else quantity["protocol"]
    if quantity["protocol"] == "transfer":
        start = f"from {quantity['trained_on']}"
    words = ": ".join(filter(None, (start, quantity["variant"])))
    return f"{words}, {METRICS[quantity['metric']]}"


def _make_table(
    title: str, corner: str, columns: Sequence[str], rows: Iterable[Row], caption: str
) -> Table:
    return Table(slug(title), title, corner, tuple(columns), tuple(rows), caption)


def _list_used_arms(results: Record, rows: Sequence[Record]) -> list[str]:
    return [arm for arm in results["arms"] if any(arm in row["arms"] for row in rows)]


def _tabulate_values(results: Record, data: str, group: str, found: Sequence[Record]) -> Table:
    arms, published = _list_used_arms(results, found), _list_published(found)
    methods = list(dict.fromkeys(method for method, _ in published))
    rows = []
    for quantity in found:
        cells = [make_cell(quantity["arms"].get(arm)) for arm in arms]
        seeds = [cell.summary["n"] if cell.summary else 0 for cell in cells]
        cells = mark_best(cells, seeds)
        known = {entry.method: entry.value for entry in find_published(Measure.of(quantity))}
        cells += [
            Cell(text=f"{known[method]:.1f}" if method in known else "", is_published=True)
            for method in methods
        ]
        rows.append(Row(_name_quantity(quantity), tuple(cells)))
    columns = [*arms, *(f"published: {method}" for method in methods)]
    tests = ", ".join(f"{n:,}" for n in sorted({quantity["num_test"] for quantity in found}))
    caption = f"Per cent; mean ± sample deviation over seeds, {count_seeds(rows)}, for these "
    caption += f"{tests} test images"
    untrained = [q for q in found if "supervised" in (q["protocol"], *q["variant"].split(", "))]
    if untrained:
        names = ", ".join(_list_used_arms(results, untrained))
        caption += f". {names}: rows with 'supervised' start from random weights"
    if published:
        where = "; ".join(f"{method}: {conditions}" for method, conditions in published)
        caption += f". Published: {where}. {CAVEAT}"
    return _make_table(f"{data}: {group}", "quantity", columns, rows, caption)


def _list_published(found: Iterable[Record]) -> list[tuple[str, str]]:
    """List method and conditions of every published value of these quantities."""
    entries = [entry for quantity in found for entry in find_published(Measure.of(quantity))]
    return list(dict.fromkeys((entry.method, entry.conditions) for entry in entries))


def _tabulate_differences(results: Record, data: str, group: str, found: Sequence[Record]) -> Table:
    differences = [{(d["arm"], d["against"]): d for d in q["differences"]} for q in found]
    pairs = [pair for pair in map(tuple, results["pairs"]) if any(pair in d for d in differences)]
    rows = [
        Row(_name_quantity(quantity), tuple(make_cell(known.get(pair)) for pair in pairs))
        for quantity, known in zip(found, differences, strict=True)
    ]
    columns = [f"{arm} - {other}" for arm, other in pairs]
    title = f"{data}: {group}, differences"
    return _make_table(title, "quantity", columns, rows, f"Points; {describe_intervals(rows)}")


def _is_shown(row: Record) -> bool:
    """Leave out kNN of 200 neighbours, single corruptions, and all but three numbers of labels."""
    variant = row["variant"]
    if row["protocol"] == "corruptions":
        return bool(variant.endswith((", clean", ", mean of all")))
    if row["protocol"] == "few":
        return bool(variant.startswith(("1 label ", "5 labels ", "20 labels ")))
    return not variant.endswith("k=200")


def _tabulate_measures(results: Record, data: str, found: Sequence[Record]) -> Table:
    arms, rows = _list_used_arms(results, found), []
    for row in found:
        words = f"{METRICS[row['metric']]}: {row['variant']} - {row['against']}"
        cells = tuple(make_cell(row["arms"].get(arm)) for arm in arms)
        rows.append(Row(f"{row['protocol']}, {words}", cells))
    caption = "A measure by the divergence minus another one of the same run. Points; "
    caption += describe_intervals(rows)
    title = f"{data}: by the divergence itself, differences"
    return _make_table(title, "quantity", arms, rows, caption)


def _tabulate_classes(results: Record, data: str, classes: Sequence[Record]) -> Table:
    arms, rows = _list_used_arms(results, classes), []
    for row in classes:
        cells = tuple(make_cell(row["arms"].get(arm)) for arm in arms)
        rows.append(Row(f"{row['class']} ({row['num_test']:,})", cells))
    caption = "Share of each class's test images that is right, linear, cached features; per "
    caption += f"cent; mean ± sample deviation over seeds, {count_seeds(rows)}"
    return _make_table(f"{data}: by class", "class (test images)", arms, rows, caption)


def _tabulate_costs(runs: Sequence[Record]) -> Table:
    names = ("encoder", "epochs", "views_per_image", "view_size", "batch_size")
    rows: dict[str, list[Record]] = {}
    for run in runs:
        rows.setdefault(f"{run['arm']} on {run['data']}", []).append(run)
    lines = []
    for name, found in rows.items():
        seconds = [run["seconds"] for run in found if run["seconds"] is not None]
        took = f"{sum(seconds) / len(seconds):.0f}" if seconds else ""
        settings = [", ".join(dict.fromkeys(str(run[key]) for run in found)) for key in names]
        cells = [*settings, took, str(len(found))]
        diverged = sum(run["state"] == "diverged" for run in found)
        cells.append(str(diverged))
        lines.append(Row(name, tuple(Cell(text=text) for text in cells)))
    columns = (*(name.replace("_", " ") for name in names), "seconds", "runs", "diverged")
    caption = "Settings of each arm; seconds are the mean wall time of training"
    return Table("costs", "Cost of training", "arm", columns, tuple(lines), caption)


def save_tables(folder: Path, results: Record) -> None:
    """Write the tables, and a line for each quantity and arm as CSV."""
    tables = tabulate_quantities(results)
    (folder / "tables").mkdir(exist_ok=True)
    for table in tables:
        for ending, text in ((".csv", to_csv(table)), (".tex", to_latex(table))):
            with replace_file(folder / "tables" / f"{table.key}{ending}") as file:
                file.write(text.encode())
    with replace_file(folder / "tables.md") as file:
        file.write("\n\n".join(to_markdown(table) for table in tables).encode() + b"\n")
    keys = ("data", "trained_on", "protocol", "variant", "metric", "num_train", "num_test")
    rows = [
        {key: quantity[key] for key in keys}
        | {"arm": arm, **{key: summary[key] for key in ("mean", "deviation", "n")}}
        for quantity in results["quantities"]
        for arm, summary in quantity["arms"].items()
    ]
    if rows:
        write_csv(folder / "quantities.csv", rows)


def _choose_main(results: Record) -> list[Record]:
    """List the main quantities with their titles, by dataset; the balanced accuracy if known."""
    balanced = {_identify(q) for q in results["quantities"] if q["metric"] == "balanced"}
    chosen = []
    for quantity in results["quantities"]:
        title = MAIN.get((quantity["protocol"], quantity["variant"]))
        metrics = ("balanced",) if _identify(quantity) in balanced else ("top1", "mAP", "NMI")
        if title is None or quantity["metric"] not in metrics:
            continue
        if quantity["trained_on"] != quantity["data"]:
            title += f" from {quantity['trained_on']}"
        chosen.append({**quantity, "title": title})
    datasets = list(dict.fromkeys(quantity["data"] for quantity in results["quantities"]))
    order = list(MAIN)
    return sorted(
        chosen,
        key=lambda q: (datasets.index(q["data"]), order.index((q["protocol"], q["variant"]))),
    )


def draw_differences(results: Record, prefix: str = "") -> Figure | None:
    """Draw the differences between compared arms; None if no arms are compared."""
    points = [
        make_difference_point(
            f"{quantity['data']}: {_name_quantity(quantity)}",
            f"{pair['arm']} - {pair['against']}",
            pair,
        )
        for quantity in _choose_main(results)
        for pair in quantity["differences"]
    ]
    if not points:
        return None
    # The interval of two seeds is so wide that the means would lie on one line.
    reach = 1.5 * max(1.0, *(abs(point["value"]) for point in points))
    lows, highs = ([point[end] for point in points] for end in ("low", "high"))
    names = list(dict.fromkeys(point["arm"] for point in points))
    places = {name: place for place, name in enumerate(names)}
    words = {"arm:N": "arms", "measure:N": "quantity", "shown:N": "difference"}
    chart = draw_dots(
        points,
        "measure",
        encode_arm(places),
        words,
        unit="points",
        shape=encode_shape(places),
        arms=names,
        levels=[{"value": 0}],
        ends=(max(-reach, min(0.0, *lows)), min(reach, max(0.0, *highs))),
    )
    title = "Where is an arm ahead?"
    caption = f"points; mean of the differences seed by seed, {describe_bars(points)}; no bar is "
    caption += f"drawn beyond {reach:.3g} points"
    return Figure(f"{prefix}differences", title, caption, specify(chart, title, caption))


def save_difference_figure(paths: Sequence[Path], results: Record) -> None:
    """Write the figure of differences, where there are any."""
    figure = draw_differences(results)
    if figure is not None:
        save_chart(paths, figure.spec)


def _identify(quantity: Record) -> tuple[str, ...]:
    return tuple(quantity[key] for key in ("data", "trained_on", "protocol", "variant"))
