"""The engine of grid studies, by the command that a user types."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from deepbregman.cli import main
from deepbregman.commands import job
from deepbregman.config import Config, load_recipe, override
from deepbregman.data import Source
from deepbregman.errors import UserError
from deepbregman.evaluation import features, inputs
from deepbregman.evaluation.options import Options
from deepbregman.evaluation.results import Predictions
from deepbregman.launching import find_process
from deepbregman.runs import Run
from deepbregman.statistics import interval_over_images
from deepbregman.studies import engine
from deepbregman.studies.catalogue import kappa, psi, teacher
from deepbregman.studies.definition import Arm, StudyOptions
from deepbregman.studies.engine import MAIN_METRIC, EvaluationPlan, Trial, lock, run_trial
from deepbregman.studies.grid import (
    GridCell,
    measure_costs,
    open_grid,
    open_study_images,
    run_study,
)
from deepbregman.studies.grid_plan import plan_study
from deepbregman.studies.results import compare_arms, find_references, summarise_arms
from deepbregman.training.faults import Interrupted
from deepbregman.training.loop import Pretraining

from .conftest import TINY, Record, read


def test_what_is_rarely_meant_is_said_before_training(few_digits, out):
    """Trials are quiet, and a whole study would be trained before its user sees the mistake."""
    changes = ("training.batch_size=64", "optimiser.warmup_epochs=5.0")
    options = StudyOptions(recipe="digits", data=few_digits, epochs=3, changes=changes, out=out)
    console = Console(file=io.StringIO())
    open_study_images(plan_study(kappa.STUDY, options), console)
    said = console.file.getvalue()
    assert said.count("optimiser.warmup_epochs is 5 and training.epochs 3") == 1
    changes = ("training.batch_size=64", "optimiser.warmup_epochs=0.0")
    options = replace(options, recipe="best", changes=(*changes, "encoder.name=small"))
    open_study_images(plan_study(teacher.STUDY, options), console)
    said = console.file.getvalue()
    assert said.count("the divergence stays 0") == 4  # banks of 1,024 and more; 256 is filled
    assert not out.exists()


ARMS = {
    "kappa": ("none", "5"),
    "augmentations": ("divergence-all", "divergence-no-crop"),
    "subnetwork": ("norm-output", "norm-none"),
}


@pytest.mark.parametrize(
    "name",
    [
        "subnetwork",
        pytest.param("kappa", marks=pytest.mark.slow),
        pytest.param("augmentations", marks=pytest.mark.slow),
    ],
)
def test_to_the_end(name, tiny, out, monkeypatch, capsys, refusal):
    main(["study", name, "--out", str(out), "--only", *ARMS[name], *tiny])
    results = read(out)
    names = [arm["arm"] for arm in results["arms"]]
    assert set(ARMS[name]) <= set(names)
    assert results["evaluate_on"] == "test"
    for row in results["cells"]:
        run = Run.open(out / "runs" / row["run"])
        (judged,) = [
            part
            for part in run.result()["evaluations"]
            if f"{part['protocol']}, {part['variant']}" == MAIN_METRIC and part["metric"] == "top1"
        ]
        assert row["metrics"][MAIN_METRIC] == judged["value"]
        assert judged["num_test"] == 100
        assert judged.get("raw_pixels") is None  # the same for every run, so not measured in each
        assert not run.checkpoints.exists()  # deleted once judged
    if name == "subnetwork":  # digits' subnetworks are normalised at the output already
        assert sorted(run.name for run in (out / "runs").iterdir()) == [
            "norm-none-seed0",
            "recipe-seed0",
        ]
        assert names[:4] == ["recipe", "norm-output", "norm-none", "activation-linear"]
        assert results["cells"][0]["metrics"] == results["cells"][1]["metrics"]
    with Image.open(out / f"{name}.png") as figure:
        assert len(figure.convert("RGB").getcolors(maxcolors=100_000) or []) > 20
    assert (out / f"{name}.svg").read_text().startswith("<svg")
    shown = capsys.readouterr().out
    assert f"{results['arms'][0]['metrics'][MAIN_METRIC]['mean']:.2f} (n=1)" in shown
    assert f"study:  {out}" in shown
    header, *lines = (out / "results.csv").read_text().splitlines()
    assert header.startswith("arm,series,x,seed,state,run,")
    assert len(lines) == len(names)
    written = {path: path.read_bytes() for path in (out / "results.csv", out / "tables.md")}
    assert f"| {names[0]} " in (out / "tables.md").read_text()
    for path in (*written, out / f"{name}.png"):
        path.unlink()
    monkeypatch.setattr(engine, "pretrain", None)  # nothing is trained, and no image is opened
    monkeypatch.setattr(engine, "open_labelled", None)
    main(["study", name, "--out", str(out), "--no-train"])
    assert {path: path.read_bytes() for path in written} == written
    assert (out / f"{name}.png").is_file()
    monkeypatch.setitem(sys.modules, "altair", None)  # as if it were not installed
    said = refusal("study", name, "--out", out, "--no-train")
    assert "error: the package altair is not installed: `pip install altair`" in said
    assert {path: path.read_bytes() for path in written} == written


def test_without_runs_nothing_is_written(out, refusal):
    words = ("study", "kappa", "--out", out, "--no-train")
    assert "holds no study" in refusal(*words)
    open_grid(kappa.STUDY, StudyOptions(recipe="digits", data="digits", out=out))
    assert "holds no finished run" in refusal(*words)
    assert not (out / "results.json").exists()


def test_other_encoders_by_value_and_more_seeds_later(tiny, out, monkeypatch):
    opened = []
    real = inputs.open_data

    def counted_opening(*arguments: Any) -> Any:
        opened.append(arguments)
        return real(*arguments)

    for module in (engine, inputs, job):
        monkeypatch.setattr(module, "open_data", counted_opening)
    words = ["study", "encoder-depth", "--out", str(out), "--keep-checkpoints"]
    main([*words, "--values", "small", "--only", "divergence-small", *tiny])
    assert len(opened) == 1  # for the study, not for each training and each judgement
    assert Run.open(out / "runs" / "divergence-small-seed0").last_checkpoint.is_file()
    assert [row["seed"] for row in read(out)["cells"]] == [0]
    first = (out / "runs" / "divergence-small-seed0" / "result.json").read_bytes()
    trained = []
    pretrain = engine.pretrain

    def counted(config: Any, **options: Any) -> Run:
        trained.append(config.seed)
        return pretrain(config, **options)

    monkeypatch.setattr(engine, "pretrain", counted)
    main([*words, "--seeds", "2"])  # what is left out is the folder's
    assert trained == [1]
    assert [row["seed"] for row in read(out)["cells"]] == [0, 1]
    assert (out / "runs" / "divergence-small-seed0" / "result.json").read_bytes() == first
    summary = read(out)["arms"][0]["metrics"][MAIN_METRIC]
    values = [row["metrics"][MAIN_METRIC] for row in read(out)["cells"]]
    assert summary["n"] == 2
    assert summary["deviation"] == pytest.approx(np.std(values, ddof=1))


def test_a_crash_costs_no_finished_work_and_changes_no_number(tiny, out, tmp_path, monkeypatch):
    """Killed once in training and once before judging; then as if nothing had happened."""
    words = ["--only", "5", "20", *tiny, "training.save_seconds=0"]
    words[words.index("--epochs") + 1] = "2"
    keep, judge = Pretraining._write_epoch, engine.run_protocols

    def killed(self: Pretraining, record: Record, *rest: Any) -> None:
        keep(self, record, *rest)
        if self.run.path.name == "20-seed0":
            raise RuntimeError("power cut")

    def unjudged(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "_write_epoch", killed)
        with pytest.raises(SystemExit, match="1"):
            main(["study", "kappa", "--out", str(out), *words])
    assert [row["run"] for row in read(out)["cells"]] == ["5-seed0"]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "run_protocols", unjudged)
        with pytest.raises(SystemExit, match="1"):
            main(["study", "kappa", "--out", str(out), *words])
    main(["study", "kappa", "--out", str(out), *words])
    other = tmp_path / "whole"
    main(["study", "kappa", "--out", str(other), *words])
    assert judge is engine.run_protocols
    assert [row["metrics"] for row in read(out)["cells"]] == [
        row["metrics"] for row in read(other)["cells"]
    ]
    interrupted, whole = (Run.open(folder / "runs" / "20-seed0") for folder in (out, other))
    assert len(interrupted.provenance()["resumed"]) == 1
    assert [row["total"] for row in interrupted.metrics()] == [
        row["total"] for row in whole.metrics()
    ]
    assert "resumed" not in Run.open(out / "runs" / "5-seed0").provenance()


def settings(data: str, out: Path, **others: Any) -> StudyOptions:
    changes = (
        *("training.batch_size=64", "training.knn_every=0", "training.tensorboard=false"),
        *("encoder.projection_hidden=16", "encoder.embedding=8", "divergence.hidden=4"),
    )
    return StudyOptions(recipe="digits", data=data, epochs=1, changes=changes, out=out, **others)


def test_two_workers_do_every_run_once(few_digits, out, monkeypatch):
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    both = threading.Barrier(2, timeout=240)
    taken: list[tuple[str, int]] = []

    def slowly(trial: Trial, *arguments: Any) -> Record:
        taken.append((trial.name, threading.get_ident()))
        if len(taken) <= 2:
            both.wait()  # both workers are inside a run at the same time
        return run_trial(trial, *arguments)

    monkeypatch.setattr(engine, "run_trial", slowly)
    study = kappa.STUDY
    asked = settings(few_digits, out, only=("5", "20"), seeds=1)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: run_study(study, asked), range(2)))
    assert sorted(name for name, _ in taken) == ["20-seed0", "5-seed0"]
    assert len({worker for _, worker in taken}) == 2
    assert len(read(out)["cells"]) == 2
    assert [len(each.results["cells"]) for each in found] == [2, 2]  # both end complete


def test_a_finished_run_of_another_configuration_does_not_count(few_digits, out):
    run_study(kappa.STUDY, settings(few_digits, out, only=("5",), seeds=1))
    told, path = read(out)["cells"], out / "runs" / "5-seed0" / "config.toml"
    text = path.read_text()
    # How often a run saves changes nothing that is measured.
    path.write_text(re.sub(r"(?m)^save_seconds = .*", "save_seconds = 7.0", text))
    run_study(kappa.STUDY, StudyOptions(out=out, train=False))
    assert read(out)["cells"] == told
    path.write_text(re.sub(r"(?m)^learning_rate = .*", "learning_rate = 0.123", text))
    words = r"5-seed0 is a run of another configuration \(optimiser.learning_rate is 0.123 there"
    for train in (False, True):
        with pytest.raises(UserError, match=words):
            run_study(kappa.STUDY, StudyOptions(out=out, train=train))


def test_settings_of_a_term_that_is_off_may_differ(few_digits, out):
    """Runs of an older recipe without a divergence count, whatever settings it has for one."""
    run_study(kappa.STUDY, settings(few_digits, out, only=("none", "5"), seeds=1))
    told = read(out)["cells"]
    older = {"none": ("num_subnetworks", "77"), "5": ("alpha", "7.5")}  # no arccot there
    for arm, (field, value) in older.items():
        path = out / "runs" / f"{arm}-seed0" / "config.toml"
        text, count = re.subn(rf"(?m)^{field} = .*", f"{field} = {value}", path.read_text())
        path.write_text(text)
        assert count == 1
    with (out / "runs" / "none-seed0" / "config.toml").open("a") as config:
        config.write("\n[teacher]\nmomentum = 0.5\n\n[weak_views]\nnum_views = 1\n")
    run_study(kappa.STUDY, StudyOptions(out=out, train=False))
    assert read(out)["cells"] == told


def test_a_study_begins_with_runs_that_were_copied_there(tiny, out, monkeypatch):
    """Two studies may share an arm, under another name: it need not be trained twice."""
    first = out.with_name("kappa")
    main(["study", "kappa", "--out", str(first), "--values", "6", "--only", "6", *tiny])
    (out / "runs").mkdir(parents=True)
    (first / "runs" / "6-seed0").rename(out / "runs" / "gaussian-seed0")
    monkeypatch.setattr(engine, "pretrain", None)
    main(["study", "psi", "--out", str(out), "--only", "gaussian", *tiny])
    (cell,) = read(out)["cells"]
    assert (cell["arm"], cell["metrics"]) == ("gaussian", read(first)["cells"][0]["metrics"])
    for path in out.glob("*.*"):
        path.unlink()
    main(["study", "psi", "--out", str(out), "--no-train", *tiny])
    assert read(out)["cells"] == [cell]


def test_a_run_whose_checkpoints_went_before_it_was_judged_is_trained_again(
    few_digits, out, monkeypatch
):
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    asked = settings(few_digits, out, only=("5",), seeds=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "run_protocols", interrupted)
        with pytest.raises(engine.Stopped):
            run_study(kappa.STUDY, asked)
    shutil.rmtree(out / "runs" / "5-seed0" / "checkpoints")
    run_study(kappa.STUDY, asked)
    assert read(out)["cells"][0]["state"] == "done"


def test_a_trial_that_is_done_is_not_run_again(short_config, tmp_path, monkeypatch):
    """A worker may die after it has written the outcome, before it has said so to the others."""
    monkeypatch.setattr(engine, "_train_and_evaluate", None)
    run = Run.create(tmp_path / "trial", short_config, {})
    outcome = {"state": "done", "metrics": {MAIN_METRIC: 50.0}}
    run.add_result(study=outcome)
    source = Source("none", train=None, test=None)  # type: ignore[arg-type]  # it is not looked at
    assert run_trial(Trial(run.path, short_config), source, EvaluationPlan("test")) == outcome


def test_an_outcome_that_somebody_has_edited_is_refused(short_config, tmp_path):
    run = Run.create(tmp_path / "trial", short_config, {})
    run.add_result(study={"state": "done"})
    with pytest.raises(UserError, match="'study' is not the outcome of a trial: restore"):
        Trial(run.path, short_config).outcome()


def test_options_of_the_evaluation_reach_it(few_digits, out, short_config, tmp_path, monkeypatch):
    asked = settings(few_digits, out, seeds=1, linear_epochs=4, keep_checkpoints=True)
    plan = open_grid(kappa.STUDY, asked).evaluation
    assert (plan.evaluate_on, plan.keep_checkpoints) == ("test", True)
    monkeypatch.setattr(engine, "Evaluation", lambda run, options, *_, **__: options)
    rows = [
        {"protocol": "linear", "variant": "cached features", "metric": "top1", "value": 50.0},
        {"protocol": "linear", "variant": "cached features", "metric": "top5", "value": 90.0},
        {"protocol": "linear", "variant": "random crops", "metric": "top1", "value": 60.0},
    ]
    given = []

    def measure(options: Options) -> list[Record]:
        given.append(options)
        return rows

    monkeypatch.setattr(engine, "run_protocols", measure)
    source = Source("digits", train=None, test=None)  # type: ignore[arg-type]  # not looked at
    run = Run.create(tmp_path / "run", short_config, {})
    found = plan.evaluate(Trial(run.path, run.config), run, source)
    assert found == {MAIN_METRIC: 50.0, "linear, random crops": 60.0}
    assert (given[0].protocols, given[0].epochs) == (("knn", "linear"), 4)


def test_a_study_keeps_the_provenance_with_which_it_began(few_digits, out, monkeypatch):
    open_grid(kappa.STUDY, settings(few_digits, out, seeds=1))
    first = json.loads((out / "study.json").read_text())["provenance"]
    monkeypatch.setattr("deepbregman.studies.grid.collect_provenance", lambda device: {})
    open_grid(kappa.STUDY, StudyOptions(out=out, seeds=2))
    record = json.loads((out / "study.json").read_text())
    assert (record["provenance"], record["seeds"]) == (first, 2)


def test_memory_ran_out_only_when_no_other_run_is_left(few_digits, out):
    grid = open_grid(kappa.STUDY, settings(few_digits, out, only=("5", "20"), seeds=1))
    grid.too_large["5-seed0"] = "CUDA out of memory"
    assert grid.find_too_large() == {}  # the other run is left, by a process that died
    grid.too_large["20-seed0"] = "out of memory"
    assert list(grid.find_too_large()) == ["5-seed0", "20-seed0"]
    with lock(grid.folder, "5-seed0", wait=False):  # another process may have more memory
        assert grid.find_too_large() == {}
    done = grid.trials[0]
    Run.create(done.folder, done.config, {}).add_result(study={"state": "done", "metrics": {}})
    assert grid.find_too_large() == {}  # it just had
    assert grid.count() == (1, 2)
    assert list(grid.find_too_large()) == ["20-seed0"]


def test_images_of_which_none_can_be_held_out_are_refused(tmp_path, out):
    path = tmp_path / "singles.npz"
    images = np.zeros((4, 8, 8), np.uint8)
    np.savez(path, train_images=images, train_labels=np.arange(4))
    asked = settings(str(path), out, evaluate_on="holdout")
    with pytest.raises(UserError, match="no two training images of a class"):
        run_study(kappa.STUDY, asked)
    assert not out.exists()


@pytest.mark.parametrize("images", ["test", "holdout"])
def test_images_without_labels_are_refused(images, tmp_path, out):
    path = tmp_path / "plain.npz"
    np.savez(path, train_images=np.zeros((20, 8, 8), np.uint8))
    with pytest.raises(UserError, match=r"plain\.npz.* label"):
        run_study(kappa.STUDY, settings(str(path), out, evaluate_on=images))
    assert not out.exists()


def test_the_bar_tells_every_epoch_though_nothing_is_measured(few_digits, out, monkeypatch):
    told = []
    update = engine.Progress.update

    def note(self: engine.Progress, *arguments: Any, **fields: Any) -> None:
        told.append((fields.get("completed"), fields.get("status")))
        update(self, *arguments, **fields)

    monkeypatch.setattr(engine.Progress, "update", note)
    asked = settings(few_digits, out, only=("5",), seeds=1)
    asked = replace(asked, epochs=2, changes=(*asked.changes, "training.knn_every=0"))
    run_study(kappa.STUDY, asked)
    assert (0.5, "epoch 1 of 2  ") in told
    assert (1.0, "epoch 2 of 2  ") in told


@pytest.mark.parametrize(
    ("processes", "gpus", "before", "taken"),
    [
        (4, 2, None, "1"),  # the fourth of four
        (4, 2, "6,3", "3"),
        (4, 1, "6", "6"),
        (4, 0, None, None),
        (1, 2, "6,3", "6,3"),
    ],
)
def test_each_worker_of_a_machine_takes_one_gpu(processes, gpus, before, taken, monkeypatch):
    here = SimpleNamespace(local_processes=processes, local_rank=processes - 1)
    monkeypatch.setattr(engine, "leave_group", lambda: here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
    engine.become_worker()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (taken or "")


def test_a_busy_run_is_waited_for_and_taken_over(few_digits, out, monkeypatch):
    """The holder of a run dies without having done it: its lock goes, the run does not."""
    asked = settings(few_digits, out, only=("5",), seeds=1)
    opened = open_grid(kappa.STUDY, asked)
    holder = lock(opened.folder, "5-seed0", wait=False)
    assert holder.__enter__()
    sleeps = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        holder.__exit__(None, None, None)

    monkeypatch.setattr(engine.time, "sleep", sleep)
    run_study(kappa.STUDY, asked)
    assert sleeps == [engine.POLL_SECONDS]
    assert read(out)["cells"][0]["state"] == "done"


def test_after_a_full_disk_the_study_is_what_continues(few_digits, out, monkeypatch):
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "last.pt")

    monkeypatch.setattr("deepbregman.training.checkpoints.torch.save", fail)
    with pytest.raises(
        UserError, match=f"last.pt: No space .*: deepbregman study kappa.*{out}"
    ) as e:
        run_study(kappa.STUDY, settings(few_digits, out, only=("5",), seeds=1))
    assert "pretrain" not in str(e.value)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24 GiB"), MemoryError()]
)
def test_a_run_without_enough_memory_does_not_stop_the_others(error, few_digits, out, monkeypatch):
    """It would stop every worker in turn, since each takes the first run that is not done."""
    enough, begun = False, []

    def run_out_of_memory(trial: Trial, *arguments: Any) -> Record:
        begun.append(trial.name)
        if trial.name == "5-seed0" and not enough:
            raise error
        return run_trial(trial, *arguments)

    monkeypatch.setattr(engine, "run_trial", run_out_of_memory)
    asked = settings(few_digits, out, only=("5", "20"), seeds=1)
    words = r"memory ran out in 5-seed0 \(.+\); 1 of 2 runs are done"
    said = io.StringIO()
    with pytest.raises(UserError, match=words) as refused:
        run_study(kappa.STUDY, asked, Console(file=said, width=200))
    assert begun == ["5-seed0", "20-seed0"]
    assert f"continue with: deepbregman study kappa --out {out}" in str(refused.value)
    assert "5-seed0: out of memory; going on with the others" in said.getvalue()
    assert [row["run"] for row in read(out)["cells"]] == ["20-seed0"]
    enough = True
    run_study(kappa.STUDY, asked)
    assert begun[2:] == ["5-seed0"]
    assert len(read(out)["cells"]) == 2


def test_a_run_without_enough_memory_may_fit_another_worker(few_digits, out, monkeypatch):
    """That worker has claimed it meanwhile, so it is waited for as any other is."""
    held, too_large = ExitStack(), []

    def run_out_of_memory(trial: Trial, *arguments: Any) -> Record:
        if trial.name == "5-seed0":
            too_large.append((trial, *arguments))
            raise MemoryError
        held.enter_context(lock(out, "5-seed0", wait=False))  # the other worker's
        return run_trial(trial, *arguments)

    def end_run_of_other_worker(seconds: float) -> None:
        while too_large:
            run_trial(*too_large.pop())
        held.close()

    monkeypatch.setattr(engine, "run_trial", run_out_of_memory)
    monkeypatch.setattr(engine.time, "sleep", end_run_of_other_worker)
    run_study(kappa.STUDY, settings(few_digits, out, only=("5", "20"), seeds=1))
    assert len(read(out)["cells"]) == 2


def test_no_run_has_enough_memory(few_digits, out, monkeypatch):
    def run_out_of_memory(*arguments: Any) -> Record:
        raise MemoryError

    monkeypatch.setattr(engine, "run_trial", run_out_of_memory)
    words = r"5-seed0 \(MemoryError\); 0 of 1 runs are done; on a machine with more memory"
    with pytest.raises(UserError, match=words):
        run_study(kappa.STUDY, settings(few_digits, out, only=("5",), seeds=1))
    assert not (out / "results.json").exists()


@pytest.mark.parametrize("linked", ["runs", "runs/none-seed0"])
def test_a_trial_behind_a_link_is_left_alone(linked, few_digits, tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "checkpoints").mkdir(parents=True)
    link = tmp_path / "study" / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(theirs)
    config = override(Config(), {"data.source": few_digits})
    trial = Trial(tmp_path / "study" / "runs" / "none-seed0", config)
    evaluation = engine.EvaluationPlan("test")
    source = evaluation.open_images(config)
    with pytest.raises(UserError, match="is a symbolic link"):
        run_trial(trial, source, evaluation)
    assert [path.name for path in theirs.iterdir()] == ["checkpoints"]
    (tmp_path / "study" / "locks").symlink_to(theirs)
    with pytest.raises(UserError, match="is a symbolic link"):
        lock(tmp_path / "study", trial.name)
    assert [path.name for path in theirs.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"study": 3}', '{"study": {"name": "kappa"}, "epochs": "x"}', "\x00"]
)
def test_a_damaged_study_is_words(text, out):
    out.mkdir()
    (out / "study.json").write_text(text)
    with pytest.raises(UserError, match=r"study\.json"):
        run_study(kappa.STUDY, StudyOptions(out=out))


def test_a_study_that_began_with_the_older_name_of_a_field_goes_on(few_digits, out):
    open_grid(kappa.STUDY, settings(few_digits, out, evaluate_on="holdout"))
    record = json.loads((out / "study.json").read_text())
    record["judge"] = record.pop("evaluate_on")
    (out / "study.json").write_text(json.dumps(record))
    assert open_grid(kappa.STUDY, settings(few_digits, out)).evaluation.evaluate_on == "holdout"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "3"], r"training\.epochs is 1 there, 3 here"),
        (["--recipe", "best"], r"encoder\.name is 'small' there, 'resnet18' here"),
        (["--set", "divergence.sigma=9"], r"divergence\.sigma is 1\.5 there, 9\.0 here"),
        (["--evaluate-on", "holdout"], r"--evaluate-on is 'holdout' here and 'test' in the folder"),
        (["--values", "5"], r"--values is \[5\] here and \[\] in the folder"),
        (["--linear-epochs", "5"], r"--linear-epochs is 5 here and 0 in the folder"),
    ],
)
def test_a_folder_keeps_to_what_it_began_with(words, message, few_digits, out, refusal):
    open_grid(kappa.STUDY, settings(few_digits, out))
    before = (out / "study.json").read_bytes()
    error = refusal("study", "kappa", "--out", out, *words)
    assert re.search(message, error), error
    assert "--out" in error
    assert (out / "study.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kapa"], "did you mean 'kappa'"),
        (["kappa", "--only", "51"], "arm '51' of study kappa is not one of none, 5, 20"),
        (["kappa", "--seeds", "0"], "--seeds 0: there must be at least 1"),
        (["kappa", "--trials", "3"], "kappa is a grid and takes no --trials"),
        (["kappa", "--values", "many"], "divergence.num_subnetworks is 'many'"),
        (["kappa", "--set", "divergence.sgima=1"], "did you mean 'divergence.sigma'"),
        *(
            (
                [name, "--recipe", "simclr", *("--set", "data.source=digits")],
                f"of study {name} needs the divergence, but divergence.weight is 0",
            )
            for name in ("kappa", "psi", "subnetwork", "augmentations", "view-sets", "teacher")
        ),
        (["augmentations", "--only", "simclr-crop-blur", "--recipe", "digits"], "change nothing"),
        (["kappa", "--linear-epochs", "-1"], "--linear-epochs -1"),
        (["sigma-lambda", "--seeds", "2"], "sigma-lambda is a search and takes no --seeds"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(words, message, refused):
    refused(["study", *words], message)


def test_a_folder_of_something_else_is_left_alone(out, few_digits):
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds no study"):
        run_study(kappa.STUDY, settings(few_digits, out))
    open_grid(kappa.STUDY, settings(few_digits, out / "a"))
    with pytest.raises(UserError, match="holds study kappa, not psi"):
        run_study(psi.STUDY, settings(few_digits, out / "a"))


def test_a_run_that_diverges_does_not_end_the_study(tiny, out, capsys):
    wild = [*tiny, "optimiser.learning_rate=1e30", "optimiser.name=sgd"]
    main(["study", "kappa", "--out", str(out), "--only", "5", *wild])
    (row,) = read(out)["cells"]
    assert row["state"] == "diverged"
    assert "lower optimiser.learning_rate" in row["why"]
    assert "(1 diverged)" in capsys.readouterr().out
    tables = (out / "tables.md").read_text()
    assert "5 (1 of 1 seed)" in tables
    assert ", 1 epoch, " in tables


def test_features_that_are_not_finite_are_a_divergence_though_nothing_watches(
    few_digits, out, monkeypatch
):
    """Finite losses and weights, but batch statistics that overflow where the encoder is judged."""
    compute = features.compute_features

    def overflow(*arguments: Any) -> Any:
        found = compute(*arguments)
        found.representation[0, 0] = float("inf")
        return found

    monkeypatch.setattr(features, "compute_features", overflow)
    asked = settings(few_digits, out, only=("5",), seeds=1)
    for _ in range(2):  # the second time there is nothing left to do
        run_study(kappa.STUDY, asked)
        (row,) = read(out)["cells"]
        assert row["state"] == "diverged"
        assert "features are not finite" in row["why"]


SLURM = {
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2"},
    **{"SLURM_JOB_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
}


def test_a_task_of_srun_joins_no_group(few_digits, out, monkeypatch):
    """It would wait for the other task, which is not there, and average gradients with it."""
    for name, value in (SLURM | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}).items():
        monkeypatch.setenv(name, value)
    assert find_process() == (1, 2, 1, 2)
    asked = settings(few_digits, out, only=("5",), seeds=1)
    run_study(kappa.STUDY, asked)
    assert find_process() == (0, 1, 0, 1)
    assert not torch.distributed.is_initialized()
    assert read(out)["cells"][0]["state"] == "done"


@pytest.mark.slow
def test_two_tasks_of_srun_share_a_study(few_digits, out):
    """Two tasks and two arms: each run is alone, and what it is when one process trains both."""
    words = [
        *(sys.executable, "-m", "deepbregman", "study", "kappa", "--only", "none", "5"),
        *("--recipe", "digits", "--data", few_digits, "--epochs", "1", "--seeds", "1"),
        "--set",
        *TINY,
    ]
    tasks = [
        subprocess.Popen(
            [*words, "--out", str(out)],
            env=os.environ | SLURM | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [task.wait(240) for task in tasks] == [0, 0]
    alone = out.with_name("alone")
    main([*words[3:], "--out", str(alone)])
    for name in ("none-seed0", "5-seed0"):
        shared, single = (Run.open(folder / "runs" / name) for folder in (out, alone))
        assert shared.provenance().get("processes", 1) == 1
        totals = [[row["total"] for row in run.metrics()] for run in (shared, single)]
        assert totals[0] == totals[1]


@pytest.mark.parametrize("error", [Interrupted(2, "go on"), KeyboardInterrupt()])
def test_ctrl_c_says_how_to_go_on(error, tiny, out, monkeypatch, command):
    def interrupted(*arguments: Any, **options: Any) -> Run:
        raise error

    monkeypatch.setattr(engine, "pretrain", interrupted)
    code, _, err = command("study", "kappa", "--out", out, "--only", "5", *tiny)
    assert code == 130
    words = " ".join(err.split())
    assert "0 of 1 runs are done" in words
    assert f"deepbregman study kappa --out {out}" in words


def test_judged_on_held_out_images_the_test_images_stay_closed(few_digits, out, explosive):
    explosive("deepbregman.studies.engine")
    asked = settings(few_digits, out, only=("5",), seeds=1, evaluate_on="holdout")
    run_study(kappa.STUDY, asked)
    (row,) = Run.open(out / "runs" / "5-seed0").result()["evaluations"][-1:]
    assert (row["num_train"], row["num_test"]) == (180, 20)
    assert row["data"].endswith(", held out")
    assert read(out)["cells"][0]["evaluate_on"] == "holdout"


def test_the_first_seed_and_the_share_to_hold_out_are_those_that_a_user_sets(few_digits, out):
    changes = ("seed=7", "data.holdout=0.25")
    options = StudyOptions(recipe="digits", data=few_digits, out=out, seeds=2, changes=changes)
    grid = open_grid(kappa.STUDY, replace(options, only=("5",), evaluate_on="holdout"))
    configs = [cell.trial.config for cell in grid.cells]
    assert [(config.seed, config.data.holdout) for config in configs] == [(7, 0.25), (8, 0.25)]


def test_the_list(output):
    shown = output("study")
    assert "kappa" in shown
    assert "How many subnetworks?" in shown


def row(arm: str, series: str, seed: int, value: float | None) -> Record:
    metrics = {} if value is None else {"m": value}
    state = "done" if metrics else "diverged"
    shown = {"arm": arm, "series": series, "x": arm}
    return {**shown, "seed": seed, "state": state, "metrics": metrics}


def test_a_diverged_seed_is_counted_and_not_averaged():
    (arm,) = summarise_arms(
        [row("a", "s", 0, 90.0), row("a", "s", 1, None), row("a", "s", 2, 92.0)]
    )
    assert arm["num_diverged"] == 1
    assert arm["metrics"]["m"] == {"mean": 91.0, "deviation": pytest.approx(2**0.5), "n": 2}
    (arm,) = summarise_arms([row("a", "s", 0, 90.0), row("a", "s", 1, 90.0)])  # alike by chance
    assert arm["metrics"]["m"] == {"mean": 90.0, "deviation": 0.0, "n": 2}


def test_what_is_lost_is_paired_by_seed():
    rows = [
        *(row("all", "s", 0, 90.0), row("all", "s", 1, 80.0), row("other", "t", 0, 50.0)),
        *(row("crop", "s", 0, 85.0), row("crop", "s", 1, 74.0), row("crop", "s", 2, 10.0)),
    ]
    names = [("all", "s"), ("crop", "s"), ("other", "t")]
    arms = [{"name": name, "series": series} for name, series in names]
    against = find_references({"figure": "drops", "arms": arms, "reference": None})
    assert against == {"crop": "all"}
    change = compare_arms(rows, against)["crop"]["m"]
    half = 12.706204736432095 * 0.5  # Student's t at one degree of freedom, printed in any table
    assert change == {
        **{"mean": -5.5, "deviation": pytest.approx(0.5**0.5), "n": 2},
        "interval": pytest.approx([-5.5 - half, -5.5 + half], rel=1e-9),
        "over_images": None,  # no predictions are kept
    }
    # The reference has not been trained with the third seed yet, so nothing is kept of it.
    alike = Predictions(np.array([0, 1]), [np.array([0, 1])], ())
    kept = {(each["arm"], each["seed"]): alike for each in rows}
    change = compare_arms(rows, against, lambda arm, seed, _: kept[arm, seed])["crop"]["m"]
    assert (change["n"], change["over_images"]) == (2, [0.0, 0.0])
    # The last image is lost with the first seed, and the first one with the second.
    guesses = {("all", 0): [0, 0, 0, 0], ("all", 1): [0, 0, 0, 9]}
    guesses |= {("crop", 0): [0, 0, 0, 9], ("crop", 1): [9, 0, 0, 9]}
    kept = {key: Predictions(np.zeros(4), [np.array(found)], ()) for key, found in guesses.items()}
    change = compare_arms(rows, against, lambda arm, seed, _: kept.get((arm, seed)))["crop"]["m"]
    images = interval_over_images([[0, 0, 0, -100.0], [-100.0, 0, 0, 0]])
    assert change["over_images"] == pytest.approx(images)
    del kept["all", 1]
    change = compare_arms(rows, against, lambda arm, seed, _: kept.get((arm, seed)))["crop"]["m"]
    assert change["over_images"] is None  # that of one seed would seem to be of both


@pytest.mark.slow
def test_a_killed_worker_s_run_is_finished_by_the_other(few_digits, out):
    """Real processes, SIGKILL in the middle of training: as the machine would do it."""
    words = [
        *(sys.executable, "-m", "deepbregman", "study", "kappa", "--out", str(out)),
        *("--recipe", "digits", "--data", few_digits, "--epochs", "40", "--seeds", "2"),
        *("--only", "5", "20", "--set", "training.batch_size=64"),
        *("training.save_seconds=0", "training.tensorboard=false", "encoder.projection_hidden=16"),
    ]
    victim = subprocess.Popen(words)
    metrics = out / "runs" / "5-seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    with subprocess.Popen(words) as survivor:
        assert survivor.wait() == 0
    rows = read(out)["cells"]
    assert [row["run"] for row in rows] == ["5-seed0", "5-seed1", "20-seed0", "20-seed1"]
    assert all(row["state"] == "done" for row in rows)
    killed = Run.open(out / "runs" / "5-seed0")
    assert len(killed.provenance()["resumed"]) == 1
    assert [record["epoch"] for record in killed.metrics()] == list(range(1, 41))


@pytest.mark.slow
def test_deep_divergence_stands_beside_ours_when_it_is_asked_for(tiny, out, capsys):
    main(["study", "kappa", "--out", str(out), "--only", "20", "deep-max-triplet-20", *tiny])
    rows = {row["arm"]: row for row in read(out)["cells"]}
    assert set(rows) == {"20", "deep-max-triplet-20"}
    deep = rows["deep-max-triplet-20"]
    assert deep["series"].endswith("(supervised)")
    assert deep["metrics"][MAIN_METRIC] > 30.0  # it has seen the labels
    objective = Run.open(out / "runs" / deep["run"]).config.objective
    assert (objective.name, objective.num_subnetworks) == ("deep_divergence", 20)
    assert "supervis" in capsys.readouterr().out  # the column is narrow


@pytest.mark.parametrize(
    ("begun", "now"),
    [
        ({"epochs": 1}, {"changes": ("training.epochs=2",)}),
        ({"changes": ("training.epochs=1",)}, {"epochs": 2}),
        ({"epochs": 1}, {"epochs": 2}),
    ],
)
def test_what_contradicts_a_begun_study_is_named_as_that(begun, now, few_digits, out):
    """Not as two options of which the user gave one."""
    study, common = kappa.STUDY, {"out": out}
    open_grid(study, StudyOptions(recipe="digits", data=few_digits, **begun, **common))
    with pytest.raises(UserError, match=r"other settings \(training.epochs is 1 there, 2 here\)"):
        open_grid(study, StudyOptions(**now, **common))
    open_grid(study, StudyOptions(epochs=1, **common))


def test_speed_is_the_median_of_the_last_epochs_and_memory_the_most(tmp_path):
    """Two seeds, one of them of an older version that recorded neither."""
    epochs = [
        {"epoch": 1, "images_per_second": 10.0, "views_per_second": 20.0, "peak_gigabytes": 9.0},
        {"epoch": 2, "images_per_second": 700.0, "views_per_second": 9.0, "peak_gigabytes": 9.0},
        {"epoch": 3, "images_per_second": 900.0, "views_per_second": 1.0, "peak_gigabytes": 9.5},
    ]
    config = load_recipe("digits")
    cells = []
    for seed, rows in enumerate((epochs, [{"epoch": 1, "images_per_second": 5.0}])):
        run = Run.create(tmp_path / f"seed{seed}", override(config, {"seed": seed}), {})
        for row in rows:
            run.append_metrics(row)
        cells.append(GridCell(Arm("one", {}, 1), seed, Trial(run.path, config)))
    cost = measure_costs(cells)["one"]
    assert (cost["images_per_second"], cost["peak_gigabytes"]) == (800.0, 9.5)
    cost = measure_costs(cells[1:])["one"]
    assert (cost["images_per_second"], cost["peak_gigabytes"]) == (None, None)
