"""The definition of a study, as data. Needs no torch, so the list of studies appears at once."""

import dataclasses
import fnmatch
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from deepbregman.config import (
    OPTIONAL,
    Config,
    differing_fields,
    fields_of,
    load_recipe,
    override,
)
from deepbregman.errors import UserError, suggest
from deepbregman.reporting.grid_charts import CONTROLS, MANY_RECIPES, OURS
from deepbregman.terminal import MaybeNumber, MaybePath, MaybeText, join_words

Changes = Mapping[str, Any]
"""Fields of the configuration by their dotted names, and the value of each."""
EvaluateOn = Literal["test", "holdout"]
"""Images that a study evaluates on: the test images, or a part of the training images."""
SIMCLR, ALONE = "SimCLR", "alone"
PLUS_DIVERGENCE = "+divergence"
"""Ends the name of an arm that is a recipe with the divergence."""
WITHOUT, CONTROL, BOTH = "-without", "-control", "-both"
ENDINGS: Mapping[str, Changes] = {
    WITHOUT: {"divergence.weight": 0.0},
    CONTROL: {"divergence.weight": 0.0, "divergence.info_nce": 1.0},
    BOTH: {"divergence.info_nce": 1.0},
}
"""Endings of the name of a recipe that make another arm of it: no divergence, InfoNCE to the same
teacher and bank in its place, or both terms."""
HOLDOUT = 0.1
"""Share of the training images to evaluate on where the recipe holds none out."""
IMAGES = ("data.source", "data.root", "data.skip_unreadable")
"""Fields that choose the images; recipes can be compared only if these are equal."""
OPTION_FIELDS = {
    "data": "data.source",
    "epochs": "training.epochs",
    "image_size": "data.image_size",
}
"""Options of a study that set a field of the configuration."""
BUDGET = ("encoder.name", "encoder.stem", "data.image_size", "data.holdout")
"""Fields that are equal in recipes of an equal budget, besides the number of views they see."""


@dataclass(frozen=True)
class Arm:
    """One configuration of a study: what it changes, and its place in the figure."""

    name: str
    """Name of its folders, and on the command line."""
    changes: Changes
    x: float | str
    """Its place on the axis: a number, or words."""
    series: str = OURS
    """The line or group that it belongs to."""
    beyond: bool = False
    """Whether the paper has no such arm."""
    only_if: str | None = None
    """A field. Where it is 0 in the recipe, the arm would change nothing and is left out."""
    supervised: bool = False
    """Whether it trains with labels; such an arm runs only if the user asks for it."""

    @property
    def folder_name(self) -> str:
        """The name of its folders, before the seed."""
        return re.sub(r"[^\w.-]", "_", self.name)


@dataclass(frozen=True)
class Published:
    """Published values, which stand beside ours and are never mixed with them."""

    series: str
    values: Mapping[str, float]
    """x, as text -> accuracy in per cent."""
    data: str
    source: str
    """Where it was published, and under which conditions."""
    beside: tuple[str, ...] = (OURS,)
    """Series beside whose arms it stands in tables."""
    metric: str = "linear, cached features"
    encoder: str | None = None
    """It stands only beside arms with this encoder; None is any, and the source names it."""


