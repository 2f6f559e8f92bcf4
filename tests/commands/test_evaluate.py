"""deepbregman evaluate as a user meets it: the table, folders and lists, and every refusal."""

import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from deepbregman.data.folders import Listing, list_folder
from deepbregman.evaluation.detection.average_precision import METRICS as AP
from deepbregman.evaluation.inputs import Evaluation
from deepbregman.evaluation.protocols import PROTOCOLS, Protocol
from deepbregman.reporting.screen import (
    describe_references,
    draw_evaluation_table,
    draw_evaluation_tables,
    draw_hits,
)
from deepbregman.runs import Record, Run

from ..conftest import Command


@pytest.fixture
def run(copied_run) -> Path:
    (copied_run.path / "result.json").write_text('{"pretrain": {"epoch": 2}}\n')
    return copied_run.path


@pytest.fixture
def evaluate(command, run, monkeypatch) -> Command:
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *words: command("evaluate", run, *words)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Bright cats and dark dogs of several sizes, one of them grey."""
    random = np.random.default_rng(0)
    for label, name in enumerate(("cats", "dogs")):
        for split, count in (("train", 12), ("test", 5)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                shape = (20 + 3 * index, 30, 3)[: 2 if index == 4 else 3]
                pixels = random.integers(0, 100, shape) + 150 * (1 - label)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{name}_{index}.png")
    return tmp_path / "photos"


def rows_of(run: Path) -> list[dict[str, Any]]:
    result = json.loads((run / "result.json").read_text())
    assert result["pretrain"] == {"epoch": 2}
    rows: list[dict[str, Any]] = result["evaluations"]
    return rows


class TestUse:
    @pytest.mark.parametrize(
        ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
    )
    @pytest.mark.parametrize("can_record", [True, False])
    def test_a_signal_says_what_is_kept(self, evaluate, run, number, name, can_record, monkeypatch):
        def stop(evaluation: Evaluation) -> list[Record]:
            signal.raise_signal(number)
            raise AssertionError("SIGTERM would have ended the process without a word")

        monkeypatch.setitem(PROTOCOLS, "few", Protocol(stop))
        if not can_record:
            monkeypatch.setattr(os, "access", lambda *_: False)
        # A shell starts background jobs with Ctrl-C ignored.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code, _, err = evaluate("--protocol", "knn", "few")
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # as it was
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.signal(signal.SIGINT, interrupt)
        assert code == 128 + number
        if can_record:
            words = "what is finished is kept, the same command continues it"
            assert {row["protocol"] for row in rows_of(run)} == {"knn"}
        else:
            words = f"nothing is kept, since {run} cannot be written to"
        assert err.endswith(f"stopped by {name}; {words}\n")

    def test_a_folder_is_listed_once(self, evaluate, photos, monkeypatch):
        """To look for labels, and to open them: listing 50,000 files takes half a second."""
        listed = []

        def count(folder: Path) -> Listing:
            listed.append(folder)
            return list_folder(folder)

        monkeypatch.setattr("deepbregman.data.tables.list_folder", count)
        assert evaluate("--protocol", "knn", "--data", photos)[0] == 0
        assert listed == [photos]

    def test_labels_in_a_table_give_the_numbers_of_class_folders(self, evaluate, run, photos):
        lines = ["image,label,split"]
        for path in sorted(photos.glob("*/*/*.png")):
            place = path.relative_to(photos).as_posix()
            lines.append(f"{place},{path.parent.name},{path.parent.parent.name}")
        (photos / "labels.csv").write_text("\n".join(lines))
        (run / "copy.json").write_bytes((run / "result.json").read_bytes())
        assert evaluate("--protocol", "knn", "linear", "--epochs", 0, "--data", photos)[0] == 0
        by_folder = rows_of(run)
        (run / "copy.json").replace(run / "result.json")
        words = ("--epochs", 0, "--data", photos / "labels.csv")
        code, _, err = evaluate("--protocol", "knn", "linear", *words)
        assert (code, err) == (0, "")
        by_table = rows_of(run)
        for row in (*by_folder, *by_table):
            assert (row["num_train"], row["num_test"]) == (24, 10)
        assert [(row["variant"], row["metric"]) for row in by_table] == [
            (row["variant"], row["metric"]) for row in by_folder
        ]
        for row, other in zip(by_table, by_folder, strict=True):
            assert row["value"] == pytest.approx(other["value"])

    def test_transfer_to_a_folder(self, evaluate, run, photos):
        words = ("--protocol", "transfer", "--data", photos, "--epochs", 6, "--batch-size", 8)
        code, out, err = evaluate(*words, "--seeds", 2, "--balanced")
        assert (code, err) == (0, "")
        rows = rows_of(run)
        assert [(row["variant"], row["metric"]) for row in rows] == [
            (variant, metric)
            for variant in ("linear, cached features", "fine-tuned", "supervised")
            for metric in ("top1", "balanced")  # two classes have no top 5
        ]
        assert "top-5" not in out
        assert "balanced %" in out
        for row in rows:
            assert (row["num_train"], row["num_test"], row["n"]) == (24, 10, 2)
            assert f"{row['value']:.2f} ± {row['deviation']:.2f}" in out
        assert rows[2]["value"] == 100.0  # bright or dark

    def test_semi_with_a_list(self, evaluate, run, photos, tmp_path):
        names = ("cats_0.png", "dogs_1.png", "train/cats/cats_4.png", "dogs/dogs_5.png")
        (tmp_path / "few.txt").write_bytes("\r\n".join(names).encode("utf-8-sig"))  # of Notepad
        words = ("--protocol", "semi", "--data", photos, "--epochs", 2)
        code, out, err = evaluate(*words, "--labelled-list", tmp_path / "few.txt")
        assert (code, err) == (0, "")
        assert [row["variant"] for row in rows_of(run)] == [
            f"labels of few.txt, {arm}"
            for arm in ("from encoder", "from projection layer 1", "supervised")
        ]
        assert "4 / 10" in out

    def test_semi_with_less_than_an_image_of_a_class(self, evaluate, run, photos):
        words = ("--protocol", "semi", "--data", photos, "--epochs", 1)
        code, _, err = evaluate(*words, "--labels", 0.05, "--starts", "encoder")
        assert code == 0
        assert "5 % labels: one image is drawn of each class" in " ".join(err.split())
        (row,) = rows_of(run)
        assert (row["num_train"], row["details"]["classes_rounded_up"]) == (2, ["cats", "dogs"])

    def test_the_help_groups_what_belongs_together(self, evaluate):
        code, out, _ = evaluate("--help")
        assert code == 0
        labels, rate = out.index("semi options"), out.index("tuning options")
        assert labels < out.index("--labels ") < rate < out.index("--learning-rate ")
        assert out.index("--seeds") < labels

    def test_an_unreadable_image(self, evaluate, run, photos):
        (photos / "train" / "cats" / "broken.png").write_bytes(b"no image")
        words = ("--protocol", "semi", "--data", photos, "--labels", 0.5, "--epochs", 1)
        code, _, err = evaluate(*words)
        assert code == 2
        assert "broken.png" in err
        assert "evaluations" not in (run / "result.json").read_text()
        code, _, err = evaluate(*words, "--skip-unreadable")
        assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--protocol knn --seeds 0", ["error: seeds is 0", "1 or more"]),
        ("--protocol knn --seed -3", ["seed is -3", "0 or more"]),
        ("--protocol linear --epochs -1", ["epochs is -1", "0 or more"]),
        ("--protocol knn semi --epochs 0", ["epochs is 0", "1 epoch or more"]),
        ("--protocol knn transfer", ["transfer", "another dataset", "--data"]),
        ("--protocol transfer --data digits", ["--data digits", "the dataset of the pretraining"]),
        ("--protocol transfer --data none.npz", ["none.npz"]),
        ("--protocol semi --labels 1.5", ["labels is (1.5,)", "above 0 and at most 1"]),
        ("--protocol semi --labels", ["labels is empty"]),
        ("--protocol semi --labelled-list x.txt", ["x.txt", "no file names"]),
        ("--protocol semi --labelled-list x.txt --labels 0.5", ["--labels 0.5", "give one"]),
        ("--protocol semi --learning-rate 0", ["learning_rate", "above 0"]),
        ("--protocol semi --learning-rate", ["learning_rate is ()", "at least one"]),
        (
            "--protocol semi --labels 0.01 --learning-rate 0.1 0.2",
            ["2 learning rates", "2 labelled images of each class", "one --learning-rate"],
        ),
        ("--protocol detect knn --data x", ["detect and knn", "two commands"]),
        ("--protocol supervised --batch-size 1", ["batch_size is 1", "2 or more"]),
        ("--protocol knn linear --labels 0.1", ["--labels is used by semi only", "knn and linear"]),
        ("--protocol knn --few.draws 3", ["--few.draws is used by few only", "leave the option"]),
        (
            "--protocol knn --learning-rate 0.3",
            ["--learning-rate is used by semi, transfer and supervised only"],
        ),
        ("--protocol supervised --epochs 1 --learning-rate 1e30", ["diverged", "1e+30", "lower"]),
    ],
)
def test_refusals(evaluate, run, words, expected):
    before = (run / "result.json").read_text()
    code, _, err = evaluate(*words.split())
    assert code == 2
    for part in expected:
        assert part in err
    assert (run / "result.json").read_text() == before


def test_the_table_has_a_line_for_a_variant_and_a_column_for_a_metric(capsys):
    common = {"protocol": "linear", "data": "d", "num_train": 1297, "num_test": 500}
    rows = [
        {"variant": "a [b]", "metric": "top5", "value": 99.0, "deviation": 0.126, "n": 3},
        {"variant": "a [b]", "metric": "top1", "value": 90.0, "deviation": 1.5, "n": 3},
        {"variant": "c", "metric": "top1", "value": 80.0, "deviation": None, "n": 1},
    ]
    Console(width=100).print(draw_evaluation_table([{**common, **row} for row in rows], "title"))
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [
        ["linear", "a [b]", "90.00 ± 1.50", "99.00 ± 0.13", "3", "1,297 / 500"],
        ["linear", "c", "80.00", "", "1", "1,297 / 500"],
    ]


def test_protocols_with_other_metrics_have_tables_of_their_own(capsys):
    found = {"knn": ["top1"], "retrieval": ["mAP", "precision@10"], "linear": ["top1", "top5"]}
    common = {"data": "d", "num_train": 1297, "num_test": 500, "deviation": None, "n": 1}
    rows = [
        {**common, "protocol": protocol, "variant": "cosine of embeddings", "metric": m, "value": 9}
        for protocol, metrics in {**found, "cluster": ["NMI", "ARI", "purity"]}.items()
        for m in metrics
    ]
    Console(width=80).print(draw_evaluation_tables(rows, "on d"))
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split("│")[1].strip() for line in lines if "│" in line]
    assert shown == ["knn", "linear", "retrieval", "cluster"]  # each on one line
    assert sum(line.startswith("on d") for line in lines) == 3


def test_few_labels_and_corruptions_fill_no_screens(capsys):
    common = {"data": "d", "metric": "top1", "num_test": 500, "deviation": None, "n": 1}
    few = [("1 label", 10, 78.64), ("5 labels", 50, 93.96)]
    rows = [
        {"protocol": "few", "variant": f"{words} per class, {how}", "num_train": count, "value": v}
        for words, count, value in few
        for how, v in (("linear", value), ("nearest mean, cosine", value - 50))
    ] + [
        {"protocol": "corruptions", "variant": f"{how}, {kind}", "num_train": 1297, "value": value}
        for how, value in (("linear", 90.5), ("kNN by cosine, k=20", 80.25))
        for kind in ("clean", "noise 1", "mean of all")
    ]
    Console(width=100).print(draw_evaluation_tables([{**common, **row} for row in rows], "on d"))
    out = capsys.readouterr().out
    lines = out.splitlines()
    # The numbers of labels are in the columns.
    assert lines[0].strip() == "on d, top-1 %: 500 images to test on"
    assert "on d, top-1 %: 1,297 images to train on, 500 to test on" in " ".join(out.split())
    split = [re.split("[│┃]", line)[1:-1] for line in lines]
    cells = [[cell.strip() for cell in line] for line in split if line]
    assert cells == [
        ["few, per class", "1 label", "5 labels"],
        ["linear", "78.64", "93.96"],
        ["nearest mean, cosine", "28.64", "43.96"],
        ["corruptions", "linear", "kNN by cosine, k=20"],
        *([kind, "90.50", "80.25"] for kind in ("clean", "noise 1", "mean of all")),
    ]


@pytest.mark.parametrize(
    ("protocol", "words"), [("transfer", "another dataset"), ("detect", "Pascal VOC")]
)
def test_a_protocol_without_its_data_is_refused_before_anything_is_read(
    refusal, tmp_path, protocol, words
):
    err = refusal("evaluate", tmp_path / "no run", "--protocol", protocol)
    assert words in err


def test_accuracies_come_with_what_to_compare_them_with():
    weighted = "cached features, weighted classes"
    rows = [
        {"protocol": "knn", "variant": "cosine", "details": {"k": 20}, "raw_pixels": 33.59},
        {"protocol": "knn", "variant": "divergence", "details": {"k": 20}, "raw_pixels": 33.59},
        {"protocol": "linear", "variant": "cached features", "raw_pixels": 41.4},
        {"protocol": "linear", "metric": "top5", "variant": "cached features", "raw_pixels": 96.1},
        {"protocol": "linear", "variant": weighted, "raw_pixels": 30.2},
    ]
    shared = {"metric": "top1", "details": {}, "chance": 16.41}
    assert describe_references([shared | row for row in rows]) == (
        "to compare, top-1: the most frequent class for all images 16.4 %; raw pixels instead of "
        "features 33.6 % (knn, k=20), 41.4 % (linear), 30.2 % (linear, weighted classes)"
    )
    assert describe_references([{"protocol": "semi", "metric": "top1"}]) == ""


@pytest.mark.parametrize("name", ["cat/1.jpg", "1.jpg"])
def test_a_class_that_the_name_tells_has_no_column(name, capsys):
    Console(width=80).print(draw_hits("query", {"cosine": [(name, "cat", 0.9)]}))
    assert ("class" in capsys.readouterr().out) == (name == "1.jpg")


def test_nothing_is_cut_off_on_a_narrow_screen(capsys):
    common = {"protocol": "semi", "data": "d", "num_train": 12_811, "num_test": 50_000, "n": 3}
    rows = [
        {**common, "variant": variant, "metric": metric, "value": 66.25, "deviation": 10.5}
        for variant in ("1 % labels, from projection layer 1", "1 % labels, supervised")
        for metric in ("top1", "top5", "balanced")
    ]
    Console(width=80).print(draw_evaluation_table(rows, "title"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].rstrip().endswith("┓")
    words = " ".join(lines).split()
    for word, times in (("66.25", 6), ("50,000", 2), ("12,811", 2)):
        assert words.count(word) == times


def test_many_metrics_have_a_line_each(capsys):
    """Four detectors by seven metrics: columns for metrics would be too narrow for their words."""
    trunks = ("C4, pretrained", "C4, random", "FPN, pretrained", "FPN, random")
    common = {"protocol": "detect", "data": "d", "num_train": 60, "num_test": 30, "n": 3}
    rows = [
        {**common, "variant": variant, "metric": metric, "value": 56.1, "deviation": 1.25}
        for variant in trunks
        for metric in AP
    ]
    Console(width=80).print(draw_evaluation_tables(rows, "on d"))
    title, _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "on d: 60 images to train on, 30 to test on, 3 seeds"
    assert [cell.strip() for cell in head.split("┃")[1:-1]] == ["detect", *trunks]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[:-1]]
    assert cells == [[metric, *["56.10 ± 1.25"] * 4] for metric in AP]


def test_detectors_from_the_run_and_from_random_weights_have_their_difference(capsys):
    common = {"protocol": "detect", "data": "d", "num_train": 60, "num_test": 30, "n": 3, "seed": 0}
    common |= {"value": 1.0, "deviation": 1.0, "metric": "AP50"}
    found = {"C4, pretrained": [50.0, 52.0, 54.0], "C4, random": [40.0, 41.0, 42.0]}
    rows = [{**common, "variant": variant, "values": values} for variant, values in found.items()]
    Console(width=120).print(draw_evaluation_tables(rows, "on d"))
    *_, line, _ = capsys.readouterr().out.splitlines()
    # Differences 10, 11 and 12; the quantile of Student's t with 2 degrees of freedom is 4.303.
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        *("C4, pretrained - random", "AP50", "+11.00 ± 1.00 [+8.52, +13.48] (n=3)")
    ]


def test_no_two_training_images_of_a_class(evaluate, run, photos, tmp_path):
    for name in ("cats", "dogs"):
        (tmp_path / "two" / name).mkdir(parents=True)
        for index in range(2):  # of which one is set aside to test on
            picture = photos / "train" / name / f"{name}_{index}.png"
            shutil.copy(picture, tmp_path / "two" / name)
    for protocol in ("linear", "transfer"):
        code, _, err = evaluate("--protocol", "knn", protocol, "--data", tmp_path / "two")
        assert code == 2
        assert "no two of a class" in err
    assert "evaluations" not in (run / "result.json").read_text()


def test_a_folder_that_cannot_be_written_to_is_judged_and_not_recorded(
    evaluate, run, few_digits, monkeypatch
):
    """It is said before the work; the numbers are printed; nothing in the folder changes."""
    refuse_writing(monkeypatch, run)
    before = contents(run)
    words = ("--protocol", "knn", "supervised", "--epochs", 1, "--data", few_digits)
    code, out, err = evaluate(*words)
    assert code == 0
    assert err.count("results are printed, not recorded") == 1
    assert "cannot be written to" in err
    assert "top-1 %" in out
    assert "kept in" not in out
    assert contents(run) == before


def test_detection_needs_a_folder_to_write_to(evaluate, run, monkeypatch):
    refuse_writing(monkeypatch, run)
    code, _, err = evaluate("--protocol", "detect", "--data", "voc")
    assert code == 2
    assert "detect" in err
    assert "copy the run" in err


def refuse_writing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a folder read-only, also for an administrator, who may write anywhere."""

    really_open = Path.open

    def refuse(path: Path, mode: str = "r", **options: Any) -> Any:
        if "r" in mode:
            return really_open(path, mode, **options)
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    folder.chmod(0o555)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_test_split_of_one_class_is_said(evaluate, photos):
    shutil.rmtree(photos / "test" / "dogs")
    code, _, err = evaluate("--protocol", "knn", "--data", photos)
    assert code == 0
    assert err.startswith(f"note: every test image of {str(photos)!r} has the class 'cats'")
    assert err.count("note:") == 1


