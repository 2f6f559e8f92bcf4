"""CSV, MLflow and Weights & Biases, each with its real package; none can end or hold up a run."""

import csv
import json
import signal
import threading
import time
from typing import Any, NoReturn

import pytest

from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, override
from deepbregman.errors import Diverged, Notice, UserError
from deepbregman.runs import CHANGEABLE, Record, Run
from deepbregman.training import loggers, loop
from deepbregman.training.faults import Guard, Interrupted
from deepbregman.training.loggers import BACKENDS, BackgroundLogger, Loggers, keep_identity


def with_loggers(config: Config, *names: str) -> Config:
    return override(config, {"training.logger": list(names)})


def read_csv(run: Run) -> list[dict[str, str]]:
    with (run.path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_the_metrics_of_every_epoch_also_of_a_resumed_run(
    tmp_path, tiny_config, tiny_run, monkeypatch
):
    write = loop.Pretraining._write_epoch

    def write_and_stop(self: loop.Pretraining, record: Record, *rest: Any) -> None:
        write(self, record, *rest)
        raise KeyboardInterrupt

    config = with_loggers(tiny_config, "csv")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Pretraining, "_write_epoch", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config, run=tmp_path / "run")
    run = Run(tmp_path / "run")
    assert [row["epoch"] for row in read_csv(run)] == ["1"]
    resume(run.path)
    rows, metrics = read_csv(run), tiny_run.metrics()
    assert [float(row["total"]) for row in rows] == [row["total"] for row in metrics]
    assert rows[0]["knn"] == ""  # measured in the second epoch only
    assert float(rows[1]["knn"]) == metrics[1]["knn"]


