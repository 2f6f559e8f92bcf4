"""deepbregman study: the paper's ablations and claims, one command each."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepbregman.studies.catalogue import catalogue, find_study
from deepbregman.studies.definition import Settings
from deepbregman.studies.fields import assignments, literal

from .demonstrations import DEMONSTRATIONS
from .options import PROGRAM, Accelerator, parse, say, screen


def command(arguments: list[str]) -> None:
    """Run one of the paper's ablations or claims, or list them: deepbregman study [NAME]."""
    if arguments and arguments[0] in DEMONSTRATIONS:
        DEMONSTRATIONS[arguments[0]].command(arguments[1:])
        return

    def options(
        name: Annotated[str | None, tyro.conf.Positional] = None,
        recipe: str | None = None,
        recipes: tuple[str, ...] = (),
        unequal: bool = False,
        data: str | None = None,
        epochs: int | None = None,
        seeds: int | None = None,
        only: tuple[str, ...] = (),
        values: tuple[str, ...] = (),
        changes: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = (),
        judge: Literal["test", "holdout"] | None = None,
        linear_epochs: int | None = None,
        keep_checkpoints: bool = False,
        trials: int | None = None,
        out: Path | None = None,
        accelerator: Accelerator = "auto",
    ) -> None:
        """Train every arm of a study with several seeds, judge them alike, and draw the outcome.

        A study can be stopped and started again: what is done stays done, and a run that was cut
        short goes on from its checkpoint. Start the command several times with the same --out to
        let several processes or GPUs share a study. In a folder that has begun, options that are
        left out are the folder's.

        Args:
            name: Of the study; without one, the studies are listed.
            recipe: A recipe's name or a .toml file; by default the study's own, see the list.
            recipes: For study comparison: two or more, the reference first; simclr and best by
                default.
            unequal: Compare recipes that do not spend alike, and say so in the results.
            data: A labelled source in place of the recipe's.
            epochs: Of pretraining, in place of the recipe's.
            seeds: How many; 3 by default.
            only: Arms to run, by name or pattern; by default all that are trained without labels
                (kappa's '*' includes Deep Divergence, which sees them).
            values: For a study that varies one field: other values of it.
            changes: Fields to change in every arm, such as training.batch_size=256.
            judge: test (the default) or holdout, a part of the training images.
            linear_epochs: Of a further linear classifier on random crops; 0, the default, is none.
            keep_checkpoints: Keep the networks of every cell; they are deleted once judged.
            trials: For a search: how many in all.
            out: Folder of the study; by default studies/NAME-RECIPE-DATA.
            accelerator: Where to train; auto takes a GPU if there is one.
        """
        if name is None:
            _list(Console())
            return
        console = screen()
        settings = Settings(
            recipe=recipe,
            recipes=recipes,
            unequal=unequal,
            data=data,
            epochs=epochs,
            changes=assignments(changes),
            seeds=seeds,
            only=only,
            values=tuple(map(literal, values)),
            judge=judge,
            linear_epochs=linear_epochs,
            keep_checkpoints=keep_checkpoints,
            trials=trials,
            out=out,
            accelerator=accelerator,
        )
        folder = find_study(name, also=DEMONSTRATIONS).run(settings, console)
        say(console, f"study:  {folder}")

    parse(options, "study", arguments)


def _list(console: Console) -> None:
    """Print the studies, a line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    titles = {name: entry.title for name, entry in catalogue().items()}
    titles |= {name: entry.title for name, entry in DEMONSTRATIONS.items()}
    for name, title in titles.items():
        table.add_row(f"[bold]{name}[/bold]", escape(title))
    console.print(table)
    own = ", ".join(DEMONSTRATIONS)
    say(
        console,
        f"\n{PROGRAM} study NAME runs one; {PROGRAM} study --help says what it takes. {own} have "
        f"options of their own: {PROGRAM} study NAME --help.",
    )
