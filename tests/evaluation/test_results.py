"""Rows in a run's result: several processes write there at once, and one is killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepbregman.config import Config
from deepbregman.evaluation.results import record_rows
from deepbregman.runs import Run

WRITERS, TIMES = 4, 25
WRITER = """
import pathlib, sys, time
from deepbregman.evaluation.results import record_rows
from deepbregman.runs import Run
path, name, times = sys.argv[1:]
run = Run.open(pathlib.Path(path))
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(times)):
    row = {"protocol": name, "variant": str(number), "data": "digits", "epoch": 2.0}
    record_rows(run, [row])
    run.add_result(**{f"{name}-{number}": number})
"""
STUCK = """
import pathlib, sys
from deepbregman.runs import Run
with Run.open(pathlib.Path(sys.argv[1])).changing() as result:
    result["half"] = 1
    print("ready", flush=True)
    sys.stdin.read()
"""


def row(variant: str, protocol: str = "knn") -> dict[str, Any]:
    return {"protocol": protocol, "variant": variant, "data": "digits", "epoch": 2.0}


def test_nothing_is_lost_when_several_processes_write_at_once(
    tmp_path: Path, short_config: Config
) -> None:
    run = Run.create(tmp_path / "run", short_config, {})
    run.add_result(pretrain={"epoch": 2})
    writers = []
    for n in range(WRITERS):
        words = [sys.executable, "-c", WRITER, str(run.path), f"writer{n}", str(TIMES)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        writers.append(subprocess.Popen(words, **pipes))  # type: ignore[call-overload]  # by name
    for writer in writers:
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:  # all at one time
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    assert [writer.wait(timeout=60) for writer in writers] == [0] * WRITERS
    for writer in writers:
        writer.stdin.close()
        writer.stdout.close()
    everything = {(f"writer{n}", str(i)) for n in range(WRITERS) for i in range(TIMES)}
    found = [(kept["protocol"], kept["variant"]) for kept in run.evaluations()]
    assert len(found) == len(everything)
    assert set(found) == everything
    parts = {f"{name}-{number}": int(number) for name, number in everything}
    assert {**run.result(), "evaluations": None} == {
        "pretrain": {"epoch": 2},
        "evaluations": None,
        **parts,
    }


def test_a_process_killed_while_it_writes_holds_up_nobody(
    tmp_path: Path, short_config: Config
) -> None:
    run = Run.create(tmp_path / "run", short_config, {})
    record_rows(run, [row("first")])
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "ready\n"
        os.kill(stuck.pid, signal.SIGKILL)
        stuck.wait()
    record_rows(run, [row("second")])
    assert [kept["variant"] for kept in run.evaluations()] == ["first", "second"]
    assert "half" not in json.loads((run.path / "result.json").read_text())
