"""Killed at any moment, a run goes on to the same end: parameters to the bit, every metric once.

Forked processes run the command line.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepbregman.commands.pretrain import pretrain
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.display import Display

from ..conftest import Forks

CLOCK = {"images_per_second", "views_per_second", "peak_gigabytes", "seconds", "finished"}


class CommandLine:
    """Runs the command line in a forked child, which can be killed."""

    def __init__(self, forks: Forks, errors: Path) -> None:
        self.forks, self.errors = forks, errors

    def start(self, *words: object, **order: Any) -> int:
        """Start a command; return its process."""
        with open(os.devnull, "wb") as silence, self.errors.open("wb") as errors:
            return self.forks.start(silence.fileno(), errors.fileno(), *words, **order)

    def run(self, *words: object, **order: Any) -> int:
        return self.forks.wait(self.start(*words, **order))

    def finish(self, *words: object) -> None:
        assert self.run(*words) == 0, self.errors.read_text()


@pytest.fixture(scope="module")
def command_line(tmp_path_factory, forks) -> CommandLine:
    return CommandLine(forks, tmp_path_factory.mktemp("errors") / "errors.txt")


def new(recipe: Path, folder: Path) -> tuple[object, ...]:
    return ("pretrain", recipe, "--run", folder)


def on(folder: Path) -> tuple[object, ...]:
    return ("pretrain", "--resume", folder)


@pytest.fixture(scope="module")
def reference(command_line, recipe) -> Run:
    command_line.finish(*new(recipe, recipe.parent / "reference"))
    return Run.open(recipe.parent / "reference")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        parts = [flat(part, f"{name}.{key}") for key, part in value.items()]
        return {key: leaf for part in parts for key, leaf in part.items()}
    return {name: value}


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in CLOCK}


def assert_same_end(run: Run, reference: Run) -> None:
    """Everything but the clock, in every file that a run leaves."""
    kept = {path.name for path in run.checkpoints.iterdir()}
    assert kept == {path.name for path in reference.checkpoints.iterdir()}  # and no temporaries
    for name in kept:
        found, expected = (flat(checkpoints.load(r.checkpoints / name)) for r in (run, reference))
        assert found.keys() == expected.keys()
        for key in expected.keys() - {".seconds"}:
            same = (
                torch.equal(found[key], expected[key])
                if isinstance(expected[key], torch.Tensor)
                else found[key] == expected[key]
            )
            assert same, (name, key)
    rows, expected_rows = ([timeless(row) for row in r.metrics()] for r in (run, reference))
    assert rows == expected_rows  # the learning rates among them
    assert [row["epoch"] for row in rows] == list(range(1, run.config.training.epochs + 1))
    assert timeless(run.result()["pretrain"]) == timeless(reference.result()["pretrain"])
    assert sorted(path.name for path in run.path.iterdir()) == sorted(
        path.name for path in reference.path.iterdir()
    )


KEEP = "deepbregman.files._name_also"
SAVE = "deepbregman.training.checkpoints.save"
METRICS = "deepbregman.runs.Run.append_metrics"
POINTS = {
    "before the first step": ("deepbregman.runs.Run.create", "after", 1),
    "inside the first epoch": ("deepbregman.training.loop.Pretraining.advance", "after", 2),
    "before an epoch's metrics": (METRICS, "before", 1),
    "between the first metrics and the first save": (METRICS, "after", 1),
    "between later metrics and their save": (METRICS, "after", 3),
    "with a checkpoint in memory": ("torch.save", "after", 2),
    "with a checkpoint written but not on disk": ("os.fsync", "before", 9),
    "before the last checkpoint is kept": (KEEP, "before", 1),
    "while the last checkpoint is kept": ("pathlib.Path.hardlink_to", "after", 1),
    "between keeping and replacing": (KEEP, "after", 2),
    "after the first save": (SAVE, "after", 1),
    "between an epoch's own checkpoint and the last": (SAVE, "after", 2),
    "after both": (SAVE, "after", 3),
    "after the last save, before the result": ("deepbregman.runs.Run.add_result", "before", 1),
    "after the result": ("deepbregman.runs.Run.add_result", "after", 1),
}


USUAL = (
    *("inside the first epoch", "between later metrics and their save"),
    *("between keeping and replacing", "after the last save, before the result"),
)


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=() if point in USUAL else pytest.mark.slow) for point in POINTS],
)
def test_killed_at_a_named_point(command_line, recipe, reference, tmp_path, point):
    folder = tmp_path / "run"
    assert command_line.run(*new(recipe, folder), exit_at=POINTS[point]) == 9
    command_line.finish(*on(folder))
    assert_same_end(Run.open(folder), reference)


AGAIN = {
    "before its provenance": ("deepbregman.runs.Run.add_resumption", "before", 1),
    "after its provenance": ("deepbregman.runs.Run.add_resumption", "after", 1),
    "before the metrics are cut": ("deepbregman.runs.Run.truncate_metrics", "before", 1),
    "while the metrics are cut": ("os.fsync", "after", 3),
    "after the metrics are cut": ("deepbregman.runs.Run.truncate_metrics", "after", 1),
    "in its first step": ("deepbregman.training.loop.Pretraining.advance", "before", 1),
}


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point == "while the metrics are cut" else pytest.mark.slow)
        for point in AGAIN
    ],
)
def test_killed_again_while_resuming(command_line, recipe, reference, tmp_path, point):
    folder = tmp_path / "run"
    assert command_line.run(*new(recipe, folder), exit_at=(METRICS, "after", 3)) == 9
    assert command_line.run(*on(folder), exit_at=AGAIN[point]) == 9
    command_line.finish(*on(folder))
    assert_same_end(Run.open(folder), reference)


def test_killed_between_two_names_where_there_are_no_links(
    command_line, recipe, reference, tmp_path
):
    """There the last checkpoint is for a moment the previous one only."""
    folder = tmp_path / "run"
    assert command_line.run(*new(recipe, folder), no_links=True, exit_at=(KEEP, "after", 2)) == 9
    assert not (folder / "checkpoints" / "last.pt").exists()
    command_line.finish(*on(folder))
    assert_same_end(Run.open(folder), reference)
    assert Run.open(folder).provenance()["resumed"][0]["from"] == "previous.pt"


def test_killed_before_there_is_a_folder(command_line, recipe, reference, tmp_path):
    folder = tmp_path / "run"
    point = ("deepbregman.runs.Run.create", "before", 1)
    assert command_line.run(*new(recipe, folder), exit_at=point) == 9
    assert list(tmp_path.iterdir()) == []
    command_line.finish(*new(recipe, folder))
    assert_same_end(Run.open(folder), reference)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_events_for_tensorboard_are_those_of_the_metrics(command_line, recipe, tmp_path, moment):
    """Written before the checkpoint, and taken back where the epoch is trained again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    words = (*new(recipe, folder), "--training.tensorboard")
    assert command_line.run(*words, exit_at=(SAVE, moment, 3)) == 9
    command_line.finish(*on(folder))
    events, rows = (
        EventAccumulator(str(folder / "tensorboard")).Reload(),
        Run.open(folder).metrics(),
    )
    assert [row["step"] for row in rows] == [2, 4, 6]
    names = {name for row in rows for name, value in row.items() if not isinstance(value, str)}
    assert set(events.Tags()["scalars"]) == names
    for name in names:
        found = {event.step: event.value for event in events.Scalars(name)}
        assert len(found) == len(events.Scalars(name))
        expected = {row["step"]: row[name] for row in rows if name in row}
        assert found == pytest.approx(expected, rel=1e-6)


