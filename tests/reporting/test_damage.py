"""Folders by somebody else: nothing outside is shown, nothing in them runs, damage has words."""

import base64
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from deepbregman.cli import main
from deepbregman.errors import UserError
from deepbregman.reporting.sections import read_study

MakeRun = Callable[..., Path]
HUGE = "9" * 400
ROW = '{"protocol": "knn", "variant": "v", "data": "d", "metric": "top1", "epoch": 1, '
DAMAGED = {
    "metrics.jsonl": [
        '{"epoch": 1, "total": 1e400}',
        '{"epoch": 1, "total": NaN}',
        f'{{"epoch": 1, "total": {HUGE}}}',
        '{"epoch": 1, "total": {"a": [1]}}',
        '{"epoch": 1e400, "total": 1.0}',
        f'{{"epoch": {HUGE}, "total": 1.0}}',
        "3",
        "null",
        "[[1], [2]]",
        "[" * 100_000,
    ],
    "result.json": [
        '{"evaluations": 3}',
        '{"evaluations": null}',
        '{"evaluations": [3, [4]]}',
        f'{{"evaluations": [{ROW}"value": 1e400}}]}}',
        f'{{"evaluations": [{ROW}"value": {HUGE}}}]}}',
        f'{{"evaluations": [{ROW}"value": 1.0, "num_train": "many", "num_test": [1]}}]}}',
        f'{{"evaluations": [{ROW}"value": 1.0, "epochs": "x", "deviation": [], "n": {{}}}}]}}',
        f'{{"evaluations": [{ROW}"value": 1.0, "num_train": 1e400, "n": NaN}}]}}',
        '{"pretrain": 5}',
        '{"pretrain": {"seconds": 1e400}}',
        '{"study": [1]}',
        '{"quickstart": 7}',
        '{"quickstart": [{"features": 1, "linear": null}]}',
        "null",
        "1e400",
        "{",
    ],
    "provenance.json": [
        '{"versions": 3}',
        '{"versions": [[1]]}',
        '{"command": 5}',
        '{"command": {"a": null}}',
        '{"resumed": 3}',
        '{"resumed": [3]}',
        '{"resumed": [{"started": [1]}]}',
        '{"commit": [1], "started": 1e400, "device": {}, "platform": NaN}',
        "null",
        "[[]]",
        "7",
    ],
}


def exit_code(words: list[str]) -> object:
    """Run a command; an error that is not meant for users goes through."""
    try:
        main(words)
    except SystemExit as stopped:
        return stopped.code
    return 0


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in DAMAGED.items() for text in texts]
)
def test_a_damaged_record_has_words(name, text, make_run, tmp_path, capsys):
    run = make_run("a", result={"pretrain": {"seconds": 1.0}})
    (run / name).write_text(text + "\n")
    out = tmp_path / "out"
    code = exit_code(["report", str(run), "--out", str(out)])
    if code:
        assert code == 2
        assert name in " ".join(capsys.readouterr().err.split())
        assert not out.exists()
    else:
        page = (out / "index.html").read_text()
        assert "NaN" not in page.split("<script>")[0]
        assert HUGE not in page


def outcome_folder(folder: Path) -> Path:
    """Write the folder of a study that is shown by its own pictures."""
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"title": "T", "rows": [{"arm": "a", "v": 1}]}))
    Image.new("RGB", (20, 10), "red").save(folder / "good.png")
    return folder


def report_of(source: Path, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the files beside it."""
    main(["report", str(source), "--out", str(out)])
    return (out / "index.html").read_text(), sorted(path.name for path in out.rglob("*.*"))


def test_links_inside_a_study_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("the secret")
    Image.new("RGB", (7, 7), "blue").save(outside / "private.png")
    study = outcome_folder(tmp_path / "study")
    (study / "leak.png").symlink_to(outside / "secret")
    (study / "private.png").symlink_to(outside / "private.png")
    (study / "text.png").write_text("the secret")  # no link, and no picture
    page, files = report_of(study, tmp_path / "out")
    for path in (outside / "secret", outside / "private.png"):
        assert base64.b64encode(path.read_bytes()).decode()[:60] not in page
    assert [name for name in files if name.endswith((".png", ".svg"))] == ["study-good.png"]
    assert page.count("data:image/png;base64,") == 1


def test_a_pipe_among_the_pictures_is_not_waited_for(tmp_path):
    study = outcome_folder(tmp_path / "study")
    os.mkfifo(study / "pipe.png")
    (study / "folder.png").mkdir()
    page, _ = report_of(study, tmp_path / "out")
    assert page.count("data:image/png;base64,") == 1


def test_records_and_runs_behind_links_are_refused(make_run, tmp_path, capsys):
    run, other = make_run("mine"), make_run("other", result={"pretrain": {"seconds": 3.0}})
    (run / "result.json").symlink_to(other / "result.json")
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(run), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "result.json is a link" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "link").symlink_to(other)  # the folder that is named may be one
    report_of(tmp_path / "link", tmp_path / "out")


def test_runs_of_a_study_behind_links_are_left_out(make_run, make_study, tmp_path):
    study = make_study("kappa")
    (study / "runs").mkdir()
    (study / "runs" / "5-seed0").symlink_to(make_run("elsewhere", {"seed": 987654321}))
    page, _ = report_of(study, tmp_path / "out")
    assert "987654321" not in page


def test_no_script_of_a_picture_reaches_the_page(tmp_path):
    study = outcome_folder(tmp_path / "study")
    script = "<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    (study / "drawing.svg").write_text(script)
    (study / "disguised.png").write_text(script)
    page, files = report_of(study, tmp_path / "out")
    assert not [name for name in files if name.endswith(".svg")]
    assert "study-disguised.png" not in files
    assert "data:image/svg" not in page.split("<script>")[0]  # Vega has the words
    assert base64.b64encode(script.encode()).decode()[:60] not in page


def test_a_picture_is_written_anew_and_a_bomb_is_left_out(tmp_path):
    study = outcome_folder(tmp_path / "study")
    with (study / "good.png").open("ab") as file:
        file.write(b"words after the end of the picture")

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
    )
    (study / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bomb)
    _, files = report_of(study, tmp_path / "out")
    assert [name for name in files if name.endswith(".png")] == ["study-good.png"]
    copied = (tmp_path / "out" / "figures" / "study-good.png").read_bytes()
    assert b"words after" not in copied


@pytest.mark.parametrize(
    "change",
    [
        {"arms": 3},
        {"arms": [3]},
        {"arms": None},
        {"cells": None},
        {"cells": [{"arm": [1]}]},
        {"study": [1]},
        {"metric": {}},
        {"data": 5, "epochs": [1], "recipe": None},
        {"unequal_budget": 5},
    ],
)
def test_a_damaged_study_has_words(change, make_study, tmp_path, capsys):
    study = make_study("kappa")
    record = json.loads((study / "results.json").read_text()) | change
    (study / "results.json").write_text(json.dumps(record))
    code = exit_code(["report", str(study), "--out", str(tmp_path / "out")])
    if code:
        assert code == 2
        assert str(study) in "".join(capsys.readouterr().err.split("\n"))


def test_the_cause_of_a_damaged_study_is_kept(make_study):
    """So that --debug shows it: it may be a fault of the program."""
    study = make_study("kappa")
    record = json.loads((study / "results.json").read_text()) | {"arms": 3}
    (study / "results.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="is not of a study") as caught:
        read_study(study)
    assert caught.value.__cause__ is not None
