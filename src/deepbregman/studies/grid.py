"""Grid studies: every arm is trained with every seed, by any number of processes on one folder.

::

    STUDY/
      study.json                  what is asked: definition, recipe, options, versions
      runs/ARM-seedK/             a trial: an ordinary run folder
      locks/                      of the trials; held by whoever works on one
      results.json, results.csv   every arm and seed
      summary.csv                 mean, deviation and number by arm
      NAME.png, NAME.svg
"""

import dataclasses
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from deepbregman.config import Config, fields_of, from_toml, load_recipe, override, to_toml
from deepbregman.errors import UserError
from deepbregman.reporting.studies import save_study_figure
from deepbregman.runs import Record, Run, provenance, read_json, write_json
from deepbregman.statistics import summarise
from deepbregman.training.processes import device_name, pick_device

from .definition import (
    Arm,
    Study,
    StudyOptions,
    StudyResult,
    check_arms,
    check_budget,
    join_changes,
    name_arms,
)
from .engine import (
    HOLDOUT,
    Judgement,
    Trial,
    Worker,
    become_worker,
    describe_differences,
    lock,
    work,
)
from .results import write_results

DEFAULTS: Record = {
    **{"recipes": [], "unequal": False},
    **{"data": None, "epochs": None, "changes": {}},
    **{"values": [], "judge": "test", "linear_epochs": 0, "seeds": 3, "only": []},
}
SHAPE = {
    "study": {"name": str, "arms": [{"name": str, "changes": {}}]},
    **{"provenance": {}, "changes": {}, "base": str, "data": str, "recipe": str, "judge": str},
    **{"epochs": int, "seeds": int, "linear_epochs": int, "only": [str], "recipes": [str]},
}
"""Of ``study.json``."""
FIXED = ("recipes", "values", "judge", "linear_epochs")
"""Options that a folder keeps, beside its configuration; seeds and arms may be added."""


@dataclass(frozen=True)
class Cell:
    """An arm with a seed; arms that come to the same configuration share a trial."""

    arm: Arm
    seed: int
    trial: Trial


def plan_cells(arms: Iterable[Arm], base: Config, seeds: Iterable[int], runs: Path) -> list[Cell]:
    """Lay out the cells, seed by seed, so that a study cut short compares all arms."""
    cells: list[Cell] = []
    trials: dict[str, Trial] = {}
    for seed in seeds:
        for arm in arms:
            config = override(base, {**arm.changes, "seed": seed})
            name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', arm.name)}-seed{seed}"
            trial = Trial(runs / name, config, arm.supervised)
            trial = trials.setdefault(repr((config, arm.supervised)), trial)
            cells.append(Cell(arm, seed, trial))
    return cells


@dataclass
class Grid:
    """A study as it is to be run here: the queue of its trials."""

    study: Study
    folder: Path
    base: Config
    how: Judgement
    definition: Record
    """What ``study.json`` holds."""
    cells: list[Cell]
    """To do now."""

    def __post_init__(self) -> None:
        self.trials = list({cell.trial.name: cell.trial for cell in self.cells}.values())
        self.waiting = list(self.trials)

    def count(self) -> tuple[int, int]:
        """Return how many trials are done, by whichever process, and how many there are."""
        self.waiting = [trial for trial in self.waiting if trial.outcome() is None]
        return len(self.trials) - len(self.waiting), len(self.trials)

    def describe(self) -> str:
        """Say how many trials are done."""
        done, total = self.count()
        return f"{done} of {total} runs are done"

    def run_next(self, worker: Worker) -> bool:
        """Claim a trial that is free and run it; False when other processes have all the rest."""
        for trial in self.waiting:
            with lock(self.folder, trial.name, wait=False) as is_mine:
                if not is_mine:
                    continue
                if trial.outcome() is None:  # else another process was faster
                    cell = next(cell for cell in self.cells if cell.trial.name == trial.name)
                    worker.run(trial, f"{self.study.name} {cell.arm.name}, seed {cell.seed}")
                return True
        return False

    def save(self) -> Record:
        """Write the results of all trials that are done, those of earlier commands included."""
        with lock(self.folder, "results"):
            runs = self.folder / "runs"
            names = [re.search(r"-seed(\d+)$", path.name) for path in runs.glob("*-seed*")]
            seeds = sorted({int(name[1]) for name in names if name})
            arms = usable_arms(self.study.arms, self.base)
            cells = plan_cells(arms, self.base, seeds, runs)
            cells.sort(key=lambda cell: (arms.index(cell.arm), cell.seed))
            done = [(cell, outcome) for cell in cells if (outcome := cell.trial.outcome())]
            rows = [
                {
                    **{"arm": cell.arm.name, "series": cell.arm.series, "x": cell.arm.x},
                    **{"seed": cell.seed, "run": cell.trial.name, **outcome},
                }
                for cell, outcome in done
            ]
            costs = measure_costs(cell for cell, _ in done)
            return write_results(self.folder, self.definition, rows, costs)


