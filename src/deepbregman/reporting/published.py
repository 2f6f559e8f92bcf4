"""Published values, shown beside ours and never mixed with them.

``published.toml`` holds the paper's tables. A study carries published series of its own, in
``results.json``, shown beside its arms.
"""

import importlib.resources
import tomllib
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import PurePath
from typing import NamedTuple

from deepbregman.runs import Record

from .records import Measure, RunGroup

CAVEAT = (
    "Published figures are transcribed: other code, epochs and choices than the runs here, perhaps "
    "another encoder, mostly one run and no deviation. They are for orientation, not an arm."
)
SIMILAR_DATASETS = {"ham10000": "isic2018"}
"""A dataset, and one of the same kind that the paper has; its values stand beside with a word."""
VOC_TEST = 4952
"""Images in the test split of Pascal VOC 2007."""


class PublishedValue(NamedTuple):
    """One printed value, and what it was printed for."""

    method: str
    value: float
    data: str
    protocol: str
    metric: str
    label: str
    """Label of the table in the paper's source."""
    conditions: str
    variants: Sequence[str]
    """Names of the variants that it may stand beside, such as ``1 % labels, from encoder``."""
    num_subnetworks: int | None = None


class PublishedRow(NamedTuple):
    """The values of one method in one table."""

    method: str
    where: str
    values: tuple[float | None, ...]


@cache
def load_published() -> tuple[PublishedValue, ...]:
    """Return every value, table by table."""
    text = (importlib.resources.files(__package__) / "published.toml").read_text(encoding="utf-8")
    found = []
    for table in tomllib.loads(text)["tables"]:
        names = ("protocol", "variants", "metric", "label", "conditions")
        shared = {name: table.get(name) for name in names}
        for row in table["rows"]:
            for column, value in zip(table["columns"], row["values"], strict=True):
                found.append(PublishedValue(row["method"], value, **{**shared, **column}))
    return tuple(found)


def find_published(measure: Measure, num_subnetworks: Collection[int] = ()) -> list[PublishedValue]:
    """Return the published values of a quantity, for these images or similar ones.

    Args:
        num_subnetworks: of the runs; the table of subnetworks is shown for these only.
    """
    alike = SIMILAR_DATASETS.get(PurePath(measure.data).stem.lower())
    return [
        entry
        if entry.data != alike
        else entry._replace(conditions=f"{alike}, not these images; {entry.conditions}")
        for entry in load_published()
        if (measure.protocol, measure.metric) == (entry.protocol, entry.metric)
        if _is_on(measure, entry.data) or entry.data == alike
        if measure.variant in entry.variants
        if entry.num_subnetworks is None or entry.num_subnetworks in num_subnetworks
    ]


def list_published_rows(
    groups: Sequence[RunGroup], columns: Sequence[Measure]
) -> list[PublishedRow]:
    """Return what the paper printed for these quantities, a row for each method and table."""
    counts = {
        group.config.divergence.num_subnetworks
        for group in groups
        if group.config.divergence.weight
    }
    found: dict[tuple[str, str], dict[int, float]] = {}
    for index, measure in enumerate(columns):
        for entry in find_published(measure, counts):
            count = entry.num_subnetworks
            method = entry.method if count is None else f"{entry.method}, κ = {count}"
            where = f"the paper's {entry.label} ({entry.conditions})"
            found.setdefault((method, where), {})[index] = entry.value
    return [
        PublishedRow(method, where, tuple(values.get(index) for index in range(len(columns))))
        for (method, where), values in found.items()
    ]


def _is_on(measure: Measure, name: str) -> bool:
    """Whether a quantity is of a dataset; for detection any folder of the whole devkit will do."""
    if name == "voc":
        return measure.num_test == VOC_TEST
    return is_dataset(measure.data, name)


def is_dataset(data: str, name: str) -> bool:
    """Whether data is a dataset: by its name, or as a file of it, such as cifar10.npz."""
    return PurePath(data).stem.lower() == name


def is_on_test_images(results: Record) -> bool:
    """Whether a study evaluated on test images; older records call the field ``judge``."""
    return bool(results.get("evaluate_on", results.get("judge", "test")) == "test")


def list_published_series(results: Record) -> list[Record]:
    """Return the published series of a study for the same images and networks."""
    series: list[Record] = results["study"].get("published") or []
    if not is_on_test_images(results):
        return []  # there are no published values for held-out images
    arms = results.get("arms", [])
    return [
        part
        for part in series
        if is_dataset(results["data"], part["data"])
        if part.get("encoder") is None or any(_has_same_encoder(part, arm) for arm in arms)
    ]


def select_series(series: Sequence[Record], metric: str) -> list[Record]:
    """Keep the published series of one quantity, which alone belong on its axis."""
    return [part for part in series if part.get("metric", metric) == metric]


def name_series(part: Record, metric: str) -> str:
    """Name a published series, and its quantity where that is not the study's own metric."""
    other = part.get("metric", metric)
    return f"published: {part['series']}" + f", {other}" * bool(other != metric)


def format_series_value(part: Record, arm: Record) -> str:
    """Write what a published series has for the method and place of an arm; nothing otherwise."""
    value = part["values"].get(str(arm["x"]))
    if value is None or arm["series"] not in part.get("beside", [arm["series"]]):
        return ""
    return f"{value:.1f}" if _has_same_encoder(part, arm) else ""


def _has_same_encoder(part: Record, arm: Record) -> bool:
    return part.get("encoder") in (None, (arm.get("cost") or {}).get("encoder"))
