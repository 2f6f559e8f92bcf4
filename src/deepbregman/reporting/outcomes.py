"""The rows of a study that computes and draws, as a table."""

from rich.markup import escape
from rich.table import Table

from deepbregman.runs import Record

from .summaries import spread


def outcome_table(results: Record) -> Table:
    """Draw the rows of a study: an arm, a metric, and its mean with deviation."""
    table = Table(title=escape(f"Study {results['study']}"), title_justify="left")
    for name in ("arm", "metric"):
        table.add_column(name)
    table.add_column("mean ± deviation", justify="right")
    before = None
    for row in results["rows"]:
        arm = escape(row["arm"]) if row["arm"] != before else ""
        if before is not None and arm:
            table.add_section()
        table.add_row(arm, escape(row["metric"]), spread(row, digits=3))
        before = row["arm"]
    return table