def measure_costs(cells: Iterable[Cell]) -> dict[str, Record]:
    """Collect what the training of each arm without labels took, by its settings and its runs.

    ``samples_per_step`` counts views, over all batches of an optimiser step; ``seconds`` is the
    wall time of training, whatever else the machine did.
    """
    costs: dict[str, Record] = {}
    seconds: dict[str, list[float]] = {}
    for cell in cells:
        if cell.arm.supervised is not None:
            continue
        config = cell.trial.config
        settings, views = config.training, config.views.num_views
        cost = costs.setdefault(
            cell.arm.name,
            {
                "encoder": config.encoder.name,
                "epochs": settings.epochs,
                "views_per_image": views,
                "view_size": config.view_size,
                "samples_per_step": settings.batch_size * settings.accumulate * views,
                "steps": None,
                "seconds": None,
            },
        )
        trained = Run.open(cell.trial.folder).result().get("pretrain")  # none where it diverged
        if trained:
            seconds.setdefault(cell.arm.name, []).append(trained["seconds"])
            cost |= {"steps": trained["step"], "seconds": summarise(seconds[cell.arm.name])}
    return costs


def run_study(study: Study, options: StudyOptions, console: Console) -> StudyResult:
    """Bring a study to its end, together with other processes on the same folder."""
    become_worker()
    grid = open_grid(study, options)
    with console.status(f"opening {escape(grid.base.data.source)} ..."):
        sizes = [cell.trial.config.data.image_size for cell in grid.cells]
        source = grid.how.open_images(override(grid.base, {"data.image_size": max(sizes)}))
    worker = Worker(source, grid.how, console)
    if source.skipped_notice:
        worker.say(source.skipped_notice)
    judged = "the test images" if grid.how.judge == "test" else "held-out training images"
    worker.say(f"study {study.name} in {grid.folder}: {grid.describe()}; judged on {judged}")
    if grid.definition["unequal_budget"]:
        worker.say(f"unequal budget: {'; '.join(grid.definition['unequal_budget'])}")
    command = shlex.join(["deepbregman", "study", study.name, "--out", str(grid.folder)])
    results = work(grid, worker, command)
    figures = [grid.folder / f"{study.name}.{kind}" for kind in ("png", "svg")]
    save_study_figure(figures, results)
    return StudyResult(grid.folder, results)


def usable_arms(arms: tuple[Arm, ...], base: Config) -> tuple[Arm, ...]:
    """Leave out arms that change nothing in this recipe."""
    fields = fields_of(base)
    return tuple(arm for arm in arms if arm.only_if is None or fields[arm.only_if])


def default_folder(study: Study, options: StudyOptions) -> Path:
    """Name a study's folder by what it is, so that the same command goes on with it."""
    recipes = list(options.recipes or study.recipes)
    name = "-".join(name_arms(recipes)) if recipes else Path(options.recipe or study.recipe).stem
    first = recipes[0] if recipes else options.recipe or study.recipe
    data = options.data or load_recipe(first).data.source
    return Path("studies") / f"{study.name}-{name}-{Path(data).stem}"


def open_grid(study: Study, options: StudyOptions) -> Grid:
    """Check all that can be checked before an image is read; begin the folder, or join it."""
    _check_kind(study, options)
    folder = options.out or default_folder(study, options)
    _resolve(study, options, folder)  # nothing is made for a request that is refused
    with lock(folder, "study"):
        grid = _resolve(study, options, folder)  # another process may have begun it meanwhile
        write_json(folder / "study.json", grid.definition)
    return grid


def _check_kind(study: Study, options: StudyOptions) -> None:
    """Refuse options of another kind of study."""
    if options.trials is not None:
        raise UserError(f"study {study.name} is a grid and takes no --trials; see --seeds")
    if study.recipes and options.recipe is not None:
        raise UserError(
            f"study {study.name} compares whole recipes and takes no --recipe: give all of them, "
            f"the reference first, such as --recipes simclr {options.recipe}"
        )
    given = "--recipes" * bool(options.recipes) or "--unequal" * options.unequal
    if not study.recipes and given:
        raise UserError(
            f"study {study.name} varies one recipe and takes no {given}: give that with --recipe; "
            "study comparison compares whole recipes"
        )


