"""deepbregman tune: a recipe and a space in, the best configuration out. Optuna chooses the trials.

::

    SEARCH/
      search.db              Optuna's storage, unless another is named
      storage.json           where that other one is, and the name of the search in it
      runs/trial-0007/       an ordinary run folder, its checkpoints deleted once judged
      trials.json, trials.csv, best.toml, search.png, search.svg

Workers share a search by its storage alone, perhaps from several machines. A worker's heartbeat
marks its trial as alive. When the heartbeat is old, the others fail the trial and queue its values
again; whoever takes them up goes on with the run that the first worker left behind.
"""

import inspect
import shlex
import shutil
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
import sqlalchemy.exc
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.markup import escape

from deepbregman.config import Config, override, to_toml
from deepbregman.errors import UserError, is_secret_option
from deepbregman.files import refuse_link
from deepbregman.reporting.published import is_dataset
from deepbregman.reporting.studies import save_search_figure
from deepbregman.runs import Record, command_line, now, read_json, replacing, write_csv, write_json
from deepbregman.training.faults import Interrupted
from deepbregman.training.processes import pick_device

from .definition import StudyResult
from .engine import Judgement, Trial, Worker, become_worker, lock, work
from .results import MAIN_METRIC
from .search_plan import (
    STORAGE_FILE,
    SearchOptions,
    SearchPlan,
    check_search,
    has_begun,
    resolve,
)

OWN_NAME = "search"
"""Of the search in a folder's own database: the folder may be renamed or copied."""
STARTUP_TRIALS = 10
"""Random at first, for the model of the rest."""
HEARTBEAT_SECONDS = 30
GRACE_SECONDS = 120
MAX_ATTEMPTS = 3
"""A trial that kills its worker every time is given up."""
LEAST_FOR_IMPORTANCE = 4
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
TAKEN = (TrialState.RUNNING, *DONE)
"""States that count towards the trials of a search."""
CONTINUES, ATTEMPT, SURPLUS = "continues", "attempt", "surplus"
METRICS = {"linear": MAIN_METRIC, "knn": "knn, cosine"}
"""Objective -> how the name of its metric begins."""


def run_search(options: SearchOptions, console: Console | None = None) -> StudyResult:
    """Search until the trials are done, together with other processes on the same storage."""
    console = console or Console(quiet=True)
    become_worker()
    pick_device(options.accelerator)
    check_search(options)  # nothing is made for a request that is refused
    folder = options.folder
    with _storage_errors_in_words(folder):
        with lock(folder, "search"):
            url, name = locate_storage(options, folder)
            if options.storage is None and url != f"sqlite:///{folder / 'search.db'}":
                check_remembered(url, name, folder)
            study, plan = join_search(replace(options, storage=url), folder, name)
            advice = remember_storage(url, name, folder)
        how = Judgement(
            "holdout", protocols=(plan.definition["objective"],), accelerator=options.accelerator
        )
        with console.status(f"opening {escape(plan.base.data.source)} ..."):
            source = how.open_images(plan.base)
        worker = Worker(source, how, console)
        for words in (advice, source.skipped_notice):
            if words:
                worker.say(words)
        queue = SearchQueue(study, plan, folder, options.trials or plan.definition["trials"])
        worker.say(f"search in {folder}: {queue.describe()}; judged on held-out training images")
        record = work(queue, worker, continue_command(options, folder))
    figures = [folder / f"search.{kind}" for kind in ("png", "svg")]
    is_yardstick = is_dataset(record["data"], options.published_data)
    save_search_figure(figures, record, options.published if is_yardstick else {})
    write_best(folder, plan.recipe, record)
    return StudyResult(folder, record)


def continue_command(options: SearchOptions, folder: Path) -> str:
    """Write the command that goes on with a search.

    The folder knows its storage, but no password: a URL that had one is to be given again.
    """
    words = ["deepbregman", *options.command.split(), "--out", str(folder)]
    if options.storage is not None:
        bare, has_secret = without_password(options.storage)
        words += ["--storage", bare] if has_secret else []
    return shlex.join(words)


