"""What a search is: checked against the recipe, kept in the storage, held to by every worker."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import optuna

from deepbregman.config import Config, from_toml, override, to_toml
from deepbregman.errors import UserError
from deepbregman.runs import Record, command_line
from deepbregman.studies.definition import Changes, base_config, differences
from deepbregman.studies.folder import HOLDOUT

from .space import Space, parse_space
from .workers import open_storage

DEFAULTS: Record = {"objective": "linear", "sampler": "gp", "prune": True, "trials": 40}
STARTUP_TRIALS = 10
"""Random at first, for the model of the rest."""


@dataclass(frozen=True)
class Request:
    """What the user asked for; None is the default, or what the search has begun with."""

    recipe: str | None = None
    space: tuple[str, ...] = ()
    trials: int | None = None
    data: str | None = None
    epochs: int | None = None
    changes: Changes | None = None
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


@dataclass(frozen=True)
class Plan:
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


def resolve(request: Request, stored: Record | None) -> Plan:
    """Check a request, alone or against what the search began with.

    Args:
        request: of the user.
        stored: the definition in the storage, None of a new search.
    """
    if stored is None and (request.recipe is None or not request.space):
        raise UserError(
            "a new search needs a recipe and a space: deepbregman tune paper --space "
            "divergence.sigma=0.1:5:log"
        )
    recipe, changes = _recipe(request, stored)
    definition: Record = {
        "recipe": request.recipe,
        "data": recipe.data.source,
        "epochs": recipe.training.epochs,
        "changes": changes,
        "objective": request.objective,
        "sampler": request.sampler,
        "prune": request.prune,
        "trials": request.trials,
        "base": to_toml(recipe),
    }
    defaults = {**DEFAULTS, **(stored or {})}
    definition |= {key: defaults[key] for key in defaults if definition.get(key) is None}
    words = request.space or tuple(defaults["space"])
    plan = Plan(recipe, (), definition)
    space = parse_space(words, plan.base)
    definition["space"] = [str(dimension) for dimension in space]
    if stored is not None:
        _hold_to(stored, definition, recipe)
    return Plan(recipe, space, definition)


def _recipe(request: Request, stored: Record | None) -> tuple[Config, Changes]:
    """Return the recipe with what was set in it; what is left out is as the search began.

    A search that has begun keeps to its own recipe, whatever has become of the file.
    """
    changes = request.changes or {}
    if stored is None:
        assert request.recipe is not None
        return base_config(request.recipe, request.data, request.epochs, changes), changes
    data, epochs = request.data or stored["data"], request.epochs
    epochs = stored["epochs"] if epochs is None else epochs
    changes = {**stored.get("changes", {}), **changes}
    if request.recipe is not None:
        return base_config(request.recipe, data, epochs, changes), changes
    given = {"data.source": data, "training.epochs": epochs, **changes}
    return override(from_toml(stored["base"], "the search"), given), changes


def _hold_to(stored: Record, definition: Record, recipe: Config) -> None:
    """Refuse to go on with other settings than a search began with."""
    changed = differences(from_toml(stored["base"], "the search"), recipe)
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


def join(request: Request, folder: Path) -> tuple[optuna.Study, Plan]:
    """Begin the search in its storage, or join it; a search goes by the name of its folder."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage(request.storage or f"sqlite:///{folder / 'search.db'}")
    name = folder.resolve().name
    known = name in {summary.study_name for summary in optuna.get_all_study_summaries(storage)}
    stored = optuna.load_study(study_name=name, storage=storage).user_attrs if known else {}
    plan = resolve(request, stored.get("definition"))
    plan.definition.setdefault("command", command_line())  # that began it, not one that goes on
    worker = stored.get("workers", 0)
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        sampler=build_sampler(plan.definition["sampler"], plan.recipe.seed + worker),
        pruner=_pruner(plan.definition["prune"]),
        direction="maximize",
        load_if_exists=True,
    )
    study.set_user_attr("workers", worker + 1)  # each draws other numbers
    if "definition" not in stored:
        study.set_user_attr("definition", plan.definition)
    return study, plan


def build_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Build a Gaussian process, a tree of Parzen estimators, or chance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        if name == "tpe":
            # Values of running trials count as bad, so that workers do not crowd together.
            return optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True
            )
        return optuna.samplers.RandomSampler(seed=seed)


def _pruner(prune: bool) -> optuna.pruners.BasePruner:
    return optuna.pruners.MedianPruner() if prune else optuna.pruners.NopPruner()
