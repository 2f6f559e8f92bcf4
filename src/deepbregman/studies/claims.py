"""Who works on what: locks on files, which the kernel lets go of when a worker is killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepbregman.files import locked, refuse_link


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Try to take hold of a file for the block; say whether nobody else has it."""
    _make_folder(path.parent)
    with locked(path, 0.0) as is_held:
        yield is_held


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Wait for a file and hold it for the block, which should be short."""
    _make_folder(path.parent)
    with locked(path):
        yield


def _make_folder(folder: Path) -> None:
    refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