class Broken:
    """A logger that fails at one of its three moments."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.fail("open")

    def fail(self, moment: str) -> None:
        if moment == self.moment:
            raise RuntimeError(f"no {moment}")

    def write(self, record: Record) -> None:
        self.fail("write")

    def close(self, status: str) -> None:
        self.fail("close")


@pytest.mark.parametrize("moment", ["open", "write", "close"])
def test_a_logger_that_fails_is_left_out_and_told_once(moment, tmp_path, tiny_config, monkeypatch):
    monkeypatch.setitem(BACKENDS, "mlflow", lambda run, config: Broken(moment))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    told: list[str] = []
    run, config = Run(tmp_path / "run"), with_loggers(tiny_config, "mlflow", "csv")
    with Loggers(run, config, told.append) as opened:
        for epoch in (1, 2, 3):
            opened.write({"epoch": epoch, "step": epoch, "total": 0.5})
            time.sleep(0.01)
    assert len(told) == 1
    assert f"the logger mlflow has failed ('RuntimeError: no {moment}') and is left out" in told[0]
    assert len(read_csv(run)) == 3


def test_a_run_is_complete_whatever_its_loggers_do(tmp_path, tiny_config, tiny_run, monkeypatch):
    monkeypatch.setitem(BACKENDS, "csv", lambda run, config: Broken("write"))
    with pytest.warns(Notice, match=r"the logger csv has failed .* and is left out"):
        run = pretrain(with_loggers(tiny_config, "csv"), run=tmp_path / "run")
    assert [row["total"] for row in run.metrics()] == [row["total"] for row in tiny_run.metrics()]


def test_a_logger_is_told_how_a_run_ended(tmp_path, tiny_config, stop_after, monkeypatch):
    ends: list[str] = []

    class Told(Broken):
        def close(self, status: str) -> None:
            ends.append(status)

    def diverge(*arguments: Any) -> NoReturn:
        raise Diverged("not finite")

    monkeypatch.setitem(BACKENDS, "mlflow", lambda run, config: Told("never"))
    monkeypatch.setattr("deepbregman.commands.job.check_loggers", lambda config: None)
    config = with_loggers(tiny_config, "mlflow")
    with stop_after(1), pytest.raises(Interrupted):
        pretrain(config, run=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "check", diverge)
        with pytest.raises(Diverged):
            resume(tmp_path / "run")
    resume(tmp_path / "run")
    assert ends == ["KILLED", "FAILED", "FINISHED"]


def test_a_logger_that_does_not_answer_holds_nothing_up(tmp_path, tiny_config, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(loggers, "PARTING_SECONDS", 0.05)

    class Silent(Broken):
        def write(self, record: Record) -> None:
            answer.wait(30)

    monkeypatch.setitem(BACKENDS, "wandb", lambda run, config: Silent("never"))
    told: list[str] = []
    config = with_loggers(tiny_config, "wandb")
    with Loggers(Run(tmp_path), config, told.append) as opened:
        for step in range(100):
            opened.write({"step": step})
    answer.set()
    assert "the logger wandb has not written everything after 0 s" in told[0]


def test_a_logger_without_its_package_is_refused_before_the_run(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'deepbregman\[wandb\]'"):
        pretrain(with_loggers(tiny_config, "wandb"), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_row_that_is_in_the_metrics_already_is_not_repeated(tmp_path, tiny_config):
    record = {"epoch": 1, "step": 2, "total": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    with Loggers(Run(tmp_path), with_loggers(tiny_config, "csv"), print) as opened:
        opened.write(record)
    assert read_csv(Run(tmp_path)) == [{"epoch": "1", "step": "2", "total": "0.5"}]


def test_tensorboard_may_be_named_with_the_others(tiny_config, tmp_path):
    config = override(tiny_config, {"training.tensorboard": False})
    run = pretrain(with_loggers(config, "tensorboard", "csv"), run=tmp_path / "run")
    assert list((run.path / "tensorboard").iterdir())
    assert (run.path / "metrics.csv").exists()


def test_a_run_that_fails_leaves_no_thread_of_tensorboard(tiny_config, tmp_path, monkeypatch):
    """A study trains many runs in one process, and some diverge."""
    pytest.importorskip("tensorboard")

    def fail(*arguments: Any) -> NoReturn:
        raise Diverged("not finite")

    monkeypatch.setattr(Guard, "check", fail)
    with pytest.raises(Diverged):
        pretrain(with_loggers(tiny_config, "tensorboard"), run=tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert not [thread for thread in threading.enumerate() if "Writer" in type(thread).__name__]


def test_a_resumed_run_keeps_the_name_by_which_a_logger_knows_it(tmp_path):
    names = iter("abc")
    for key, expected in (("wandb", "a"), ("mlflow here", "b"), ("wandb", "a"), ("mlflow", "c")):
        assert keep_identity(Run(tmp_path), key, lambda: next(names)) == expected


def test_a_resumed_run_may_have_other_loggers():
    assert "training.logger" in CHANGEABLE


def write_two(run: Run, config: Config, name: str, *epochs: int, stops: bool = False) -> list[str]:
    told: list[str] = []
    with Loggers(run, with_loggers(config, name), told.append) as opened:
        for epoch in epochs:
            opened.write({"epoch": epoch, "step": 2 * epoch, "total": 0.5 / epoch, "verdict": "ok"})
        if stops:
            raise Interrupted(signal.SIGTERM, "go on")
    return told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow itself
def test_mlflow_has_parameters_and_metrics_in_one_run(tmp_path, tiny_config, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'deepbregman[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run")
    with pytest.raises(Interrupted):
        write_two(run, tiny_config, "mlflow", 1, stops=True)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("deepbregman")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "KILLED"
    assert write_two(run, tiny_config, "mlflow", 2) == []  # resumed
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.params["training.batch_size"] == "32"
    history = client.get_metric_history(found.info.run_id, "total")
    assert [(metric.step, metric.value) for metric in history] == [(2, 0.5), (4, 0.25)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of wandb itself
def test_wandb_writes_an_offline_run(tmp_path, tiny_config, monkeypatch):
    pytest.importorskip("wandb", reason="pip install 'deepbregman[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run")
    assert write_two(run, tiny_config, "wandb", 1, 2) == []
    identity = json.loads((run.path / "loggers.json").read_text())["wandb"]
    (written,) = (run.path / "wandb").glob(f"offline-run-*/run-{identity}.wandb")
    deadline = time.monotonic() + 240  # the process of W&B may write a moment after it has said so
    while b"verdict" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    content = written.read_bytes()
    assert b"verdict" in content
    assert b"training.batch_size" in content


def test_a_background_logger_writes_in_order():
    seen: list[int] = []

    class Slow(Broken):
        def write(self, record: Record) -> None:
            time.sleep(0.001)
            seen.append(record["step"])

    logger = BackgroundLogger("slow", lambda: Slow("never"))
    for step in range(10):
        logger.write({"step": step})
    logger.end("FINISHED")
    assert logger.is_done(time.monotonic() + 240)
    assert seen == list(range(10))