@dataclass(frozen=True)
class StudyOptions:
    """Options of a study. If the study has begun, the defaults are those it was begun with."""

    recipe: MaybeText = None
    """Name of a recipe, or a .toml file. By default the recipe of the study."""
    recipes: tuple[str, ...] = ()
    """For study comparison: two or more recipes or .toml files, the reference first; by default
    simclr best. For study methods and learning-rates: the recipes to use instead of all.
    RECIPE-without has no divergence; RECIPE-control has InfoNCE with the same teacher
    and bank instead; RECIPE-both has both. The endings go with files, too: mine.toml-control."""
    unequal: bool = False
    """For study comparison: allow recipes with unequal budgets. The results name the difference."""
    rates: tuple[Path, ...] = ()
    """For study methods: folders that study learning-rates wrote; each recipe takes its best rate
    from the first folder where it has the same method, optimiser and batch. A rate at which a
    seed diverged is not taken."""
    data: MaybeText = None
    """A labelled dataset instead of the recipe's."""
    epochs: MaybeNumber = None
    """Epochs of pretraining, instead of the recipe's."""
    changes: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = ()
    """Fields to change in every arm, such as training.batch_size=256."""
    seeds: MaybeNumber = None
    """Number of seeds, 3 by default."""
    only: tuple[str, ...] = ()
    """Arms to run, by name or pattern; deepbregman study NAME --help names them. By default all
    that train without labels."""
    values: tuple[str, ...] = ()
    """For a study that varies one field: values to use instead. For study learning-rates: further
    multiples of the rate of each recipe; they can also be added to a study that has begun."""
    evaluate_on: EvaluateOn | None = None
    """Images to evaluate on: test (the default), or holdout, a part of the training images."""
    linear_epochs: MaybeNumber = None
    """Epochs of a second linear classifier, on random crops; by default 0, which trains none."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of every run; by default they are deleted after its evaluation."""
    trials: MaybeNumber = None
    """For study sigma-lambda: number of trials, of all processes together."""
    train: bool = True
    """With --no-train, only write the results, tables and figure of the runs that are in --out."""
    out: MaybePath = None
    """Folder of the study, studies/NAME-RECIPE-DATA by default."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes a GPU if there is one."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search. When it has begun, the default is the value it was begun with."""

    space: tuple[str, ...] = ()
    """Fields and values: field=LOW:HIGH, field=LOW:HIGH:log, or field=A,B,C."""
    trials: MaybeNumber = None
    """Number of trials, of all processes together; 40 by default."""
    data: MaybeText = None
    """A labelled dataset instead of the recipe's."""
    epochs: MaybeNumber = None
    """Epochs of pretraining, instead of the recipe's."""
    changes: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = ()
    """Fields to change in every trial, such as training.batch_size=256."""
    objective: Literal["linear", "knn"] | None = None
    """Accuracy to maximise: linear (the default) or knn."""
    sampler: Literal["gp", "tpe", "random"] | None = None
    """gp (the default): a Gaussian process. tpe: a Parzen estimator, which also learns from pruned
    trials. random: values drawn at random."""
    prune: bool | None = None
    """Stop a trial whose kNN accuracy is below the median of earlier trials; True by default."""
    out: MaybePath = None
    """Folder of the search, studies/tune-RECIPE by default."""
    storage: MaybeText = None
    """Optuna storage URL for workers on several machines; give it in every command of a search."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes a GPU if there is one."""


class StudyResult(NamedTuple):
    """The folder of a study or a search, and its results."""

    folder: Path
    results: dict[str, Any]
    """The contents of its ``results.json`` or ``trials.json``."""


