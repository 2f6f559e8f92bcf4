"""A cache gives back what decoding gives, whatever kind of source it was written from."""

import io
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.data import (
    ArrayImages,
    FileImages,
    Source,
    Split,
    StreamingBatches,
    channel_statistics,
    open_source,
)
from deepbregman.data import archives as archives_module
from deepbregman.data.archives import write_archive
from deepbregman.data.decoding import UnreadableImage

Save = Callable[..., np.ndarray]


@pytest.fixture(params=["read", "mapped"])
def how(request, monkeypatch) -> str:
    """Open archives by reading them into memory, and by mapping them."""
    if request.param == "mapped":
        monkeypatch.setattr(archives_module, "MAP_FROM_BYTES", 1)
    return str(request.param)


def _cached(source: Source, path: Path, **options: bool) -> Source:
    with path.open("xb") as file:
        write_archive(source, file, **options)
    return open_source(str(path), image_size=4)


def _pictures(folder: Path, save_picture: Save, sizes: list[tuple[int, int]]) -> dict[str, object]:
    """Save two classes of pictures; return the pixels of each by its name."""
    made: dict[str, object] = {}
    for i, (height, width) in enumerate(sizes):
        for label in ("a", "b"):
            name = f"{label}/{i}.png"
            made[name] = save_picture(folder / name, height, width, seed=len(made))
    return made


@pytest.mark.usefixtures("how")
def test_images_that_need_no_padding_come_back_to_the_bit(tmp_path, save_picture, monkeypatch):
    monkeypatch.setattr(
        archives_module, "_WRITTEN_BYTES", 3 * 6 * 6 * 3
    )  # pieces of three, and a rest
    made = _pictures(tmp_path / "photos", save_picture, [(6, 6)] * 5)
    source = open_source(str(tmp_path / "photos"), image_size=4)
    cached = _cached(source, tmp_path / "photos.npz")
    assert cached.classes == ("a", "b")
    for split in (cached.train, cached.test):
        assert split.images.sizes is None
        for name, pixels, label in zip(split.names, split.images.pixels, split.labels, strict=True):
            assert np.array_equal(pixels.permute(1, 2, 0).numpy(), made[name])
            assert cached.classes[int(label)] == name[0]
    assert cached.train.names == source.train.names


@pytest.mark.usefixtures("how")
def test_unequal_images_keep_their_true_sizes(tmp_path, save_picture):
    sizes = [(6, 9), (9, 5), (3, 3), (40, 20), (9, 9)]  # the frame is ceil(2.25 * 4) = 9
    made = _pictures(tmp_path / "photos", save_picture, sizes)
    cached = _cached(open_source(str(tmp_path / "photos"), image_size=4), tmp_path / "photos.npz")
    seen = 0
    for split in (cached.train, cached.test):
        for name, pixels, (height, width) in zip(
            split.names, split.images.pixels, split.images.sizes.tolist(), strict=True
        ):
            original = made[name]
            assert isinstance(original, np.ndarray)
            if max(original.shape) <= 9:
                assert (height, width) == original.shape[:2]
                assert np.array_equal(pixels[:, :height, :width].permute(1, 2, 0), original)
            else:
                assert (height, width) == (9, 4)  # 40 x 20, shrunk; round half to even
            assert not pixels[:, height:].any()
            assert not pixels[:, :, width:].any()
            seen += 1
    assert seen == 10


