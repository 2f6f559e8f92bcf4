"""What a search is: checked against the recipe, kept in the storage, held to by every worker."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import optuna

from deepbregman.config import Config, from_toml, load_recipe, override, to_toml
from deepbregman.errors import UserError
from deepbregman.runs import Record, command_line, read_json, write_json
from deepbregman.studies.fields import Changes, differences, refuse_retired, set_now
from deepbregman.studies.folder import HOLDOUT

from .space import Space, parse_space
from .workers import open_storage

STORAGE = "storage.json"
"""In the folder of a search whose storage is elsewhere: where that is."""
SECRETS = ("password", "passwd", "pwd", "secret", "token", "odbc_connect")
"""Parts of the names of URL options that may hold a password."""
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
    if stored is not None:
        refuse_retired(stored, "this search")
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
    now = set_now(request.data, request.epochs, changes)
    if stored is None:
        assert request.recipe is not None
        return override(load_recipe(request.recipe), now), changes
    before = stored.get("changes", {})
    if request.recipe is None:
        recipe = from_toml(stored["base"], "the search")
    else:
        named = {"data.source": stored["data"], "training.epochs": stored["epochs"]}
        recipe = override(load_recipe(request.recipe), {**named, **before})
    return override(recipe, now), {**before, **changes}


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


def has_begun(folder: Path) -> bool:
    """Whether a folder is that of a search; what a command leaves out is then the folder's."""
    return any((folder / name).exists() for name in ("search.db", STORAGE))


def without_password(url: str) -> tuple[str, bool]:
    """Return a storage's URL as it may be written down, and whether a password was taken out."""
    import sqlalchemy.exc

    try:
        parts = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return "", False  # opening it says what is wrong
    place = parts.database
    if parts.get_backend_name() == "sqlite" and place and not place.startswith((":", "file:")):
        place = str(Path(place).resolve())
    query = {
        name: value
        for name, value in parts.query.items()
        if not any(word in name.lower() for word in SECRETS)
    }
    bare = sqlalchemy.URL.create(
        parts.drivername, parts.username, None, parts.host, parts.port, place, query
    )
    secret = parts.password is not None or len(query) < len(parts.query)
    return bare.render_as_string(), secret


def locate(request: Request, folder: Path) -> str:
    """Return the URL of a search's storage: where the folder began it, else what is asked for.

    Raises:
        UserError: When another is asked for, or a password is needed that is not written down.
    """
    path, own = folder / STORAGE, f"sqlite:///{folder / 'search.db'}"
    before = read_json(path) if path.is_file() else {}
    stored = before.get("storage")
    if before and not isinstance(stored, str):
        raise UserError(f"{path} names no storage: remove it, and give --storage again")
    if request.storage is None:
        if before.get("password"):
            raise UserError(
                f"the search of {folder} is in {stored}, whose password is not written down: give "
                "--storage again, with the password"
            )
        return stored or own
    begun = stored or (without_password(own)[0] if has_begun(folder) else None)
    asked, _ = without_password(request.storage)
    if asked and begun and asked != begun:
        raise UserError(
            f"--storage {asked}: the search of {folder} was begun in {begun}; leave --storage out "
            "to go on there, or choose another folder with --out"
        )
    return request.storage


def remember(url: str, folder: Path) -> str:
    """Write down where the storage of a search is, without a password.

    Returns:
        Words for the user where that is not enough to go on; empty otherwise.
    """
    stored, secret = without_password(url)
    inside, _ = without_password(f"sqlite:///{folder / 'search.db'}")
    if stored != inside and not stored.endswith(("://", ":memory:")):
        write_json(folder / STORAGE, {"storage": stored, "password": secret})
    words = f"the password of the storage is not written down in {folder}: give --storage again"
    return f"{words} to go on with this search later" if secret else ""


def join(request: Request, folder: Path) -> tuple[optuna.Study, Plan]:
    """Begin the search in its storage, or join it; a search goes by the name of its folder.

    Args:
        request: what is asked for, its storage located.
        folder: of the search.
    """
    assert request.storage is not None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage(request.storage)
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
