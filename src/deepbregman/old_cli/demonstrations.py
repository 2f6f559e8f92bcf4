"""deepbregman study distributions | divergence-2d | tsne: studies with options of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from .options import Accelerator, parse, say, screen


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

        console = screen()
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


def divergence_2d(arguments: list[str]) -> None:
    """Draw learned and classical divergences over the plane."""

    def options(
        seeds: int = 5,
        num_subnetworks: int = 10,
        samples: int = 250,
        steps: int = 300,
        resolution: int = 160,
        target: int = 1,
        out: Path = Path("studies/divergence-2d"),
    ) -> None:
        """Draw the divergence from every point of the plane to one sample: learned, and classical.

        Samples are of five Gaussian classes; subnetworks are affine and trained on labelled pairs.
        For Kullback-Leibler and Itakura-Saito the plane is shifted into the positive quadrant.

        Args:
            seeds: The first is drawn, all are measured on held-out samples.
            num_subnetworks: K.
            samples: Of all classes together.
            steps: Of training.
            resolution: Of the maps, in points along a side.
            target: Class of the sample, 0 to 4.
            out: Folder of the study, new or empty.
        """
        from deepbregman.studies.divergence_2d import run_divergence_2d

        console = screen()
        run_divergence_2d(
            out,
            seeds=seeds,
            num_subnetworks=num_subnetworks,
            samples=samples,
            steps=steps,
            resolution=resolution,
            target=target,
            console=console,
        )
        _finish(console, out)

    parse(options, "study divergence-2d", arguments)


def tsne(arguments: list[str]) -> None:
    """Map the features of runs side by side."""

    def options(
        runs: tuple[Path, ...],
        data: str | None = None,
        images: int = 2000,
        seeds: int = 3,
        out: Path = Path("studies/tsne"),
        accelerator: Accelerator = "auto",
    ) -> None:
        """Map the features of runs to the plane by t-SNE, with silhouette, k-means and kNN.

        Args:
            runs: Folders of one or more runs.
            data: A labelled source in place of the first run's.
            images: At most so many test images, stratified by class.
            seeds: Of t-SNE and k-means.
            out: Folder of the study, new or empty.
            accelerator: Where to compute features; auto takes a GPU if there is one.
        """
        from deepbregman.studies.tsne import run_tsne

        console = screen()
        run_tsne(
            out,
            runs=runs,
            data=data,
            images=images,
            seeds=seeds,
            accelerator=accelerator,
            console=console,
        )
        _finish(console, out)

    parse(options, "study tsne", arguments)


class Demonstration(NamedTuple):
    """A study that parses its own options."""

    title: str
    command: Callable[[list[str]], None]


DEMONSTRATIONS = {
    "distributions": Demonstration(
        "Can a learned divergence tell distributions apart, and are views better taken as such?",
        distributions,
    ),
    "divergence-2d": Demonstration(
        "What does a learned divergence look like on the plane, beside classical ones?",
        divergence_2d,
    ),
    "tsne": Demonstration(
        "How well do the features of runs separate classes? Maps, and numbers under each.", tsne
    ),
}
"""Name -> what ``deepbregman study NAME`` calls with the rest of its arguments."""
