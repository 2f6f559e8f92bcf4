"""A search that processes share through Optuna's storage: no trial is lost, none counted twice.

A worker's heartbeat marks its trial as alive. When the heartbeat is old, another worker fails the
trial and queues its values again; the worker that takes them continues the run that the first one
left. A trial and its continuations count as one trial of the search, also while none of them is
queued.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
import sqlalchemy.exc
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from deepbregman.errors import UserError, first_line
from deepbregman.training.faults import Interrupted

from .engine import TooLarge

HEARTBEAT_SECONDS = 30
GRACE_SECONDS = 120
"""Time without a heartbeat after which a worker counts as dead."""
MAX_DEATHS = 3
"""Deaths of its workers after which a trial is given up."""
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
TAKEN = (TrialState.RUNNING, *DONE)
"""States that count towards the trials of a search."""

# Marks of a trial.
CONTINUES = "continues"  # the number of the first attempt at it
STOPPED = "stopped"  # by a signal
FAULTY = "faulty"  # ended by an error of its own
SURPLUS = "surplus"  # not needed, because there were enough
TOO_LARGE = "too large"  # memory ran out; the value is the words of that error
BEGUN = "begun"  # its worker has sent a heartbeat


def open_storage(url: str) -> RDBStorage:
    """Open the storage of a search, whose workers send heartbeats."""
    is_sqlite = url.startswith("sqlite")
    kind = url.partition("://")[0]  # the rest may hold a password
    engine: dict[str, Any] = {"pool_pre_ping": True}
    if is_sqlite:
        # To open a file costs little, and a pool would leave it open after the search.
        engine = {"poolclass": sqlalchemy.NullPool, "connect_args": {"timeout": 60}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = RDBStorage(
                url,
                engine_kwargs=engine,
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
            )
    except ImportError as error:
        why = error.__cause__ or error
        raise UserError(
            f"--storage {kind} needs a driver that is not installed ({why}): install it, for "
            "PostgreSQL with `pip install psycopg[binary]` and a URL of postgresql+psycopg://"
        ) from None
    except sqlalchemy.exc.SQLAlchemyError as error:
        file = sqlalchemy.make_url(url).database if is_sqlite else None
        if file and Path(file).exists():
            raise  # a damaged file, or a full disk
        raise UserError(
            f"--storage {kind} cannot be opened ({first_line(error)}): give an Optuna storage URL "
            "such as sqlite:///search.db or postgresql+psycopg://user@host/database"
        ) from None
    if is_sqlite:
        # SQLite takes its lock at the first write. Two workers that had both read that a trial is
        # waiting would both take it; so take the lock before the first read.
        @sqlalchemy.event.listens_for(storage.engine, "begin")
        def begin_immediate(connection: sqlalchemy.Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return storage


@contextmanager
def explain_storage_errors(folder: Path) -> Iterator[None]:
    """Explain errors of the storage. Trials that were trained are kept in their runs."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        is_wrapped = isinstance(error, optuna.exceptions.StorageInternalError)
        words = first_line((is_wrapped and error.__cause__) or error)
        raise UserError(
            f"the storage of the search in {folder} fails ({words}): make it reachable and "
            "writable, free space there, or restore its database from a copy, and give the same "
            "command again; trials.csv and the runs are as they were, and nothing that was "
            "complete is lost"
        ) from error


class NotOurs(Exception):
    """A trial is not for this worker: there are enough trials, or another worker has it."""


@dataclass(frozen=True)
class AttemptedTrial:
    """A trial and its continuations; together they count as one trial."""

    first: int
    attempts: list[FrozenTrial]

    @property
    def too_large(self) -> str | None:
        """Words of the error, if memory ran out in the last attempt; the trial still counts."""
        words: str | None = self.attempts[-1].user_attrs.get(TOO_LARGE)
        return words

    @property
    def is_taken(self) -> bool:
        """Whether an attempt waits, runs or is done, or needs a machine with more memory."""
        is_alive = any(trial.state != TrialState.FAIL for trial in self.attempts)
        return is_alive or self.too_large is not None

    @property
    def needs_retry(self) -> bool:
        """Whether the last attempt was stopped or killed, and nothing continues it yet."""
        ended = {STOPPED, TOO_LARGE}
        deaths = sum(ended.isdisjoint(trial.user_attrs) for trial in self.attempts)
        is_faulty = any(FAULTY in trial.user_attrs for trial in self.attempts)
        return not self.is_taken and not is_faulty and deaths < MAX_DEATHS

    def queue_again(self, study: optuna.Study) -> None:
        """Queue the values of the trial again."""
        values = {k: v for trial in self.attempts for k, v in trial.params.items()}
        study.enqueue_trial(values, user_attrs={CONTINUES: self.first})


