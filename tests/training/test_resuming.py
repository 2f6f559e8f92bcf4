"""Which checkpoint a run goes on from, and what may have changed in between."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepbregman.cli import main
from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, differing_fields, load_recipe, override, to_toml
from deepbregman.data import open_source
from deepbregman.errors import Notice, UserError
from deepbregman.runs import Run, is_complete
from deepbregman.training import checkpoints
from deepbregman.training.checkpoints import find_checkpoint
from deepbregman.training.notices import describe_sharing

from ..conftest import save_photos

Damage = Callable[[Path], None]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.fixture
def run(tiny_run, tmp_path) -> Run:
    shutil.copytree(tiny_run.path, tmp_path / "run")
    return Run.open(tmp_path / "run")


def parameters(run: Run) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = checkpoints.load(run.last_checkpoint)["objective"]
    return state


def assert_same_parameters(run: Run, reference: Run) -> None:
    found, expected = parameters(run), parameters(reference)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Damage


def drop_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize("damage", [empty, Path.unlink])
def test_metrics_that_are_gone_do_not_keep_a_run_from_its_end(run, tiny_run, damage):
    damage(run.path / "metrics.jsonl")
    shutil.copy(run.previous_checkpoint, run.last_checkpoint)
    assert_same_parameters(resume(run.path), tiny_run)
    assert [row["epoch"] for row in run.metrics()] == [3]


@pytest.mark.parametrize("damage", [empty, Path.unlink, drop_last_line])
def test_nor_from_its_result(run, damage):
    damage(run.path / "metrics.jsonl")
    (run.path / "result.json").unlink()
    assert is_complete(resume(run.path))


@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink])
def test_the_previous_checkpoint_stands_in_and_that_is_said(run, tiny_run, damage, capsys):
    damage(run.last_checkpoint)
    main(["pretrain", "--resume", str(run.path)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{run.last_checkpoint} cannot be read" in said
    assert f"going on from {run.previous_checkpoint}, step 4" in said
    (record,) = run.provenance()["resumed"]
    assert record["from"] == "previous.pt"
    assert record["last.pt"] in said
    assert_same_parameters(run, tiny_run)
    assert [row["epoch"] for row in run.metrics()] == [1, 2, 3]
    names = {path.name for path in run.checkpoints.iterdir()}
    expected = {path.name for path in tiny_run.checkpoints.iterdir()}
    assert names - expected == (set() if damage is Path.unlink else {"damaged.pt"})


def test_a_damaged_checkpoint_never_becomes_the_previous_one(run, monkeypatch):
    """Else a kill at the next save would leave two that cannot be read."""
    flip(run.last_checkpoint)

    def crash(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("deepbregman.training.loop.Pretraining.advance", crash)
        told = pytest.warns(Notice, match=r"last\.pt cannot be read")
        with told, pytest.raises(UserError, match=r"Input/output error.*--resume"):
            resume(run.path)
    assert checkpoints.load(run.last_checkpoint)["step"] == 4
    assert not run.previous_checkpoint.exists()


def test_both_damaged(run):
    flip(run.last_checkpoint)
    cut(run.previous_checkpoint)
    before = (run.path / "provenance.json").read_text()
    with pytest.raises(UserError) as caught:
        resume(run.path)
    for words in (str(run.last_checkpoint), str(run.previous_checkpoint), "epoch-0002.pt"):
        assert words in str(caught.value)
    assert (run.path / "provenance.json").read_text() == before
    shutil.copy(run.checkpoints / "epoch-0002.pt", run.last_checkpoint)  # as the words say
    resume(run.path)
    assert [row["epoch"] for row in run.metrics()] == [1, 2, 3]


def test_damaged_without_another(run):
    for path in (run.previous_checkpoint, run.checkpoints / "epoch-0002.pt"):
        path.unlink()
    flip(run.last_checkpoint)
    with pytest.raises(UserError, match=r"last\.pt.*this run has no other"):
        resume(run.path)


def test_a_checkpoint_of_a_later_version_is_no_damage(run, monkeypatch):
    state = checkpoints.load(run.last_checkpoint)
    with monkeypatch.context() as patch:
        later = checkpoints.FORMAT + 1
        patch.setattr(checkpoints, "FORMAT", later)
        checkpoints.save(run.last_checkpoint, {**state, "format": later})
    with pytest.raises(UserError, match=f"has checkpoint format {later}"):
        find_checkpoint(run)


# Change


def edit(run: Run, **changes: Any) -> None:
    names = {name.replace("__", "."): value for name, value in changes.items()}
    (run.path / "config.toml").write_text(to_toml(override(run.config, names)))


def test_changed_fields():
    before = Config()
    after = override(before, {"seed": 1, "training.epochs": 3, "views.flip": 0.5})
    assert differing_fields(before, after) == {"seed": (0, 1), "training.epochs": (400, 3)}
    assert differing_fields(before, before) == {}


def test_safe_fields_may_change_and_that_is_said(run, tiny_run, capsys):
    shutil.copy(run.previous_checkpoint, run.last_checkpoint)
    edit(
        run,
        data__root="elsewhere",
        data__resident="yes",
        data__workers=1,
        training__checkpoint_every=3,
        training__save_seconds=9.0,
        training__knn_every=1,
        training__compile="no",
        training__skip_nonfinite=2,
    )
    main(["pretrain", "--resume", str(run.path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "training.save_seconds (0.0 -> 9.0)" in said
    (record,) = run.provenance()["resumed"]
    assert record["changed"]["data.workers"] == [16, 1]
    assert len(record["changed"]) == 8
    assert_same_parameters(run, tiny_run)
    assert (run.checkpoints / "epoch-0003.pt").exists()
    assert checkpoints.load(run.last_checkpoint)["config"] == to_toml(run.config)
    resume(run.path)  # and from now on it is the configuration of the run
    assert "changed" not in run.provenance()["resumed"][1]


def test_they_may_be_given_on_the_command_line_and_in_python(run, tiny_run, output, refusal):
    """So a job goes on where there are fewer CPUs, or without shared memory."""
    shutil.copy(run.previous_checkpoint, run.last_checkpoint)
    again = ("pretrain", "--resume", run.path)
    words = ("--data.workers", "0", "--training.no-tensorboard", "--data.resident", "no")
    assert "data.workers (16 -> 0)" in " ".join(output(*again, *words).split())
    assert (run.config.data.workers, run.config.data.resident) == (0, "no")
    assert not run.config.training.tensorboard
    assert_same_parameters(run, tiny_run)
    resume(run.path, changes={"data.workers": 3})
    assert run.config.data.workers == 3
    said = refusal(*again, "--data.workers", "1", "--training.batch-size", "8")
    assert "--training.batch-size is given" in said
    output(*again, "--stop-when-saturated")
    assert run.config.training.stop_when_saturated
    output(*again, "--no-stop-when-saturated")
    assert not run.config.training.stop_when_saturated
    before = to_toml(run.config)
    for stray in (["--seed", "3"], ["--data", "digits"], ["--run", "other"]):
        assert f"{stray[0]} is given: leave it out" in refusal(*again, *stray)
    assert "digits is given: leave it out" in refusal("pretrain", "digits", *again[1:])
    said = refusal("pretrain", "--resume", "--data.workers", "1")
    assert "--resume needs the folder of a run" in said
    with pytest.raises(UserError, match="made with other settings: seed"):
        resume(run.path, changes={"seed": 3})
    assert to_toml(run.config) == before


def test_a_run_without_a_checkpoint_keeps_its_settings_too(run):
    for path in run.checkpoints.iterdir():
        path.unlink()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    words = rf"{run.path} was made with other settings: seed \(0 -> 3\)"
    with pytest.raises(UserError, match=words):
        resume(run.path, changes={"seed": 3, "data.workers": 3})
    assert {path: path.read_bytes() for path in before} == before


def test_the_command_that_began_a_run_may_change_them_too(run, tiny_run, tiny_config):
    shutil.copy(run.previous_checkpoint, run.last_checkpoint)
    (run.path / "result.json").unlink()
    fewer = {"data.workers": 1, "training.save_seconds": 9.0}
    pretrain(tiny_config, run=run.path, changes=fewer)
    assert run.config == override(tiny_run.config, fewer)
    assert_same_parameters(run, tiny_run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("data.source", "digits"),
        ("data.holdout", 0.1),
        ("views.flip", 0.3),
        ("encoder.embedding", 9),
        ("objective.temperature", 0.3),
        ("divergence.sigma", 0.9),
        ("optimiser.learning_rate", 0.1),
        ("training.epochs", 4),  # the schedule is a cosine over them
        ("training.batch_size", 16),
        ("training.accumulate", 2),
        ("training.precision", "bf16-mixed"),
    ],
)
def test_other_fields_may_not_and_are_named(run, name, value):
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.suffix in (".pt", ".json")}
    edit(run, **{name.replace(".", "__"): value, "training__knn_every": 7})
    with pytest.raises(UserError, match=rf"made with other settings: {name} \(.* -> {value}\);"):
        resume(run.path)
    assert {p: p.read_bytes() for p in before} == before  # and nothing is written of it


@pytest.mark.parametrize("schedule", ["constant", "step"])
def test_a_run_may_be_made_longer_where_the_schedule_does_not_depend_on_its_length(
    tiny_config, tmp_path, schedule, capsys
):
    changes = {
        "optimiser.schedule": schedule,
        "optimiser.milestones": [1] if schedule == "step" else [],
        "training.checkpoint_every": 0,
        "training.epochs": 2,
    }
    config = override(tiny_config, changes)
    short = pretrain(config, run=tmp_path / "run")
    result = (short.path / "result.json").read_bytes()
    again = ["pretrain", "--resume", str(short.path)]
    main(again)
    said = " ".join(capsys.readouterr().out.split())
    assert f"to train longer: `deepbregman {' '.join(again)} --training.epochs N`" in said
    main([*again, "--training.epochs", "3"])
    assert "to train longer" not in capsys.readouterr().out
    whole = pretrain(config, run=tmp_path / "whole", changes={"training.epochs": 3})
    assert_same_parameters(short, whole)
    assert short.result()["pretrain"]["epoch"] == 3
    (short.path / "result.json").write_bytes(result)  # as if killed before it wrote the new one
    assert is_complete(resume(short.path))
    assert short.result()["pretrain"]["epoch"] == 3
    edit(short, training__epochs=2)
    with pytest.raises(UserError, match=r"training\.epochs \(3 -> 2\)"):
        resume(short.path)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("byol", {"objective.final_momentum": 1.0}),
        ("dino", {"objective.final_momentum": 0.9995, "objective.freeze_prototypes": 0.0}),
        ("swav", {}),
        ("best", {"teacher.schedule": "cosine"}),
        ("paper", {"objective.name": "custom"}),  # its code gets the share that is done
    ],
)
def test_a_run_with_a_schedule_over_its_whole_length_may_not_be_made_longer(recipe, changes):
    fixed = {"optimiser.schedule": "constant", "optimiser.milestones": [], "training.epochs": 2}
    config = override(load_recipe(recipe), {**fixed, **changes})
    longer = override(config, {"training.epochs": 3})
    with pytest.raises(UserError, match=r"training\.epochs \(2 -> 3\)"):
        checkpoints.check_settings(config, longer, 2.0, "it")


@pytest.mark.parametrize("recipe", ["simclr", "best", "byol", "sce"])
def test_one_without_may(recipe):
    config = override(load_recipe(recipe), {"optimiser.schedule": "constant"})
    config = override(config, {"training.epochs": 2, "optimiser.warmup_epochs": 1.0})
    if recipe in ("byol", "sce"):
        config = override(config, {"objective.final_momentum": config.objective.momentum})
    longer = override(config, {"training.epochs": 3})
    assert checkpoints.check_settings(config, longer, 2.0, "it") == {"training.epochs": (2, 3)}


def test_an_image_that_is_damaged_in_the_meantime_may_be_left_out(
    tiny_config, tmp_path, monkeypatch
):
    """The error says to use --skip-unreadable, and that must not end in a refusal."""
    folder = save_photos(tmp_path / "photos", 40, (8, 8))
    # As in a dataset too large to decode on opening, of which a sample makes the fingerprint.
    monkeypatch.setattr("deepbregman.data.listings.FULL_DECODE_LIMIT", 10)
    monkeypatch.setattr("deepbregman.data.images._HASHED", 1)
    changes = {"data.source": str(folder), "training.epochs": 2, "optimiser.schedule": "constant"}
    run = pretrain(tiny_config, changes=changes, run=tmp_path / "run")
    edit(run, training__epochs=3)
    path = open_source(str(folder), image_size=8).train.images.paths[5]
    content = bytearray(path.read_bytes())
    content[50:60] = bytes(10)  # pixels; the header stays
    path.write_bytes(content)
    with pytest.raises(UserError, match="--skip-unreadable"):
        resume(run.path)
    with pytest.warns(Notice, match="1 image could not be decoded; training used others"):
        resume(run.path, changes={"data.skip_unreadable": True})


def test_a_refused_resumption_leaves_no_trace(run):
    edit(run, seed=5)
    before = (run.path / "provenance.json").read_text()
    with pytest.raises(UserError, match="seed"):
        resume(run.path)
    assert (run.path / "provenance.json").read_text() == before


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.1), torch.nn.Dropout2d(0.1)])
def test_dropout_of_ones_own_is_not_the_same_for_other_processes(tiny_config, layer):
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    (words,) = describe_sharing(tiny_config, 1, 2, network)
    assert "had 2 processes before and has 1 now: masks of dropout differ" in words
    layer.p = 0.0
    (words,) = describe_sharing(tiny_config, 1, 2, network)
    assert "the same up to rounding" in words
