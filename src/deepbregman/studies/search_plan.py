"""The plan of a search: the options, checked against the recipe and what has begun.

This file needs no torch, so a wrong request is refused at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepbregman.config import Config, from_toml, override, to_toml
from deepbregman.data.datasets import check_source, find_source
from deepbregman.errors import UserError
from deepbregman.files import check_can_be_folder, list_names
from deepbregman.reporting.charts import FIGURE_KINDS
from deepbregman.runs import Record

from .definition import (
    HOLDOUT,
    Changes,
    Search,
    SearchOptions,
    StudyOptions,
    build_config,
    check_same,
    join_changes,
)
from .space import Space, parse_space

PARTS = {
    *("locks", "runs", "trials.json", "trials.csv", "best.toml"),
    *(f"search.{kind}" for kind in FIGURE_KINDS),
}
"""Names in the folder of a search besides its database."""
DEFAULTS: Record = {"objective": "linear", "sampler": "gp", "prune": True, "trials": 40}


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
        changes: dict[str, Any] = {"training.tensorboard": False}
        if self.recipe.data.holdout == 0.0:
            changes["data.holdout"] = HOLDOUT
        return override(self.recipe, changes)


def plan_search(recipe: str | None, options: SearchOptions, stored: Record | None) -> SearchPlan:
    """Check the options, alone or against the definition that the storage has of a search."""
    if stored is None and (recipe is None or not options.space):
        raise UserError(
            "a new search needs a recipe and a space: deepbregman tune paper --space "
            "divergence.sigma=0.1:5:log"
        )
    given = join_changes(options)
    kept: Changes = stored["changes"] if stored else given
    before = from_toml(stored["base"], "the search") if stored else None
    config = build_config(recipe, given, before, kept)
    check_same(before, config, "this search")
    defaults = {**DEFAULTS, "recipe": recipe, "changes": kept, **(stored or {})}
    names = ("objective", "sampler", "prune", "trials")
    asked = {name: getattr(options, name) for name in names}
    definition: Record = {
        **defaults,
        **{name: value for name, value in asked.items() if value is not None},
        "data": config.data.source,
        "epochs": config.training.epochs,
        "base": to_toml(config),
    }
    words = options.space or tuple(defaults["space"])
    space = parse_space(words, SearchPlan(config, (), definition).base)
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
    refused = ("recipes", "unequal", "seeds", "only", "values", "evaluate_on", "linear_epochs")
    for name in (*refused, "keep_checkpoints"):
        if getattr(options, name) not in (None, (), False):
            raise UserError(
                f"study {entry.name} is a search and takes no --{name.replace('_', '-')}; see "
                "--trials"
            )
    if not options.train:
        raise UserError(f"study {entry.name} is a search and takes no --no-train")
    recipe = options.recipe or entry.recipe
    out = options.out or Path("studies") / f"{entry.name}-{Path(recipe).stem}"
    begun = has_begun(out)
    asked = SearchOptions(
        space=entry.space,
        trials=options.trials or (None if begun else entry.trials),
        data=options.data,
        epochs=options.epochs,
        changes=options.changes,
        out=out,
        accelerator=options.accelerator,
    )
    return options.recipe if begun else recipe, asked
