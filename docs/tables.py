"""Write the tables of records in results/ into the pages that show them.

Run from the root of the project: ``python docs/tables.py``. A page marks the place by the comments
``<!-- table of studies/NAME -->`` and ``<!-- end of table -->``.
"""

import json
import re
from pathlib import Path

from deepbregman.reporting.studies import tabulate_study
from deepbregman.reporting.tables import to_markdown

PAGES = Path(__file__).parent
RESULTS = PAGES.parent / "results"
PLACE = re.compile(
    r"(<!-- table of (?P<record>[\w/-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL
)


def fill(page: str) -> str:
    """Return the text of a page with the tables of today's records."""

    def write(place: re.Match[str]) -> str:
        results = json.loads((RESULTS / place["record"] / "results.json").read_text())
        _, _, table = to_markdown(tabulate_study(results, "")[0]).partition("\n\n")
        return f"{place[1]}\n{table}\n\n{place[3]}"

    return PLACE.sub(write, page)


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(fill(path.read_text()))
