import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deepbregman.data import Source, open_source, typical_side
from deepbregman.data import listings as listings_module
from deepbregman.data.folders import list_folder
from deepbregman.errors import Notice, UserError


def _names(source: Source) -> tuple[set[str], set[str] | None]:
    if source.test is None:
        return set(source.train.names), None
    return set(source.train.names), set(source.test.names)


def _label_of(source: Source) -> dict[str, str]:
    """Map each file's name to the name of its class."""
    found = {}
    for split in (source.train, source.test):
        if split is not None and split.labels is not None:
            for name, label in zip(split.names, split.labels.tolist(), strict=True):
                found[name] = source.classes[label]
    return found


def test_flat_folder_with_odd_names(tmp_path, save_picture):
    names = ["a b.JPG", "été.png", "日本 語.jpeg", "x.y.TIFF", "p.ppm", "g.pgm", "b.bmp"]
    names += ["w.webp", "saved-by-a-browser.jfif"]
    for name in names:
        save_picture(tmp_path / name)
    (tmp_path / "notes.TXT").write_text("not an image")
    (tmp_path / "noext").write_text("")
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / ".hidden.png").write_bytes(b"broken, but never looked at")
    save_picture(tmp_path / ".ipynb_checkpoints" / "1.png")
    source = open_source(str(tmp_path), image_size=32)
    assert source.name == tmp_path.name
    assert source.train.names == tuple(sorted(names))
    assert (source.train.labels, source.test, source.classes) == (None, None, None)
    ignored = {".txt": 1, "no extension": 1, "hidden .png": 1}  # nothing of hidden folders
    assert (list_folder(tmp_path).ignored, source.skipped) == (ignored, ())
    assert [path.name for path in source.train.images.paths] == sorted(names)


def test_class_folders_set_a_stratified_fifth_aside(tmp_path, save_picture):
    for i in range(10):
        save_picture(tmp_path / "cats" / f"{i}.png")
        save_picture(tmp_path / "dogs" / "deep" / f"{i}.png")
    (tmp_path / "empty").mkdir()
    source = open_source(str(tmp_path), image_size=32)
    train, test = _names(source)
    assert test is not None
    assert source.classes == ("cats", "dogs")
    assert not train & test
    assert len(train | test) == 20
    # Every version must choose the same images: what one trained on, another would test on.
    random = np.random.RandomState(0)
    expected = {f"cats/{i}.png" for i in random.permutation(10)[:2]}
    assert test == expected | {f"dogs/deep/{i}.png" for i in random.permutation(10)[:2]}
    assert all(name.startswith(label) for name, label in _label_of(source).items())
    assert _names(open_source(str(tmp_path), image_size=32)) == (train, test)


@pytest.mark.parametrize(
    ("train", "test"),
    [("train", "test"), ("train", "val"), ("Training", "Testing"), ("TRAIN", "valid")],
)
def test_train_and_test_folders(tmp_path, save_picture, train, test):
    save_picture(tmp_path / train / "a" / "1.png")
    save_picture(tmp_path / train / "b" / "2.png")
    save_picture(tmp_path / test / "b" / "3.png", height=9)
    source = open_source(str(tmp_path), image_size=32)
    assert _names(source) == ({f"{train}/a/1.png", f"{train}/b/2.png"}, {f"{test}/b/3.png"})
    assert _label_of(source) == {
        f"{train}/a/1.png": "a",
        f"{train}/b/2.png": "b",
        f"{test}/b/3.png": "b",
    }
    assert source.train.images.side == source.test.images.side == 9


def test_test_wins_over_val(tmp_path, save_picture):
    for split in ("train", "test", "val"):
        for label in ("a", "b"):
            save_picture(tmp_path / split / label / "1.png")
    assert _names(open_source(str(tmp_path), image_size=32))[1] == {"test/a/1.png", "test/b/1.png"}


@pytest.mark.parametrize("at", ["9.png", "unknown/9.png"])
def test_a_test_folder_without_classes_gives_way_to_val(tmp_path, save_picture, at):
    """As competitions give them."""
    for split in ("train", "val"):
        for label in ("a", "b"):
            save_picture(tmp_path / split / label / "1.png")
    save_picture(tmp_path / "test" / at)
    assert _names(open_source(str(tmp_path), image_size=32))[1] == {"val/a/1.png", "val/b/1.png"}


@pytest.mark.parametrize("odd", ["val/z/1.png", "val/1.png"])
def test_a_val_folder_that_does_not_fit_is_left_alone(tmp_path, save_picture, odd):
    for path in ("train/a/1.png", "train/b/1.png", "val/a/1.png", odd, "test/9.png"):
        save_picture(tmp_path / path)
    assert _names(open_source(str(tmp_path), image_size=32))[1] == {"test/9.png"}


