"""What a study is: data. No torch here, so that the list of studies is there at once."""

import dataclasses
import fnmatch
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from rich.console import Console

from deepbregman.config import OPTIONAL, Config, differing_fields, fields_of
from deepbregman.errors import UserError, suggest

Changes = Mapping[str, Any]
"""Fields of the configuration by their dotted names, and the value of each."""
Judge = Literal["test", "holdout"]
Form = Literal["moment", "max", "smooth"]
"""Of a learned divergence between distributions."""
MetricLoss = Literal["contrastive", "triplet"]
"""Of a network that is trained with labels."""
OURS, SIMCLR = "with divergence", "SimCLR"
HOLDOUT = 0.1
"""Share of the training images to judge on where the recipe holds none out."""
IMAGES = ("data.source", "data.root", "data.skip_unreadable")
"""Fields that say which images there are; recipes that are compared have the same."""
BUDGET = ("encoder.name", "encoder.stem", "data.image_size", "data.holdout")
"""Fields in which recipes of an equal budget agree, beside the number of views that they see."""


@dataclass(frozen=True)
class Arm:
    """One configuration of a study: what it changes, and where it stands in the figure."""

    name: str
    """Of its folders and on the command line."""
    changes: Changes
    x: float | str
    """Its place on the axis: a number, or words."""
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
    encoder: str | None = None
    """It stands beside arms with this encoder alone; None is any, which the source then names."""


@dataclass(frozen=True)
class StudyOptions:
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


class StudyResult(NamedTuple):
    """What a study or a search came to."""

    folder: Path
    results: dict[str, Any]
    """What its ``results.json`` or ``trials.json`` holds."""


class Entry(Protocol):
    """What ``deepbregman study NAME`` can run: a file of the catalogue holds one as ``STUDY``."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def title(self) -> str:
        """What it asks, in a line."""

    def run(self, options: StudyOptions, console: Console) -> StudyResult:
        """Run it to the end."""


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
    """The arm with which the others are compared."""
    published: tuple[Published, ...] = ()
    note: str = ""
    """What the paper says, and what it leaves open."""

    def run(self, options: StudyOptions, console: Console) -> StudyResult:
        """Train and judge what is not done yet."""
        from .grid_plan import plan_study

        plan_study(self, options)  # it takes seconds to load torch: refuse first
        from .grid import run_study

        return run_study(self, options, console)

    def with_values(self, values: Sequence[Any]) -> "Study":
        """Replace the values of the one field that the arms vary, keeping the reference."""
        if not values:
            return self
        if self.field is None:
            raise UserError(
                f"study {self.name} takes no --values: its arms are {self._names()}; choose among "
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
                for new in arms_over(self.field, values, series=series, also=also, prefix=prefix)
            ]
        return dataclasses.replace(self, arms=tuple(arms))

    def with_recipes(self, configs: Mapping[str, Config]) -> "Study":
        """Make the arms of a study that compares recipes.

        The first recipe is the reference; an arm changes all in which its recipe differs from it.
        """
        reference, base = next(iter(configs.items()))
        arms: list[Arm] = []
        for name, config in configs.items():
            mine, differing = fields_of(config), differing_fields(base, config)
            changes = {
                field: mine[field] for field in differing if field in mine and field != "seed"
            }
            changes |= {
                table: None
                for table in OPTIONAL
                if getattr(config, table) is None and getattr(base, table) is not None
            }
            twin = next((arm.name for arm in arms if arm.changes == changes), None)
            if twin is not None:
                raise UserError(
                    f"recipes {twin} and {name} come to the same configuration: there is nothing "
                    "to compare; leave one of them out"
                )
            series = SIMCLR if config.divergence.weight == 0.0 else OURS
            arms.append(Arm(name, changes, name, series))
        names = tuple(configs)
        return dataclasses.replace(self, arms=tuple(arms), recipes=names, reference=reference)

    def choose_arms(self, only: Sequence[str]) -> tuple[Arm, ...]:
        """Return the arms of these names, which may be patterns, or all that need no labels."""
        names = [arm.name for arm in self.arms]
        for name in only:
            if not fnmatch.filter(names, name):
                raise UserError(
                    f"arm {name!r} of study {self.name} is not one of {self._names()}"
                    f"{suggest(name, names)}"
                )
        if not only:
            return tuple(arm for arm in self.arms if arm.supervised is None)
        wanted = {name for pattern in only for name in fnmatch.filter(names, pattern)}
        return tuple(arm for arm in self.arms if arm.name in wanted)

    def _names(self) -> str:
        return ", ".join(arm.name for arm in self.arms)


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

    def run(self, options: StudyOptions, console: Console) -> StudyResult:
        """Search until the trials are done."""
        from .search_plan import check_search, search_of_catalogue

        asked = search_of_catalogue(self, options)
        check_search(asked)  # it takes seconds to load torch: refuse first
        from .tuning import run_search

        return run_search(asked, console)


def arms_over(
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
        also: what every one of them changes.
        beyond: further values, which the paper does not have.
        only_if: a field; where the recipe has 0 for it, the arms are left out.
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


def read_value(text: str) -> Any:
    """Read a value as TOML would: a number, true, a list, quoted text; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_changes(words: Iterable[str]) -> dict[str, Any]:
    """Read ``field=value`` words."""
    changes = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name or not text:
            raise UserError(f"--set {word!r}: write it as field=value, such as optimiser.name=lars")
        changes[name] = read_value(text)
    return changes


