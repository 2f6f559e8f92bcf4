"""deepbregman tune: search the fields of a recipe. Optuna chooses the trials.

::

    SEARCH/
      search.db              Optuna's storage, unless --storage names another
      runs/trial-0007/       an ordinary run folder; checkpoints are deleted after the evaluation
      trials.json, trials.csv, best.toml, search.png, search.svg, search.pdf

Workers share a search by its storage only, so they may be on several machines.
"""

import shlex
import shutil
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import optuna
from optuna.trial import TrialState
from rich.console import Console
from rich.markup import escape

from deepbregman.config import Config, override, to_toml
from deepbregman.data import Source
from deepbregman.errors import UserError, mask_address
from deepbregman.files import now, refuse_link, replace_file, write_csv, write_json
from deepbregman.reporting.charts import name_figures
from deepbregman.reporting.published import is_dataset
from deepbregman.reporting.searches import save_search_figure
from deepbregman.runs import Record, collect_provenance, read_command_line
from deepbregman.training.devices import device_name, pick_device

from .definition import Search, SearchOptions, StudyResult
from .engine import (
    EvaluationPlan,
    Queue,
    Trial,
    Worker,
    become_worker,
    lock,
    say_each_once,
    work,
)
from .results import MAIN_METRIC
from .search_plan import SearchPlan, check_search, has_begun, name_search_folder, plan_search
from .shared_search import (
    CONTINUES,
    SURPLUS,
    TAKEN,
    SharedSearch,
    explain_storage_errors,
    find_first_attempt,
    open_storage,
)

NAME = "search"
"""Name of every search in a database of its own, so that its folder can be renamed or copied."""
LEAST_FOR_IMPORTANCE = 4
METRICS = {"linear": MAIN_METRIC, "knn": "knn, cosine"}
"""Objective -> how the name of its metric begins."""


def run_search(
    recipe: str | None,
    options: SearchOptions,
    console: Console | None = None,
    entry: Search | None = None,
) -> StudyResult:
    """Search until the trials are done, together with other processes on the same storage."""
    console = console or Console(quiet=True)
    become_worker()
    pick_device(options.accelerator)
    check_search(recipe, options)  # a refused request leaves no folder
    folder = name_search_folder(recipe, options)
    url, name = locate_storage(options, folder)

    def open_images(plan: SearchPlan) -> Source:
        evaluation = EvaluationPlan("holdout")
        with console.status(f"opening {escape(plan.base.data.source)} ..."):
            source = evaluation.open_images(plan.base)
        say_each_once(evaluation.check_images(source, plan.largest_batch), console)
        return source

    source = None
    if not has_begun(folder) and options.storage is None:
        source = open_images(plan_search(recipe, options, None))  # these may be refused, too
    with explain_storage_errors(folder):
        with lock(folder, "search"):
            study, plan = join_search(recipe, options, folder, url, name)
        source = source or open_images(plan)
        if entry is not None and is_dataset(plan.definition["data"], entry.published_data):
            plan.definition["published"] = dict(entry.published)  # trials.json has it, for reports
        protocols = (plan.definition["objective"],)
        evaluation = EvaluationPlan("holdout", protocols, accelerator=options.accelerator)
        worker = Worker(lambda _: source, evaluation, console)
        if source.skipped_notice:
            worker.say(source.skipped_notice)
        queue = SearchQueue(study, plan, folder, plan.definition["trials"])
        queue.retry_too_large()
        worker.say(f"search in {folder}: {queue.describe()}; evaluated on held-out training images")
        record = work(queue, worker, _format_command(options, folder, entry))
    save_search_figure(name_figures(folder, "search"), record)
    return StudyResult(folder, record)


def _format_command(options: SearchOptions, folder: Path, entry: Search | None) -> str:
    verb = ["study", entry.name] if entry else ["tune"]
    words = ["deepbregman", *verb, "--out", str(folder)]
    words += ["--storage", mask_address(options.storage)] if options.storage else []
    return shlex.join(words)