def list_attempted_trials(study: optuna.Study) -> list[AttemptedTrial]:
    """Return the trials that are taken or need a retry, the oldest first."""
    attempts: dict[int, list[FrozenTrial]] = {}
    for trial in study.get_trials(deepcopy=False):
        if SURPLUS not in trial.user_attrs:
            attempts.setdefault(find_first_attempt(trial), []).append(trial)
    trials = [AttemptedTrial(first, attempts[first]) for first in sorted(attempts)]
    return [trial for trial in trials if trial.is_taken or trial.needs_retry]


def find_first_attempt(trial: optuna.Trial | FrozenTrial) -> int:
    """Return the number of the first attempt at a trial."""
    first: int = trial.user_attrs.get(CONTINUES, trial.number)
    return first


class SharedSearch:
    """A search of ``total`` trials that processes share: none is lost, and none counted twice."""

    def __init__(self, study: optuna.Study, total: int) -> None:
        self.study, self.total = study, total

    def count(self) -> tuple[int, int]:
        """Return how many trials are done, by all processes, and how many there are to be."""
        return min(len(self.study.get_trials(deepcopy=False, states=DONE)), self.total), self.total

    def list_too_large(self) -> list[AttemptedTrial]:
        """Return the trials that memory ran out in, and that nobody tries again."""
        attempted = list_attempted_trials(self.study)[: self.total]
        return [trial for trial in attempted if trial.too_large is not None]

    def retry_too_large(self) -> None:
        """Queue trials that memory ran out in again, for a process that has just begun."""
        for trial in self.list_too_large():
            trial.queue_again(self.study)

    def run_one(self, objective: "optuna.study.study.ObjectiveFuncType") -> str | None:
        """Ask for a trial and run it; None if other processes hold all that remain.

        A trial that is interrupted is continued later. Returns a message for the user, which is
        mostly empty.
        """
        self._queue_lost_trials()
        taken = self.study.get_trials(deepcopy=False, states=TAKEN)
        if len(taken) + len(self.list_too_large()) >= self.total:
            return None
        number = -1
        raised: BaseException | None = None

        def run(trial: optuna.Trial) -> float:
            nonlocal number, raised
            number = trial.number
            try:
                return self._run(trial, objective)
            except BaseException as error:
                raised = error
                raise

        try:
            self.study.optimize(run, n_trials=1, catch=(NotOurs,))
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError, AssertionError) as error:
            if error is raised or number < 0 or not self._state(number).is_finished():
                raise
            if raised is not None and not isinstance(raised, NotOurs | optuna.TrialPruned):
                raise raised from None
            # Optuna refuses to end a trial that another worker has ended.
            return f"trial {number}: another worker has ended it meanwhile; its result counts"
        return ""

    def _queue_lost_trials(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)
        self._fail_never_begun()
        # Two workers may both queue a trial: the later continuation gives way.
        for trial in list_attempted_trials(self.study)[: self.total]:
            if trial.needs_retry:
                trial.queue_again(self.study)

    def _fail_never_begun(self) -> None:
        """Fail trials of workers that were killed before the first heartbeat: Optuna does not."""
        oldest = datetime.now() - timedelta(seconds=GRACE_SECONDS)
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            started = trial.datetime_start
            if BEGUN not in trial.user_attrs and started is not None and started < oldest:
                with suppress(ValueError, optuna.exceptions.OptunaError):  # another has ended it
                    self.study.tell(trial.number, state=TrialState.FAIL)

    def _run(self, trial: optuna.Trial, objective: "optuna.study.study.ObjectiveFuncType") -> float:
        _mark(trial, BEGUN)
        if self._is_surplus(trial):
            trial.set_user_attr(SURPLUS, True)
            raise NotOurs
        try:
            value = objective(trial)
        except optuna.TrialPruned:
            raise
        except (Interrupted, KeyboardInterrupt):
            _mark(trial, STOPPED)
            raise
        except optuna.exceptions.UpdateFinishedTrialError:  # raised by a report during training
            raise NotOurs from None
        except TooLarge as error:
            _mark(trial, TOO_LARGE, str(error))
            raise NotOurs from None
        except Exception:
            _mark(trial, FAULTY)
            raise
        if self._state(trial.number) != TrialState.RUNNING:
            raise NotOurs
        assert isinstance(value, float)
        return value

    def _is_surplus(self, trial: optuna.Trial) -> bool:
        """Whether older trials are enough, or an earlier attempt at this one has not failed."""
        first = find_first_attempt(trial)
        attempted = list_attempted_trials(self.study)
        is_continued = any(
            attempt.number < trial.number and attempt.state != TrialState.FAIL
            for other in attempted
            if other.first == first
            for attempt in other.attempts
        )
        return is_continued or sum(other.first < first for other in attempted) >= self.total

    def _state(self, number: int) -> TrialState:
        return self.study.get_trials(deepcopy=False)[number].state


def _mark(trial: optuna.Trial, name: str, value: bool | str = True) -> None:
    """Mark a trial, unless another worker has ended it."""
    with suppress(optuna.exceptions.OptunaError):
        trial.set_user_attr(name, value)
