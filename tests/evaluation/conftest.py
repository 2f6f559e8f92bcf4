"""Processes for tests that kill one."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch


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
def fork() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Start processes that do one thing; forked, since importing torch anew takes seconds.

    On one thread, also here: a forked process has none of its parent's others to work with.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _fork
    torch.set_num_threads(before)
