"""What a study is: data. No torch here, so that the list of studies is there at once."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console

from deepbregman.errors import UserError, suggest

from .fields import Changes

Judge = Literal["test", "holdout"]
Form = Literal["moment", "max", "smooth"]
"""Of a learned divergence between distributions."""
MetricLoss = Literal["contrastive", "triplet"]
"""With which labels teach it."""
OURS, SIMCLR = "with divergence", "SimCLR"


@dataclass(frozen=True)
class Arm:
    """One configuration of a study: what it changes, and where it stands in the figure."""

    name: str
    """Of its folders and on the command line."""
    changes: Changes
    x: float | str
    """Where it stands on the axis: a number, or words."""
    series: str = OURS
    """The line or group that it belongs to."""
    beyond: bool = False
    """Whether the paper has no such arm."""
    only_if: str | None = None
    """A field without which the arm changes nothing: it is left out where the recipe has 0."""
    supervised: tuple[Form, MetricLoss] | None = None
    """In place of pretraining, Deep Divergence with labels; run only when it is asked for."""


@dataclass(frozen=True)
class Published:
    """Values that somebody printed, to stand beside ours and never to be mixed with them."""

    series: str
    values: Mapping[str, float]
    """x, as text -> accuracy in per cent."""
    data: str
    source: str
    """Where it was printed, and under which conditions."""
    beside: tuple[str, ...] = (OURS,)
    """Series in whose rows of a table it stands: of the same method, or compared with it."""
    metric: str = "linear, cached features"
    """The quantity that it is of."""
    encoder: str | None = None
    """It stands beside arms with this encoder alone; None is any, which the source then names."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for; None is the study's default, or what the study's folder holds."""

    recipe: str | None = None
    recipes: tuple[str, ...] = ()
    unequal: bool = False
    data: str | None = None
    epochs: int | None = None
    changes: Changes = field(default_factory=dict)
    seeds: int | None = None
    only: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    judge: Judge | None = None
    linear_epochs: int | None = None
    keep_checkpoints: bool = False
    trials: int | None = None
    out: Path | None = None
    accelerator: str = "auto"


class Entry(Protocol):
    """What ``deepbregman study NAME`` can run: a file of the catalogue holds one as ``STUDY``."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""

    @property
    def title(self) -> str:
        """What it asks, in a line."""

    def run(self, settings: Settings, console: Console) -> Path:
        """Run it to the end, and return its folder."""


@dataclass(frozen=True)
class Study:
    """A grid: every arm is trained with every seed and judged alike."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    x_label: str
    figure: Literal["line", "bars", "drops", "pairs"]
    """Accuracy over a number; over words; lost against the first arm of each series; or every seed
    of every arm, and its difference to the reference."""
    recipe: str = "paper"
    recipes: tuple[str, ...] = ()
    """Where the arms are whole recipes: which, the reference first; the arms are made of them."""
    field: str | None = None
    """The one field that the arms vary, whose values can then be given anew."""
    reference: str | None = None
    """The arm that the others are seen against."""
    published: tuple[Published, ...] = ()
    note: str = ""
    """What the paper says, and what it leaves open."""

    def run(self, settings: Settings, console: Console) -> Path:
        """Train and judge what is not done yet; return the study's folder."""
        from .grid import run_study

        return run_study(self, settings, console)

    def record(self) -> dict[str, Any]:
        """Return the definition as plain values, for JSON."""
        return dataclasses.asdict(self)

    def with_values(self, values: Sequence[Any]) -> "Study":
        """Replace the values of the one field that the arms vary, keeping the reference."""
        if not values:
            return self
        if self.field is None:
            raise UserError(
                f"study {self.name} takes no --values: its arms are {_names(self)}; choose among "
                "them with --only"
            )
        written = [str(value) for value in values]
        twice = [word for word in written if written.count(word) > 1]
        if twice:
            raise UserError(f"--values names {twice[0]} twice: an arm counts once")
        arms = [arm for arm in self.arms if arm.name == self.reference]
        first = {arm.series: arm for arm in reversed(self.arms) if arm.name != self.reference}
        for series, arm in reversed(first.items()):
            also = dict(arm.changes)
            prefix = arm.name.removesuffix(str(also.pop(self.field)))
            known = {str(a.x) for a in self.arms if a.series == series and not a.beyond}
            known |= {x for part in self.published if series in part.beside for x in part.values}
            arms += [
                dataclasses.replace(
                    new,
                    supervised=arm.supervised,
                    only_if=arm.only_if,
                    beyond=arm.supervised is not None or str(new.x) not in known,
                )
                for new in over(self.field, values, series=series, also=also, prefix=prefix)
            ]
        return dataclasses.replace(self, arms=tuple(arms))

    def chosen(self, only: Sequence[str]) -> tuple[Arm, ...]:
        """Return the arms of these names, which may be patterns, or all that need no labels."""
        names = [arm.name for arm in self.arms]
        for name in only:
            if not fnmatch.filter(names, name):
                raise UserError(
                    f"arm {name!r} of study {self.name} is not one of {_names(self)}"
                    f"{suggest(name, names)}"
                )
        if not only:
            return tuple(arm for arm in self.arms if arm.supervised is None)
        wanted = {name for pattern in only for name in fnmatch.filter(names, pattern)}
        return tuple(arm for arm in self.arms if arm.name in wanted)


@dataclass(frozen=True)
class Search:
    """A Bayesian search over a few fields, judged on held-out training images."""

    name: str
    title: str
    space: tuple[str, ...]
    trials: int
    recipe: str = "paper"
    published: Mapping[str, float] = field(default_factory=dict)
    """Field -> the best value in the paper."""
    published_data: str = ""
    """The images that it was found on; beside others it does not stand."""
    note: str = ""

    def run(self, settings: Settings, console: Console) -> Path:
        """Search until the trials are done; return the folder."""
        from .tuning.search import search_study

        return search_study(self, settings, console)


def over(
    name: str,
    values: Iterable[Any],
    *,
    series: str = OURS,
    also: Changes | None = None,
    prefix: str = "",
    beyond: Iterable[Any] = (),
    only_if: str | None = None,
) -> tuple[Arm, ...]:
    """Make an arm for each value of a field.

    Args:
        name: of the field.
        values: of it.
        series: of the arms.
        also: what every one of them changes.
        prefix: of their names.
        beyond: further values, marked as not the paper's.
        only_if: a field without which the arms are none.
    """
    marked = [(value, False) for value in values] + [(value, True) for value in beyond]
    return tuple(
        Arm(
            f"{prefix}{value}",
            {**(also or {}), name: value},
            value,
            series,
            beyond=is_beyond,
            only_if=only_if,
        )
        for value, is_beyond in marked
    )


def _names(study: Study) -> str:
    return ", ".join(arm.name for arm in study.arms)
