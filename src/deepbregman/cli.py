"""The command line: verb -> function. It parses, calls, prints, and turns errors into words."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from .config import Config, load_recipe, recipes
from .errors import UserError, explanation, nearest
from .runs import default_folder

Accelerator = Literal["auto", "cpu", "cuda"]
PROGRAM = "deepbregman"
T = TypeVar("T")


@dataclass(frozen=True)
class PretrainOptions:
    """Options of a new run."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    run: Path | None = None
    """Folder of the run, which must not exist; by default a new one under runs/."""
    accelerator: Accelerator = "auto"
    """Where to train; auto takes a GPU if there is one."""


def _pretrain(arguments: list[str]) -> None:
    """Pretrain an encoder: deepbregman pretrain RECIPE [options], or --resume RUN."""
    from .studies.pretraining import pretrain, resume

    console = Console()
    if any(word == "--resume" or word.startswith("--resume=") for word in arguments):

        def resumed(resume: Path, accelerator: Accelerator = "auto") -> tuple[Path, Accelerator]:
            """Go on with an interrupted run, exactly where it stopped; takes no other field.

            Args:
                resume: Folder of the run.
                accelerator: Where to train; auto takes a GPU if there is one.
            """
            return resume, accelerator

        folder, accelerator = _parse(resumed, "pretrain", arguments)
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
    _say(console, f"run: {run.path}")
    _say(console, f"next: {PROGRAM} evaluate {run.path}")


def _evaluate(arguments: list[str]) -> None:
    """Judge a run's frozen encoder by kNN and linear classification."""

    def options(
        run: tyro.conf.Positional[Path],
        protocol: tuple[Literal["knn", "linear"], ...] = ("knn", "linear"),
        data: str | None = None,
        epochs: int = 50,
        seed: int = 0,
        skip_unreadable: bool = False,
        accelerator: Accelerator = "auto",
    ) -> None:
        """Judge a run's frozen encoder; the rows also go into RUN/result.json.

        Args:
            run: Folder of the run.
            protocol: knn: by cosine and by the learned divergence. linear: on cached features, and
                on features of random crops.
            data: A labelled source in place of the run's own.
            epochs: Of the linear classifier on random crops; 0 leaves it out.
            seed: Of splits and crops.
            skip_unreadable: Go on without images that cannot be read.
            accelerator: Where to compute; auto takes a GPU if there is one.
        """
        from .evaluation.protocols import evaluate
        from .reporting.tables import evaluation_table

        rows = evaluate(
            run,
            protocols=protocol,
            data=data,
            epochs=epochs,
            seed=seed,
            skip_unreadable=skip_unreadable,
            accelerator=accelerator,
        )
        console = Console()
        console.print(evaluation_table(rows, f"{run} on {rows[0]['data']}"))
        if rows[0]["epoch"] < rows[0]["epochs"]:
            words = f"after {rows[0]['epoch']:g} of {rows[0]['epochs']} epochs"
            _say(console, f"warning: this run is not finished; it was judged {words}")

    _parse(options, "evaluate", arguments)


def _embed(arguments: list[str]) -> None:
    """Write the features of images to an .npz file."""

    def options(
        run: tyro.conf.Positional[Path],
        out: Path,
        data: str | None = None,
        skip_unreadable: bool = False,
        accelerator: Accelerator = "auto",
    ) -> None:
        """Write the features of every image of a source to an .npz file.

        Args:
            run: Folder of the run.
            out: File to write; must not exist.
            data: A source in place of the run's own; labels are not needed.
            skip_unreadable: Go on without images that cannot be read.
            accelerator: Where to compute; auto takes a GPU if there is one.
        """
        from .evaluation.embedding import embed

        shapes = embed(
            run, out, data=data, skip_unreadable=skip_unreadable, accelerator=accelerator
        )
        for name, shape in shapes.items():
            print(f"{name:<20} {' x '.join(map(str, shape))}")

    _parse(options, "embed", arguments)


