"""One trial of a search: a configuration, trained and judged on what was held out."""

import gc
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.trial import Trial
from rich.console import Console
from rich.markup import escape

from deepbregman.config import Config, override
from deepbregman.data import Source
from deepbregman.errors import UserError
from deepbregman.evaluation.knn import split_for_monitor
from deepbregman.runs import Record
from deepbregman.studies.cells import Cell, Judgement, run_cell
from deepbregman.studies.claims import claim, exclusively
from deepbregman.studies.definition import Arm

from .plan import Plan
from .records import write_trials
from .workers import CONTINUES

METRICS = {"linear": "linear, cached features", "knn": "knn, cosine"}
"""How the name of each objective's metric begins."""


def say(console: Console, words: str) -> None:
    """Print words as they are: a folder may be called [x]."""
    console.print(words, highlight=False, soft_wrap=True, markup=False)


@dataclass(frozen=True)
class Job:
    """What a worker does for each trial."""

    study: optuna.Study
    plan: Plan
    source: Source
    folder: Path
    accelerator: str
    console: Console

    def objective(self, trial: Trial) -> float:
        """Train and judge one configuration."""
        values = {dimension.field: dimension.suggest(trial) for dimension in self.plan.space}
        config = override(self.plan.base, values)
        objective = self.plan.definition["objective"]
        shown = "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
        )

        def watch(epoch: int, measured: Mapping[str, float]) -> None:
            trial.report(measured["knn"], epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

        with ExitStack() as stack, self.console.status(f"trial {trial.number}: {escape(shown)}"):
            run = self._claim_run(trial, stack)
            cell = Cell(Arm(run.name, values, 0), config.seed, config, run)
            how = Judgement("holdout", protocols=(objective,), accelerator=self.accelerator)
            try:
                outcome = run_cell(cell, self.source, how, watch)
            except optuna.TrialPruned:
                shutil.rmtree(run / "checkpoints", ignore_errors=True)
                say(self.console, f"trial {trial.number:>3}  pruned         {shown}")
                raise
            finally:
                gc.collect()  # the networks of a trial hold each other
        if outcome["state"] == "diverged":
            trial.set_user_attr("diverged", True)
            value = chance(self.source, config)
        else:
            measured = outcome["metrics"].items()
            value = next(v for name, v in measured if name.startswith(METRICS[objective]))
        words = "diverged" if outcome["state"] == "diverged" else f"{objective} {value:.2f}"
        say(self.console, f"trial {trial.number:>3}  {words:<13}  {shown}")
        return value

    def _claim_run(self, trial: Trial, stack: ExitStack) -> Path:
        """Return the run of a trial; of one that is taken up again, the run it left behind.

        A worker that was only taken for dead may still be writing there; then it is a new one.
        """
        first = trial.user_attrs.get(CONTINUES, trial.number)
        for number in (first, trial.number):
            name = f"trial-{number:04d}"
            if stack.enter_context(claim(self.folder / "locks" / name)):
                return self.folder / "runs" / name
        raise UserError(f"{self.folder}: another process holds the run of trial {trial.number}")

    def after(self) -> Record:
        """Write down what there is."""
        with exclusively(self.folder / "locks" / "results"):
            return write_trials(self.folder, self.study, self.plan.definition)

    def wait(self, number: int) -> None:
        """Say that the rest is with others."""
        say(self.console, f"waiting for {number} trials of other workers")


def chance(source: Source, config: Config) -> float:
    """Return the accuracy of always guessing the most common class: what a wreck is worth."""
    assert source.train.labels is not None
    _, held_out = split_for_monitor(source.train, config)
    counts = source.train.labels[held_out].bincount()
    return 100.0 * counts.max().item() / len(held_out)
