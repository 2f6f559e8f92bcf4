"""Rows in a run's result: several processes write there at once, and one is killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deepbregman.config import Config
from deepbregman.evaluation.rows import keep
from deepbregman.runs import Run

WRITERS, TIMES = 4, 25
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
    tmp_path: Path, short_config: Config, fork: Callable[[Callable[[], object]], int]
) -> None:
    run = Run.create(tmp_path / "run", short_config, {})
    run.add_result(pretrain={"epoch": 2})
    begin = time.monotonic() + 0.2  # all at one time

    def write(name: str) -> None:
        time.sleep(max(0.0, begin - time.monotonic()))
        for number in range(TIMES):
            keep(run, [row(str(number), name)])
            run.add_result(**{f"{name}-{number}": number})

    writers = [fork(partial(write, f"writer{n}")) for n in range(WRITERS)]
    assert [os.waitpid(writer, 0)[1] for writer in writers] == [0] * WRITERS
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
    keep(run, [row("first")])
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
    keep(run, [row("second")])
    assert [kept["variant"] for kept in run.evaluations()] == ["first", "second"]
    assert "half" not in json.loads((run.path / "result.json").read_text())
