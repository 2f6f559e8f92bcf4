"""The index that a search keeps: it says what the networks say, and never what they said once."""

import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman import embed, search
from deepbregman.commands import search as command_module
from deepbregman.errors import Notice
from deepbregman.evaluation import feature_cache, retrieval, search_index
from deepbregman.evaluation.search_index import Answer, SearchIndex
from deepbregman.method.bregman import learned_divergence
from deepbregman.runs import Run
from deepbregman.training import checkpoints


@pytest.fixture
def photos(tmp_path) -> Path:
    """Images of two classes, one of them twice."""
    random = np.random.default_rng(0)
    for index in range(24):
        folder = tmp_path / "photos" / ("left", "right")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (9, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    shutil.copy(tmp_path / "photos" / "left" / "0.png", tmp_path / "photos" / "left" / "copy.png")
    return tmp_path / "photos"


@pytest.fixture
def run(copied_run) -> Run:
    return copied_run


def ask(run: Run, photos: Path, query: str = "left/0.png", **options: object) -> Answer:
    chosen = {"k": 24, **options}
    (answer,) = search(run, [query], data=str(photos), **chosen).answers  # type: ignore[arg-type]  # as given
    return answer


def list_hits(answer: Answer) -> dict[str, list[tuple[str, str | None, float]]]:
    return {
        measure: [(hit.image.name, hit.image.class_name, hit.value) for hit in hits]
        for measure, hits in answer.hits.items()
    }


@pytest.fixture
def loads(monkeypatch) -> list[object]:
    """The runs that are loaded from now on."""
    seen: list[object] = []
    load = command_module.open_images

    def count(run: object, *rest: object, **options: object) -> object:
        seen.append(run)
        return load(run, *rest, **options)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(command_module, "open_images", count)
    return seen


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_index_ranks_by_the_definitions(run, photos, tmp_path, loads, monkeypatch, smoothing):
    state = checkpoints.load(run.last_checkpoint)
    config = run.path / "config.toml"
    words = f"smoothing = {run.config.divergence.smoothing}"
    assert words in config.read_text()
    config.write_text(config.read_text().replace(words, f"smoothing = {smoothing}"))
    checkpoints.save(run.last_checkpoint, state)
    embed(run, tmp_path / "features.npz", data=str(photos))
    with np.load(tmp_path / "features.npz") as file:
        splits = ("train", "test")
        names = [str(name) for split in splits for name in file[f"{split}_names"]]
        arrays = [
            torch.from_numpy(np.concatenate([file[f"{split}_{part}"] for split in splits])).double()
            for part in ("features", "scores")
        ]
    row = names.index("left/0.png")
    unit = torch.nn.functional.normalize(arrays[0], dim=1)
    expected = {
        "cosine": unit @ unit[row],
        "divergence": learned_divergence(arrays[1][row : row + 1], arrays[1], smoothing)[0],
    }
    first, second = ask(run, photos), ask(run, photos)
    assert len(loads) == 1
    assert list_hits(first) == list_hits(second)
    for measure, values in expected.items():
        hits = second.hits[measure]
        assert {hit.image.name for hit in hits} == set(names) - {"left/0.png"}
        for hit in hits:
            value = float(values[names.index(hit.image.name)])
            assert hit.value == pytest.approx(value, abs=1e-5)
            assert hit.image.name.startswith(f"{hit.image.class_name}/")
        shown = [hit.value for hit in hits]
        assert shown == sorted(shown, reverse=measure == "cosine")
    assert second.hits["cosine"][0].image.name == "left/copy.png"
    monkeypatch.setattr(retrieval, "_make_index", lambda *_: None)
    shutil.rmtree(run.path / "features")
    for measure, hits in list_hits(ask(run, photos)).items():  # by the networks alone
        found = list_hits(second)[measure]
        assert [hit[:2] for hit in hits] == [hit[:2] for hit in found]
        assert [hit[2] for hit in hits] == pytest.approx([hit[2] for hit in found], abs=1e-6)


def test_the_second_search_loads_no_torch(run, photos, tmp_path):
    first = ask(run, photos, k=3)
    script = (
        "import json, sys\nfrom deepbregman.cli import main\n"
        "main(json.loads(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    words = ["search", str(run.path), "--data", str(photos), "-k", "3"]
    words += ["--query", str(photos / "left" / "0.png"), "--out", "sheet.png"]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert (done.returncode, done.stderr) == (0, "")
    for hits in first.hits.values():
        assert all(hit.image.name in done.stdout for hit in hits)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 3 * 112


def test_every_search_says_that_the_run_is_not_finished(run, photos):
    state = checkpoints.load(run.last_checkpoint)
    checkpoints.save(run.last_checkpoint, {**state, "epoch": 1.5})
    (run.path / "result.json").rename(run.path / "result")
    for _ in range(2):
        with pytest.warns(Notice, match=r"not finished: its encoder has seen 1.5 of 2 epochs"):
            ask(run, photos)
    (run.path / "result").rename(run.path / "result.json")
    ask(run, photos)  # a notice would be an error


@pytest.mark.parametrize("query", ["left/0.png", "train:3", "test:1", "right/5.png"])
def test_every_way_to_name_an_image(run, photos, loads, query):
    first = ask(run, photos, query, k=5)
    second = ask(run, photos, query, k=5)
    assert len(loads) == 1
    assert first.query.name == second.query.name
    assert list_hits(first) == list_hits(second)
    assert np.array_equal(first.query.pixels, second.query.pixels)
    assert second.query.pixels.shape == (9, 8, 3)
    assert ask(run, photos, str(photos / second.query.name)).query.name == second.query.name
    assert len(loads) == 1


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_an_accent_may_be_a_letter_of_its_own(run, photos, loads, forms):
    stored, typed = (unicodedata.normalize(form, "left/é.png") for form in forms)
    (photos / "left" / "0.png").rename(photos / stored)
    for _ in range(2):  # by the networks, then by the index
        assert ask(run, photos, typed).query.name == stored
    assert len(loads) == 1


def test_what_the_index_cannot_answer_takes_the_networks(run, photos, tmp_path, loads):
    ask(run, photos)
    shutil.copy(photos / "left" / "0.png", tmp_path / "elsewhere.png")
    found = ask(run, photos, str(tmp_path / "elsewhere.png"), k=2)
    assert {hit.image.name for hit in found.hits["cosine"]} == {"left/0.png", "left/copy.png"}
    ask(run, photos, seed=1)
    ask(run, photos, split="train", k=3)
    assert len(loads) == 4


def test_a_change_of_images_or_networks_makes_a_new_index(run, photos, loads):
    ask(run, photos)
    os.utime(photos / "left" / "0.png", (1, 1))
    ask(run, photos)
    assert len(loads) == 2
    Image.new("RGB", (8, 8), "red").save(photos / "left" / "new.png")
    names = {hit.image.name for hit in ask(run, photos, k=25).hits["cosine"]}
    assert "left/new.png" in names
    assert len(loads) == 3
    state = checkpoints.load(run.last_checkpoint)
    name = next(n for n, t in state["objective"].items() if t.ndim == 4 and "encoder" in n)
    state["objective"][name] = -state["objective"][name]
    before = list_hits(ask(run, photos))
    checkpoints.save(run.last_checkpoint, state)
    assert list_hits(ask(run, photos)) != before
    assert len(loads) == 4
    ask(run, photos)
    assert len(loads) == 4


def test_a_damaged_index_is_made_again(run, photos, loads):
    first = ask(run, photos)
    (path,) = (run.path / "features").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert list_hits(ask(run, photos)) == list_hits(first)
    assert list_hits(ask(run, photos)) == list_hits(first)
    assert len(loads) == 2


def test_an_index_that_is_too_large_is_not_kept(run, photos, monkeypatch):
    kept = list_hits(ask(run, photos))
    shutil.rmtree(run.path / "features")
    monkeypatch.setattr(search_index, "LARGEST_BYTES", 1000)
    monkeypatch.setattr(retrieval, "normalise_rows", None)  # nor is it made
    found = list_hits(ask(run, photos))
    assert not list((run.path / "features").glob("*.safetensors"))
    for measure, hits in found.items():
        assert [hit[:2] for hit in hits] == [hit[:2] for hit in kept[measure]]


def test_indices_have_the_room_of_the_features(run, photos, monkeypatch):
    ask(run, photos)
    (first,) = (run.path / "features").glob("*.safetensors")
    others = sum(path.stat().st_size for path in first.parent.glob("*.pt"))
    monkeypatch.setattr(feature_cache, "LARGEST_TOTAL", others + int(2.5 * first.stat().st_size))
    os.utime(first, (1, 1))
    for seed in (1, 2):
        ask(run, photos, seed=seed)
    assert len(list(first.parent.glob("*.safetensors"))) == 2
    assert not first.exists()


def test_an_index_of_another_user_is_read(run, photos, loads, monkeypatch):
    ask(run, photos)

    def refuse(*_: object) -> NoReturn:
        raise PermissionError

    monkeypatch.setattr(search_index.os, "utime", refuse)
    ask(run, photos)
    assert len(loads) == 1


def test_a_note_is_repeated(run, photos, loads):
    (photos / "left" / "broken.png").write_bytes(b"no image")
    for _ in range(2):
        with pytest.warns(Notice, match=r"left out 1 unreadable image \(left/broken.png\)"):
            ask(run, photos, skip_unreadable=True)
    assert len(loads) == 1


def test_ties_are_in_the_order_of_the_shuffle():
    names = [f"{index}.png" for index in range(4)]
    ones = np.ones((4, 1), np.float32)
    index = SearchIndex(
        {"train": 4},
        names,
        names,
        [None] * 4,
        8,
        "",
        np.array([2, 0, 3, 1]),
        {"cosine": search_index.Planes(ones, np.zeros(4, np.float32), ones)},
    )
    assert index.rank("cosine", 0, 2) == [(2, 1.0), (3, 1.0)]
