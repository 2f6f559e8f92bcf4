"""Processes for tests that kill one."""

import os
import sys
import warnings
from collections.abc import Callable

import pytest


def _fork(act: Callable[[], object]) -> int:
    with warnings.catch_warnings():  # of threads of ours, which the other has no use for
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        try:
            act()
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    return process


@pytest.fixture
def fork() -> Callable[[Callable[[], object]], int]:
    """Start processes that do one thing; forked, since importing torch anew takes seconds."""
    return _fork
