"""An evaluation that is stopped between two arms goes on with the next, to the same rows."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepbregman.cli import main
from deepbregman.commands.evaluate import evaluate
from deepbregman.errors import UserError
from deepbregman.evaluation import retraining
from deepbregman.evaluation.finished import describe_part, digest_split
from deepbregman.evaluation.options import Semi, Tuning
from deepbregman.runs import Record, Run
from deepbregman.training import checkpoints

Options = dict[str, Any]
KILLED = """
import os, signal, sys
import torch
from deepbregman.evaluation import retraining
from deepbregman.evaluation.options import Semi
from deepbregman.commands.evaluate import evaluate
run, protocol, data, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
engine, begun = retraining.finetune, []
def stopped(*arguments, **options):
    begun.append(1)
    if len(begun) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine(*arguments, **options)
retraining.finetune = stopped
semi = Semi(labels=(0.1,))
evaluate(
    run, protocols=[protocol], data=data, epochs=2, seeds=2, semi=semi
)
"""


@pytest.fixture
def run(copied_run) -> Run:
    return copied_run


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """The titles of the trainings, as they begin; nothing is trained, to save time."""
    titles: list[str] = []

    def note_only(network: nn.Module, *_: Any, title: str, **__: Any) -> None:
        titles.append(title)
        network.eval()

    monkeypatch.setattr(retraining, "finetune", note_only)
    return titles


def stopping(
    monkeypatch: pytest.MonkeyPatch, after: int, stop: Callable[[], object]
) -> Callable[[], None]:
    """Let training stop in the arm after so many; returns what undoes it."""
    engine, begun = retraining.finetune, []

    def stopped(*arguments: Any, **options: Any) -> None:
        begun.append(1)
        if len(begun) > after:
            stop()
        engine(*arguments, **options)

    monkeypatch.setattr(retraining, "finetune", stopped)
    return lambda: monkeypatch.setattr(retraining, "finetune", engine)


def interrupt() -> None:
    raise KeyboardInterrupt


def options_of(protocol: str, data: str) -> Options:
    return {
        "protocols": [protocol],
        "data": data,
        "epochs": 2,
        "seeds": 2,
        **({"semi": Semi(labels=(0.1,))} if protocol == "semi" else {}),
    }


def numbers(rows: list[Record]) -> list[Record]:
    clock = ("finished", "seconds")
    return [{key: value for key, value in row.items() if key not in clock} for row in rows]


@pytest.mark.parametrize(
    ("protocol", "arms"),
    [
        ("supervised", 2),
        pytest.param("semi", 6, marks=pytest.mark.slow),
        pytest.param("transfer", 4, marks=pytest.mark.slow),
    ],
)
def test_stopped_after_the_first_training_it_ends_as_if_nothing_had_been(
    run, few_digits, protocol, arms, trained, tmp_path, monkeypatch
):
    options = options_of(protocol, few_digits)
    reference = Run(Path(shutil.copytree(run.path, tmp_path / "reference")))
    expected = evaluate(reference, **options)
    every, journal = list(trained), run.path / "finished_arms.json"
    before = run.evaluations()
    assert len(every) == arms
    assert not (reference.path / "finished_arms.json").exists()

    undo = stopping(monkeypatch, 1, interrupt)
    with pytest.raises(KeyboardInterrupt, match="is kept"):
        evaluate(run, **options)
    undo()
    assert journal.is_file()
    assert run.evaluations() == before
    trained.clear()
    assert numbers(evaluate(run, **options)) == numbers(expected)
    assert trained == every[1:]
    assert not journal.exists()
    trained.clear()  # what is finished is measured anew when it is asked for anew
    assert numbers(evaluate(run, **options)) == numbers(expected)
    assert trained == every


@pytest.mark.slow
def test_killed_after_the_first_training_it_ends_as_if_nothing_had_been(run, few_digits, tmp_path):
    options = options_of("semi", few_digits)
    reference = Run(Path(shutil.copytree(run.path, tmp_path / "reference")))
    expected = evaluate(reference, **options)
    words = [run.path, "semi", few_digits, torch.get_num_threads()]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (run.path / "finished_arms.json").is_file()
    assert numbers(evaluate(run, **options)) == numbers(expected)


def test_a_part_can_be_described_where_the_package_is_not_installed(few, monkeypatch):
    """It may run from its source tree, of which importlib knows no version."""

    def no_version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", no_version)
    assert describe_part(few, few.source.train, "a variant", 0, {})["versions"]["torch"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"tuning": Tuning(learning_rate=(0.02,))},
        {"tuning": Tuning(learning_rate=(0.05,), weight_decay=0.0)},
        {"tuning": Tuning(batch_size=16)},
        {"epochs": 1},
        {"seed": 2},
        {"balanced": True},
        {"skip_unreadable": True},
        {"semi": Semi(labels=(0.2,))},
        "another source",
        "another pixel",
        "another label",
        "another test label",
        "retrained",
        "another configuration",
        "another version",
    ],
    ids=str,
)
def test_nothing_is_taken_from_an_evaluation_that_differs(
    run, few_digits, change, trained, monkeypatch, tmp_path
):
    data = str(shutil.copy(few_digits, tmp_path / "data.npz"))
    options = {**options_of("semi", data), "seeds": 1}
    undo = stopping(monkeypatch, 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, **options)
    undo()
    assert len(json.loads((run.path / "finished_arms.json").read_text())) == 2
    trained.clear()
    if isinstance(change, dict):
        options |= change
    elif change == "another source":
        options["data"] = "digits"
    elif change == "retrained":
        state = checkpoints.load(run.last_checkpoint)
        weights = state["objective"]
        name = next(name for name in weights if name.startswith("projection"))
        weights[name].view(-1)[0] += 1e-3
        checkpoints.save(run.last_checkpoint, {k: v for k, v in state.items() if k != "format"})
    elif change == "another configuration":
        path = run.path / "config.toml"
        path.write_text(path.read_text().replace("flip = 0.0", "flip = 0.5"))
        assert run.config.views.flip == 0.5
    elif change == "another version":
        monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    else:
        parts = {"another pixel": "test_images", "another label": "train_labels"}
        part = parts.get(change, "test_labels")
        arrays = dict(np.load(data))
        arrays[part].reshape(-1)[0] ^= 1
        np.savez(data, **arrays)
    evaluate(run, **options)
    assert len(trained) == 3


def test_more_seeds_than_before_take_those_that_are_done(run, few_digits, trained, monkeypatch):
    options = options_of("supervised", few_digits)
    undo = stopping(monkeypatch, 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, **options)
    undo()
    trained.clear()
    evaluate(run, **{**options, "seeds": 3})
    assert trained == ["from scratch, seed 1", "from scratch, seed 2"]


def test_what_is_said_and_that_other_networks_leave_nothing_behind(
    run, few_digits, trained, monkeypatch, capsys
):
    command = ["evaluate", run.path, "--protocol", "supervised", "--data", few_digits]
    words = [str(word) for word in [*command, "--epochs", 1, "--seeds", 3]]
    undo = stopping(monkeypatch, 2, interrupt)
    with pytest.raises(SystemExit, match="130"):
        main(words)
    words_kept = "stopped by Ctrl-C; what is finished is kept, the same command continues it"
    assert words_kept in capsys.readouterr().err
    undo()
    journal = run.path / "finished_arms.json"
    stale = json.loads(journal.read_text())
    entry = next(iter(stale.values()))
    stale["other"] = {**entry, "settings": {**entry["settings"], "networks": "others"}}
    journal.write_text(json.dumps(stale))
    trained.clear()
    main(words)
    said = [line for line in capsys.readouterr().out.splitlines() if "not trained again" in line]
    arms = ("from scratch, seed 0", "from scratch, seed 1")
    assert said == [f"not trained again, from {journal}: {arm}" for arm in arms]
    assert trained == ["from scratch, seed 2"]
    assert not journal.exists()


def test_an_edited_file_is_refused_by_name(run, few_digits, monkeypatch):
    options = {**options_of("supervised", few_digits), "epochs": 1}
    stopping(monkeypatch, 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, **options)
    journal = run.path / "finished_arms.json"
    arms = json.loads(journal.read_text())
    for arm in arms.values():
        arm["measured"]["values"]["top1"] = "9"
    journal.write_text(json.dumps(arms))
    with pytest.raises(UserError, match=r"finished_arms.json cannot be used .*top1 is '9'"):
        evaluate(run, **options)


def test_files_are_told_apart_by_what_they_hold(tmp_path):
    from deepbregman.data import Split
    from deepbregman.data.images import FileImages

    paths = (tmp_path / "a.png", tmp_path / "b.png")
    for path in paths:
        path.write_bytes(b"1234")
    split = Split(FileImages(paths, 8), torch.tensor([0, 1]))
    first = digest_split(split)
    assert digest_split(split) == first
    assert digest_split(split.select(torch.tensor([1, 0]))) != first
    paths[0].write_bytes(b"12345")
    assert digest_split(split) != first
