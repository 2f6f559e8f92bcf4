import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deepbregman.config import load_recipe, override
from deepbregman.launching import LAUNCHER
from deepbregman.training.faults import StoppedAtOnce, format_resume_command, watch_signals

ANNOUNCED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
WATCHED = (signal.SIGTERM, signal.SIGINT, *ANNOUNCED)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[object]]:
    """Whatever a test does, the handlers of pytest come back."""
    before = [signal.getsignal(number) for number in WATCHED]
    for number in ANNOUNCED:  # nohup would have ignored one
        signal.signal(number, signal.SIG_DFL)
    yield installed()
    for number, handler in zip(WATCHED, before, strict=True):
        signal.signal(number, handler)


def installed() -> list[object]:
    return [signal.getsignal(number) for number in WATCHED]


@pytest.mark.parametrize("number", WATCHED)
def test_signal_is_collected_and_the_block_goes_on(number, handlers):
    went_on = False
    with watch_signals() as received:
        assert received == []
        signal.raise_signal(number)
        went_on = True
        assert received == [number]
    assert went_on
    assert installed() == handlers


def test_a_hangup_that_is_ignored_stays_so():
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with watch_signals() as received:
        signal.raise_signal(signal.SIGHUP)
    assert received == []
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_handler_of_the_program_stays():
    """Programs that send jobs, such as submitit, have handlers for SIGUSR1 and SIGUSR2."""
    own: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: own.append(number))
    with watch_signals() as received:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
    assert own == [signal.SIGUSR1]
    assert received == [signal.SIGUSR2]


def test_second_interrupt_stops_at_once(handlers):
    received: list[int] = []

    def interrupted_twice() -> None:
        with watch_signals() as seen:
            signal.raise_signal(signal.SIGINT)
            received.extend(seen)
            signal.raise_signal(signal.SIGINT)
            received.append(-1)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert received == [signal.SIGINT]
    assert installed() == handlers


class Wait(ctypes.Structure):
    """What poll of the C library waits for."""

    _fields_ = (("file", ctypes.c_int), ("events", ctypes.c_short), ("found", ctypes.c_short))


def wait_in_c(file: int, milliseconds: int) -> bool:
    """Wait for something to read, without Python in between, as a long call of torch."""
    wait = Wait(file, 1, 0)
    return ctypes.CDLL(None).poll(ctypes.byref(wait), 1, milliseconds) == 1


@contextmanager
def reading_errors() -> Iterator[int]:
    """Give a file from which standard error can be read at once."""
    reading, writing = os.pipe()
    kept = os.dup(2)
    os.dup2(writing, 2)
    try:
        yield reading
    finally:
        os.dup2(kept, 2)
        for file in (reading, writing, kept):
            os.close(file)


def send_from_a_thread(number: signal.Signals) -> threading.Thread:
    """The system may hand a signal to any thread; Python's handler waits for the main one."""
    sender = threading.Timer(0.05, lambda: signal.pthread_kill(threading.get_ident(), number))
    sender.start()
    return sender


def test_ctrl_c_is_answered_before_a_long_call_ends():
    with reading_errors() as errors:
        with watch_signals(command="again") as received:
            send_from_a_thread(signal.SIGINT)
            answered = wait_in_c(errors, 240_000)
        words = os.read(errors, 1000).decode()
    assert answered
    assert received == [signal.SIGINT]
    assert words == "\nsaving after this step; Ctrl-C again stops at once\n"


REPEATED = """
import ctypes, os, signal, sys, threading, time
from deepbregman.launching import COMMAND_LINE
from deepbregman.training.faults import watch_signals
COMMAND_LINE.set(["pretrain"] if sys.argv[1] == "command" else None)
reading, writing = os.pipe()

def send():
    for _ in range(int(sys.argv[2])):
        time.sleep(0.4)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(float(sys.argv[3]))
    os.write(writing, b".")

with watch_signals(command="deepbregman again"):
    threading.Thread(target=send, daemon=True).start()
    # C code that sees no signal, as a long call of torch
    ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
"""


def interrupt(who: str, times: int, seconds: int) -> subprocess.CompletedProcess[str]:
    """Send Ctrl-C some times to a process in a call that ends so many seconds after the last."""
    words = [sys.executable, "-c", REPEATED, who, str(times), str(seconds)]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("times", [2, 3])
def test_a_second_ctrl_c_does_not_wait_for_a_long_call(times):
    """Nor does a third one, of an impatient user, take it back."""
    ended = interrupt("command", times, 600)
    assert ended.returncode == 130
    first, second = ended.stderr.strip().splitlines()[::2]
    assert first.startswith("saving after this step")
    assert second.endswith(
        "an earlier checkpoint, if there is one, is kept; continue with: deepbregman again"
    )


def test_a_second_ctrl_c_does_not_end_a_program_of_the_users_own():
    """A notebook would lose all that it has computed."""
    ended = interrupt("program", 2, 3)
    assert ended.returncode == 0
    assert ended.stderr.strip().splitlines() == [
        "saving after this step; Ctrl-C again stops at once"
    ]


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGTERM, {}), (signal.SIGINT, {"has_nothing_to_save": lambda: True})],
)
def test_only_a_ctrl_c_that_saves_is_answered(number, options):
    with reading_errors() as errors:
        with suppress(StoppedAtOnce), watch_signals(command="again", **options):
            sender = send_from_a_thread(number)
            wait_in_c(errors, 500)
            sender.join()  # a late signal would end the tests
        assert not wait_in_c(errors, 0)
    assert signal.set_wakeup_fd(-1) == -1  # as it was before


def test_where_pipes_always_block_nothing_is_answered(monkeypatch):
    """On Windows with Python 3.11: the run saves at the end of its step, as elsewhere."""
    monkeypatch.delattr(os, "set_blocking")
    with watch_signals(command="again") as received:
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGINT]


def test_termination_may_be_asked_for_twice():
    with watch_signals() as received:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM, signal.SIGTERM]


def test_a_signal_stops_at_once_only_while_there_is_nothing_to_save(handlers):
    nothing = False
    with pytest.raises(StoppedAtOnce) as caught, watch_signals("", lambda: nothing) as received:  # noqa: PT012
        signal.raise_signal(signal.SIGHUP)
        nothing = True
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGHUP, signal.SIGTERM]
    assert caught.value.signal_number == signal.SIGTERM
    assert not isinstance(caught.value, Exception)
    assert installed() == handlers


def test_other_threads_watch_nothing(handlers):
    found: list[object] = []

    def work() -> None:
        with watch_signals() as received:
            found.extend([received, installed()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[], handlers]


def test_the_command_that_continues_a_run_has_its_processes(monkeypatch):
    config, again = load_recipe("digits"), "deepbregman pretrain --resume runs/a"
    for name, number in (
        ("RANK", 5),
        ("WORLD_SIZE", 8),
        ("LOCAL_RANK", 1),
        ("LOCAL_WORLD_SIZE", 4),
    ):
        monkeypatch.setenv(name, str(number))
    assert (
        format_resume_command(config, Path("runs/a")) == f"{again}, by torchrun or srun as before"
    )
    monkeypatch.setenv(LAUNCHER, "1")
    assert format_resume_command(config, Path("runs/a")) == f"{again} --devices 4 --nodes 2"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert format_resume_command(config, Path("runs/a")) == f"{again} --devices 4"
    own = override(config, {"views.custom": True})
    assert "deepbregman.resume('runs/a', ...) in Python" in format_resume_command(
        own, Path("runs/a")
    )
