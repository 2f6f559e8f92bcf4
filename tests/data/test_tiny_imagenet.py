"""Tiny ImageNet in the layout of its archive, against labels that the test gives itself."""

from pathlib import Path

import pytest

from deepbregman.data import open_source
from deepbregman.errors import UserError

WORDS = {
    "n02124075": "Egyptian cat",
    "n01443537": "goldfish, Carassius auratus",
    "n07749582": "lemon",
}
VAL = {"val_0.JPEG": "n07749582", "val_1.JPEG": "n02124075", "val_10.JPEG": "n01443537"}


@pytest.fixture
def archive(tmp_path, save_picture) -> Path:
    """The unpacked archive, with boxes, unlabelled test images and words of other classes."""
    folder = tmp_path / "tiny-imagenet-200"
    for wnid in WORDS:
        for i in range(3):
            save_picture(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 64, 64)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
    for name in VAL:
        save_picture(folder / "val" / "images" / name, 64, 64)
    save_picture(folder / "test" / "images" / "test_0.JPEG", 64, 64)
    (folder / "wnids.txt").write_text("\n".join(WORDS))
    words = {"n00001740": "entity", **WORDS}
    (folder / "words.txt").write_text("".join(f"{k}\t{v}\n" for k, v in words.items()))
    lines = [f"{name}\t{wnid}\t0\t32\t44\t62\n" for name, wnid in VAL.items()]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("inside", [False, True])
def test_labels_come_from_folders_and_annotations(archive, inside):
    root = archive if inside else archive.parent
    source = open_source("tiny-imagenet", root=root, image_size=64)
    assert source.name == "tiny-imagenet"
    order = sorted(WORDS)
    assert source.classes == tuple(WORDS[wnid] for wnid in order)
    train, test = source.train, source.test
    assert dict(zip(test.names, test.labels.tolist(), strict=True)) == {
        f"val/images/{name}": order.index(wnid) for name, wnid in VAL.items()
    }
    assert dict(zip(train.names, train.labels.tolist(), strict=True)) == {
        f"train/{wnid}/images/{wnid}_{i}.JPEG": label
        for label, wnid in enumerate(order)
        for i in range(3)
    }
    assert (train.images.side, train.images.fills_frame) == (64, True)


def test_words_are_optional(archive):
    (archive / "words.txt").unlink()
    source = open_source("tiny-imagenet", root=archive, image_size=64)
    assert source.classes == tuple(sorted(WORDS))


def _damage(archive: Path, kind: str) -> None:
    table = archive / "val" / "val_annotations.txt"
    text = table.read_text()
    if kind == "cut line":
        table.write_text(text + "val_2.JPEG")
    elif kind == "unknown class":
        table.write_text(text.replace("n07749582", "n07749583"))
    elif kind == "image not there":
        table.write_text(text.replace("val_10", "val_11"))
    elif kind == "twice":
        table.write_text(text + text.splitlines()[0] + "\n")
    elif kind == "image without a line":
        table.write_text("".join(text.splitlines(keepends=True)[1:]))
    elif kind == "no table":
        table.unlink()
    elif kind == "not text":
        table.write_bytes(b"\xff\xfe\x00")
    elif kind == "no such class folder":
        (archive / "wnids.txt").write_text("\n".join([*WORDS, "n99999999"]))
    elif kind == "unknown class folder":
        (archive / "wnids.txt").write_text("\n".join(sorted(WORDS)[:2]))
    elif kind == "class twice":
        (archive / "wnids.txt").write_text("n02124075\nn02124075")
    elif kind == "no wnids":
        (archive / "wnids.txt").unlink()


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("cut line", ["val_annotations.txt", "line 4", "has no class"]),
        ("unknown class", ["line 1", "'n07749583'", "no class of wnids.txt"]),
        ("image not there", ["line 3", "'val_11.JPEG'", "is not in"]),
        ("twice", ["line 4", "'val_0.JPEG' a second time"]),
        ("image without a line", ["no line for 1 image", "'val_0.JPEG'"]),
        ("no table", ["val_annotations.txt", "is not there", "data.root"]),
        ("not text", ["val_annotations.txt", "is damaged"]),
        ("no such class folder", ["only one of the two has 'n99999999'"]),
        ("unknown class folder", ["only one of the two has 'n07749582'"]),
        ("class twice", ["wnids.txt", "twice"]),
        ("no wnids", ["wnids.txt", "is not there", "tiny-imagenet-200.zip"]),
    ],
)
def test_damage_is_named(archive, kind, parts):
    _damage(archive, kind)
    with pytest.raises(UserError) as caught:
        open_source("tiny-imagenet", root=archive, image_size=64)
    for part in ["'tiny-imagenet'", *parts]:
        assert part in str(caught.value)