def join_changes(data: str | None, epochs: int | None, changes: Changes) -> dict[str, Any]:
    """Return all fields that the user sets, by ``--data``, ``--epochs`` and ``--set``."""
    given: dict[str, Any] = {}
    for option, name, value in (
        ("data", "data.source", data),
        ("epochs", "training.epochs", epochs),
    ):
        if value is None:
            continue
        if changes.get(name, value) != value:
            raise UserError(
                f"--{option} {value} and --set {name}={changes[name]} contradict each other: leave "
                "one of them out"
            )
        given[name] = value
    return {**given, **changes}


def describe_differences(before: Config, after: Config) -> str:
    """Name every field in which a stored configuration and a new one differ; empty for none."""
    return "; ".join(
        f"{name} is {old!r} there, {new!r} here"
        for name, (old, new) in differing_fields(before, after).items()
    )


def check_terms(config: Config, fields: Iterable[str], what: str) -> None:
    """Refuse to vary fields of a loss term that is off: every configuration would train the same.

    Args:
        fields: by their dotted names; a section alone stands for the whole term.
    """
    values = fields_of(config)
    for name in fields:
        section, _, key = name.partition(".")
        if key != "weight" and values.get(f"{section}.weight") == 0.0:
            raise UserError(
                f"{what} needs the {section} term for {name}, but {section}.weight is 0 in this "
                "recipe, so that nothing would differ: choose a recipe in which it is above 0, "
                f"such as best, or give --set {section}.weight=1"
            )


def check_arms(study: Study, arms: Iterable[Arm], base: Config) -> None:
    """Refuse arms that vary a loss term, or stand for one, that the recipe has switched off."""
    for arm in arms:
        if study.recipes or arm.supervised is not None or "divergence.weight" in arm.changes:
            continue
        needed = [*arm.changes, *(["divergence"] if arm.series == OURS else [])]
        check_terms(base, needed, f"arm {arm.name} of study {study.name}")


def name_arms(recipes: Sequence[str]) -> list[str]:
    """Name an arm for each recipe: by itself, or by its file."""
    names = [Path(recipe).stem for recipe in recipes]
    if len(names) < 2:
        raise UserError(
            f"--recipes {' '.join(recipes)}: there must be at least 2 to compare, the reference "
            "first, such as --recipes simclr best"
        )
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"--recipes names {name} twice: arms are called after their recipe; rename the file"
            )
    return names


def find_unequal_budget(configs: Mapping[str, Config]) -> list[str]:
    """Say in which ways recipes do not spend alike; nothing where they do.

    Samples in a step may differ: with more of them a step costs more, and there are fewer steps.

    Raises:
        UserError: When they are not of the same images, which makes no comparison at all.
    """
    differing = differing_fields(*configs.values())

    def describe(names: Sequence[str]) -> list[str]:
        return [
            f"{name} is "
            + ", ".join(
                f"{value!r} in {arm}" for arm, value in zip(configs, differing[name], strict=True)
            )
            for name in names
            if name in differing
        ]

    other_images = describe(IMAGES)
    if other_images:
        raise UserError(
            f"the recipes are of different images ({'; '.join(other_images)}): give all of them "
            "the same with --data NAME, or with --set FIELD=VALUE"
        )
    found = describe(BUDGET)
    sides = {name: config.view_size for name, config in configs.items()}
    if len(set(sides.values())) > 1 and "data.image_size" not in differing:
        words = [f"{side} px in {name}" for name, side in sides.items()]
        found.append(f"views are of {', '.join(words)}")
    seen = {
        name: (config.training.epochs, config.views.num_views) for name, config in configs.items()
    }
    if len({epochs * views for epochs, views in seen.values()}) > 1:
        words = [f"{e} x {v} = {e * v} in {name}" for name, (e, v) in seen.items()]
        found.append(f"training.epochs x views.num_views is {', '.join(words)}")
    return found


def check_budget(configs: Mapping[str, Config], *, unequal: bool) -> list[str]:
    """Refuse recipes that do not spend alike, unless that is allowed; return the differences."""
    found = find_unequal_budget(configs)
    if found and not unequal:
        raise UserError(
            f"the recipes do not spend alike ({'; '.join(found)}): make them equal, in the recipes "
            "or with --set FIELD=VALUE for all, or compare them as they are with --unequal, which "
            "the results then say"
        )
    return found