def join_search(options: SearchOptions, folder: Path, name: str) -> tuple[optuna.Study, SearchPlan]:
    """Begin the search in its storage, or join it."""
    assert options.storage is not None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage(options.storage)
    known = name in {summary.study_name for summary in optuna.get_all_study_summaries(storage)}
    if not known and ((folder / "runs").exists() or (folder / "trials.json").exists()):
        raise UserError(
            f"{folder} holds trials of a search that its storage "
            f"({without_password(options.storage)[0]}) does not have: put the storage back, or "
            "choose another folder with --out"
        )
    stored = optuna.load_study(study_name=name, storage=storage).user_attrs if known else {}
    plan = resolve(options, stored.get("definition"))
    plan.definition.setdefault("command", command_line())  # that began it, not one that goes on
    worker = stored.get("workers", 0)
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        sampler=build_sampler(plan.definition["sampler"], plan.recipe.seed + worker),
        pruner=optuna.pruners.MedianPruner()
        if plan.definition["prune"]
        else optuna.pruners.NopPruner(),
        direction="maximize",
        load_if_exists=True,
    )
    study.set_user_attr("workers", worker + 1)  # each draws other numbers
    if "definition" not in stored:
        study.set_user_attr("definition", plan.definition)
    return study, plan


def build_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Build a Gaussian process, a tree of Parzen estimators, or random draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        if name == "tpe":
            # Values of running trials count as bad, so that workers do not crowd together.
            return optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True
            )
        return optuna.samplers.RandomSampler(seed=seed)


# The storage.


def without_password(url: str) -> tuple[str, bool]:
    """Return a storage's URL as it may be written down, and whether a password was taken out."""
    try:
        parts = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return "", False  # opening it says what is wrong
    place = parts.database
    if parts.get_backend_name() == "sqlite" and place and not place.startswith((":", "file:")):
        place = str(Path(place).resolve())
    query = {name: value for name, value in parts.query.items() if not is_secret_option(name)}
    bare = sqlalchemy.URL.create(
        parts.drivername, parts.username, None, parts.host, parts.port, place, query
    )
    secret = parts.password is not None or len(query) < len(parts.query)
    return bare.render_as_string(), secret


def locate_storage(options: SearchOptions, folder: Path) -> tuple[str, str]:
    """Return the URL of a search's storage, and the name of the search in it.

    Raises:
        UserError: When another storage is asked for than the search was begun in, or a password is
            needed that is not written down.
    """
    path, own = folder / STORAGE_FILE, f"sqlite:///{folder / 'search.db'}"
    for end in ("", "-journal", "-wal", "-shm"):  # what SQLite writes beside it
        refuse_link(folder / f"search.db{end}")
    before = read_json(path, {"storage": str, "name": str}) if path.is_file() else {}
    stored, name = before.get("storage"), before.get("name", folder.resolve().name)
    if options.storage is None:
        if before.get("password"):
            raise UserError(
                f"the search of {folder} is in {stored}, whose password is not written down: give "
                "--storage again, with the password"
            )
        return (stored, name) if stored else (own, OWN_NAME)
    inside = without_password(own)[0]
    begun = stored or (inside if has_begun(folder) else None)
    asked, _ = without_password(options.storage)
    if asked and begun and asked != begun:
        raise UserError(
            f"--storage {asked}: the search of {folder} was begun in {begun}; leave --storage out "
            "to go on there, or choose another folder with --out"
        )
    return options.storage, OWN_NAME if asked == inside else name


