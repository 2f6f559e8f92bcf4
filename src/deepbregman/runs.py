"""The run folder. It is written so that a crash never leaves half a file.

::

    RUN/
      config.toml        the complete configuration; a recipe like any other
      provenance.json    command, commit, versions, device, times
      metrics.jsonl      one JSON object per epoch
      result.json        what pretraining ended with, and each evaluation
      predictions.json   the class that each evaluation predicted for each test image
      finished_arms.json what an unfinished evaluation has measured so far
      checkpoints/       last.pt, previous.pt, and epoch-0010.pt ... where asked for
      features/          of images, kept for the next search; may be deleted
      tensorboard/
      .lock              names the process that trains; the kernel holds the lock itself
      .records.lock      held for the moment in which result.json is changed
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from deepbregman import __version__

from .config import Config, from_toml, to_toml
from .errors import UserError, mask_address
from .files import Record as Record
from .files import (
    check_can_be_folder,
    check_shape,
    clear_temporaries,
    hold_lock,
    is_number,
    now,
    open_inside,
    parse_json,
    read_json,
    refuse_link,
    refuse_read_only,
    replace_file,
    write_json,
)

PATIENCE_SECONDS = 60.0
"""Time to wait for another process that changes a record, which takes milliseconds."""
SATURATED = "saturated"
"""The verdict on a run for which more epochs bring little."""
CHANGEABLE = frozenset(
    {
        *("data.root", "data.resident", "data.workers", "data.skip_unreadable"),
        *("training.checkpoint_every", "training.save_seconds", "training.knn_every"),
        *("training.tensorboard", "training.logger", "training.compile", "training.skip_nonfinite"),
        *("training.health_every", "training.stop_when_saturated"),
    }
)
"""Fields that a resumed run may change: they do not affect what is trained.

If data.skip_unreadable changes which images are trained on, the run is refused for that.
"""
_METRICS = {"verdict": str, "reason": str, "stopped": str, ...: float}
_START = {
    "command": [str],
    **dict.fromkeys(("started", "commit", "source", "platform", "device"), str),
    "versions": {...: str},
    "processes": int,
}
_PROVENANCE = {**_START, "resumed": [_START], "enough_epochs": int}
_EVALUATION = {
    **dict.fromkeys(("protocol", "variant", "data", "metric", "split", "device", "finished"), str),
    **dict.fromkeys(("value", "deviation", "epoch", "seconds"), float),
    **dict.fromkeys(("n", "seed", "epochs", "num_train", "num_test"), int),
    "values": [float],
    "details": {},
    "chosen": [{}],
}
_RESULT = {
    "pretrain": {"finished": str, "verdict": str, "reason": str, "stopped": str, ...: float},
    "evaluations": [_EVALUATION],
    "quickstart": [{"features": str, ...: float}],
    "study": {"state": str, "evaluate_on": str, "metrics": {...: float}, "why": str},
}


def list_changeable(config: Config) -> frozenset[str]:
    """Return the fields that a run may change when it resumes.

    Its length is one of them, unless a schedule depends on it.
    """
    return CHANGEABLE if config.depends_on_length else CHANGEABLE | {"training.epochs"}


def choose_free_name(name: str) -> str:
    """Return the name of a new file in the working folder: with a number if it is taken."""
    path, number = Path(name), 2
    while path.exists():
        path, number = path.with_name(f"{Path(name).stem}-{number}{path.suffix}"), number + 1
    return str(path)


def check_new_file(path: Path | str | None, suffix: str, option: str = "out") -> None:
    """Refuse, before any work, an output that could not be written or would replace a file."""
    if path is None:
        return
    path = Path(path)
    if path.suffix != suffix:
        raise UserError(
            f"--{option} {path}: it is to be a {suffix} file; give it a name with that ending"
        )
    if path.exists():
        raise UserError(f"--{option} {path} exists: name another file, or remove it")
    if not path.parent.is_dir():
        raise UserError(
            f"--{option} {path}: the folder {path.parent} does not exist; make it first"
        )
    refuse_read_only(path.parent, f"--{option} {path}")


def name_run_folder(name: str) -> Path:
    """Name a new run folder by what it is and when it began; several may begin in one second."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def hash_source_tree(folder: Path = Path(__file__).parent) -> str:
    """Return the name that git gives to the contents of the package's folder.

    It needs neither git nor a repository, so it is known on every machine. The commits with this
    code are those for which ``git rev-parse COMMIT:src/deepbregman`` prints the same.
    """
    entries = []
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir():
            # git knows no empty folders, and compares the name of a folder as if it ended in "/".
            if any(part.is_file() for part in path.rglob("*") if "__pycache__" not in part.parts):
                digest = bytes.fromhex(hash_source_tree(path))
                entries.append((f"{path.name}/", b"40000 %s\0%s" % (path.name.encode(), digest)))
        else:
            content = path.read_bytes()
            digest = hashlib.sha1(b"blob %d\0%s" % (len(content), content)).digest()
            entries.append((path.name, b"100644 %s\0%s" % (path.name.encode(), digest)))
    body = b"".join(entry for _, entry in sorted(entries))
    return hashlib.sha1(b"tree %d\0%s" % (len(body), body)).hexdigest()