def join_search(
    recipe: str | None, options: SearchOptions, folder: Path, url: str, name: str
) -> tuple[optuna.Study, SearchPlan]:
    """Begin the search in its storage, or join it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage(url)
    known = name in {summary.study_name for summary in optuna.get_all_study_summaries(storage)}
    if not known and ((folder / "runs").exists() or (folder / "trials.json").exists()):
        raise UserError(
            f"{folder} holds trials of a search that its storage ({mask_address(url)}) does not "
            "have: give the --storage that it was begun with, or choose another folder with --out"
        )
    stored = optuna.load_study(study_name=name, storage=storage).user_attrs if known else {}
    plan = plan_search(recipe, options, stored.get("definition"))
    plan.definition.setdefault("command", read_command_line())  # the one that began the search
    if not known:
        device = device_name(pick_device(options.accelerator))
        plan.definition["provenance"] = collect_provenance(device)
    worker = stored.get("workers", 0)
    pruner = optuna.pruners.MedianPruner if plan.definition["prune"] else optuna.pruners.NopPruner
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        sampler=build_sampler(plan.definition["sampler"], plan.recipe.seed + worker),
        pruner=pruner(),
        direction="maximize",
        load_if_exists=True,
    )
    study.set_user_attr("workers", worker + 1)  # each draws other numbers
    if plan.definition != stored.get("definition"):  # more trials may have been asked for
        study.set_user_attr("definition", plan.definition)
    return study, plan


def build_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Build a Gaussian process, a tree of Parzen estimators, or random draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "gp":
            return optuna.samplers.GPSampler(seed=seed)
        if name == "tpe":
            # Values of running trials count as bad, so that workers do not crowd together.
            return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        return optuna.samplers.RandomSampler(seed=seed)


def locate_storage(options: SearchOptions, folder: Path) -> tuple[str, str]:
    """Return the URL of the storage, and the name of the search in it."""
    for end in ("", "-journal", "-wal", "-shm"):  # files that SQLite writes beside it
        refuse_link(folder / f"search.db{end}")
    if options.storage is None:
        return f"sqlite:///{folder / 'search.db'}", NAME
    if has_begun(folder):
        raise UserError(
            f"--storage {mask_address(options.storage)}: the search of {folder} was begun in its "
            "own search.db; leave --storage out to continue, or choose another folder with --out"
        )
    return options.storage, folder.resolve().name


class SearchQueue(SharedSearch, Queue):
    """The trials of a search: Optuna chooses them, the engine trains and evaluates them."""

    noun = "trials"

    def __init__(self, study: optuna.Study, plan: SearchPlan, folder: Path, total: int) -> None:
        super().__init__(study, total)
        self.plan, self.folder = plan, folder

    def run_next(self, worker: Worker) -> bool:
        """Ask for a trial and run it; False if other processes hold all that remain."""
        words = self.run_one(lambda trial: self._train(trial, worker))
        if words:
            worker.say(words)
        return words is not None

    def _train(self, trial: optuna.Trial, worker: Worker) -> float:
        """Train and evaluate one configuration; return its accuracy."""
        values = {dimension.field: dimension.suggest(trial) for dimension in self.plan.space}
        config = override(self.plan.base, values)
        shown = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
        )
        title = f"trial {trial.number} ({shown})"

        def watch(epoch: int, measured: Mapping[str, float]) -> None:
            trial.report(measured["knn"], epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

        with ExitStack() as stack:
            run = self._claim_run(trial, stack)
            try:
                attempt = Trial(run, config)
                outcome = worker.run(attempt, title, watch)
            except optuna.TrialPruned:
                shutil.rmtree(run / "checkpoints", ignore_errors=True)
                worker.say(f"{title}: pruned")
                raise
        if outcome["state"] == "diverged":
            trial.set_user_attr("diverged", True)
            # The accuracy of the most common class.
            test = worker.evaluation.splits(worker.open_images(attempt), config).known_test
            return 100.0 * test.known_labels.bincount().max().item() / len(test)
        start = METRICS[self.plan.definition["objective"]]
        return float(next(v for name, v in outcome["metrics"].items() if name.startswith(start)))

    def _claim_run(self, trial: optuna.Trial, stack: ExitStack) -> Path:
        """Return the run folder of a trial; for a trial queued again, that of its first attempt.

        If a worker that seemed dead still writes there, take a new folder.
        """
        for number in (find_first_attempt(trial), trial.number):
            name = name_run(number)
            if stack.enter_context(lock(self.folder, name, wait=False)):
                return self.folder / "runs" / name
        raise UserError(f"{self.folder}: another process holds the run of trial {trial.number}")

    def save(self) -> Record:
        """Write ``trials.json``, ``trials.csv`` and ``best.toml``; return what is in the first."""
        with lock(self.folder, "results"):
            record = write_trials(self.folder, self.study, self.plan.definition)
            write_best(self.folder, self.plan.recipe, record)
            return record

    def find_too_large(self) -> Mapping[str, str]:
        """Name the trials that memory ran out in, if no other is left to run or to wait for."""
        found = {name_run(trial.first): trial.too_large or "" for trial in self.list_too_large()}
        return found if self.count()[0] + len(found) >= self.total else {}


def name_run(number: int) -> str:
    """Name the run of a trial by the number of its first attempt."""
    return f"trial-{number:04d}"


# The results of a search.


def list_trials(study: optuna.Study) -> list[Record]:
    """Return a row for every trial that was ever begun."""
    rows = []
    for trial in study.get_trials(deepcopy=False):
        if SURPLUS in trial.user_attrs or trial.state == TrialState.WAITING:
            continue
        last = max(trial.intermediate_values, default=None)
        rows.append(
            {
                "trial": trial.number,
                "state": trial.state.name.lower(),
                "value": trial.value if trial.state == TrialState.COMPLETE else None,
                "last_knn": None if last is None else trial.intermediate_values[last],
                "last_epoch": last,
                "diverged": bool(trial.user_attrs.get("diverged")),
                "continues": trial.user_attrs.get(CONTINUES),
                "seconds": trial.duration.total_seconds() if trial.duration else None,
                "values": dict(trial.params),
            }
        )
    return rows


def measure_importance(study: optuna.Study) -> dict[str, float] | None:
    """Return each field's share of the variance of the values (fANOVA); None if not known."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < LEAST_FOR_IMPORTANCE:
        return None
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a few trials make degenerate trees
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except (RuntimeError, ValueError):
        return None