def check_remembered(url: str, name: str, folder: Path) -> None:
    """Refuse an SQLite file that a folder names, unless it has the search.

    The folder may be a stranger's and name any file: nothing is made there unasked.
    """
    parts = sqlalchemy.make_url(url)
    if parts.get_backend_name() != "sqlite":
        return
    place = Path(parts.database or "").resolve()
    try:
        address = f"{place.as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, timeout=60, uri=True)) as database:
            query = "SELECT 1 FROM studies WHERE study_name = ?"
            has_search = database.execute(query, (name,)).fetchone() is not None
    except sqlite3.DatabaseError as error:
        # A killed worker's journal cannot be undone by a reader; opening it for writing will.
        has_search = "readonly" in str(error)
    if not has_search:
        raise UserError(
            f"{folder / STORAGE_FILE} names {place}, which has no search {name!r}: put that file "
            "back, or give --storage to begin a search there"
        )


def remember_storage(url: str, name: str, folder: Path) -> str:
    """Write down where the storage of a search is, without a password.

    Returns:
        Words for the user where that is not enough to go on; empty otherwise.
    """
    stored, secret = without_password(url)
    inside, _ = without_password(f"sqlite:///{folder / 'search.db'}")
    if stored != inside and not stored.endswith(("://", ":memory:")):
        record = {"storage": stored, "name": name, "password": secret}
        write_json(folder / STORAGE_FILE, record)
    words = f"the password of the storage is not written down in {folder}: give --storage again"
    return f"{words} to go on with this search later" if secret else ""