def test_a_run_without_epochs_is_the_encoder_that_it_starts_from(output, run, tmp_path):
    kept = tmp_path / "kept"
    words = ("pretrain", run / "config.toml", "--encoder.weights", run, "--training.epochs", 0)
    out = output(*words, "--run", kept)
    assert "nothing is trained: small keeps the weights of" in out
    found = []
    for folder in (run, kept):
        output("evaluate", folder, "--protocol", "knn")
        rows = Run(folder).result()["evaluations"]
        found.append([row["value"] for row in rows if row["variant"] == "cosine, k=20"])
    assert found[0] == found[1] != []
    before = (kept / "metrics.jsonl").read_text()
    assert json.loads(before)["epoch"] == 0
    result = Run(kept).result()["pretrain"]
    assert "knn" not in result  # evaluate measures it
    out = output(*words, "--run", kept)
    assert "is complete: 0 epochs trained" in out
    out = output("pretrain", "--resume", kept)
    assert (kept / "metrics.jsonl").read_text() == before
    assert Run(kept).result()["pretrain"] == result


def test_a_run_without_epochs_and_weights_says_that_it_is_untrained(output, tmp_path):
    words = ("pretrain", "digits", "--data", "digits", "--training.epochs", 0)
    out = output(*words, "--run", tmp_path / "untrained")
    assert "keeps its random weights" in out
