"""Records to tables on the terminal."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from deepbregman.errors import make_printable
from deepbregman.runs import Record
from deepbregman.statistics import format_difference, format_spread, format_summary
from deepbregman.terminal import count_words

from . import detection_tables, grid_charts, grid_tables, paper_tables, searches, tables

METRICS = {"top1": "top-1 %", "top5": "top-5 %", "balanced": "balanced %"}
"""Titles of metrics; any other is titled by its name."""
MOST_METRICS = 4
"""A protocol with more, such as detect, has a line for each metric instead of a column."""
GRIDS = ("few", "corruptions")
"""Protocols with so many variants that a line for each would fill several screens."""
STUDY_METRICS = (*grid_charts.COMPARED, "knn, divergence, k=20")


def _begin_table(title: str, *columns: str) -> Table:
    """Begin a table whose title may hold any names; the first column is left-aligned.

    Columns fold instead of being cut, since with an ellipsis two names could look the same.
    """
    table = Table(title=_make_plain(title), title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(_make_plain(name), justify="right" if index else "left", overflow="fold")
    return table


def draw_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Draw rows of text; names may hold anything."""
    table = _begin_table(title, *columns)
    for row in rows:
        table.add_row(*map(_make_plain, row))
    return table


def _make_plain(text: str) -> str:
    """Show a name as it is, without markup and terminal codes."""
    return escape(make_printable(text))


def draw_evaluation_tables(rows: Sequence[Record], title: str) -> Group:
    """Draw the rows of evaluations: accuracies in one table, each other protocol in its own.

    In a table of all, most cells would be empty, and columns too narrow for words.
    """
    accurate = {row["protocol"] for row in rows if row["metric"] in METRICS}
    parts: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        protocol, metric = row["protocol"], row["metric"]
        part = ("", "") if protocol in accurate else (protocol, "")
        parts.setdefault((protocol, metric) if protocol in GRIDS else part, []).append(row)

    def draw(part: Sequence[Record]) -> Table:
        many = part[0]["protocol"] in GRIDS or len({row["metric"] for row in part}) > MOST_METRICS
        return (_draw_grid if many else draw_evaluation_table)(part, title)

    return Group(*map(draw, parts.values()), *_draw_trunks(rows, title))


def _draw_trunks(rows: Sequence[Record], title: str) -> list[Table]:
    """Draw what pretraining adds to detectors, if there are both kinds."""
    lines = [
        [measure.variant, measure.metric, format_difference(pair)]
        for measure, pair in detection_tables.compare_trunks([rows]).items()
    ]
    columns = ("detect", "metric", "points, 95 % interval")
    return [draw_rows(f"{title}: differences seed by seed", columns, lines)] if lines else []


def _draw_grid(rows: Sequence[Record], title: str) -> Table:
    """Draw a line for each metric and a column for each variant; in GRIDS both are of variants."""
    one = rows[0]
    protocol = one["protocol"]
    if protocol in GRIDS:
        title += f", {METRICS.get(one['metric'], one['metric'])}"
    if len({row["num_train"] for row in rows}) == 1:
        title += f": {one['num_train']:,} images to train on, {one['num_test']:,} to test on"
    else:
        title += f": {one['num_test']:,} images to test on"
    title += f", {one['n']} seeds" * (one["n"] > 1)
    found: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        line, column = row["metric"], row["variant"]
        if protocol == "few":
            column, _, line = row["variant"].partition(" per class, ")
        elif protocol == "corruptions":
            column, _, line = row["variant"].rpartition(", ")
        found.setdefault(line, {})[column] = _write_mean(row)
        columns[column] = None
    lines = [[line, *(cells.get(c, "") for c in columns)] for line, cells in found.items()]
    head = "few, per class" if protocol == "few" else protocol
    return draw_rows(title, [head, *columns], lines)


def draw_evaluation_table(rows: Sequence[Record], title: str) -> Table:
    """Draw a line for each variant, a column for each metric; means of seeds have a deviation."""
    lines: dict[tuple[str, ...], dict[str, Record]] = {}
    for row in rows:
        kind = (row["protocol"], row["variant"], row["data"])
        lines.setdefault(kind, {})[row["metric"]] = row
    found: set[str] = {row["metric"] for row in rows}
    metrics = [name for name in METRICS if name in found] + sorted(found - set(METRICS))
    several = any(row["n"] > 1 for row in rows)
    names = [METRICS.get(metric, metric) for metric in metrics] + ["seeds"] * several
    table = _begin_table(title, "protocol", "variant", *names, "train / test")
    table.columns[0].no_wrap = True
    table.columns[1].justify = "left"
    for (protocol, variant, _), by_metric in lines.items():
        one = next(iter(by_metric.values()))
        cells = [_write_mean(by_metric[name]) if name in by_metric else "" for name in metrics]
        cells += [str(one["n"])] * several
        sizes = f"{one['num_train']:,} / {one['num_test']:,}"
        table.add_row(protocol, escape(variant), *cells, sizes)
    return table


