"""Time to the first training step, by what is in the caches of the compiler, and the speed after.

    python benchmarks/first_step.py [--tiny] [--out FILE.json]

Every measurement is a new process. Cold: the caches are empty. Warm: they are those of the cold
process. Stored: they are empty again, and filled from one file that the cold process wrote. Eager:
nothing is compiled.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro

from deepbregman.files import write_json
from deepbregman.runs import collect_provenance

STARTED = "FIRST_STEP_STARTED"
"""Environment variable with the time at which the process was started."""
STATES = ("cold", "warm", "stored", "eager")


def take_steps(state: str, stored: Path, tiny: bool) -> dict[str, Any]:
    """Take the first steps of a run in this process; return what they took."""
    started = float(os.environ[STARTED])
    import torch

    from deepbregman.benchmarking import QUIET, make_random_images, start_run
    from deepbregman.config import load_recipe, override
    from deepbregman.training.processes import launch, start_compilers

    imported = time.time() - started
    if state == "stored":
        torch.compiler.load_cache_artifacts(stored.read_bytes())
    small = {"encoder.name": "small", "data.image_size": 8, "training.batch_size": 32}
    compiled = {"training.compile": "no" if state == "eager" else "yes"}
    config = override(load_recipe("simclr"), {**QUIET, **(small if tiny else {}), **compiled})
    images = make_random_images(4 * config.training.batch_size, config.data.image_size)
    fabric = launch("auto")
    start_compilers(config, fabric)
    with tempfile.TemporaryDirectory() as folder:
        job = start_run(config, images, fabric, Path(folder))
        feed = job.feed(0, 0)
        ready = time.time() - started

        def take(count: int) -> float:
            begun = time.perf_counter()
            for _ in range(count):
                job.advance(feed)
            if fabric.device.type == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - begun) / count

        take(1)
        first = time.time() - started
        take(2 if tiny else 10)  # CUDA graphs are recorded
        recorded = time.time() - started
        seconds = min(take(2 if tiny else 40) for _ in range(3))
    found: dict[str, Any] = {
        "imported": imported,
        "ready": ready,
        "first step": first,
        "first 11 steps": recorded,
        "milliseconds a step": 1e3 * seconds,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if state == "cold" and (made := torch.compiler.save_cache_artifacts()) is not None:
        stored.write_bytes(made[0])
        found["stored bytes"] = len(made[0])
    return found


def start_child(state: str, folder: Path, tiny: bool, limit: float) -> dict[str, Any]:
    """Take the steps in a new process, of at most so many seconds."""
    cache = folder / ("first" if state in ("cold", "warm") else state)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        STARTED: repr(time.time()),
    }
    command = [sys.executable, __file__, "--child", state, "--stored", str(folder / "caches")]
    try:
        done = subprocess.run(
            [*command, *(["--tiny"] if tiny else [])],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {limit:g} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_step(
    tiny: bool = False,
    out: Path | None = None,
    limit: float = 120.0,
    child: str = "",
    stored: Path | None = None,
) -> None:
    """Measure the states of the caches one after the other.

    Args:
        tiny: A small encoder, to try it out on a CPU.
        out: JSON file to write.
        limit: Seconds that a process may take.
        child: Take the steps in this process, with the caches in this state.
        stored: File with the compiler's caches, which the cold process writes.
    """
    if child:
        assert stored is not None
        print(json.dumps(take_steps(child, stored, tiny)))
        return
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for state in STATES:
            found = start_child(state, Path(folder), tiny, limit)
            records.append({"caches": state, **found})
            if out is not None:  # after each, so that a cut measurement still tells something
                device = found.get("device", "unknown")
                write_json(out, {**collect_provenance(device), "arms": records})
            print(state, found, flush=True)


if __name__ == "__main__":
    tyro.cli(first_step)
