"""The engine of grid studies: any number of workers fill a folder's cells, each cell once."""

import gc
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from deepbregman.config import Config, override
from deepbregman.data import Source
from deepbregman.errors import UserError
from deepbregman.evaluation.inputs import open_labelled
from deepbregman.reporting.screen import study_table
from deepbregman.reporting.studies import save_study_figure
from deepbregman.runs import Record
from deepbregman.training.faults import Interrupted

from .cells import Cell, labelled_training, run_cell
from .claims import claim, exclusively
from .definition import Settings, Study
from .folder import Task, open_task
from .results import MAIN_METRIC, write_results

POLL_SECONDS = 0.5


class Stopped(Exception):
    """A signal stopped a study or a search; what was done is kept.

    Args:
        done: what there is, in words.
        command: that goes on.
        number: of the signal.
    """

    def __init__(self, done: str, command: str, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}; {done}; continue with: {command}")
        self.signal_number = number


@contextmanager
def stopping(done: Callable[[], str], command: str) -> Iterator[None]:
    """Turn an interruption, in training or between, into words on how to go on."""
    try:
        yield
    except Interrupted as error:
        raise Stopped(done(), command, error.signal_number) from None
    except KeyboardInterrupt:
        raise Stopped(done(), command, signal.SIGINT) from None


def one_process() -> None:
    """Refuse torchrun: workers share a study by its folder or storage."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "torchrun started several processes for one study: start the command itself once for "
            "each GPU instead, with the same --out and another CUDA_VISIBLE_DEVICES each"
        )


def run_study(study: Study, settings: Settings, console: Console) -> Path:
    """Bring a study to its end, together with other workers on the same folder.

    Args:
        study: of the catalogue.
        settings: what the user asked for.
        console: to draw on.

    Returns:
        The study's folder.
    """
    one_process()
    if settings.trials is not None:
        raise UserError(f"study {study.name} is a grid and takes no --trials; see --seeds")
    task = open_task(study, settings)

    def say(words: str) -> None:
        console.print(words, highlight=False, soft_wrap=True, markup=False)

    def state() -> str:
        done = sum(cells[0].outcome() is not None for cells in task.groups)
        return f"{done} of {len(task.groups)} cells are done"

    with console.status(f"opening {escape(task.base.data.source)} ..."):
        opening = open_labelled if task.how.judge == "test" else labelled_training
        source = opening(_widest(task))
    if source.skipped_notice:
        say(source.skipped_notice)
    judged = "the test images" if task.how.judge == "test" else "held-out training images"
    say(f"study {study.name} in {task.folder}: {state()}; judged on {judged}")
    if task.definition["unequal_budget"]:
        say(f"unequal budget: {'; '.join(task.definition['unequal_budget'])}")
    command = shlex.join(["deepbregman", "study", study.name, "--out", str(task.folder)])
    with stopping(state, command):
        _work(task, source, console)
    results = refresh(task)
    figures = [task.folder / f"{study.name}.{kind}" for kind in ("png", "svg")]
    save_study_figure(figures, results)
    console.print(study_table(results))
    say(f"figure: {figures[0]}")
    return task.folder


def _widest(task: Task) -> Config:
    """Return the configuration to open the images with: large enough for every arm."""
    sizes = [override(task.base, arm.changes).data.image_size for arm in task.study.arms]
    return override(task.base, {"data.image_size": max(sizes)})


def refresh(task: Task) -> Record:
    """Write the results of all cells that are done, one worker at a time."""
    with exclusively(task.folder / "locks" / "results"):
        return write_results(task.folder, task.definition, task.everything())


def _work(task: Task, source: Source, console: Console) -> None:
    """Take free cells until none is left; wait for those of others, who may die over them."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[place]}"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    waiting = [cells[0] for cells in task.groups if cells[0].outcome() is None]
    finished = len(task.groups) - len(waiting)
    bar = progress.add_task(
        "", total=len(task.groups), completed=finished, place="", status="waiting for others"
    )
    with progress:
        while waiting:
            before = len(waiting)
            for cell in list(waiting):
                with claim(task.folder / "locks" / cell.name) as is_mine:
                    if is_mine:
                        _take(cell, task, source, progress, len(task.groups) - len(waiting))
                        waiting.remove(cell)
                progress.update(bar, completed=len(task.groups) - len(waiting))
            if len(waiting) == before:  # others have all that is left
                progress.update(bar, status=f"waiting for {len(waiting)} cells of other workers")
                time.sleep(POLL_SECONDS)


def _take(cell: Cell, task: Task, source: Source, progress: Progress, done: int) -> None:
    """Bring a claimed cell to its end and tell of it; another worker may have been before us."""
    if cell.outcome() is not None:
        return
    number, total, bar = done + 1, len(task.groups), progress.task_ids[0]
    title = f"{task.study.name} {cell.arm.name}, seed {cell.seed}"

    def watch(epoch: int, values: Mapping[str, float]) -> None:
        share = epoch / cell.config.training.epochs
        words = "  ".join(f"{name} {value:.2f}" for name, value in values.items())
        progress.update(bar, completed=done + share, status=f"epoch {epoch}  {words}")

    progress.update(bar, place=f"cell {number}/{total}: {title}", status="")
    started = time.monotonic()
    outcome = run_cell(cell, source, task.how, watch)
    gc.collect()  # the networks of a cell hold each other; their memory is the next one's
    refresh(task)
    value = outcome["metrics"].get(MAIN_METRIC)
    words = outcome["state"] if value is None else f"linear {value:.2f} %"
    progress.console.print(
        f"cell {number}/{total}  {title}: {words}  ({time.monotonic() - started:.0f} s)",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
