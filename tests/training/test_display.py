"""What a user sees while a run trains, by a clock of the test's own."""

import io
from typing import Any

import pytest
from rich.console import Console

from deepbregman.training import display
from deepbregman.training.display import Display


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(display.time, "monotonic", found)
    return found


def open_display(**options: Any) -> Display:
    console = Console(file=io.StringIO(), width=80, **options)
    return Display(console, epochs=200, steps_per_epoch=10, report_every=100, weights=WEIGHTS)


def printed(shown: Display) -> str:
    stream = shown.console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


WEIGHTS = {"contrastive": 5.0, "divergence": 0.3, "usage": -0.5}
RECORD = {
    "epoch": 2,
    "total": 1.2345,
    "learning_rate": 0.5,
    "effective_rank": 12.5,
    "knn": 88.25,
    "images_per_second": 1000.0,
    "views_per_second": 3000.0,
}


def test_the_bar_fits_into_80_columns(clock):
    shown = open_display(force_terminal=True)
    shown.show_step(0)
    clock.now = 100.0
    shown.show_step(20)
    shown.show_epoch(RECORD)
    console = Console(file=io.StringIO(), width=80)
    console.print(shown.progress.get_renderable())
    stream = console.file
    assert isinstance(stream, io.StringIO)
    (line,) = stream.getvalue().splitlines()
    # 1,980 steps of 5 seconds are left: 9,900 seconds.
    for words in ("epoch 2/200", "2 h 45 min left", "loss 1.2345", "kNN 88.2 %"):
        assert words in line
    assert len(line.rstrip()) <= 80


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (100, "loss 1.2345  contrastive 2.5000  divergence -1.2655  rank 12.5  kNN 88.2 %"),
        (80, "loss 1.2345  divergence -1.2655  rank 12.5  kNN 88.2 %"),
        (60, "loss 1.2345  rank 12.5  kNN 88.2 %"),
    ],
)
def test_a_line_on_a_terminal_fits_into_it(clock, width, line):
    terms = {"contrastive": 0.5, "divergence": 0.25, "active_subnetworks": 7.0}
    record = {**RECORD, "epoch": 100, **terms}
    shown = open_display(force_terminal=True)
    shown.console.width = width
    shown.show_epoch(record)
    assert printed(shown) == f"epoch  100 of 200  {line}\n"
    shown = open_display()  # a log file has everything
    shown.show_epoch(record)
    assert printed(shown).endswith(
        "  lr 5.00e-01  active 7  rank 12.5  kNN 88.2 %  images/s 1,000  views/s 3,000\n"
    )


def test_slow_first_steps_do_not_tell_the_time_left(clock):
    shown = open_display()
    for step, clock.now in enumerate((0.0, 3.0, 3.5)):
        shown.show_step(step)
    assert shown.left == ""  # of 3.5 seconds it would be an hour
    clock.now = 6.0
    shown.show_step(12)
    assert shown.left == "17 min left"  # 1,988 steps of half a second


def test_the_time_left_of_a_resumed_run_is_that_of_its_own_steps(clock):
    shown = open_display()
    shown.show_step(900)
    clock.now = 100.0
    shown.show_step(920)
    assert shown.left == "1 h 30 min left"  # 1,080 steps of 5 seconds


def test_without_a_terminal_a_line_a_minute_tells_the_time_left(clock):
    shown = open_display()
    for step in range(31):  # of 10 seconds
        clock.now = 10.0 * step
        shown.show_step(step)
    lines = printed(shown).splitlines()
    assert lines == [
        "epoch    1 of 200, step 6 of 2,000: 5 h 32 min left",
        "epoch    2 of 200, step 12 of 2,000: 5 h 31 min left",
        "epoch    2 of 200, step 18 of 2,000: 5 h 30 min left",
        "epoch    3 of 200, step 24 of 2,000: 5 h 29 min left",
        "epoch    3 of 200, step 30 of 2,000: 5 h 28 min left",  # the third ends here
    ]