@dataclass(frozen=True)
class Study:
    """A grid: every arm is trained with every seed and evaluated in the same way."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    figure: Literal["line", "bars", "groups", "drops", "pairs", "parts"]
    """line: accuracy over a number. bars: over words. groups: over words, a dot for each series.
    drops: accuracy lost against the first arm of each series. pairs: every seed of every arm, and
    differences to the reference. parts: only these differences, by series."""
    x_label: str = ""
    """Title of the axis that a line goes over; other figures have none."""
    recipe: str = "paper"
    recipes: tuple[str, ...] = ()
    """Names of the recipes, the reference first, if the arms are whole recipes."""
    with_divergence: Changes = dataclasses.field(default_factory=dict)
    """If the arms are whole recipes: changes that add a divergence. Every recipe that has none and
    can have one then has two more arms: with the divergence, and its control, which has InfoNCE to
    the same teacher and bank instead. Empty for no further arms."""
    rate_factors: tuple[float, ...] = ()
    """If the arms are whole recipes: multiples of the learning rate; each is an arm of a recipe."""
    evaluate_on: EvaluateOn = "test"
    seeds: int = 3
    unequal: bool = False
    """Whether recipes of unequal budgets are meant; the results name the difference."""
    field: str | None = None
    """The one field that the arms vary; ``--values`` replaces its values."""
    reference: str | None = None
    published: tuple[Published, ...] = ()
    note: str = ""
    """Remarks on the paper's version of the study."""

    def with_values(self, values: Sequence[Any]) -> "Study":
        """Replace the values of the one field that the arms vary, keeping the reference."""
        if not values:
            return self
        if self.field is None:
            raise UserError(
                f"study {self.name} takes no --values: its arms are {self._names()}; choose among "
                "them with --only"
            )
        distinct = {str(value): value for value in values}
        arms = [arm for arm in self.arms if arm.name == self.reference]
        first: dict[str, Arm] = {}  # of each series
        for arm in self.arms:
            if arm.name != self.reference:
                first.setdefault(arm.series, arm)
        for series, arm in first.items():
            key = self.field.partition(".")[2]  # Deep Divergence has the field in another section
            field = next(name for name in arm.changes if name.partition(".")[2] == key)
            prefix = arm.name.removesuffix(str(arm.changes[field]))
            known = {str(a.x) for a in self.arms if a.series == series and not a.beyond}
            known |= {x for part in self.published if series in part.beside for x in part.values}
            arms += [
                dataclasses.replace(
                    arm,
                    name=f"{prefix}{word}",
                    changes={**arm.changes, field: value},
                    x=value,
                    beyond=arm.supervised or word not in known,
                )
                for word, value in distinct.items()
            ]
        return dataclasses.replace(self, arms=tuple(arms))

    def with_method(self, config: Config) -> "Study":
        """Name arms without the divergence by the recipe's method: it need not be SimCLR."""
        plain = _name_plain_series(config)
        arms = []
        for arm in self.arms:
            if arm.series == SIMCLR:
                name = arm.name.replace("simclr-", f"{plain.lower()}-", 1)
                arm = dataclasses.replace(arm, name=name, series=plain)
            arms.append(arm)
        return dataclasses.replace(self, arms=tuple(arms))

    def with_recipes(self, configs: Mapping[str, Config], values: Sequence[Any] = ()) -> "Study":
        """Make the arms of a study that compares recipes.

        The first recipe is the reference. An arm changes every field that differs from it.

        Args:
            values: further multiples of the learning rates, if the arms are such multiples.
        """
        if self.rate_factors:
            return self._with_rates(configs, values)
        reference, base = next(iter(configs.items()))
        arms = tuple(
            Arm(f"{recipe}{ending}", _list_changes(base, config), recipe, series)
            for recipe, ending, config, series in self._list_forms(configs)
        )
        made = dataclasses.replace(self, arms=arms, recipes=tuple(configs), reference=reference)
        return made.with_values(values)  # it takes none

    def _with_rates(self, configs: Mapping[str, Config], more: Sequence[Any]) -> "Study":
        """Make an arm of every recipe for each multiple of its learning rate."""
        for factor in more:
            if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
                raise UserError(
                    f"--values {factor}: a multiple of the learning rate must be a number above 0, "
                    "such as 0.1"
                )
        factors = tuple(dict.fromkeys([*self.rate_factors, *map(float, more)]))
        base = next(iter(configs.values()))
        arms = []
        for factor in factors:
            for name, config in configs.items():
                rates = config.optimiser.rates
                changed = override(config, {name: rates[name] * factor for name in rates})
                arm = name if factor == 1.0 else f"{name}-rate-x{factor:g}"
                changes = _list_changes(base, changed)
                arms.append(Arm(arm, changes, name, f"rate x {factor:g}"))
        return dataclasses.replace(
            self, arms=tuple(arms), recipes=tuple(configs), rate_factors=factors
        )

    def _list_forms(self, configs: Mapping[str, Config]) -> Iterable[tuple[str, str, Config, str]]:
        """List the forms of each recipe: the ending of the name, configuration and series."""
        for recipe, config in configs.items():
            plain = ALONE if self.with_divergence else _name_plain_series(config)
            divergence = config.divergence
            kind = OURS if divergence.weight else CONTROLS if divergence.is_on else plain
            yield recipe, "", config, kind
            if self.with_divergence and not config.divergence.is_on:
                # A recipe of the user's with one view and no teacher cannot have it.
                with suppress(UserError):
                    yield recipe, PLUS_DIVERGENCE, override(config, self.with_divergence), OURS
                    yield recipe, CONTROL, override(config, ENDINGS[CONTROL]), CONTROLS

    def choose_arms(self, only: Sequence[str]) -> tuple[Arm, ...]:
        """Return the arms that match names or patterns; by default all that need no labels."""
        names = [arm.name for arm in self.arms]
        for name in only:
            if not fnmatch.filter(names, name):
                raise UserError(
                    f"arm {name!r} of study {self.name} is not one of {self._names()}"
                    f"{suggest(name, names)}"
                )
        if not only:
            return tuple(arm for arm in self.arms if not arm.supervised)
        wanted = {name for pattern in only for name in fnmatch.filter(names, pattern)}
        return tuple(arm for arm in self.arms if arm.name in wanted)

    def _names(self) -> str:
        return ", ".join(arm.name for arm in self.arms)


