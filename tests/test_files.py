"""Files that replace others and keep them, what a killed writer leaves, and the lock."""

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deepbregman.errors import UserError
from deepbregman.files import clear_temporaries, exclusive, exclusively, replacing

HOLDING = """
import pathlib, sys
from deepbregman.files import exclusive
with exclusive(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
WAITED_FOR = HOLDING.replace("exclusive", "exclusively")


def write(path: Path, text: str, keep: Path | None = None) -> None:
    with replacing(path, keep) as file:
        file.write(text.encode())


def no_links(path: Path, target: Path) -> None:
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("links", [True, False])
def test_the_file_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    path, keep = tmp_path / "file", tmp_path / "before"
    write(path, "first", keep)
    assert os.listdir(tmp_path) == ["file"]
    for old, new in (("first", "second"), ("second", "third")):
        write(path, new, keep)
        assert (path.read_text(), keep.read_text()) == (new, old)
    assert sorted(os.listdir(tmp_path)) == ["before", "file"]


def test_a_kept_file_that_is_the_file_itself(tmp_path: Path) -> None:
    """As a kill between keeping and replacing leaves it; a rename onto it would do nothing."""
    path, keep = tmp_path / "file", tmp_path / "before"
    path.write_text("first")
    keep.hardlink_to(path)
    write(path, "second", keep)
    assert (path.read_text(), keep.read_text()) == ("second", "first")
    assert sorted(os.listdir(tmp_path)) == ["before", "file"]


def test_a_failing_write_keeps_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_temporaries_are_cleared_and_nothing_else(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="is in use by") as caught, exclusive(folder):
        pass
    return str(caught.value)


def test_a_folder_is_held_once_in_a_process_and_free_after(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for _ in range(2):
        with exclusive(tmp_path / "run"), exclusive(tmp_path):
            said = refusal(tmp_path / "link")
            assert f"process {os.getpid()} on {platform.node()} since " in said
    with exclusive(tmp_path):  # and being refused here does not let others in
        refusal(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", HOLDING, str(tmp_path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"in use by process {os.getpid()} " in done.stderr
    with pytest.raises(ValueError, match="inside"), exclusive(tmp_path):
        raise ValueError("inside")
    with exclusive(tmp_path):
        pass


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_another_process_is_refused_until_the_holder_is_gone(tmp_path: Path, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        assert f"process {holder.pid} on {platform.node()} since " in refusal(tmp_path)
        holder.kill() if how == "is killed" else holder.stdin.close()
        holder.wait()
    with exclusive(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_text() == ""


def test_forked_workers_do_not_hold_the_folder_on(tmp_path: Path) -> None:
    """A worker that outlives a killed run for a moment must not keep it from being resumed."""
    program = (
        "import os, pathlib, sys, time; from deepbregman.files import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])):\n"
        "    worker = os.fork()\n"
        "    if worker: print(worker, flush=True); os._exit(9)\n"
        "    sys.stdin.read(); os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.wait()
        os.kill(worker, 0)  # it lives
        with exclusive(tmp_path):
            pass
        assert process.stdin is not None
        process.stdin.close()


def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither lock fails there, and the one that is waited for does not wait."""
    import errno
    import fcntl

    tried: list[str] = []
    for name in ("lockf", "flock"):

        def missing(*arguments: object, name: str = name) -> None:
            tried.append(name)
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, name, missing)
    with exclusive(tmp_path), exclusively(tmp_path / "lock", 0.0):
        pass
    assert set(tried) == {"lockf", "flock"}


# The lock that is waited for


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_file_is_waited_for_until_its_holder_is_gone(tmp_path: Path, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITED_FOR, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        words = r"lock has been held by another process for 0.05 seconds"
        with pytest.raises(UserError, match=words), exclusively(tmp_path / "lock", 0.05):
            pass
        end = holder.kill if how == "is killed" else holder.stdin.close
        begun = time.monotonic()
        threading.Timer(0.2, end).start()
        with exclusively(tmp_path / "lock", 60.0):
            assert 0.2 <= time.monotonic() - begun < 30.0
        holder.wait()


def test_a_file_is_let_go_of_by_an_error_and_to_other_threads(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(ValueError, match="inside"), exclusively(path):
        raise ValueError("inside")
    seen: list[str] = []

    def second() -> None:
        with exclusively(path):
            seen.append("second")

    with exclusively(path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        seen.append("first")
    thread.join()
    assert seen == ["first", "second"]


def test_a_process_forked_meanwhile_does_not_hold_a_file_on(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys; from deepbregman.files import exclusively\n"
        "with exclusively(pathlib.Path(sys.argv[1])):\n"
        "    if os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
        "print('free', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "free\n"
        with exclusively(tmp_path / "lock", 5.0):
            pass
        process.stdin.close()
