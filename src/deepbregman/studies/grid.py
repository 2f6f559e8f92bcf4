"""Grid studies: every arm is trained with every seed, by any number of processes on one folder.

::

    STUDY/
      study.json                  definition, recipe, options, versions
      runs/ARM-seedK/             a trial: an ordinary run folder
      locks/                      of the trials; held by the process that runs one
      results.json, results.csv   every arm and seed
      tables.md                   mean, deviation and number by arm, and differences
      NAME.png, NAME.svg, NAME.pdf
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.markup import escape

from deepbregman.config import Config, override
from deepbregman.data import Source
from deepbregman.errors import UserError
from deepbregman.evaluation.results import KeptPredictions, Predictions
from deepbregman.files import is_number, write_json
from deepbregman.reporting.charts import name_figures
from deepbregman.reporting.grid_charts import save_study_figure
from deepbregman.reporting.grid_tables import MEASURED
from deepbregman.runs import Record, Run, collect_provenance
from deepbregman.statistics import summarise
from deepbregman.training.devices import device_name, pick_device

from .definition import Arm, Study, StudyOptions, StudyResult
from .engine import (
    EvaluationPlan,
    Trial,
    TrialQueue,
    Worker,
    become_worker,
    lock,
    say_each_once,
    work,
)
from .grid_plan import GridPlan, plan_study
from .results import write_results


@dataclass(frozen=True)
class GridCell:
    """An arm with a seed; arms with the same configuration share a trial."""

    arm: Arm
    seed: int
    trial: Trial


def plan_cells(
    arms: Iterable[Arm], base: Config, seeds: Iterable[int], runs: Path
) -> list[GridCell]:
    """List the cells seed by seed, so that an unfinished study still compares all arms."""
    cells: list[GridCell] = []
    trials: dict[str, Trial] = {}
    for seed in seeds:
        for arm in arms:
            config = override(base, {**arm.changes, "seed": seed})
            trial = Trial(runs / f"{arm.folder_name}-seed{seed}", config)
            trial = trials.setdefault(repr(config), trial)
            cells.append(GridCell(arm, seed, trial))
    return cells


class Grid(TrialQueue):
    """A study with its options: the queue of the trials that this command trains."""

    def __init__(
        self, plan: GridPlan, evaluation: EvaluationPlan, cells: Sequence[GridCell]
    ) -> None:
        trials = {cell.trial.name: cell.trial for cell in cells}
        super().__init__(plan.folder, list(trials.values()))
        self.plan, self.evaluation, self.cells = plan, evaluation, cells

    def save(self) -> Record:
        """Write the results of all trials that are done, those of earlier commands included."""
        with lock(self.folder, "results"):
            runs = self.folder / "runs"
            names = [re.search(r"-seed(\d+)$", path.name) for path in runs.glob("*-seed*")]
            seeds = sorted({int(name[1]) for name in names if name})
            arms, base = self.plan.arms, self.plan.base
            cells = plan_cells(arms, base, seeds, runs)
            cells.sort(key=lambda cell: (arms.index(cell.arm), cell.seed))
            done = [(cell, outcome) for cell in cells if (outcome := cell.trial.outcome())]
            if not done:
                raise UserError(f"{runs} holds no finished run: there are no results to write")
            rows = [
                {
                    "arm": cell.arm.name,
                    "series": cell.arm.series,
                    "x": cell.arm.x,
                    "seed": cell.seed,
                    "run": cell.trial.name,
                    **outcome,
                }
                for cell, outcome in done
            ]
            costs = measure_costs(cell for cell, _ in done)
            kept = {
                (cell.arm.name, cell.seed): KeptPredictions(Run.open(cell.trial.folder))
                for cell, _ in done
            }
            images = self.evaluation.name_images(base)

            def find(arm: str, seed: int, metric: str) -> Predictions | None:
                return kept[arm, seed].find(images, metric)

            return write_results(self.folder, self.plan.definition, rows, costs, find)


def measure_costs(cells: Iterable[GridCell]) -> dict[str, Record]:
    """Collect settings and cost of training each arm, from its configuration and its runs.

    ``samples_per_step`` counts views, over all batches of an optimiser step; ``seconds`` is the
    wall time of training, whatever else the machine did. ``images_per_second`` is the median over
    the last half of each run's epochs and ``peak_gigabytes`` the most in them, where recorded.
    """
    trials: dict[str, list[Trial]] = {}
    for cell in cells:
        trials.setdefault(cell.arm.name, []).append(cell.trial)
    costs: dict[str, Record] = {}
    for arm, mine in trials.items():
        config, runs = mine[0].config, [Run.open(trial.folder) for trial in mine]
        settings, views = config.training, config.views.num_views
        results = [run.result() for run in runs]
        trained = [result["pretrain"] for result in results if result.get("pretrain")]
        costs[arm] = {
            "encoder": config.encoder.name,
            "learning_rate": config.optimiser.learning_rate,
            "epochs": settings.epochs,
            "views_per_image": views,
            "view_size": config.view_size,
            **{name: config.count_views(name) for name in ("weak_views", "small_views")},
            "samples_per_step": settings.batch_size * settings.accumulate * views,
            "steps": trained[-1]["step"] if trained else None,
            "seconds": summarise([each["seconds"] for each in trained]) if trained else None,
        }
        epochs = [run.metrics() for run in runs]
        rows = [row for every in epochs for row in every[len(every) // 2 :]]
        for name in MEASURED:
            values = [row[name] for row in rows if is_number(row.get(name))]
            summary = max if name == "peak_gigabytes" else median
            costs[arm][name] = summary(values) if values else None
    return costs


def run_study(study: Study, options: StudyOptions, console: Console | None = None) -> StudyResult:
    """Run a study to its end, or only write the results of its runs, and draw its figure."""
    console = console or Console(quiet=True)
    become_worker()
    plan = plan_study(study, options)
    source = open_study_images(plan, console) if options.train else None
    grid = open_grid(study, options)
    results = grid.save() if source is None else train_grid(grid, source, console)
    save_study_figure(name_figures(grid.folder, study.name), results)
    return StudyResult(grid.folder, results)


def train_grid(grid: Grid, source: Source, console: Console) -> Record:
    """Train and evaluate what is missing, together with other processes on the same folder."""
    worker = Worker(lambda _: source, grid.evaluation, console)
    if source.skipped_notice:
        worker.say(source.skipped_notice)
    on_test = grid.evaluation.evaluate_on == "test"
    where = "the test images" if on_test else "held-out training images"
    name, unequal = grid.plan.study.name, grid.plan.definition["unequal_budget"]
    worker.say(f"study {name} in {grid.folder}: {grid.describe()}; evaluated on {where}")
    if unequal:
        worker.say(f"unequal budget: {'; '.join(unequal)}")
    command = shlex.join(["deepbregman", "study", name, "--out", str(grid.folder)])
    return work(grid, worker, command)


def open_study_images(plan: GridPlan, console: Console) -> Source:
    """Open the images of a study, before its folder is made: images may be refused."""
    configs = [override(plan.base, arm.changes) for arm in plan.chosen]
    largest = max(config.data.image_size for config in configs)
    evaluation = EvaluationPlan(plan.definition["evaluate_on"])
    with console.status(f"opening {escape(plan.base.data.source)} ..."):
        source = evaluation.open_images(override(plan.base, {"data.image_size": largest}))
    found = [words for config in configs for words in evaluation.check_images(source, config)]
    say_each_once(found, console)
    return source


def open_grid(study: Study, options: StudyOptions) -> Grid:
    """Begin the folder of a study, or join it."""
    device = pick_device(options.accelerator)
    folder = plan_study(study, options).folder  # a refused request leaves no folder
    with lock(folder, "study"):
        plan = plan_study(study, options)  # another process may have begun it meanwhile
        definition = plan.definition
        if definition["provenance"] is None:
            definition["provenance"] = collect_provenance(device_name(device))
        write_json(plan.folder / "study.json", definition)
    evaluation = EvaluationPlan(
        definition["evaluate_on"],
        linear_epochs=definition["linear_epochs"],
        keep_checkpoints=options.keep_checkpoints,
        accelerator=options.accelerator,
    )
    seeds = range(plan.base.seed, plan.base.seed + definition["seeds"])
    # Of all arms: an arm that is not chosen may be the first of a trial that several share.
    cells = plan_cells(plan.arms, plan.base, seeds, plan.folder / "runs")
    cells = [cell for cell in cells if cell.arm in plan.chosen]
    return Grid(plan, evaluation, cells)