def _find_commit(source: str) -> str | None:
    """Return the commit that the package runs from, marked if changed since; None without one."""
    here = Path(__file__).parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None

    def ask(*words: str) -> str:
        answer = subprocess.run(
            ["git", "rev-parse", *words], cwd=here, capture_output=True, text=True, check=False
        )
        return answer.stdout.strip() if answer.returncode == 0 else ""

    try:
        commit, committed = ask("HEAD"), ask("HEAD:./")
    except OSError:
        return None
    return commit + "-dirty" * (committed != source) if commit else None


def read_command_line() -> list[str]:
    """Return the words that started this process, without the password of any address in them."""
    return [mask_address(word) for word in (Path(sys.argv[0]).name, *sys.argv[1:])]


def list_versions(*more: str) -> dict[str, str | None]:
    """Return the versions of the packages that numbers depend on; None for one not installed."""
    versions: dict[str, str | None] = {"deepbregman": __version__}
    for package in ("torch", "torchvision", "numpy", *more):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def collect_provenance(device: str) -> Record:
    """Collect the origin of a number: command, commit, source, versions, machine, time."""
    source = hash_source_tree()
    return {
        "command": read_command_line(),
        "started": now(),
        "commit": _find_commit(source),
        "source": source,
        "versions": {"python": platform.python_version(), **list_versions()},
        "platform": platform.platform(),
        "device": device,
    }


def is_run(folder: Path) -> bool:
    """Whether a folder is one of a run."""
    return (folder / "config.toml").is_file()


def is_complete(run: "Run") -> bool:
    """Whether a run has been trained to its end, which may have come early."""
    trained = run.result().get("pretrain") or {}
    settings = run.config.training
    # Without the option, a run that was saturated goes on.
    may_end = settings.stop_when_saturated or not was_saturated(trained)
    return bool(trained.get("stopped") and may_end) or trained.get("epoch") == settings.epochs


def was_saturated(trained: Record) -> bool:
    """Whether a run stopped early because more epochs bring little, by its result."""
    return str(trained.get("stopped")).endswith(f": {SATURATED}")