def write_trials(folder: Path, study: optuna.Study, definition: Record) -> Record:
    """Write ``trials.json`` and ``trials.csv``; return what is in ``trials.json``."""
    rows = list_trials(study)
    complete = [row for row in rows if row["value"] is not None and not row["diverged"]]
    record = {
        **{key: value for key, value in definition.items() if key != "base"},
        "num_counted": len(study.get_trials(deepcopy=False, states=TAKEN)),
        "importance": measure_importance(study),
        "best": max(complete, key=lambda row: (row["value"], -row["trial"]), default=None),
        "trials": rows,
        "written": now(),
    }
    write_json(folder / "trials.json", record)
    flat = [{k: v for k, v in row.items() if k != "values"} | row["values"] for row in rows]
    write_csv(folder / "trials.csv", flat)
    return record


def write_best(folder: Path, recipe: Config, record: Record) -> None:
    """Write ``best.toml``: the recipe with the values of the best trial, ready to train."""
    best = record["best"]
    if best is None:
        return
    path = folder / "best.toml"
    command = shlex.join(" ".join(word.splitlines()) for word in record["command"])
    values = ", ".join(f"{name} = {value}" for name, value in best["values"].items())
    header = (
        f"# {record['recipe']}, searched over {', '.join(record['space'])}.\n"
        f"# Search:   {command}\n"
        f"# Command:  deepbregman pretrain {shlex.quote(' '.join(str(path).splitlines()))}\n"
        f"# Expected: {record['objective']} {best['value']:.2f} % on held-out training images of "
        f"{record['data']}, one seed: trial {best['trial']},\n"
        f"#           the best of {record['num_counted']} and so an optimistic value.\n"
        f"# Found:    {values}.\n"
    )
    with replace_file(path) as file:
        file.write((header + "\n" + to_toml(override(recipe, best["values"]))).encode())
