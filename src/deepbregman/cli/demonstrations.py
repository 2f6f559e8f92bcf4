"""deepbregman study distributions | divergence-2d | tsne: studies with options of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from .options import Accelerator, parse, say


def _finish(console: Console, out: Path) -> None:
    """Name what the study has left."""
    for path in sorted(out.glob("*.png")):
        say(console, f"figure: {path}")
    say(console, f"study:  {out}")


def distributions(arguments: list[str]) -> None:
    """Cluster distributions; take views as distributions."""

    def options(
        part: Literal["rings", "images", "all"] = "all",
        seeds: int = 10,
        image_seeds: int = 3,
        recipe: str = "digits",
        data: str | None = None,
        epochs: int | None = None,
        num_views: int = 4,
        out: Path = Path("studies/distributions"),
        accelerator: Accelerator = "auto",
    ) -> None:
        """Show what a divergence between distributions is good for.

        rings: Gaussians whose means lie on three rings, clustered by divergences learned on others
        (Deep Divergence Learning), against Euclidean distance. images: pretraining with an image's
        views as distributions against the same views as points.

        Args:
            part: Of the study.
            seeds: Of the rings.
            image_seeds: Of pretraining.
            recipe: Of pretraining: a recipe's name or a .toml file, with the divergence on.
            data: A labelled source in place of the recipe's.
            epochs: Of pretraining, in place of the recipe's.
            num_views: Of each image, even, 4 or more.
            out: Folder of the study, new or empty.
            accelerator: Where to pretrain; the rings are a CPU's work.
        """
        from deepbregman.studies.distributions import run_distributions

        console = Console()
        run_distributions(
            out,
            part=part,
            seeds=seeds,
            image_seeds=image_seeds,
            recipe=recipe,
            data=data,
            epochs=epochs,
            num_views=num_views,
            accelerator=accelerator,
            console=console,
        )
        _finish(console, out)

    parse(options, "study distributions", arguments)


class Demonstration(NamedTuple):
    """A study that parses its own options."""

    title: str
    command: Callable[[list[str]], None]


DEMONSTRATIONS = {
    "distributions": Demonstration(
        "Can a learned divergence tell distributions apart, and are views better taken as such?",
        distributions,
    ),
}
"""Name -> what ``deepbregman study NAME`` calls with the rest of its arguments."""
