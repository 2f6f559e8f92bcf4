"""Other programs that a run's metrics go to, beside ``metrics.jsonl``: CSV, MLflow, W&B.

Each writes in a thread of its own. Neither an error in it nor a server that does not answer stops
or delays the run: it is told once, and ``metrics.jsonl`` has everything.
"""

import importlib.util
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deepbregman.config import Config, fields_of
from deepbregman.errors import UserError, abbreviate
from deepbregman.files import read_json, write_csv, write_json
from deepbregman.runs import Record, Run

from .faults import Interrupted

PACKAGES = {"mlflow": ("mlflow", "mlflow-skinny"), "wandb": ("wandb", "wandb")}
"""Logger -> the module that it needs, and the package that has it."""
PARTING_SECONDS = 60.0
"""How long the end of a run waits for loggers that are still writing."""
_MOST_PARAMETERS = 100  # MLflow takes no more at a time
_LONGEST_PARAMETER = 500  # characters that every server of MLflow takes


def check_loggers(config: Config) -> None:
    """Refuse a logger whose package is not installed, before anything is trained."""
    for name in config.training.logger:
        module, package = PACKAGES.get(name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            raise UserError(
                f"training.logger has {name!r}, which needs the package {package}: install it "
                f"with `pip install 'deepbregman[{name}]'`, or leave the logger out"
            )


class CsvTable:
    """``metrics.csv`` in the run's folder, a line for each epoch, for a spreadsheet."""

    def __init__(self, run: Run, config: Config) -> None:
        self.path = run.path / "metrics.csv"
        # By epoch: the first may be in the run's metrics already when this thread comes to read.
        self.rows = {row["epoch"]: row for row in run.metrics()}

    def write(self, record: Record) -> None:
        """Write the whole table again: an epoch may have metrics that earlier ones do not have."""
        self.rows[record["epoch"]] = record
        write_csv(self.path, list(self.rows.values()))

    def close(self, status: str) -> None:
        """Leave the file as it is."""


class WandbRun:
    """Weights & Biases: offline in the run's folder, unless WANDB_MODE says otherwise."""

    def __init__(self, run: Run, config: Config) -> None:
        import wandb

        start: Any = wandb.init  # its types differ between releases
        self.session: Any = start(
            project=os.environ.get("WANDB_PROJECT", "deepbregman"),
            name=run.path.name,
            id=keep_identity(run, "wandb", lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(run.path),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=fields_of(config),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, record: Record) -> None:
        """Write an epoch's metrics."""
        self.session.log(record, step=record["step"])

    def close(self, status: str) -> None:
        """End the session; a resumed run opens it again."""
        self.session.finish(exit_code=int(status != "FINISHED"))


class MlflowRun:
    """MLflow: the server of MLFLOW_TRACKING_URI, or the folder mlruns beside the run's."""

    def __init__(self, run: Run, config: Config) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.make_metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow warns of its own files, in favour of a database that needs more packages.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.path.absolute().parent / "mlruns").as_uri()
        self.client: Any = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "deepbregman")
        self.identity = keep_identity(run, f"mlflow {uri}", lambda: self._create(name, run))
        self.client.update_run(self.identity, status="RUNNING")
        parameters = [
            Param(field, str(value)[:_LONGEST_PARAMETER])
            for field, value in fields_of(config).items()
        ]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            part = parameters[start : start + _MOST_PARAMETERS]
            self.client.log_batch(self.identity, params=part)

    def _create(self, experiment: str, run: Run) -> str:
        found = self.client.get_experiment_by_name(experiment)
        number = self.client.create_experiment(experiment) if found is None else found.experiment_id
        created: str = self.client.create_run(number, run_name=run.path.name).info.run_id
        return created

    def write(self, record: Record) -> None:
        """Write an epoch's metrics; MLflow takes numbers only."""
        moment, step = int(1000 * time.time()), record["step"]
        metrics = [
            self.make_metric(name, float(value), moment, step)
            for name, value in record.items()
            if isinstance(value, int | float)
        ]
        self.client.log_batch(self.identity, metrics=metrics)

    def close(self, status: str) -> None:
        """End the run there; a resumed run opens it again."""
        self.client.set_terminated(self.identity, status)


Backend = CsvTable | WandbRun | MlflowRun
BACKENDS: dict[str, Callable[[Run, Config], Backend]] = {
    "csv": CsvTable,
    "mlflow": MlflowRun,
    "wandb": WandbRun,
}
"""``training.logger`` -> what opens it."""


def keep_identity(run: Run, key: str, make: Callable[[], str]) -> str:
    """Return the name by which another program knows the run: a resumed run keeps it."""
    path = run.path / "loggers.json"
    with _IDENTITIES:
        known = read_json(path) if path.is_file() else {}
        if key not in known:
            known[key] = make()
            write_json(path, known)
    return str(known[key])


_IDENTITIES = threading.Lock()


class BackgroundLogger:
    """A backend in a thread, which ends with the first error."""

    def __init__(self, name: str, open_backend: Callable[[], Backend]) -> None:
        self.name = name
        self.problem: Exception | None = None
        self._records: queue.SimpleQueue[Record | str] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, args=(open_backend,), name=f"logger-{name}", daemon=True
        )
        self._thread.start()

    def _work(self, open_backend: Callable[[], Backend]) -> None:
        try:
            backend = open_backend()
            while not isinstance(record := self._records.get(), str):
                backend.write(record)
            backend.close(record)
        except Exception as error:  # whatever another package raises must not end the run
            self.problem = error

    def write(self, record: Record) -> None:
        """Hand over an epoch's metrics, and do not wait."""
        if self.problem is None:
            self._records.put(dict(record))

    def end(self, status: str) -> None:
        """Say that no more will come, and how the run ended: FINISHED, FAILED or KILLED."""
        self._records.put(status)

    def is_done(self, deadline: float) -> bool:
        """Wait until a time for the last record to be written, and say whether it is."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()


class Loggers:
    """All loggers of a run, until its block ends; ``warn`` is called once for each failure."""

    def __init__(self, run: Run, config: Config, warn: Callable[[str], None]) -> None:
        self.folder: Path = run.path
        self.warn = warn
        self.loggers = [
            BackgroundLogger(name, partial(BACKENDS[name], run, config))
            for name in dict.fromkeys(config.training.logger)
            if name in BACKENDS  # the loop writes events for TensorBoard itself
        ]

    def write(self, record: Record) -> None:
        """Pass an epoch's metrics to each logger, and warn about those that have failed."""
        self._drop_failed()
        for logger in self.loggers:
            logger.write(record)

    def _drop_failed(self) -> None:
        failed = [logger for logger in self.loggers if logger.problem is not None]
        self.loggers = [logger for logger in self.loggers if logger not in failed]
        for logger in failed:
            problem = logger.problem
            words = abbreviate(f"{type(problem).__name__}: {problem}")
            self.warn(
                f"the logger {logger.name} has failed ({words}) and is left out; "
                f"{self.folder / 'metrics.jsonl'} has all metrics"
            )

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        deadline = time.monotonic() + PARTING_SECONDS
        status = "FINISHED" if error is None else "FAILED"
        if isinstance(error, Interrupted | KeyboardInterrupt):
            status = "KILLED"
        for logger in self.loggers:
            logger.end(status)
        slow = [logger.name for logger in self.loggers if not logger.is_done(deadline)]
        self._drop_failed()
        for name in slow:
            self.warn(
                f"the logger {name} has not written everything after {PARTING_SECONDS:.0f} s and "
                f"is left behind; {self.folder / 'metrics.jsonl'} has all metrics"
            )
