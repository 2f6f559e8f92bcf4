"""Files that are complete or absent, digests, records in JSON and CSV, and locks."""

import csv
import errno
import hashlib
import io
import json
import math
import os
import platform
import re
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from .errors import UserError, abbreviate

Record = dict[str, Any]
Shape = Any
"""What a record must look like: ``str``, ``int``, ``float``, ``[shape]`` for a list, and
``{name: shape}`` for a table whose fields may be absent or None, with ``...`` for other fields."""
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}")
_SETTLING_SECONDS = 0.5
"""Time for a worker that was forked from a killed process to release its lock."""
_ASKED = 64
"""Files whose sizes and times one task asks for."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FORMULA = re.compile(r"[\t\r\n]|\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")
"""Start of a text that a spreadsheet takes for a formula; the last four are full-width signs."""


def now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def replace_file(path: Path, keep: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` only once it is complete and on disk.

    A link is replaced, not followed. ``keep`` is a second name for what ``path`` held before.
    """
    with _write_beside(path) as (temporary, file):
        yield file
        _finish(file)
        if keep is not None and path.exists():
            _name_also(path, keep)
        temporary.replace(path)


@contextmanager
def create_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that appears only once it is complete and on disk.

    If ``path`` exists by then, that is an error: of several processes exactly one makes it.
    """
    with _write_beside(path) as (temporary, file):
        yield file
        _finish(file)
        try:
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                raise
            except (OSError, NotImplementedError):  # a file system without hard links
                path.touch(exist_ok=False)  # claim the name
                temporary.replace(path)
        except FileExistsError:
            raise UserError(
                f"{path} exists: another process has written it in the meantime, and it was left "
                "as it is; name another file, or remove it"
            ) from None


@contextmanager
def _write_beside(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Open a temporary file beside ``path``; afterwards remove it, if it is still there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            yield temporary, file
        temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            error.filename = str(path)
        raise


def _finish(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _name_also(path: Path, other: Path) -> None:
    """Give a file a second name, which may have belonged to another file."""
    second = other.with_name(f".{other.name}.{secrets.token_hex(4)}")
    try:
        second.hardlink_to(path)
    except (OSError, NotImplementedError):  # no hard links: the second name is then its only one
        path.replace(other)
        return
    second.replace(other)
    second.unlink(missing_ok=True)  # renaming onto another name of the same file does nothing


def _sync_folder(path: Path) -> None:
    """Write the names of a folder to disk; else a crash of the machine may undo a replacement."""
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems cannot
            raise
    finally:
        os.close(handle)


def list_names(folder: Path) -> set[str]:
    """List a folder, without files that are being written; empty if there is no folder."""
    if not folder.exists():
        return set()
    return {path.name for path in folder.iterdir() if not is_temporary(path)}


def is_temporary(path: Path) -> bool:
    """Whether a file is named as one that is being written."""
    return _TEMPORARY.fullmatch(path.name) is not None


def clear_temporaries(folder: Path, of: frozenset[str] | None = None) -> None:
    """Remove what killed processes were writing: parts ``of`` these files, or of all.

    No process may be writing in the folder.
    """
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and path.is_file() and (of is None or match["name"] in of):
            path.unlink(missing_ok=True)


# Writing inside a folder that may come from anybody


def refuse_link(path: Path) -> None:
    """Refuse to write at a symbolic link inside a run or study: it may lead to any file."""
    if path.is_symlink():
        raise UserError(
            f"{path} is a symbolic link: nothing is written through links inside a run or study, "
            "since they may lead to any file; remove it, or put what it points to in its place"
        )


def open_inside(path: Path, mode: str) -> IO[bytes]:
    """Open a file of a run or study for writing in place, never through a symbolic link."""
    refuse_link(path)

    def opener(name: str, flags: int) -> int:
        # Between the check and the opening somebody might put a link there.
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    return open(path, mode, opener=opener)


def check_can_be_folder(path: Path) -> None:
    """Refuse, before any work, a folder that cannot be made or be written to."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # from the shell, in another encoding; no file could name it
        raise UserError(f"folder {path}: its name is not valid Unicode; name another") from None
    for place in (path, *path.parents):
        if place.is_dir():
            refuse_read_only(place, str(path))
            return
        if place.exists():
            raise UserError(f"{path} cannot be a folder: {place} is a file; name another place")


def check_new_folder(out: Path) -> None:
    """Refuse a folder that is not empty, or that cannot be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"--out {out} exists and is not an empty folder: name another folder, or remove it"
        )
    check_can_be_folder(out)


def refuse_read_only(folder: Path, what: str) -> None:
    """Refuse, before any work, to write something into a folder that is read-only."""
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"{what}: the folder {folder} cannot be written to; make it writable, or name another "
            "place"
        )


# Records


def digest(*parts: bytes | memoryview) -> str:
    """Return 16 digits that differ when any part does."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(f"{len(part)} ".encode())
        hashed.update(part)
    return hashed.hexdigest()[:16]


