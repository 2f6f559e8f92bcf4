"""The plan of a search: its space and its options, checked against the recipe and what has begun.

The space is fields of the configuration, and the values each may take. A dimension is written
``field=LOW:HIGH``, with ``:log`` for a logarithmic scale, or ``field=A,B,C``. This file needs no
torch, so a wrong request is refused at once.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from deepbregman.config import Config, fields_of, from_toml, override, to_toml
from deepbregman.data.datasets import check_source, find_source
from deepbregman.errors import UserError, suggest
from deepbregman.files import check_can_be_folder, list_names
from deepbregman.reporting.charts import FIGURE_KINDS
from deepbregman.runs import CHANGEABLE, Record

from .definition import (
    Changes,
    Search,
    SearchOptions,
    StudyOptions,
    build_config,
    check_same,
    check_used,
    hold_out,
    join_changes,
    read_value,
)

if TYPE_CHECKING:
    import optuna

PARTS = {
    *("locks", "runs", "trials.json", "trials.csv", "best.toml"),
    *(f"search.{kind}" for kind in FIGURE_KINDS),
}
"""Names in the folder of a search besides its database."""
MOST_CORNERS = 1024
Value = bool | int | float | str
DEFAULTS: Record = {"objective": "linear", "sampler": "gp", "prune": True, "trials": 40}


@dataclass(frozen=True)
class Interval:
    """Numbers between two ends, both included."""

    field: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that are checked beforehand."""
        return self.low, self.high

    def suggest(self, trial: "optuna.Trial") -> Value:
        """Let a trial take a value."""
        if self.whole:
            return trial.suggest_int(self.field, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.field, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        return f"{self.field}={self.low!r}:{self.high!r}{':log' * self.log}"


@dataclass(frozen=True)
class Choice:
    """A few values without an order."""

    field: str
    values: tuple[Value, ...]

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that are checked beforehand: all."""
        return self.values

    def suggest(self, trial: "optuna.Trial") -> Value:
        """Let a trial take a value."""
        value = trial.suggest_categorical(self.field, list(self.values))
        assert value is not None  # none was offered
        return value

    def __str__(self) -> str:
        return f"{self.field}={','.join(map(_format_value, self.values))}"


Dimension = Interval | Choice
Space = tuple[Dimension, ...]


def parse_space(words: Iterable[str], base: Config) -> Space:
    """Read a space; every corner of it must be a configuration, made from ``base``."""
    seen: dict[str, Dimension] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(
                f"--space {word!r}: write field=LOW:HIGH, field=LOW:HIGH:log or field=A,B,C, such "
                "as divergence.sigma=0.1:5:log"
            )
        if name in seen:
            raise UserError(f"--space names {name} twice: once is enough")
        seen[name] = _read_dimension(name, text, base)
    if not seen:
        raise UserError("the space is empty: name a field, such as divergence.sigma=0.1:5:log")
    space = tuple(seen.values())
    check_corners(space, base)
    return space


def check_corners(space: Space, base: Config) -> None:
    """Build the configurations at the corners of the space, so that no trial is refused later.

    A field that none of them uses is refused. In a space with very many corners each field is tried
    alone; that does not show which fields are used together, so none is refused as unused.
    """
    names = [dimension.field for dimension in space]
    builds_all = math.prod(len(dimension.ends) for dimension in space) <= MOST_CORNERS
    if builds_all:
        corners = itertools.product(*(dimension.ends for dimension in space))
        points = (dict(zip(names, corner, strict=True)) for corner in corners)
    else:
        points = ({dim.field: end} for dim in space for end in dim.ends)
    configs = []
    for point in points:
        try:
            configs.append(override(base, point))
        except UserError as error:
            where = ", ".join(f"{name}={value}" for name, value in point.items())
            raise UserError(f"--space reaches {where}, where {error}") from None
    if builds_all:
        # The reason is that of the corner with the fewest unused fields: "the weight is 0" would
        # mislead where the weight itself is searched.
        fullest = min(configs, key=lambda config: len(config.unused_fields))
        unused = set(names).intersection(*(config.unused_fields for config in configs))
        check_used(fullest, sorted(unused), "--space")


def _find_type(name: str, base: Config) -> Any:
    """Return the type of a field that can be searched."""
    section, _, key = name.partition(".")
    if section in ("seed", "data"):
        raise UserError(
            f"--space {name}: a search keeps to one seed and one set of images, or its trials "
            "could not be compared; set it with --set instead"
        )
    if name in CHANGEABLE:
        raise UserError(
            f"--space {name}: training does not depend on it, and every trial would train the "
            "same; set it with --set instead"
        )
    known = [field for field in fields_of(base) if "." in field]
    if name not in known:
        namesakes = [f"{field!r}" for field in known if field.endswith(f".{name}")]
        guess = f"; did you mean {' or '.join(namesakes)}?" if namesakes else suggest(name, known)
        raise UserError(f"--space {name}: there is no such field{guess}")
    hint = get_type_hints(type(getattr(base, section)), include_extras=True)[key]
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is UnionType:  # a number, or one for each view
        hint = get_args(hint)[0]
    if get_origin(hint) is tuple:
        raise UserError(
            f"--space {name}: its value {fields_of(base)[name]} is a list, and only single values "
            "are searched; set it with --set instead"
        )
    return hint


def _read_dimension(name: str, text: str, base: Config) -> Dimension:
    kind = _find_type(name, base)
    if kind in (int, float) and ":" in text:
        return _read_interval(name, text, kind)
    return _read_choice(name, [read_value(part.strip()) for part in text.split(",")])


def _read_choice(name: str, values: list[Any]) -> Choice:
    if not all(isinstance(value, bool | int | float | str) for value in values):
        raise UserError(f"--space {name}={values}: every value must be a number, text or true")
    distinct = list(dict.fromkeys(map(_format_value, values)))
    if len(distinct) < max(2, len(values)):
        raise UserError(
            f"--space {name}={','.join(map(_format_value, values))}: give at least two values, "
            "each once; give one value alone with --set"
        )
    return Choice(name, tuple(values))


def _read_interval(name: str, text: str, kind: type) -> Interval:
    wrong = f"--space {name}={text}: "
    low, high, *rest = text.split(":")
    if rest not in ([], ["log"]):
        raise UserError(f"{wrong}write LOW:HIGH, or LOW:HIGH:log")
    try:
        ends = [kind(part) for part in (low, high)]
    except ValueError:
        words = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{wrong}the ends must be {words}") from None
    if not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise UserError(f"{wrong}the ends must be finite and go from low to high")
    if rest and ends[0] <= 0:
        raise UserError(f"{wrong}a logarithmic scale needs a LOW above 0")
    return Interval(name, ends[0], ends[1], bool(rest), kind is int)


def _format_value(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def name_search_folder(recipe: str | None, options: SearchOptions) -> Path:
    """Return the folder of a search."""
    return options.out or Path("studies") / f"tune-{Path(recipe or 'search').stem}"


def has_begun(folder: Path) -> bool:
    """Whether a folder holds the database of a search."""
    return (folder / "search.db").exists()


def check_search(recipe: str | None, options: SearchOptions) -> None:
    """Check all that can be checked before torch is loaded and an image is read."""
    folder = name_search_folder(recipe, options)
    check_can_be_folder(folder)
    if options.trials is not None and options.trials < 1:
        raise UserError(f"--trials {options.trials}: there must be at least 1")
    names = list_names(folder)
    is_begun = has_begun(folder)  # asked after listing: another worker may begin it meanwhile
    if not is_begun and names - PARTS:
        raise UserError(f"{folder} exists and holds no search: choose another folder with --out")
    if is_begun or options.storage is not None:  # it has begun, perhaps; it knows its data.root
        if options.data is not None and find_source(options.data)[0] is None:
            check_source(options.data)
        return
    data = plan_search(recipe, options, None).recipe.data
    check_source(data.source, Path(data.root))


@dataclass(frozen=True)
class SearchPlan:
    """A search as every worker of it must run it."""

    recipe: Config
    """Without images held out."""
    space: Space
    definition: Record

    @property
    def base(self) -> Config:
        """The configuration that trials change: the recipe, with images held out to evaluate on."""
        return override(hold_out(self.recipe), {"training.tensorboard": False})

    @property
    def largest_batch(self) -> Config:
        """The configuration whose steps need the most images."""
        names = ("training.batch_size", "training.accumulate")
        largest = {part.field: max(part.ends) for part in self.space if part.field in names}
        return override(self.base, largest)


def plan_search(recipe: str | None, options: SearchOptions, stored: Record | None) -> SearchPlan:
    """Check the options, alone or against the definition that the storage has of a search."""
    if stored is None and (recipe is None or not options.space):
        raise UserError(
            "a new search needs a recipe and a space: deepbregman tune paper --space "
            "divergence.sigma=0.1:5:log"
        )
    given = join_changes(options.changes, data=options.data, epochs=options.epochs)
    kept: Changes = stored["changes"] if stored else given
    before = from_toml(stored["base"], "the search") if stored else None
    config = build_config(recipe, given, before, kept)
    check_same(before, config, "this search")
    defaults = {**DEFAULTS, "recipe": recipe, "changes": kept, **(stored or {})}
    asked = {name: getattr(options, name) for name in DEFAULTS}
    definition: Record = {
        **defaults,
        **{name: value for name, value in asked.items() if value is not None},
        "data": config.data.source,
        "epochs": config.training.epochs,
        "base": to_toml(config),
    }
    space = parse_space(options.space or defaults["space"], hold_out(config))
    definition["space"] = [str(dimension) for dimension in space]
    for key in ("space", "objective", "sampler", "prune"):
        if stored is not None and stored[key] != definition[key]:
            raise UserError(
                f"this search was begun with other settings ({key} is {stored[key]!r} there, "
                f"{definition[key]!r} here): leave the option out to continue, or choose another "
                "folder with --out"
            )
    return SearchPlan(config, space, definition)


def search_of_study(entry: Search, options: StudyOptions) -> tuple[str | None, SearchOptions]:
    """Return the recipe and the options of the search that a study of the catalogue is."""
    taken = {"recipe", "trials", "data", "epochs", "changes", "out", "accelerator"}
    for option in fields(StudyOptions):
        if option.name not in taken and getattr(options, option.name) != option.default:
            name = {"train": "no-train"}.get(option.name, option.name.replace("_", "-"))
            raise UserError(f"study {entry.name} is a search and takes no --{name}; see --trials")
    recipe = options.recipe or entry.recipe
    out = options.out or Path("studies") / f"{entry.name}-{Path(recipe).stem}"
    begun = has_begun(out)
    asked = SearchOptions(
        space=entry.space,
        trials=entry.trials if options.trials is None and not begun else options.trials,
        data=options.data,
        epochs=options.epochs,
        changes=options.changes,
        out=out,
        accelerator=options.accelerator,
    )
    return options.recipe if begun else recipe, asked
