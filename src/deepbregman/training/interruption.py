"""Stopping on request: a signal lets the step end, saves, and says how to go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from deepbregman.launching import stopping_signals


class Interrupted(Exception):
    """A signal asked the run to stop, and it has saved itself.

    Args:
        folder: of the run.
        number: of the signal.
        advice: how to go on; by default, how a pretraining run does.
    """

    def __init__(self, folder: Path, number: int, advice: str | None = None) -> None:
        advice = advice or f"continue with: deepbregman pretrain --resume {folder}"
        super().__init__(f"stopped by {signal.Signals(number).name}; everything is saved, {advice}")
        self.signal_number = number


@contextmanager
def watch_signals() -> Iterator[list[int]]:
    """Collect signals that ask for an end in a list; a second Ctrl-C stops at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set handlers
        return

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, receive) for number in stopping_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
