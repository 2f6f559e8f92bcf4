"""Write the tables of records in results/ into the pages that show them.

Run from the root of the project: ``python docs/tables.py``. A page marks the place by the comments
``<!-- table of studies/NAME -->`` and ``<!-- end of table -->``, or names a record of
``benchmarks/methods.py``. ``studies/OLD+NEW`` is one table, with the rows of NEW in place of those
of OLD. Of the study tables, a place names the table and its columns:
``<!-- table of studies/tables cifar10-in-short: simclr, best -->``.
"""

import json
import re
from pathlib import Path

from deepbregman.files import Record
from deepbregman.reporting.grid_tables import MEASURED_NOTE, tabulate_study
from deepbregman.reporting.paper_tables import tabulate_quantities
from deepbregman.reporting.tables import Cell, Row, Table, make_cell, to_markdown
from deepbregman.studies.tables import collect_results

PAGES = Path(__file__).parent
RESULTS = PAGES.parent / "results"
PLACE = re.compile(
    r"(<!-- table of (?P<record>[\w/+-]+)(?: (?P<key>[\w-]+): (?P<columns>.+?))? -->\n)"
    r".*?(<!-- end of table -->)",
    re.DOTALL,
)


def _leave_out_speed(table: Table) -> Table:
    """Leave out the speed of runs that shared a GPU: it says nothing about their methods."""
    kept = [i for i, name in enumerate(table.columns) if not name.startswith("images/s")]
    rows = (row._replace(cells=tuple(row.cells[i] for i in kept)) for row in table.rows)
    columns = tuple(table.columns[i] for i in kept)
    caption = table.caption.replace(f"{MEASURED_NOTE}. ", "")
    return table._replace(columns=columns, rows=tuple(rows), caption=caption)


def _join_rows(tables: list[Table]) -> Table:
    """Return the first table, with rows of later ones in place of those of the same name."""
    first = tables[0]
    rows = {row.name: row for row in first.rows}
    for table in tables[1:]:
        for row in table.rows:
            cells = dict(zip(table.columns, row.cells, strict=True))
            found = tuple(cells.get(name, make_cell(None)) for name in first.columns)
            rows[row.name] = row._replace(cells=found)
    return first._replace(rows=tuple(rows.values()))


def _choose_columns(folder: Path, key: str, columns: list[str]) -> Table:
    """Return columns of a table of the study tables, and of its differences after them."""
    tables = {table.key: table for table in tabulate_quantities(collect_results(folder))}
    first, second = tables[key], tables[f"{key}-differences"]
    places = [(*first.columns, *second.columns).index(name) for name in columns]
    more = {row.name: row.cells for row in second.rows}
    rows = []
    for row in first.rows:
        cells = (*row.cells, *more.get(row.name, (make_cell(None),) * len(second.columns)))
        rows.append(row._replace(cells=tuple(cells[place] for place in places)))
    return first._replace(columns=tuple(columns), rows=tuple(rows), caption="")


def _tabulate_speed(record: Record) -> Table:
    """Return the step of each recipe in a record of ``benchmarks/methods.py``."""
    rows = []
    for group in record["groups"]:
        place = [arm["name"] for arm in group["arms"]].index("step")  # "with divergence" may follow
        references, step = group["arms"][:place], group["arms"][place]
        ratios = [f"{each['milliseconds'] / step['milliseconds']:.2f}" for each in references]
        speed = 1e3 * group["batch_size"] / step["milliseconds"]
        cells = (f"{speed:,.0f}", f"{step['milliseconds']:.1f}", *ratios)
        memory = f"{step['peak_gigabytes']:.1f}"
        texts = (str(group["batch_size"]), *cells, memory)
        rows.append(Row(group["recipe"], tuple(Cell(text=text) for text in texts)))
    over = tuple(f"speed over its {each['name']}" for each in references)
    columns = ("batch", "images/s", "ms a step", *over, "peak memory, GB")
    return Table("speed", "", "recipe", columns, tuple(rows))


def fill(page: str) -> str:
    """Return the text of a page with the tables of today's records."""

    def write(place: re.Match[str]) -> str:
        folder = RESULTS / place["record"]
        if (file := folder.with_suffix(".json")).is_file():
            shown = _tabulate_speed(json.loads(file.read_text()))
        elif place["key"]:
            shown = _choose_columns(folder, place["key"], place["columns"].split(", "))
        else:
            studies = [folder.parent / name for name in folder.name.split("+")]
            found = [json.loads((study / "results.json").read_text()) for study in studies]
            shown = _leave_out_speed(_join_rows([tabulate_study(each, "")[0] for each in found]))
        _, _, table = to_markdown(shown).partition("\n\n")
        return f"{place[1]}\n{table.strip()}\n\n{place[5]}"

    return PLACE.sub(write, page)


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(fill(path.read_text()))
