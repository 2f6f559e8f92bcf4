import hashlib
import io
import math
import os
import random
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deepbregman import load_encoder
from deepbregman.config import Config, load_recipe, override
from deepbregman.errors import UserError
from deepbregman.method.networks import Encoder
from deepbregman.objectives import build_step
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.checkpoints import (
    FORMAT,
    DamagedCheckpoint,
    collect_networks,
    load,
    load_strictly,
    load_trained,
    require,
)
from deepbregman.training.checkpoints import save as save_checkpoint

TINY = {
    "encoder.projection_hidden": 16,
    "encoder.embedding": 8,
    "divergence.num_subnetworks": 5,
    "divergence.hidden": 4,
}


@pytest.fixture
def state() -> dict[str, Any]:
    return {
        "objective": {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(2).bfloat16()},
        "optimiser": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        "step": 7,
        "seconds": 1.5,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(type(a) is type(b) and a == b)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# Writing


def test_round_trip(tmp_path, state):
    path = tmp_path / "last.pt"
    save_checkpoint(path, state)
    assert same(load(path), {"format": FORMAT, **state})
    assert os.listdir(tmp_path) == ["last.pt"]


def test_saving_again_replaces(tmp_path, state):
    path = tmp_path / "last.pt"
    save_checkpoint(path, state)
    save_checkpoint(path, {**state, "step": 8})
    assert load(path)["step"] == 8


@pytest.mark.parametrize("target", ["os.fsync", "pathlib.Path.replace", "torch.save"])
def test_failing_write_leaves_the_old_checkpoint(tmp_path, state, monkeypatch, target):
    path = tmp_path / "last.pt"
    save_checkpoint(path, state)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(target, refuse)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(path, {**state, "step": 8})
    assert load(path)["step"] == 7
    assert os.listdir(tmp_path) == ["last.pt"]


def test_full_disk_is_an_os_error_and_leaves_the_old_checkpoint(tmp_path, state):
    """The kernel takes the first part of a file and refuses the rest, as on a disk that fills."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(path, {**state, "large": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load(path)["step"] == 7
    assert os.listdir(tmp_path) == ["last.pt"]


# Reading


def test_missing(tmp_path):
    assert "does not exist" in refusal(tmp_path / "last.pt")


def test_folder_in_its_place(tmp_path):
    refusal(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"PK\x03\x04 a file of torch.save",
    ],
)
def test_files_that_are_no_checkpoint(tmp_path, text):
    path = tmp_path / "last.pt"
    path.write_bytes(text)
    assert "damaged or comes from another program" in refusal(path)


def test_a_later_format(tmp_path, state, monkeypatch):
    path = tmp_path / "last.pt"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "FORMAT", 5)
        save_checkpoint(path, state)
    assert "has checkpoint format 5, this version reads 4" in refusal(path)
    with pytest.raises(UserError) as caught:
        load(path)
    assert not isinstance(caught.value, DamagedCheckpoint)  # an older one must not take its place


def repack(content: bytes) -> bytes:
    """Compress the parts of a file of ``torch.save``, which never does so."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("state", "change"),
    [([1, 2], bytes), (3, bytes), ({"format": FORMAT, "x": torch.zeros(10**6)}, repack)],
)
def test_what_another_program_has_put_behind_a_right_first_line(tmp_path, state, change):
    file = io.BytesIO()
    torch.save(state, file)
    content, title = change(file.getvalue()), b"deepbregman checkpoint 4 sha256 "
    digest = hashlib.sha256(title + content).hexdigest().encode()
    (tmp_path / "last.pt").write_bytes(title + digest + b"\n" + content)
    assert "comes from another program" in refusal(tmp_path / "last.pt")


