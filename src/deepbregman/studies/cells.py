"""One cell of a study: an arm and a seed, which is an ordinary run that ends with a judgement."""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from deepbregman.commands.pretrain import Watch, pretrain, resume
from deepbregman.config import Config, override
from deepbregman.data import Source
from deepbregman.data.opening import open_data
from deepbregman.errors import Diverged, UserError
from deepbregman.evaluation.inputs import Evaluation
from deepbregman.evaluation.knn import split_for_monitor
from deepbregman.evaluation.options import Options
from deepbregman.evaluation.protocols import run_protocols
from deepbregman.runs import Record, Run

from .deep_divergence import configured, deep_divergence_cell
from .definition import Arm, Judge
from .fields import differences

KEY = "study"
"""Under which a run's result says what the cell came to; written last."""


@dataclass(frozen=True)
class Cell:
    """An arm with a seed, and the run that it is."""

    arm: Arm
    seed: int
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        """What the folder is called."""
        return self.folder.name

    def outcome(self) -> Record | None:
        """Read what the cell came to; None when it is not done."""
        if not (self.folder / "result.json").is_file():
            return None
        outcome: Record | None = Run.open(self.folder).result().get(KEY)
        return outcome


def plan(arms: Iterable[Arm], base: Config, seeds: Iterable[int], runs: Path) -> list[list[Cell]]:
    """Lay out the cells, seed by seed so that a study cut short compares all arms.

    Args:
        arms: of the study.
        base: what they change.
        seeds: in place of the base's.
        runs: the folder of the runs.

    Returns:
        Cells grouped by configuration: arms that come to the same share one run, the first's.
    """
    groups: dict[str, list[Cell]] = {}
    for seed in seeds:
        for arm in arms:
            config = override(base, {**arm.changes, "seed": seed})
            name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', arm.name)}-seed{seed}"
            cells = groups.setdefault(repr((config, arm.supervised)), [])
            folder = cells[0].folder if cells else runs / name
            cells.append(Cell(arm, seed, config, folder))
    return list(groups.values())


@dataclass(frozen=True)
class Judgement:
    """How every cell of a study is judged."""

    judge: Judge
    protocols: tuple[Literal["knn", "linear"], ...] = ("knn", "linear")
    linear_epochs: int = 0
    keep_checkpoints: bool = False
    accelerator: str = "auto"


def labelled_training(config: Config) -> Source:
    """Open the training images and nothing of the test images: a choice must not see them."""
    source = open_data(config)
    if source.train.labels is None:
        raise UserError(
            f"data {config.data.source!r} has no labels to judge by: give a labelled source "
            "with --data, such as a folder with one subfolder for each class"
        )
    return replace(source, test=None)


def judged_on(source: Source, config: Config, judge: Judge) -> Source:
    """Return the labelled splits to judge by: training and test, or the two parts of training.

    Args:
        source: of the run.
        config: of the run, whose seed and ``data.holdout`` make the parts.
        judge: ``holdout`` hands out nothing of the test split.
    """
    if judge == "test":
        return source
    kept, held_out = split_for_monitor(source.train, config)
    return Source(source.name, source.train.select(kept), source.train.select(held_out))


def run_cell(cell: Cell, source: Source, how: Judgement, watch: Watch | None = None) -> Record:
    """Train and judge a cell, from wherever it stands.

    Args:
        cell: to bring to its end.
        source: its data, open.
        how: to judge it.
        watch: hears what the kNN monitor measured; what it raises ends the cell, unjudged.

    Returns:
        Its outcome: ``state``, and ``metrics`` or, where training diverged, ``why``.
    """
    done = cell.outcome()
    if cell.arm.supervised is not None:
        done = done or _supervised(cell, source, how, watch)
        if not how.keep_checkpoints:
            shutil.rmtree(cell.folder / "checkpoints", ignore_errors=True)
        return done
    run = _existing(cell, cell.config)
    if done is None:
        try:
            run = _trained(run, cell, source, how, watch)
            metrics = _judge(run, source, how)
            done = {"state": "done", "judge": how.judge, "metrics": metrics}
        except Diverged as error:
            run = Run.open(cell.folder)
            done = {"state": "diverged", "judge": how.judge, "metrics": {}, "why": str(error)}
        run.add_result(**{KEY: done})
    if not how.keep_checkpoints:
        shutil.rmtree(cell.folder / "checkpoints", ignore_errors=True)
    return done


def _supervised(cell: Cell, source: Source, how: Judgement, watch: Watch | None) -> Record:
    """Train and judge Deep Divergence, which sees the labels."""
    assert cell.arm.supervised is not None
    form, loss = cell.arm.supervised
    splits = judged_on(source, cell.config, how.judge)
    if _existing(cell, configured(cell.config, form)) is not None:
        shutil.rmtree(cell.folder)  # a worker died while it wrote the cell down
    return deep_divergence_cell(
        cell.config,
        form,
        loss,
        cell.folder,
        source=splits,
        judge=how.judge,
        accelerator=how.accelerator,
        watch=None if watch is None else lambda epoch, value: watch(epoch, {"loss": value}),
    )


def _existing(cell: Cell, config: Config) -> Run | None:
    """Open the cell's run where there is one, which must be of this configuration."""
    if not (cell.folder / "config.toml").exists():
        return None
    run = Run.open(cell.folder)
    changed = differences(run.config, config)
    if changed:
        raise UserError(
            f"{cell.folder} is a run of another configuration ({'; '.join(changed)}): move it "
            "away, or choose another folder with --out"
        )
    return run


def _trained(
    run: Run | None, cell: Cell, source: Source, how: Judgement, watch: Watch | None
) -> Run:
    if run is None:
        return pretrain(
            cell.config, run=cell.folder, accelerator=how.accelerator, source=source, watch=watch
        )
    if "pretrain" in run.result() and run.last_checkpoint.exists():
        return run
    return resume(cell.folder, accelerator=how.accelerator, source=source, watch=watch)


def _judge(run: Run, source: Source, how: Judgement) -> dict[str, float]:
    config = run.config
    options = Options(
        protocols=how.protocols,
        data=config.data.source + (", held out" if how.judge == "holdout" else ""),
        epochs=how.linear_epochs,
    )
    judged = judged_on(source, config, how.judge)
    rows = run_protocols(Evaluation(run, options, how.accelerator, judged))
    return {
        f"{row['protocol']}, {row['variant']}": row["value"]
        for row in rows
        if row["metric"] == "top1"
    }
