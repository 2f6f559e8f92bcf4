"""The engine of studies and searches: trials that any number of processes share.

A trial is a configuration that is trained and evaluated; its folder is an ordinary run. A process
claims a trial by a lock on a file. The lock ends with the process, so another process continues
the run of a killed one from its checkpoint. The outcome of a trial is in the ``result.json`` of its
run and is written last.
"""

import gc
import math
import os
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, fields_of
from deepbregman.data import Source
from deepbregman.data.datasets import lack_of_labels
from deepbregman.data.opening import open_data, split_for_monitor
from deepbregman.errors import Diverged, UserError, first_line, is_out_of_memory
from deepbregman.evaluation.inputs import Evaluation, open_labelled
from deepbregman.evaluation.options import Options
from deepbregman.evaluation.protocols import run_protocols
from deepbregman.files import hold_lock, refuse_link
from deepbregman.launching import (
    find_signal,
    handle_signals,
    leave_group,
    name_signal,
    take_as_ctrl_c,
)
from deepbregman.method.networks import Model
from deepbregman.runs import CHANGEABLE, Record, Run, is_run
from deepbregman.terminal import say
from deepbregman.training.callbacks import Callback
from deepbregman.training.faults import Fault, Interrupted
from deepbregman.training.notices import find_surprises
from deepbregman.training.randomness import count_steps

from .definition import EvaluateOn, describe_differences
from .results import MAIN_METRIC

POLL_SECONDS = 0.5
Watch = Callable[[int, Mapping[str, float]], None]
"""Called after each epoch with what the kNN monitor has measured; an exception ends the run."""


@dataclass(frozen=True)
class Trial:
    """A configuration to train and evaluate, and the folder of its run."""

    folder: Path
    config: Config

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    def open_run(self) -> Run:
        """Open the run; refuse one of another configuration, which may come from another folder.

        What neither configuration uses may differ: a recipe may have got a table for a term that
        is off in both.
        """
        run = Run.open(self.folder)
        used = _list_used(run.config) | _list_used(self.config)
        changed = describe_differences(run.config, self.config, lambda name: name in used)
        if changed:
            raise UserError(
                f"{self.folder} is a run of another configuration ({changed}): move it away, or "
                "choose another folder with --out"
            )
        return run

    def outcome(self) -> Record | None:
        """Read the outcome of the trial; None if it is not done."""
        if not (self.folder / "result.json").is_file():
            return None
        outcome = self.open_run().result().get("study")
        if outcome is not None and not {"state", "metrics"} <= outcome.keys():
            raise UserError(
                f"{self.folder / 'result.json'}: 'study' is not the outcome of a trial: restore "
                "the file or remove it"
            )
        return outcome


def _list_used(config: Config) -> set[str]:
    """List the fields on which what is trained depends, by dotted name."""
    return fields_of(config).keys() - config.unused_fields.keys() - CHANGEABLE


@dataclass(frozen=True)
class EvaluationPlan:
    """Settings of the evaluation of every trial of a study."""

    evaluate_on: EvaluateOn
    protocols: tuple[Literal["knn", "linear"], ...] = ("knn", "linear")
    linear_epochs: int = 0
    keep_checkpoints: bool = False
    accelerator: str = "auto"

    def open_images(self, config: Config) -> Source:
        """Open labelled images; without test images where held-out ones are used instead."""
        if self.evaluate_on == "test":
            return open_labelled(config)
        source = open_data(config)
        if source.train.labels is None:
            raise lack_of_labels(config.data.source)
        return replace(source, test=None)

    def check_images(self, source: Source, config: Config) -> list[str]:
        """Refuse too few images to train on or to hold out, before a folder is made.

        Returns:
            Warnings about settings that are rarely meant, which a trial does not print.
        """
        kept, held_out = split_for_monitor(source.train, config)
        if self.evaluate_on == "holdout" and len(held_out) == 0:
            raise UserError(
                f"data {config.data.source!r} has no two training images of a class, so that none "
                "can be held out to evaluate on: give more images"
            )
        others = () if config.objective.needs_labels else source.unlabelled or ()
        steps = config.training.epochs * count_steps(config, len(kept) + len(others))
        in_a_step = config.training.batch_size * config.training.accumulate
        return list(find_surprises(config, steps * in_a_step))

    def splits(self, source: Source, config: Config) -> Source:
        """Return the splits to evaluate on: training and test, or the two parts of training."""
        if self.evaluate_on == "test":
            return source
        kept, held_out = split_for_monitor(source.train, config)
        return Source(source.name, source.train.select(kept), source.train.select(held_out))

    def name_images(self, config: Config) -> str:
        """Name the images of the evaluation as records do."""
        return config.data.source + ", held out" * (self.evaluate_on == "holdout")

    def evaluate(self, trial: Trial, run: Run, source: Source) -> dict[str, float]:
        """Evaluate a trained trial; return top-1 accuracies by protocol and variant."""
        config = run.config
        options = Options(
            protocols=self.protocols, data=self.name_images(config), epochs=self.linear_epochs
        )
        splits = self.splits(source, config)
        evaluation = Evaluation(run, options, self.accelerator, splits, with_references=False)
        rows = run_protocols(evaluation)
        return name_top1(rows)


