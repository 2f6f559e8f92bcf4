"""Published series of a grid study: which of them stand beside its arms, and in which rows."""

from deepbregman.runs import Record


def printed_series(results: Record) -> list[Record]:
    """Return the published series on the study's own data; others are no yardstick."""
    series: list[Record] = results["study"].get("published") or []
    return [part for part in series if part["data"] == results["data"]]


def printed_value(part: Record, arm: Record) -> str:
    """Write what was published for the method and place of an arm; nothing beside others.

    Args:
        part: a published series.
        arm: of the results.
    """
    value = part["values"].get(str(arm["x"]))
    if value is None or arm["series"] not in part.get("beside", [arm["series"]]):
        return ""
    return f"{value:.1f}"