def test_a_fingerprint_is_that_of_names_values_and_patches(config):
    def fingerprint(change: Callable[[Encoder], object]) -> str:
        torch.manual_seed(0)
        encoder = build_step(config).objective.encoder
        change(encoder)
        return checkpoints.fingerprint_weights(encoder)

    def rename(encoder: Encoder) -> None:
        encoder.trunk = nn.Sequential(encoder.trunk)

    def move(encoder: Encoder) -> None:
        encoder.to(memory_format=torch.channels_last)

    plain = fingerprint(lambda encoder: None)
    assert fingerprint(move) == plain
    others = [
        fingerprint(rename),
        fingerprint(lambda encoder: setattr(encoder, "patch", 4)),
        fingerprint(lambda encoder: next(encoder.parameters()).data.neg_()),
    ]
    assert len({plain, *others}) == 4


# Damage


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("damage") / "last.pt"
    save_checkpoint(path, {"step": 1, "model": {"weight": torch.arange(4.0)}})
    return path, path.read_bytes()


def is_found(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_the_checksum_is_that_of_other_programs(written):
    """What follows the first line is ``torch.save``'s, should this package not be at hand."""
    head, content = written[1].split(b"\n", 1)
    title, digest = head[:-64], head[-64:]
    assert title == b"deepbregman checkpoint 4 sha256 "
    assert hashlib.sha256(title + content).hexdigest().encode() == digest
    assert torch.load(io.BytesIO(content), weights_only=True)["step"] == 1


def test_any_flipped_bit_is_found(written):
    path, whole = written
    generator = random.Random(0)
    for place in (*range(100), *generator.sample(range(100, len(whole)), 300)):
        content = bytearray(whole)
        content[place] ^= 1 << generator.randrange(8)
        is_found(path, bytes(content))


def test_any_cut_is_found(written):
    path, whole = written
    for size in (*range(0, len(whole), 9), len(whole) - 1):
        is_found(path, whole[:size])


@given(data=st.data())
def test_any_change_is_found(written, data):
    """A stretch anywhere replaced by anything: lost, doubled, zeroed, inserted, appended."""
    path, whole = written
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    new = data.draw(
        st.binary(max_size=80)
        | st.just(bytes(stop - start))
        | st.just(whole[start:stop] * 2)
        | st.just(whole)
    )
    changed = whole[:start] + new + whole[stop:]
    if changed != whole:
        is_found(path, changed)


# What must be in it


def test_require_names_the_parts_that_are_missing():
    require({"model": {}, "step": 0, "more": 1}, ("model", "step"), "the origin")
    require({}, (), "the origin")
    with pytest.raises(UserError, match=r"^the origin has no loss, sums: ") as caught:
        require({"model": {}, "step": 0}, ("model", "loss", "step", "sums"), "the origin")
    assert "deepbregman pretrain" in str(caught.value)


# Loading into networks


def test_load_strictly_loads():
    module = nn.BatchNorm1d(3)
    state = {name: torch.full_like(tensor, 2) for name, tensor in module.state_dict().items()}
    load_strictly(module, state, "origin")
    assert same(dict(module.state_dict()), state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("bias"), "bias is missing"),
        (lambda s: s.update(extra=torch.zeros(1)), "extra is not expected"),
        (
            lambda s: s.update(weight=torch.zeros(3, 2)),
            "weight has shape (3, 2), expected (2, 3)",
        ),
        (lambda s: s.update(bias=torch.zeros(())), "bias has shape (), expected (2,)"),
        (lambda s: s.update(bias=torch.zeros(1)), "bias has shape (1,), expected (2,)"),
    ],
)
def test_load_strictly_names_what_does_not_fit(change, words):
    module = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    change(state)
    with pytest.raises(UserError) as caught:
        load_strictly(module, state, "the origin")
    assert str(caught.value).startswith("the origin does not fit")
    assert words in str(caught.value)
    assert same(dict(module.state_dict()), before)


