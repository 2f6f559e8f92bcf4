"""The folder of a grid study: what was asked for, held to by every worker that joins.

::

    STUDY/
      study.json                  what is asked: definition, recipe, options, versions
      runs/ARM-seedK/             a cell: an ordinary run folder
      locks/                      held by whoever works on a cell, while they live
      results.json, results.csv   every cell
      summary.csv                 mean, deviation and number by arm
      NAME.png, NAME.svg
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepbregman.config import Config, from_toml, load_recipe, override, to_toml
from deepbregman.errors import UserError
from deepbregman.runs import Record, provenance, read_json, write_json
from deepbregman.training.processes import device_name, pick_device

from .cells import Cell, Judgement, plan
from .claims import exclusively
from .comparison import arm_names, check_budget, compared
from .definition import Arm, Settings, Study
from .fields import differences, refuse_retired, set_now, value_of

DEFAULTS: Record = {
    **{"recipes": [], "unequal": False},
    **{"data": None, "epochs": None, "changes": {}},
    **{"values": [], "judge": "test", "linear_epochs": 0, "seeds": 3, "only": []},
}
HELD_TO = ("recipes", "values", "judge", "linear_epochs")
"""Options that a folder keeps to, beside its configuration; seeds and arms may be added."""
HOLDOUT = 0.1


@dataclass(frozen=True)
class Task:
    """A study as it is to be run here."""

    study: Study
    folder: Path
    base: Config
    how: Judgement
    definition: Record
    """What ``study.json`` holds."""
    groups: list[list[Cell]]
    """To do now; cells of one configuration stand together, for they share a run."""

    def everything(self) -> list[Cell]:
        """Return every cell that the folder may hold, those of earlier commands included."""
        runs = self.folder / "runs"
        names = [re.search(r"-seed(\d+)$", path.name) for path in runs.glob("*-seed*")]
        seeds = {int(name[1]) for name in names if name}
        arms = usable(self.study.arms, self.base)
        groups = plan(arms, self.base, sorted(seeds), runs)
        cells = [cell for group in groups for cell in group]
        return sorted(cells, key=lambda cell: (arms.index(cell.arm), cell.seed))


def usable(arms: tuple[Arm, ...], base: Config) -> tuple[Arm, ...]:
    """Leave out arms that change nothing in this recipe."""
    return tuple(arm for arm in arms if arm.only_if is None or value_of(base, arm.only_if))


def default_folder(study: Study, settings: Settings) -> Path:
    """Name a study's folder by what it is, so that the same command goes on with it."""
    recipes = list(settings.recipes or study.recipes)
    name = "-".join(arm_names(recipes)) if recipes else Path(settings.recipe or study.recipe).stem
    first = recipes[0] if recipes else settings.recipe or study.recipe
    data = settings.data or load_recipe(first).data.source
    return Path("studies") / f"{study.name}-{name}-{Path(data).stem}"


def open_task(study: Study, settings: Settings) -> Task:
    """Check all that can be checked before an image is read; begin the folder, or join it."""
    _check_kind(study, settings)
    folder = settings.out or default_folder(study, settings)
    _resolve(study, settings, folder)  # nothing is made for a request that is refused
    with exclusively(folder / "locks" / "study"):
        task = _resolve(study, settings, folder)  # another worker may have begun it meanwhile
        write_json(folder / "study.json", task.definition)
    return task


def _check_kind(study: Study, settings: Settings) -> None:
    """Refuse what belongs to the other kind of study: of recipes, or of one recipe."""
    if study.recipes and settings.recipe is not None:
        raise UserError(
            f"study {study.name} compares whole recipes and takes no --recipe: give all of them, "
            f"the reference first, such as --recipes simclr {settings.recipe}"
        )
    given = "--recipes" * bool(settings.recipes) or "--unequal" * settings.unequal
    if not study.recipes and given:
        raise UserError(
            f"study {study.name} varies one recipe and takes no {given}: give that with --recipe; "
            "study comparison compares whole recipes"
        )


