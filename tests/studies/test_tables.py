"""The study of tables: what it asks for, that it goes on, and that its numbers are the runs'."""

import csv
import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from sklearn.datasets import load_digits

from deepbregman.cli import main
from deepbregman.commands.study import tables
from deepbregman.config import Config, load_recipe, override, to_toml
from deepbregman.errors import UserError
from deepbregman.evaluation.inputs import Evaluation, open_labelled
from deepbregman.evaluation.results import KeptPredictions, pack, record_predictions
from deepbregman.reporting.sections import read_study
from deepbregman.runs import Run
from deepbregman.studies import engine
from deepbregman.studies import tables as tables_module
from deepbregman.studies.tables import (
    TableEvaluation,
    TableQueue,
    TableTrial,
    collect_results,
    measure_missing,
)
from deepbregman.studies.tables_plan import (
    ARMS,
    Part,
    TableCell,
    TableOptions,
    build_arm,
    pair_arms,
    plan_parts,
    plan_tables,
)

from .conftest import TINY, Record, read


@pytest.fixture(scope="session")
def uneven(tmp_path_factory) -> str:
    """Digits of three classes, one of them rare."""
    digits = load_digits()
    rows = [np.flatnonzero(digits.target == label) for label in range(3)]
    train = np.concatenate([rows[0][:60], rows[1][:60], rows[2][:5]])
    test = np.concatenate([part[100:120] for part in rows])
    path = tmp_path_factory.mktemp("data") / "uneven.npz"
    images = (digits.images * 15.0).astype(np.uint8)
    np.savez(
        path,
        train_images=images[train],
        train_labels=digits.target[train],
        test_images=images[test],
        test_labels=digits.target[test],
        class_names=np.array(["nought", "one", "two"]),
    )
    return str(path)


def test_arms_are_recipes_with_the_divergence_taken_away_by_name():
    given = {"data.image_size": 16, "training.epochs": 3}
    paper, without = build_arm("paper", given), build_arm("paper-without", given)
    assert paper.encoder.name == without.encoder.name == "resnet18"
    assert (paper.divergence.weight, without.divergence.weight) == (1.0, 0.0)
    control = build_arm("best-control", given)
    assert (control.divergence.weight, control.divergence.info_nce) == (0.0, 1.0)
    assert control.teacher == load_recipe("best").teacher
    assert build_arm("authors", given).divergence == load_recipe("authors").divergence
    both = build_arm("best-both", given)
    assert (both.divergence.weight, both.divergence.info_nce) == (1.0, 1.0)
    assert ("best", "simclr") in pair_arms(ARMS)
    assert ("best", "best-control") in pair_arms(ARMS)
    assert ("paper", "paper-without") in pair_arms(ARMS)
    assert all(not arm.endswith("-without") for arm, _ in pair_arms(ARMS))
    assert pair_arms(["simclr", "best", "best-both"]) == [
        *(("best", "simclr"), ("best-both", "simclr"), ("best-both", "best"))
    ]


def test_parts_of_a_run():
    options = TableOptions(data=("a.npz", "b.npz"))
    first = [part.name for part in plan_parts(options, "simclr", "a.npz", is_reference=True)]
    assert first == [
        *("knn", "linear", "semi", "transfer-b", "supervised", "retrieval", "cluster", "few"),
        *("ood", "corruptions"),
    ]
    other = plan_parts(options, "best", "b.npz", is_reference=False)
    assert "supervised" not in [part.name for part in other]
    assert not any(part.from_scratch for part in other)
    assert next(part for part in other if part.name == "ood").others == ("noise", "a.npz")
    chosen = TableOptions(data=("a.npz", "b.npz"), only=("best/*/transfer-*", "*/b/knn"))
    assert [p.name for p in plan_parts(chosen, "best", "b.npz", is_reference=False)] == [
        *("knn", "transfer-a")
    ]
    assert plan_parts(chosen, "simclr", "a.npz", is_reference=True) == ()


def test_numbers_may_differ_by_dataset_and_large_images_are_made_smaller(
    few_digits, uneven, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "deepbregman.studies.tables_plan.typical_side", {few_digits: 8, uneven: 500}.get
    )
    options = TableOptions(data=(few_digits, uneven), arms=("digits",), seeds=1, out=tmp_path / "o")

    def plan(**changes: Any) -> list[tuple[int, int]]:
        configs = [cell.config for cell in plan_tables(replace(options, **changes)).cells]
        return [(config.training.epochs, config.data.image_size) for config in configs]

    assert plan(epochs=(3, 4)) == [(3, 8), (4, 128)]
    assert plan(epochs=(3,), image_size=(16, 24)) == [(3, 16), (3, 24)]
    assert plan(epochs=(3,), changes=("data.image_size=12",)) == [(3, 12), (3, 12)]


