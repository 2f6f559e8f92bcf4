"""Features that several devices compute together are those that one computes, to the bit."""

import copy
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.config import Config, load_recipe, override
from deepbregman.data import ArrayImages, Batch, Images, Split
from deepbregman.data.decoding import UnreadableImage
from deepbregman.data.images import FileImages
from deepbregman.errors import UserError
from deepbregman.evaluation import features
from deepbregman.evaluation.features import SplitFeatures
from deepbregman.evaluation.frozen import SharedBatches, map_batches
from deepbregman.evaluation.inputs import load_run
from deepbregman.evaluation.results import pack
from deepbregman.method.networks import Model
from deepbregman.objectives import build_step
from deepbregman.training.devices import pick_devices

CPU = torch.device("cpu")
COUNT, SIZE = 11, 8  # three batches of four: the last is short


@pytest.fixture(autouse=True)
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(features, "BATCH_SIZE", 4)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not [one.name for one in threading.enumerate() if one.name.startswith("features-")]


@pytest.fixture(scope="module")
def config() -> Config:
    small = {"encoder.projection_hidden": 16, "encoder.embedding": 8, "data.workers": 1}
    return override(load_recipe("digits"), {**small, "divergence.num_subnetworks": 5})


@pytest.fixture(scope="module")
def model(config) -> Model:
    torch.manual_seed(0)
    return build_step(config).model


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> FileImages:
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = tuple(folder / f"{index}.png" for index in range(COUNT))
    for path in paths:
        size = (*random.integers(6, 13, 2), 3)
        Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)).save(path)
    return FileImages(paths, 12, fills_frame=False)


def arrays() -> ArrayImages:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (COUNT, 3, 12, 12), dtype=torch.uint8, generator=generator)
    return ArrayImages(pixels, torch.randint(5, 13, (COUNT, 2), generator=generator))


def seen_by(
    devices: int, images: Images, model: Model, config: Config, **more: object
) -> SplitFeatures:
    other_devices = (CPU,) * (devices - 1)
    return SplitFeatures(model, config, Split(images), CPU, other_devices=other_devices, **more)


@pytest.mark.parametrize("devices", [2, 5])
@pytest.mark.parametrize("resident", ["yes", "no"])
@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_several_devices_find_what_one_finds(devices, resident, kind, files, model, config):
    config = override(config, {"data.resident": resident})
    images = files if kind == "files" else arrays()
    progress: list[tuple[int, int]] = []
    alone = seen_by(1, images, model, config)
    together = seen_by(devices, images, model, config, progress=lambda *at: progress.append(at))
    for one, shared in zip(alone.features, together.features, strict=True):
        assert one is not None
        assert shared is not None
        assert torch.equal(one, shared)
    assert len(set(map(tuple, alone.features.representation.tolist()))) == COUNT
    assert progress[-1] == (COUNT, COUNT)
    assert [at[0] for at in progress] == sorted(at[0] for at in progress)
    assert len(progress) == 3


@pytest.mark.parametrize("devices", [1, 2])
def test_nothing_stands_in_for_an_image_that_was_damaged_later(
    devices, files, model, config, tmp_path
):
    """Unreadable images are left out when a dataset is opened, and never replaced."""
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(files.paths[0].read_bytes()[:60])
    images = replace(files, paths=(*files.paths[1:], damaged))
    skipping = override(config, {"data.skip_unreadable": True})
    with pytest.raises(UnreadableImage, match="damaged"):
        _ = seen_by(devices, images, model, skipping).features


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", ["yes", "no"])
def test_threads_of_gpus_find_what_one_finds(resident, files, model, config):
    """With one GPU, two threads share it; with more, each has its own."""
    config = override(config, {"data.resident": resident})
    first, last = torch.device("cuda"), torch.device("cuda", torch.cuda.device_count() - 1)
    model = copy.deepcopy(model).to(first)
    alone = SplitFeatures(model, config, Split(files), first)
    together = SplitFeatures(model, config, Split(files), first, other_devices=(last,))
    for one, shared in zip(alone.features, together.features, strict=True):
        assert shared.device == one.device
        assert torch.equal(one, shared)


def test_every_device_has_a_thread_a_part_of_the_images_and_a_network(model, config):
    shared = SharedBatches(arrays(), config, [CPU] * 3, 4)
    assert [share.batches.num_images for share in shared.shares] == [4, 4, 3]
    met = threading.Barrier(3, timeout=120)  # so each batch waits for the two others
    seen: dict[int, tuple[int, int]] = {}

    def work(network: Model, batch: Batch, number: int) -> tuple[torch.Tensor]:
        met.wait()
        seen[number] = threading.get_ident(), id(network)
        return (torch.full((len(batch.images),), number),)

    found = map_batches(model, shared, 4, work)
    assert [part.tolist() for (part,) in found if part is not None] == [[0] * 4, [1] * 4, [2] * 3]
    assert [len(set(each)) for each in zip(*seen.values(), strict=True)] == [3, 3]


