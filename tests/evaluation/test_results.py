"""Rows in a run's result: several processes write there at once, and one is killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepbregman.evaluation.results import record_rows
from deepbregman.runs import Run

WRITERS, TIMES = 4, 25
STUCK = """
import pathlib, sys
from deepbregman.runs import Run
with Run.open(pathlib.Path(sys.argv[1])).edit_record() as result:
    result["half"] = 1
    print("ready", flush=True)
    sys.stdin.read()
"""


def row(variant: str, protocol: str = "knn") -> dict[str, Any]:
    return {"protocol": protocol, "variant": variant, "data": "digits", "epoch": 2.0}


def test_nothing_is_lost_when_several_write_at_once(tmp_path, short_config):
    """The lock keeps out threads as it does processes."""
    run = Run.create(tmp_path / "run", short_config, {})
    run.add_result(pretrain={"epoch": 2})

    def write(writer: int) -> None:
        for number in range(TIMES):
            record_rows(run, [row(str(number), f"writer{writer}")])
            run.add_result(**{f"{writer}-{number}": number})

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    found = [(kept["protocol"], kept["variant"]) for kept in run.evaluations()]
    assert len(found) == WRITERS * TIMES
    assert set(found) == {(f"writer{n}", str(i)) for n in range(WRITERS) for i in range(TIMES)}
    parts = {f"{n}-{i}": i for n in range(WRITERS) for i in range(TIMES)}
    assert run.result() == {"pretrain": {"epoch": 2}, "evaluations": run.evaluations(), **parts}


def test_images_of_another_kind_are_told_apart_though_their_folders_have_one_name(
    tmp_path, short_config
):
    run = Run.create(tmp_path / "run", short_config, {})
    for folder in ("a/test", "b/test", "a/test"):
        record_rows(run, [{**row("test: cosine", "ood"), "details": {"against": folder}}])
    assert [kept["details"]["against"] for kept in run.evaluations()] == ["b/test", "a/test"]


def test_a_process_killed_while_it_writes_holds_up_nobody(tmp_path, short_config):
    run = Run.create(tmp_path / "run", short_config, {})
    record_rows(run, [row("first")])
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as stuck:
        assert stuck.stdout.readline() == "ready\n"
        os.kill(stuck.pid, signal.SIGKILL)
        stuck.wait()
    record_rows(run, [row("second")])
    assert [kept["variant"] for kept in run.evaluations()] == ["first", "second"]
    assert "half" not in json.loads((run.path / "result.json").read_text())