def test_runs_are_planned_seed_by_seed_and_with_what_a_user_sets(few_digits, uneven, tmp_path):
    """So that a study that is stopped has both arms of a seed, on every dataset."""
    options = TableOptions(data=(few_digits, uneven), arms=("digits", "digits-without"))
    options = replace(options, first_seed=4, seeds=2, changes=("encoder.name=small",))
    cells = plan_tables(replace(options, out=tmp_path / "out")).cells
    assert [cell.name for cell in cells] == [
        *("digits-few-seed4", "digits-without-few-seed4"),
        *("digits-uneven-seed4", "digits-without-uneven-seed4"),
        *("digits-few-seed5", "digits-without-few-seed5"),
        *("digits-uneven-seed5", "digits-without-uneven-seed5"),
    ]
    assert [cell.config.seed for cell in cells] == [4, 4, 4, 4, 5, 5, 5, 5]
    assert {cell.config.encoder.name for cell in cells} == {"small"}  # not ResNet-18
    for cell in cells:
        assert cell.config.data.source == cell.data
        assert cell.config.divergence.is_on == (cell.arm == "digits")


def test_a_folder_of_something_else_is_left_alone(few_digits, tmp_path):
    options = TableOptions(data=(few_digits,), arms=("digits",), out=tmp_path)
    (tmp_path / "locks").mkdir()  # another process begins the study now
    plan_tables(options)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="exists and holds no tables: choose another folder"):
        plan_tables(options)


def test_what_a_run_is_measured_with(few_digits):
    """The seed is the run's own; what starts from random weights is asked of one arm only."""
    config = build_arm("digits", {"data.source": few_digits, "seed": 5})
    evaluation, source = TableEvaluation("test", tuning_epochs=7), open_labelled(config)
    for from_scratch, starts in ((True, ("encoder", "scratch")), (False, ("encoder",))):
        part = Part("semi", "semi", from_scratch=from_scratch)
        options = evaluation.options_for([part], config, source)
        assert (options.semi.starts, options.seed, options.epochs) == (starts, 5, 7)
    parts = [Part("linear", "linear"), Part("ood", "ood", ("noise", "b.npz"))]
    options = evaluation.options_for(parts, config, source)
    assert (options.protocols, options.data) == (("linear", "ood"), few_digits)
    assert (options.epochs, options.ood.against) == (0, ("noise", "b.npz"))


def test_what_is_missing_of_a_run(few_digits, short_config, tmp_path):
    parts = (
        Part("knn", "knn"),
        Part("ood", "ood", ("noise", "hf:mnist", "/data/b.npz")),
        Part("transfer-b", "transfer", ("/data/b.npz",)),
    )
    config = override(short_config, {"data.source": few_digits})
    trial = TableTrial(tmp_path / "run", config, TableCell("digits", few_digits, 0, config, parts))
    assert trial.missing() == parts
    run = Run.create(tmp_path / "run", config, {})

    def add(protocol: str, variant: str, data: str, epoch: int = 2, **details: str) -> list[str]:
        row = {"protocol": protocol, "variant": variant, "data": data, "epoch": epoch}
        row |= {"details": details}
        run.add_result(evaluations=[*run.evaluations(), row])
        return [part.name for part in trial.missing()]

    assert add("knn", "cosine, k=20", few_digits, epoch=1) == ["knn", "ood", "transfer-b"]
    assert add("knn", "cosine, k=20", "/elsewhere/few.npz") == ["ood", "transfer-b"]
    for variant, other in (("noise", "noise"), ("hf:mnist", "hf:mnist"), ("b", "/elsewhere/b.npz")):
        assert trial.missing()[0].name == "ood"
        left = add("ood", f"{variant}: cosine, neighbour 50", few_digits, against=other)
    assert left == ["transfer-b"]
    assert add("transfer", "fine-tuned", few_digits) == ["transfer-b"]
    assert add("transfer", "fine-tuned", "/elsewhere/b.npz") == []


