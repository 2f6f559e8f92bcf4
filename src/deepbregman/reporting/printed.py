"""Published series of a grid study: which of them stand beside its arms, and in which rows."""

from collections.abc import Sequence
from pathlib import PurePath

from deepbregman.runs import Record


def are_images_of(data: str, name: str) -> bool:
    """Tell whether images are a data set: by its name, or as a file of it, such as cifar10.npz."""
    return PurePath(data).stem.lower() == name


def printed_series(results: Record) -> list[Record]:
    """Return the published series of the same images and networks; others are no yardstick."""
    series: list[Record] = results["study"].get("published") or []
    if results.get("judge", "test") != "test":
        return []  # nobody has published of the images that are held out here
    arms = results.get("arms", [])
    return [
        part
        for part in series
        if are_images_of(results["data"], part["data"])
        if part.get("encoder") is None or any(_same_encoder(part, arm) for arm in arms)
    ]


def of_metric(printed: Sequence[Record], metric: str) -> list[Record]:
    """Keep the published series of one quantity, which alone belong on its axis."""
    return [part for part in printed if part.get("metric", metric) == metric]


def printed_title(part: Record, metric: str) -> str:
    """Name a published series, and its quantity where that is not the study's own.

    Args:
        part: a published series.
        metric: that the study is judged by.
    """
    of_other = part.get("metric", metric)
    return f"published: {part['series']}" + f", {of_other}" * bool(of_other != metric)


def printed_value(part: Record, arm: Record) -> str:
    """Write what was published for the method and place of an arm; nothing beside others.

    Args:
        part: a published series.
        arm: of the results.
    """
    value = part["values"].get(str(arm["x"]))
    if value is None or arm["series"] not in part.get("beside", [arm["series"]]):
        return ""
    return f"{value:.1f}" if _same_encoder(part, arm) else ""


def _same_encoder(part: Record, arm: Record) -> bool:
    return part.get("encoder") in (None, (arm.get("cost") or {}).get("encoder"))
