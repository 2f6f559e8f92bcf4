from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepbregman.data import Source, open_source
from deepbregman.data import archives as archives_module
from deepbregman.data.datasets import check_labels
from deepbregman.errors import UserError

GREY = np.random.default_rng(0).integers(0, 256, (5, 4, 6), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
LABELS = np.array([0, 2, 1, 1, 0], dtype=np.uint8)


def _open(path: Path, compressed: bool = False, **arrays: Any) -> Source:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return open_source(str(path), image_size=4)


@pytest.mark.parametrize("compressed", [False, True])
def test_colour_images_and_column_labels(tmp_path, compressed):
    source = _open(
        tmp_path / "blood.npz",
        compressed,
        train_images=COLOUR,
        train_labels=LABELS[:, None],
        test_images=COLOUR[:2],
        test_labels=np.array([[3], [0]]),
        val_images=COLOUR[2:3],
    )
    assert source.name == "blood"
    assert np.array_equal(source.train.images.pixels.numpy(), COLOUR.transpose(0, 3, 1, 2))
    assert np.array_equal(source.test.images.pixels.numpy(), COLOUR[:2].transpose(0, 3, 1, 2))
    assert source.train.labels.tolist() == LABELS.tolist()
    assert source.test.labels.tolist() == [3, 0]
    assert source.classes == ("0", "1", "2", "3")


@pytest.mark.parametrize("images", [GREY, GREY[..., None]])
def test_grey_is_repeated_and_labels_are_optional(tmp_path, images):
    source = _open(tmp_path / "grey.npz", train_images=images)
    expected = np.stack([GREY] * 3, axis=1)
    assert np.array_equal(source.train.images.pixels.numpy(), expected)
    assert (source.train.labels, source.test, source.classes) == (None, None, None)


def test_validation_split_stands_in_for_a_missing_test_split(tmp_path):
    source = _open(tmp_path / "a.npz", train_images=GREY, val_images=GREY[3:])
    assert np.array_equal(source.test.images.pixels[:, 0].numpy(), GREY[3:])


def test_labels_without_a_test_split_are_told_what_they_lack(tmp_path):
    np.savez(tmp_path / "a.npz", train_images=GREY, train_labels=LABELS)
    with pytest.raises(
        UserError, match=r"lacks labels .* its test images need them; .*\.npz file with .*test_im"
    ):
        check_labels(str(tmp_path / "a.npz"))
    np.savez(tmp_path / "a.npz", train_images=GREY, train_labels=LABELS, val_images=GREY[:2])
    with pytest.raises(UserError, match="its test images need them"):
        check_labels(str(tmp_path / "a.npz"))
    np.savez(
        tmp_path / "a.npz",
        train_images=GREY,
        train_labels=LABELS,
        val_images=GREY[:2],
        val_labels=LABELS[:2],
    )
    assert check_labels(str(tmp_path / "a.npz")) is None


def test_reading_in_pieces_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(archives_module, "_READ_BYTES", 2 * 4 * 6 * 3)  # two images and a rest
    source = _open(tmp_path / "a.npz", train_images=COLOUR)
    assert np.array_equal(source.train.images.pixels.numpy(), COLOUR.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"images": GREY, "labels": LABELS}, ["train_images", "images, labels"]),
        ({"train_images": GREY.astype(np.float32)}, ["train_images", "float32", "uint8"]),
        ({"train_images": COLOUR.transpose(0, 3, 1, 2)}, ["(5, 3, 4, 6)", "(N, H, W, 3)"]),
        ({"train_images": GREY[0]}, ["(4, 6)"]),
        ({"train_images": GREY[:0]}, ["(0, 4, 6)", "at least one"]),
        ({"train_images": np.asfortranarray(GREY)}, ["Fortran"]),
        ({"train_images": np.array([GREY, None], dtype=object)}, ["train_images", "pickled"]),
        (
            {"train_images": GREY, "train_labels": LABELS[:3]},
            ["train_labels", "3 labels", "5 images"],
        ),
        ({"train_images": GREY, "train_labels": LABELS.astype(float)}, ["float64", "integers"]),
        (
            {"train_images": GREY, "train_labels": np.ones((5, 14), int)},
            ["train_labels", "(5, 14)", "one class an image", "ChestMNIST"],
        ),
        (
            {"train_images": np.zeros((5, 28, 28, 28), np.uint8)},
            ["(5, 28, 28, 28)"],  # a volume of MedMNIST 3D
        ),
        ({"train_images": GREY, "train_sizes": np.ones((4, 2), int)}, ["train_sizes", "(4, 2)"]),
        ({"train_images": GREY, "train_sizes": np.full((5, 2), 5)}, ["from 1 to 4 and 6"]),
        ({"train_images": GREY, "train_sizes": np.zeros((5, 2), int)}, ["from 1 to 4 and 6"]),
        ({"train_images": GREY, "train_sizes": np.ones((5, 2))}, ["train_sizes", "float64"]),
        ({"train_images": GREY, "train_names": np.arange(5)}, ["train_names", "int64", "text"]),
        ({"train_images": GREY, "train_names": np.array(["a"])}, ["train_names has 1 names for 5"]),
        (
            {"train_images": GREY, "train_labels": LABELS, "class_names": np.array(["a", "b"])},
            ["class_names has 2 names for 3"],
        ),
        ({"train_images": GREY, "train_labels": np.full(5, -1)}, ["-1", "numbered from 0"]),
        (
            {"train_images": GREY, "train_labels": np.array([None] * 5, dtype=object)},
            ["train_labels", "pickled"],
        ),
        ({"train_images": GREY, "test_images": GREY.astype(int)}, ["test_images", "int64"]),
    ],
)
def test_bad_arrays_are_named(tmp_path, arrays, parts):
    with pytest.raises(UserError) as caught:
        _open(tmp_path / "bad.npz", **arrays)
    for part in ["data.source", "bad.npz", *parts]:
        assert part in str(caught.value)


def test_true_sizes_are_kept_only_where_images_do_not_fill_their_frame(tmp_path):
    full, some = np.tile([[4, 6]], (5, 1)), np.array([[4, 6], [1, 2], [3, 3], [4, 1], [4, 6]])
    source = _open(
        tmp_path / "a.npz",
        train_images=GREY,
        train_sizes=full,
        test_images=GREY,
        test_sizes=some.astype(np.uint8),
    )
    assert source.train.images.sizes is None
    assert source.test.images.sizes.tolist() == some.tolist()


def test_not_a_zip(tmp_path):
    path = tmp_path / "text.npz"
    path.write_text("not a zip")
    with pytest.raises(UserError, match=r"text\.npz.*not a readable \.npz"):
        open_source(str(path), image_size=4)