def test_a_run_that_was_saturated_is_done_after_the_epoch_at_which_it_stopped(
    few_digits, short_config, tmp_path
):
    """It would be trained again and again, since nothing is measured after its last epoch."""
    changes = {"data.source": few_digits, "training.stop_when_saturated": True}
    config = override(short_config, {**changes, "training.epochs": 9})
    cell = TableCell("digits", few_digits, 0, config, (Part("knn", "knn"),))
    folder = tmp_path / "runs" / cell.name
    trial, run = TableTrial(folder, config, cell), Run.create(folder, config, {})
    row = {"protocol": "knn", "variant": "cosine", "metric": "top1", "data": few_digits}
    row |= {"num_train": 180, "num_test": 100}
    rows = [{**row, "epoch": 3, "value": 50.0}, {**row, "epoch": 6, "value": 60.0}]
    run.add_result(pretrain={"epoch": 6, "stopped": "after epoch 6: saturated"})
    run.add_result(evaluations=rows[:1], study={"state": "done", "metrics": {}})
    assert trial.outcome() is None
    run.add_result(study={"state": "diverged", "metrics": {}, "why": "the loss is nan"})
    assert trial.outcome() is not None  # nothing can be measured, and it would diverge again
    run.add_result(evaluations=rows, study={"state": "done", "metrics": {}})
    assert trial.outcome() is not None
    (tmp_path / "tables.json").write_text('{"arms": ["digits"]}')
    (quantity,) = collect_results(tmp_path)["quantities"]
    assert quantity["arms"]["digits"]["values"] == {0: 60.0}


def test_arm_and_seed_are_read_from_the_name_of_a_run(short_config, tmp_path):
    config = override(short_config, {"data.source": "/data/two-words.npz"})
    Run.create(tmp_path / "runs" / "best-control-two-words-seed12", config, {})
    (tmp_path / "runs" / "best-seed3").mkdir()  # a run that is copied here just now
    (tmp_path / "tables.json").write_text('{"arms": ["simclr"]}')
    results = collect_results(tmp_path)
    assert results["arms"] == ["simclr", "best-control"]
    (run,) = results["runs"]
    assert (run["arm"], run["data"], run["seed"]) == ("best-control", "two-words", 12)


def test_options_reach_the_evaluation_and_the_first_arm_stays_the_reference(
    few_digits, uneven, tmp_path, monkeypatch
):
    """Every arm is compared with the first of the first command, whatever is added later."""
    workers = []

    def work(queue: TableQueue, worker: engine.Worker, command: str) -> Record:
        workers.append(worker)
        return {}

    monkeypatch.setattr(tables_module, "work", work)
    out = tmp_path / "tables"
    options = TableOptions(data=(few_digits,), arms=("digits-without",), protocols=("knn",))
    options = replace(options, changes=("training.batch_size=64",), epochs=(1,), out=out)
    options = replace(options, tuning_epochs=7, keep_checkpoints=True, accelerator="cpu")
    measure_missing(TableQueue(plan_tables(options)), Console(quiet=True))
    evaluation = workers[0].evaluation
    assert isinstance(evaluation, TableEvaluation)
    assert (evaluation.evaluate_on, evaluation.tuning_epochs) == ("test", 7)
    assert (evaluation.keep_checkpoints, evaluation.accelerator) == (True, "cpu")
    first = json.loads((out / "tables.json").read_text())["provenance"]
    later = replace(options, arms=("digits",), data=(uneven,))
    monkeypatch.setattr(tables_module, "collect_provenance", lambda device: {"later": device})
    measure_missing(TableQueue(plan_tables(later)), Console(quiet=True))
    record = json.loads((out / "tables.json").read_text())
    assert (record["arms"], record["data"]) == (["digits-without", "digits"], [few_digits, uneven])
    assert record["provenance"] == first


def test_a_rare_class_keeps_all_shares_of_labels(uneven):
    """A hundredth of its 5 images is less than one; then one is drawn."""
    config = build_arm("digits", {"data.source": uneven})
    source = open_labelled(config)
    options = TableEvaluation("test").options_for([Part("semi", "semi")], config, source)
    assert options.semi.labels == (0.01, 0.1)
    assert options.few.labels_per_class == (1, 2, 5)


