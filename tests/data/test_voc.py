"""The reader of the Pascal VOC devkit, on files in its layout."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.data.decoding import decode_whole
from deepbregman.data.voc import CLASSES, open_voc
from deepbregman.errors import UserError

SHARED = Path(os.environ.get("DEEPBREGMAN_SHARED", Path(__file__).parents[3] / "shared"))
SAMPLE = SHARED / "data" / "voc_mini"


def box(name: str, corners: Sequence[object], difficult: str = "<difficult>0</difficult>") -> str:
    tags = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    inside = "".join(f"<{tag}>{value}</{tag}>" for tag, value in tags)
    return f"<object><name>{name}</name>{difficult}<bndbox>{inside}</bndbox></object>"


def put(devkit: Path, year: str, name: str, objects: str, size: tuple[int, int] = (40, 30)) -> None:
    folder = devkit / year
    for part in ("ImageSets/Main", "Annotations", "JPEGImages"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 120, 30)).save(folder / "JPEGImages" / f"{name}.jpg")
    text = f"<annotation><size><width>1</width><height>1</height></size>{objects}</annotation>"
    (folder / "Annotations" / f"{name}.xml").write_text(text)


def put_list(devkit: Path, year: str, split: str, *names: str) -> Path:
    path = devkit / year / "ImageSets" / "Main" / f"{split}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name}\n" for name in names))
    return path


@pytest.fixture
def devkit(tmp_path) -> Path:
    """A devkit of two years, with one or two images in each split."""
    kit = tmp_path / "VOCdevkit"
    put(kit, "VOC2007", "000001", box("dog", (1, 1, 40, 30)) + box("cat", (3, 4, 10, 12)))
    put(kit, "VOC2007", "000002", box("person", (5, 6, 7, 8), "<difficult>1</difficult>"))
    put(kit, "VOC2007", "000003", box("tvmonitor", (2, 2, 9, 9)), size=(20, 50))
    put(kit, "VOC2012", "2008_000001", box("sofa", ("1.5", "2.25", "20.5", "9")))
    put_list(kit, "VOC2007", "trainval", "000001", "000002")
    put_list(kit, "VOC2007", "test", "000003")
    put_list(kit, "VOC2012", "trainval", "2008_000001")
    return kit


@pytest.mark.parametrize("at_devkit", [True, False])
def test_both_years_are_trained_on_and_2007_is_tested_on(devkit, at_devkit):
    voc = open_voc(devkit if at_devkit else devkit.parent)
    assert voc.train.names == ("VOC2007/000001", "VOC2007/000002", "VOC2012/2008_000001")
    assert voc.test.names == ("VOC2007/000003",)
    assert voc.found == ("VOC2007 trainval", "VOC2012 trainval", "VOC2007 test")
    assert voc.missing == ()
    assert (len(voc.train), len(voc.test)) == (3, 1)


def test_boxes_count_from_zero_and_exclude_their_end(devkit):
    train = open_voc(devkit).train
    first, second, third = train.objects
    # 1-based inclusive (1, 1, 40, 30) is the whole of a 40 x 30 image.
    assert first.boxes.tolist() == [[0.0, 0.0, 40.0, 30.0], [2.0, 3.0, 10.0, 12.0]]
    assert [CLASSES[label] for label in first.labels.tolist()] == ["dog", "cat"]
    assert first.difficult.tolist() == [False, False]
    assert second.difficult.tolist() == [True]
    assert third.boxes.tolist() == [[0.5, 1.25, 20.5, 9.0]]
    assert (first.boxes.dtype, first.labels.dtype) == (torch.float32, torch.int64)


def test_the_size_is_the_image_s_and_cuts_boxes_off(devkit):
    put(devkit, "VOC2007", "000003", box("bus", (0, 11, 25, 60)), size=(20, 50))
    test = open_voc(devkit).test
    assert test.objects[0].boxes.tolist() == [[0.0, 10.0, 20.0, 50.0]]  # the XML says 1 x 1


def test_an_image_without_objects_and_an_object_without_difficult(devkit):
    put(devkit, "VOC2007", "000001", "")
    put(devkit, "VOC2007", "000002", box("cow", (1, 1, 2, 2), ""))
    empty, cow, _ = open_voc(devkit).train.objects
    assert empty.boxes.shape == (0, 4)
    assert empty.labels.shape == empty.difficult.shape == (0,)
    assert cow.difficult.tolist() == [False]


def test_parts_of_a_person_are_no_objects(devkit):
    part = "<part><name>head</name><bndbox><xmin>9</xmin></bndbox></part></object>"
    put(
        devkit,
        "VOC2007",
        "000001",
        box("person", (1, 2, 30, 30)).replace("</object>", part),
    )
    objects = open_voc(devkit).train.objects[0]
    assert objects.boxes.tolist() == [[0.0, 1.0, 30.0, 30.0]]


def test_2007_alone_is_enough(devkit):
    (devkit / "VOC2012" / "ImageSets" / "Main" / "trainval.txt").unlink()
    voc = open_voc(devkit)
    assert voc.found == ("VOC2007 trainval", "VOC2007 test")
    assert voc.missing == ("VOC2012 trainval",)


def test_2012_with_the_test_of_2007_is_enough(devkit):
    (devkit / "VOC2007" / "ImageSets" / "Main" / "trainval.txt").unlink()
    assert open_voc(devkit).train.names == ("VOC2012/2008_000001",)


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        (["VOC2007/test"], ["has VOC2007 trainval, VOC2012 trainval:", "test.txt must"]),
        (["VOC2007/trainval", "VOC2012/trainval"], ["has VOC2007 test:", "trainval.txt must"]),
        (
            ["VOC2007/test", "VOC2007/trainval"],
            ["has VOC2012 trainval:", "VOC2007/ImageSets/Main/test.txt must"],
        ),
        (
            ["VOC2007/test", "VOC2007/trainval", "VOC2012/trainval"],
            ["no split of Pascal VOC", "trainval.txt and", "test.txt must"],
        ),
    ],
)
def test_a_missing_split_says_what_was_found(devkit, gone, says):
    for part in gone:
        year, split = part.split("/")
        (devkit / year / "ImageSets" / "Main" / f"{split}.txt").unlink()
    with pytest.raises(UserError) as error:
        open_voc(devkit)
    for words in says:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("xml", "says"),
    [
        ("<annotation><object></annotation>", "mismatched tag"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><annotation/>', "document type"),
        (f"<annotation>{box('dgo', (1, 1, 2, 2))}</annotation>", "'dgo' is not one of the 20"),
        (f"<annotation>{box('', (1, 1, 2, 2))}</annotation>", "'' is not one of the 20"),
        (f"<annotation>{box('dog', (1, 1, 'x', 2))}</annotation>", "could not convert"),
        (f"<annotation>{box('dog', (9, 1, 2, 2))}</annotation>", "not a box"),
        (f"<annotation>{box('dog', (1, 9, 2, 2))}</annotation>", "not a box"),
        (f"<annotation>{box('dog', ('nan', 1, 2, 2))}</annotation>", "not a box"),
        (f"<annotation>{box('dog', (41, 1, 50, 2))}</annotation>", "40 x 30 pixels"),
        ("<annotation><object><name>dog</name></object></annotation>", "not a box"),
    ],
)
def test_a_bad_annotation_is_named(devkit, xml, says):
    path = devkit / "VOC2007" / "Annotations" / "000002.xml"
    path.write_text(xml)
    with pytest.raises(UserError) as error:
        open_voc(devkit)
    assert str(path) in str(error.value)
    assert says in str(error.value)


def test_a_document_type_cannot_hide_in_another_encoding(devkit):
    path = devkit / "VOC2007" / "Annotations" / "000002.xml"
    hidden = '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a [<!ENTITY b "c">]><annotation/>'
    path.write_bytes(hidden.encode("utf-16"))
    with pytest.raises(UserError, match="cannot be used"):
        open_voc(devkit)


def test_missing_files_are_named(devkit):
    annotation = devkit / "VOC2007" / "Annotations" / "000002.xml"
    annotation.unlink()
    with pytest.raises(UserError, match=r"000002\.xml cannot be used"):
        open_voc(devkit)
    annotation.write_text("<annotation/>")
    (devkit / "VOC2007" / "JPEGImages" / "000001.jpg").write_bytes(b"no photograph")
    with pytest.raises(UserError, match=r"000001\.jpg.*cannot be read"):
        open_voc(devkit)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("../../secret",), "is not the name of an image"),
        (("000001  1",), "is not the name of an image"),
        ((), "names no image, or one twice"),
        (("000001", "000001"), "names no image, or one twice"),
    ],
)
def test_a_bad_list_is_named(devkit, names, says):
    path = put_list(devkit, "VOC2007", "trainval", *names)
    with pytest.raises(UserError) as error:
        open_voc(devkit)
    assert str(path) in str(error.value)
    assert says in str(error.value)


def test_an_image_is_not_trained_on_and_tested_on(devkit):
    put_list(devkit, "VOC2007", "test", "000003", "000001")
    with pytest.raises(UserError, match="VOC2007/000001 is also among the training images"):
        open_voc(devkit)


def test_pixels_are_read_as_stored(tmp_path):
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    note = Image.Exif()
    note[0x0112] = 6  # turned by a quarter; boxes refer to the pixels before that
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=note)
    assert np.array_equal(decode_whole(tmp_path / "turned.png"), pixels.transpose(2, 0, 1))


@pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"the sample of Pascal VOC is not in {SAMPLE}")
def test_the_real_sample_agrees_with_torchvision():
    from torchvision.datasets import VOCDetection

    voc = open_voc(SAMPLE)
    for ours, split in ((voc.train, "trainval"), (voc.test, "test")):
        theirs = VOCDetection(SAMPLE, year="2007", image_set=split)
        assert len(ours) == len(theirs)
        for index, (_, target) in enumerate(theirs):
            notes = target["annotation"]["object"]
            assert [CLASSES[i] for i in ours.objects[index].labels] == [o["name"] for o in notes]
            wanted = [
                [float(note["bndbox"][corner]) for corner in ("xmin", "ymin", "xmax", "ymax")]
                for note in notes
            ]
            shifted = ours.objects[index].boxes + torch.tensor([1.0, 1.0, 0.0, 0.0])
            assert shifted.tolist() == wanted
