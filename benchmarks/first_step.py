"""Time to the first training step, cold and warm, and the speed afterwards, of ways to compile.

    python benchmarks/first_step.py [--tiny] [--arms NAME ...] [--out FILE.json]

Every arm is a new process. Cold: the caches of the compiler are empty. Warm: they are those of the
cold process. Stored: they are empty again, and filled from one file that the cold process wrote.
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
ARMS = {
    "eager": "nothing is compiled",
    "whole": "the whole step, as pretrain does it",
    "late": "the whole step; the compiler's processes start with the first kernel",
    "pool": "the whole step; the compiler's processes start before anything else",
    "regions": "the whole step; each kind of residual block is compiled once",
    "blocks": "residual blocks, views and the rest one by one",
    "unseen": "the step without its views, which run uncompiled",
    "default": "the whole step, without CUDA graphs",
    "untuned": "the whole step, and no kernel is tried in several versions",
    "unsearched": "the whole step, and cuDNN's first guess of an algorithm for each convolution",
}
STATES = {"whole": ("cold", "warm", "stored"), "eager": ("cold",), "unsearched": ("cold",)}
"""Of the caches; of the other arms cold and warm."""


def take_steps(arm: str, stored: Path | None, tiny: bool) -> dict[str, Any]:
    """Take the first steps of a run in this process; return what they took."""
    started = float(os.environ[STARTED])
    import torch

    if arm == "pool":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
        AsyncCompile.wakeup()
    from deepbregman.benchmarking import QUIET, make_random_images, start_run
    from deepbregman.config import load_recipe, override
    from deepbregman.training.processes import launch, start_compilers

    imported = time.time() - started
    if stored is not None and stored.is_file():
        torch.compiler.load_cache_artifacts(stored.read_bytes())
    if arm == "untuned":
        torch._inductor.config.triton.autotune_pointwise = False
    small = {"encoder.name": "small", "data.image_size": 8, "training.batch_size": 32}
    compiled = {"training.compile": "no" if arm in ("eager", "blocks", "default") else "yes"}
    config = override(load_recipe("simclr"), {**QUIET, **(small if tiny else {}), **compiled})
    images = make_random_images(4 * config.training.batch_size, config.data.image_size)
    fabric = launch("auto")
    if arm not in ("late", "pool"):
        start_compilers(config, fabric)
    if arm == "unsearched":
        torch.backends.cudnn.benchmark = False
    with tempfile.TemporaryDirectory() as folder:
        job = start_run(config, images, fabric, Path(folder))
        step = job.step_module
        blocks = [part for part in step.modules() if _is_block(part)]
        if arm == "regions":
            for block in blocks:
                block.forward = torch.compiler.nested_compile_region(block.forward)
        elif arm == "blocks":
            for block in blocks:
                block.compile()
            step.views.main.compile()
        elif arm == "unseen":
            views = step.views.main
            views.forward = torch.compiler.disable(views.forward)
        elif arm == "default":
            step.compile()
        feed = job.feed(0, 0)
        ready = time.time() - started

        def finish(count: int) -> float:
            begun = time.perf_counter()
            for _ in range(count):
                job.advance(feed)
            if fabric.device.type == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - begun) / count

        finish(1)
        first = time.time() - started
        finish(2 if tiny else 10)  # CUDA graphs are recorded
        recorded = time.time() - started
        seconds = min(finish(2 if tiny else 40) for _ in range(3))
    found = {
        "imported": imported,
        "ready": ready,
        "first step": first,
        "first 11 steps": recorded,
        "milliseconds a step": 1e3 * seconds,
        "phases": _list_phases(),
        "counters": _count_work(),
        "device": str(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"),
        "torch": torch.__version__,
        "blocks": len(blocks),
    }
    if stored is not None and not stored.is_file():
        begun = time.perf_counter()
        made = torch.compiler.save_cache_artifacts()
        if made is not None:
            stored.write_bytes(made[0])
            found["stored bytes"] = len(made[0])
            found["seconds to store"] = time.perf_counter() - begun
    return found


def _is_block(module: Any) -> bool:
    return type(module).__name__ in ("BasicBlock", "Bottleneck")


def _list_phases() -> dict[str, float]:
    """Return the seconds of the compiler's phases, which contain each other, longest first."""
    from torch._dynamo import utils

    known = getattr(utils, "compilation_time_metrics", {})
    totals = {name: sum(times) for name, times in known.items()}
    return dict(sorted(totals.items(), key=lambda item: -item[1])[:14])


def _count_work() -> dict[str, int]:
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    wanted = (
        ("stats", "unique_graphs"),
        ("inductor", "fxgraph_cache_hit"),
        ("inductor", "fxgraph_cache_miss"),
        ("aot_autograd", "autograd_cache_hit"),
        ("aot_autograd", "autograd_cache_miss"),
    )
    found = {name: int(counters[group][name]) for group, name in wanted}
    return {**found, "kernels": int(metrics.generated_kernel_count)}


def start_child(
    arm: str, cache: Path, stored: Path | None, tiny: bool, limit: float
) -> dict[str, Any]:
    """Take the steps in a new process, of at most so many seconds."""
    place = {"TORCHINDUCTOR_CACHE_DIR": cache / "inductor", "TRITON_CACHE_DIR": cache / "triton"}
    environment = {**os.environ, **{name: str(path) for name, path in place.items()}}
    command = [sys.executable, __file__, "--child", arm, *(["--tiny"] if tiny else [])]
    command += [] if stored is None else ["--stored", str(stored)]
    environment[STARTED] = repr(time.time())
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {limit:g} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_step(
    tiny: bool = False,
    arms: tuple[str, ...] = tuple(ARMS),
    out: Path | None = None,
    limit: float = 120.0,
    child: str = "",
    stored: Path | None = None,
) -> None:
    """Measure the arms one after the other.

    Args:
        tiny: A small encoder, to try it out on a CPU.
        arms: Ways to compile, by name: see ARMS.
        out: JSON file to write.
        limit: Seconds that a process may take.
        child: Take the steps of this arm in this process.
        stored: File with the compiler's caches, read if it is there and else written.
    """
    if child:
        print(json.dumps(take_steps(child, stored, tiny)))
        return
    records = []
    for arm in arms:
        with tempfile.TemporaryDirectory() as folder:
            for state in STATES.get(arm, ("cold", "warm")):
                cache = Path(folder) / ("second" if state == "stored" else "first")
                file = Path(folder) / "caches" if arm == "whole" and state != "warm" else None
                found = start_child(arm, cache, file, tiny, limit)
                records.append({"arm": arm, "how": ARMS[arm], "caches": state, **found})
                if out is not None:  # after each, so that a cut measurement still tells something
                    device = str(found.get("device", "unknown"))
                    write_json(out, {**collect_provenance(device), "arms": records})
                if "error" in found:
                    print(f"{arm:<8} {state:<6} {found['error']}", flush=True)
                    break
                print(
                    f"{arm:<8} {state:<6} first step {found['first step']:6.1f} s "
                    f"(imports {found['imported']:.1f}, ready {found['ready']:.1f}), then "
                    f"{found['milliseconds a step']:.1f} ms a step; {found['counters']}",
                    flush=True,
                )


if __name__ == "__main__":
    tyro.cli(first_step)
