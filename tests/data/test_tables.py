"""A CSV file that names images and their labels, as a dataset."""

import unicodedata
from pathlib import Path

import pytest

from deepbregman.data import Source, open_source, typical_side
from deepbregman.data.datasets import check_labels, check_source, has_labels
from deepbregman.errors import Notice, UserError


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def labels_of(source: Source) -> list[dict[str, str]]:
    """Return the class of each image by name, split by split."""
    assert source.classes is not None
    return [
        {
            name: source.classes[label]
            for name, label in zip(split.names, split.labels.tolist(), strict=True)
        }
        for split in (source.train, source.test)
        if split is not None
    ]


def test_a_table_of_class_folders_is_the_same_dataset_as_the_folders(tmp_path, save_picture):
    for index in range(10):
        for name in ("cats", "dogs"):
            save_picture(tmp_path / name / f"{index}.png", height=9)
    folders = open_source(str(tmp_path), image_size=32)
    lines = [f"{name}/{index}.png,{name}" for index in (3, *range(10)) for name in ("dogs", "cats")]
    table = write(tmp_path / "labels.csv", "image,label", *lines, "", ",")  # empty lines at the end
    assert has_labels(table)
    assert typical_side(table) == 6
    listing = check_labels(table)
    assert listing is not None
    for found in (
        open_source(table, image_size=32),
        open_source(table, image_size=32, listing=listing),
    ):
        assert found.classes == folders.classes
        assert labels_of(found) == labels_of(folders)
        assert found.name == "labels.csv"


@pytest.mark.parametrize("end", [".jpg", ""])
def test_images_are_found_by_their_file_name_below_the_table(tmp_path, save_picture, end):
    lesions = {f"ISIC_{index}": ("mel", "nv")[index % 2] for index in range(6)}
    for index, name in enumerate(lesions):
        save_picture(tmp_path / f"part_{index % 3}" / f"{name}.jpg")
    lines = [f"{name}{end};{label};test" for name, label in lesions.items()]
    lines[:4] = [line.replace("test", "Training") for line in lines[:4]]
    table = write(tmp_path / "meta.CSV", "image_id;class;split", *lines)
    train, test = labels_of(open_source(table, image_size=32))
    assert train == {
        "part_0/ISIC_0.jpg": "mel",
        "part_0/ISIC_3.jpg": "nv",
        "part_1/ISIC_1.jpg": "nv",
        "part_2/ISIC_2.jpg": "mel",
    }
    assert test == {"part_1/ISIC_4.jpg": "mel", "part_2/ISIC_5.jpg": "nv"}


def test_images_are_found_however_their_accents_are_written(tmp_path, save_picture):
    apart, joined = (unicodedata.normalize(form, "é") for form in ("NFD", "NFC"))
    names = [
        f"{apart}1.png",
        f"{apart}2.png",
        f"{joined}3.png",
        f"{joined}4.png",
    ]  # as macOS, Linux
    for name in names:
        save_picture(tmp_path / "photos" / name)
    swap = str.maketrans({apart[0]: joined, apart[1]: None, joined: apart})
    lines = [f"{name.translate(swap)},{'ab'[i % 2]}" for i, name in enumerate(names)]
    train, test = labels_of(
        open_source(write(tmp_path / "l.csv", "image,label", *lines), image_size=8)
    )
    assert train | test == {f"photos/{name}": "ab"[i % 2] for i, name in enumerate(names)}


def test_a_whole_file_name_counts_before_one_without_its_extension(tmp_path, save_picture):
    for name in ("1.jpg", "1.jpg.png", "2.png", "3.png", "4.png"):
        save_picture(tmp_path / "photos" / name)
    table = write(tmp_path / "l.csv", "image,label", "1.jpg,a", "2,a", "3,b", "4,b")
    train, test = labels_of(open_source(table, image_size=8))
    assert (train | test)["photos/1.jpg"] == "a"
    assert len(train | test) == 4