def digest_files(paths: Sequence[Path]) -> str:
    """Tell files apart by their paths, sizes and times, without reading them."""
    # A network's disk answers several at a time. A task for each file takes longer than to ask.
    parts = [paths[start : start + _ASKED] for start in range(0, len(paths), _ASKED)]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda part: [os.stat(path) for path in part], parts)
        statuses = [status for answer in answers for status in answer]
    known = [
        (os.path.abspath(path), status.st_size, status.st_mtime_ns)
        for path, status in zip(paths, statuses, strict=True)
    ]
    return digest(json.dumps(known).encode())


def write_json(path: Path, record: Record) -> None:
    """Write a record as readable JSON, atomically."""
    with replace_file(path) as file:
        file.write(json.dumps(record, indent=2).encode() + b"\n")


def write_csv(path: Path, rows: Sequence[Record]) -> None:
    """Write records as CSV, atomically; see :func:`format_csv`."""
    with replace_file(path) as file:
        file.write(format_csv(rows).encode("utf-8", "surrogateescape"))  # names of files are bytes


def create_csv(path: Path, rows: Sequence[Record], columns: Sequence[str] = ()) -> None:
    """Write records as CSV into a new file; see :func:`format_csv`."""
    with create_file(path) as file:
        file.write(format_csv(rows, columns).encode("utf-8", "surrogateescape"))


def find_user_cache(kind: str) -> Path:
    """Return the user's cache folder for a kind of files; RuntimeError if there is no home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "deepbregman" / kind


def format_csv(rows: Sequence[Record], columns: Sequence[str] = ()) -> str:
    """Write records, which need not have the same keys, as CSV that a spreadsheet opens safely.

    A text that a spreadsheet would take for a formula, such as a class named ``=cmd()``, gets an
    apostrophe before it; numbers stay numbers, written as text or not.

    Args:
        columns: the first ones, which are written even if there are no records.
    """
    columns = list(dict.fromkeys([*columns, *(key for row in rows for key in row)]))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_without_formula(name) for name in columns])
    writer.writerows([_without_formula(row.get(name, "")) for name in columns] for row in rows)
    return text.getvalue()


def _without_formula(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    value = value.replace("\r", "\n")  # the writer does not quote it
    if not _FORMULA.match(value):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def restore_text(cell: str) -> str:
    """Return a text as it was before :func:`format_csv` wrote it."""
    text = cell.removeprefix("'")
    return text if _without_formula(text) == cell else cell


def parse_json(text: str) -> Any:
    """Parse JSON from any source; anything wrong with it is a ValueError."""
    try:
        return json.loads(text, parse_float=_parse_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # 1e400; what we write is Infinity
        raise ValueError(f"{abbreviate(text)} is too large a number")
    return value


def read_json(path: Path, shape: Shape = None) -> Record:
    """Read a JSON object that somebody may have edited or damaged."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        check_shape(record, {} if shape is None else shape)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be used ({error}): restore it or remove it") from None
    assert isinstance(record, dict)
    return record


def check_shape(value: Any, shape: Shape, where: str = "it") -> None:
    """Raise a ValueError that names the first part of a record with another shape than it needs."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {abbreviate(value)}, not a JSON object")
        for name, part in value.items():
            expected = shape.get(name, shape.get(...))
            if expected is not None and part is not None:
                check_shape(part, expected, name if where == "it" else f"{where}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is {abbreviate(value)}, not a list")
        for index, part in enumerate(value):
            check_shape(part, shape[0], f"{where}[{index}]")
    elif shape is str:
        if not isinstance(value, str):
            raise ValueError(f"{where} is {abbreviate(value)}, not text")
    elif not is_number(value) or (shape is int and not float(value).is_integer()):
        raise ValueError(f"{where} is {abbreviate(value)}, not a {'whole ' * (shape is int)}number")


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number that arithmetic can use; NaN is."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float)


# Locks


@contextmanager
def hold_lock(path: Path, seconds: float = math.inf) -> Iterator[bool]:
    """Hold a lock file for the block; the block gets whether it is held.

    The lock ends with the process, however that ends; forked workers do not inherit it. It also
    excludes other threads. On a file system without locks nothing is held, and the block gets True.

    Args:
        seconds: time to wait for another holder; then the block runs with False.
    """
    refuse_link(path)
    lock = FileLock(
        path,
        timeout=-1 if math.isinf(seconds) else seconds,
        poll_interval=0.01,
        fallback_to_soft=False,
    )
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone; another one gets an error that names the holder."""
    path = folder / ".lock"
    with hold_lock(path, _SETTLING_SECONDS) as is_held:
        if not is_held:
            holder = ""
            with suppress(OSError):
                holder = path.read_text(encoding="utf-8", errors="replace").strip()
            raise UserError(
                f"{folder} is in use by {holder or 'another process'}: two would overwrite each "
                "other's checkpoints; wait until that one ends, or stop it"
            )
        _write_holder(path, f"process {os.getpid()} on {platform.node()} since {now()}")
        try:
            yield
        finally:
            _write_holder(path, "")


def _write_holder(path: Path, words: str) -> None:
    """Write who holds a lock into its file, if the system lets the holder write there."""
    with suppress(OSError), open_inside(path, "r+b") as file:
        file.truncate()
        file.write(words.encode())