def describe_references(rows: Sequence[Record]) -> str:
    """Say what to compare top-1 accuracies with; empty if that was not measured."""
    known = [row for row in rows if row["metric"] == "top1" and row.get("raw_pixels") is not None]
    if not known:
        return ""
    pixels = {}
    for row in known:
        name, k = row["protocol"], row["details"].get("k")
        name += "" if k is None else f", k={k}"
        # Raw pixels are classified in the same way, so each of the two has its own reference.
        name += ", weighted classes" * row["variant"].endswith("weighted classes")
        pixels[name] = row["raw_pixels"]
    found = ", ".join(f"{value:.1f} % ({name})" for name, value in pixels.items())
    return (
        f"to compare, top-1: the most frequent class for all images {known[0]['chance']:.1f} %; "
        f"raw pixels instead of features {found}"
    )


def _write_mean(row: Record) -> str:
    return format_spread(row["value"], row["deviation"])


def draw_metrics(rows: Sequence[Record], title: str) -> Table:
    """Draw rows with a line for each variant and a column for each metric, in per cent."""
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    table = _begin_table(title, "variant", *(f"{metric} %" for metric in metrics))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = {row["metric"]: row for row in rows if row["variant"] == variant}
        table.add_row(variant, *(_write_mean(cells[metric]) for metric in metrics))
    return table


def format_distance(value: float) -> str:
    """Write a cosine or a divergence; the latter has no scale, and may be small throughout."""
    return f"{value:.2e}" if 0.0 < value < 1e-3 else f"{value:.4f}"


def draw_hits(title: str, found: Mapping[str, Sequence[tuple[str, str | None, float]]]) -> Table:
    """Draw what was found for one query, a group of columns for each measure.

    Classes get a column unless the names tell them, as of files in a folder for each class. An
    image is its name, its class if known, and its value.
    """
    every = [hit for hits in found.values() for hit in hits]
    labelled = any(known is not None for _, known, _ in every)
    labelled = labelled and not all(name.startswith(f"{known}/") for name, known, _ in every)
    table = Table(title=_make_plain(title), title_justify="left")
    table.add_column("rank", justify="right")
    for measure in found:
        table.add_column(measure, justify="right")
        if labelled:
            table.add_column("class", overflow="fold")
        table.add_column("image", overflow="fold")
    for rank, hits in enumerate(zip(*found.values(), strict=True), start=1):
        cells = [str(rank)]
        for name, known, value in hits:
            classes = [_make_plain(known or "")] if labelled else []
            cells += [format_distance(value), *classes, _make_plain(name)]
        table.add_row(*cells)
    return table


def draw_study_tables(results: Record) -> Group:
    """Draw the tables of a study of arms and seeds: metrics, differences, costs.

    Of the metrics only those that one looks at first: ``results.csv`` has them all.
    """
    arms, *others = grid_tables.tabulate_study(results, "")
    budget = grid_charts.describe_budget(results)
    words = f"{arms.title} {grid_charts.describe_conditions(results)}"
    arms = arms._replace(title=words + f"; {budget}" * bool(budget))
    if results["study"]["figure"] in ("groups", "parts"):  # the first table tells all
        return Group(FittingTable(arms))
    shown = (*STUDY_METRICS, *grid_tables.COSTS.values(), "seconds")
    return Group(*(FittingTable(table, shown) for table in (arms, *others)))


def draw_main_quantities(results: Record) -> Group:
    """Draw the tables in short of the study ``tables``; ``tables.md`` has the others."""
    made = paper_tables.tabulate_quantities(results)
    return Group(*(FittingTable(table) for table in made if "in-short" in table.key))


def draw_trials(record: Record) -> Table:
    """Draw the best trials of a hyperparameter search and, where known, each field's importance."""
    trials = searches.count_trials(record)
    title = f"{record['recipe']} on {record['data']}: best of {trials}"
    return draw_table(searches.tabulate_trials(record, "")._replace(title=title))


