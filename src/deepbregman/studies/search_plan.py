"""The plan of a search: what the user asks for, checked against the recipe and what has begun.

No torch here, so that a request that is refused is refused at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from deepbregman.config import Config, from_toml, load_recipe, override, to_toml
from deepbregman.data.datasets import check_source, find_source
from deepbregman.errors import UserError
from deepbregman.files import check_can_be_folder, is_temporary
from deepbregman.runs import Record

from .definition import (
    HOLDOUT,
    Changes,
    Search,
    StudyOptions,
    describe_differences,
    join_changes,
)
from .space import Space, parse_space

STORAGE_FILE = "storage.json"
PARTS = ("locks", "runs", "trials.json", "trials.csv", "best.toml", "search.png", "search.svg")
"""What a search leaves beside its storage."""
DEFAULTS: Record = {"objective": "linear", "sampler": "gp", "prune": True, "trials": 40}


@dataclass(frozen=True)
class SearchOptions:
    """What the user asked for; None is the default, or what the search has begun with."""

    recipe: str | None = None
    space: tuple[str, ...] = ()
    trials: int | None = None
    data: str | None = None
    epochs: int | None = None
    changes: Changes = field(default_factory=dict)
    objective: Literal["linear", "knn"] | None = None
    sampler: Literal["gp", "tpe", "random"] | None = None
    prune: bool | None = None
    out: Path | None = None
    storage: str | None = None
    accelerator: str = "auto"
    published: Mapping[str, float] = field(default_factory=dict)
    """Field -> the best value that was published for images of ``published_data``."""
    published_data: str = ""
    command: str = "tune"

    @property
    def folder(self) -> Path:
        """Of the search."""
        return self.out or Path("studies") / f"tune-{Path(self.recipe or 'search').stem}"


def has_begun(folder: Path) -> bool:
    """Whether a folder is that of a search; what a command leaves out is then the folder's."""
    return any((folder / name).exists() for name in ("search.db", STORAGE_FILE))


def check_search(options: SearchOptions) -> None:
    """Check all that can be checked before torch is loaded and an image is read."""
    folder = options.folder
    check_can_be_folder(folder)
    if options.trials is not None and options.trials < 1:
        raise UserError(f"--trials {options.trials}: there must be at least 1")
    others = (
        [path for path in folder.iterdir() if not is_temporary(path)] if folder.exists() else []
    )
    if has_begun(folder):  # asked last, for another worker may begin it at this moment
        _check_given(options.data)
        return
    if any(path.name not in PARTS for path in others):
        raise UserError(f"{folder} exists and holds no search: choose another folder with --out")
    if options.storage is not None:  # where it may have begun
        _check_given(options.data)
        return
    data = resolve(options, None).recipe.data
    check_source(data.source, Path(data.root))


def _check_given(data: str | None) -> None:
    """Refuse a wrong ``--data``; where datasets lie, only the search that has begun knows."""
    if data is not None and find_source(data)[0] is None:
        check_source(data)


@dataclass(frozen=True)
class SearchPlan:
    """A search as every worker of it must run it."""

    recipe: Config
    """Before anything is held out of it."""
    space: Space
    definition: Record
    """What the storage keeps."""

    @property
    def base(self) -> Config:
        """What the trials change: the recipe with images held out to judge by."""
        changes: dict[str, Any] = {"training.tensorboard": False}
        if self.recipe.data.holdout == 0.0:
            changes["data.holdout"] = HOLDOUT
        return override(self.recipe, changes)


def resolve(options: SearchOptions, stored: Record | None) -> SearchPlan:
    """Check what the user asked for, alone or against what the search began with.

    Args:
        stored: the definition in the storage, None of a new search.
    """
    if stored is None and (options.recipe is None or not options.space):
        raise UserError(
            "a new search needs a recipe and a space: deepbregman tune paper --space "
            "divergence.sigma=0.1:5:log"
        )
    recipe, changes = _build_recipe(options, stored)
    definition: Record = {
        "recipe": options.recipe,
        "data": recipe.data.source,
        "epochs": recipe.training.epochs,
        "changes": changes,
        "objective": options.objective,
        "sampler": options.sampler,
        "prune": options.prune,
        "trials": options.trials,
        "base": to_toml(recipe),
    }
    defaults = {**DEFAULTS, **(stored or {})}
    definition |= {key: defaults[key] for key in defaults if definition.get(key) is None}
    words = options.space or tuple(defaults["space"])
    space = parse_space(words, SearchPlan(recipe, (), definition).base)
    definition["space"] = [str(dimension) for dimension in space]
    if stored is not None:
        _check_same(stored, definition, recipe)
    return SearchPlan(recipe, space, definition)


def _build_recipe(options: SearchOptions, stored: Record | None) -> tuple[Config, Changes]:
    """Return the recipe with the user's changes; what is left out is as the search began.

    A search that has begun keeps its own recipe, even where the file has changed since.
    """
    given = join_changes(options.data, options.epochs, options.changes)
    if stored is None:
        assert options.recipe is not None
        return override(load_recipe(options.recipe), given), options.changes
    before = stored["changes"]
    if options.recipe is None:
        recipe = from_toml(stored["base"], "the search")
    else:
        named = {"data.source": stored["data"], "training.epochs": stored["epochs"]}
        recipe = override(load_recipe(options.recipe), {**named, **before})
    return override(recipe, given), {**before, **options.changes}


def _check_same(stored: Record, definition: Record, recipe: Config) -> None:
    """Refuse to go on with other settings than a search began with."""
    differences = describe_differences(from_toml(stored["base"], "the search"), recipe)
    changed = [differences] if differences else []
    changed += [
        f"{key} is {stored[key]!r} there, {definition[key]!r} here"
        for key in ("space", "objective", "sampler", "prune")
        if stored[key] != definition[key]
    ]
    if changed:
        raise UserError(
            f"this search was begun with other settings ({'; '.join(changed)}): leave the options "
            "out to go on with those, or choose another folder with --out"
        )


def search_of_catalogue(entry: Search, options: StudyOptions) -> SearchOptions:
    """Turn what is asked of a study into what is asked of the search that it is."""
    refused = ("recipes", "unequal", "seeds", "only", "values", "judge", "linear_epochs")
    for name in (*refused, "keep_checkpoints"):
        if getattr(options, name) not in (None, (), False):
            raise UserError(
                f"study {entry.name} is a search and takes no --{name.replace('_', '-')}; see "
                "--trials"
            )
    name = f"{entry.name}-{Path(options.recipe or entry.recipe).stem}"
    out = options.out or Path("studies") / name
    begun = has_begun(out)
    return SearchOptions(
        recipe=options.recipe or (None if begun else entry.recipe),
        space=entry.space,
        trials=options.trials or (None if begun else entry.trials),
        data=options.data,
        epochs=options.epochs,
        changes=options.changes,
        out=out,
        accelerator=options.accelerator,
        published=entry.published,
        published_data=entry.published_data,
        command=f"study {entry.name}",
    )
