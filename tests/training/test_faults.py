"""What disk, memory, other processes and impatience do to a run, and what is said about it."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from deepbregman.cli import main
from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, override, to_toml
from deepbregman.files import hold_folder
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.display import Display
from deepbregman.training.faults import Interrupted

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capsys) -> Command:
    """Run the command line; return its exit code and its error, which must be one paragraph."""

    def run(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["pretrain", *map(str, words)])
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "Traceback" not in said
        assert isinstance(caught.value.code, int)
        return caught.value.code, said

    return run


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], Any]) -> None:
    plain = Display.show_step

    def acting(display: Display, done: int) -> None:
        plain(display, done)
        if done == step:
            action()

    monkeypatch.setattr(Display, "show_step", acting)


def saved_step(folder: Path) -> int:
    return int(checkpoints.load(Run.open(folder).last_checkpoint)["step"])


# Memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_out_of_memory(command, recipe, tmp_path, monkeypatch, error):
    def fail(*arguments: Any) -> NoReturn:
        raise error

    at_step(monkeypatch, 3, fail)
    code, said = command(recipe, "--run", tmp_path / "run")
    assert code == 2
    for words in (
        "out of memory",
        "training.batch_size 32",
        "2 views of 8 px",
        "encoder small",
        "training.accumulate (1)",
        "--data.resident no",
        str(error).splitlines()[0] if str(error) else "MemoryError",
    ):
        assert words in said
    assert saved_step(tmp_path / "run") == 2


def test_other_errors_are_not_explained_away(tiny_config, tmp_path, monkeypatch):
    def fail() -> NoReturn:
        raise RuntimeError("a fault of the program")

    at_step(monkeypatch, 1, fail)
    with pytest.raises(RuntimeError, match="a fault of the program"):
        pretrain(tiny_config, run=tmp_path / "run")
    with hold_folder(tmp_path / "run"):  # it is let go
        pass


def test_memory_that_runs_out_elsewhere_is_explained_too(capsys, monkeypatch):
    def fail(*arguments: Any) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr("deepbregman.config.recipes", fail)
    with pytest.raises(SystemExit, match="2"):
        main(["recipes"])
    assert "out of memory (MemoryError)" in capsys.readouterr().err


# The folder


def test_the_folder_is_removed_while_training(command, recipe, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    at_step(monkeypatch, 3, lambda: shutil.rmtree(folder))
    code, said = command(recipe, "--run", folder)
    assert code == 2
    assert f"the run folder {folder} is gone" in said
    assert "nothing that was complete is lost" not in said
    assert not folder.exists()


def test_the_folder_is_moved_while_training_and_put_back(
    command, recipe, tiny_run, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: folder.rename(tmp_path / "moved"))
        code, said = command(recipe, "--run", folder)
    assert code == 2
    assert f"continue with: deepbregman pretrain --resume {folder}" in said
    (tmp_path / "moved").rename(folder)
    found, expected = (
        checkpoints.load(run.last_checkpoint)["objective"] for run in (resume(folder), tiny_run)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_folder_in_use_is_refused_before_anything_is_read_or_written(command, tiny_run, tmp_path):
    shutil.copytree(tiny_run.path, tmp_path / "run")
    with hold_folder(tmp_path / "run"):
        code, said = command("--resume", tmp_path / "run")
    assert code == 2
    assert f"{tmp_path / 'run'} is in use by process {os.getpid()} on " in said
    assert "resumed" not in Run.open(tmp_path / "run").provenance()


# The disk

FULL = """
import os, pathlib, shutil, subprocess, sys
from deepbregman.cli import main

place, recipe = pathlib.Path(sys.argv[1]), sys.argv[2]
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]).returncode:
    sys.exit("no mount")
run = place / "run"

def pretrain(*words):
    try:
        main(["pretrain", *map(str, words)])
    except SystemExit as ended:
        return ended.code
    return 0

assert pretrain(recipe, "--run", run) == 0
config = run / "config.toml"
config.write_text(config.read_text().replace("epochs = 3", "epochs = 5", 1))
before = {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}

with (place / "ballast").open("wb") as file:
    status = os.statvfs(place)
    file.write(bytes(status.f_bavail * status.f_frsize - 100_000))
print("full", file=sys.stderr)
assert pretrain("--resume", run) == 2
assert {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()} == before

(place / "ballast").unlink()
subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
print("read-only", file=sys.stderr)
assert pretrain("--resume", run) == 2

subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
assert pretrain("--resume", run) == 0
shutil.copy(run / "checkpoints" / "last.pt", sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, to mount a small disk")
def test_a_disk_that_is_full_and_one_that_is_read_only(tiny_config, tmp_path):
    """On a small disk of its own; room is made, and the run ends as if nothing had been."""
    changes = {"optimiser.schedule": "constant", "training.checkpoint_every": 0}
    recipe, place = tmp_path / "recipe.toml", tmp_path / "disk"
    recipe.write_text(to_toml(override(tiny_config, changes)))
    place.mkdir()
    words = [str(place), str(recipe), str(tmp_path / "end.pt")]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, "-c", FULL, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if "no mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this machine lets nobody mount a small disk")
    assert done.returncode == 0, done.stderr
    full, read_only = done.stderr.removeprefix("full\n").split("read-only\n")
    for said, reason in (
        (full, "No space left on device; free space there"),
        (read_only, "Read-only file system; make it writable"),
    ):
        assert said.startswith(f"error: {place}/run/")
        assert f"{reason} or choose another folder" in said
        assert said.count("\n") == 1
    longer = {"training.epochs": 5, **changes}
    whole = pretrain(tiny_config, run=tmp_path / "whole", changes=longer)
    found = checkpoints.load(tmp_path / "end.pt")["objective"]
    expected = checkpoints.load(whole.last_checkpoint)["objective"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("target", "kept"), [("checkpoints.save", 2), ("Run.append_metrics", 2)])
