"""Tables of the page as data, written three ways: cells for HTML, CSV and LaTeX."""

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from deepbregman.errors import make_printable
from deepbregman.files import format_csv
from deepbregman.runs import Record
from deepbregman.statistics import Summary, format_seeds, format_signed, summarise
from deepbregman.terminal import count_words, format_duration

from .published import CAVEAT, list_published_rows
from .records import (
    REFERENCES,
    Measure,
    RunGroup,
    average_references,
    find_differences,
    find_rows,
    is_finite,
    list_measures,
    name_datasets,
)

ASCENDING = (
    *("top1", "top5", "balanced", "ap", "map", "recall", "precision", "nmi", "ari", "purity"),
    "auroc",
)
"""Beginnings of the metrics, in small letters, of which more is better."""
LEAST_SEEDS = 3
"""With fewer seeds, no arm is called best."""
REFERENCE_CAPTION = (
    "Most frequent class: always the answer that is right most often in training. Raw pixels: the "
    "same kind of classifier without an encoder, on images averaged to at most 16 px"
)
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{character: f"{{{character}}}" for character in "[*"},  # else arguments of the line's end
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "—": r"\textemdash{}",
    "\N{EN DASH}": r"\textendash{}",
    "\N{MINUS SIGN}": "$-$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "²": "$^2$",
    "κ": r"$\kappa$",
    "λ": r"$\lambda$",
    "σ": r"$\sigma$",  # noqa: RUF001  # Greek, as is meant
    "τ": r"$\tau$",
    "φ": r"$\phi$",
    "ψ": r"$\psi$",
    "Σ": r"$\Sigma$",
}
"""What pdflatex acts on, or lacks; names in other scripts stay, and need LuaLaTeX with a font."""


class Cell(NamedTuple):
    """A cell of a table: a summary, or text."""

    summary: Summary | None = None
    """Mean, deviation and n; with ``interval`` it is a difference of two arms, seed by seed."""
    text: str = ""
    note: str = ""
    """Shown when the pointer rests on the cell."""
    is_best: bool = False
    """Better than every other by more than the deviations."""
    over: str = ""
    """Source of the deviation, if it is not over seeds."""
    of_runs: int = 0
    """Number of runs, if not all of them were measured."""
    is_published: bool = False

    @property
    def mean(self) -> str:
        """The mean, with its sign if it is a difference."""
        assert self.summary is not None
        value = self.summary["mean"]
        return format_signed(value) if "interval" in self.summary else f"{value:.2f}"

    @property
    def deviation(self) -> str:
        """The deviation; nothing of a single value."""
        deviation = None if self.summary is None else self.summary["deviation"]
        return "" if deviation is None else f"± {deviation:.2f}"

    @property
    def bounds(self) -> str:
        """The interval in brackets; nothing without one."""
        ends = None if self.summary is None else self.summary.get("interval")
        return "" if not ends else f"[{', '.join(map(format_signed, ends))}]"

    @property
    def latex(self) -> str:
        """The cell for LaTeX."""
        if self.summary is None:
            words = escape_latex(self.text)
            return rf"\emph{{{words}}}" if words and self.is_published else words
        mean = rf"\mathbf{{{self.mean}}}" if self.is_best else self.mean
        deviation = self.deviation.replace("±", r" \pm")
        bounds = rf"\ {self.bounds}" if self.bounds else ""
        return f"${mean}{deviation}{bounds}$"


class Row(NamedTuple):
    """A line of a table."""

    name: str
    cells: tuple[Cell, ...]
    place: int | None = None
    """Position of the arm's colour in the palette; None for rows that are not arms."""
    is_published: bool = False
    note: str = ""
    marks: tuple[str, ...] = ()
    """Short remarks after the name."""

    @property
    def title(self) -> str:
        """The name and the remarks after it."""
        return " ".join([self.name, *(f"({mark})" for mark in self.marks)])

    @property
    def remarks(self) -> str:
        """The note and the remarks, for the line below the name."""
        return ", ".join(filter(None, [self.note, *self.marks]))