def test_few_images_need_few_devices(model, config):
    images = arrays().select(torch.arange(3))
    assert len(SharedBatches(images, config, [CPU] * 4, 4).shares) == 1
    one, two = (seen_by(devices, images, model, config).features for devices in (1, 2))
    assert torch.equal(one.representation, two.representation)


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_an_error_of_one_device_comes_back_as_it_is_and_stops_the_others(
    resident, files, tmp_path, model, config
):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    images = replace(files, paths=(*files.paths[:5], broken, *files.paths[6:]))
    config = override(config, {"data.resident": resident})
    with pytest.raises(UnreadableImage, match=r"broken\.png"):
        _ = seen_by(2, images, model, config).features


def test_ctrl_c_ends_every_thread(model, config):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _ = seen_by(2, arrays(), model, config, progress=interrupt).features


@pytest.mark.parametrize("number", [0, 1])
def test_a_network_that_changes_on_any_device_is_refused(number, model, config):
    def meddle(network: Model, batch: Batch, at: int) -> tuple[torch.Tensor]:
        if at == number:
            network.train()
        return (torch.zeros(len(batch.images)),)

    with pytest.raises(RuntimeError, match="frozen network was touched"):
        map_batches(copy.deepcopy(model), SharedBatches(arrays(), config, [CPU] * 2, 4), 4, meddle)


# Whoever asks for devices


def make_gpus(count: int, monkeypatch: pytest.MonkeyPatch, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


@pytest.mark.parametrize(
    ("asked", "current", "others"),
    [(1, 0, []), (2, 0, [1]), (4, 0, [1, 2, 3]), ("all", 0, [1, 2, 3]), (3, 1, [0, 2])],
)
def test_gpus_are_taken_in_their_order(asked, current, others, monkeypatch):
    make_gpus(4, monkeypatch, current)
    first, *rest = pick_devices("auto", asked)
    assert first == torch.device("cuda")  # the current one
    assert [device.index for device in rest] == others


@pytest.mark.parametrize("asked", [torch.device("cpu"), None, "gpu"])
def test_an_accelerator_that_is_none_is_refused(asked):
    with pytest.raises(UserError, match=r"accelerator .* is not one of auto, cpu, cuda"):
        pick_devices(asked, 1)


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    make_gpus(2, monkeypatch)
    with pytest.raises(UserError, match=r"devices is 3: this process sees 2 GPUs"):
        pick_devices("cuda", 3)


def test_a_cpu_is_one_device_unless_a_number_is_given():
    assert pick_devices("cpu", "all") == [CPU]
    assert pick_devices("cpu", 2) == [CPU, CPU]


@pytest.mark.parametrize("asked", [0, -1, "two", "", 1.5])
def test_a_number_that_is_none_is_refused(asked):
    with pytest.raises(UserError, match=r"devices is .*: it must be a number from 1 on, or all"):
        pick_devices("cpu", asked)


def test_embed_writes_the_same_file(short_run, few_digits, tmp_path, command):
    written = []
    for devices in ("1", "2"):
        out = tmp_path / f"{devices}.npz"
        words = ["--data", few_digits, "--devices", devices]
        for cached in (short_run.path / "features").glob("*"):
            cached.unlink()
        code, _, errors = command("embed", str(short_run.path), "--out", str(out), *words)
        assert code == 0, errors
        written.append(np.load(out))
    assert set(written[0]) == set(written[1]) >= {"train_features", "test_scores"}
    assert all(np.array_equal(written[0][name], written[1][name]) for name in written[0])


def test_protocols_measure_the_same(few, short_run):
    shared = replace(few, other_devices=(CPU,))
    for split in ("train", "test"):
        one, two = getattr(few, split), getattr(shared, split)
        assert torch.equal(one.features.representation, two.features.representation)
    assert pack(shared.of(shared.source.test).labels) == pack(few.test.labels)
    assert load_run(short_run, "cpu", devices=3).other_devices == (CPU, CPU)


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        *(("evaluate", []), ("search", []), ("duplicates", []), ("embed", ["--out", "a.npz"])),
        *(("label", ["--labels", "labels.csv"]), ("label", ["--out", "a.csv"])),
    ],
)
def test_one_of_several_processes_is_refused_by_name(
    verb, more, short_run, tmp_path, monkeypatch, refusal
):
    monkeypatch.chdir(tmp_path)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    errors = refusal(verb, str(short_run.path.resolve()), *more)
    assert f"{verb} runs in one process, but torchrun started 2" in errors
    assert not list(tmp_path.iterdir())
