"""What opening a large folder found is kept: the next start reads no file again."""

import os
from collections import Counter
from pathlib import Path

import pytest

from deepbregman.data import Source, UnreadableImage, listings, open_source
from deepbregman.data.decoding import measure_decoded, read_size
from deepbregman.errors import UserError


@pytest.fixture
def reads(tmp_path, monkeypatch) -> Counter[str]:
    """Count how often a header is read and a file decoded; every folder counts as large."""
    counted: Counter[str] = Counter()

    def header(path: Path) -> tuple[int, int]:
        counted["header"] += 1
        return read_size(path)

    def decoded(path: Path, side: int) -> object:
        counted["decoded"] += 1
        return measure_decoded(path, side)

    monkeypatch.setattr(listings, "read_size", header)
    monkeypatch.setattr(listings, "measure_decoded", decoded)
    monkeypatch.setattr(listings, "CACHED_FROM", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return counted


@pytest.fixture
def folder(tmp_path, save_picture) -> Path:
    for i in range(6):
        save_picture(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png", 6 + i, 9, seed=i)
    return tmp_path / "photos"


def _open(folder: Path, skip: bool = False) -> Source:
    return open_source(str(folder), image_size=4, skip_unreadable=skip)


def _facts(source: Source) -> object:
    images = source.train.images
    return images.paths, images.side, images.fills_frame, len(source.skipped)


@pytest.mark.parametrize("limit", [0, 100])
def test_second_start_reads_nothing(folder, reads, monkeypatch, limit):
    monkeypatch.setattr(listings, "FULL_DECODE_LIMIT", limit)
    first = _open(folder)
    assert reads == ({"header": 6, "decoded": 6} if limit else {"header": 6})
    reads.clear()
    assert _facts(_open(folder)) == _facts(first)
    assert not reads
    # The other way of looking has its own memory: a header does not tell that a file is whole.
    monkeypatch.setattr(listings, "FULL_DECODE_LIMIT", 100 - limit)
    _open(folder)
    assert reads["header"] == 6


@pytest.mark.parametrize("change", ["content", "time", "added"])
def test_changed_folder_is_read_again(folder, reads, save_picture, change):
    _open(folder)
    reads.clear()
    if change == "content":
        save_picture(folder / "a" / "0.png", 30, 30)
    elif change == "time":
        os.utime(folder / "a" / "0.png", ns=(1, 1))
    else:
        save_picture(folder / "a" / "99.png")
    _open(folder)
    assert reads["header"] == (7 if change == "added" else 6)
    kept = list((folder.parent / "cache" / "deepbregman" / "sizes").iterdir())
    assert len(kept) == 1  # what was known of the folder before is gone


def test_only_unreadable_files_are_tried_again(folder, reads):
    (folder / "b" / "3.png").write_bytes(b"damaged")
    first = _open(folder, skip=True)
    assert len(first.skipped) == 1
    reads.clear()
    assert _facts(_open(folder, skip=True)) == _facts(first)
    assert reads == {"header": 1}
    with pytest.raises(UnreadableImage, match=r"3\.png"):
        _open(folder)


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\x93NUMPY\x01\x00"])
def test_damaged_memory_is_written_anew(folder, reads, damage):
    expected = _facts(_open(folder))
    (kept,) = (folder.parent / "cache" / "deepbregman" / "sizes").iterdir()
    content = kept.read_bytes()
    kept.write_bytes(damage)
    reads.clear()
    assert _facts(_open(folder)) == expected
    assert reads["header"] == 6
    assert kept.read_bytes() == content


def test_without_a_place_for_it_all_goes_on(folder, reads, monkeypatch):
    (folder.parent / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "taken"))
    expected = _facts(_open(folder))
    assert _facts(_open(folder)) == expected
    assert reads["header"] == 12


def test_small_folders_leave_no_trace(folder, tmp_path, reads, monkeypatch):
    monkeypatch.setattr(listings, "CACHED_FROM", 1000)
    _open(folder)
    assert not (tmp_path / "cache").exists()


def test_nothing_readable_is_an_error_each_time(folder, reads):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(UserError, match="none of its 6 images"):
            _open(folder, skip=True)
