"""Folders of runs, as they were left: read, grouped by configuration, and as data frames.

A folder may come from anybody, so links inside it are not followed.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from deepbregman.config import Config, differing_fields, to_toml
from deepbregman.errors import UserError
from deepbregman.files import is_number
from deepbregman.runs import Record, Run
from deepbregman.terminal import count_words

if TYPE_CHECKING:
    import pandas as pd

RUN_FILES = ("config.toml", "metrics.jsonl", "result.json", "provenance.json")
METHOD_NAMES = {"simclr": "SimCLR"}
"""Methods whose name is not written as the configuration writes it."""
BUDGET = (
    *("data.", "views.", "small_views.", "encoder.name", "encoder.stem", "encoder.weights"),
    *("training.epochs", "training.batch"),
)
"""Beginnings of the fields in which groups must agree for a fair comparison."""


def is_finite(value: Any) -> bool:
    """Tell a finite number from everything else that a record may hold."""
    return is_number(value) and math.isfinite(value)


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder that contains a link in place of a file: it may lead to any file."""
    for name in names:
        if (folder / name).is_symlink():
            raise UserError(
                f"{folder / name} is a link, and a report follows none: put the file itself there"
            )


@dataclass(frozen=True)
class RunRecord:
    """The contents of one run folder."""

    name: str
    path: Path
    config: Config
    metrics: list[Record]
    result: Record
    provenance: Record
    evaluations: list[Record]

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Read a run folder; nothing in it is computed again."""
        refuse_links(path, RUN_FILES)
        run = Run.open(path)
        metrics = [row for row in run.metrics() if is_finite(row["epoch"])]
        evaluations = run.evaluations()
        for row in evaluations:
            if row.get("metric") is None or not is_finite(row.get("value")):
                raise UserError(
                    f"{path / 'result.json'} holds an evaluation ({row['protocol']}, "
                    f"{row['variant']}) without a usable metric or value: evaluate the run again"
                )
        name = path.name or path.resolve().name
        return cls(name, path, run.config, metrics, run.result(), run.provenance(), evaluations)

    @property
    def epochs_done(self) -> int:
        """The last epoch that has metrics."""
        return int(self.metrics[-1]["epoch"]) if self.metrics else 0

    @property
    def state(self) -> str:
        """Say how far the run came."""
        if (self.result.get("study") or {}).get("state") == "diverged":
            return f"diverged after epoch {self.epochs_done}"
        if "pretrain" not in self.result:
            return f"unfinished: epoch {self.epochs_done} of {self.config.training.epochs}"
        is_evaluated = self.evaluations or "quickstart" in self.result
        return "finished" if is_evaluated else "not evaluated"

    @property
    def is_complete(self) -> bool:
        """Whether it was trained to its end, evaluated or not."""
        return self.state in ("finished", "not evaluated")

    @property
    def health(self) -> str | None:
        """Say how training went, by the last verdict; None where none was recorded."""
        judged = [row for row in self.metrics if isinstance(row.get("verdict"), str)]
        if not judged:
            return None
        reason = judged[-1].get("reason")
        return f"{judged[-1]['verdict']}" + f" ({reason})" * isinstance(reason, str)

    @property
    def stopped(self) -> str | None:
        """Say why pretraining ended before its last epoch; None where it did not."""
        why = (self.result.get("pretrain") or {}).get("stopped")
        return why if isinstance(why, str) else None

    @property
    def seconds(self) -> float | None:
        """Wall time of pretraining; None of a run that has not ended."""
        value = (self.result.get("pretrain") or {}).get("seconds")
        return value if is_finite(value) else None


@dataclass(frozen=True)
class RunGroup:
    """Runs of one configuration that differ only by seed: what the page calls an arm."""

    name: str
    runs: tuple[RunRecord, ...]
    place: int = 0
    """Position of its colour in the palette."""

    @property
    def config(self) -> Config:
        """The configuration of the runs, with the seed of the first."""
        return self.runs[0].config

    @cached_property
    def toml(self) -> str:
        """The whole configuration."""
        return to_toml(self.config)

    @property
    def seeds(self) -> list[int]:
        """The different seeds."""
        return sorted({run.config.seed for run in self.runs})

    @property
    def size(self) -> str:
        """Say how many runs there are, and if they share seeds."""
        runs, seeds = len(self.runs), len(self.seeds)
        return f"n = {runs}" + (f", of {count_words(seeds, 'seed')}" if seeds < runs else "")

    @property
    def method(self) -> str:
        """Say what is trained, in a few words."""
        divergence = self.config.divergence
        subnetworks = f"{divergence.num_subnetworks} subnetworks"
        name = METHOD_NAMES.get(self.config.objective.name, self.config.objective.name)
        if divergence.weight == 0.0:
            return f"{name}: no divergence term"
        if self.config.objective.weight == 0.0:
            return f"divergence only, {subnetworks}"
        return f"{name} with divergence, {subnetworks}"


def group_runs(runs: Iterable[RunRecord]) -> list[RunGroup]:
    """Group runs that differ only by seed, in the order of their first run."""
    groups: dict[str, list[RunRecord]] = {}
    for run in make_names_unique(list(runs)):
        groups.setdefault(repr(replace(run.config, seed=0)), []).append(run)
    names = [_find_common_name([run.name for run in members]) for members in groups.values()]
    return [
        RunGroup(name if names.count(name) == 1 else f"{name} ({place + 1})", tuple(runs), place)
        for place, (name, runs) in enumerate(zip(names, groups.values(), strict=True))
    ]


def make_names_unique(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Name runs of the same name by enough of the end of their path to be unique."""
    names = tell_apart([run.path.resolve() for run in runs])
    return [
        replace(run, name=name) if "/" in name else run
        for run, name in zip(runs, names, strict=True)
    ]


