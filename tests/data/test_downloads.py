import hashlib
import pickle
import socket
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch

from deepbregman.data import open_source
from deepbregman.data.opening import select_images
from deepbregman.errors import UserError


def test_digits_are_scaled_repeated_and_split_as_documented():
    from sklearn.datasets import load_digits

    source = open_source("digits", image_size=8)
    assert source.train.labels is not None
    assert source.test.labels is not None
    assert (len(source.train), len(source.test)) == (1297, 500)
    assert source.classes == tuple("0123456789")
    pixels = torch.cat([source.train.images.pixels, source.test.images.pixels])
    labels = torch.cat([source.train.labels, source.test.labels])
    assert pixels.shape == (1797, 3, 8, 8)
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels[:, 0], pixels[:, 1])
    assert torch.equal(pixels[:, 0], pixels[:, 2])

    # The same multiset of (image, label) as scikit-learn's, so nothing is lost or swapped.
    digits = load_digits()
    expected = sorted(
        (tuple(int(v * 255 / 16 + 0.5) for v in image.flat), int(label))
        for image, label in zip(digits.images, digits.target, strict=True)
    )
    found = sorted(
        (tuple(image.flatten().tolist()), int(label))
        for image, label in zip(pixels[:, 0], labels, strict=True)
    )
    assert found == expected
    per_class = torch.bincount(source.test.labels) / torch.bincount(labels)
    assert (per_class - 500 / 1797).abs().max() < 0.006


def _write(folder: Path, name: str, content: bytes) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return [name, hashlib.md5(content).hexdigest()]


def test_cifar10_in_its_real_layout(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    random, folder = np.random.default_rng(0), tmp_path / "cifar-10-batches-py"
    batches = [random.integers(0, 256, (2, 3072), dtype=np.uint8) for _ in range(3)]
    listed = [
        _write(folder, f"batch_{i}", pickle.dumps({"data": batch, "labels": [i, 9 - i]}))
        for i, batch in enumerate(batches)
    ]
    names = [f"class {i}" for i in range(10)]
    meta = _write(folder, "batches.meta", pickle.dumps({"label_names": names}))
    monkeypatch.setattr(CIFAR10, "train_list", listed[:2])
    monkeypatch.setattr(CIFAR10, "test_list", listed[2:])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": meta[1]})

    source = open_source("cifar10", root=tmp_path, image_size=32)
    expected = np.concatenate(batches[:2]).reshape(4, 3, 32, 32)  # the format is channel by channel
    assert source.train.images.pixels.is_contiguous()
    assert np.array_equal(source.train.images.pixels.numpy(), expected)
    assert source.train.labels.tolist() == [0, 9, 1, 8]
    assert np.array_equal(source.test.images.pixels.numpy(), batches[2].reshape(2, 3, 32, 32))
    assert source.test.labels.tolist() == [2, 7]
    assert source.classes == tuple(names)
    assert source.unlabelled is None


def test_stl10_is_transposed_and_counted_from_zero(tmp_path, monkeypatch):
    from torchvision.datasets import STL10

    random, folder = np.random.default_rng(0), tmp_path / "stl10_binary"
    images = {
        name: random.integers(0, 256, (count, 3, 96, 96), dtype=np.uint8)
        for name, count in (("train", 2), ("test", 3), ("unlabeled", 4))
    }
    # Each image is stored column by column.
    listed = {
        name: _write(folder, f"{name}_X.bin", pixels.transpose(0, 1, 3, 2).tobytes())
        for name, pixels in images.items()
    }
    train_labels = _write(folder, "train_y.bin", bytes([1, 10]))
    test_labels = _write(folder, "test_y.bin", bytes([3, 1, 2]))
    names = ["airplane", "bird"]
    (folder / "class_names.txt").write_text("\n".join(names))
    monkeypatch.setattr(STL10, "train_list", [listed["train"], train_labels, listed["unlabeled"]])
    monkeypatch.setattr(STL10, "test_list", [listed["test"], test_labels])

    source = open_source("stl10", root=tmp_path, image_size=96)
    for split, name in (
        (source.train, "train"),
        (source.test, "test"),
        (source.unlabelled, "unlabeled"),
    ):
        assert np.array_equal(split.images.pixels.numpy(), images[name])
    assert source.train.labels.tolist() == [0, 9]
    assert source.test.labels.tolist() == [2, 0, 1]
    assert source.unlabelled.labels is None
    assert source.classes == tuple(names)

    # Pretraining is on train and unlabelled, without what is held out; never on test.
    pretrained = select_images(source, torch.tensor([1]))
    expected = np.concatenate([images["train"][1:], images["unlabeled"]])
    assert np.array_equal(pretrained.pixels.numpy(), expected)


@pytest.mark.parametrize(
    ("name", "folder", "module"),
    [
        ("cifar10", "cifar-10-batches-py", "cifar"),
        ("cifar100", "cifar-100-python", "cifar"),
        ("stl10", "stl10_binary", "stl10"),
    ],
)
@pytest.mark.parametrize(
    "failure", [URLError("no network"), RuntimeError("checksum"), OSError("disk full")]
)
def test_failed_download_says_where_the_files_belong(
    tmp_path, monkeypatch, name, folder, module, failure
):
    def fail(*args: object, **kwargs: object) -> None:
        (tmp_path / "root").mkdir(exist_ok=True)
        raise failure

    monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", fail)
    with pytest.raises(UserError) as caught:
        open_source(name, root=tmp_path / "root", image_size=32)
    message = str(caught.value)
    for part in (name, str(tmp_path / "root" / folder), "http", str(failure), "data.root"):
        assert part in message
    assert not (tmp_path / "root").exists()
    assert socket.getdefaulttimeout() is None