@pytest.mark.parametrize("name", ["train/1.png", "train/images/1.png"])
def test_unlabelled_training_folder_with_a_labelled_test_folder(tmp_path, save_picture, name):
    save_picture(tmp_path / name)
    save_picture(tmp_path / "test" / "a" / "2.png")
    save_picture(tmp_path / "test" / "b" / "3.png")
    source = open_source(str(tmp_path), image_size=32)
    assert source.train.names == (name,)
    assert source.train.labels is None
    assert _label_of(source) == {"test/a/2.png": "a", "test/b/3.png": "b"}


def test_images_have_one_order_whatever_order_a_file_system_has(
    tmp_path, save_picture, monkeypatch
):
    names = [f"cats/{year}/{i}.png" for year in ("2019", "2020") for i in range(3)]
    for name in names:
        save_picture(tmp_path / name)
    walk = os.walk

    def walk_backwards(*words: Any, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for directory, folders, files in walk(*words, **options):
            folders.sort(reverse=True)
            yield directory, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", walk_backwards)
    assert open_source(str(tmp_path), image_size=32).train.names == tuple(names)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path, save_picture, monkeypatch
):
    for name in ("a/1.png", "b/1.png", "locked/1.png"):
        save_picture(tmp_path / name)
    scan = os.scandir

    def scan_most(path: str) -> Any:
        if os.path.basename(path) == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_most)
    with pytest.raises(UserError, match=r"cannot be listed .*locked.* check its permissions"):
        open_source(str(tmp_path), image_size=32)


def test_a_class_may_be_called_train(tmp_path, save_picture):
    for name in ("bus", "car", "train"):
        save_picture(tmp_path / name / "1.png")
        save_picture(tmp_path / name / "2.png")
    assert open_source(str(tmp_path), image_size=32).classes == ("bus", "car", "train")


def test_single_sub_folder_has_no_labels(tmp_path, save_picture):
    save_picture(tmp_path / "images" / "1.png")
    source = open_source(str(tmp_path), image_size=32)
    assert source.train.names == ("images/1.png",)
    assert (source.train.labels, source.test) == (None, None)


def test_photos_beside_sub_folders_are_used_without_labels(tmp_path, save_picture):
    for name in ("z.png", "2019/1.png", "2020/trip/2.png"):
        save_picture(tmp_path / name)
    with pytest.warns(
        Notice,
        match="1 of 3 images lie beside sub-folders .*'2019', '2020'.*do not count as classes",
    ) as told:
        source = open_source(str(tmp_path), image_size=32)
    assert [one.filename for one in told] == [__file__]  # the line of the user's program
    assert source.train.names == ("2019/1.png", "2020/trip/2.png", "z.png")
    assert source.train.labels is None
    assert source.test is None


def test_links_are_followed_and_loops_are_not(tmp_path, save_picture):
    save_picture(tmp_path / "elsewhere" / "1.png")
    (tmp_path / "data").mkdir()
    save_picture(tmp_path / "data" / "b" / "2.png")
    (tmp_path / "data" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "b" / "again").symlink_to(tmp_path / "data")
    source = open_source(str(tmp_path / "data"), image_size=32)
    assert source.train.names == ("a/1.png", "b/2.png")


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ([], ["no image in it"]),
        (["notes.txt"], ["no image in it", "1 other file (1 .txt)", ".jpeg"]),
        ([".1.png", "a/.2.png", "notes.txt"], ["3 other files (2 hidden .png, 1 .txt)"]),
        (["1.png", "train/2.png"], ["1 image beside sub-folders", "'train'"]),
        (["train/a/1.png", "train/b/1.png", "extra/c/1.png"], ["'extra'", "move the rest"]),
        (
            ["train/a/1.png", "train/b/1.png", "test/c/1.png"],
            ["'c'", "training split does not have"],
        ),
        (["train/a/1.png", "train/1.png"], ["beside sub-folders", "'a'"]),
        (["train/a/1.png", "val/a/1.png", "validation/a/1.png"], ["also 'val'"]),
    ],
)
def test_layouts_that_are_refused(tmp_path, save_picture, files, parts):
    for name in files:
        if name.endswith(".txt"):
            (tmp_path / name).write_text("text")
        else:
            save_picture(tmp_path / name)
    with pytest.raises(UserError) as caught:
        open_source(str(tmp_path), image_size=32)
    for part in [str(tmp_path), *parts]:
        assert part in str(caught.value)


@pytest.fixture
def damaged(tmp_path, save_picture, truncate) -> Path:
    """Two classes of four good images and one that is truncated; one empty file; one text."""
    for label in ("a", "b"):
        for i in range(5):
            save_picture(tmp_path / label / f"{i}.jpg", 40, 40, seed=i)
        truncate(tmp_path / label / "2.jpg")
    (tmp_path / "a" / "empty.png").write_bytes(b"")
    (tmp_path / "b" / "text.jpg").write_text("hello")
    return tmp_path