def test_load_strictly_names_all_kinds_at_once_and_counts_the_rest():
    module = nn.Linear(3, 2)
    state = {"weight": torch.zeros(1), "extra": torch.zeros(1)}
    with pytest.raises(UserError) as caught:
        load_strictly(module, state, "origin")
    for words in ("bias is missing", "extra is not expected", "weight has shape (1,)"):
        assert words in str(caught.value)
    assert "more" not in str(caught.value)
    many = {f"extra{i}": torch.zeros(1) for i in range(7)}
    with pytest.raises(UserError, match=r"extra3 is not expected; and 3 more;"):
        load_strictly(module, {**module.state_dict(), **many}, "origin")


@pytest.fixture(scope="module")
def config() -> Config:
    return override(load_recipe("digits"), TINY)


@pytest.fixture
def run(tmp_path, config) -> Run:
    run = Run.create(tmp_path / "run", config, {})
    torch.manual_seed(0)
    step = build_step(config, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_checkpoint(run.last_checkpoint, {**collect_networks(step), "epoch": 2.5})
    return run


def test_load_model_is_what_was_saved(run, config):
    saved = load(run.last_checkpoint)
    for source in (run, run.path, str(run.path)):
        model, found, epoch, _ = load_trained(source)
        assert (found, epoch) == (config, 2.5)
        for name, part in (("encoder", model.encoder), ("projection", model.projection)):
            of_part = {f"{name}.{key}": value for key, value in part.state_dict().items()}
            assert same(of_part, {k: v for k, v in saved["objective"].items() if k in of_part})
        for key, value in model.divergence_network.state_dict().items():
            assert same(value, saved["divergence"][f"network.{key}"])
        assert not any(part.training for part in model.modules())


@pytest.mark.parametrize("recipe", ["instdisc", "supervised"])
def test_networks_as_large_as_the_data_are_loaded(tmp_path, recipe):
    """A memory of every image, and a layer with a row for each class."""
    config = override(load_recipe(recipe), {"encoder.name": "small", "encoder.embedding": 8})
    counts = {"num_images": 11, "num_classes": 3}
    run, step = Run.create(tmp_path / "run", config, {}), build_step(config, **counts)
    save_checkpoint(run.last_checkpoint, {**collect_networks(step), "epoch": 1.0, **counts})
    expected = step.model.encoder.state_dict()
    assert same(dict(load_trained(run).model.encoder.state_dict()), dict(expected))


def test_no_views_of_ones_own_are_needed_to_evaluate(tmp_path, config):
    own = override(config, {"views.custom": True})
    run = Run.create(tmp_path / "run", own, {})
    save_checkpoint(run.last_checkpoint, {**collect_networks(build_step(config)), "epoch": 1.0})
    assert load_trained(run).config == own


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_the_parts_of_a_method_of_ones_own_that_the_settings_made(tmp_path, config, weight):
    """Whatever the method is: its projection, and the divergence behind it."""
    plain = override(config, {"divergence.weight": weight, "divergence.sigma": 0.5})
    own = override(plain, {"objective.name": "custom"})
    run, step = Run.create(tmp_path / "run", own, {}), build_step(plain)
    for parameter in step.parameters():
        parameter.data.add_(0.5)  # as none begins
    saved = collect_networks(step)
    saved["objective"]["a_part_of_mine"] = torch.zeros(1)
    save_checkpoint(run.last_checkpoint, {**saved, "epoch": 1.0})
    found, expected = load_trained(run).model, step.model
    for name in ("encoder", "projection", "divergence_network"):
        if (part := getattr(expected, name)) is None:
            assert (name, weight, getattr(found, name)) == ("divergence_network", 0.0, None)
        else:
            assert same(dict(getattr(found, name).state_dict()), dict(part.state_dict()))
    assert (found.sigma == 0.5) == (weight > 0.0)
    saved["objective"]["projection.0.weight"] = torch.zeros(3, 3)  # of another kind
    save_checkpoint(run.last_checkpoint, {**saved, "epoch": 1.0})
    other = load_trained(run).model
    assert (len(other.projection), other.divergence_network) == (0, None)


def test_the_learned_sigma_is_what_evaluation_gets(tmp_path, config):
    learning = override(config, {"divergence.learn_sigma": True, "divergence.sigma": 0.5})
    step = build_step(learning)
    with torch.no_grad():
        step.divergence.log_sigma.fill_(math.log(0.9))
    run = Run.create(tmp_path / "run", learning, {})
    save_checkpoint(run.last_checkpoint, {**collect_networks(step), "epoch": 1.0})
    assert load_trained(run).model.sigma == pytest.approx(0.9)


def test_load_encoder_takes_bytes_and_floats(run):
    encoder = load_encoder(run.path)
    assert isinstance(encoder, Encoder)
    assert not encoder.training
    pixels = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        features = encoder(pixels)
        torch.testing.assert_close(encoder(pixels / 255), features)
        torch.testing.assert_close(load_trained(run)[0](pixels / 255).representation, features)
    assert features.shape == (3, encoder.num_features)
    with torch.no_grad():
        assert torch.equal(load_encoder(run)(pixels), features)  # as other verbs take a run


def test_load_model_of_another_configuration(run, config):
    other = override(config, {"divergence.num_subnetworks": 6})
    torch.manual_seed(0)
    save_checkpoint(run.last_checkpoint, {**collect_networks(build_step(other)), "epoch": 1.0})
    with pytest.raises(UserError, match=r"network\..*has shape") as caught:
        load_trained(run)
    assert str(run.last_checkpoint) in str(caught.value)


def test_parts_of_another_version_leave_the_encoder(run):
    """Here the configuration is right, and another one would be no help."""
    saved = load(run.last_checkpoint)
    saved["objective"]["old_name"] = saved["objective"].pop("projection.0.weight")
    save_checkpoint(run.last_checkpoint, saved)
    with pytest.raises(UserError) as caught:
        load_trained(run)
    for words in (
        "projection.0.weight is missing; old_name is not expected; ",
        "use the config.toml and the version of deepbregman ",
        "the encoder fits: deepbregman.load_encoder reads it alone",
    ):
        assert words in str(caught.value)
    load_encoder(run.path)


def test_a_misfit_of_the_encoder_itself_promises_nothing(run):
    saved = load(run.last_checkpoint)
    name = next(name for name in saved["objective"] if name.startswith("encoder.trunk."))
    del saved["objective"][name]
    save_checkpoint(run.last_checkpoint, saved)
    with pytest.raises(UserError, match=f"{name} is missing") as caught:
        load_trained(run)
    assert "load_encoder" not in str(caught.value)


def test_load_model_of_a_checkpoint_without_one(run):
    save_checkpoint(run.last_checkpoint, {"step": 3})
    with pytest.raises(UserError, match="has no objective, teacher, divergence") as caught:
        load_trained(run)
    assert str(run.last_checkpoint) in str(caught.value)


def test_a_checkpoint_from_before_rotation_is_loaded(run):
    saved = checkpoints.load(run.last_checkpoint)
    del saved["rotation"]
    save_checkpoint(run.last_checkpoint, saved)
    load_trained(run)


def test_a_damaged_run_is_not_judged_by_an_older_checkpoint(run):
    """It is an error that names the others, and how to use them."""
    run.last_checkpoint.write_bytes(run.last_checkpoint.read_bytes()[:-1])
    with pytest.raises(UserError, match="this run has no other"):
        load_trained(run)
    run.previous_checkpoint.touch()
    (run.checkpoints / "epoch-0010.pt").touch()
    with pytest.raises(UserError) as caught:
        load_encoder(run.path)
    for words in (
        "last.pt is not a checkpoint that can be read (its SHA-256",
        f"pretrain --resume {run.path} goes on from previous.pt",
        f"epoch-0010.pt one can be copied to {run.last_checkpoint}",
    ):
        assert words in str(caught.value)


def test_load_model_before_there_is_a_checkpoint(run):
    run.last_checkpoint.unlink()
    with pytest.raises(UserError, match=r"does not exist.*--keep-checkpoints"):
        load_trained(run.path)
    with pytest.raises(UserError, match="is not a run folder"):
        load_trained(run.path.parent)