def say_each_once(warnings: Iterable[str], console: Console) -> None:
    """Print the warnings of several trials."""
    for words in dict.fromkeys(warnings):
        say(console, words, "yellow")


def name_top1(rows: Iterable[Record]) -> dict[str, float]:
    """Return the top-1 accuracies among rows, by protocol and variant."""
    top1 = [row for row in rows if row["metric"] == "top1"]
    return {f"{row['protocol']}, {row['variant']}": row["value"] for row in top1}


def lock(folder: Path, name: str, *, wait: bool = True) -> AbstractContextManager[bool]:
    """Hold ``locks/NAME`` of a study for a block, among all processes that share the folder.

    Without ``wait``, the block runs at once and gets False if another process holds the lock.
    """
    locks = folder / "locks"
    refuse_link(locks)
    locks.mkdir(parents=True, exist_ok=True)
    return hold_lock(locks / name, math.inf if wait else 0.0)


def become_worker() -> None:
    """Make this process an independent worker, even if srun or torchrun started several.

    Workers share a study by its folder. If they joined one group, the gradients of different trials
    would be averaged. If several processes of a machine see the same GPUs, each takes one.
    """
    here = leave_group()
    num_gpus = torch.cuda.device_count()
    if here.local_processes > 1 and num_gpus > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[here.local_rank % num_gpus]


def run_trial(
    trial: Trial, source: Source, evaluation: EvaluationPlan, watch: Watch | None = None
) -> Record:
    """Train and evaluate a trial; continue it if it has begun.

    Returns:
        Its outcome: ``state``, and ``metrics`` or, where training diverged, ``why``.
    """
    for path in (trial.folder.parent, trial.folder):
        refuse_link(path)
    outcome = trial.outcome()
    if outcome is None:
        outcome = {"state": "done", "evaluate_on": evaluation.evaluate_on, "metrics": {}}
        try:
            outcome["metrics"] = _train_and_evaluate(trial, source, evaluation, watch)
        except Diverged as error:
            outcome |= {"state": "diverged", "why": str(error)}
        Run.open(trial.folder).add_result(study=outcome)
        # Or every worker would train it again, for ever.
        assert trial.outcome() is not None, f"{trial.folder} is trained and measured, and not done"
    if not evaluation.keep_checkpoints:
        shutil.rmtree(trial.folder / "checkpoints", ignore_errors=True)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's is untyped
        torch.compiler.reset()  # the compiled step would keep its memory
    return outcome


class _EpochWatch(Callback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_epoch(self, record: Mapping[str, Any], model: Model) -> None:
        """Pass on the epoch and what the monitor has measured, which may be nothing."""
        values = {name: record[name] for name in record if name.startswith("knn")}
        self.watch(record["epoch"], values)


def _train_and_evaluate(
    trial: Trial, source: Source, evaluation: EvaluationPlan, watch: Watch | None
) -> dict[str, float]:
    run = trial.open_run() if is_run(trial.folder) else None
    given: dict[str, Any] = {
        "accelerator": evaluation.accelerator,
        "source": source,
        "callbacks": [] if watch is None else [_EpochWatch(watch)],
        "console": Console(quiet=True),  # a study says itself what its trials share
    }
    if run is None:
        run = pretrain(trial.config, run=trial.folder, **given)
    elif "pretrain" not in run.result() or not run.last_checkpoint.exists():
        run = resume(trial.folder, **given)
    return evaluation.evaluate(trial, run, source)


class Stopped(Exception):
    """A signal stopped a study or a search; finished work is kept."""

    def __init__(self, done: str, command: str, number: int) -> None:
        super().__init__(f"stopped by {name_signal(number)}; {done}; continue with: {command}")
        self.signal_number = number


class TooLarge(Exception):
    """Memory ran out in a trial; the message is the first line of that error.

    It is not chained to that error, which would hold the tensors of the trial.
    """


class Worker:
    """Runs trials in this process, one after the other, and shows their progress."""

    def __init__(
        self, open_images: Callable[[Trial], Source], evaluation: EvaluationPlan, console: Console
    ) -> None:
        self.open_images, self.evaluation, self.console = open_images, evaluation, console
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[title]}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            speed_estimate_period=math.inf,  # an epoch may take longer than rich's 30 seconds
        )
        self.bar = self.progress.add_task("", total=1, title="", status="")
        self.done = 0

    def show(self, done: int, total: int) -> None:
        """Show how many trials are done, by all processes."""
        self.done = done
        self.progress.update(self.bar, completed=done, total=total)

    def say(self, words: str) -> None:
        """Print a line above the bar."""
        say(self.console, words)

    def run(self, trial: Trial, title: str, watch: Watch | None = None) -> Record:
        """Run a trial, whose lock this process holds, to its end, and print the outcome.

        Raises:
            TooLarge: Memory ran out; other trials may need less.
        """

        def show(epoch: int, values: Mapping[str, float]) -> None:
            epochs = trial.config.training.epochs
            words = "  ".join(f"{name} {value:.2f}" for name, value in values.items())
            self.progress.update(
                self.bar,
                completed=self.done + epoch / max(1, epochs),
                status=f"epoch {epoch} of {epochs}  {words}",
            )
            if watch is not None and values:
                watch(epoch, values)

        self.progress.update(self.bar, title=title, status="")
        started, too_large = time.monotonic(), ""
        try:
            outcome = run_trial(trial, self.open_images(trial), self.evaluation, show)
        except (RuntimeError, MemoryError, UserError) as error:
            if not is_out_of_memory(error):
                raise
            too_large = first_line(error)
        finally:
            gc.collect()  # networks are in reference cycles; their memory is for the next trial
            self.progress.update(self.bar, title="", status="")
        if too_large:
            self.say(f"{title}: out of memory; going on with the others")
            gc.collect()  # the error held the tensors of the trial until here
            if torch.cuda.is_available():
                torch.compiler.reset()
                torch.cuda.empty_cache()
            raise TooLarge(too_large)
        metrics = outcome["metrics"]
        name = MAIN_METRIC if MAIN_METRIC in metrics else next(iter(metrics), "")
        words = f"{name.partition(',')[0]} {metrics[name]:.2f} %" if name else outcome["state"]
        self.say(f"{title}: {words}  ({time.monotonic() - started:.0f} s)")
        return outcome