def _resolve(study: Study, settings: Settings, folder: Path) -> Task:
    before = _read(folder, study)
    options = _options(study, settings, before)
    bases = _bases(study, settings, options, before, folder)
    base, unequal = next(iter(bases.values())), []
    if study.recipes:
        unequal = check_budget(bases, unequal=options["unequal"])
        study = compared(study, bases)
    study = study.with_values(options["values"])
    arms = usable(study.arms, base)
    chosen = [arm for arm in study.chosen(options["only"]) if arm in arms]
    if not chosen:
        raise UserError(
            f"--only {' '.join(options['only'])}: these arms change nothing in recipe "
            f"{options['recipe']}; choose among {', '.join(arm.name for arm in arms)}"
        )
    if options["seeds"] < 1:
        raise UserError(f"--seeds {options['seeds']}: there must be at least 1")
    if options["linear_epochs"] < 0:
        raise UserError(f"--linear-epochs {options['linear_epochs']}: it must be 0 or more")
    device = pick_device(settings.accelerator)
    epochs = {config.training.epochs for config in bases.values()}
    definition = {
        **options,
        "study": study.record(),
        "data": base.data.source,
        "epochs": base.training.epochs if len(epochs) == 1 else None,
        "base": to_toml(base),
        "unequal_budget": unequal,
        "left_out": [arm.name for arm in study.arms if arm not in arms],
        "provenance": before["provenance"] if before else provenance(device_name(device)),
    }
    how = Judgement(
        options["judge"],
        linear_epochs=options["linear_epochs"],
        keep_checkpoints=settings.keep_checkpoints,
        accelerator=settings.accelerator,
    )
    seeds = range(base.seed, base.seed + options["seeds"])
    groups = plan(arms, base, seeds, folder / "runs")  # of all arms: which run an arm shares
    groups = [cells for cells in groups if any(cell.arm in chosen for cell in cells)]
    return Task(study, folder, base, how, definition, groups)


def _read(folder: Path, study: Study) -> Record | None:
    """Read what a folder was begun with; None of a new one."""
    path = folder / "study.json"
    if path.is_file():
        before = read_json(path)
        if before["study"]["name"] != study.name:
            raise UserError(
                f"{folder} holds study {before['study']['name']}, not {study.name}: choose another "
                "folder with --out"
            )
        refuse_retired(before, f"the study in {folder}")
        return before
    if folder.exists() and (
        not folder.is_dir() or any(inside.name != "locks" for inside in folder.iterdir())
    ):
        raise UserError(f"{folder} exists and holds no study: choose another folder with --out")
    return None


def _options(study: Study, settings: Settings, before: Record | None) -> dict[str, Any]:
    """Take each option as it is given, else as the folder has it, else as it is by default."""
    given = {
        name: list(value) if isinstance(value, tuple) else value
        for name in ("recipe", *DEFAULTS)
        if (value := getattr(settings, name)) not in (None, (), {}) and value is not False
    }
    if before is None:
        defaults = {"recipe": study.recipe, **DEFAULTS, "recipes": list(study.recipes)}
        options = {**defaults, **given}
        if study.recipes:
            options["recipe"] = ", ".join(arm_names(options["recipes"]))
        return options
    stored = {name: before.get(name, DEFAULTS.get(name)) for name in ("recipe", *DEFAULTS)}
    for name in HELD_TO:
        if given.get(name, stored[name]) != stored[name]:
            raise UserError(
                f"--{name.replace('_', '-')} is {given[name]!r} here and {stored[name]!r} in the "
                f"folder of this study, begun before: leave it out to go on, or choose another "
                "folder with --out"
            )
    return {**stored, **given}


def _bases(
    study: Study, settings: Settings, options: Record, before: Record | None, folder: Path
) -> dict[str, Config]:
    """Return what the arms start from: one configuration, or one by arm where those are recipes.

    A folder that has begun keeps to its own, whatever has become of a recipe's file.
    """
    stored: dict[str, Config] = {}
    if before is not None:
        base = from_toml(before["base"], str(folder / "study.json"))
        stored = {study.name: base}
        if study.recipes:
            arms = before["study"]["arms"]
            stored = {arm["name"]: override(base, arm["changes"]) for arm in arms}
    now = set_now(settings.data, settings.epochs, settings.changes)
    if stored and not (settings.recipe or settings.recipes or now):
        return stored
    kept: dict[str, Any] = {}
    if before is not None:
        named = {"data.source": before["data"], "training.epochs": before["epochs"]}
        kept = {name: value for name, value in named.items() if value is not None}
        kept |= {} if settings.changes else before["changes"]
    names = arm_names(options["recipes"]) if study.recipes else [study.name]
    bases = {}
    for name, recipe in zip(names, options["recipes"] or [options["recipe"]], strict=True):
        config = override(load_recipe(recipe), {**kept, **now})
        if options["judge"] == "holdout" and config.data.holdout == 0.0:
            config = override(config, {"data.holdout": HOLDOUT})
        bases[name] = config
        changed = differences(stored[name], config) if stored else []
        if changed:
            of_arm = f", {name}" * bool(study.recipes)
            raise UserError(
                f"{folder} holds study {study.name}{of_arm} with other settings "
                f"({'; '.join(changed)}): leave the options out to go on with those, or choose "
                "another folder with --out"
            )
    return bases
