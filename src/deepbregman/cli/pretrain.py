"""deepbregman pretrain: a new run, or on with an old one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from deepbregman.config import Config, load_recipe, recipes
from deepbregman.errors import UserError
from deepbregman.runs import default_folder

from .options import PROGRAM, Accelerator, parse, say


@dataclass(frozen=True)
class PretrainOptions:
    """Options of a new run."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    run: Path | None = None
    """Folder of the run, which must not exist; by default a new one under runs/."""
    accelerator: Accelerator = "auto"
    """Where to train; auto takes a GPU if there is one."""


def command(arguments: list[str]) -> None:
    """Pretrain an encoder: deepbregman pretrain RECIPE [options], or --resume RUN."""
    from deepbregman.studies.pretraining import pretrain, resume

    console = Console()
    if any(word == "--resume" or word.startswith("--resume=") for word in arguments):

        def resumed(resume: Path, accelerator: Accelerator = "auto") -> tuple[Path, Accelerator]:
            """Go on with an interrupted run, exactly where it stopped; takes no other field.

            Args:
                resume: Folder of the run.
                accelerator: Where to train; auto takes a GPU if there is one.
            """
            return resume, accelerator

        folder, accelerator = parse(resumed, "pretrain", arguments)
        run = resume(folder, accelerator=accelerator, console=console)
    else:
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
        )
        folder = options.run or default_folder(Path(recipe).stem)
        run = pretrain(options.config, run=folder, accelerator=options.accelerator, console=console)
    say(console, f"run: {run.path}")
    say(console, f"next: {PROGRAM} evaluate {run.path}")
