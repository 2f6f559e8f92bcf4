"""deepbregman tune: a recipe and a space in, the best configuration out.

::

    SEARCH/
      search.db              Optuna's storage, unless another is named
      storage.json           where that other one is
      runs/trial-0007/       an ordinary run folder, its checkpoints deleted once judged
      trials.json, trials.csv, best.toml, search.png, search.svg
"""

import shlex
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from deepbregman.errors import UserError
from deepbregman.reporting.published import is_dataset
from deepbregman.reporting.screen import trial_table
from deepbregman.reporting.studies import save_search_figure
from deepbregman.studies.cells import labelled_training
from deepbregman.studies.claims import exclusively
from deepbregman.studies.definition import Search, Settings
from deepbregman.studies.grid import one_process, stopping
from deepbregman.training.processes import pick_device

from .plan import Request, has_begun, join, locate, remember, resolve, without_password
from .records import write_best
from .trials import Job, say
from .workers import TAKEN, work


def search_study(entry: Search, settings: Settings, console: Console) -> Path:
    """Run a search of the catalogue."""
    refused = (
        "recipes",
        "unequal",
        "seeds",
        "only",
        "values",
        "judge",
        "linear_epochs",
        "keep_checkpoints",
    )
    given = [name for name in refused if getattr(settings, name) not in (None, (), False)]
    if given:
        raise UserError(
            f"study {entry.name} is a search and takes no --{given[0].replace('_', '-')}; see "
            "--trials"
        )
    name = f"{entry.name}-{Path(settings.recipe or entry.recipe).stem}"
    out = settings.out or Path("studies") / name
    begun = has_begun(out)
    request = Request(
        settings.recipe or (None if begun else entry.recipe),
        entry.space,
        settings.trials or (None if begun else entry.trials),
        settings.data,
        settings.epochs,
        settings.changes,
        out=out,
        accelerator=settings.accelerator,
        published=entry.published,
        published_data=entry.published_data,
        command=f"study {entry.name}",
    )
    return tune(request, console)


def tune(request: Request, console: Console | None = None) -> Path:
    """Search until the trials are done, together with other workers on the same storage.

    Args:
        request: what to search, and how.
        console: to draw on; quiet when None.

    Returns:
        The folder with ``trials.csv``, ``best.toml`` and the figure.
    """
    console = console or Console(quiet=True)
    one_process()
    pick_device(request.accelerator)
    if request.trials is not None and request.trials < 1:
        raise UserError(f"--trials {request.trials}: there must be at least 1")
    folder = request.out or Path("studies") / f"tune-{Path(request.recipe or 'search').stem}"
    if request.storage is None and not has_begun(folder):
        resolve(request, None)  # nothing is made for a request that is refused
    with exclusively(folder / "locks" / "search"):
        located = replace(request, storage=locate(request, folder))
        study, plan = join(located, folder)
        again = remember(str(located.storage), folder)
    if again:
        say(console, again)
    total = request.trials or plan.definition["trials"]

    def state() -> str:
        return f"{len(study.get_trials(deepcopy=False, states=TAKEN))} of {total} trials are begun"

    with console.status(f"opening {escape(plan.base.data.source)} ..."):
        source = labelled_training(plan.base)
    if source.skipped_notice:
        say(console, source.skipped_notice)
    say(console, f"search in {folder}: {state()}; judged on held-out training images")
    job = Job(study, plan, source, folder, request.accelerator, console)
    with stopping(state, to_go_on(request, folder)):
        work(study, total, job.objective, after=job.after, waiting=job.wait)
    record = job.after()
    figures = [folder / f"search.{kind}" for kind in ("png", "svg")]
    is_yardstick = is_dataset(record["data"], request.published_data)
    save_search_figure(figures, record, request.published if is_yardstick else {})
    console.print(trial_table(record))
    best = write_best(folder, plan.recipe, record)
    say(console, f"figure: {figures[0]}")
    if best is not None:
        say(console, f"best:   {best}\nnext:   deepbregman pretrain {best}")
    return folder


def to_go_on(request: Request, folder: Path) -> str:
    """Write the command that goes on with a search.

    The folder knows its storage, but no password: a URL that had one is to be given again.
    """
    words = ["deepbregman", *request.command.split(), "--out", str(folder)]
    if request.storage is not None:
        bare, has_secret = without_password(request.storage)
        words += ["--storage", bare] if has_secret else []
    return shlex.join(words)
