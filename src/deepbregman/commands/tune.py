"""deepbregman tune: a Bayesian search over fields of a recipe."""

from typing import Annotated

import tyro
from rich.console import Console

from deepbregman.studies.definition import SearchOptions, StudyResult
from deepbregman.studies.search_plan import check_search
from deepbregman.terminal import say, say_loading

from .parameters import PythonOnly


def tune(
    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]")] = None,
    *,
    search: tyro.conf.OmitArgPrefixes[SearchOptions] = SearchOptions(),  # noqa: B008  # frozen
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """Search hyperparameters on held-out images: deepbregman tune RECIPE --space ...

    The test images are never used. The same command continues a stopped search. To share a search
    among several processes, start the command several times with the same --out or --storage, or
    with srun.

    Args:
        recipe: Name of a recipe, or a .toml file; not needed to continue a search.
        search: If the search has begun, options that are left out keep their values.
        console: Where to print; nothing is printed when None.

    Returns:
        The folder of the search and what its trials.json holds.
    """
    check_search(recipe, search)  # before torch is loaded
    with say_loading(console):
        from deepbregman.studies.tuning import run_search

    return run_search(recipe, search, console)


def show(result: StudyResult, console: Console) -> None:
    """Print the best trials, and what to do next."""
    from deepbregman.studies.results import print_result

    print_result(result, console)
    say(console, f"search: {result.folder}")
