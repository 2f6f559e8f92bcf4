"""Files that replace others and keep them, what a killed writer leaves, and the lock."""

import errno
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepbregman.errors import UserError
from deepbregman.files import (
    check_shape,
    clear_temporaries,
    create_file,
    digest,
    digest_files,
    hold_folder,
    hold_lock,
    open_inside,
    parse_json,
    read_json,
    replace_file,
)

HOLDING = """
import pathlib, sys
from deepbregman.files import hold_folder
with hold_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
WAITED_FOR = HOLDING.replace("hold_folder", "hold_lock")


def write(path: Path, text: str, keep: Path | None = None) -> None:
    with replace_file(path, keep) as file:
        file.write(text.encode())


def no_links(path: Path, target: Path) -> None:
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("links", [True, False])
def test_the_file_before_is_kept(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    path, keep = tmp_path / "file", tmp_path / "before"
    write(path, "first", keep)
    assert os.listdir(tmp_path) == ["file"]
    for old, new in (("first", "second"), ("second", "third")):
        write(path, new, keep)
        assert (path.read_text(), keep.read_text()) == (new, old)
    assert sorted(os.listdir(tmp_path)) == ["before", "file"]


def test_a_kept_file_that_is_the_file_itself(tmp_path):
    """As a kill between keeping and replacing leaves it; a rename onto it would do nothing."""
    path, keep = tmp_path / "file", tmp_path / "before"
    path.write_text("first")
    keep.hardlink_to(path)
    write(path, "second", keep)
    assert (path.read_text(), keep.read_text()) == ("second", "first")
    assert sorted(os.listdir(tmp_path)) == ["before", "file"]


def test_a_failing_write_keeps_nothing_new(tmp_path, monkeypatch):
    path, keep = tmp_path / "file", tmp_path / "before"
    write(path, "first")
    write(path, "second", keep)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        write(path, "third", keep)
    assert caught.value.filename == str(path)
    assert (path.read_text(), keep.read_text()) == ("second", "first")
    assert sorted(os.listdir(tmp_path)) == ["before", "file"]


def test_temporaries_are_cleared_and_nothing_else(tmp_path):
    kept = [
        "last.pt",
        ".lock",
        ".hidden",
        ".last.pt",
        ".last.pt.12",
        ".last.pt.0123456g",
        "a.deadbeef",
    ]
    for name in [*kept, ".last.pt.01234567", ".a b.deadbeef"]:
        (tmp_path / name).touch()
    (tmp_path / ".folder.01234567").mkdir()
    clear_temporaries(tmp_path, frozenset({"other"}))
    assert len(os.listdir(tmp_path)) == len(kept) + 3
    clear_temporaries(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, ".folder.01234567"])


# The lock


def refusal(folder: Path) -> str:
    with pytest.raises(UserError, match="is in use by") as caught, hold_folder(folder):
        pass
    return str(caught.value)


def test_a_folder_is_held_once_in_a_process_and_free_after(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for _ in range(2):
        with hold_folder(tmp_path / "run"), hold_folder(tmp_path):
            said = refusal(tmp_path / "link")
            assert f"process {os.getpid()} on {platform.node()} since " in said
    with hold_folder(tmp_path):  # and being refused here does not let others in
        refusal(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", HOLDING, str(tmp_path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"in use by process {os.getpid()} " in done.stderr
    with pytest.raises(ValueError, match="inside"), hold_folder(tmp_path):
        raise ValueError("inside")
    with hold_folder(tmp_path):
        pass


@contextmanager
def start(program: str, path: Path) -> Iterator[Any]:
    """Start a Python program with a path as its argument, its streams as pipes."""
    words = [sys.executable, "-c", program, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_another_process_is_refused_until_the_holder_is_gone(tmp_path, how):
    with start(HOLDING, tmp_path) as holder:
        assert holder.stdout.readline() == "held\n"
        assert f"process {holder.pid} on {platform.node()} since " in refusal(tmp_path)
        holder.kill() if how == "is killed" else holder.stdin.close()
        holder.wait()
    with hold_folder(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_text() == ""


def test_forked_workers_do_not_hold_the_folder_on(tmp_path):
    """A worker that outlives a killed run for a moment must not keep it from being resumed."""
    program = (
        "import os, pathlib, sys, time; from deepbregman.files import hold_folder\n"
        "with hold_folder(pathlib.Path(sys.argv[1])):\n"
        "    worker = os.fork()\n"
        "    if worker: print(worker, flush=True); os._exit(9)\n"
        "    sys.stdin.read(); os._exit(0)"
    )
    with start(program, tmp_path) as process:
        worker = int(process.stdout.readline())
        process.wait()
        os.kill(worker, 0)  # it lives
        with hold_folder(tmp_path):
            pass
        process.stdin.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch, number):
    """The lock does not fail there, and does not wait."""

    def missing(*arguments: object) -> None:
        raise OSError(number, "No locks here")

    monkeypatch.setattr("fcntl.flock", missing)
    with hold_folder(tmp_path), hold_folder(tmp_path), hold_lock(tmp_path / "lock") as is_held:
        assert is_held
    assert sorted(os.listdir(tmp_path)) == [".lock", "lock"]


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_file_is_waited_for_until_its_holder_is_gone(tmp_path, how):
    with start(WAITED_FOR, tmp_path / "lock") as holder:
        assert holder.stdout.readline() == "held\n"
        with hold_lock(tmp_path / "lock", 0.05) as is_held:
            assert not is_held
        end = holder.kill if how == "is killed" else holder.stdin.close
        begun = time.monotonic()
        threading.Timer(0.2, end).start()
        with hold_lock(tmp_path / "lock", 60.0) as is_held:
            assert is_held
            assert 0.2 <= time.monotonic() - begun < 30.0
        holder.wait()


def test_a_file_is_let_go_of_by_an_error_and_to_other_threads(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(ValueError, match="inside"), hold_lock(path):
        raise ValueError("inside")
    seen: list[str] = []

    def second() -> None:
        with hold_lock(path):
            seen.append("second")

    with hold_lock(path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        seen.append("first")
    thread.join()
    assert seen == ["first", "second"]


# Links


@pytest.mark.parametrize("nofollow", [True, False])
def test_nothing_is_written_through_a_link(tmp_path, monkeypatch, nofollow):
    if not nofollow:  # as on Windows
        monkeypatch.delattr(os, "O_NOFOLLOW")
    precious, link = tmp_path / "precious", tmp_path / ".lock"
    precious.write_text("x")
    link.symlink_to(precious)
    for write_at in (
        lambda: open_inside(link, "ab"),
        lambda: open_inside(link, "wb"),
        lambda: hold_lock(link).__enter__(),
        lambda: hold_folder(tmp_path).__enter__(),
    ):
        with pytest.raises(UserError, match="is a symbolic link: nothing is written through"):
            write_at()
    with replace_file(link) as file:
        file.write(b"new")
    assert (precious.read_text(), link.read_text(), link.is_symlink()) == ("x", "new", False)


def test_a_link_put_there_after_the_check_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    monkeypatch.setattr(Path, "is_symlink", lambda path: False)
    with pytest.raises(OSError, match="link"):
        open_inside(tmp_path / "link", "wb")
    with pytest.raises(OSError, match="link"), hold_lock(tmp_path / "link"):
        pass
    assert (tmp_path / "precious").read_text() == "x"


# New files


@pytest.mark.parametrize("links", [True, False])
def test_of_two_that_make_one_file_exactly_one_succeeds(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    path = tmp_path / "new"

    def make(text: bytes) -> None:
        with create_file(path) as file:
            file.write(text)
            if text == b"first":
                with create_file(path) as other:
                    other.write(b"second")

    with pytest.raises(UserError, match=r"new exists: another process has written it"):
        make(b"first")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["new"]


# Records


@pytest.mark.parametrize(
    "text", ["1e400", '{"a": -1e999}', "[" * 100_000, "9" * 5000, "{", "\ud800", "nan"]
)
def test_json_that_cannot_be_used_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  # any words
        parse_json(text)


SHAPE = {"name": str, "n": int, "rows": [{"value": float}], "sub": {...: float}}


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"name": "x", "n": 3, "rows": [{"value": 1}, {"value": 0.5, "more": []}], "sub": {"a": 1}},
        {"name": None, "n": 2.0, "rows": None, "other": {"deep": [1]}, "sub": {"a": None}},
        {"rows": [{"value": float("nan")}]},
    ],
)
def test_records_of_the_right_shape(record):
    check_shape(record, SHAPE)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (5, "it is 5, not a JSON object"),
        ({"name": 5}, "name is 5, not text"),
        ({"n": True}, "n is True, not a whole number"),
        ({"n": 1.5}, "n is 1.5, not a whole number"),
        ({"n": float("inf")}, "n is inf, not a whole number"),
        ({"rows": {}}, r"rows is {}, not a list"),
        ({"rows": [1]}, r"rows\[0\] is 1, not a JSON object"),
        ({"rows": [{"value": "1"}]}, r"rows\[0\].value is '1', not a number"),
        ({"sub": 3}, "sub is 3, not a JSON object"),
        ({"sub": {"x": 10**400}}, "sub.x is .*, not a number"),
    ],
)
def test_records_of_another_shape(record, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        check_shape(record, SHAPE)
    if record != {"n": float("inf")}:
        (tmp_path / "r.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match=rf"r.json cannot be used \({words}\): restore it"):
            read_json(tmp_path / "r.json", SHAPE)


@pytest.mark.parametrize("place", [0, 63, 64, 129])
def test_another_size_or_time_of_any_of_many_files_is_another_digest(tmp_path, place):
    paths = [tmp_path / str(index) for index in range(130)]
    for path in paths:
        path.touch()
        os.utime(path, (1, 1))
    before = digest_files(paths)
    os.utime(paths[place], (1, 2))
    assert digest_files(paths) != before
    paths[place].write_text("x")
    os.utime(paths[place], (1, 1))
    assert digest_files(paths) != before


def test_parts_of_a_digest_are_told_apart():
    assert digest(b"ab", b"c") != digest(b"a", b"bc")
