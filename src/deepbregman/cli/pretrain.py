"""deepbregman pretrain: a new run, or on with an old one."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from rich.console import Console

from deepbregman.config import Config, load_recipe, recipes
from deepbregman.errors import UserError
from deepbregman.launching import check_asked_for, place, said_by_first, supervise
from deepbregman.runs import Run, default_folder

from .options import PROGRAM, Accelerator, parse, say, screen


@dataclass(frozen=True)
class PretrainOptions:
    """Options of a new run."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    run: Path | None = None
    """Folder of the run, which must not exist; by default a new one under runs/."""
    accelerator: Accelerator = "auto"
    """Where to train; auto takes a GPU if there is one."""
    devices: int | None = None
    """Processes on this machine, one for each GPU; by default one, or as torchrun or srun say."""
    nodes: int | None = None
    """Machines with as many processes each. Without torchrun or srun, run the command on each with
    MASTER_ADDR, MASTER_PORT and NODE_RANK set."""


class _Job(NamedTuple):
    """What the arguments ask for."""

    start: Callable[[Console], Run]
    folder: Path
    devices: int | None
    nodes: int | None
    named: list[str]
    """Arguments to add so that other processes take the same folder."""


def command(arguments: list[str]) -> None:
    """Pretrain an encoder: deepbregman pretrain RECIPE [options], or --resume RUN."""
    resuming = any(word == "--resume" or word.startswith("--resume=") for word in arguments)
    with said_by_first():
        job = _resumed(arguments) if resuming else _new(arguments)
        to_start = check_asked_for(job.devices, job.nodes)
    if to_start:
        devices, nodes = job.devices or 1, job.nodes or 1
        known = nodes == 1 or not job.named
        advice = f"continue with: {PROGRAM} pretrain --resume {job.folder if known else 'RUN'}"
        words = ["pretrain", *arguments, *job.named]
        sys.exit(supervise(words, devices, nodes, f"{advice} --devices {devices}"))
    console = screen(quiet=place().rank > 0)
    run = job.start(console)
    say(console, f"run: {run.path}")
    say(console, f"next: {PROGRAM} evaluate {run.path}")


def _resumed(arguments: list[str]) -> _Job:
    def options(
        resume: Path,
        accelerator: Accelerator = "auto",
        devices: int | None = None,
        nodes: int | None = None,
    ) -> _Job:
        """Go on with an interrupted run, exactly where it stopped; takes no other field.

        Args:
            resume: Folder of the run.
            accelerator: Where to train; auto takes a GPU if there is one.
            devices: Processes on this machine; need not be as many as before.
            nodes: Machines with as many processes each.
        """

        def start(console: Console) -> Run:
            from deepbregman.studies.pretraining import resume as go_on

            return go_on(resume, accelerator=accelerator, console=console)

        return _Job(start, resume, devices, nodes, [])

    return parse(options, "pretrain", arguments)


def _new(arguments: list[str]) -> _Job:
    named = bool(arguments) and not arguments[0].startswith("-")
    if not named and not {"-h", "--help"} & set(arguments):
        raise UserError(
            f"pretrain needs a recipe first: one of {', '.join(recipes())}, or a .toml file; "
            "for example `deepbregman pretrain digits`"
        )
    recipe = arguments[0] if named else "paper"
    options = tyro.cli(
        PretrainOptions,
        default=PretrainOptions(load_recipe(recipe)),
        args=arguments[named:],
        prog=f"{PROGRAM} pretrain {recipe if named else 'RECIPE'}",
        description=(
            "Pretrain an encoder. Defaults are the recipe's"
            + ("." if named else " (here: paper's).")
            + " To go on with an interrupted run: deepbregman pretrain --resume RUN"
        ),
        console_outputs=place().local_rank == 0,
    )
    folder = options.run or default_folder(Path(recipe).stem)

    def start(console: Console) -> Run:
        from deepbregman.studies.pretraining import pretrain

        return pretrain(
            options.config, run=folder, accelerator=options.accelerator, console=console
        )

    words = [] if options.run else ["--run", str(folder)]
    return _Job(start, folder, options.devices, options.nodes, words)
