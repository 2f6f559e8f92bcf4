"""One command starts a run, continues it, or says that it is complete; and what it says first."""

from pathlib import Path

import pytest

from deepbregman.commands.job import Inputs
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import load_recipe, override, to_toml
from deepbregman.errors import Notice
from deepbregman.objectives import OwnParts
from deepbregman.runs import Run
from deepbregman.training.notices import find_surprises

from ..conftest import save_photos


@pytest.fixture
def photos(tmp_path) -> Path:
    save_photos(tmp_path / "photos", 10, (9, 12))
    for name in ("a.heix", "b.HEIX", "notes", "._a.jpg", ".DS_Store"):
        (tmp_path / "photos" / name).touch()
    return tmp_path / "photos"


@pytest.fixture
def recipe(tmp_path, tiny_config, photos) -> Path:
    changes = {"data.source": str(photos), "training.batch_size": 5, "training.knn_every": 0}
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(override(tiny_config, changes)))
    return path


def test_one_command_starts_continues_and_tells_the_end(
    command, output, refusal, recipe, tmp_path, stop_after
):
    words = ("pretrain", recipe, "--run", tmp_path / "run")
    with stop_after(4):
        code, out, err = command(*words)
    assert code == 143
    assert "error" not in err  # it was asked to stop
    assert err.startswith("stopped by SIGTERM; everything is saved")
    # 20 images, 4 of them for testing: 16 fill three batches of 5, and one is left out.
    line, classes, unused = out.splitlines()[:3]
    two = "2 classes: cats, dogs; labels evaluate the encoder, they do not train it"
    way = "; if these sub-folders are not classes, put one image beside them: then it trains on all"
    assert classes == two + way
    for part in ("small", "16 images", "at 8 px", "3 epochs of 3 steps", "batch 5", "cpu"):
        assert part in line
    for part in (
        "4 images of the test split",
        "1 of each epoch, which fill no batch (other images each time)",
        "4 other files (2 .heix, 1 hidden .jpg, 1 no extension)",
    ):
        assert part in unused
    out = output(*words)
    assert "resuming small" in out
    assert two in out
    assert way not in out  # too late
    assert "it continues after step 4 of 9" in out
    metrics = Run(tmp_path / "run").metrics()
    assert [row["epoch"] for row in metrics] == [1, 2, 3]
    out = output(*words)
    assert f"run {tmp_path / 'run'} is complete: 3 epochs" in out
    assert Run(tmp_path / "run").metrics() == metrics
    err = refusal(*words, "--training.epochs", 4)
    assert "training.epochs is 3 there and 4 here" in err


def test_folders_of_splits_are_classes(output, recipe, tmp_path):
    for name in ("train", "test"):
        save_photos(tmp_path / "split" / name, 8, (9, 12))
    words = ("--data", tmp_path / "split", "--training.epochs", 1, "--run", tmp_path / "run")
    out = output("pretrain", recipe, *words)
    assert "2 classes: cats, dogs; labels evaluate the encoder, they do not train it\n" in out


def test_other_settings_cannot_be_resumed_with(refusal, tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(load_recipe("simclr")))
    err = refusal("pretrain", "--resume", tmp_path, "--training.epochs", 4)
    assert "--training.epochs is given" in err
    again = f"--encoder.weights {tmp_path} --training.epochs N --run NEW"
    assert f"`deepbregman pretrain {tmp_path}/config.toml {again}`" in err


@pytest.mark.parametrize("budget", [("--budget", "3m"), ("--budget=3m",)])
def test_a_budget_cannot_be_resumed_with(refusal, tmp_path, budget):
    (tmp_path / "config.toml").write_text(to_toml(load_recipe("simclr")))
    err = refusal("pretrain", "--resume", tmp_path, *budget)
    assert "--resume continues a run with the settings that it has, and --budget is given" in err