def open_storage(
    url: str, *, heartbeat: int = HEARTBEAT_SECONDS, grace: int = GRACE_SECONDS
) -> RDBStorage:
    """Open the storage of a search, in which trials of killed workers are found and queued again.

    Args:
        grace: seconds without one after which a worker counts as dead.
    """
    is_sqlite = url.startswith("sqlite")
    kind = url.partition("://")[0]  # the rest may hold a password
    known = inspect.signature(RDBStorage).parameters
    keyword = "heartbeat_stale_trial_callback"
    if keyword not in known:  # before Optuna 4.9
        keyword = "failed_trial_callback"
    callback: dict[str, Any] = {keyword: queue_again}
    engine: dict[str, Any] = {"pool_pre_ping": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = RDBStorage(
                url,
                engine_kwargs=engine | ({"connect_args": {"timeout": 60}} if is_sqlite else {}),
                heartbeat_interval=heartbeat,
                grace_period=grace,
                **callback,
            )
    except ImportError as error:
        why = error.__cause__ or error
        raise UserError(
            f"--storage {kind} needs a driver that is not installed ({why}): install it, for "
            "PostgreSQL with `pip install psycopg[binary]` and a URL of postgresql+psycopg://"
        ) from None
    except sqlalchemy.exc.SQLAlchemyError as error:
        if (
            is_sqlite
            and (database := sqlalchemy.make_url(url).database)
            and Path(database).exists()
        ):
            raise  # a damaged file, or a full disk
        raise UserError(
            f"--storage {kind} cannot be opened ({_first_line(error)}): give an Optuna storage URL "
            "such as sqlite:///search.db or postgresql+psycopg://user@host/database"
        ) from None
    if is_sqlite:
        # SQLite takes its lock at the first write. Two workers that had both read that a trial is
        # waiting would both take it; so take the lock before the first read.
        @sqlalchemy.event.listens_for(storage.engine, "begin")
        def begin_immediate(connection: sqlalchemy.Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return storage


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def _storage_errors_in_words(folder: Path) -> Iterator[None]:
    """Turn errors of the storage into words; trials that were trained are kept in their runs."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = (
            error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        )
        words = _first_line(cause if isinstance(cause, Exception) else error)
        if "full" in words or "disk I/O" in words:
            advice = "free space there, and give the same command again"
        elif "not a database" in words or "malformed" in words:
            advice = (
                "restore its database from a copy, or search again with another --out; trials.csv "
                "and the runs are as they were"
            )
        else:
            advice = "see that it can be reached and written, and give the same command again"
        raise UserError(
            f"the storage of the search in {folder} fails ({words}): {advice}; nothing that was "
            "complete is lost"
        ) from error


# The trials.


class GaveWay(Exception):
    """A trial is not this worker's to judge: it is beyond the last, or another has taken it."""


def queue_again(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the values of a trial whose worker died or was stopped."""
    attempt = trial.user_attrs.get(ATTEMPT, 1)
    if attempt < MAX_ATTEMPTS:
        first = trial.user_attrs.get(CONTINUES, trial.number)
        attributes = {CONTINUES: first, ATTEMPT: attempt + 1}
        study.enqueue_trial(trial.params, user_attrs=attributes)


class SharedSearch:
    """A search that several processes work on: no trial is lost, and none is counted twice.

    Args:
        total: trials of all workers together.
    """

    def __init__(self, study: optuna.Study, total: int) -> None:
        self.study, self.total = study, total

    def count(self) -> tuple[int, int]:
        """Return how many trials are done, by whichever process, and how many there are to be."""
        return min(len(self._trials(DONE)), self.total), self.total

    def describe(self) -> str:
        """Say how many trials are done."""
        done, total = self.count()
        return f"{done} of {total} trials are done"

    def judge_next(self, objective: "optuna.study.study.ObjectiveFuncType") -> str | None:
        """Ask for a trial and judge it; None when other processes have all that are left.

        Args:
            objective: of a trial; an interruption in it queues the trial again.

        Returns:
            What the user should know; mostly nothing.
        """
        if len(self._trials(TAKEN)) >= self.total:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                optuna.storages.fail_stale_trials(self.study)
            return None
        number = -1
        raised: BaseException | None = None

        def judge(trial: optuna.Trial) -> float:
            nonlocal number, raised
            number = trial.number
            try:
                return self._judge(trial, objective)
            except BaseException as error:
                raised = error
                raise

        try:
            self.study.optimize(judge, n_trials=1, catch=(GaveWay,))
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError, AssertionError) as error:
            if error is raised or number < 0 or not self._state(number).is_finished():
                raise
            if raised is not None and not isinstance(raised, GaveWay | optuna.TrialPruned):
                raise raised from None
            # Optuna refuses to end a trial that another worker has ended.
            return f"trial {number}: another worker has ended it meanwhile, and that counts"
        return ""

    def _judge(
        self, trial: optuna.Trial, objective: "optuna.study.study.ObjectiveFuncType"
    ) -> float:
        # Those that wait will be taken: they were queued before, for a worker that died.
        others = self._trials((*TAKEN, TrialState.WAITING))
        if sum(other.number < trial.number for other in others) >= self.total:
            trial.set_user_attr(SURPLUS, True)
            raise GaveWay
        try:
            value = objective(trial)
        except (Interrupted, KeyboardInterrupt):
            queue_again(self.study, self.study.get_trials(deepcopy=False)[trial.number])
            raise
        except optuna.exceptions.UpdateFinishedTrialError:  # of a value reported on the way
            raise GaveWay from None
        if self._state(trial.number) != TrialState.RUNNING:
            raise GaveWay
        assert isinstance(value, float)
        return value

    def _trials(self, states: tuple[TrialState, ...]) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states)

    def _state(self, number: int) -> TrialState:
        return self.study.get_trials(deepcopy=False)[number].state


class SearchQueue(SharedSearch):
    """The trials of a search: Optuna chooses them, the engine trains and judges them."""

    def __init__(self, study: optuna.Study, plan: SearchPlan, folder: Path, total: int) -> None:
        super().__init__(study, total)
        self.plan, self.folder = plan, folder

    def run_next(self, worker: Worker) -> bool:
        """Ask for a trial and run it; False when other processes have all that are left."""
        words = self.judge_next(lambda trial: self._train(trial, worker))
        if words:
            worker.say(words)
        return words is not None

    def _train(self, trial: optuna.Trial, worker: Worker) -> float:
        """Train and judge one configuration; return its accuracy."""
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
                outcome = worker.run(Trial(run, config), title, watch)
            except optuna.TrialPruned:
                shutil.rmtree(run / "checkpoints", ignore_errors=True)
                worker.say(f"{title}: pruned")
                raise
        if outcome["state"] == "diverged":
            trial.set_user_attr("diverged", True)
            return _guess_accuracy(worker, config)
        start = METRICS[self.plan.definition["objective"]]
        return float(next(v for name, v in outcome["metrics"].items() if name.startswith(start)))

    def _claim_run(self, trial: optuna.Trial, stack: ExitStack) -> Path:
        """Return the run of a trial; of one that is taken up again, the run it left behind.

        A worker that only seemed dead may still be writing there; then it is a new one.
        """
        first = trial.user_attrs.get(CONTINUES, trial.number)
        for number in (first, trial.number):
            name = f"trial-{number:04d}"
            if stack.enter_context(lock(self.folder, name, wait=False)):
                return self.folder / "runs" / name
        raise UserError(f"{self.folder}: another process holds the run of trial {trial.number}")

    def save(self) -> Record:
        """Write ``trials.json`` and ``trials.csv``, and return what is in the former."""
        with lock(self.folder, "results"):
            return write_trials(self.folder, self.study, self.plan.definition)


def _guess_accuracy(worker: Worker, config: Config) -> float:
    """Return the accuracy of always guessing the most common class: the value of a diverged run."""
    test = worker.how.splits(worker.source, config).test
    assert test is not None
    assert test.labels is not None
    return 100.0 * test.labels.bincount().max().item() / len(test)


# What a search leaves behind.


def trial_rows(study: optuna.Study) -> list[Record]:
    """Return a row for every trial that was ever begun."""
    return [
        _make_row(trial)
        for trial in study.get_trials(deepcopy=False)
        if SURPLUS not in trial.user_attrs and trial.state != TrialState.WAITING
    ]


def _make_row(trial: FrozenTrial) -> Record:
    reported = trial.intermediate_values
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.value if trial.state == TrialState.COMPLETE else None,
        "last_knn": reported[max(reported)] if reported else None,
        "last_epoch": max(reported) if reported else None,
        "diverged": bool(trial.user_attrs.get("diverged")),
        "continues": trial.user_attrs.get(CONTINUES),
        "seconds": trial.duration.total_seconds() if trial.duration else None,
        "values": dict(trial.params),
    }


def measure_importance(study: optuna.Study) -> dict[str, float] | None:
    """Return each field's share of the variance of the values, by functional ANOVA.

    None of too few trials, or of trials that all came to the same.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < LEAST_FOR_IMPORTANCE:
        return None
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of degenerate trees, on a handful of trials
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except (RuntimeError, ValueError):
        return None


def write_trials(folder: Path, study: optuna.Study, definition: Record) -> Record:
    """Write ``trials.json`` and ``trials.csv``; return what is in ``trials.json``."""
    rows = trial_rows(study)
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
    """Write ``best.toml``: the recipe with the values of the best trial, ready to train.

    Args:
        recipe: as it was before the search held images out of it.
    """
    best = record["best"]
    if best is None:
        return
    path = folder / "best.toml"
    command = shlex.join(" ".join(word.splitlines()) for word in record["command"])
    values = ", ".join(f"{name} = {value}" for name, value in best["values"].items())
    header = (
        f"# {record['recipe']}, searched over {', '.join(record['space'])}.\n"
        f"# Search:   {command}\n"
        f"# Command:  deepbregman pretrain {path}\n"
        f"# Expected: {record['objective']} {best['value']:.2f} % on held-out training images of "
        f"{record['data']}, one seed: trial {best['trial']},\n"
        f"#           the best of {record['num_counted']} and so an optimistic value.\n"
        f"# Found:    {values}.\n"
    )
    with replacing(path) as file:
        file.write((header + "\n" + to_toml(override(recipe, best["values"]))).encode())
