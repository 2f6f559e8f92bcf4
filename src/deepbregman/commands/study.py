"""deepbregman study: the paper's ablations and claims, one command each."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepbregman.errors import UserError
from deepbregman.runs import Run
from deepbregman.studies.catalogue import find_study, load_catalogue
from deepbregman.studies.definition import StudyOptions, StudyResult, read_changes, read_value
from deepbregman.studies.results import check_new_folder
from deepbregman.terminal import say

from .parameters import Accelerator, PythonOnly, check_data


def study(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    *,
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
    console: PythonOnly[Console | None] = None,
) -> StudyResult | dict[str, str]:
    """Run an ablation or a claim of the paper, with error bars: deepbregman study [NAME].

    Trains every arm of a study with several seeds, judges them alike, and draws the outcome. A
    study can be stopped and started again: what is done stays done, and a run that was cut short
    goes on from its checkpoint. Start the command several times with the same --out, or by srun,
    to let several processes or GPUs share a study. In a folder that has begun, options that are
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
        keep_checkpoints: Keep the networks of every run; they are deleted once judged.
        trials: For a search: how many in all.
        out: Folder of the study; by default studies/NAME-RECIPE-DATA.
        accelerator: Where to train; auto takes a GPU if there is one.
        console: To draw on; quiet when None.

    Returns:
        The study's folder and its results; without a name, the title of every study.
    """
    if name is None:
        titles = {name: entry.title for name, entry in load_catalogue().items()}
        return titles | {
            name: (run.__doc__ or "").split("\n")[0] for name, run in SUBCOMMANDS.items()
        }
    if name in SUBCOMMANDS:
        raise UserError(f"study {name!r} has options of its own: write its name before them")
    options = StudyOptions(
        recipe=recipe,
        recipes=recipes,
        unequal=unequal,
        data=data,
        epochs=epochs,
        changes=read_changes(changes),
        seeds=seeds,
        only=only,
        values=tuple(map(read_value, values)),
        judge=judge,
        linear_epochs=linear_epochs,
        keep_checkpoints=keep_checkpoints,
        trials=trials,
        out=out,
        accelerator=accelerator,
    )
    return find_study(name, also=SUBCOMMANDS).run(options, console or Console(quiet=True))


def distributions(
    *,
    seeds: int = 10,
    out: Path = Path("studies/distributions"),
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """Can a learned divergence tell distributions apart?

    Gaussians whose means lie on three rings are clustered by divergences learned on others (Deep
    Divergence Learning), against Euclidean distance.

    Args:
        seeds: Of data, weights and order.
        out: Folder of the study, new or empty.
        console: To draw on; quiet when None.
    """
    check_new_folder(out)
    from deepbregman.studies.distributions import run_distributions

    return run_distributions(out, seeds=seeds, console=console)


def divergence_2d(
    *,
    seeds: int = 5,
    num_subnetworks: int = 10,
    samples: int = 250,
    steps: int = 300,
    resolution: int = 160,
    target: int = 1,
    out: Path = Path("studies/divergence-2d"),
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """What does a learned divergence look like on the plane, beside classical ones?

    Draws the divergence from every point of the plane to one sample. Samples are of five Gaussian
    classes; subnetworks are affine and trained on labelled pairs. For Kullback-Leibler and
    Itakura-Saito the plane is shifted into the positive quadrant.

    Args:
        seeds: The first is drawn, all are measured on held-out samples.
        num_subnetworks: K.
        samples: Of all classes together.
        steps: Of training.
        resolution: Of the maps, in points along a side.
        target: Class of the sample, 0 to 4.
        out: Folder of the study, new or empty.
        console: To draw on; quiet when None.
    """
    check_new_folder(out)
    from deepbregman.studies.divergence_2d import run_divergence_2d

    return run_divergence_2d(
        out,
        seeds=seeds,
        num_subnetworks=num_subnetworks,
        samples=samples,
        steps=steps,
        resolution=resolution,
        target=target,
        console=console,
    )


def tsne(
    *,
    runs: tuple[Path, ...],
    data: str | None = None,
    images: int = 2000,
    seeds: int = 3,
    out: Path = Path("studies/tsne"),
    accelerator: Accelerator = "auto",
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """How well do the features of runs separate classes? Maps by t-SNE, and numbers under each.

    Args:
        runs: Folders of one or more runs.
        data: A labelled source in place of the first run's.
        images: At most so many test images, stratified by class.
        seeds: Of t-SNE and k-means.
        out: Folder of the study, new or empty.
        accelerator: Where to compute features; auto takes a GPU if there is one.
        console: To draw on; quiet when None.
    """
    check_new_folder(out)
    opened = [Run.open(Path(run)) for run in runs]
    if opened:
        check_data(opened[0].config, data)
    from deepbregman.studies.tsne import run_tsne

    return run_tsne(
        out,
        runs=runs,
        data=data,
        images=images,
        seeds=seeds,
        accelerator=accelerator,
        console=console,
    )


SUBCOMMANDS = {"distributions": distributions, "divergence-2d": divergence_2d, "tsne": tsne}


def show(result: StudyResult | dict[str, str], console: Console) -> None:
    """Print the results and where they are, or the list of studies."""
    if isinstance(result, StudyResult):
        from deepbregman.studies.results import print_result

        print_result(result, console)
        say(console, f"study:  {result.folder}")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, title in result.items():
        table.add_row(f"[bold]{name}[/bold]", escape(title))
    console.print(table)
    say(
        console,
        "\ndeepbregman study NAME runs one; deepbregman study --help says what it takes. "
        f"{', '.join(SUBCOMMANDS)} have options of their own: deepbregman study NAME --help.",
    )