def tell_apart(paths: Sequence[PurePath]) -> list[str]:
    """Name paths by their last part, or by as many of the last parts as no other path has."""
    names = []
    for path in paths:
        parts, others = path.parts, [other.parts for other in paths if other != path]
        length = 1
        while length < len(parts) and any(o[-length:] == parts[-length:] for o in others):
            length += 1
        names.append("/".join(parts[-length:]))
    return names


def _find_common_name(names: list[str]) -> str:
    """Name a group by what its runs' names begin with, less what the seed adds."""
    if len(names) == 1:
        return names[0]
    shared = os.path.commonprefix(names)  # noqa: RUF071  # of letters, which is meant
    common = re.sub(r"([-_. ]+(seed|s)?[-_. ]*\d*|seed\d*)$", "", shared)
    return common if len(common) > 2 else f"{names[0]} and {len(names) - 1} more"


def find_differences(groups: Sequence[RunGroup]) -> dict[str, tuple[str, ...]]:
    """Return the fields in which groups differ, with the value of each group."""
    found = differing_fields(*(replace(group.config, seed=0) for group in groups)) if groups else {}
    return {name: tuple(map(_format_field, values)) for name, values in found.items()}


def find_unequal_budget(fields: Iterable[str]) -> list[str]:
    """Return those of the differing fields that make a comparison unfair."""
    return [field for field in fields if field.startswith(BUDGET)]


def _format_field(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_field, value)) or "none"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def collect_metrics(groups: Sequence[RunGroup]) -> "pd.DataFrame":
    """Return a row for each run and epoch: ``arm``, ``run``, ``epoch`` and every finite metric."""
    import pandas as pd

    rows = [
        {name: value for name, value in row.items() if is_finite(value)}
        | {"arm": group.name, "run": run.name}
        for group in groups
        for run in group.runs
        for row in run.metrics
    ]
    columns = dict.fromkeys(["arm", "run", "epoch", *(key for row in rows for key in row)])
    return pd.DataFrame(rows, columns=list(columns))


class Measure(NamedTuple):
    """One quantity: rows are pooled over runs only if all of this is the same."""

    data: str
    protocol: str
    variant: str
    metric: str
    num_train: int
    num_test: int
    epochs: int = 0
    """Epochs that the evaluation trains for; 0 if it trains no network."""
    against: str = ""
    """The dataset that it is to be told from, in the protocol ood."""

    @classmethod
    def of(cls, row: Record) -> "Measure":
        """Return the quantity that a row of an evaluation is of."""
        names = row["data"], row["protocol"], row["variant"], row["metric"]
        train, test = (int(row.get(name) or 0) for name in ("num_train", "num_test"))
        details = row.get("details") or {}
        against = str(details.get("against") or "").rstrip("/")
        return cls(*names, train, test, int(details.get("epochs") or 0), against)

    @property
    def title(self) -> str:
        """Protocol, variant and metric, in words."""
        return f"{self.protocol}: {self.variant}" + f" ({self.metric})" * (self.metric != "top1")

    @property
    def sizes(self) -> str:
        """The numbers of images behind it."""
        return f"{self.num_train:,} / {self.num_test:,}"

    def describe_images(self, name: str) -> str:
        """Describe the images that it is measured on, of a dataset of that name."""
        return f"{self.num_test:,} test images of {name}" if self.num_test else name


def list_measures(groups: Sequence[RunGroup]) -> list[Measure]:
    """Return all quantities of the evaluations of any run, in the order of the records."""
    rows = (row for group in groups for run in group.runs for row in run.evaluations)
    return list(dict.fromkeys(Measure.of(row) for row in rows))


def name_datasets(groups: Sequence[RunGroup]) -> dict[str, str]:
    """Name the datasets of some runs and of their evaluations, so that no two have one name."""
    found = [group.config.data.source for group in groups]
    found += [measure.data for measure in list_measures(groups)]
    datasets = list(dict.fromkeys(found))
    names = tell_apart([PurePath(data) for data in datasets])
    return {data: name or data for data, name in zip(datasets, names, strict=True)}


def find_rows(group: RunGroup, measure: Measure) -> list[tuple[RunRecord, Record]]:
    """Return the rows of a group's runs for one quantity."""
    return [
        (run, row) for run in group.runs for row in run.evaluations if Measure.of(row) == measure
    ]


REFERENCES = {"chance": "most frequent class", "raw_pixels": "raw pixels"}
"""Fields of an evaluation's row with what it is compared with, and their names."""


def average_references(groups: Sequence[RunGroup], measure: Measure) -> dict[str, float]:
    """Return what a quantity is compared with: name -> value; older records have nothing."""
    rows = [row for group in groups for _, row in find_rows(group, measure)]
    found = {
        name: [row[field] for row in rows if is_finite(row.get(field))]
        for field, name in REFERENCES.items()
    }
    return {name: sum(values) / len(values) for name, values in found.items() if values}