def _resolve(study: Study, options: StudyOptions, folder: Path) -> Grid:
    before = _read_definition(folder, study)
    settings = _merge_options(study, options, before)
    bases = _build_bases(study, options, settings, before, folder)
    base, unequal = next(iter(bases.values())), []
    if study.recipes:
        unequal = check_budget(bases, unequal=settings["unequal"])
        study = study.with_recipes(bases)
    study = study.with_values(settings["values"])
    arms = usable_arms(study.arms, base)
    chosen = [arm for arm in study.choose_arms(settings["only"]) if arm in arms]
    if not chosen:
        raise UserError(
            f"--only {' '.join(settings['only'])}: these arms change nothing in recipe "
            f"{settings['recipe']}; choose among {', '.join(arm.name for arm in arms)}"
        )
    check_arms(study, chosen, base)
    if settings["seeds"] < 1:
        raise UserError(f"--seeds {settings['seeds']}: there must be at least 1")
    if settings["linear_epochs"] < 0:
        raise UserError(f"--linear-epochs {settings['linear_epochs']}: it must be 0 or more")
    device = pick_device(options.accelerator)
    epochs = {config.training.epochs for config in bases.values()}
    definition = {
        **settings,
        "study": dataclasses.asdict(study),
        "data": base.data.source,
        "epochs": base.training.epochs if len(epochs) == 1 else None,
        "base": to_toml(base),
        "unequal_budget": unequal,
        "left_out": [arm.name for arm in study.arms if arm not in arms],
        "provenance": before["provenance"] if before else provenance(device_name(device)),
    }
    how = Judgement(
        settings["judge"],
        linear_epochs=settings["linear_epochs"],
        keep_checkpoints=options.keep_checkpoints,
        accelerator=options.accelerator,
    )
    seeds = range(base.seed, base.seed + settings["seeds"])
    cells = plan_cells(arms, base, seeds, folder / "runs")  # of all arms: which trial an arm shares
    cells = [cell for cell in cells if cell.arm in chosen]
    return Grid(study, folder, base, how, definition, cells)


def _read_definition(folder: Path, study: Study) -> Record | None:
    """Read what a folder was begun with; None of a new one."""
    path = folder / "study.json"
    if path.is_file():
        before = read_json(path, SHAPE)
        if not {"study", "provenance", "base", "data", "epochs", "changes"} <= before.keys():
            raise UserError(f"{path} holds no study of ours: restore it, or choose another --out")
        name = before["study"].get("name")
        if name != study.name:
            raise UserError(
                f"{folder} holds study {name}, not {study.name}: choose another folder with --out"
            )
        return before
    if folder.exists() and (
        not folder.is_dir() or any(inside.name != "locks" for inside in folder.iterdir())
    ):
        raise UserError(f"{folder} exists and holds no study: choose another folder with --out")
    return None


def _merge_options(study: Study, options: StudyOptions, before: Record | None) -> dict[str, Any]:
    """Take each option as it is given, else as the folder has it, else its default."""
    given = {
        name: list(value) if isinstance(value, tuple) else value
        for name in ("recipe", *DEFAULTS)
        if (value := getattr(options, name)) not in (None, (), {}) and value is not False
    }
    if before is None:
        defaults = {"recipe": study.recipe, **DEFAULTS, "recipes": list(study.recipes)}
        settings = {**defaults, **given}
        if study.recipes:
            settings["recipe"] = ", ".join(name_arms(settings["recipes"]))
        return settings
    stored = {name: before.get(name, DEFAULTS.get(name)) for name in ("recipe", *DEFAULTS)}
    for name in FIXED:
        if given.get(name, stored[name]) != stored[name]:
            raise UserError(
                f"--{name.replace('_', '-')} is {given[name]!r} here and {stored[name]!r} in the "
                f"folder of this study, begun before: leave it out to go on, or choose another "
                "folder with --out"
            )
    return {**stored, **given}


def _build_bases(
    study: Study, options: StudyOptions, settings: Record, before: Record | None, folder: Path
) -> dict[str, Config]:
    """Return what the arms start from: one configuration, or one by arm where those are recipes.

    A folder that has begun keeps its own, even where a recipe's file has changed since.
    """
    stored: dict[str, Config] = {}
    if before is not None:
        base = from_toml(before["base"], str(folder / "study.json"))
        stored = {study.name: base}
        if study.recipes:
            arms = before["study"]["arms"]
            stored = {arm["name"]: override(base, arm["changes"]) for arm in arms}
    given = join_changes(options.data, options.epochs, options.changes)
    if stored and not (options.recipe or options.recipes or given):
        return stored
    kept: dict[str, Any] = {}
    if before is not None:
        named = {"data.source": before["data"], "training.epochs": before["epochs"]}
        kept = {name: value for name, value in named.items() if value is not None}
        kept |= {} if options.changes else before["changes"]
    names = name_arms(settings["recipes"]) if study.recipes else [study.name]
    bases = {}
    for name, recipe in zip(names, settings["recipes"] or [settings["recipe"]], strict=True):
        config = override(load_recipe(recipe), {**kept, **given})
        if settings["judge"] == "holdout" and config.data.holdout == 0.0:
            config = override(config, {"data.holdout": HOLDOUT})
        bases[name] = config
        changed = describe_differences(stored[name], config) if stored else ""
        if changed:
            of_arm = f", {name}" * bool(study.recipes)
            raise UserError(
                f"{folder} holds study {study.name}{of_arm} with other settings ({changed}): leave "
                "the options out to go on with those, or choose another folder with --out"
            )
    return bases
