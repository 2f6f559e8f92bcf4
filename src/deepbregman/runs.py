"""The run folder: what a run leaves behind, written so that a crash never leaves half a file.

::

    RUN/
      config.toml        the complete configuration; a recipe like any other
      provenance.json    command, commit, versions, device, times
      metrics.jsonl      one JSON object per epoch
      result.json        what pretraining ended with, and each evaluation
      checkpoints/       last.pt, and epoch-0010.pt ... where asked for
      tensorboard/
"""

import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from .config import Config, from_toml, to_toml
from .errors import UserError

Record = dict[str, Any]
RECORDED_VERSIONS = ("torch", "torchvision", "numpy", "deepbregman")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` only once it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_new_file(path: Path, suffix: str) -> None:
    """Refuse, before any work, an output that could not be written or would replace a file."""
    if path.suffix != suffix:
        raise UserError(f"--out {path}: it is written as {suffix}; name a file that ends so")
    if path.exists():
        raise UserError(f"--out {path} exists: name another file, or remove it")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: the folder {path.parent} does not exist; make it first")


def write_json(path: Path, record: Record) -> None:
    """Write a record as readable JSON, atomically."""
    with replacing(path) as file:
        file.write(json.dumps(record, indent=2).encode() + b"\n")


def read_json(path: Path) -> Record:
    """Read a JSON object that somebody may have edited or damaged."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it or remove it") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} holds no JSON object: restore it or remove it")
    return record


def now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def default_folder(name: str) -> Path:
    """Name a new run folder by what it is and when it began."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _commit() -> str | None:
    """Return the commit of the source tree the package runs from, marked if it was changed."""
    here = Path(__file__).parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return answer.stdout.strip() or None


def provenance(device: str) -> Record:
    """Collect what is needed to know where a number came from."""
    versions: Record = {"python": platform.python_version()}
    for package in RECORDED_VERSIONS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": now(),
        "commit": _commit(),
        "versions": versions,
        "platform": platform.platform(),
        "device": device,
    }


@dataclass(frozen=True)
class Run:
    """A run folder that exists."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: Config, record: Record) -> "Run":
        """Make a new run folder, whole or not at all.

        Args:
            path: must not exist, or be an empty folder.
            config: of the run.
            record: its provenance.
        """
        cls.check_free(path)
        place = path.resolve()  # behind a link, perhaps
        existed = place.exists()
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        try:
            temporary.mkdir()
            (temporary / "config.toml").write_text(to_toml(config))
            (temporary / "checkpoints").mkdir()
            (temporary / "metrics.jsonl").touch()
            write_json(temporary / "provenance.json", record)
            if existed:  # empty, and perhaps somebody's current folder: fill it, no swap
                for name in ("checkpoints", "metrics.jsonl", "provenance.json", "config.toml"):
                    (temporary / name).replace(place / name)
                temporary.rmdir()
            else:
                temporary.replace(place)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls(path)

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a folder that holds anything."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(
                f"run folder {path} exists: a run never overwrites another; continue it with "
                f"--resume {path}, name another with --run, or remove it"
            )

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open a run folder that was made before."""
        if not (path / "config.toml").is_file():
            raise UserError(
                f"{path} is not a run folder: it has no config.toml; name the folder that "
                "`deepbregman pretrain` printed"
            )
        return cls(path)

    @property
    def config(self) -> Config:
        """The configuration the run was made with."""
        path = self.path / "config.toml"
        try:
            return from_toml(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not a text file in UTF-8: {error.reason}") from None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def last_checkpoint(self) -> Path:
        """The checkpoint a run resumes from and is judged by."""
        return self.checkpoints / "last.pt"

    def metrics(self) -> list[Record]:
        """Read the metrics of every epoch so far; a line that a crash cut short is left out."""
        records: list[Record] = []
        for line in (self.path / "metrics.jsonl").read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
            if not isinstance(records[-1], dict) or "epoch" not in records[-1]:
                raise UserError(f"{self.path / 'metrics.jsonl'} holds a line that is no epoch's")
        return records

    def append_metrics(self, record: Record) -> None:
        """Add one epoch's metrics."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def truncate_metrics(self, epochs: int) -> None:
        """Keep the metrics of the first ``epochs`` epochs: what a resumed run will write again."""
        kept = [record for record in self.metrics() if record["epoch"] <= epochs]
        with replacing(self.path / "metrics.jsonl") as file:
            file.write("".join(json.dumps(record) + "\n" for record in kept).encode())

    def result(self) -> Record:
        """Read what the run and its evaluations ended with; empty before that."""
        path = self.path / "result.json"
        return read_json(path) if path.is_file() else {}

    def add_result(self, **parts: Any) -> None:
        """Write parts of the result, leaving the others."""
        write_json(self.path / "result.json", {**self.result(), **parts})

    def provenance(self) -> Record:
        """Read where the run came from."""
        return read_json(self.path / "provenance.json")

    def add_resumption(self, record: Record) -> None:
        """Note where the run goes on: perhaps another device, perhaps another version."""
        before = self.provenance()
        resumed = [*before.get("resumed", []), record]
        write_json(self.path / "provenance.json", {**before, "resumed": resumed})
