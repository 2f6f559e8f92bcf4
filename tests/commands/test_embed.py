"""Features to a file: the run's own splits, every part aligned."""

from pathlib import Path
from typing import IO

import numpy as np
import pytest

from deepbregman import files
from deepbregman.commands.embed import embed
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import override
from deepbregman.data.opening import open_data
from deepbregman.errors import UserError

from ..conftest import save_photos


@pytest.fixture
def photos(tmp_path) -> Path:
    return save_photos(tmp_path / "photos", 20, (10, 12))


@pytest.mark.parametrize("seed", [0, 1])
def test_test_features_are_of_images_that_were_not_pretrained_on(
    short_config, photos, tmp_path, seed
):
    changes = {"seed": seed, "training.batch_size": 8, "training.epochs": 1}
    config = override(short_config, {**changes, "data.source": str(photos)})
    run = pretrain(config, run=tmp_path / "run")
    embed(run.path, tmp_path / "f.npz")
    source = open_data(config)
    with np.load(tmp_path / "f.npz") as arrays:
        assert set(arrays["test_names"]) == set(source.test.names)
        assert not set(arrays["test_names"]) & set(source.train.names)
        assert len(arrays["train_features"]) == len(arrays["train_labels"]) == 32


def test_several_seeds_share_their_test_split(short_config, photos):
    splits = [
        open_data(override(short_config, {"seed": seed, "data.source": str(photos)})).test
        for seed in (0, 1)
    ]
    assert splits[0] is not None
    assert splits[1] is not None
    assert splits[0].names == splits[1].names


def test_of_two_processes_that_write_one_file_the_second_says_so(short_run, tmp_path, monkeypatch):
    out, finish = tmp_path / "f.npz", files._finish

    def finish_late(file: IO[bytes]) -> None:
        out.write_text("theirs")
        finish(file)

    monkeypatch.setattr(files, "_finish", finish_late)
    with pytest.raises(UserError, match="another process has written it"):
        embed(short_run, out)
    assert out.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["f.npz"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("f.csv", "with that ending"), ("nowhere/f.npz", "does not exist"), ("old.npz", "exists")],
)
def test_bad_places_are_refused(short_run, tmp_path, name, words):
    (tmp_path / "old.npz").write_text("precious")
    with pytest.raises(UserError, match=words):
        embed(short_run.path, tmp_path / name)
    assert (tmp_path / "old.npz").read_text() == "precious"
