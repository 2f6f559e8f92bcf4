"""ISIC 2018 in the challenge's layout, against labels and lesions that the test gives itself."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepbregman.data import Source, open_source
from deepbregman.errors import UserError

Save = Callable[..., np.ndarray]
HEADER = "image,MEL,NV,BCC,AKIEC,BKL,DF,VASC"
KINDS = HEADER.split(",")[1:]
TRAINING = {f"ISIC_{24306 + i:07d}": KINDS[i % 7] for i in range(70)}
TEST = {f"ISIC_{34524 + i:07d}": KINDS[(3 * i) % 7] for i in range(8)}
LESIONS = {image: f"HAM_{i % 35:07d}" for i, image in enumerate(TRAINING)}  # two images each


def _part(folder: Path, part: str, truth: dict[str, str], save_picture: Save) -> None:
    for image in truth:
        save_picture(folder / f"ISIC2018_Task3_{part}_Input" / f"{image}.jpg", 9, 12)
    (folder / f"ISIC2018_Task3_{part}_Input" / "LICENSE.txt").write_text("CC")
    rows = [
        ",".join([image, *("1.0" if kind == name else "0.0" for name in KINDS)])
        for image, kind in truth.items()
    ]
    name = f"ISIC2018_Task3_{part}_GroundTruth"
    (folder / name).mkdir()
    (folder / name / f"{name}.csv").write_text("\n".join([HEADER, *rows]) + "\n")


@pytest.fixture
def isic(tmp_path, save_picture) -> Path:
    folder = tmp_path / "isic2018"
    _part(folder, "Training", TRAINING, save_picture)
    return folder


def _group(folder: Path, lesions: dict[str, str]) -> None:
    rows = [f"{image},{lesion},histopathology" for image, lesion in lesions.items()]
    table = folder / "ISIC2018_Task3_Training_LesionGroupings.csv"
    table.write_text("\n".join(["image,lesion_id,diagnosis_confirm_type", *rows]))


def _kinds(source: Source, part: str) -> dict[str, str]:
    split = getattr(source, part)
    return {
        Path(name).stem: source.classes[label]
        for name, label in zip(split.names, split.labels.tolist(), strict=True)
    }


@pytest.mark.parametrize("inside", [False, True])
def test_official_test_split(isic, save_picture, inside):
    _part(isic, "Test", dict(reversed(TEST.items())), save_picture)  # lines may be in any order
    source = open_source("isic2018", root=isic if inside else isic.parent, image_size=8)
    assert source.classes == tuple(KINDS)
    assert _kinds(source, "train") == TRAINING
    assert _kinds(source, "test") == TEST


def test_without_it_a_fifth_is_set_aside(isic):
    source = open_source("isic2018", root=isic, image_size=8)
    train, test = _kinds(source, "train"), _kinds(source, "test")
    assert train | test == TRAINING
    assert len(test) == 14
    assert sorted(test.values()) == sorted(KINDS * 2)
    assert {LESIONS[image] for image in train} & {LESIONS[image] for image in test}  # no table


def test_no_lesion_lies_on_both_sides(isic):
    _group(isic, LESIONS)
    source = open_source("isic2018", root=isic, image_size=8)
    train, test = _kinds(source, "train"), _kinds(source, "test")
    assert train | test == TRAINING
    assert not {LESIONS[image] for image in train} & {LESIONS[image] for image in test}
    assert sorted(test.values()) == sorted(KINDS * 2)
    assert _kinds(open_source("isic2018", root=isic, image_size=8), "test") == test


def test_lesions_stay_with_their_images_when_some_are_unreadable(isic):
    _group(isic, LESIONS)
    images = isic / "ISIC2018_Task3_Training_Input"
    for image in list(TRAINING)[:30:3]:
        (images / f"{image}.jpg").write_bytes(b"")
    source = open_source("isic2018", root=isic, image_size=8, skip_unreadable=True)
    assert len(source.skipped) == 10
    train, test = _kinds(source, "train"), _kinds(source, "test")
    assert len(train | test) == 60
    assert not {LESIONS[image] for image in train} & {LESIONS[image] for image in test}


def _damage(folder: Path, kind: str) -> None:
    name = "ISIC2018_Task3_Training_GroundTruth"
    table = folder / name / f"{name}.csv"
    text, lines = table.read_text(), table.read_text().splitlines()
    if kind == "row without image":
        (folder / "ISIC2018_Task3_Training_Input" / "ISIC_0024308.jpg").unlink()
    elif kind == "image without row":
        table.write_text("\n".join(lines[:1] + lines[2:]))
    elif kind == "no one":
        table.write_text("\n".join([lines[0], lines[1].replace("1.0", "0.0"), *lines[2:]]))
    elif kind == "two ones":
        table.write_text("\n".join([*lines[:3], lines[3].replace("0.0", "1.0", 1), *lines[4:]]))
    elif kind == "no number":
        table.write_text(text.replace("1.0", "yes", 1))
    elif kind == "cut short":
        table.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:15])
    elif kind == "twice":
        table.write_text(text + lines[1])
    elif kind == "column":
        table.write_text(text.replace("VASC", "VASCULAR"))
    elif kind == "no table":
        table.unlink()
    elif kind == "not text":
        table.write_bytes(b"\xff\xff\x00")
    elif kind == "no images":
        (folder / "ISIC2018_Task3_Training_Input").rename(folder / "elsewhere")
    elif kind == "half a test split":
        (folder / "ISIC2018_Task3_Test_Input").mkdir()
    elif kind == "no lesion":
        _group(folder, {image: LESIONS[image] for image in list(LESIONS)[1:]})
    elif kind == "empty lesion":
        _group(folder, LESIONS | {"ISIC_0024306": ""})


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("row without image", ["GroundTruth.csv", "line 4", "'ISIC_0024308'", "is not in"]),
        ("image without row", ["no line for 1 image", "'ISIC_0024306'"]),
        ("no one", ["line 2", "0 ones", "exactly one"]),
        ("two ones", ["line 4", "2 ones"]),
        ("no number", ["line 2", "other than numbers"]),
        ("cut short", ["line 71", "other than numbers"]),
        ("twice", ["line 72", "'ISIC_0024306' a second time"]),
        ("column", ["no column 'VASC'"]),
        ("no table", ["GroundTruth.csv", "is not there"]),
        ("not text", ["GroundTruth.csv", "cannot be read"]),
        ("no images", ["Training_Input", "is not there", "challenge.isic-archive.com"]),
        ("half a test split", ["Test_GroundTruth", "is not there"]),
        ("no lesion", ["LesionGroupings.csv", "no lesion for 1 image", "'ISIC_0024306'"]),
        ("empty lesion", ["LesionGroupings.csv", "no lesion for 1 image", "'ISIC_0024306'"]),
    ],
)
def test_damage_is_named(isic, kind, parts):
    _damage(isic, kind)
    with pytest.raises(UserError) as caught:
        open_source("isic2018", root=isic, image_size=8)
    for part in ["'isic2018'", *parts]:
        assert part in str(caught.value)