def test_no_space_in_the_middle_of_a_run(command, recipe, tmp_path, monkeypatch, target, kept):
    """The second epoch's metrics or checkpoints do not fit any more."""
    folder, fsync = tmp_path / "run", os.fsync
    name = "metrics.jsonl" if target == "Run.append_metrics" else ".pt"

    def full(handle: int) -> None:
        if saved and name in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        fsync(handle)

    saved: list[int] = []
    at_step(monkeypatch, 3, lambda: saved.append(1))
    monkeypatch.setattr(os, "fsync", full)
    code, said = command(recipe, "--run", folder)
    assert code == 2
    assert "No space left on device; free space there" in said
    assert str(folder) in said
    assert f"--resume {folder}" in said
    assert saved_step(folder) == kept
    assert not [p for p in folder.rglob(".*") if p.name != ".lock"]


def test_no_space_for_the_events_of_tensorboard(command, recipe, tmp_path, monkeypatch):
    """They are written by a thread of TensorBoard's own, which must not print its traceback."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, saved = RecordWriter.write, []

    def full(writer: RecordWriter, data: bytes) -> None:
        if saved:
            raise OSError(28, "No space left on device")
        write(writer, data)

    at_step(monkeypatch, 3, lambda: saved.append(1))
    monkeypatch.setattr(RecordWriter, "write", full)
    code, said = command(recipe, "--run", tmp_path / "run", "--training.tensorboard")
    assert code == 2
    assert said.startswith(f"error: {tmp_path / 'run' / 'tensorboard'}: No space left on device;")
    assert saved_step(tmp_path / "run") == 2


# Impatience


def test_a_second_interrupt_during_the_save(command, recipe, tmp_path, monkeypatch):
    """The checkpoint from before is whole, and the words do not claim more."""
    folder, fsync = tmp_path / "run", os.fsync
    asked: list[int] = []

    def interrupt() -> None:
        asked.append(1)
        os.kill(os.getpid(), signal.SIGINT)

    def impatient(handle: int) -> None:
        if asked:
            os.kill(os.getpid(), signal.SIGINT)
        fsync(handle)

    at_step(monkeypatch, 3, interrupt)
    monkeypatch.setattr(os, "fsync", impatient)
    code, said = command(recipe, "--run", folder)
    assert code == 130
    assert (
        "stopped at once, without saving; an earlier checkpoint, if there is one, is kept" in said
    )
    assert "everything is saved" not in said
    assert f"--resume {folder}" in said
    assert saved_step(folder) == 2
    assert not [p for p in folder.rglob(".*") if p.name != ".lock"]


def test_an_interrupt_before_there_is_a_run(command, recipe, tmp_path, monkeypatch):
    def interrupt(*arguments: Any, **options: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("deepbregman.commands.job.open_data", interrupt)
    code, said = command(recipe, "--run", tmp_path / "run")
    assert (code, said) == (130, "stopped\n")


def test_stopping_at_an_epochs_end_saves_once(tiny_config, tmp_path, stop_after):
    """Else the previous checkpoint would be the same as the last."""
    with stop_after(4), pytest.raises(Interrupted, match="everything is saved"):
        pretrain(tiny_config, run=tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert saved_step(run.path) == 4
    assert checkpoints.load(run.previous_checkpoint)["step"] == 2


def test_a_signal_at_the_last_step_is_not_forgotten(tiny_config, tiny_run, tmp_path, stop_after):
    """Else a study would go on with its other runs."""
    steps, words = (
        tiny_run.metrics()[-1]["step"],
        "SIGTERM; everything is saved, the run is complete",
    )
    with stop_after(steps), pytest.raises(Interrupted, match=words) as e:
        pretrain(tiny_config, run=tmp_path / "run")
    assert e.value.signal_number == signal.SIGTERM
    assert Run.open(tmp_path / "run").result()["pretrain"]["step"] == steps


def test_a_signal_while_the_step_is_compiled_ends_the_run_at_once(
    command, recipe, tiny_run, tmp_path, monkeypatch
):
    """The processes that compile have died of the same signal, and would be waited for."""

    def compile_forever(*arguments: object) -> NoReturn:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            threading.Event().wait(30)
        except Exception as error:  # as torch does
            raise RuntimeError("the compiler failed") from error
        raise TimeoutError

    def pretend_to_compile(step: torch.nn.Module, config: Config, fabric: object) -> bool:
        step._compiled_call_impl = compile_forever
        return True

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("deepbregman.training.loop.compile_step", pretend_to_compile)
        code, said = command(recipe, "--run", folder)
    assert code == 143
    assert said.startswith("stopped by SIGTERM; everything is saved, continue with: ")
    assert not list((folder / "checkpoints").glob("*.pt"))
    resume(folder)
    first, second = (Run.open(path).metrics()[-1]["total"] for path in (folder, tiny_run.path))
    assert first == second