@pytest.mark.parametrize(
    ("options", "epoch", "words"),
    [
        ({}, 100, "epoch  100 of 200  2 h 45 min left  loss 1.2345"),
        ({}, 200, "epoch  200 of 200  loss 1.2345"),  # nothing is left
        ({"force_terminal": True}, 100, "epoch  100 of 200  loss 1.2345"),  # the bar tells it
    ],
)
def test_the_line_of_an_epoch_tells_it_too(clock, options, epoch, words):
    shown = open_display(**options)
    shown.show_step(0)
    clock.now = 100.0
    shown.show_step(20)
    shown.show_epoch(RECORD | {"epoch": epoch})
    assert printed(shown).splitlines()[-1].startswith(words)


@pytest.mark.parametrize(
    ("every", "epochs"), [(2, [1, 2, 4, 5]), (9, [1, 5]), (0, [1, 2, 3, 4, 5])]
)
def test_the_first_and_the_last_epoch_always_get_a_line(clock, every, epochs):
    shown = Display(Console(file=io.StringIO()), epochs=5, steps_per_epoch=1, report_every=every)
    for epoch in range(1, 6):
        shown.show_epoch({"epoch": epoch, "total": 0.5})
    assert printed(shown).splitlines() == [f"epoch    {n} of 5  loss 0.5000" for n in epochs]


def test_a_run_without_epochs_gets_a_line_only_if_it_measured_something():
    shown = Display(Console(file=io.StringIO()), epochs=0, steps_per_epoch=1, report_every=1)
    shown.show_epoch({"epoch": 0})
    assert printed(shown) == ""
    shown.show_epoch({"epoch": 0, "knn": 88.25})
    assert "kNN 88.2 %" in printed(shown)


def test_on_a_terminal_the_bar_tells_it(clock):
    shown = open_display(force_terminal=True)
    for step in range(13):
        clock.now = 10.0 * step
        shown.show_step(step)
    assert printed(shown) == ""


def test_views_and_images_are_told_apart(clock):
    shown = open_display()
    shown.show_epoch(RECORD | {"epoch": 100})
    assert "images/s 1,000  views/s 3,000" in printed(shown)


def test_terms_are_shown_as_they_enter_the_total(clock):
    shown = open_display()
    terms = {"contrastive": 0.4, "divergence": 3.0, "usage": 2.0}
    # Of 0.3 units the divergence counts 0.1 on average while it warms up.
    total = 5 * 0.4 + 0.1 * 3.0 - 0.5 * 2.0
    shown.show_epoch({"epoch": 1, "total": total, **terms})
    words = "loss 1.3000  contrastive 2.0000  divergence 0.3000  usage -1.0000"
    assert words in printed(shown)


@pytest.mark.parametrize(("seconds", "hints"), [(10.0, 0), (11.0, 1), (50.0, 1)])
def test_a_long_run_gets_one_hint(clock, seconds, hints):
    shown = open_display(force_terminal=True)
    for step in range(8):
        clock.now = seconds * step
        shown.show_step(step)
    assert printed(shown).count("at this speed the run takes another") == hints


def test_a_verdict_is_told_when_it_changes_and_at_the_end(clock):
    shown = open_display()
    words = {5: "learning", 10: "learning", 15: "saturated", 195: "saturated", 200: "saturated"}
    for epoch, word in words.items():
        shown.show_verdict({"epoch": epoch, "verdict": word, "reason": f"by epoch {epoch}"})
    assert printed(shown).splitlines() == [
        "health: learning (by epoch 5)",
        "health: saturated (by epoch 15)",
        "health: saturated (by epoch 200)",
    ]


def test_a_warning_is_not_repeated_every_epoch(clock):
    shown = open_display()
    for epoch in range(1, 201):
        messages = [f"collapsed, rank {epoch / 3:.1f}"] * (epoch >= 5 and epoch != 50)
        messages += [f"skipped {epoch}"] * (epoch in (7, 50))
        shown.warn_of_epoch(epoch, messages)
    told = [line.removeprefix("warning: ") for line in printed(shown).splitlines()]
    assert told == [
        "epoch 5: collapsed, rank 1.7",  # it begins
        "epoch 7: collapsed, rank 2.3",  # another one joins it
        "epoch 7: skipped 7",
        "epoch 50: skipped 50",  # another one takes its place
        "epoch 51: collapsed, rank 17.0",
        "epoch 100: collapsed, rank 33.3",  # where a line is due
        "epoch 200: collapsed, rank 66.7",
    ]