@pytest.mark.usefixtures("how")
def test_batches_and_statistics_are_those_of_the_files(tmp_path, save_picture):
    _pictures(tmp_path / "photos", save_picture, [(6, 9), (9, 5), (30, 20), (9, 9)])
    source = open_source(str(tmp_path / "photos"), image_size=4)
    cached = _cached(source, tmp_path / "photos.npz")
    assert isinstance(source.train.images, FileImages)
    order, cpu = torch.tensor([3, 0, 2]), torch.device("cpu")
    for before, after in zip(
        StreamingBatches(source.train.images, cpu, num_workers=0).iterate(order, 2),
        StreamingBatches(cached.train.images, cpu).iterate(order, 2),
        strict=True,
    ):
        assert before.sizes is not None
        assert after.sizes is not None
        assert torch.equal(before.images, after.images)
        assert torch.equal(before.sizes, after.sizes)
    expected = channel_statistics(source.train.images)
    assert np.allclose(channel_statistics(cached.train.images), expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("how")
def test_every_part_of_a_source_of_arrays(tmp_path):
    pixels = torch.randint(0, 256, (9, 3, 5, 7), dtype=torch.uint8)
    source = Source(
        "any",
        Split(ArrayImages(pixels[:4]), torch.tensor([0, 1, 1, 0])),
        Split(ArrayImages(pixels[4:6]), torch.tensor([1, 0])),
        Split(ArrayImages(pixels[6:], torch.tensor([[5, 7], [1, 2], [3, 7]]))),
        ("été", "日本"),
    )
    cached = _cached(source, tmp_path / "any.npz")
    assert cached.classes == source.classes
    assert cached.unlabelled.labels is None
    for name in ("train", "test", "unlabelled"):
        before, after = getattr(source, name), getattr(cached, name)
        assert torch.equal(before.images.pixels, after.images.pixels)
    assert cached.train.labels.tolist() == [0, 1, 1, 0]
    assert cached.unlabelled.images.sizes.tolist() == [[5, 7], [1, 2], [3, 7]]


def test_numpy_reads_it_and_the_bytes_never_change(monkeypatch):
    source = open_source("digits", image_size=8)
    copies = [io.BytesIO(), io.BytesIO()]
    for copy in copies:
        write_archive(source, copy)
        monkeypatch.setattr(time, "time", lambda: 2e9)  # years later
    assert copies[0].getvalue() == copies[1].getvalue()
    copies[0].seek(0)
    with np.load(copies[0], allow_pickle=False) as arrays:
        grey = source.train.images.pixels.permute(0, 2, 3, 1).numpy()
        assert np.array_equal(arrays["train_images"], grey)
        assert arrays["train_labels"].shape == (1297, 1)
        assert "train_sizes" not in arrays


def test_arrays_of_more_than_four_gib_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # for larger ones an archive needs more room
    pixels = torch.randint(0, 256, (9, 3, 5, 7), dtype=torch.uint8)
    nothing = Split(ArrayImages(pixels[:0]))  # as of classes of one image each
    source = Source("any", Split(ArrayImages(pixels)), nothing)
    cached = _cached(source, tmp_path / "any.npz")
    assert torch.equal(cached.train.images.pixels, pixels)
    assert cached.test is None


def test_unreadable_images_stop_or_have_a_neighbour_stand_in(tmp_path, save_picture, monkeypatch):
    monkeypatch.setattr(archives_module, "_WRITTEN_BYTES", 2 * 6 * 6 * 3)  # pieces of two
    made = {f"{i}.png": save_picture(tmp_path / "p" / f"{i}.png", seed=i) for i in range(4)}
    source = open_source(str(tmp_path / "p"), image_size=4)
    (tmp_path / "p" / "1.png").write_bytes(b"gone bad since")
    with pytest.raises(UnreadableImage, match=r"1\.png"):
        write_archive(source, io.BytesIO())
    out = io.BytesIO()
    assert write_archive(source, out, skip_unreadable=True) == 1
    out.seek(0)
    images = np.load(out)["train_images"]
    assert np.array_equal(images[1], made["0.png"])  # the next of its piece, which begins anew
    assert np.array_equal(images[3], made["3.png"])


@pytest.mark.slow
def test_a_file_larger_than_a_gib_is_mapped(tmp_path, save_picture):
    """At its real size: the first and the last image are found where they are."""
    path, count = tmp_path / "big.npz", 420_000  # of 32 x 32: 1.2 GiB
    marked = save_picture(tmp_path / "x.png", 32, 32)
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("train_images.npy")
        with archive.open(info, "w", force_zip64=True) as stream:
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, 32, 32, 3)}
            np.lib.format.write_array_header_1_0(stream, header)
            blank = bytes(32 * 32 * 3 * 1000)
            for _ in range(count // 1000 - 1):
                stream.write(blank)
            stream.write(blank[: -marked.size])
            stream.write(marked.tobytes())
    source = open_source(str(path), image_size=32)
    last = source.train.images.select(torch.tensor([count - 1, 0]))
    assert np.array_equal(last.pixels[0].permute(1, 2, 0).numpy(), marked)
    assert not last.pixels[1].any()
    shutil.rmtree(tmp_path)


def test_grey_archives_are_mapped_too(tmp_path, monkeypatch):
    grey = np.random.default_rng(0).integers(0, 256, (5, 4, 6), dtype=np.uint8)
    np.savez(tmp_path / "grey.npz", train_images=grey)
    monkeypatch.setattr(archives_module, "MAP_FROM_BYTES", grey.size)
    images = open_source(str(tmp_path / "grey.npz"), image_size=4).train.images
    assert images.pixels.shape == (5, 3, 4, 6)
    assert torch.equal(images.pixels, torch.from_numpy(grey)[:, None].repeat(1, 3, 1, 1))


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_photographs_of_a_camera(tmp_path, suffix):
    """Rotation by EXIF and shrinking happen once, before the cache, and not again after it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "p").mkdir()
    for i in range(3):
        noise = Image.effect_noise((80, 40), 60.0 + i).convert("RGB")
        noise.save(tmp_path / "p" / f"{i}.{suffix}", exif=exif)
    source = open_source(str(tmp_path / "p"), image_size=8)
    cached = _cached(source, tmp_path / "p.npz")
    assert cached.train.images.sizes.tolist() == [[18, 9]] * 3
    order = torch.arange(3)
    before = next(
        StreamingBatches(source.train.images, torch.device("cpu"), num_workers=0).iterate(order, 3)
    )
    assert torch.equal(before.images, cached.train.images.pixels)