def test_what_surprises_is_said(output, recipe, tmp_path):
    words = ("--training.epochs", 1, "--optimiser.warmup-epochs", 1.0)
    out = output("pretrain", recipe, "--run", tmp_path / "run", *words)
    assert "ends while the learning rate still rises" in out
    assert load_recipe(str(tmp_path / "run" / "config.toml")).optimiser.warmup_epochs == 1.0
    changes = {"training.epochs": 1, "optimiser.warmup_epochs": 1.0}
    with pytest.warns(Notice, match="ends while the learning rate still rises") as told:
        pretrain(str(recipe), run=tmp_path / "python", changes=changes)
    assert [one.filename for one in told] == [__file__]  # the line of the user's program


@pytest.mark.parametrize(("schedule", "said"), [("cosine", True), ("constant", False)])
def test_a_falling_rate_is_not_stopped(schedule, said):
    changes = {"training.stop_when_saturated": True, "optimiser.schedule": schedule}
    words = list(find_surprises(override(load_recipe("digits"), changes), num_seen=1000))
    assert any("use --optimiser.schedule constant" in line for line in words) == said


def test_a_run_whose_health_is_not_measured_is_not_stopped():
    changes = {"training.stop_when_saturated": True, "optimiser.schedule": "constant"}
    for every in (0, 1):
        config = override(load_recipe("digits"), {**changes, "training.health_every": every})
        words = list(find_surprises(config, num_seen=1000))
        assert any("whose health is never measured" in line for line in words) == (not every)


@pytest.mark.parametrize(
    ("recipe", "changes", "num_seen", "said"),
    [
        ("best", {}, 4096, True),  # the last batch fills it, and no batch comes after
        ("best", {}, 4096 + 512, False),
        ("best", {"weak_views.num_views": 2}, 2048 + 512, False),
        ("best", {"divergence.weight": 0.0}, 1000, False),
        ("byol", {"divergence.weight": 1.0}, 2048, True),  # it teaches two views
        ("byol", {"divergence.weight": 1.0}, 2048 + 512, False),
        ("moco-v2plus", {"divergence.weight": 1.0}, 2048 + 512, False),
        ("moco-v2", {"divergence.weight": 1.0}, 4096, True),  # it teaches one of two views
        ("moco-v2", {"divergence.weight": 1.0}, 4096 + 512, False),
        ("instdisc", {"divergence.weight": 1.0}, 4096, True),  # an image has one vector
        ("paper", {}, 1000, False),
    ],
)
def test_a_bank_that_never_fills_is_said(recipe, changes, num_seen, said):
    config = override(load_recipe(recipe), changes)
    words = list(find_surprises(config, num_seen=num_seen))
    assert any("the divergence stays 0" in line for line in words) == said


def test_a_short_run_with_a_large_bank_says_that_it_never_fills(output, recipe, tmp_path):
    words = ("--divergence.source", "bank", "--divergence.compare", "match", "--teacher.momentum")
    out = output(
        *("pretrain", recipe, "--run", tmp_path / "run", "--training.epochs", 1, *words, 0.9),
        *("--weak-views.num-views", 1, "--divergence.num-subnetworks", 100000),
    )
    assert "the divergence stays 0" in out
    assert Run(tmp_path / "run").metrics()[-1]["divergence"] == 0.0


@pytest.mark.parametrize(("method", "count"), [("supervised", 13), ("simclr", 14)])
def test_no_image_stands_in_for_one_whose_label_is_learned(
    method, count, short_config, tmp_path, monkeypatch
):
    """Of many files, opening reads the headers alone, and that of this file is whole."""
    monkeypatch.setattr("deepbregman.data.listings.FULL_DECODE_LIMIT", 5)
    photos = save_photos(tmp_path / "train", 7, (40, 40)).parent
    save_photos(photos / "test", 1, (40, 40))
    broken = photos / "train" / "cats" / "3.png"
    broken.write_bytes(broken.read_bytes()[:-2000])
    changes = {"objective.name": method, "divergence.weight": 0.0, "data.skip_unreadable": True}
    config = override(short_config, {**changes, "data.source": str(photos)})
    train = Inputs(OwnParts()).open(config).train
    assert len(train) == len(train.labels) == count
