"""What one of two processes meets ends both, with one error, and leaves neither waiting."""

import json
from pathlib import Path

import pytest

from deepbregman.runs import Run
from deepbregman.training.checkpoints import load

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("shared_faults.py")
Endings = list[dict[str, tuple[str, int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def endings(folder, run_joined) -> Endings:
    """How each fault ended in process 0 and in process 1: words to print, and exit code."""
    run_joined(str(SCRIPT), str(folder))
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in "01"]


@pytest.mark.parametrize(
    ("fault", "words", "code"),
    [
        ("signal while an epoch is closed", "stopped by SIGTERM; everything is saved", 143),
        ("full disk", "metrics.jsonl: No space left on device", 2),
        ("no events", "tensorboard: Permission denied", 2),
        ("diverged", "the loss is not finite from step 1 on", 2),
        ("more to skip than allowed", "not finite at step 2, and training.skip_nonfinite", 2),
        ("an epoch without a good batch", "no batch of the epoch had a finite loss", 2),
    ],
)
def test_both_end_and_the_first_says_why(fault, words, code, endings):
    (said, first), (silent, second) = (ending[fault] for ending in endings)
    assert words in said
    assert silent == ""
    assert (first, second) == (code, code)


def test_a_signal_while_an_epoch_is_closed_leaves_that_epoch_saved(endings, folder):
    run = Run.open(folder / "0")
    assert load(run.last_checkpoint)["epoch"] == 2.0
    assert [record["epoch"] for record in run.metrics()] == [1, 2]


@pytest.mark.parametrize("resident", ["no", "yes"])
def test_unreadable_images_are_counted_over_both_processes(endings, resident):
    """Streamed, each meets those of its half; resident, both meet all, which count once."""
    said, silent = (ending[f"unreadable, resident {resident}"][0] for ending in endings)
    assert "12 images could not be decoded; training used others instead" in said
    assert silent == ""