def test_a_table_may_lie_beside_the_folder_of_its_images(tmp_path, save_picture, monkeypatch):
    for index in range(4):
        save_picture(tmp_path / "images" / f"{index}.png")
    (tmp_path / "meta").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ("../images/0.png", "../images/1.png", "~/images/2.png", tmp_path / "images/3.png")
    lines = [f"{path},{'ab'[index % 2]}" for index, path in enumerate(paths)]
    write(tmp_path / "meta" / "labels.csv", "image,label", *lines)
    monkeypatch.chdir(tmp_path / "meta")
    both = labels_of(open_source("labels.csv", image_size=32))
    assert both[0] | both[1] == {f"images/{index}.png": "ab"[index % 2] for index in range(4)}


def test_val_is_the_test_split_only_where_there_is_no_test(tmp_path, save_picture):
    for index in range(8):
        save_picture(tmp_path / f"{index}.png")
    words = ["", "train", "train", "train", "val", "valid", "test", "test"]
    lines = [f"{index}.png,{'ab'[index % 2]},{word}" for index, word in enumerate(words)]
    table = write(tmp_path / "three.csv", "image,label,split", *lines)
    train, test = labels_of(open_source(table, image_size=32))
    assert [*train] == ["0.png", "1.png", "2.png", "3.png"]
    assert [*test] == ["6.png", "7.png"]
    table = write(tmp_path / "two.csv", "image,label,split", *lines[:6])
    assert [*labels_of(open_source(table, image_size=32))[1]] == ["4.png", "5.png"]


def test_images_without_a_label_and_predicted_labels_are_left_out(tmp_path, save_picture):
    for index in range(7):
        save_picture(tmp_path / f"{index}.png")
    lines = [f"{index}.png,{'ab'[index % 2]},yes" for index in range(4)]
    lines += ["4.png,,yes", "5.png,a,no", "6.png,b,"]
    table = write(tmp_path / "all.csv", "image,label,given", *lines)
    with pytest.warns(Notice, match="3 of its 7 images have no label .* name their folder"):
        source = open_source(table, image_size=32)
    both = labels_of(source)
    assert sorted(both[0] | both[1]) == ["0.png", "1.png", "2.png", "3.png"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["file,label", "a.png,x", "b.png,y", "away.png,x"],
            r"1 name \('away.png'\) belong to no image in or below its folder",
        ),
        (["image,label", "same,x", "b.png,y"], r"1 name \('same'\) belong to several images"),
        (["image,label", "a.png,x", "b.png,y", "a.png,y"], r"'a.png' is 'x' .* and 'y' .* one"),
        (
            ["image,label,split", "a.png,x,train", "b.png,y,train", "a.png,x,test"],
            r"'a.png' is 'x' \(train\) and 'x' \(test\)",
        ),
        (["image,label", "a.png,x", "b.png,x"], r"2 labels, all 'x'"),
        (["image,label", "a.png,", "b.png,"], r"no image has a label"),
        (["a.png,x", "b.png,y"], r"must name the columns"),
        (
            ["image,label,split", "a.png,x,tset", "b.png,y,train"],
            r"split says 'tset'; write one of train, .* leave the column out",
        ),
        (
            [
                *("image,label,split", "a.png,x,train", "b.png,x,train"),
                *("c.png,y,test", "d.png,y,test"),
            ],
            r"test split has classes .*'y'.* training images",
        ),
    ],
)
def test_what_a_table_cannot_say_is_refused(tmp_path, save_picture, lines, words):
    for name in ("a.png", "b.png", "c.png", "d.png", "one/same.png", "two/same.png"):
        save_picture(tmp_path / name)
    table = write(tmp_path / "labels.csv", *lines)
    for use in (check_source, lambda path: open_source(path, image_size=32)):
        with pytest.raises(UserError, match=words):
            use(table)


def test_a_table_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"'away.csv': no such file; .* columns image and label"):
        check_source("away.csv")
