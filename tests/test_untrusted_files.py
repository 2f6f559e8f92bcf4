"""Runs and exports by somebody else: nothing in them runs, and errors have words."""

import contextlib
import csv
import io
import json
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.cli import main
from deepbregman.commands.data import check
from deepbregman.commands.evaluate import evaluate
from deepbregman.commands.export import export
from deepbregman.config import override, to_toml
from deepbregman.data import open_source
from deepbregman.errors import UserError
from deepbregman.exporting.loading import load_encoder
from deepbregman.objectives import build_run_encoder, build_step
from deepbregman.runs import Run
from deepbregman.training.checkpoints import collect_networks, save

DEEP = {
    "lists": "[" * 100_000 + "]" * 100_000,
    "objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "open": "[" * 1_000_000,
    "digits": '{"epoch": ' + "9" * 100_000 + "}",
    "exponent": '{"epoch": 1e999999}',
    "surrogate": '{"\\ud800": "\\udfff"}',
    "not UTF-8": "\udcff\udcfe",
}


class Bomb:
    """What it was pickled with runs when it is unpickled carelessly."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.fixture(scope="module")
def made(tmp_path_factory, short_config) -> Run:
    run = Run.create(tmp_path_factory.mktemp("made") / "run", short_config, {"versions": {}})
    save(run.last_checkpoint, {**collect_networks(build_step(short_config)), "epoch": 1})
    return run


@pytest.fixture
def run(made, tmp_path) -> Run:
    shutil.copytree(made.path, tmp_path / "run")
    return Run.open(tmp_path / "run")


@pytest.fixture
def tensors(made, tmp_path) -> Path:
    path = tmp_path / "e.safetensors"
    export(made, path, format="safetensors")
    return path


@pytest.fixture
def weights(made, tmp_path) -> Path:
    """An export as a .pth with its sidecar, by hand: the encoder is no ResNet."""
    encoder, config = build_run_encoder(made.config), made.config
    path = tmp_path / "e.pth"
    torch.save(encoder.trunk.state_dict(), path)
    record = {"version": 1, "format": "torchvision", "mean": [0.5] * 3, "std": [0.5] * 3}
    Path(f"{path}.json").write_text(json.dumps({**record, "config": to_toml(config)}))
    load_encoder(path)
    return path


def refusal(load: Callable[[], object], *parts: object) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        with pytest.raises(UserError) as caught:
            load()
    for part in parts:
        assert str(part) in str(caught.value)
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def pickled(content: Any, how: str) -> bytes:
    if not how.startswith("torch"):
        return pickle.dumps(content, protocol=int(how[-1]))
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=how == "torch")
    return buffer.getvalue()


HOW = ["torch", "torch, old format", "pickle 0", "pickle 2", "pickle 5"]


@pytest.mark.usefixtures("little_memory")
class TestPickles:
    """No payload runs, wherever it is put."""

    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("place", ["whole", "value", "nested", "key's neighbour"])
    def test_checkpoint(self, run, tmp_path, how, place):
        bomb = Bomb(tmp_path / "ran")
        content: Any = {
            "whole": bomb,
            "value": {"format": 1, "objective": bomb},
            "nested": {"format": 1, "objective": {"a": [(bomb,)]}, "epoch": 1},
            "key's neighbour": {"format": 1, "objective": {}, "epoch": bomb},
        }[place]
        run.last_checkpoint.write_bytes(pickled(content, how))
        refusal(lambda: load_encoder(run.path), run.last_checkpoint)
        assert not (tmp_path / "ran").exists()

    def test_checkpoint_with_a_true_checksum(self, run, tmp_path):
        save(run.last_checkpoint, {"objective": Bomb(tmp_path / "ran"), "epoch": 1})
        refusal(lambda: load_encoder(run.path), run.last_checkpoint)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("how", HOW)
    def test_exported_weights(self, weights, tmp_path, how):
        content = pickled({"conv1.weight": Bomb(tmp_path / "ran")}, how)
        weights.write_bytes(content)
        refusal(lambda: load_encoder(weights), weights)
        assert not (tmp_path / "ran").exists()

    def test_pickle_under_the_name_of_safetensors(self, tensors, tmp_path):
        tensors.write_bytes(pickled({"x": Bomb(tmp_path / "ran")}, "torch"))
        refusal(lambda: load_encoder(tensors), tensors)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("name", ["cifar10", "cifar100"])
    def test_published_data_sets_whose_files_are_pickles(self, tmp_path, name):
        """They are unpickled, by torchvision, only where their checksum is the published one."""
        bomb = pickle.dumps(Bomb(tmp_path / "ran"))
        places = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
        folder = tmp_path / places[name]
        folder.mkdir()
        batches = [f"data_batch_{number}" for number in range(1, 6)]
        for file in (*batches, "test_batch", "batches.meta", "train", "test", "meta"):
            (folder / file).write_bytes(bomb)
        refusal(
            lambda: open_source(name, root=tmp_path, image_size=32, download=False), str(folder)
        )
        check(name, root=tmp_path)
        assert not (tmp_path / "ran").exists()

    def test_the_bomb_is_a_live_one(self, tmp_path):
        for index, how in enumerate(HOW):
            target = tmp_path / str(index)
            content = io.BytesIO(pickled(Bomb(target), how))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if how.startswith("torch"):
                    torch.load(content, weights_only=False)
                else:
                    pickle.load(content)
            assert target.exists()


@pytest.mark.usefixtures("little_memory")
class TestExportedWeights:
    @pytest.mark.parametrize(
        "content",
        [5, None, [], {"conv1.weight": 5}, {1: torch.zeros(1)}, {"a": {"b": torch.zeros(1)}}],
        ids=str,
    )
    def test_no_state(self, weights, content):
        known = torch.load(weights, weights_only=True)
        if isinstance(content, dict):
            content = {**known, **{next(iter(known)): next(iter(content.values()))}, **content}
        torch.save(content, weights)
        refusal(lambda: load_encoder(weights), weights)

    def test_parts_that_unpack_to_far_more(self, weights):
        """400 MB of zeros in 2 MB, in the parts of a file that torch would unpack."""
        known = io.BytesIO(weights.read_bytes())
        with (
            zipfile.ZipFile(known) as old,
            zipfile.ZipFile(weights, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
        ):
            for part in old.namelist():
                with new.open(part, "w") as stream:
                    stream.write(old.read(part))
                    for _ in range(40 * part.endswith("data/0")):
                        stream.write(bytes(10_000_000))
        assert weights.stat().st_size < 4_000_000
        refusal(lambda: load_encoder(weights), weights, "larger than the file")

    def test_any_bytes_changed(self, weights):
        whole, chance, refused = weights.read_bytes(), random.Random(0), 0
        pickle_at = whole.index(b"data.pkl") + 8
        for turn in range(80):
            content = bytearray(whole)
            end = pickle_at + 2000 if turn % 2 else len(content)
            content[chance.randrange(pickle_at if turn % 2 else 0, end)] = chance.randrange(256)
            weights.write_bytes(content)
            try:
                load_encoder(weights)
            except UserError as error:
                assert str(weights) in str(error)  # noqa: PT017  # both outcomes are right
                refused += 1
        assert 0 < refused < 80

    @pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
    def test_sidecar(self, weights, text):
        sidecar = Path(f"{weights}.json")
        sidecar.write_bytes(text.encode(errors="surrogateescape"))
        refusal(lambda: load_encoder(weights), weights.name)

    @pytest.mark.parametrize(
        "change",
        [
            {"mean": [0.5] * 1000},
            {"mean": "../../x"},
            {"mean": [[1, 2], [3]]},
            {"std": None},
            {"std": {"a": 1}},
            {"mean": [10**400] * 3},
            {"config": 5},
            {"config": "\x00"},
            {"config": "[encoder]\nname = '../../x'"},
            {"config": "[encoder]\nname = 'timm:../../x'"},
            {"config": "[encoder]\nname = 'timm:hf-hub:stranger/model'"},
            {"config": "[encoder]\nname = 'timm:local-dir:/tmp'"},
            {"config": "[encoder]\nname = 'os.system'"},
            {"config": "[encoder]\nname = '!!python/object/apply:os.system'"},
            {"config": "[" * 10_000},
            {"version": [1]},
            {"format": "../../x"},
            {"format": ["torchvision"]},
            {"format": {}},
        ],
        ids=lambda change: str(change)[:50],
    )
    def test_fields_of_the_sidecar_are_data(self, weights, change):
        sidecar = Path(f"{weights}.json")
        record = json.loads(sidecar.read_text())
        sidecar.write_text(json.dumps({**record, **change}))
        before = sorted(weights.parent.rglob("*"))
        refusal(lambda: load_encoder(weights))
        assert sorted(weights.parent.rglob("*")) == before

    def test_sidecar_takes_no_path_from_its_names(self, weights):
        """What it says about files is never opened: a name beyond the fields changes nothing."""
        sidecar = Path(f"{weights}.json")
        record = json.loads(sidecar.read_text())
        for name in ("../../x", "/etc/passwd", "file", "weights", "__class__", "__reduce__"):
            sidecar.write_text(json.dumps({**record, name: "../../../etc/passwd"}))
            load_encoder(weights)


def header(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(table: Any, data: bytes, length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.usefixtures("little_memory")
class TestSafetensors:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda table, data: with_header(table, data, 2**40),
            lambda table, data: with_header(
                {**table, "mean": {**table["mean"], "data_offsets": [0, 2**40]}}, data
            ),
            lambda table, data: with_header({**table, "mean": {**table["mean"], "dtype": 5}}, data),
            lambda table, data: with_header(b"[]", b""),
            lambda table, data: with_header(table, data)[:9],
            lambda table, data: b"",
        ],
        ids=["length", "offsets", "type", "no table", "cut short", "empty"],
    )
    def test_what_the_library_refuses_is_said_in_words(self, tensors, damage):
        tensors.write_bytes(damage(*header(tensors.read_bytes())))
        refusal(lambda: load_encoder(tensors), tensors)

    @pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
    def test_metadata(self, tensors, text):
        table, data = header(tensors.read_bytes())
        table["__metadata__"]["deepbregman"] = text.replace("\udcff\udcfe", "\ufffd")
        tensors.write_bytes(with_header(table, data))
        refusal(lambda: load_encoder(tensors), tensors)

    def test_any_bytes_changed(self, tensors):
        whole, chance, refused = tensors.read_bytes(), random.Random(0), 0
        (length,) = struct.unpack("<Q", whole[:8])
        for _ in range(80):
            content = bytearray(whole)
            content[chance.randrange(8 + length)] = chance.randrange(256)
            tensors.write_bytes(content)
            try:
                load_encoder(tensors)
            except UserError as error:
                assert str(tensors) in str(error)  # noqa: PT017  # both outcomes are right
                refused += 1
        assert 40 < refused < 80


class TestRunFolder:
    @pytest.mark.parametrize("name", ["result.json", "provenance.json"])
    @pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
    def test_records(self, run, name, text):
        path = run.path / name
        path.write_bytes(text.encode(errors="surrogateescape"))
        read = run.result if name == "result.json" else run.provenance
        try:
            read()
        except UserError as error:
            assert str(path) in str(error)  # noqa: PT017  # some of it is valid JSON

    @pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
    @pytest.mark.parametrize("before", ["", '{"epoch": 1}\n'])
    def test_metrics(self, run, text, before):
        path = run.path / "metrics.jsonl"
        path.write_bytes((before + text).encode(errors="surrogateescape"))
        try:
            run.truncate_metrics(3)
            kept = run.metrics()
        except UserError as error:
            assert str(path) in str(error)  # noqa: PT017  # either outcome is right
        else:
            assert kept[:1] == ([{"epoch": 1}] if before else [])

    @pytest.mark.parametrize("epoch", ['"1"', "null", "[1]", "{}", "true"])
    def test_epoch_that_is_no_number(self, run, epoch):
        (run.path / "metrics.jsonl").write_text(f'{{"epoch": {epoch}}}\n')
        refusal(lambda: run.truncate_metrics(3), run.path / "metrics.jsonl")

    @pytest.mark.parametrize(
        "rows", [5, {"a": 1}, [5], [None], [[]], [{}], [{"protocol": ["knn"], "epoch": 1}], "text"]
    )
    def test_evaluations_that_are_no_rows(self, run, rows):
        (run.path / "result.json").write_text(json.dumps({"evaluations": rows}))
        refusal(run.evaluations, run.path / "result.json")

    @pytest.mark.parametrize("name", [".lock", ".records.lock", "metrics.jsonl"])
    @pytest.mark.parametrize("target", ["precious", "absent"])
    def test_nothing_is_written_through_links(self, command, run, tmp_path, name, target):
        (tmp_path / "precious").write_text("x")
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(tmp_path / target)
        code, _, err = command("pretrain", "--resume", run.path)
        assert code == 2
        assert f"{run.path / name} is a symbolic link" in err
        assert (tmp_path / "precious").read_text() == "x"
        assert not (tmp_path / "absent").exists()
        if name == ".records.lock":
            refusal(lambda: run.add_result(knn=1), "symbolic link")
            assert not (tmp_path / "absent").exists()

    @pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
    def test_nothing_is_written_into_linked_folders(self, command, run, tmp_path, name):
        (tmp_path / "theirs").mkdir()
        shutil.rmtree(run.path / name, ignore_errors=True)
        (run.path / name).symlink_to(tmp_path / "theirs")
        code, _, err = command("pretrain", "--resume", run.path)
        assert code == 2
        assert f"{run.path / name} is a symbolic link" in err
        assert list((tmp_path / "theirs").iterdir()) == []

    @pytest.mark.parametrize("name", [".records.lock", "detection", "detection/fpn-run-seed0"])
    def test_links_are_refused_before_an_evaluation_computes(self, command, run, tmp_path, name):
        (tmp_path / "theirs").mkdir()
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(tmp_path / "theirs")
        (run.path / "checkpoints" / "last.pt").unlink()  # which is read before anything is computed
        words = ["--protocol", "detect", "--data", "voc"] if "detection" in name else []
        code, _, err = command("evaluate", run.path, *words)
        assert code == 2
        assert f"{run.path / name} is a symbolic link" in err
        assert list((tmp_path / "theirs").iterdir()) == []

    def test_words_in_the_configuration_stay_words(self, run, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        code = "__import__('os').mkdir('ran')"
        for field in ("data.source", "data.root"):
            config = override(run.config, {field: code})
            (run.path / "config.toml").write_text(to_toml(config))
            load_encoder(run.path)
        text = (run.path / "config.toml").read_text()
        for name in (code, "os.system", "torch:nn.Identity", "timm:" + code, "timm:hf-hub:a/b"):
            changed = text.replace('name = "small"', f'name = "{name}"')
            assert changed != text
            (run.path / "config.toml").write_text(changed)
            refusal(lambda: load_encoder(run.path))
        assert not (tmp_path / "ran").exists()

    def test_transfer_to_the_home_of_nobody(self, run):
        """It compares places before it opens any."""
        data = "~nobody-by-this-name"
        refusal(lambda: evaluate(run, protocols=("transfer",), data=data), data, "no user")

    @pytest.mark.parametrize("place", ["~nobody-by-this-name/x", "a\0b", "x" * 5000, "\udce9"])
    def test_places_that_cannot_be(self, place, capsys, tmp_path):
        commands = [
            ["pretrain", "digits", "--data", place, "--run", str(tmp_path / "r")],
            ["pretrain", "digits", "--data", "cifar10", "--data.root", place],
        ]
        if "\0" not in place:  # which a file can hold, but no argument of a process
            commands += [
                ["data", "check", place],
                ["data", "check", "cifar10", "--root", place],
                ["data", "prepare", "cifar10", "--root", place, "--no-download"],
                ["evaluate", place],
            ]
        for words in commands:
            with pytest.raises(SystemExit) as caught:
                main(words)
            assert caught.value.code == 2
            assert capsys.readouterr().err.startswith("error: ")


NAMES = [b"a\x1b[2Jb", b"latin-\xe9", b"new\nline", "\u202egnp".encode(), b"[bold]x", b"-x"]


class TestNames:
    """Files and classes whose names are no text, or would move the cursor of a terminal."""

    @pytest.fixture
    def photos(self, tmp_path) -> Path:
        chance = np.random.default_rng(0)
        for label in NAMES[:2]:
            folder = tmp_path / "photos" / os.fsdecode(label)
            folder.mkdir(parents=True)
            for name in NAMES:
                pixels = chance.integers(0, 256, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{os.fsdecode(name)}.png")
        return tmp_path / "photos"

    def test_every_verb_that_names_files(self, run, photos, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for words in (
            ["evaluate", "run", "--protocol", "knn", "--data", "photos"],
            ["embed", "run", "--out", "f.npz", "--data", "photos"],
            [
                *("search", "run", "--data", "photos", "--query", "train:0"),
                *("--k", "5", "--out", "s.png"),
            ],
            ["cluster", "run", "--data", "photos", "--seeds", "1", "--out", "c.csv"],
            ["data", "check", "photos"],
            ["data", "prepare", "photos", "--cache", "cache.npz"],
            ["search", "run", "--data", "cache.npz", "--query", "test:0", "--k", "5"],
        ):
            out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                try:
                    main(words)
                    code: object = 0
                except SystemExit as stop:
                    code = stop.code
            out.flush()
            printed = out.buffer.getvalue()  # type: ignore[attr-defined]  # a wrapper's
            assert code == 0, (words, printed)
            assert b"\x1b" not in printed
        table = Path("c.csv").read_bytes()
        with open("c.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
            rows = list(csv.reader(file))
        found = {os.fsencode(row[0]) for row in rows}
        expected = {b"%b/%b.png" % (label, name) for label in NAMES[:2] for name in NAMES}
        assert found >= expected, table