class Queue(ABC):
    """Source of trials for workers: a :class:`TrialQueue`, or Optuna."""

    noun: ClassVar[str] = "runs"

    @abstractmethod
    def count(self) -> tuple[int, int]:
        """Return how many trials are done, by all processes, and how many there are."""

    @abstractmethod
    def run_next(self, worker: Worker) -> bool:
        """Claim a free trial and run it; False if other processes hold all that remain."""

    @abstractmethod
    def save(self) -> Record:
        """Write the results of all trials that are done."""

    @abstractmethod
    def find_too_large(self) -> Mapping[str, str]:
        """Name the trials that memory ran out in, each with the words of the error.

        Empty while another trial is left to run or to wait for.
        """

    def describe(self) -> str:
        """Describe how many trials are done."""
        done, total = self.count()
        return f"{done} of {total} {self.noun} are done"


class TrialQueue(Queue):
    """A list of trials that processes claim by locks in a folder."""

    def __init__(self, folder: Path, trials: Sequence[Trial]) -> None:
        self.folder, self.trials = folder, trials
        self.waiting = trials  # those that were not done at the last count
        # Trials for which this process had too little memory, with the words of the error.
        self.too_large: dict[str, str] = {}

    def count(self) -> tuple[int, int]:
        """Return how many trials are done, by all processes, and how many there are."""
        self.waiting = [trial for trial in self.waiting if trial.outcome() is None]
        return len(self.trials) - len(self.waiting), len(self.trials)

    def run_next(self, worker: Worker) -> bool:
        """Claim a free trial and run it; False if other processes hold all that remain."""
        for trial in self.waiting:
            if trial.name in self.too_large:
                continue
            with lock(self.folder, trial.name, wait=False) as is_mine:
                if not is_mine:
                    continue
                if trial.outcome() is None:  # another process may have been faster
                    try:
                        worker.run(trial, trial.name)
                    except TooLarge as error:
                        self.too_large[trial.name] = str(error)
                return True
        return False

    def find_too_large(self) -> Mapping[str, str]:
        """Name the trials that memory ran out in, if no other is left to run or to wait for."""
        if not self.too_large.keys() >= {trial.name for trial in self.waiting}:
            return {}
        for trial in self.waiting:
            with lock(self.folder, trial.name, wait=False) as is_free:
                # Another process, which may have more memory, runs it now, or just has.
                if not is_free or trial.outcome() is not None:
                    return {}
        return {trial.name: self.too_large[trial.name] for trial in self.waiting}


def work(queue: Queue, worker: Worker, command: str) -> Record:
    """Run trials until all are done, also those that other processes leave when they die."""
    is_waiting = False
    try:
        # Training has handlers of its own.
        with handle_signals([signal.SIGTERM], take_as_ctrl_c), worker.progress:
            while (counts := queue.count())[0] < counts[1]:
                worker.show(*counts)
                if queue.run_next(worker):
                    if queue.count()[0]:
                        queue.save()
                    continue
                if too_large := queue.find_too_large():
                    written = ", and their results are written" * (queue.count()[0] > 0)
                    why = next(iter(too_large.values()))
                    raise UserError(
                        f"memory ran out in {', '.join(too_large)} ({why}); {queue.describe()}"
                        f"{written}; on a machine with more memory continue with: {command}"
                    )
                if not is_waiting:
                    worker.say("waiting for other workers, which run the remaining trials")
                    is_waiting = True
                time.sleep(POLL_SECONDS)
    except Interrupted as error:
        raise Stopped(queue.describe(), command, error.signal_number) from None
    except KeyboardInterrupt as error:
        raise Stopped(queue.describe(), command, find_signal(error)) from None
    except Fault as error:
        raise Fault(error.words, command) from error
    return queue.save()
