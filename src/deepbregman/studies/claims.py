"""Who works on what: locks on files, which the kernel lets go of when a worker is killed."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepbregman import files


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Try to take hold of a file for the block; say whether nobody else has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Wait for a file and hold it for the block, which should be short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.exclusively(path):
        yield
