import errno
import importlib.metadata
import json
import os
import re
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deepbregman
from deepbregman import runs
from deepbregman.config import Config, override
from deepbregman.errors import UserError, mask_secrets
from deepbregman.files import hold_lock, replace_file, write_json
from deepbregman.method import networks
from deepbregman.runs import (
    Run,
    check_new_file,
    collect_provenance,
    hash_source_tree,
    is_complete,
    is_run,
    name_run_folder,
)

CONFIG = override(Config(), {"seed": 5, "data.source": 'été/\n"quoted"', "views.without": ["flip"]})


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", CONFIG, {"device": "cpu"})


def refuse(*arguments: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


# One file


def test_replacing_shows_the_new_file_at_the_end_only(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replace_file(path) as file:
        file.write(b"new" * 100_000)
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" * 100_000
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit])
def test_replacing_keeps_the_old_file_when_the_block_fails(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replace_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("target", ["os.fsync", "pathlib.Path.replace"])
def test_replacing_keeps_the_old_file_when_the_disk_fails(tmp_path, monkeypatch, target):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(target, refuse)
    with pytest.raises(OSError, match="No space"), replace_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_replacing_is_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    events: list[tuple[str, int]] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(handle: int) -> None:
        status = os.fstat(handle)
        events.append(("fsync", -1 if stat.S_ISDIR(status.st_mode) else status.st_size))
        fsync(handle)

    def note_replace(self: Path, target: Path) -> Path:
        events.append(("replace", self.stat().st_size))
        assert self.parent == target.parent  # a rename is atomic within a file system only
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    with replace_file(tmp_path / "file") as file:
        file.write(b"12345")
    assert events == [("fsync", 5), ("replace", 5), ("fsync", -1)]  # and then the folder


def test_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = (
        "import os, pathlib, sys; from deepbregman.runs import replace_file\n"
        "with replace_file(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == 9
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_files_and_folders_have_the_mode_that_the_umask_leaves(tmp_path, mask):
    before = os.umask(mask)
    try:
        run = Run.create(tmp_path / "run", CONFIG, {})
        run.add_result(pretrain={})
        run.truncate_metrics(0)
    finally:
        os.umask(before)
    for path in (run.path, *run.path.rglob("*")):
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_replacing_at_the_same_time_in_two_places(tmp_path):
    """Each writes a file of its own; the last to end wins, whole."""
    path = tmp_path / "file"
    with replace_file(path) as first:
        first.write(b"first")
        with replace_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_record_that_is_not_json_leaves_the_old_one(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["record.json"]


# The folder


def test_create_then_open(run):
    assert sorted(os.listdir(run.path)) == [
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "provenance.json",
    ]
    opened = Run.open(run.path)
    assert opened == run
    assert opened.config == CONFIG
    assert opened.provenance() == {"device": "cpu"}
    assert opened.metrics() == []
    assert opened.result() == {}
    assert opened.last_checkpoint == run.path / "checkpoints" / "last.pt"
    assert opened.checkpoints.is_dir()
    assert os.listdir(run.path.parent) == ["run"]


def test_older_records_called_views_images(run):
    run.append_metrics({"epoch": 1, "images_per_second": 200.0, "total": 1.0})
    run.append_metrics({"epoch": 2, "images_per_second": 100.0, "views_per_second": 200.0})
    old, new = run.metrics()
    assert old == {"epoch": 1, "views_per_second": 200.0, "total": 1.0}
    assert new == {"epoch": 2, "images_per_second": 100.0, "views_per_second": 200.0}


def test_create_in_an_empty_folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    assert Run.create(path, CONFIG, {}).config == CONFIG
    assert os.listdir(tmp_path) == ["run"]


def test_create_in_an_empty_folder_that_is_a_disk_of_its_own(tmp_path, monkeypatch):
    """Such as a volume of a container: no file can be moved into it from the folder beside."""
    path, move = tmp_path / "disk", Path.replace
    path.mkdir()

    def move_on_one_disk(source: Path, target: Path) -> Path:
        if source.is_relative_to(path) != target.is_relative_to(path):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return move(source, target)

    monkeypatch.setattr(Path, "replace", move_on_one_disk)
    assert Run.create(path, CONFIG, {}).config == CONFIG
    assert sorted(os.listdir(path)) == [
        *("checkpoints", "config.toml", "metrics.jsonl", "provenance.json")
    ]


def test_an_empty_folder_is_a_run_only_when_all_files_are_there(tmp_path, monkeypatch):
    """The process may be killed after any of them."""
    real, seen = Path.replace, []

    def note(path: Path, target: Path) -> Path:
        moved = real(path, target)
        if target.parent == tmp_path:
            seen.append((is_run(tmp_path), len(list(tmp_path.glob("[!.]*")))))
        return moved

    monkeypatch.setattr(Path, "replace", note)
    Run.create(tmp_path, CONFIG, {})
    assert seen == [(False, 1), (False, 2), (False, 3), (True, 4)]


def test_create_never_overwrites_a_run(run):
    run.append_metrics({"epoch": 1})
    with pytest.raises(UserError) as caught:
        Run.create(run.path, Config(), {})
    for part in (f"run folder {run.path} exists", f"--resume {run.path}", "--run"):
        assert part in str(caught.value)
    assert run.config == CONFIG
    assert run.metrics() == [{"epoch": 1}]


@pytest.mark.parametrize("kind", ["a file", "a folder with a hidden file"])
def test_create_never_overwrites_what_is_there(tmp_path, kind):
    path = tmp_path / "run"
    kept = path
    if kind != "a file":
        path.mkdir()
        kept = path / ".hidden"
    kept.write_text("kept")
    with pytest.raises(UserError, match="exists"):
        Run.create(path, CONFIG, {})
    assert kept.read_text() == "kept"
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("target", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.touch"])
def test_create_leaves_nothing_when_the_disk_fails(tmp_path, monkeypatch, target, exists):
    path = tmp_path / "run"
    if exists:
        path.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(target, refuse)
        with pytest.raises(OSError, match="No space") as caught:
            Run.create(path, CONFIG, {})
    assert caught.value.filename == str(path)
    assert list(tmp_path.rglob("*")) == ([path] if exists else [])
    assert Run.create(path, CONFIG, {}).config == CONFIG


def test_create_leaves_nothing_when_a_record_is_not_json(tmp_path):
    with pytest.raises(TypeError):
        Run.create(tmp_path / "run", CONFIG, {"device": object()})
    assert os.listdir(tmp_path) == []


def test_create_loses_a_race_without_harm(tmp_path, monkeypatch):
    path = tmp_path / "run"
    write = runs.write_json

    def write_late(target: Path, record: dict[str, Any]) -> None:
        path.mkdir()  # another process makes the same run meanwhile
        (path / "config.toml").write_text("theirs")
        write(target, record)

    monkeypatch.setattr(runs, "write_json", write_late)
    with pytest.raises(OSError, match="not empty"):
        Run.create(path, CONFIG, {})
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert (path / "config.toml").read_text() == "theirs"


@pytest.mark.parametrize("exists", [True, False])
def test_create_behind_a_link(tmp_path, exists):
    target, link = tmp_path / "there" / "elsewhere", tmp_path / "run"
    if exists:
        target.mkdir(parents=True)
    link.symlink_to(target)
    assert Run.create(link, CONFIG, {}) == Run.open(link)
    assert link.is_symlink()
    assert Run.open(target).config == Run.open(link).config == CONFIG
    assert sorted(os.listdir(tmp_path)) == ["run", "there"]
    assert os.listdir(target.parent) == ["elsewhere"]


def test_create_never_overwrites_a_run_behind_a_link(run, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(run.path)
    with pytest.raises(UserError, match="exists"):
        Run.create(link, Config(), {})
    assert run.config == CONFIG


@pytest.mark.parametrize("kind", ["missing", "empty", "a file", "config.toml is a folder"])
def test_open_what_is_not_a_run(tmp_path, kind):
    path = tmp_path / "run"
    if kind == "a file":
        path.touch()
    elif kind != "missing":
        path.mkdir()
    if kind.startswith("config"):
        (path / "config.toml").mkdir()
    with pytest.raises(UserError, match="is not a run folder") as caught:
        Run.open(path)
    assert str(path) in str(caught.value)


# What is written in it


def test_metrics_append(run):
    records = [{"epoch": e, "loss": 1 / e, "é\u2028": 1} for e in (1, 2, 3)]
    for record in records:
        run.append_metrics(record)
    assert run.metrics() == records
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("epochs", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("tail", ["", '{"epoch": 4, "lo', "{", "\0\0\0", "\n"])
def test_metrics_truncate(run, epochs, tail):
    records = [{"epoch": e, "loss": 1 / e} for e in (1, 2, 3)]
    for record in records:
        run.append_metrics(record)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    run.truncate_metrics(epochs)
    assert run.metrics() == records[:epochs]
    run.append_metrics({"epoch": 9})  # the next line begins where it should
    assert run.metrics() == [*records[:epochs], {"epoch": 9}]


def test_metrics_truncate_completes_a_line_that_only_lacks_its_end(run):
    (run.path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}')
    run.truncate_metrics(2)
    run.append_metrics({"epoch": 3})
    assert run.metrics() == [{"epoch": 1}, {"epoch": 2}, {"epoch": 3}]


def test_metrics_truncate_is_atomic(run, monkeypatch):
    run.append_metrics({"epoch": 1})
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        run.truncate_metrics(0)
    assert run.metrics() == [{"epoch": 1}]


def test_metrics_of_a_run_that_crashed_can_be_read(run):
    """Wherever the crash cut the last line."""
    run.append_metrics({"epoch": 1})
    path = run.path / "metrics.jsonl"
    whole, line = path.read_bytes(), json.dumps({"epoch": 2, "loss": 0.5, "é": 1}).encode()
    for size in range(len(line)):
        path.write_bytes(whole + line[:size])
        assert run.metrics() == [{"epoch": 1}], size
    path.write_bytes(whole + line)  # all there but the end of the line
    assert [record["epoch"] for record in run.metrics()] == [1, 2]


@pytest.mark.parametrize("count", [1, 3])
def test_metrics_are_on_disk_when_they_are_appended(run, monkeypatch, count):
    """Else a crash of the machine could leave a checkpoint of an epoch that has no metrics."""
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    for epoch in range(count):
        run.append_metrics({"epoch": epoch})
    assert sizes == [len('{"epoch": 0}\n') * (epoch + 1) for epoch in range(count)]


def test_a_run_of_an_older_version_takes_defaults_for_fields_it_does_not_know(run):
    path = run.path / "config.toml"
    lines = path.read_text().splitlines()
    old = [line for line in lines if not line.startswith("skip_nonfinite")]
    assert len(old) == len(lines) - 1
    path.write_text("\n".join(old))
    assert run.config == CONFIG


@pytest.mark.parametrize("wrote", ["0.9.3", deepbregman.__version__, None])
def test_a_field_of_another_version_is_named_with_that_version(run, wrote):
    path = run.path / "config.toml"
    path.write_text(path.read_text().replace("[training]", "[training]\nwarp = 9"))
    write_json(run.path / "provenance.json", {"versions": {"deepbregman": wrote}})
    with pytest.raises(UserError, match=r"unknown field 'training\.warp'") as caught:
        _ = run.config
    assert str(path) in str(caught.value)
    said = f"made by deepbregman {wrote}, this is {deepbregman.__version__}"
    assert (said in str(caught.value)) == (wrote == "0.9.3")


def test_add_result_merges(run, monkeypatch):
    run.add_result(pretrain={"epoch": 2})
    run.add_result(knn=[1, 2], linear=None)
    run.add_result(knn=[3])
    expected = {"pretrain": {"epoch": 2}, "knn": [3], "linear": None}
    assert run.result() == expected
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        run.add_result(knn=[4])
    assert run.result() == expected


# Where it came from


def test_what_a_killed_training_left_is_cleared_but_nothing_of_an_evaluation(run):
    names = {"config.toml", "metrics.jsonl", "metrics.csv", "loggers.json", "result.json"}
    for name in names:
        (run.path / f".{name}.0123abcd").touch()
    (run.checkpoints / ".last.pt.0123abcd").touch()
    run.clear_temporaries()
    assert [path.name for path in run.path.rglob(".*.0123abcd")] == [".result.json.0123abcd"]


def test_what_a_killed_writer_of_the_result_left_goes_with_the_next(short_run, tmp_path):
    run = Run.create(tmp_path / "run", short_run.config, {})
    left, other = run.path / ".result.json.0123abcd", run.path / ".other.json.0123abcd"
    left.touch()
    other.touch()
    run.add_result(pretrain={"epoch": 1})
    assert not left.exists()
    assert other.exists()


def test_provenance(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/deepbregman", "pretrain", "--seed", "1"])
    known = importlib.metadata.version

    def version(package: str) -> str:
        if package == "torchvision":
            raise importlib.metadata.PackageNotFoundError
        return known(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    record = collect_provenance("a device")
    assert record["command"] == ["deepbregman", "pretrain", "--seed", "1"]
    assert record["device"] == "a device"
    assert record["versions"]["torchvision"] is None
    assert record["versions"]["deepbregman"] == deepbregman.__version__
    assert record["versions"]["numpy"]
    started = datetime.fromisoformat(record["started"])
    assert started.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - started) < timedelta(minutes=1)
    assert json.loads(json.dumps(record)) == record


def test_provenance_without_git(monkeypatch):
    monkeypatch.setattr(subprocess, "run", refuse)
    assert collect_provenance("cpu")["commit"] is None


def test_the_source_is_named_as_git_names_it(tmp_path):
    """So that a record of a machine without a repository can be traced to its commit."""
    (tmp_path / "b" / "__pycache__").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("b/one.py", "b.toml", "b0.py", "b/__pycache__/one.pyc"):
        (tmp_path / name).write_text(f"# {name}\n")
    named = hash_source_tree(tmp_path)
    (tmp_path / ".gitignore").write_text("__pycache__\n")

    def git(*words: str) -> str:
        call = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("add", "b", "b.toml", "b0.py")
    assert named == git("write-tree")
    (tmp_path / "b" / "one.py").write_text("# changed\n")
    assert hash_source_tree(tmp_path) != named


def test_a_commit_is_dirty_only_if_the_package_differs_from_it(tmp_path, monkeypatch):
    """By git itself: changes beside the package do not count, and a commit makes it clean."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        call = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "one.py").write_text("one = 1\n")
    monkeypatch.setattr(runs, "__file__", str(package / "runs.py"))

    def record() -> str | None:
        commit: str | None = runs._find_commit(hash_source_tree(package))
        return commit

    git("init", "--quiet")
    assert record() is None  # there is no commit yet
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    first = git("rev-parse", "HEAD")
    (tmp_path / "README.md").write_text("not of the package\n")
    assert record() == first
    (package / "one.py").write_text("one = 2\n")
    assert record() == f"{first}-dirty"
    git("commit", "--quiet", "--all", "--message", "second")
    assert record() == git("rev-parse", "HEAD") != first
    (package / "two.py").write_text("")  # git does not know it, and yet it may be imported
    assert record() == git("rev-parse", "HEAD") + "-dirty"


@pytest.mark.parametrize(
    ("stops", "trained", "complete"),
    [
        (True, None, False),
        (True, {"epoch": 5}, False),
        (False, {"epoch": 9}, True),
        (True, {"epoch": 5, "stopped": "after epoch 5: saturated"}, True),
        (False, {"epoch": 5, "stopped": "after epoch 5: saturated"}, False),  # it goes on
        (
            False,
            {"epoch": 9, "stopped": "after epoch 9: saturated"},
            True,
        ),  # it had more epochs then
        (False, {"epoch": 5, "stopped": "after epoch 5: a callback had enough"}, True),
    ],
)
def test_a_run_that_stopped_early_is_complete_unless_it_is_told_to_go_on(
    stops, trained, complete, tmp_path
):
    changes = {"training.epochs": 9, "training.stop_when_saturated": stops}
    run = Run.create(tmp_path / "run", override(CONFIG, changes), {})
    if trained is not None:
        run.add_result(pretrain=trained)
    assert is_complete(run) is complete


def test_default_folder_says_what_and_when():
    folder = name_run_folder("digits")
    assert folder.parent == Path("runs")
    name, when = folder.name.rpartition("-")[0].split("-", 1)
    assert name == "digits"
    assert abs(datetime.now() - datetime.strptime(when, "%Y%m%d-%H%M%S")) < timedelta(minutes=1)


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(monkeypatch):
    moment = datetime(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr(runs, "datetime", SimpleNamespace(now=lambda: moment))
    assert len({name_run_folder("best") for _ in range(5)}) == 5


SECRET = "s3cr"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql+psycopg://ann:s3cr:s3cr@host:5432/db", "***@host:5432/db"),
        ("postgresql://ann:s3cr/s3cr@host/db", "***@host/db"),
        ("postgresql://ann:s3cr@s3cr@host/db", "***@host/db"),
        ("postgresql://ann:s3cr?x=s3cr@host/db", "***"),
        ("postgresql://ann:s3cr%40%2F@host/db?sslmode=on", "***@host/db?***"),
        ("postgresql://host/db?user=ann&password=s3cr/s3cr", "host/db?***"),
        ("postgresql://host/db?user=ann&password=s3cr@s3cr", "***"),
        ("postgresql://host/db?password=s3cr?x=s3cr", "host/db?***"),
        ("mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3Ds3cr", "/?***"),
        ("sqlite:///search.db", "/search.db"),
    ],
)
def test_passwords_are_not_written_down(monkeypatch, address, shown):
    monkeypatch.setattr(sys, "argv", ["deepbregman", "--storage", address, f"--storage={address}"])
    masked = f"{address.partition('://')[0]}://{shown}"
    words = ["deepbregman", "--storage", masked, f"--storage={masked}"]
    assert collect_provenance("cpu")["command"] == words
    assert SECRET not in masked
    assert mask_secrets(f"cannot open {address} now") == f"cannot open {masked} now"


def test_text_is_written_in_utf_8_whatever_the_locale(tmp_path):
    """``data.source = "Bücher"`` under ISO-8859-1 could not be read again."""
    program = (
        "import sys, pathlib; from deepbregman.config import Config, override\n"
        "from deepbregman.runs import Run\n"
        "config = override(Config(), {'data.source': 'B\\u00fccher'})\n"
        "run = Run.create(pathlib.Path(sys.argv[1]), config, {'device': 'B\\u00fccher'})\n"
        "assert Run.open(run.path).config == config\n"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    subprocess.run(command, check=True, env=os.environ | ascii_only)


def test_a_provenance_that_is_gone_or_wrong(tmp_path):
    run = Run.create(tmp_path / "run", Config(), {"device": "cpu"})
    write_json(run.path / "provenance.json", {"resumed": {"a": 1}})
    with pytest.raises(UserError, match=r"resumed is {'a': 1}, not a list\): restore it or remove"):
        run.add_resumption({})
    (run.path / "provenance.json").unlink()
    run.add_resumption({"device": "cpu"})
    assert run.provenance() == {"resumed": [{"device": "cpu"}]}


def test_systems_without_posix_modules_import_and_load(short_run):
    """As Windows and macOS do; torch's own needs are its own affair."""
    program = (
        "import os, sys, torch, torchvision\n"
        "for name in ('fcntl', 'resource', 'termios', 'pwd', 'grp'): sys.modules[name] = None\n"
        "for name in ('O_NOFOLLOW', 'link', 'sched_getaffinity'):\n"
        "    if hasattr(os, name): delattr(os, name)\n"
        "import deepbregman, deepbregman.cli\n"
        "from deepbregman.method import networks\n"
        f"networks.SMALL_STAGES = {networks.SMALL_STAGES}\n"  # as here
        "encoder = deepbregman.load_encoder(sys.argv[1])\n"
        "assert encoder(torch.zeros(2, 3, 8, 8)).shape == (2, encoder.num_features)\n"
        "for name in deepbregman.__all__: getattr(deepbregman, name)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(short_run.path)], check=True)


def test_a_folder_that_is_read_only_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == tmp_path and mode == os.W_OK))
    words = rf"the folder {re.escape(str(tmp_path))} cannot be written to; make it writable"
    with pytest.raises(UserError, match=rf"^--sheet .*a\.png: {words}"):
        check_new_file(tmp_path / "a.png", ".png", "sheet")
    with pytest.raises(UserError, match=rf"run: {words}"):
        Run.check_free(tmp_path / "deep" / "run")
    (tmp_path / "own").mkdir()
    Run.check_free(tmp_path / "own" / "run")


def test_the_advice_for_a_folder_that_is_taken_can_be_pasted(tmp_path):
    Run.create(tmp_path / "my run", CONFIG, {})
    with pytest.raises(UserError, match=r"--resume '.*my run'"):
        Run.check_free(tmp_path / "my run")


def test_a_damaged_line_before_others_is_told_and_not_left_out(run):
    run.append_metrics({"epoch": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "tot\n')
    run.append_metrics({"epoch": 3})
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, is no epoch"):
        run.metrics()


def test_a_record_that_another_process_changes_is_waited_for(run, monkeypatch):
    monkeypatch.setattr("deepbregman.runs.PATIENCE_SECONDS", 0.05)
    with hold_lock(run.path / ".records.lock"), pytest.raises(UserError, match="has been held by"):
        run.add_result(study={})
    run.add_result(study={})
    assert run.result() == {"study": {}}


def test_the_number_of_processes_is_that_of_the_last_training(run):
    assert run.last_processes() == 1
    for count in (2, 4):
        run.add_resumption({"processes": count})
    assert run.last_processes() == 4