def kill_while_writing(command_line: CommandLine, folder: Path, *words: object) -> None:
    """Kill as soon as half a checkpoint is seen that was not there before."""
    checkpoints = folder / "checkpoints"
    before = set(checkpoints.glob(".last.pt.*"))
    child = command_line.start(*words, stuck_disk=True)
    deadline = time.monotonic() + 240
    while set(checkpoints.glob(".last.pt.*")) <= before and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert command_line.forks.wait(child) == -signal.SIGKILL


def test_killed_while_writing_a_checkpoint(command_line, recipe, reference, tmp_path):
    folder = tmp_path / "run"
    kill_while_writing(command_line, folder, *new(recipe, folder))
    kill_while_writing(command_line, folder, *on(folder))
    assert list((folder / "checkpoints").glob(".last.pt.*"))
    command_line.finish(*on(folder))
    assert_same_end(Run.open(folder), reference)


def soak(
    command_line: CommandLine, recipe: Path, reference: Run, folder: Path, kills: int, seed: int
) -> None:
    """Kill a run at random moments so many times, starting another when one has ended."""
    moments, killed, runs = random.Random(seed), 0, 0
    seconds = reference.result()["pretrain"]["seconds"]
    while killed < kills:
        runs += 1
        run, words = folder / str(runs), new(recipe, folder / str(runs))
        ended = False
        while killed < kills and not ended:
            child = command_line.start(*words)
            time.sleep(moments.uniform(0.0, 1.5 * seconds))
            os.kill(child, signal.SIGKILL)
            code = command_line.forks.wait(child)
            assert code in (0, -signal.SIGKILL), command_line.errors.read_text()
            killed += code != 0
            ended = code == 0
            words = on(run) if (run / "config.toml").exists() else new(recipe, run)
        command_line.finish(*words)
        assert_same_end(Run.open(run), reference)


def test_killed_at_random_moments(command_line, recipe, reference, tmp_path):
    soak(command_line, recipe, reference, tmp_path, kills=3, seed=random.randrange(2**32))


@pytest.mark.slow
def test_killed_at_random_moments_thirty_times(command_line, recipe, reference, tmp_path):
    soak(command_line, recipe, reference, tmp_path, kills=30, seed=0)


def test_a_second_process_is_refused_and_the_first_goes_on(
    command_line, recipe, tmp_path, monkeypatch
):
    folder, plain, codes = tmp_path / "run", Display.show_step, []

    def meanwhile(display: Display, step: int) -> None:
        plain(display, step)
        if step == 3:
            codes.append(command_line.run(*on(folder)))

    monkeypatch.setattr(Display, "show_step", meanwhile)
    run = pretrain(str(recipe), run=folder)
    assert codes == [2]
    assert f"in use by process {os.getpid()} on " in command_line.errors.read_text()
    assert "resumed" not in run.provenance()
    assert run.result()["pretrain"]["epoch"] == 3


# Asked to stop


def is_training(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def stop(
    command_line: CommandLine, recipe: Path, folder: Path, *signals: signal.Signals
) -> tuple[int, str]:
    """Send signals to a long run once it trains; return its exit code and what it said."""
    child = command_line.start(*new(recipe, folder), "--training.epochs", 100_000)
    deadline = time.monotonic() + 240
    while not is_training(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    for number in signals:
        os.kill(child, number)
    return command_line.forks.wait(child), " ".join(command_line.errors.read_text().split())


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),  # a lost terminal sends it, too
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(command_line, recipe, tmp_path, number, code):
    folder = tmp_path / "run"
    answer, said = stop(command_line, recipe, folder, number)
    assert answer == code
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"stopped by {name}; everything is saved, continue with:" in said
    assert f"deepbregman pretrain --resume {folder}" in said
    saved = checkpoints.load(Run.open(folder).last_checkpoint)
    assert saved["step"] // 2 == len(Run.open(folder).metrics())  # two steps an epoch