@dataclass(frozen=True)
class FittingTable:
    """A table of the page that leaves out its last columns where the terminal is too narrow.

    Otherwise numbers would be broken into pieces.
    """

    table: tables.Table
    shown: Collection[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = drawn = draw_table(self.table, self.shown)  # a table may have no columns
        for number in range(len(self.table.columns), 0, -1):
            drawn = draw_table(_cut(self.table, number), self.shown)
            if _fit_columns(drawn, console, options):
                break
        yield drawn
        left_out = len(whole.columns) - len(drawn.columns)
        if left_out:
            yield f"{count_words(left_out, 'column')} more in tables.md, or on a wider terminal"


def _fit_columns(table: Table, console: Console, options: ConsoleOptions) -> bool:
    """Choose widths that break no word; False if the terminal is too narrow for that.

    What is left is shared by the columns that would fill more than one line.
    """
    wide = options.update(width=10_000)
    borders = Measurement.get(console, wide, table).maximum
    widths, limits = [], []
    for column in table.columns:
        parts = [Measurement.get(console, wide, part) for part in (column.header, *column.cells)]
        widths.append(max(part.minimum for part in parts))
        limits.append(max(part.maximum for part in parts))
        borders -= limits[-1]
    left = options.max_width - borders - sum(widths)
    if left < 0:
        return False
    while left > 0 and (short := [i for i, limit in enumerate(limits) if widths[i] < limit]):
        for index in short[:left]:
            widths[index] += 1
        left -= len(short)
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    return True


def _cut(table: tables.Table, number: int) -> tables.Table:
    """Keep the first columns of a table."""
    rows = tuple(row._replace(cells=row.cells[:number]) for row in table.rows)
    return table._replace(columns=table.columns[:number], rows=rows)


def draw_table(table: tables.Table, shown: Collection[str] = ()) -> Table:
    """Draw a table of the page: the columns ``shown`` and the published ones, by default all."""
    columns = [
        name for name in table.columns if not shown or name in shown or name.startswith("published")
    ]
    drawn = _begin_table(table.title, table.corner, *columns)
    for row in table.rows:
        cells = dict(zip(table.columns, row.cells, strict=True))
        drawn.add_row(_make_plain(row.title), *(_write_cell(cells[column]) for column in columns))
    return drawn


def _write_cell(cell: tables.Cell) -> str:
    if cell.summary is None:
        return _make_plain(cell.text)
    return (format_difference if "interval" in cell.summary else format_summary)(cell.summary)


def draw_outcome(results: Record) -> Table:
    """Draw the rows of a study that is no grid: an arm, a metric, and its mean with deviation."""
    table = _begin_table(f"Study {results['study']}", "arm", "metric", "mean ± deviation")
    table.columns[1].justify = "left"
    before = None
    for row in results["rows"]:
        arm = escape(row["arm"]) if row["arm"] != before else ""
        if before is not None and arm:
            table.add_section()
        table.add_row(arm, escape(row["metric"]), format_summary(row, digits=3))
        before = row["arm"]
    return table


def read_speed(arm: Record) -> float:
    """Return the views per second of an arm; older records call them images."""
    return float(arm["views_per_second" if "views_per_second" in arm else "images_per_second"])


def find_bare_speed(group: Record) -> float:
    """Return the views per second of a benchmark group's bare encoder."""
    return read_speed(next(arm for arm in group["arms"] if arm["name"] == "bare encoder"))


def name_group(group: Record) -> str:
    """Name a group of a benchmark."""
    return f"{group['encoder']}, batch {group['batch_size']}, {group['image_size']} px"


def draw_speeds(group: Record) -> Table:
    """Draw the arms of a benchmark with one encoder and batch size."""
    columns = ("views/s", "ms/step", "over bare", "spread", "first step", "memory")
    table = _begin_table(name_group(group), "arm", *columns)
    for arm in group["arms"]:
        table.add_row(
            arm["name"],
            f"{read_speed(arm):,.0f}",
            f"{arm['milliseconds']:.2f}",
            f"{read_speed(arm) / find_bare_speed(group):.3f}",
            f"{arm['spread']:.2f}x",
            f"{arm['first_step_seconds']:.1f} s",
            f"{arm['peak_gigabytes']:.2f} GB" if arm["peak_gigabytes"] else "—",  # on a CPU
        )
    return table