def test_a_transfer_does_not_take_over_the_classes_of_its_origin(uneven, few_digits):
    """Whether classes are unequal is asked of the images that are classified."""
    config = build_arm("digits", {"data.source": uneven})
    source = open_labelled(config)
    assert source.has_unequal_classes
    part = Part("transfer-few", "transfer", (few_digits,))
    options = TableEvaluation("test").options_for([part], config, source)
    assert (options.data, options.balanced) == (few_digits, False)


def test_arms_of_files_have_the_name_and_the_encoder_of_the_file(few_digits, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(override(load_recipe("best"), {"encoder.name": "small"})))
    arms = ("best", str(file), f"{file}-control")
    plan = plan_tables(TableOptions(data=(few_digits,), arms=arms, out=tmp_path / "out"))
    assert plan.arms == ("best", "mine", "mine-control")
    encoders = {cell.arm: cell.config.encoder.name for cell in plan.cells}
    assert encoders == {"best": "resnet18", "mine": "small", "mine-control": "small"}
    assert ("mine", "mine-control") in pair_arms(plan.arms)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": ()}, "no dataset was named"),
        ({"arms": ("simclr", "simclr")}, "names simclr twice"),
        ({"arms": ("simcrl",)}, "simcrl"),
        ({"seeds": 0}, "--seeds 0"),
        ({"epochs": (1, 2, 3)}, "--epochs has 3 numbers for 1 datasets"),
        ({"only": ("best/elsewhere/*",)}, r"datasets \(few\) and protocols \(knn, linear, semi, "),
        ({"only": ("beste/*/*",)}, r"there is no such part; .* of the arms \(simclr, "),
        ({"only": ("*/*/transfer-*",)}, "transfer needs a second dataset in --data"),
        ({"only": ("best/*/supervised",)}, "supervised with simclr alone, retrieval"),
        ({"protocols": ("transfer",)}, "^--protocols transfer .* --data names few alone: add"),
        ({"protocols": ("transfer",), "only": ("*/few/*",)}, "^--protocols transfer"),
        ({"protocols": ()}, "no protocol was named: .* --protocols knn linear"),
        ({"train": False}, "holds no tables"),
        ({"tuning_epochs": 0}, "--tuning-epochs 0"),
        ({"data": ("nowhere.npz",)}, "nowhere.npz"),
        (
            {"epochs": (5,), "changes": ("training.epochs=3",)},
            "--epochs 5 and --set training.epochs=3 contradict each other: leave one",
        ),
        ({"image_size": (8,), "changes": ("data.image_size=4",)}, "--image-size 8 and --set"),
        ({"changes": ("data.source=digits",)}, "--data .* and --set data.source=digits"),
        ({"data": ("a/few.npz", "b/few.npz")}, "--data names few twice"),
        ({"changes": ("seed=5",)}, "--set seed=5: .* give the first one by --first-seed"),
    ],
)
def test_what_is_refused_before_any_work(changes, words, few_digits, tmp_path):
    options = {"data": (few_digits,), "out": tmp_path / "out", **changes}
    with pytest.raises(UserError, match=words):
        plan_tables(TableOptions(**options))
    assert not (tmp_path / "out").exists()


def test_a_seed_of_other_settings_is_refused(few_digits, tmp_path, refusal):
    """It would go into one mean with the seeds before it."""
    out = tmp_path / "tables"
    options = TableOptions(data=(few_digits,), arms=("digits",), seeds=1, epochs=(1,), out=out)
    (cell,) = plan_tables(options).cells
    # The dataset was in another folder, as on another machine.
    elsewhere = override(cell.config, {"data.source": "/gone/few.npz"})
    Run.create(out / "runs" / cell.name, elsewhere, {})
    (out / "tables.json").write_text('{"arms": ["digits"]}')
    words = ("--data", few_digits, "--arms", "digits", "--first-seed", 1, "--seeds", 1)
    words = (*words, "--epochs", 2, "--protocols", "knn", "--out", out)
    err = refusal("study", "tables", *words)
    assert "digits-few-seed0 is a run of another configuration" in err
    assert "(training.epochs is 1 there, 2 here)" in err
    assert [path.name for path in (out / "runs").iterdir()] == ["digits-few-seed0"]
    same = TableQueue(plan_tables(replace(options, first_seed=1)))
    same.check_other_seeds()


