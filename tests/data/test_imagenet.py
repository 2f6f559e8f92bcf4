"""ImageNet's class folders, against labels that the test gives itself."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepbregman.data import Source, open_source
from deepbregman.data import listings as listings_module
from deepbregman.errors import UserError

Save = Callable[..., np.ndarray]
WNIDS = ("n02123045", "n01440764", "n01443537")  # not in their order


def _make(root: Path, save_picture: Save) -> dict[str, str]:
    """Write three classes; return the class of each file by its name under imagenet."""
    made = {}
    for number, wnid in enumerate(WNIDS):
        for i in range(2 + number):
            made[f"train/{wnid}/{wnid}_{i}.JPEG"] = wnid
        made[f"val/{wnid}/ILSVRC2012_val_{number:08d}.JPEG"] = wnid
    for name in made:
        save_picture(root / name)
    return made


def _found(source: Source) -> dict[str, str]:
    assert source.test is not None
    found = {}
    for split in (source.train, source.test):
        for name, label in zip(split.names, split.labels.tolist(), strict=True):
            found[name] = source.classes[label]
    return found


@pytest.mark.parametrize("inside", ["imagenet", "."])
def test_classes_by_wordnet_number(tmp_path, save_picture, inside):
    made = _make(tmp_path / inside, save_picture)
    source = open_source("imagenet", root=tmp_path, image_size=32)
    assert (source.name, source.classes) == ("imagenet", tuple(sorted(WNIDS)))
    assert _found(source) == made
    assert all(name.startswith("train/") for name in source.train.names)
    folder = tmp_path / inside
    assert all(path.is_file() for path in source.train.images.paths)
    assert source.train.images.paths[0] == folder / source.train.names[0]


def test_a_large_set_is_opened_without_reading_a_file(tmp_path, save_picture, monkeypatch):
    made = _make(tmp_path, save_picture)
    for name in made:
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(listings_module, "FULL_DECODE_LIMIT", len(made) - 1)
    source = open_source("imagenet", root=tmp_path, image_size=224)
    assert _found(source) == made
    assert (source.train.images.side, source.train.images.fills_frame) == (504, False)


def test_a_small_one_is_looked_at_file_by_file(tmp_path, save_picture):
    made = _make(tmp_path, save_picture)
    broken = next(iter(made))
    (tmp_path / broken).write_bytes(b"")
    with pytest.raises(UserError, match=Path(broken).name):
        open_source("imagenet", root=tmp_path, image_size=224)
    source = open_source("imagenet", root=tmp_path, image_size=224, skip_unreadable=True)
    assert [Path(name).name for name in source.skipped] == [Path(broken).name]


def test_without_val_there_is_no_invented_test_split(tmp_path, save_picture):
    """Setting a fifth aside would be taken for the official validation split."""
    for wnid in WNIDS:
        for i in range(5):
            save_picture(tmp_path / "train" / wnid / f"{i}.JPEG")
    source = open_source("imagenet", root=tmp_path, image_size=32)
    assert source.test is None
    assert len(source.train) == 15


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ([], ["imagenet/train", "is not there", "ILSVRC2012_img_train.tar", "data.root"]),
        (["train/n01440764/a.JPEG", "val/ILSVRC2012_val_00000001.JPEG"], ["val", "directly in it"]),
        (["train/n01440764/a.JPEG", "train/cats/a.JPEG"], ["'cats'", "n01440764", "by its path"]),
        (
            ["train/n01440764/a.JPEG", "val/n01443537/a.JPEG"],
            ["'n01443537'", "train does not have"],
        ),
        (["train/notes.txt"], ["no image in it"]),
    ],
)
def test_other_layouts_are_refused(tmp_path, save_picture, files, parts):
    for name in files:
        if name.endswith(".txt"):
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text("")
        else:
            save_picture(tmp_path / name)
    with pytest.raises(UserError) as caught:
        open_source("imagenet", root=tmp_path, image_size=32)
    for part in ["'imagenet'", *parts]:
        assert part in str(caught.value)
