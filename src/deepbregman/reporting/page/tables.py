"""Tables as data, written three ways: cells for the page, CSV and LaTeX."""

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

from deepbregman.reporting.summaries import signed

from .arms import Spread

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "κ": r"$\kappa$",
    "—": "---",
}


class Cell(NamedTuple):
    """What stands in a table: a number with what is known about it, or words."""

    spread: Spread | None = None
    text: str = ""
    note: str = ""
    """Shown when the pointer rests on the cell."""
    best: bool = False
    """Better than every other by more than the deviations."""
    over: str = ""
    """What the deviation is over, where it is not over seeds."""
    of_runs: int = 0
    """How many runs there are, where not all of them were measured."""
    is_published: bool = False
    """Whether somebody printed it, and nobody here measured it."""
    is_difference: bool = False
    """Whether it is one of two arms, seed by seed."""
    interval: tuple[float, float] | None = None
    """In which a mean difference lies with 95 % confidence."""

    @property
    def mean(self) -> str:
        """The mean of the cell's spread, with its sign if that means anything."""
        assert self.spread is not None
        value = self.spread.mean
        return signed(value) if self.is_difference else f"{value:.2f}"

    @property
    def bounds(self) -> str:
        """The interval in brackets; nothing without one."""
        return "" if self.interval is None else f"[{', '.join(map(signed, self.interval))}]"

    @property
    def shown(self) -> str:
        """The cell in plain words."""
        if self.spread is None:
            return self.text
        deviation = self.spread.deviation
        words = [self.mean, "" if deviation is None else f"± {deviation:.2f}", self.bounds]
        return " ".join(word for word in words if word)

    @property
    def latex(self) -> str:
        """The cell for LaTeX."""
        if self.spread is None:
            return escaped(self.text)
        mean, deviation = self.mean, self.spread.deviation
        pm = "" if deviation is None else rf" \pm {deviation:.2f}"
        bounds = f"\\ {self.bounds}" * bool(self.interval)
        return rf"$\mathbf{{{mean}}}{pm}{bounds}$" if self.best else f"${mean}{pm}{bounds}$"


class Row(NamedTuple):
    """A line of a table."""

    name: str
    cells: tuple[Cell, ...]
    place: int | None = None
    """Of the arm's colour; None of what is no arm of ours."""
    is_published: bool = False
    note: str = ""


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


def escaped(words: str) -> str:
    """Write words so that LaTeX prints them as they are."""
    return "".join(_LATEX.get(character, character) for character in " ".join(words.split()))


def to_latex(table: Table) -> str:
    """Write a table for ``booktabs``; published rows stand apart, in italics."""
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(f'{table.title}. {table.caption}'.rstrip(' .') + '.')}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(escaped(name) for name in (table.corner, *table.columns)) + r" \\",
        r"\midrule",
    ]
    was_published = False
    for row in table.rows:
        if row.is_published and not was_published and row is not table.rows[0]:
            lines.append(r"\midrule")
        was_published = row.is_published
        name = escaped(row.name)
        name = rf"\emph{{{name} (published)}}" if row.is_published else name
        lines.append(" & ".join([name, *(cell.latex for cell in row.cells)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def to_csv(table: Table) -> str:
    """Write a table with a line for each cell: nothing has to be parsed out of ``a ± b``."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    if not any(cell.spread for row in table.rows for cell in row.cells):
        writer.writerow([table.corner, *table.columns])
        writer.writerows([row.name, *(cell.text for cell in row.cells)] for row in table.rows)
        return text.getvalue()
    header = ("value", "deviation", "n", "deviation over", "published", "clearly best", "note")
    with_bounds = any(cell.interval for row in table.rows for cell in row.cells)
    bounds = ("95 % from", "95 % to") if with_bounds else ()
    writer.writerow([table.corner, "measure", *header, *bounds])
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            if cell.spread is not None or cell.text:
                ends = cell.interval or ("", "")
                writer.writerow([row.name, column, *_flat(cell, row), *ends[: len(bounds)]])
    return text.getvalue()


def _flat(cell: Cell, row: Row) -> Sequence[object]:
    printed = row.is_published or cell.is_published
    flags = ("yes" if printed else "no", "yes" if cell.best else "no")
    note = row.note if row.is_published else cell.note
    if cell.spread is None:
        return (cell.text, "", "", "", *flags, note)
    mean, deviation, n = cell.spread
    over = "" if deviation is None else cell.over or "seeds"
    return (repr(mean), "" if deviation is None else repr(deviation), n, over, *flags, note)