def test_images_are_refused_before_a_folder_is_made(few_digits, tmp_path, refusal):
    """Also those of a second dataset, before the first is trained on."""
    out, plain = tmp_path / "tables", tmp_path / "plain.npz"
    np.savez(plain, train_images=np.zeros((99, 8, 8), np.uint8))
    words = ("--data", few_digits, plain, "--arms", "digits", "--epochs", 1, "--out", out)
    err = refusal("study", "tables", *words, "--protocols", "knn", "--set", *TINY)
    assert f"data '{plain}' lacks labels" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_between_protocols_says_how_to_go_on(
    number, name, few_digits, tmp_path, monkeypatch, command
):
    measure = tables_module.run_protocols

    def stop(evaluation: Evaluation) -> list[Record]:
        if "semi" in evaluation.options.protocols:
            signal.raise_signal(number)
        return measure(evaluation)

    def end(*_: object) -> NoReturn:
        raise AssertionError("SIGTERM would have ended the process without a word")

    monkeypatch.setattr(tables_module, "run_protocols", stop)
    out = tmp_path / "tables"
    words = ("--data", few_digits, "--arms", "digits", "--seeds", 1, "--epochs", 1, "--out", out)
    changes = ("--set", "encoder.name=small", *TINY)
    before = signal.signal(signal.SIGTERM, end)
    # A shell starts background jobs with Ctrl-C ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = command("study", "tables", *words, "--protocols", "knn", "semi", *changes)
        assert signal.getsignal(signal.SIGTERM) is end  # as it was
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    assert code == 128 + number
    said = f"stopped by {name}; 0 of 1 runs are done; continue with: the same command\n"
    assert err.endswith(said)
    (run,) = (out / "runs").iterdir()
    assert {row["protocol"] for row in Run.open(run).evaluations()} == {"knn"}