def _recipes(arguments: list[str]) -> None:
    """List the recipes, or print one: deepbregman recipes [NAME]."""

    def options(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
        """List the recipes, or print one as a complete .toml file to copy and change.

        Args:
            name: Which to print.
        """
        known = recipes()
        console = Console()
        if name is not None:
            load_recipe(name)  # an unknown name is an error that lists the known ones
            text = known[name] if name in known else Path(name).read_text()
            if console.is_terminal:
                console.print(Syntax(text, "toml"))
            else:
                print(text, end="")
            return
        table = Table(box=None, show_header=False, pad_edge=False)
        for recipe, text in known.items():
            header = [line[2:] for line in text.splitlines() if line.startswith("# ")]
            words = " ".join(line for line in header if not line.startswith("Command:"))
            table.add_row(f"[bold]{recipe}[/bold]", escape(words))
        console.print(table)

    _parse(options, "recipes", arguments)


def _quickstart(arguments: list[str]) -> None:
    """Pretrain on digits, under 3 minutes on a CPU, and see what it was good for."""

    def options(run: Path | None = None, epochs: int | None = None) -> None:
        """Pretrain on scikit-learn's digits and compare with raw pixels and an untrained encoder.

        Args:
            run: Folder of the run, which must not exist; by default a new one under runs/.
            epochs: In place of the recipe's.
        """
        from .studies.quickstart import quickstart

        quickstart(run=run, epochs=epochs, console=Console())

    _parse(options, "quickstart", arguments)


def _bench(arguments: list[str]) -> None:
    """Measure the speed of a step against the bare encoder, and against peers."""

    def options(
        scale: Literal["main", "large", "streaming", "full", "cpu", "tiny"] = "main",
        out: Path | None = None,
        only: tuple[str, ...] = (),
        accelerator: Accelerator = "auto",
    ) -> None:
        """Measure images per second, every view counted, arms taking turns, median of the turns.

        "bare encoder" is the floor: forward, backward and optimiser on one fixed batch, compiled.
        "SimCLR" and "K=..." are our whole step as training takes it: order, gather, views,
        networks, losses, optimiser. "views alone" is the transformation. "lightly SimCLR" is timed
        where lightly can be imported. "over bare" divides by the floor; "first step" includes
        compiling; "memory" is the arm's own peak.

        Args:
            scale: main: ResNet-18 and 50 at batch 512. large: batches of 1024 and 4096. streaming:
                ResNet-50 at 224 px from generated JPEG files. full: all of these. cpu: a small
                encoder, and the views beside torchvision's. tiny: a trial.
            out: Folder for bench.json and bench.png.
            only: Arms to measure beside the bare encoder, such as "K=100".
            accelerator: Where to measure; auto takes a GPU if there is one.
        """
        from .benchmarks.bench import bench

        bench(scale=scale, out=out, only=only, accelerator=accelerator, console=Console())

    _parse(options, "bench", arguments)


VERBS: dict[str, Callable[[list[str]], None]] = {
    "quickstart": _quickstart,
    "pretrain": _pretrain,
    "evaluate": _evaluate,
    "embed": _embed,
    "recipes": _recipes,
    "bench": _bench,
}


def _parse(function: Callable[..., T], verb: str, arguments: list[str]) -> T:
    """Call a function with the options that its signature and docstring describe."""
    return tyro.cli(function, args=arguments, prog=f"{PROGRAM} {verb}")


def _overview() -> None:
    """Print the verbs, a line each."""
    console = Console()
    console.print(f"usage: {PROGRAM} VERB ...\n", highlight=False)
    console.print("Self-supervised visual representations with deep Bregman divergences.\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    for verb, function in VERBS.items():
        table.add_row(f"[bold]{verb}[/bold]", escape((function.__doc__ or "").strip()))
    console.print(table)
    console.print(f"\n{PROGRAM} VERB --help says what each takes.", highlight=False)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        _overview()
    elif arguments[0] == "--version":
        from importlib.metadata import version

        print(version(PROGRAM))
    elif arguments[0] in VERBS:
        VERBS[arguments[0]](arguments[1:])
    else:
        raise UserError(
            f"verb {arguments[0]!r} is not one of {', '.join(VERBS)}{nearest(arguments[0], VERBS)}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's error is one paragraph on stderr and exit code 2."""
    try:
        _dispatch(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has left
        sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        explained = explanation(error)
        if explained is None:
            raise
        message, code = explained
        _say(Console(stderr=True), f"error: {message}")
        sys.exit(code)


def _say(console: Console, message: str) -> None:
    """Print words as they are: a folder may be called [x]."""
    console.print(message, soft_wrap=True, highlight=False, markup=False)
