"""Features kept beside a run: read when they are right, computed anew when anything has changed."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.config import override
from deepbregman.data import Split
from deepbregman.data.images import FileImages
from deepbregman.data.own import own_data
from deepbregman.errors import UserError
from deepbregman.evaluation import feature_cache
from deepbregman.evaluation import features as features_module
from deepbregman.evaluation.features import Features, SplitFeatures
from deepbregman.evaluation.inputs import LoadedRun, load_run
from deepbregman.training import checkpoints


@pytest.fixture
def loaded(copied_run) -> LoadedRun:
    return load_run(copied_run, "cpu")


@pytest.fixture
def split(tmp_path) -> Split:
    random = np.random.default_rng(0)
    paths = [tmp_path / f"{index}.png" for index in range(5)]
    for path in paths:
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return Split(FileImages(tuple(paths), 8))


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The sizes of the sets of images that go through the networks."""
    seen: list[int] = []
    compute = features_module.compute_features

    def count(model: object, batches: object, *rest: object) -> Features:
        seen.append(batches.num_images)
        return compute(model, batches, *rest)

    monkeypatch.setattr(features_module, "compute_features", count)
    return seen


def look(loaded: LoadedRun, split: Split) -> Features:
    return SplitFeatures(
        loaded.model, loaded.config, split, loaded.device, cache=loaded.cache
    ).features


def files(loaded: LoadedRun) -> list[Path]:
    return sorted((loaded.run.path / "features").iterdir())


def test_the_second_time_they_are_read_and_the_same(loaded, split, passes):
    first = look(loaded, split)
    second = look(load_run(loaded.run, "cpu"), split)
    assert passes == [5]
    assert first.scores is not None
    assert second.scores is not None
    assert torch.equal(first.representation, second.representation)
    assert torch.equal(first.scores, second.scores)
    assert len(files(loaded)) == 1


def write_other_pixels(loaded: LoadedRun, split: Split) -> None:
    Image.new("RGB", (8, 8), "red").save(split.images.paths[2])


def train_on(loaded: LoadedRun, split: Split) -> None:
    state = checkpoints.load(loaded.run.last_checkpoint)
    name = next(name for name in state["objective"] if name.startswith("encoder"))
    state["objective"][name] = state["objective"][name] + 1.0
    checkpoints.save(loaded.run.last_checkpoint, state)


def damage(loaded: LoadedRun, split: Split) -> None:
    (path,) = files(loaded)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def cut_short(loaded: LoadedRun, split: Split) -> None:
    (path,) = files(loaded)
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("change", [write_other_pixels, train_on, damage, cut_short])
def test_whatever_changes_they_are_computed_anew(loaded, split, passes, change):
    look(loaded, split)
    change(loaded, split)
    after = look(load_run(loaded.run, "cpu"), split)
    again = look(load_run(loaded.run, "cpu"), split)
    assert passes == [5, 5]
    assert torch.equal(after.representation, again.representation)


def test_those_of_whole_images_are_not_taken_for_those_of_patches(loaded, split, passes):
    """An encoder that has learned to cut images has the same weights as before."""
    look(loaded, split)
    model = loaded.model
    model.encoder.patch = 4
    cache = feature_cache.FeatureCache.of(loaded.run.path, model, 8, loaded.device)
    assert cache.read(split.images) is None
    SplitFeatures(model, loaded.config, split, loaded.device, cache=cache).features  # noqa: B018
    assert passes == [5, 5]
    assert cache.read(split.images) is not None


def test_those_of_another_user_are_read(loaded, split, passes, monkeypatch):
    """A run that one may read, but not change: the time of its files stays as it is."""
    look(loaded, split)
    cache = loaded.cache
    kept = cache.keep("map", lambda: torch.zeros(2), b"a part")

    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} belongs to another user")

    monkeypatch.setattr(os, "utime", refuse)
    look(loaded, split)
    assert passes == [5]
    assert torch.equal(cache.keep("map", lambda: torch.ones(2), b"a part"), kept)
    assert cache.keep("map", lambda: torch.ones(2), b"another part").all()


def test_those_of_other_weights_are_deleted(loaded, split):
    look(loaded, split)
    (before,) = files(loaded)
    train_on(loaded, split)
    look(load_run(loaded.run, "cpu"), split)
    (after,) = files(loaded)
    assert before != after


def test_the_least_used_make_room(loaded, split, monkeypatch):
    parts = [split.select(torch.tensor([index])) for index in range(3)]
    look(loaded, parts[0])
    (one,) = files(loaded)
    monkeypatch.setattr(feature_cache, "LARGEST_TOTAL", int(2.5 * one.stat().st_size))
    look(loaded, parts[1])
    for path in files(loaded):
        os.utime(path, (1e9, 1e9))
    look(loaded, parts[0])  # used just now
    look(loaded, parts[2])
    left = files(loaded)
    assert len(left) == 2
    assert one in left
    monkeypatch.setattr(feature_cache, "LARGEST_TOTAL", 10)
    look(loaded, parts[1])  # too large to be kept
    assert files(loaded) == left


def test_what_a_killed_process_left_is_deleted(loaded, split):
    look(loaded, split.select(torch.tensor([0])))
    (path,) = files(loaded)
    old, new = (path.with_name(f".{path.name}.{number:08x}") for number in (1, 2))
    for left in (old, new):
        left.write_bytes(b"half")
    os.utime(old, (1e9, 1e9))
    look(loaded, split)
    assert not old.exists()
    assert new.exists()  # another process may be writing it


def test_two_writers_and_a_reader_agree(loaded, split):
    expected = look(loaded, split).representation
    cache = loaded.cache
    errors: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(10):
                cache.write(split.images, {"representation": expected})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = cache.read(split.images)
        assert torch.equal(found["representation"], expected)
    assert errors == []


def test_nothing_is_kept_through_a_link_or_beside_a_file(loaded, split, tmp_path, passes):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (loaded.run.path / "features").symlink_to(elsewhere)
    with pytest.raises(UserError, match="symbolic link"):
        look(loaded, split)
    assert list(elsewhere.iterdir()) == []
    (loaded.run.path / "features").unlink()
    (loaded.run.path / "features").write_text("a file in its place")
    look(load_run(loaded.run, "cpu"), split)
    assert (loaded.run.path / "features").read_text() == "a file in its place"
    assert passes == [5]


def test_nothing_is_kept_of_a_dataset_of_the_program(loaded):
    """To know that its images are the same, all would have to be decoded, one after the other."""
    pixels = torch.randint(0, 256, (5, 8, 8, 3), dtype=torch.uint8)
    reads: list[int] = []

    class Pictures:
        def __len__(self) -> int:
            return len(pixels)

        def __getitem__(self, index: int) -> torch.Tensor:
            if index >= len(self):
                raise IndexError
            reads.append(index)
            return pixels[index]

    split = own_data(Pictures(), image_size=8).train
    reads.clear()
    look(loaded, split)
    assert sorted(reads) == [0, 1, 2, 3, 4]
    assert not (loaded.run.path / "features").exists()


def test_nothing_is_kept_of_an_encoder_whose_code_may_change(loaded):
    assert loaded.cache is not None
    own = replace(loaded, config=override(loaded.config, {"encoder.name": "custom"}))
    assert own.cache is None