class Table(NamedTuple):
    """A table with a name for its files."""

    key: str
    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    details: tuple[str, ...] = ()
    """A smaller line below each column's name."""

    def format_n(self, cell: Cell) -> str:
        """Write the number of seeds where it is a few but not all; one seed has no deviation."""
        counts = [
            c.summary["n"] for row in self.rows for c in row.cells if c.summary and not c.over
        ]
        n = 1 if cell.summary is None or cell.over else cell.summary["n"]
        return f"(n={n})" if 1 < n < max(counts) else ""


def escape_latex(words: str) -> str:
    """Write words so that LaTeX prints them as they are."""
    plain = make_printable(" ".join(words.split()))
    escaped = "".join(_LATEX.get(character, character) for character in plain)
    return re.sub("-(?=-)", "-{}", escaped)  # two would be joined to a dash


def to_latex(table: Table) -> str:
    """Write a table for ``booktabs``; published rows stand apart, in italics."""
    parts = (part.rstrip(" .") for part in (table.title, table.caption) if part)
    caption = " ".join(part if part.endswith("?") else f"{part}." for part in parts)
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(escape_latex(name) for name in (table.corner, *table.columns)) + r" \\",
        r"\midrule",
    ]
    was_published = False
    for row in table.rows:
        if row.is_published and not was_published and row is not table.rows[0]:
            lines.append(r"\midrule")
        was_published = row.is_published
        name = escape_latex(row.title)
        name = rf"\emph{{{name} (published)}}" if row.is_published else name
        cells = [f"{cell.latex} {table.format_n(cell)}".rstrip() for cell in row.cells]
        lines.append(" & ".join([name, *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def to_markdown(table: Table) -> str:
    """Write a table for Markdown, with its title and caption; published values in italics."""

    def protect(words: str) -> str:
        return " ".join(words.split()).replace("|", "\\|")

    def write(cell: Cell, is_published: bool) -> str:
        words = cell.text
        if cell.summary is not None:
            words = " ".join(filter(None, (cell.mean, cell.deviation, cell.bounds)))
            words = f"**{words}**" if cell.is_best else words
            words = f"{words} {table.format_n(cell)}".rstrip()
        return f"*{words}*" if words and (is_published or cell.is_published) else words

    lines = [
        [table.corner, *table.columns],
        ["---", *("---:" for _ in table.columns)],
        *([row.title, *(write(c, row.is_published) for c in row.cells)] for row in table.rows),
    ]
    body = "\n".join("| " + " | ".join(map(protect, line)) + " |" for line in lines)
    caption = f"\n\n{table.caption.rstrip('.')}." if table.caption else ""
    return f"### {table.title}\n\n{body}{caption}"


def to_csv(table: Table) -> str:
    """Write a table with a line for each cell: nothing has to be parsed out of ``a ± b``."""
    cells = [cell for row in table.rows for cell in row.cells]
    if not any(cell.summary for cell in cells):
        texts = [
            {table.corner: row.name}
            | {name: cell.text for name, cell in zip(table.columns, row.cells, strict=True)}
            for row in table.rows
        ]
        return format_csv(texts)
    has_intervals = any("interval" in cell.summary for cell in cells if cell.summary)
    lines: list[Record] = []
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            if cell.summary is None and not cell.text:
                continue
            found: Summary = cell.summary or {"mean": cell.text, "deviation": None, "n": ""}
            low, high = found.get("interval") or ("", "")
            lines.append(
                {
                    table.corner: row.name,
                    "measure": column,
                    "value": found["mean"],
                    "deviation": found["deviation"],
                    "n": found["n"],
                    "deviation over": "" if found["deviation"] is None else cell.over or "seeds",
                    "published": "yes" if row.is_published or cell.is_published else "no",
                    "clearly best": "yes" if cell.is_best else "no",
                    "note": row.note if row.is_published else cell.note,
                    **({"95 % from": low, "95 % to": high} if has_intervals else {}),
                }
            )
    return format_csv(lines)


def make_cell(summary: Summary | None) -> Cell:
    """Return the cell of a mean or a difference in a study's record; a dash if there is none."""
    if not summary:
        return Cell(text="—", note="not measured")
    return Cell(choose_interval(summary) if "interval" in summary else summary)


def choose_interval(difference: Summary) -> Summary:
    """Return a paired summary; its interval is over seeds and test images if that is known."""
    interval = difference.get("over_images") or difference["interval"]
    kept = {key: difference[key] for key in ("mean", "deviation", "n")}
    return {**kept, "interval": interval}


def format_value(value: object) -> str:
    """Write any value of a record in a few words."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def name_measures(columns: Sequence[Measure]) -> list[str]:
    """Name quantities; those of one name by images, epochs or what they are against as well."""
    names = [measure.title for measure in columns]
    names = _append(names, [f" [{measure.sizes}]" for measure in columns])
    names = _append(names, [f" against {m.against}" if m.against else "" for m in columns])
    return _append(names, [f", {count_words(measure.epochs, 'epoch')}" for measure in columns])


def _append(names: Sequence[str], endings: Sequence[str]) -> list[str]:
    """Append the endings to names that stand twice."""
    pairs = zip(names, endings, strict=True)
    return [name if names.count(name) == 1 else name + ending for name, ending in pairs]


def count_seeds(rows: Sequence[Row]) -> str:
    """Write the number of seeds behind rows; where it differs, one seed has no deviation."""
    cells = [cell for row in rows for cell in row.cells]
    return format_seeds(cell.summary["n"] for cell in cells if cell.summary and not cell.over)


def summarise_measure(group: RunGroup, measure: Measure) -> Cell:
    """Summarise one quantity over the runs of a group."""
    found = find_rows(group, measure)
    if not found:
        return make_cell(None)
    notes = [f"{run.name}: {row['value']:.2f}" for run, row in found]
    early = [row for _, row in found if (row.get("epoch") or 0) < (row.get("epochs") or 0)]
    if early:
        notes.append(f"of an encoder saved at epoch {early[0]['epoch']} of {early[0]['epochs']}")
    over, summary = "", summarise([row["value"] for _, row in found])
    only = found[0][1]
    if len(found) == 1 and is_finite(only.get("deviation")):
        deviation, n = only["deviation"], int(only.get("n") or 1)
        summary = {"mean": only["value"], "deviation": deviation, "n": n}
        over = "repetitions of the evaluation of one run"
    missing = len(group.runs) if len(found) < len(group.runs) else 0
    return Cell(summary, note="; ".join(notes), over=over, of_runs=missing)


def mark_best(cells: Sequence[Cell], num_seeds: Sequence[int]) -> list[Cell]:
    """Mark the largest mean, if it leads every other by more than the two deviations together."""
    known = [(index, cell.summary) for index, cell in enumerate(cells) if cell.summary is not None]
    if len(known) < 2:
        return list(cells)
    best, ahead = max(known, key=lambda pair: pair[1]["mean"])

    def is_clear(index: int, behind: Summary) -> bool:
        if min(num_seeds[index], num_seeds[best]) < LEAST_SEEDS:
            return False
        if ahead["deviation"] is None or behind["deviation"] is None:
            return False
        return bool(ahead["mean"] - behind["mean"] > ahead["deviation"] + behind["deviation"])

    is_best = all(is_clear(index, behind) for index, behind in known if index != best)
    return [cell._replace(is_best=is_best and i == best) for i, cell in enumerate(cells)]


def tabulate_evaluations(groups: Sequence[RunGroup], prefix: str = "") -> list[Table]:
    """Make a table for each source of data: arms in rows, quantities in columns."""
    tables = []
    found, names = list_measures(groups), name_datasets(groups)
    for data in dict.fromkeys(measure.data for measure in found):
        columns = [measure for measure in found if measure.data == data]
        by_column = []
        for measure in columns:
            cells = [summarise_measure(group, measure) for group in groups]
            more_is_better = measure.metric.lower().startswith(ASCENDING)
            found_rows = [find_rows(group, measure) for group in groups]
            num_seeds = [len({run.config.seed for run, _ in rows}) for rows in found_rows]
            by_column.append(mark_best(cells, num_seeds) if more_is_better else cells)
        rows = [
            Row(group.name, tuple(cells), group.place, note=group.size)
            for group, cells in zip(groups, zip(*by_column, strict=True), strict=True)
        ]
        references = [average_references(groups, measure) for measure in columns]
        below = [
            Row(name, tuple(Cell(text=f"{v[name]:.2f}" if name in v else "") for v in references))
            for name in REFERENCES.values()
            if any(name in values for values in references)
        ]
        published = [
            Row(
                row.method,
                tuple(Cell(text="" if v is None else f"{v:.1f}") for v in row.values),
                is_published=True,
                note=row.where,
            )
            for row in list_published_rows(groups, columns)
        ]
        words = "Per cent; mean ± sample deviation over seeds"
        tables.append(
            Table(
                key=f"{prefix}evaluations-{names[data]}",
                title=f"Evaluations on {names[data]}",
                corner="arm",
                columns=tuple(name_measures(columns)),
                rows=(*rows, *below, *published),
                caption=", ".join(filter(None, (words, count_seeds(rows))))
                + f". {REFERENCE_CAPTION}" * bool(below)
                + f". {CAVEAT}" * bool(published),
                details=tuple(measure.sizes for measure in columns),
            )
        )
    return tables


def tabulate_fields(groups: Sequence[RunGroup], prefix: str) -> Table | None:
    """Make a table of the fields in which arms differ; None where there are none."""
    rows = [
        Row(field, tuple(Cell(text=value) for value in values))
        for field, values in find_differences(groups).items()
    ]
    columns = tuple(group.name for group in groups)
    caption = "Only fields that differ; everything else is the same in all arms"
    table = Table(f"{prefix}fields", "Fields that differ", "field", columns, tuple(rows), caption)
    return table if rows else None


def tabulate_provenance(groups: Sequence[RunGroup], prefix: str) -> Table:
    """Say where every run came from."""
    names = ("arm", "seed", "state", "started", "training took", "device", "commit")
    columns = (*names, "versions", "resumed", "command")
    rows = []
    runs = {run.path: (group, run) for group in reversed(groups) for run in reversed(group.runs)}
    for group, run in reversed(runs.values()):
        record = run.provenance
        versions = record.get("versions") or {}
        resumed = record.get("resumed") or []
        commit = str(record.get("commit") or "unknown")
        cells = (
            Cell(text=group.name),
            Cell(text=str(run.config.seed)),
            Cell(text=run.state),
            Cell(text=str(record.get("started") or "unknown")),
            Cell(text="—" if run.seconds is None else format_duration(run.seconds)),
            Cell(text=str(record.get("device") or "unknown"), note=str(record.get("platform", ""))),
            Cell(text=commit[:10] + "-dirty" * commit.endswith("-dirty"), note=commit),
            Cell(text=", ".join(f"{name} {version}" for name, version in versions.items())),
            Cell(
                text=count_words(len(resumed), "time") if resumed else "no",
                note="; ".join(f"{r.get('started')} on {r.get('device')}" for r in resumed),
            ),
            Cell(text=shlex.join(str(word) for word in record.get("command") or [])),
        )
        rows.append(Row(run.name, cells, group.place))
    title = "Where the numbers come from"
    return Table(f"{prefix}provenance", title, "run", columns, tuple(rows))
