"""Files that are complete or not there, and what one process at a time may write."""

import csv
import errno
import io
import json
import math
import os
import platform
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from .errors import UserError

Record = dict[str, Any]
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FORMULA = re.compile(r"[\t\r\n]|\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")
"""How a text begins that a spreadsheet runs; the last four are the wide forms of the signs."""
_POLL_SECONDS = 0.01
_held: dict[Path, str] = {}
"""Folders that this process holds: the kernel's lock keeps out other processes only."""


def now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def replacing(path: Path, keep: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` only once it is complete and on disk.

    Args:
        path: to replace.
        keep: a second name for what ``path`` held before.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            _name_also(path, keep)
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            error.filename = str(path)
        raise


def _name_also(path: Path, other: Path) -> None:
    """Give a file a second name, in place of what had it."""
    second = other.with_name(f".{other.name}.{secrets.token_hex(4)}")
    try:
        second.hardlink_to(path)
    except OSError:  # a file system without links: the second name is then its only one
        path.replace(other)
        return
    second.replace(other)
    second.unlink(missing_ok=True)  # renaming onto another name of the same file does nothing


def _sync_folder(path: Path) -> None:
    """Bring a folder's names to disk, else a crash of the machine may undo a replacement."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # as some network file systems say
            raise
    finally:
        os.close(handle)


def clear_temporaries(folder: Path, of: frozenset[str] | None = None) -> None:
    """Remove what :func:`replacing` left half-written in a folder when its process was killed.

    Args:
        folder: in which no process writes now.
        of: the files whose temporaries to remove; all when None.
    """
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and path.is_file() and (of is None or match["name"] in of):
            path.unlink(missing_ok=True)


def write_json(path: Path, record: Record) -> None:
    """Write a record as readable JSON, atomically."""
    with replacing(path) as file:
        file.write(json.dumps(record, indent=2).encode() + b"\n")


def write_csv(path: Path, rows: Sequence[Record]) -> None:
    """Write records as CSV, atomically; see :func:`csv_text`."""
    with replacing(path) as file:
        file.write(csv_text(rows).encode("utf-8", "surrogateescape"))  # names of files are bytes


def csv_text(rows: Sequence[Record]) -> str:
    """Write records, which need not have the same keys, as CSV that a spreadsheet opens safely.

    A text that a spreadsheet would take for a formula, such as a class named ``=cmd()``, gets an
    apostrophe before it; numbers stay numbers, written as text or not.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_without_formula(name) for name in columns])
    writer.writerows([_without_formula(row.get(name, "")) for name in columns] for row in rows)
    return text.getvalue()


def _without_formula(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    value = value.replace("\r", "\n")  # which the writer would not quote
    if not _FORMULA.match(value):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def parse_json(text: str) -> Any:
    """Parse JSON that anybody may have written; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Record:
    """Read a JSON object that somebody may have edited or damaged."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it or remove it") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} holds no JSON object: restore it or remove it")
    return record


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone; another is refused and told which process holds it.

    The lock is the kernel's, on ``folder/.lock``: it ends with the process, however that ends, and
    forked workers do not inherit it. On NFS the server keeps it, and gives up that of a host that
    is gone. Where a file system has no locks, nothing is held.
    """
    import fcntl  # POSIX only, and runs are read elsewhere, too

    place = folder.resolve()
    if place in _held:  # asked before the file is opened: closing it would end the lock
        raise _in_use(folder, _held[place])
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # what taken locks raise differs by system
            file.seek(0)
            raise _in_use(folder, file.read().strip() or "another process") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        _held[place] = f"process {os.getpid()} on {platform.node()} since {now()}"
        try:
            file.truncate(0)
            file.write(_held[place])
            file.flush()
            yield
        finally:
            del _held[place]
            file.truncate(0)


def _in_use(folder: Path, holder: str) -> UserError:
    return UserError(
        f"{folder} is in use by {holder}: two would overwrite each other's checkpoints; wait until "
        "that one ends, or stop it"
    )


@contextmanager
def exclusively(path: Path, patience: float = math.inf) -> Iterator[None]:
    """Wait for a file and hold it for the block, which should be short.

    The lock is the kernel's and ends with the process, however that ends. It keeps out other
    threads, too, so that a block must not ask for the file it holds. Where a file system has no
    locks, nothing is held.

    Args:
        path: made where it is not there; its content is left alone.
        patience: seconds after which to give up on a holder that was stopped, say.
    """
    import fcntl  # POSIX only, and runs are read elsewhere, too

    deadline = time.monotonic() + patience
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{path} has been held by another process for {patience:g} seconds: see "
                        "what that one waits for, or end it, and give the command again"
                    ) from None
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        try:
            yield
        finally:
            with suppress(OSError):  # closing alone would leave it to a process forked meanwhile
                fcntl.flock(file, fcntl.LOCK_UN)