def test_a_study_is_stopped_continued_and_extended(uneven, tmp_path, monkeypatch):
    """Two arms; nothing is trained or measured twice."""
    out = tmp_path / "tables"
    common: Record = {
        "data": (uneven,),
        "arms": ("digits-without", "digits"),
        "seeds": 1,
        "epochs": (1,),
        "changes": ("encoder.name=small", *TINY),
        "out": out,
        "keep_checkpoints": True,
    }
    real, calls, most = engine.pretrain, [], 1

    def count(*arguments: Any, **named: Any) -> Run:
        if len(calls) == most:
            raise KeyboardInterrupt
        calls.append(named["run"].name)
        return real(*arguments, **named)

    monkeypatch.setattr(engine, "pretrain", count)
    monkeypatch.setattr("deepbregman.reporting.charts.FIGURE_KINDS", ("svg",))
    with pytest.raises(engine.Stopped, match="1 of 2 runs are done"):
        tables(study=TableOptions(protocols=("knn",), **common))
    assert calls == ["digits-without-uneven-seed0"]
    first = out / "runs" / calls[0] / "result.json"
    before = first.read_bytes()
    most = 2
    tables(study=TableOptions(protocols=("knn",), **common))
    assert calls[1:] == ["digits-uneven-seed0"]
    assert first.read_bytes() == before
    tables(study=TableOptions(protocols=("knn", "linear", "ood"), **common))
    assert len(calls) == 2  # checkpoints were kept: nothing was trained again
    results = read(out)
    assert {q["protocol"] for q in results["quantities"]} == {"knn", "linear", "ood"}
    run = Run.open(out / "runs" / "digits-uneven-seed0")
    rows = {(r["protocol"], r["variant"], r["metric"]): r["value"] for r in run.evaluations()}
    (linear,) = [
        q
        for q in results["quantities"]
        if (q["data"], q["variant"], q["metric"]) == ("uneven", "cached features", "balanced")
    ]
    mine = rows["linear", "cached features", "balanced"]
    assert linear["arms"]["digits"] == {
        "mean": mine,
        "deviation": None,
        "n": 1,
        "values": {"0": mine},
    }
    (change,) = linear["differences"]
    assert change["mean"] == pytest.approx(mine - linear["arms"]["digits-without"]["mean"])
    assert change["interval"] is None  # of one seed
    assert change["over_images"][0] <= change["mean"] <= change["over_images"][1]
    kept = KeptPredictions(run)
    by_d, by_cosine = (kept.find(uneven, f"knn, {name}, k=20") for name in ("divergence", "cosine"))
    gain = np.mean(by_d.predicted[0] == by_d.labels) - np.mean(
        by_cosine.predicted[0] == by_d.labels
    )
    (pair,) = [
        row["arms"]
        for row in results["by_divergence"]
        if (row["variant"], row["against"]) == ("divergence, k=20", "cosine, k=20")
        if row["metric"] == "top1"
    ]
    assert set(pair) == {"digits"}
    assert pair["digits"]["mean"] == pytest.approx(100 * gain)
    classes = {row["class"]: row["arms"]["digits"]["mean"] for row in results["classes"]}
    assert list(classes) == ["nought", "one", "two"]
    assert sum(classes.values()) / 3 == pytest.approx(mine)
    text = (out / "tables.md").read_text()
    assert "### uneven: accuracy" in text
    assert "### uneven: by class" in text
    assert "digits - digits-without" in text
    assert (out / "tables" / "uneven-accuracy.tex").is_file()
    with (out / "quantities.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(q["arms"]) for q in results["quantities"])
    assert "digits - digits-without" in (out / "differences.svg").read_text()

    section = read_study(out)  # of the report
    assert "tables-uneven-by-class" in [table.key for table in section.tables]
    assert [figure.key for figure in section.figures] == ["tables-differences"]


def make_measured_run(
    folder: Path, config: Config, arm: str, seed: int, predicted: dict[str, list[int]]
) -> None:
    """A run as the study leaves it: what kNN and the linear classifier predicted of six images."""
    config = override(config, {"seed": seed, "data.source": "/data/six.npz"})
    run = Run.create(folder / "runs" / f"{arm}-six-seed{seed}", config, {})
    rows: list[Record] = []
    for place, (variant, classes) in enumerate(predicted.items()):
        right = np.array(classes) == SIX
        values = {
            "top1": right.mean(),
            "balanced": np.mean([right[c == SIX].mean() for c in (0, 1)]),
            "top5": 0.9,
        }
        protocol, _, words = variant.partition(", ")
        rows += [
            {"protocol": protocol, "variant": words, "data": "/data/six.npz", "metric": metric}
            | {
                "value": 100 * value,
                "num_train": 9,
                "num_test": 6,
                "epoch": 2,
                "chance": 50 + place,
            }
            for metric, value in values.items()
        ]
    run.add_result(evaluations=[*rows, {**rows[0], "epoch": 1, "value": 7.0}])
    texts = {("/data/six.npz", name): [pack(torch.tensor(p))] for name, p in predicted.items()}
    record_predictions(run, texts, pack(torch.tensor(SIX)), ("cat", "dog"), 2.0)


SIX = np.array([0, 0, 0, 0, 1, 1])


def test_differences_are_those_of_the_predictions(short_config, tmp_path):
    """Means and intervals by numpy and scipy, over images and over classes; no older epoch."""
    linear, by_d, by_cosine = (
        "linear, cached features",
        "knn, divergence, k=20",
        "knn, cosine, k=20",
    )
    predicted = {
        ("digits", 0): {linear: [0, 0, 1, 1, 1, 0], by_d: [0, 0, 1, 1, 1, 1]},
        ("digits", 1): {linear: [0, 0, 0, 0, 1, 1], by_d: [0, 0, 0, 1, 1, 0]},
        ("digits-without", 0): {linear: [0, 1, 0, 1, 0, 0], by_d: [0, 0, 1, 1, 0, 1]},
        ("digits-without", 1): {linear: [1, 0, 0, 1, 0, 1], by_d: [0, 1, 1, 1, 1, 1]},
    }
    for (arm, seed), classes in predicted.items():
        classes[by_cosine] = [0, 0, 0, 1, 1, 1] if seed else [1, 0, 0, 0, 0, 1]
        if arm == "digits-without":
            classes[by_cosine] = [1, 1, 0, 1, 0, 1]
        make_measured_run(tmp_path, short_config, arm, seed, classes)
    (tmp_path / "tables.json").write_text('{"arms": ["digits-without", "digits"]}')
    results = collect_results(tmp_path)
    assert results["arms"] == ["digits-without", "digits"]
    found = {(q["protocol"], q["variant"], q["metric"]): q for q in results["quantities"]}
    assert {metric for _, _, metric in found} == {"top1", "top5", "balanced"}
    (change,) = found["linear", "cached features", "top5"]["differences"]
    assert (change["mean"], change["over_images"]) == (0.0, None)  # only the first guess is kept

    def right(arm: str, seed: int, variant: str, balanced: bool) -> Any:
        hits = 100.0 * (np.array(predicted[arm, seed][variant]) == SIX)
        return np.array([hits[c == SIX].mean() for c in (0, 1)]) if balanced else hits

    for metric in ("top1", "balanced"):
        parts = {
            arm: [right(arm, seed, linear, metric == "balanced").mean() for seed in (0, 1)]
            for arm in results["arms"]
        }
        quantity = found["linear", "cached features", metric]
        assert quantity["arms"]["digits"]["mean"] == pytest.approx(np.mean(parts["digits"]))
        assert quantity["references"] == {"chance": 50}
        (change,) = quantity["differences"]
        test = stats.ttest_rel(parts["digits"], parts["digits-without"])
        gain = np.subtract(parts["digits"], parts["digits-without"])
        assert change["mean"] == pytest.approx(gain.mean())
        assert change["interval"] == pytest.approx([*test.confidence_interval()])
        assert np.mean(change["over_images"]) == pytest.approx(gain.mean())
        assert change["over_images"][0] < change["mean"]
        (pairs,) = [
            row["arms"]
            for row in results["by_divergence"]
            if (row["metric"], row["against"]) == (metric, "cosine, k=20")
        ]
        for arm in ("digits", "digits-without"):
            by_seed = [
                right(arm, seed, by_d, metric == "balanced").mean()
                - right(arm, seed, by_cosine, metric == "balanced").mean()
                for seed in (0, 1)
            ]
            assert pairs[arm]["mean"] == pytest.approx(np.mean(by_seed))
            assert np.mean(pairs[arm]["over_images"]) == pytest.approx(np.mean(by_seed))
    for number, row in enumerate(results["classes"]):
        assert (row["class"], row["num_test"]) == (("cat", 4), ("dog", 2))[number]
        shares = [right("digits", seed, linear, balanced=True)[number] for seed in (0, 1)]
        assert row["arms"]["digits"]["mean"] == pytest.approx(np.mean(shares))


def test_help_offers_what_is_taken(output):
    listed = output("study", "tables", "--help")
    shown = listed.partition("--protocols")[2].partition("What to measure")[0]
    offered = re.search(r"\{(.*?)\}", re.sub(r"[\s│]", "", shown))
    assert "detect" not in offered[1]
    plan_tables(TableOptions(data=("digits",), protocols=tuple(offered[1].split(","))))


def test_the_command(few_digits, tmp_path, capsys):
    out = tmp_path / "tables"
    words = ["study", "tables", "--data", few_digits, "--arms", "digits", "--epochs", "1"]
    words += ["--seeds", "1", "--protocols", "knn", "--out", str(out)]
    settings = ["--set", "encoder.name=small", *TINY, "optimiser.warmup_epochs=1.0"]
    main([*words, *settings])
    printed = capsys.readouterr().out
    assert printed.count("warning: optimiser.warmup_epochs is 1 and training.epochs 1") == 1
    assert "few: in short" in printed
    (row,) = [q for q in read(out)["quantities"] if q["variant"] == "cosine, k=20"]
    assert re.search(rf"kNN, top-1 +│ +{row['arms']['digits']['mean']:.2f} \(n=1\)", printed)
    assert str(out / "tables.md") in printed
    assert not (out / "runs" / "digits-few-seed0" / "checkpoints").exists()
    words.insert(words.index("knn"), "few")  # another protocol: the run is trained again
    main([*words, *settings])
    assert {quantity["protocol"] for quantity in read(out)["quantities"]} == {"knn", "few"}
    assert len(Run.open(out / "runs" / "digits-few-seed0").metrics()) == 1
    # Runs of another machine are copied here: they are in the tables, also of another arm.
    shutil.copytree(out / "runs" / "digits-few-seed0", out / "runs" / "elsewhere-few-seed0")
    main(["study", "tables", "--no-train", "--out", str(out)])
    assert (
        "### few: accuracy\n\n| quantity | digits | elsewhere |" in (out / "tables.md").read_text()
    )


def test_transfer_and_training_from_scratch(few_digits, uneven, tmp_path, monkeypatch):
    """A run of one dataset is measured on the other; from scratch only the first arm trains."""
    monkeypatch.setattr("deepbregman.reporting.charts.FIGURE_KINDS", ("svg",))
    asked: Record = {
        "data": (few_digits, uneven),
        "arms": ("digits", "digits-without"),
        "protocols": ("supervised", "transfer"),
        "only": ("*/few/*",),
        "seeds": 1,
        "epochs": (1,),
        "tuning_epochs": 1,
        "changes": ("encoder.name=small", *TINY),
        "out": tmp_path / "tables",
    }
    tables(study=TableOptions(**asked))
    found = {
        (q["data"], q["protocol"], q["variant"]): [*q["arms"]]
        for q in read(tmp_path / "tables")["quantities"]
        if q["trained_on"] == "few"
    }
    both = ["digits", "digits-without"]
    assert found == {
        ("few", "supervised", "from scratch"): ["digits"],
        ("uneven", "transfer", "linear, cached features"): both,
        ("uneven", "transfer", "fine-tuned"): both,
        ("uneven", "transfer", "supervised"): ["digits"],
    }
    assert "from few: fine-tuned, top-1" in (tmp_path / "tables" / "tables.md").read_text()
    # A mean over runs that were tuned for other lengths would mean little.
    for epochs, words in ((3, "--tuning-epochs 3"), (None, "--tuning-epochs is left out")):
        with pytest.raises(UserError, match=f"{words}: .* supervised and transfer were measured"):
            tables(study=TableOptions(**{**asked, "seeds": 2, "tuning_epochs": epochs}))
    more = {**asked, "protocols": ("knn",), "tuning_epochs": None}  # nothing is tuned
    queue = TableQueue(plan_tables(TableOptions(**more)))
    queue.check_other_tuning()
    tables_module._begin(queue.plan, "cpu")
    assert json.loads((tmp_path / "tables/tables.json").read_text())["asked"]["tuning_epochs"] == 1


def test_runs_count_though_their_dataset_is_in_another_folder_now(few_digits, tmp_path):
    """As when runs were copied from another machine."""
    out = tmp_path / "tables"
    common: Record = {
        "arms": ("digits-without",),
        "seeds": 1,
        "epochs": (1,),
        "changes": ("encoder.name=small", *TINY),
        "out": out,
        "keep_checkpoints": True,
    }
    tables(study=TableOptions(data=(few_digits,), protocols=("knn",), **common))
    (run,) = (out / "runs").iterdir()
    trained = json.loads((run / "result.json").read_text())["pretrain"]
    moved = str(tmp_path / "few.npz")
    shutil.copy(few_digits, moved)
    tables(study=TableOptions(data=(moved,), protocols=("knn", "linear"), **common))
    result = json.loads((run / "result.json").read_text())
    assert result["pretrain"] == trained
    assert {row["data"] for row in result["evaluations"]} == {few_digits}  # one name in a run
    assert "linear, cached features" in result["study"]["metrics"]
    changes = (*common.pop("changes"), "optimiser.learning_rate=0.7")
    options = TableOptions(data=(moved,), protocols=("knn",), changes=changes, **common)
    with pytest.raises(UserError, match=r"\(optimiser.learning_rate is 0.002 there, 0.7 here\)"):
        tables(study=options)


def test_a_run_that_another_process_holds_is_left_to_it(few_digits, tmp_path):
    options = TableOptions(data=(few_digits,), arms=("digits",), seeds=1, out=tmp_path / "tables")
    queue = TableQueue(plan_tables(options))
    worker: Any = None  # nothing is run
    with engine.lock(tmp_path / "tables", "digits-few-seed0", wait=False) as held:
        assert held
        assert queue.run_next(worker) is False
    assert queue.count() == (0, 1)


def test_only_runs_of_one_seed_are_compared(short_config, tmp_path):
    """A run that failed leaves its seed out, though the other arm has it."""
    linear, wrong = "linear, cached features", {0: 6, 1: 1, 2: 3, 3: 2}
    for arm, seeds in (("simclr", (0, 1, 2)), ("best", (1, 2, 3))):
        for seed in seeds:
            missed = wrong[seed] - (arm == "best")  # best is right about one image more
            predicted = [1 - c if place < missed else c for place, c in enumerate(SIX.tolist())]
            make_measured_run(tmp_path, short_config, arm, seed, {linear: predicted})
    (tmp_path / "tables.json").write_text('{"arms": ["simclr", "best"]}')
    quantities = {q["metric"]: q for q in collect_results(tmp_path)["quantities"]}
    (change,) = quantities["top1"]["differences"]
    assert (change["n"], change["deviation"]) == (2, pytest.approx(0.0))
    assert change["mean"] == pytest.approx(100 / 6)
