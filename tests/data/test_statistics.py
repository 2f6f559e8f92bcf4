from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.data import ArrayImages, FileImages, channel_statistics, open_source
from deepbregman.data import frames as frames_module
from deepbregman.errors import UserError


def _expected(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take (M, 3) pixels; NumPy's own two-pass formulas."""
    values = pixels.astype(np.float64) / 255
    return values.mean(axis=0), values.std(axis=0)


def test_arrays_against_numpy(monkeypatch):
    monkeypatch.setattr(frames_module, "_MEASURED_CHUNK", 4)
    pixels = np.random.default_rng(0).integers(0, 200, (10, 3, 5, 7), dtype=np.uint8)
    pixels[:, 1] //= 2
    expected = _expected(pixels.transpose(0, 2, 3, 1).reshape(-1, 3))
    np.testing.assert_allclose(
        channel_statistics(ArrayImages(torch.from_numpy(pixels))), expected, rtol=1e-12
    )


def test_padding_does_not_count():
    random = np.random.default_rng(1)
    pixels, sizes = np.zeros((6, 3, 8, 8), dtype=np.uint8), random.integers(1, 9, (6, 2))
    true = []
    for image, (height, width) in zip(pixels, sizes, strict=True):
        image[:, :height, :width] = random.integers(1, 256, (3, height, width))
        true.append(image[:, :height, :width].reshape(3, -1).T)
    images = ArrayImages(torch.from_numpy(pixels), torch.from_numpy(sizes))
    expected = _expected(np.concatenate(true))
    np.testing.assert_allclose(channel_statistics(images), expected, rtol=1e-12)


def test_files_against_numpy(tmp_path, save_picture):
    true = [
        save_picture(tmp_path / f"{i}.png", height=3 + i, width=9 - i, seed=i).reshape(-1, 3)
        for i in range(4)
    ]
    images = open_source(str(tmp_path), image_size=32).train.images
    expected = _expected(np.concatenate(true))
    np.testing.assert_allclose(channel_statistics(images), expected, rtol=1e-12)


def test_unreadable_files(tmp_path, save_picture):
    picture = save_picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"")
    images = FileImages((tmp_path / "a.png", tmp_path / "b.png"), 6)
    with pytest.raises(UserError, match=r"b\.png"):
        channel_statistics(images)
    np.testing.assert_allclose(
        channel_statistics(images, skip_unreadable=True),
        _expected(picture.reshape(-1, 3)),
        rtol=1e-12,
    )


def test_subset_is_seeded_and_of_the_size_asked_for():
    # Image i has the value i alone, so the mean of one image tells which it is.
    pixels = torch.arange(200, dtype=torch.uint8)[:, None, None, None].expand(200, 3, 2, 2)
    images = ArrayImages(pixels)
    chosen = round(channel_statistics(images, max_images=1)[0][0] * 255, 6)
    assert chosen == int(chosen)
    first, again = (channel_statistics(images, max_images=50) for _ in range(2))
    assert first == again
    assert first != channel_statistics(images, max_images=49)
    # The first 50 images, which are of the first classes in a folder, have a mean of 24.5.
    assert first[0][0] * 255 == pytest.approx(99.5, abs=25)


def test_constant_images_can_still_be_divided_by():
    mean, deviation = channel_statistics(
        ArrayImages(torch.full((2, 3, 4, 4), 51, dtype=torch.uint8))
    )
    assert mean == pytest.approx((0.2, 0.2, 0.2))
    assert deviation == (1 / 255, 1 / 255, 1 / 255)


def test_real_cifar10_has_its_published_statistics(tmp_path):
    folder = Path(__file__).parents[3] / "shared" / "data" / "cifar10"
    if not folder.is_dir():
        pytest.skip("the compact copy of CIFAR-10 is not beside this repository")
    with Image.open(folder / "test_00.avif") as mosaic:
        tiles = np.asarray(mosaic.convert("RGB"))
    images = tiles.reshape(50, 32, 50, 32, 3).swapaxes(1, 2).reshape(2500, 32, 32, 3)
    with np.load(folder / "labels.npz", allow_pickle=False) as labels:
        np.savez(tmp_path / "cifar.npz", train_images=images, train_labels=labels["test"][:2500])
    source = open_source(str(tmp_path / "cifar.npz"), image_size=32)
    assert source.train.labels is not None
    assert torch.bincount(source.train.labels).min() > 200  # ten balanced classes
    mean, deviation = channel_statistics(source.train.images)
    assert mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=0.015)
    assert deviation == pytest.approx((0.2470, 0.2435, 0.2616), abs=0.015)
