"""The plan of a grid study: the options, checked against what its folder holds.

This file needs no torch, so a wrong request is refused at once.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepbregman.config import Config, fields_of, from_toml, override, to_toml
from deepbregman.data.datasets import check_source
from deepbregman.errors import UserError
from deepbregman.files import check_can_be_folder, list_names, read_json
from deepbregman.reporting.grid_charts import MANY_RECIPES
from deepbregman.reporting.published import is_on_test_images
from deepbregman.runs import Record

from .definition import (
    Arm,
    Study,
    StudyOptions,
    build_config,
    check_arms,
    check_budget,
    check_same,
    describe_differences,
    hold_out,
    join_changes,
    load_arm,
    name_arms,
    read_value,
)

DEFAULTS: Record = {
    "recipes": [],
    "unequal": False,
    "changes": {},
    "values": [],
    "evaluate_on": "test",
    "linear_epochs": 0,
    "seeds": 3,
    "only": [],
}
"""Options of a new study, where neither the user nor the study says otherwise."""
SHAPE = {
    "study": {"name": str, "arms": [{"name": str, "changes": {}}]},
    "provenance": {},
    "changes": {},
    "base": str,
    "data": str,
    "recipe": str,
    "evaluate_on": str,
    "epochs": int,
    "seeds": int,
    "linear_epochs": int,
    "only": [str],
    "recipes": [str],
}
"""Shape of ``study.json``."""
RUNS = "runs"
"""Folder of the runs, in the folder of a study."""
FIXED = ("recipes", "values", "evaluate_on", "linear_epochs")
"""Options that cannot change once a folder has begun; seeds and arms may be added."""


@dataclass(frozen=True)
class GridPlan:
    """A study with its options."""

    study: Study
    folder: Path
    base: Config
    """The configuration that the arms change."""
    arms: tuple[Arm, ...]
    """All that change something in this recipe."""
    chosen: tuple[Arm, ...]
    definition: Record
    """The contents of ``study.json``, without the provenance of a new study."""


def plan_study(study: Study, options: StudyOptions) -> GridPlan:
    """Check all that can be checked before torch is loaded and an image is read."""
    _check_kind(study, options)
    folder = options.out or name_study_folder(study, options)
    before = _read_definition(folder, study)
    if before is None and not options.train and not (folder / RUNS).is_dir():
        raise UserError(f"--no-train: {folder} holds no study; name its folder by --out")
    settings = _merge_options(study, options, before)
    bases = _build_bases(study, options, settings, before, folder)
    base, unequal = next(iter(bases.values())), []
    if study.recipes:
        unequal = check_budget(bases, unequal=settings["unequal"] or study.unequal)
        study = study.with_recipes(bases, settings["values"])
    else:
        study = study.with_values(settings["values"]).with_method(base)
    arms = select_usable_arms(study.arms, base)
    names = [arm.name for arm in arms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # one of them would count as more seeds of the other
        raise UserError(
            f"study {study.name} has two arms with the name {twice}, a recipe's and one that the "
            "study makes: rename the file of the recipe, or leave it out"
        )
    for first, second in itertools.combinations(arms, 2):
        if first.folder_name.lower() == second.folder_name.lower():
            raise UserError(
                f"study {study.name}: the runs of {first.name} and {second.name} would have one "
                f"folder, {first.folder_name}-seed0: rename the file of one of them"
            )
    chosen = tuple(arm for arm in study.choose_arms(settings["only"]) if arm in arms)
    if not chosen:
        raise UserError(
            f"--only {' '.join(settings['only'])}: these arms change nothing in recipe "
            f"{settings['recipe']}; choose among {', '.join(arm.name for arm in arms)}"
        )
    check_arms(study, chosen, base)
    for arm in arms:
        override(base, arm.changes)  # refuses impossible values
    if options.train:
        for source, root in {(base.data.source, base.data.root) for base in bases.values()}:
            check_source(source, Path(root))
    if settings["seeds"] < 1:
        raise UserError(f"--seeds {settings['seeds']}: there must be at least 1")
    if settings["linear_epochs"] < 0:
        raise UserError(f"--linear-epochs {settings['linear_epochs']}: it must be 0 or more")
    epochs = {config.training.epochs for config in bases.values()}
    definition = {
        **settings,
        "study": dataclasses.asdict(study),
        "data": base.data.source,
        "epochs": base.training.epochs if len(epochs) == 1 else None,
        "base": to_toml(base),
        "unequal_budget": unequal,
        "provenance": before["provenance"] if before else None,
    }
    return GridPlan(study, folder, base, arms, chosen, definition)


def select_usable_arms(arms: tuple[Arm, ...], base: Config) -> tuple[Arm, ...]:
    """Leave out arms that change nothing in this recipe."""
    fields = fields_of(base)
    return tuple(arm for arm in arms if arm.only_if is None or fields[arm.only_if])


def name_study_folder(study: Study, options: StudyOptions) -> Path:
    """Name the folder by study, recipe and data, so that the same command continues the study."""
    recipes = list(options.recipes or study.recipes)
    names = name_arms(recipes) if recipes else [Path(options.recipe or study.recipe).stem]
    names = names if len(names) <= MANY_RECIPES else []
    first = recipes[0] if recipes else options.recipe or study.recipe
    data = options.data or load_arm(first).data.source
    return Path("studies") / "-".join([study.name, *names, Path(data).stem])


def _check_kind(study: Study, options: StudyOptions) -> None:
    if options.trials is not None:
        raise UserError(f"study {study.name} is a grid and takes no --trials; see --seeds")
    if study.recipes and options.recipe is not None:
        raise UserError(
            f"study {study.name} compares whole recipes and takes no --recipe: give all of them, "
            "the reference first, such as --recipes simclr best"
        )
    several = study.with_divergence or study.rate_factors  # arms of each recipe
    if len(options.recipes) == 1 and study.recipes and not several:
        raise UserError(
            f"--recipes {options.recipes[0]}: there must be at least 2 to compare, the reference "
            "first, such as --recipes simclr best"
        )
    given = next((name for name in ("recipes", "unequal", "rates") if getattr(options, name)), "")
    if not study.recipes and given:
        raise UserError(
            f"study {study.name} varies one recipe and takes no --{given}: give that with "
            "--recipe; study comparison compares whole recipes"
        )


def _read_definition(folder: Path, study: Study) -> Record | None:
    """Read what a folder was begun with; None for a new folder."""
    path = folder / "study.json"
    check_can_be_folder(folder)
    names = list_names(folder)
    if path.is_file():  # asked after listing: another process may begin the study meanwhile
        before = read_json(path, SHAPE)
        if "judge" in before:  # an older name
            before["evaluate_on"] = before.pop("judge")
        if not {"study", "provenance", "base", "changes"} <= before.keys():
            raise UserError(
                f"{path} is not the record of a study: restore it, or choose another --out"
            )
        name = before["study"].get("name")
        if name != study.name:
            raise UserError(
                f"{folder} holds study {name}, not {study.name}: choose another folder with --out"
            )
        return before
    if names - {"locks", RUNS}:  # runs may have been copied there, from studies that share arms
        raise UserError(f"{folder} exists and holds no study: choose another folder with --out")
    return None


def _list_given(options: StudyOptions) -> dict[str, Any]:
    """Return the options that the user has given, as ``study.json`` holds them."""
    asked = {name: getattr(options, name) for name in ("recipe", *DEFAULTS)}
    asked |= {"changes": _list_changes(options), "values": [*map(read_value, options.values)]}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asked.items()
        if value not in (None, (), [], {}) and value is not False
    }


def _list_changes(options: StudyOptions) -> dict[str, Any]:
    return join_changes(options.changes, data=options.data, epochs=options.epochs)


def _merge_options(study: Study, options: StudyOptions, before: Record | None) -> dict[str, Any]:
    """Take each option as it is given, else from the folder, else its default."""
    given = _list_given(options)
    if before is None:
        of_study = {name: getattr(study, name) for name in ("recipe", "evaluate_on", "seeds")}
        settings = {**DEFAULTS, **of_study, "recipes": list(study.recipes), **given}
        if study.recipes:
            settings["recipe"] = ", ".join(name_arms(settings["recipes"]))
        return settings
    stored = {name: before.get(name, DEFAULTS.get(name)) for name in ("recipe", *DEFAULTS)}
    if study.rate_factors:  # more of them change nothing that is there
        given["values"] = list(dict.fromkeys([*(stored["values"] or []), *given.get("values", [])]))
        stored["values"] = given["values"]
    for name in FIXED:
        if given.get(name, stored[name]) != stored[name]:
            raise UserError(
                f"--{name.replace('_', '-')} is {given[name]!r} here and {stored[name]!r} in the "
                "folder of this study, which has begun: leave the option out to continue, or "
                "choose another folder with --out"
            )
    return {**stored, **given, "changes": stored["changes"]}


def _build_bases(
    study: Study, options: StudyOptions, settings: Record, before: Record | None, folder: Path
) -> dict[str, Config]:
    """Return the configurations that arms change: one for all, or one for each recipe."""
    stored: dict[str, Config] = {}
    if before is not None:
        base = from_toml(before["base"], str(folder / "study.json"))
        stored = {study.name: base}
        if study.recipes:
            arms = before["study"]["arms"]
            stored = {arm["name"]: override(base, arm["changes"]) for arm in arms}
    names = name_arms(settings["recipes"]) if study.recipes else [study.name]
    recipes: Sequence[str | None] = settings["recipes"] or [settings["recipe"]]
    if stored:  # it has begun: the folder knows its recipes
        recipes = options.recipes or [options.recipe] * len(names)
    bases: dict[str, Config] = {}
    for name, recipe in zip(names, recipes, strict=True):
        before_arm = stored.get(name)
        config = build_config(recipe, _list_changes(options), before_arm, settings["changes"])
        if options.rates:
            config = override(config, find_best_rates(options.rates, name, config))
        if settings["evaluate_on"] == "holdout":
            config = hold_out(config)
        if bases:  # a study has seeds of its own; those of recipes must not tell them apart
            config = override(config, {"seed": next(iter(bases.values())).seed})
        check_same(before_arm, config, f"study {study.name}" + f", {name}" * bool(study.recipes))
        bases[name] = config
    return bases


def find_best_rates(folders: Sequence[Path], recipe: str, config: Config) -> dict[str, float]:
    """Return the learning rates at which a recipe was best, in the first study of its settings."""
    others = ""
    for folder in folders:
        best = find_best_of_study(folder, recipe)
        if best is None:
            continue
        changed = describe_differences(best, config, _decides_the_rate)
        if not changed:
            return best.optimiser.rates
        others = f" with its settings of today ({changed})"
    raise UserError(
        f"--rates {' '.join(map(str, folders))}: recipe {recipe} has no rate there at which all "
        f"seeds were trained to the end{others}; train it with deepbregman study learning-rates "
        "--out FOLDER and add that folder, or leave the recipe out: name the others with "
        "--recipes (with --only the study still holds every recipe, and each needs its rate)"
    )


def _decides_the_rate(field: str) -> bool:
    """Return whether the best learning rate depends on a field: of method, optimiser or batch."""
    if field.endswith("_rate") or field == "optimiser.warmup_epochs":
        return False
    batch = ("training.batch_size", "training.accumulate")
    return field.startswith(("objective.", "optimiser.")) or field in batch


def find_best_of_study(folder: Path, recipe: str) -> Config | None:
    """Return the configuration in which a recipe was best in a study; None if it has no result.

    Rates at which a seed diverged are left out. The best must have all seeds of the study.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(
            f"--rates {folder}: there is no {path.name}; give the folder of a finished study "
            "learning-rates"
        )
    results = read_json(path, {"metric": str, "arms": [{"arm": str, "metrics": {}}]})
    if is_on_test_images(results):
        raise UserError(
            f"--rates {folder}: its rates were compared on test images; choose them on held-out "
            "images, with --evaluate-on holdout"
        )
    definition = read_json(folder / "study.json", SHAPE)
    base = from_toml(definition["base"], str(folder / "study.json"))
    changes = {arm["name"]: arm["changes"] for arm in results["study"]["arms"]}
    mine = [arm for arm in results["arms"] if arm["x"] == recipe and arm["metrics"]]
    steady = [arm for arm in mine if not arm["num_diverged"]]
    if not steady:
        return None
    best = max(steady, key=lambda arm: float(arm["metrics"][results["metric"]]["mean"]))
    num_seeds = best["metrics"][results["metric"]]["n"]
    if num_seeds < definition["seeds"]:
        raise UserError(
            f"--rates {folder}: {best['arm']} has the highest accuracy, but only {num_seeds} of "
            f"{definition['seeds']} seeds; train the others first: deepbregman study "
            f"learning-rates --out {shlex.quote(str(folder))} --only {shlex.quote(best['arm'])}"
        )
    return override(base, changes[best["arm"]])