def test_first_unreadable_image_stops_with_its_name(damaged):
    for expected in ("a/empty.png", "b/text.jpg", "a/2.jpg", "b/2.jpg"):  # headers come first
        with pytest.raises(UserError) as caught:
            open_source(str(damaged), image_size=32)
        assert str(damaged / expected) in str(caught.value)
        assert "--skip-unreadable" in str(caught.value)
        (damaged / expected).unlink()
    open_source(str(damaged), image_size=32)


def test_unreadable_images_are_left_out_and_counted(damaged):
    source = open_source(str(damaged), image_size=32, skip_unreadable=True)
    train, test = _names(source)
    assert test is not None
    assert train | test == {f"{label}/{i}.jpg" for label in "ab" for i in (0, 1, 3, 4)}
    assert set(source.skipped) == {"a/empty.png", "b/text.jpg", "a/2.jpg", "b/2.jpg"}
    named = ", ".join(source.skipped[:3])
    assert source.skipped_notice == f"left out 4 unreadable images ({named}, ...)"
    assert replace(source, skipped=("x.jpg",)).skipped_notice.endswith("1 unreadable image (x.jpg)")
    assert replace(source, skipped=()).skipped_notice == ""
    assert all(name.startswith(label) for name, label in _label_of(source).items())


def test_an_unreadable_test_image_is_left_out_of_the_test_images(tmp_path, save_picture):
    for name in ("train/a/1.png", "train/b/2.png", "train/b/3.png", "test/b/2.png"):
        save_picture(tmp_path / name)
    (tmp_path / "test" / "a").mkdir()
    (tmp_path / "test" / "a" / "1.png").write_bytes(b"")
    source = open_source(str(tmp_path), image_size=32, skip_unreadable=True)
    assert _names(source) == ({"train/a/1.png", "train/b/2.png", "train/b/3.png"}, {"test/b/2.png"})
    assert _label_of(source)["test/b/2.png"] == "b"
    assert source.skipped == ("test/a/1.png",)


def test_large_folders_are_checked_by_their_headers(damaged, monkeypatch):
    monkeypatch.setattr(listings_module, "FULL_DECODE_LIMIT", 11)  # there are twelve
    calls = []
    source = open_source(
        str(damaged),
        image_size=32,
        skip_unreadable=True,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert len(source.skipped) == 2  # the truncated ones still have whole headers
    assert calls[-1] == (12, 12)


def test_files_of_a_large_folder_that_cannot_be_decoded_leave_their_split(damaged, monkeypatch):
    small = open_source(str(damaged), image_size=32, skip_unreadable=True)
    assert listings_module.without_unreadable(small) is small  # all were decoded on opening
    monkeypatch.setattr(listings_module, "FULL_DECODE_LIMIT", 11)  # there are twelve
    opened = open_source(str(damaged), image_size=32, skip_unreadable=True)
    source = listings_module.without_unreadable(opened)
    good = {f"{label}/{i}.jpg" for label in "ab" for i in (0, 1, 3, 4)}
    for before, after in zip(_names(opened), _names(source), strict=True):
        assert before is not None
        assert after == before & good
    assert set(source.skipped) == {"a/empty.png", "b/text.jpg", "a/2.jpg", "b/2.jpg"}
    assert all(name.startswith(label) for name, label in _label_of(source).items())
    assert listings_module.without_unreadable(source) is source


def test_nothing_readable(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(UserError, match="none of its 1 image can be read"):
        open_source(str(tmp_path), image_size=32, skip_unreadable=True)
    with pytest.raises(UserError, match=r"none of 1 image can be read: .*a.png.*\(not an image"):
        typical_side(str(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "image_size", "side", "fills"),
    [
        ([(6, 6), (6, 6)], 32, 6, True),
        ([(6, 6), (6, 5)], 32, 6, False),
        ([(6, 6), (5, 5)], 32, 6, False),
        ([(40, 30), (10, 10)], 7, 16, False),  # ceil(2.25 * 7)
        ([(40, 40), (20, 20)], 7, 16, True),  # both are shrunk to fill it
        ([(200, 199), (30, 30)], 7, 16, True),  # by rounding
        ([(40, 40), (15, 15)], 7, 16, False),
    ],
)
@pytest.mark.parametrize("limit", [20_000, 0])
def test_frame_side(tmp_path, save_picture, monkeypatch, sizes, image_size, side, fills, limit):
    monkeypatch.setattr(listings_module, "FULL_DECODE_LIMIT", limit)
    for i, (height, width) in enumerate(sizes):
        save_picture(tmp_path / f"{i}.png", height, width)
    images = open_source(str(tmp_path), image_size=image_size).train.images
    assert (images.side, images.fills_frame) == (side, fills)


def test_bomb_in_a_folder_is_named_without_a_warning(tmp_path, save_picture):
    save_picture(tmp_path / "good.png")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "bomb.png")
    with pytest.raises(UserError, match=r"bomb\.png.*10000 x 10000 pixels"):
        open_source(str(tmp_path), image_size=32)
    assert len(open_source(str(tmp_path), image_size=32, skip_unreadable=True).skipped) == 1