@dataclass(frozen=True)
class Search:
    """A Bayesian search over a few fields, evaluated on held-out training images."""

    name: str
    title: str
    space: tuple[str, ...]
    trials: int
    recipe: str = "paper"
    published: Mapping[str, float] = field(default_factory=dict)
    """Field -> the best value in the paper."""
    published_data: str = ""
    """The images that it was found on; it is shown beside no others."""


def _name_plain_series(config: Config) -> str:
    return SIMCLR if config.objective.name == "simclr" else ALONE


def _list_changes(base: Config, config: Config) -> dict[str, Any]:
    """Return the changes that turn one configuration into another, without the seed.

    Another method begins with its own defaults, so then all fields of the method are listed.
    """
    mine, differing = fields_of(config), set(differing_fields(base, config))
    if "objective.name" in differing:
        differing |= {field for field in mine if field.startswith("objective.")}
    changes = {name: mine[name] for name in mine if name in differing and name != "seed"}
    return changes | {
        table: None
        for table in OPTIONAL
        if getattr(config, table) is None and getattr(base, table) is not None
    }


def make_arms(
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
        beyond: further values, which the paper does not have.
        only_if: a field; where the recipe has 0 for it, the arms are left out.
    """
    marked = [(value, False) for value in values] + [(value, True) for value in beyond]
    return tuple(
        Arm(f"{prefix}{value}", {**(also or {}), name: value}, value, series, is_beyond, only_if)
        for value, is_beyond in marked
    )


def make_arms_with_and_without(
    name: str, values: Iterable[Any] = (), beyond: Iterable[Any] = ()
) -> tuple[Arm, ...]:
    """Make two arms for each value of a field: without the divergence, and with it."""
    also, needed = ENDINGS[WITHOUT], "divergence.weight"
    plain = make_arms(name, values, series=SIMCLR, also=also, prefix="simclr-", beyond=beyond)
    return plain + make_arms(name, values, prefix="divergence-", beyond=beyond, only_if=needed)


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


def join_changes(words: Iterable[str], **options: Any) -> dict[str, Any]:
    """Return all fields that the user sets: by ``--set``, and by the options that have a field."""
    changes, given = read_changes(words), {}
    for name, value in options.items():
        if value is None:
            continue
        key = OPTION_FIELDS[name]
        if changes.get(key, value) != value:
            raise UserError(
                f"--{name.replace('_', '-')} {value} and --set {key}={changes[key]} contradict "
                "each other: leave one of them out"
            )
        given[key] = value
    return {**given, **changes}


def split_ending(arm: str) -> tuple[str, str]:
    """Split an arm into a recipe or a .toml file, and one of the endings or nothing."""
    ending = next((ending for ending in ENDINGS if arm.endswith(ending)), "")
    return arm.removesuffix(ending), ending


def load_arm(arm: str) -> Config:
    """Load a recipe or a .toml file; either may have one of the endings."""
    recipe, ending = split_ending(arm)
    config = load_recipe(recipe)
    try:
        return override(config, ENDINGS.get(ending, {}))
    except UserError as error:
        raise UserError(f"{arm}: {error}") from error


def build_config(
    recipe: str | None, given: Changes, before: Config | None, kept: Changes
) -> Config:
    """Return the configuration of a study: a new recipe with the ``kept`` changes, or as before."""
    if before is None or recipe is not None:
        assert recipe is not None
        before = override(load_arm(recipe), kept)
    return override(before, given)


def hold_out(config: Config) -> Config:
    """Hold out training images to evaluate on, where the recipe holds none out."""
    return override(config, {"data.holdout": config.data.holdout or HOLDOUT})


def describe_differences(
    before: Config, after: Config, counts: Callable[[str], bool] = lambda field: True
) -> str:
    """Name every field that counts and differs in two configurations; empty for none."""
    return "; ".join(
        f"{name} is {old!r} there, {new!r} here"
        for name, (old, new) in differing_fields(before, after).items()
        if counts(name)
    )


def check_same(before: Config | None, config: Config, what: str) -> None:
    """Refuse to continue with another configuration than before."""
    changed = describe_differences(before, config) if before else ""
    if changed:
        raise UserError(
            f"{what} was begun with other settings ({changed}): leave the options out to continue "
            "with those, or choose another folder with --out"
        )


def check_used(config: Config, fields: Iterable[str], what: str) -> None:
    """Refuse to vary fields that training does not use: every arm would train the same."""
    unused = config.unused_fields
    for name in fields:
        if name in unused:
            raise UserError(
                f"{what} varies {name}, which training does not use here, since {unused[name]}: "
                "change that with --set, or choose another recipe"
            )


def check_arms(study: Study, arms: Iterable[Arm], base: Config) -> None:
    """Refuse arms that need the divergence where it is off, or change what training does not use.

    They would all train the same.
    """
    for arm in arms:
        if study.recipes or "divergence.weight" in arm.changes:
            continue
        what = f"arm {arm.name} of study {study.name}"
        needs_it = arm.series == OURS or any(name.startswith("divergence.") for name in arm.changes)
        if needs_it and base.divergence.weight == 0.0:
            raise UserError(
                f"{what} needs the divergence, but divergence.weight is 0 in this recipe: choose a "
                "recipe in which it is above 0, such as best, or give --set divergence.weight=1"
            )
        check_used(override(base, arm.changes), arm.changes, what)


def name_arms(arms: Sequence[str], option: str = "recipes") -> list[str]:
    """Name each arm by its recipe or its file, and its ending."""
    parts = [split_ending(arm) for arm in arms]
    names = [Path(recipe).stem + ending for recipe, ending in parts]
    for name in names:
        same = [arm for arm, other in zip(arms, names, strict=True) if other == name]
        if len(same) > 1:
            raise UserError(
                f"--{option} {' '.join(same)} names {name} twice, and runs are called after it; "
                "leave one out, or rename a file"
            )
    return names


def list_by_value(values: Mapping[str, str]) -> str:
    """Write which recipes have which value; a large group is called "the others"."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    most = max(groups, key=lambda value: len(groups[value]))
    if len(groups[most]) > MANY_RECIPES:
        groups[most] = ["the others"]
        groups = {value: groups[value] for value in groups if value != most} | {most: groups[most]}
    return ", ".join(f"{value} in {join_words(names)}" for value, names in groups.items())


def _describe_small_views(config: Config) -> str:
    views = config.small_views
    if views is None:
        return "0"
    total, side = config.training.epochs * views.num_views, views.side(config.data.image_size)
    return f"{total} of {side} px"


def check_budget(configs: Mapping[str, Config], *, unequal: bool) -> list[str]:
    """Refuse recipes with unequal budgets, unless that is allowed; return the differences.

    The samples in a step may differ: with more of them a step costs more, and there are fewer
    steps. So may the weak views, which pass only forward. Recipes for different images are always
    refused.
    """
    differing = differing_fields(*configs.values())

    def describe(names: Sequence[str]) -> list[str]:
        values = {
            name: dict(zip(configs, map(repr, differing[name]), strict=True))
            for name in names
            if name in differing
        }
        return [f"{name} is {list_by_value(mine)}" for name, mine in values.items()]

    other_images = describe(IMAGES)
    if other_images:
        raise UserError(
            f"the recipes are of different images ({'; '.join(other_images)}): give all of them "
            "the same with --data NAME, or with --set FIELD=VALUE"
        )
    found = describe(BUDGET)
    sides = {name: config.view_size for name, config in configs.items()}
    if len(set(sides.values())) > 1 and "data.image_size" not in differing:
        words = list_by_value({name: f"{side} px" for name, side in sides.items()})
        found.append(f"views are of {words}")
    seen = {
        name: (config.training.epochs, config.views.num_views) for name, config in configs.items()
    }
    if len({epochs * views for epochs, views in seen.values()}) > 1:
        words = list_by_value({name: f"{e} x {v} = {e * v}" for name, (e, v) in seen.items()})
        found.append(f"training.epochs x views.num_views is {words}")
    small = {name: _describe_small_views(config) for name, config in configs.items()}
    if len(set(small.values())) > 1:
        found.append(f"training.epochs x small views is {list_by_value(small)}")
    if found and not unequal:
        raise UserError(
            f"the budgets of the recipes differ ({'; '.join(found)}): make them equal, in the "
            "recipes or with --set FIELD=VALUE for all, or compare them as they are with "
            "--unequal; the results then name the difference"
        )
    return found
