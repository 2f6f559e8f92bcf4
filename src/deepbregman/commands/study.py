"""deepbregman study: the paper's ablations and figures, one command each."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from deepbregman.errors import UserError
from deepbregman.files import check_new_folder
from deepbregman.runs import Run
from deepbregman.studies.catalogue import find_study, load_catalogue
from deepbregman.studies.definition import Search, Study, StudyOptions, StudyResult, load_arm
from deepbregman.studies.grid_plan import plan_study
from deepbregman.studies.search_plan import check_search, search_of_study
from deepbregman.studies.tables_plan import TableOptions, plan_tables
from deepbregman.terminal import MaybeText, print_choices, say, say_loading

from .parameters import Accelerator, PythonOnly, check_dataset


def study(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    *,
    study: tyro.conf.OmitArgPrefixes[StudyOptions] = StudyOptions(),  # noqa: B008  # frozen
    console: PythonOnly[Console | None] = None,
) -> StudyResult | dict[str, str]:
    """Run an ablation or a figure of the paper, with error bars: deepbregman study [NAME].

    A study trains several encoders, its arms, evaluates all in the same way, and draws a figure.
    The same command continues a stopped study: finished runs are kept, and an unfinished run
    resumes from its checkpoint. To share a study among several processes or GPUs, start the
    command several times with the same --out, or with srun.

    Args:
        name: Name of the study. Without a name, all studies are listed.
        study: If the study has begun, options that are left out keep their values.
        console: Where to print; nothing is printed when None.

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
    entry = find_study(name, also=SUBCOMMANDS)
    if isinstance(entry, Search):
        recipe, search = search_of_study(entry, study)
        check_search(recipe, search)  # before torch is loaded
        with say_loading(console):
            from deepbregman.studies.tuning import run_search

        return run_search(recipe, search, console, entry)
    plan_study(entry, study)  # likewise
    with say_loading(console):
        from deepbregman.studies.grid import run_study

    return run_study(entry, study, console)


def distributions(
    *,
    seeds: int = 10,
    out: Path = Path("studies/distributions"),
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """Can a learned divergence tell distributions apart?

    Gaussians lie on three rings. They are clustered by divergences that were learned on other
    Gaussians (Deep Divergence Learning), and by Euclidean distance for comparison.

    Args:
        seeds: Number of seeds; each has its own data, initial weights and batches.
        out: Folder of the study, new or empty.
        console: Where to print; nothing is printed when None.
    """
    check_new_folder(out)
    with say_loading(console):
        from deepbregman.studies.distributions import run_distributions

    return run_distributions(out, seeds=seeds, console=console)


def divergence_2d(
    *,
    seeds: int = 5,
    out: Path = Path("studies/divergence-2d"),
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """What does a learned divergence look like on the plane, beside classical ones?

    Draws the divergence from every point of the plane to one sample. The samples come from five
    Gaussian classes; affine subnetworks are trained on labelled pairs. Kullback-Leibler and
    Itakura-Saito need positive numbers, so for them the plane is shifted.

    Args:
        seeds: Number of seeds. The first one is drawn; all are measured on held-out samples.
        out: Folder of the study, new or empty.
        console: Where to print; nothing is printed when None.
    """
    check_new_folder(out)
    with say_loading(console):
        from deepbregman.studies.divergence_2d import run_divergence_2d

    return run_divergence_2d(out, seeds=seeds, console=console)


def tsne(
    *,
    runs: tuple[Path, ...],
    data: MaybeText = None,
    images: int = 2000,
    seeds: int = 3,
    out: Path = Path("studies/tsne"),
    accelerator: Accelerator = "auto",
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """How well do the features of runs separate classes? Draws t-SNE maps, with numbers under each.

    Args:
        runs: Folders of one or more runs, or encoders that `deepbregman export` wrote from them.
        data: A labelled dataset instead of that of the first run.
        images: Largest number of test images; each class keeps its share.
        seeds: Number of seeds of t-SNE and k-means.
        out: Folder of the study, new or empty.
        accelerator: Device to compute features on; auto takes a GPU if there is one.
        console: Where to print; nothing is printed when None.
    """
    check_new_folder(out)
    folders = [Run.open(run) for run in map(Path, runs) if not run.is_file()]
    if folders and folders[0].path == Path(runs[0]):
        check_dataset(folders[0].config, data)
    with say_loading(console):
        from deepbregman.studies.tsne import run_tsne

    return run_tsne(out, runs, data, images, seeds, accelerator, console)


def tables(
    *,
    study: tyro.conf.OmitArgPrefixes[TableOptions] = TableOptions(),  # noqa: B008  # frozen
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """How do methods compare, on several datasets and by every protocol? The paper's tables.

    Trains each arm on each dataset with each seed, and measures it by every protocol. The same
    command continues a stopped study; several processes may share it. Later commands on the same
    folder may add arms, datasets, protocols and seeds. It writes tables as Markdown, CSV and
    LaTeX, with paired differences and intervals; published values are kept apart.

    Args:
        study: What to train and measure.
        console: Where to print; nothing is printed when None.
    """
    plan_tables(study)  # before torch is loaded
    with say_loading(console):
        from deepbregman.studies.tables import run_tables

    return run_tables(study, console or Console(quiet=True))


SUBCOMMANDS = {
    "distributions": distributions,
    "divergence-2d": divergence_2d,
    "tsne": tsne,
    "tables": tables,
}


def choose(words: list[str]) -> tuple[Callable[..., Any], str, list[str]]:
    """Return the function for a command line, described by the study that is named first."""
    program, entry = "deepbregman study", load_catalogue().get(words[0]) if words else None
    if entry is None:
        return study, program, words
    if len(words) > 1 and not words[1].startswith("-"):
        option = "--recipes" if isinstance(entry, Study) and entry.recipes else "--recipe"
        raise UserError(
            f"{words[1]!r} follows the study {entry.name}: only the study needs no option; a "
            f"recipe needs {option}, a dataset --data, and the name of an arm --only"
        )
    _, about = (study.__doc__ or "").split("\n", 1)
    run = functools.wraps(study)(lambda *given, **options: study(*given, **options))
    run.__doc__ = f"{entry.title}\n\n    {describe_arms(entry)}\n{about}"
    return run, f"{program} {entry.name}", words


def describe_arms(entry: Study | Search) -> str:
    """Name the arms of a study, or what a search varies."""
    if isinstance(entry, Search):
        return f"Searches {', '.join(entry.space)}."
    words = f"Arms: {', '.join(entry.recipes or [arm.name for arm in entry.choose_arms(())])}"
    if entry.recipes:
        made = entry.with_recipes({name: load_arm(name) for name in entry.recipes}).arms
        endings = dict.fromkeys(arm.name.removeprefix(str(arm.x)) for arm in made)
        also = ", ".join(f"NAME{ending}" for ending in endings if ending)
        words += f"; each also as {also}" if also else ""
    stems = dict.fromkeys(a.name.removesuffix(str(a.x)) for a in entry.arms if a.supervised)
    if stems:
        words += f"; with labels, only if named: {', '.join(f'{stem}*' for stem in stems)}"
    return f"{words}."


def show(result: StudyResult | dict[str, str], console: Console) -> None:
    """Print the results and where they are, or the list of studies."""
    if isinstance(result, StudyResult):
        from deepbregman.studies.results import print_result

        print_result(result, console)
        say(console, f"study:  {result.folder}")
        return
    print_choices(console, result)
    say(
        console,
        "\ndeepbregman study NAME runs one; deepbregman study NAME --help lists its options.",
    )
