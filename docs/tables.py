"""Write the tables of records in results/ into the pages that show them.

Run from the root of the project: ``python docs/tables.py``. A page marks the place by the comments
``<!-- table of studies/NAME -->`` and ``<!-- end of table -->``.
"""

import json
import re
from pathlib import Path

from deepbregman.reporting.study_tables import MEASURED_NOTE, tabulate_study
from deepbregman.reporting.tables import Table, to_markdown

PAGES = Path(__file__).parent
RESULTS = PAGES.parent / "results"
PLACE = re.compile(
    r"(<!-- table of (?P<record>[\w/-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL
)


def _leave_out_speed(table: Table) -> Table:
    """Leave out the speed of runs that shared a GPU: it says nothing about their methods."""
    kept = [i for i, name in enumerate(table.columns) if not name.startswith("images/s")]
    rows = (row._replace(cells=tuple(row.cells[i] for i in kept)) for row in table.rows)
    columns = tuple(table.columns[i] for i in kept)
    caption = table.caption.replace(f"{MEASURED_NOTE}. ", "")
    return table._replace(columns=columns, rows=tuple(rows), caption=caption)


def fill(page: str) -> str:
    """Return the text of a page with the tables of today's records."""

    def write(place: re.Match[str]) -> str:
        results = json.loads((RESULTS / place["record"] / "results.json").read_text())
        shown = _leave_out_speed(tabulate_study(results, "")[0])
        _, _, table = to_markdown(shown).partition("\n\n")
        return f"{place[1]}\n{table}\n\n{place[3]}"

    return PLACE.sub(write, page)


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(fill(path.read_text()))
