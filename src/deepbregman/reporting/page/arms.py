"""Run folders as they were left, and the arms they make: runs that differ only by seed."""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from deepbregman.config import Config, fields_of, to_toml
from deepbregman.errors import UserError
from deepbregman.runs import Record, Run

EVALUATION_FIELDS = ("protocol", "variant", "data", "metric", "value")
BUDGET = ("data.", "views.", "encoder.name", "encoder.stem", "training.epochs", "training.batch")
"""Beginnings of the fields in which arms must agree for a fair comparison."""


@dataclass(frozen=True)
class Subject:
    """All that one run folder says."""

    name: str
    path: Path
    config: Config
    metrics: list[Record]
    result: Record
    provenance: Record

    @classmethod
    def read(cls, path: Path) -> "Subject":
        """Read a run folder; nothing in it is computed anew."""
        run = Run.open(path)
        result = run.result()
        for row in result.get("evaluations", []):
            missing = [name for name in EVALUATION_FIELDS if name not in row]
            if missing or not is_number(row["value"]):
                raise UserError(
                    f"{path / 'result.json'} holds an evaluation without a usable "
                    f"{missing[0] if missing else 'value'}: evaluate the run anew"
                )
        name = path.name or path.resolve().name
        return cls(name, path, run.config, run.metrics(), result, run.provenance())

    @property
    def evaluations(self) -> list[Record]:
        """Rows of what the run was judged by."""
        rows: list[Record] = self.result.get("evaluations", [])
        return rows

    @property
    def epochs_done(self) -> int:
        """How many epochs there are metrics of."""
        return int(self.metrics[-1]["epoch"]) if self.metrics else 0

    @property
    def is_finished(self) -> bool:
        """Whether training came to its end."""
        return "pretrain" in self.result or self.supervised is not None

    @property
    def supervised(self) -> str | None:
        """Name the baseline that was trained with labels; None of pretraining."""
        outcome = self.result.get("study")
        if not isinstance(outcome, dict) or not outcome.get("supervised"):
            return None
        return f"Deep Divergence, {outcome.get('form')}, {outcome.get('loss')} (supervised)"

    @property
    def state(self) -> str:
        """Say in words how far the run came."""
        outcome = self.result.get("study")
        if isinstance(outcome, dict) and outcome.get("state") == "diverged":
            return f"diverged after epoch {self.epochs_done}"
        if not self.is_finished:
            return f"unfinished: epoch {self.epochs_done} of {self.config.training.epochs}"
        is_judged = self.evaluations or "quickstart" in self.result or self.supervised
        return "finished" if is_judged else "not evaluated"

    @property
    def seconds(self) -> float | None:
        """Wall time of pretraining; None of a run that has not ended."""
        value = self.result.get("pretrain", {}).get("seconds")
        return value if is_number(value) else None


@dataclass(frozen=True)
class Arm:
    """Runs of one configuration, and the place of their colour."""

    name: str
    runs: tuple[Subject, ...]
    place: int = 0

    @property
    def config(self) -> Config:
        """What the runs have in common; the seed is the first one's."""
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
    def method(self) -> str:
        """Say what is trained, in a few words."""
        divergence, supervised = self.config.divergence, self.runs[0].supervised
        if supervised is not None:
            return f"{supervised}, {divergence.num_subnetworks} subnetworks"
        if divergence.weight == 0.0:
            return "SimCLR: no divergence term"
        if self.config.contrastive.weight == 0.0:
            return f"divergence only, {divergence.num_subnetworks} subnetworks"
        return f"with divergence, {divergence.num_subnetworks} subnetworks"


class Difference(NamedTuple):
    """A field in which arms differ, and the value of each arm."""

    field: str
    values: tuple[str, ...]


class Spread(NamedTuple):
    """A mean over runs with its sample deviation, None of a single run, and their number."""

    mean: float
    deviation: float | None
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Summarise what the runs of an arm measured."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def is_number(value: Any) -> bool:
    """Tell a finite number from everything else that a record may hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def grouped(subjects: Iterable[Subject]) -> list[Arm]:
    """Group runs that differ only by seed, in the order of their first run."""
    groups: dict[str, list[Subject]] = {}
    for subject in distinct(list(subjects)):
        kind = (replace(subject.config, seed=0), subject.supervised)  # a loss is in no field
        groups.setdefault(repr(kind), []).append(subject)
    names = [_common_name([run.name for run in runs]) for runs in groups.values()]
    arms = []
    for place, (name, runs) in enumerate(zip(names, groups.values(), strict=True)):
        unique = name if names.count(name) == 1 else f"{name} ({place + 1})"
        arms.append(Arm(unique, tuple(runs), place))
    return arms


def distinct(subjects: Sequence[Subject]) -> list[Subject]:
    """Leave no two runs of one name: name those by the end of their path that tells them apart."""
    names = [subject.name for subject in subjects]
    named = []
    for subject in subjects:
        parts = subject.path.resolve().parts
        length = 1
        if names.count(subject.name) > 1:
            others = [s.path.resolve().parts for s in subjects if s is not subject]
            while length < len(parts) and any(o[-length:] == parts[-length:] for o in others):
                length += 1
        named.append(replace(subject, name="/".join(parts[-length:])) if length > 1 else subject)
    return named


def _common_name(names: list[str]) -> str:
    """Name an arm by what its runs' names begin with, less what the seed adds."""
    if len(names) == 1:
        return names[0]
    first, last = min(names), max(names)  # whatever these share, all share
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    common = re.sub(r"([-_. ]+(seed|s)?[-_. ]*\d*|seed\d*)$", "", first[:length])
    return common if len(common) > 2 else f"{names[0]} and {len(names) - 1} more"


def fields(config: Config) -> dict[str, Any]:
    """Return every field but the seed by its dotted name."""
    return {name: value for name, value in fields_of(config).items() if name != "seed"}


def differences(arms: Sequence[Arm]) -> list[Difference]:
    """Return the fields in which the arms are not all alike."""
    flat = [fields(arm.config) for arm in arms]
    return [
        Difference(name, tuple(_written(values[name]) for values in flat))
        for name in (flat[0] if flat else {})
        if any(values[name] != flat[0][name] for values in flat)
    ]


def unequal_budget(found: Sequence[Difference]) -> list[str]:
    """Return the fields of a difference that make a comparison unfair."""
    return [difference.field for difference in found if difference.field.startswith(BUDGET)]


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_written(part) for part in value) or "none"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
