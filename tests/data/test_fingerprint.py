"""A fingerprint tells whether the images are still those of a run."""

import shutil
from pathlib import Path

import pytest
import torch

from deepbregman.data import ArrayImages, FileImages, fingerprint, open_source
from deepbregman.data import images as images_module


def _of(folder: Path) -> str:
    return fingerprint(open_source(str(folder), image_size=8).train.images)


@pytest.fixture
def folder(tmp_path, save_picture) -> Path:
    for i in range(10):
        save_picture(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png", seed=i)
    return tmp_path / "photos"


def test_moved_folder_has_the_same(folder):
    before = _of(folder)
    assert len(before) == 32
    (folder.parent / "deep" / "below").mkdir(parents=True)
    assert _of(Path(shutil.move(folder, folder.parent / "deep" / "below" / "x"))) == before


def test_does_not_depend_on_the_frame(folder):
    paths = tuple(sorted(folder.rglob("*.png")))
    assert fingerprint(FileImages(paths, 8)) == fingerprint(FileImages(paths, 16, True))


def test_other_pixels_under_the_same_names(folder, save_picture):
    before = _of(folder)
    for path in folder.rglob("*.png"):
        save_picture(path, seed=100)  # noise of the same size
    assert _of(folder) != before


@pytest.mark.parametrize("change", ["renamed", "moved", "removed", "added", "one byte"])
def test_small_changes(folder, save_picture, change):
    paths = tuple(sorted(folder.rglob("*.png")))
    before, last = fingerprint(FileImages(paths, 8)), paths[-1]
    if change == "renamed":
        paths = (*paths[:-1], last.rename(last.with_name("zz.png")))
    elif change == "moved":  # to another class
        (folder / "c").mkdir()
        paths = (*paths[:-1], last.rename(folder / "c" / last.name))
    elif change == "removed":
        paths = paths[:-1]
    elif change == "added":
        save_picture(folder / "b" / "zz.png")
        paths = (*paths, folder / "b" / "zz.png")
    else:
        last.write_bytes(last.read_bytes()[:-1] + b"x")
    assert fingerprint(FileImages(paths, 8)) != before


def test_file_that_is_gone_is_a_change(folder):
    paths = tuple(sorted(folder.rglob("*.png")))
    before = fingerprint(FileImages(paths, 8))
    paths[3].unlink()
    assert fingerprint(FileImages(paths, 8)) != before


def test_arrays():
    pixels = torch.arange(5 * 3 * 4 * 4, dtype=torch.uint8).reshape(5, 3, 4, 4)
    before = fingerprint(ArrayImages(pixels))
    last = pixels.contiguous(memory_format=torch.channels_last)
    assert fingerprint(ArrayImages(last)) == before
    assert fingerprint(ArrayImages(pixels, torch.full((5, 2), 4))) == before  # all fill their frame
    assert fingerprint(ArrayImages(pixels, torch.full((5, 2), 3))) != before
    assert fingerprint(ArrayImages(pixels.flip(0))) != before
    assert fingerprint(ArrayImages(pixels[:4])) != before
    assert fingerprint(ArrayImages(pixels[:0])) != before


@pytest.mark.parametrize("place", range(10))
def test_another_size_of_any_file_is_a_change_though_few_are_read(folder, monkeypatch, place):
    monkeypatch.setattr(images_module, "_HASHED", 2)
    images = FileImages(tuple(sorted(folder.rglob("*.png"))), 8)
    before = fingerprint(images)
    with images.paths[place].open("ab") as file:
        file.write(b"x")
    assert fingerprint(images) != before


def test_pixels_that_are_read_of_many_lie_in_all_parts_of_an_array():
    pixels = torch.zeros(2000, 3, 1, 1, dtype=torch.uint8)
    before = fingerprint(ArrayImages(pixels))
    for start in range(0, 2000, 100):
        changed = pixels.clone()
        changed[start : start + 100] = 1
        assert fingerprint(ArrayImages(changed)) != before


def test_reads_few_files_of_many(folder, monkeypatch):
    opened: list[Path] = []
    reading = Path.open

    def counted(path: Path, *arguments: str) -> object:
        opened.append(path)
        return reading(path, *arguments)

    monkeypatch.setattr(Path, "open", counted)
    fingerprint(FileImages(tuple(folder / f"{i}.png" for i in range(5_000)), 8))
    assert len(opened) <= 256
