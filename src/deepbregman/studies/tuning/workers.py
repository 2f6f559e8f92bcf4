"""Workers that share one search: a storage, and a loop that loses no trial and counts none twice.

A worker's heartbeat marks its trial as alive. The trial of a worker that was killed is failed by
the others once the heartbeat is old, and queued again with the same values; whoever takes it up
goes on with the run that the first left behind.
"""

import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from deepbregman.errors import UserError
from deepbregman.training.faults import Interrupted

HEARTBEAT_SECONDS = 30
GRACE_SECONDS = 120
MOST_ATTEMPTS = 3
"""A trial that kills its worker every time is given up."""
POLL_SECONDS = 1.0
TAKEN = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)
"""States that count towards the trials of a search."""
CONTINUES, ATTEMPT, SURPLUS = "continues", "attempt", "surplus"
Objective = Callable[[Trial], float]


class Surplus(Exception):
    """Another worker took the last trial of the search at the same moment."""


class TakenForDead(Exception):
    """Another worker failed this one's trial, and queued it again, since its heartbeat was old."""


def open_storage(
    url: str, *, heartbeat: int = HEARTBEAT_SECONDS, grace: int = GRACE_SECONDS
) -> BaseStorage:
    """Open the storage of a search, in which trials of killed workers come to light.

    Args:
        url: SQLAlchemy's, such as ``sqlite:///search.db`` or ``postgresql://user@host/database``.
        heartbeat: seconds between signs of life.
        grace: seconds without one after which a worker is taken for dead.
    """
    import sqlalchemy.exc

    waiting = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    known = inspect.signature(RDBStorage).parameters
    keyword = "heartbeat_stale_trial_callback"
    if keyword not in known:  # before Optuna 4.9
        keyword = "failed_trial_callback"
    options: dict[str, Any] = {keyword: queue_again}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return RDBStorage(
                url,
                engine_kwargs={**waiting, "pool_pre_ping": True},
                heartbeat_interval=heartbeat,
                grace_period=grace,
                **options,
            )
    except ImportError as error:
        why = error.__cause__ or error
        raise UserError(
            f"--storage {_kind(url)} needs a driver that is not installed ({why}): install it, for "
            "PostgreSQL with `pip install psycopg[binary]` and a URL of postgresql+psycopg://"
        ) from None
    except sqlalchemy.exc.SQLAlchemyError as error:
        words = str(error).splitlines()[0]
        raise UserError(
            f"--storage {_kind(url)} cannot be opened ({words}): give an Optuna storage URL such "
            "as sqlite:///search.db or postgresql+psycopg://user@host/database"
        ) from None


def _kind(url: str) -> str:
    """Name a storage without the password that its URL may hold."""
    return url.partition("://")[0]


def queue_again(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the values of a trial whose worker died or was stopped."""
    attempt = trial.user_attrs.get(ATTEMPT, 1)
    if attempt < MOST_ATTEMPTS:
        first = trial.user_attrs.get(CONTINUES, trial.number)
        attributes = {CONTINUES: first, ATTEMPT: attempt + 1}
        study.enqueue_trial(trial.params, user_attrs=attributes)


class FirstCome:
    """Guards an objective: a trial that is not this worker's to judge gives way.

    That is one beyond the last, or one that another worker took for dead and queued again. An
    interrupted one is queued again here.

    Args:
        study: shared.
        total: trials of all workers together.
        objective: of a trial.
    """

    def __init__(self, study: optuna.Study, total: int, objective: Objective) -> None:
        self.study, self.total, self.objective = study, total, objective
        self.gave_way = False
        """Whether the last trial did."""

    def __call__(self, trial: Trial) -> float:
        """Judge a trial."""
        self.gave_way = False
        # Those that wait will be taken: they were queued before, for a worker that died.
        counted = (*TAKEN, TrialState.WAITING)
        others = self.study.get_trials(deepcopy=False, states=counted)
        if sum(other.number < trial.number for other in others) >= self.total:
            self.gave_way = True
            trial.set_user_attr(SURPLUS, True)
            raise Surplus
        try:
            value = self.objective(trial)
        except (Interrupted, KeyboardInterrupt):
            queue_again(self.study, self._now(trial))
            raise
        except optuna.exceptions.UpdateFinishedTrialError:  # of a value reported on the way
            self.gave_way = True
            raise TakenForDead from None
        if self._now(trial).state != TrialState.RUNNING:
            self.gave_way = True
            raise TakenForDead
        return value

    def _now(self, trial: Trial) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[trial.number]


def work(
    study: optuna.Study,
    total: int,
    objective: Objective,
    *,
    after: Callable[[], object] = lambda: None,
    waiting: Callable[[int], object] = lambda number: None,
) -> None:
    """Run trials until there are ``total`` that were completed or pruned, by whichever worker.

    Args:
        study: shared.
        total: of all workers together.
        objective: of a trial; an interruption in it queues the trial again.
        after: called after every trial.
        waiting: called, with their number, once only trials of other workers are left.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    guarded = FirstCome(study, total, objective)
    told = False
    while True:
        states = [trial.state for trial in study.get_trials(deepcopy=False, states=TAKEN)]
        if len(states) < total:
            try:
                study.optimize(guarded, n_trials=1, catch=(Surplus, TakenForDead))
            except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
                if not guarded.gave_way:  # else another has said already how the trial ended
                    raise
            after()
            continue
        running = states.count(TrialState.RUNNING)
        if running == 0:
            return
        if not told:
            waiting(running)
            told = True
        time.sleep(POLL_SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)