@dataclass(frozen=True)
class Run:
    """A run folder that exists."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: Config, record: Record) -> "Run":
        """Make a new run folder, complete or not at all; ``path`` may be an empty folder."""
        cls.check_free(path)
        place = path.resolve()  # behind a link, perhaps
        existed = place.exists()
        place.parent.mkdir(parents=True, exist_ok=True)
        # In the folder itself, which may be a disk of its own: files move within one disk only.
        beside = place if existed else place.parent
        temporary = beside / f".{place.name}.{secrets.token_hex(4)}"
        try:
            temporary.mkdir()
            (temporary / "config.toml").write_text(to_toml(config), encoding="utf-8")
            (temporary / "checkpoints").mkdir()
            (temporary / "metrics.jsonl").touch()
            write_json(temporary / "provenance.json", record)
            if existed:  # empty, and perhaps somebody's current folder: fill it, no swap
                for name in ("checkpoints", "metrics.jsonl", "provenance.json", "config.toml"):
                    (temporary / name).replace(place / name)
                temporary.rmdir()
            else:
                temporary.replace(place)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):  # a full disk names no file, or a hidden one
                error.filename = str(path)
            raise
        return cls(path)

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a folder that holds anything."""
        if is_run(path):
            raise UserError(
                f"run folder {path} exists: a run never overwrites another; continue it with "
                f"--resume {shlex.quote(str(path))}, name another with --run, or remove it"
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "holds other files" if path.is_dir() else "is a file"
            raise UserError(
                f"run folder {path} exists, {what} and is no run: name another with --run"
            )
        check_can_be_folder(path)

    @classmethod
    def open(cls, run: "Run | Path | str") -> "Run":
        """Open a run folder that was made before; a run that is open stays as it is."""
        if isinstance(run, Run):
            return run
        path = Path(run)
        if not is_run(path):
            inside = sorted(str(folder.parent) for folder in path.glob("*/config.toml"))
            named = f"it holds the run{'s' * (len(inside) > 1)} {', '.join(inside[:5])}"
            raise UserError(
                f"{path} is not a run folder: it has no config.toml; "
                + (named if inside else "name the folder that `deepbregman pretrain` printed")
            )
        return cls(path)

    def check_links(self) -> None:
        """Refuse a run with a symbolic link where files are written in place."""
        for name in ("checkpoints", "tensorboard", "metrics.jsonl", ".lock", ".records.lock"):
            refuse_link(self.path / name)

    @property
    def config(self) -> Config:
        """The configuration the run was made with."""
        path = self.path / "config.toml"
        try:
            return from_toml(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not a text file in UTF-8: {error.reason}") from None
        except UserError as error:
            raise UserError(f"{error}{self._other_version()}") from None

    def keep_config(self, config: Config) -> None:
        """Write the configuration with which the run continues, if it has changed."""
        if config != self.config:
            with replace_file(self.path / "config.toml") as file:
                file.write(to_toml(config).encode())

    def _other_version(self) -> str:
        """Name the version that wrote the run if it was another one; empty otherwise."""
        try:
            wrote = self.provenance()["versions"]["deepbregman"]
        except (UserError, KeyError, TypeError):
            return ""
        if wrote is None or wrote == __version__:
            return ""
        return f"; the run was made by deepbregman {wrote}, this is {__version__}: use that version"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def last_checkpoint(self) -> Path:
        """The checkpoint that a run resumes from and is evaluated by."""
        return self.checkpoints / "last.pt"

    @property
    def previous_checkpoint(self) -> Path:
        """The checkpoint before the last one, in case that is damaged."""
        return self.checkpoints / "previous.pt"

    def clear_temporaries(self) -> None:
        """Remove the half-written files of a killed process.

        Not those of result.json: an evaluation may be writing it at this moment.
        """
        names = ("config.toml", "loggers.json", "metrics.csv", "metrics.jsonl", "provenance.json")
        clear_temporaries(self.path, frozenset(names))
        clear_temporaries(self.checkpoints)

    def metrics(self) -> list[Record]:
        """Read the metrics of every epoch so far; empty if they were removed.

        A line that a crash cut short is left out.
        """
        records: list[Record] = []
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return records
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                record = parse_json(line)
                check_shape(record, _METRICS)
                if not is_number(record.get("epoch")):
                    raise ValueError("it has no epoch")
            except ValueError as error:
                if isinstance(error, json.JSONDecodeError) and number == len(lines):
                    break
                raise UserError(
                    f"{path}, line {number}, is no epoch ({error}): restore it or remove the line"
                ) from None
            records.append(_rename_speed(record))
        return records

    def append_metrics(self, record: Record) -> None:
        """Add one epoch's metrics; they are on disk before a checkpoint counts them."""
        path = self.path / "metrics.jsonl"
        try:
            with open_inside(path, "ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)  # a full disk names no file
            raise

    def truncate_metrics(self, epochs: int) -> None:
        """Keep the metrics of the first ``epochs`` epochs; a resumed run writes the others."""
        kept = [record for record in self.metrics() if record["epoch"] <= epochs]
        with replace_file(self.path / "metrics.jsonl") as file:
            file.write("".join(json.dumps(record) + "\n" for record in kept).encode())

    def result(self) -> Record:
        """Read the results of pretraining and evaluations; empty before there are any."""
        path = self.path / "result.json"
        return read_json(path, _RESULT) if path.is_file() else {}

    def evaluations(self) -> list[Record]:
        """Read the rows of the evaluations so far."""
        rows: list[Record] = self.result().get("evaluations") or []
        needed = {"protocol", "variant", "data", "epoch"}
        if any(row.get(name) is None for row in rows for name in needed):
            raise UserError(
                f"{self.path / 'result.json'} cannot be used (an evaluation lacks one of "
                f"{', '.join(sorted(needed))}): restore it or remove it"
            )
        return rows

    @contextmanager
    def edit_record(self, name: str = "result.json") -> Iterator[Record]:
        """Read a record, change it in the block, and write it; other processes wait.

        The file exists only while the record has content.
        """
        path = self.path / name
        lock = self.path / ".records.lock"
        with hold_lock(lock, PATIENCE_SECONDS) as is_held:
            if not is_held:
                raise UserError(
                    f"{lock} has been held by another process for {PATIENCE_SECONDS:g} seconds: "
                    "end that process, or wait for it, and give the command again"
                )
            # The holder of the lock is the only writer, so these are of killed processes.
            clear_temporaries(self.path, frozenset({name}))
            record = read_json(path) if path.is_file() else {}
            yield record
            if record:
                write_json(path, record)
            else:
                path.unlink(missing_ok=True)

    def add_result(self, **parts: Any) -> None:
        """Write parts of the result, leaving the others."""
        with self.edit_record() as record:
            record.update(parts)

    def provenance(self) -> Record:
        """Read the provenance of the run; empty if it was removed."""
        path = self.path / "provenance.json"
        return read_json(path, _PROVENANCE) if path.is_file() else {}

    def keep_enough(self, epochs: int) -> None:
        """Record the number of epochs after which more bring little, as the recipe auto has it."""
        write_json(self.path / "provenance.json", {**self.provenance(), "enough_epochs": epochs})

    def last_processes(self) -> int:
        """Return how many processes trained the run when it was last trained."""
        record = self.provenance()
        last = (record.get("resumed") or [record])[-1]
        return int(last.get("processes", 1))

    def add_resumption(self, record: Record) -> None:
        """Record a resumption: the device and the version may differ from before."""
        before = self.provenance()
        resumed = [*(before.get("resumed") or []), record]
        write_json(self.path / "provenance.json", {**before, "resumed": resumed})


def _rename_speed(record: Record) -> Record:
    """Rename the speed in older records, which call views per second ``images_per_second``."""
    if "views_per_second" not in record and "images_per_second" in record:
        record["views_per_second"] = record.pop("images_per_second")
    return record
