"""deepbregman tune: a Bayesian search over fields of a recipe."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from deepbregman.studies.definition import StudyResult, read_changes
from deepbregman.studies.search_plan import SearchOptions, check_search
from deepbregman.terminal import say

from .parameters import Accelerator, PythonOnly


def tune(
    recipe: Annotated[str | None, tyro.conf.Positional] = None,
    *,
    space: tuple[str, ...] = (),
    trials: int | None = None,
    data: str | None = None,
    epochs: int | None = None,
    changes: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = (),
    objective: Literal["linear", "knn"] | None = None,
    sampler: Literal["gp", "tpe", "random"] | None = None,
    prune: bool | None = None,
    out: Path | None = None,
    storage: str | None = None,
    accelerator: Accelerator = "auto",
    console: PythonOnly[Console | None] = None,
) -> StudyResult:
    """Search hyperparameters on held-out images: deepbregman tune RECIPE --space ...

    The test images are never looked at. A search can be stopped and started again; start the
    command several times with the same --out or --storage, or by srun, to let several processes
    share it. Options that are left out are those that the search began with.

    Args:
        recipe: A recipe's name or a .toml file.
        space: Fields and their values: field=LOW:HIGH, field=LOW:HIGH:log, field=A,B,C, or a
            .toml file of them.
        trials: How many in all, of all workers together; 40 by default.
        data: A labelled source in place of the recipe's.
        epochs: Of pretraining, in place of the recipe's.
        changes: Fields to change in every trial, such as training.batch_size=256.
        objective: linear (the default) or knn.
        sampler: gp (a Gaussian process, the default; it learns from completed trials only),
            tpe (which learns from pruned ones too) or random.
        prune: Stop a trial whose kNN monitor is below the median of earlier ones; True by
            default.
        out: Folder of the search; by default studies/tune-RECIPE.
        storage: An Optuna storage URL, such as postgresql+psycopg://user@host/database; by
            default search.db in the folder. There, a search goes by the name that its folder had
            first. The folder remembers where it is, but no password.
        accelerator: Where to train; auto takes a GPU if there is one.
        console: To draw on; quiet when None.

    Returns:
        The folder of the search and what its trials.json holds.
    """
    options = SearchOptions(
        recipe=recipe,
        space=space,
        trials=trials,
        data=data,
        epochs=epochs,
        changes=read_changes(changes),
        objective=objective,
        sampler=sampler,
        prune=prune,
        out=out,
        storage=storage,
        accelerator=accelerator,
    )
    check_search(options)  # it takes seconds to load torch: refuse first
    from deepbregman.studies.tuning import run_search

    return run_search(options, console)


def show(result: StudyResult, console: Console) -> None:
    """Print the best trials, and what to do next."""
    from deepbregman.studies.results import print_result

    print_result(result, console)
    say(console, f"search: {result.folder}")
