"""The speed of a training step: arms take turns, and the median of the turns counts."""

import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from deepbregman.config import Config, load_recipe, override
from deepbregman.data import ArrayImages, Images
from deepbregman.files import Record
from deepbregman.objectives import Group, build_run_encoder, build_views
from deepbregman.terminal import count_words, say
from deepbregman.training.devices import is_mixed
from deepbregman.training.fabric import Fabric
from deepbregman.training.loop import Pretraining
from deepbregman.training.optimisers import build_optimiser
from deepbregman.training.processes import compile_step

Step = Callable[[], object]
"""Takes one training step; may return before the device is done."""
Build = Callable[[], Step]

BARE = "bare encoder"
DIVERGENCE = {
    "teacher": None,
    "weak_views": None,
    "divergence.weight": 1.0,
    "divergence.source": "learned",
    "divergence.compare": "contrast",
    "divergence.kernel": "gaussian",
    "divergence.pairs": "views",
    "divergence.num_subnetworks": 100,
    "divergence.temperature": 0.2,
    "divergence.smoothing": 0.0,
    "divergence.target_smoothing": 0.0,
}
"""The paper's hard form on pairs of views, unless an arm changes it."""

QUIET = {
    "training.tensorboard": False,
    "training.knn_every": 0,
    "training.health_every": 0,
    "training.epochs": 1000,
}


class Effort(NamedTuple):
    """Length of a measurement: untimed steps of every arm, turns, and steps in a turn."""

    warmup: int
    turns: int
    steps: int


@dataclass
class TimedArm:
    """A step that is ready to be timed."""

    name: str
    step: Step
    views_per_step: int
    """Images that pass the encoder in a step, every view counted."""
    first_step_seconds: float = 0.0
    """Time to build the arm and take its first step, compilation included."""
    peak_bytes: int = 0
    """Device memory above what was in use before; 0 on a CPU."""
    lead_in: int = 0
    """Untimed steps before every turn. An arm with loader workers must first use up the batches
    that they prepared while other arms had their turn."""


def measure(
    config: Config,
    arms: Mapping[str, Build],
    effort: Effort,
    device: torch.device,
    console: Console,
    lead_in: Mapping[str, int] | None = None,
) -> Record:
    """Build arms one after the other, then let them take turns; see :class:`TimedArm`."""
    views_per_step = config.training.batch_size * config.views.num_views
    group = f"{config.encoder.name}, batch {config.training.batch_size}"
    ready = []
    for name, build in arms.items():
        arm = prepare_arm(name, views_per_step, build, device, effort.warmup)
        arm.lead_in = (lead_in or {}).get(name, 0)
        ready.append(arm)
        say(console, f"{group}: {name} ready in {arm.first_step_seconds:.1f} s")
    say(console, f"{group}: each takes {effort.turns} turns of {count_words(effort.steps, 'step')}")
    timings = time_arms(ready, device, effort)
    torch._dynamo.reset()  # frees the memory of this group for the next
    return {
        "encoder": config.encoder.name,
        "batch_size": config.training.batch_size,
        "image_size": config.data.image_size,
        "arms": timings,
    }


def prepare_arm(
    name: str, views_per_step: int, build: Build, device: torch.device, warmup: int
) -> TimedArm:
    """Build an arm, take its first step and warm it up."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    started = time.perf_counter()
    step = build()
    step()
    _wait(device)
    first = time.perf_counter() - started
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warmup):
        step()
    _wait(device)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    return TimedArm(name, step, views_per_step, first, peak)


def time_arms(arms: list[TimedArm], device: torch.device, effort: Effort) -> list[Record]:
    """Time arms in turns, so that a slow moment of the machine hits all of them."""
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(effort.turns):
        for arm in arms:
            for _ in range(arm.lead_in):
                arm.step()
            _wait(device)
            started = time.perf_counter()
            for _ in range(effort.steps):
                arm.step()
            _wait(device)
            seconds[arm.name].append((time.perf_counter() - started) / effort.steps)
    timings = []
    for arm in arms:
        turns = seconds[arm.name]
        median = statistics.median(turns)
        timings.append(
            {
                "name": arm.name,
                "views_per_second": arm.views_per_step / median,
                "milliseconds": 1e3 * median,
                "spread": max(turns) / min(turns),  # slowest over fastest turn
                "first_step_seconds": arm.first_step_seconds,
                "peak_gigabytes": arm.peak_bytes / 1e9,
            }
        )
    return timings


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The arms


def configure(encoder: str, batch_size: int, changes: Mapping[str, Any] | None = None) -> Config:
    """Return the simclr recipe for a benchmark, with views as large as the images."""
    common = {
        "encoder.name": encoder,
        "views.relative_size": 1.0,  # other libraries have views of this size
        "training.batch_size": batch_size,
        **QUIET,
    }
    return override(load_recipe("simclr"), {**common, **(changes or {})})


def make_random_images(count: int, side: int) -> ArrayImages:
    """Make images of noise; the time of a step does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, side, side)
    return ArrayImages(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))


def list_arms(
    encoder: str, batch_size: int, images: ArrayImages, fabric: Fabric, folder: Path
) -> dict[str, Build]:
    """List the arms of ``deepbregman bench``: name -> a function that makes the step."""
    plain = configure(encoder, batch_size)
    arms: dict[str, Build] = {BARE: lambda: build_bare_step(plain, fabric)}

    def add(name: str, changes: Mapping[str, Any]) -> None:
        config = configure(encoder, batch_size, changes)
        arms[name] = lambda: build_training_step(config, images, fabric, folder)

    add("SimCLR", {})
    for count in (10, 100, 1000):
        add(f"K={count}", {**DIVERGENCE, "divergence.num_subnetworks": count})
    add("K=100, all pairs", {**DIVERGENCE, "divergence.pairs": "all"})
    add("K=100, smooth", {**DIVERGENCE, "divergence.smoothing": 1.0})
    arms["views alone"] = lambda: build_views_step(plain, images, fabric)
    return arms


def build_bare_step(config: Config, fabric: Fabric) -> Step:
    """Build the reference: encoder forward, backward and optimiser on one fixed batch of views."""
    device = fabric.device
    count = config.training.batch_size * config.views.num_views
    shape = (count, 3, config.view_size, config.view_size)
    views = torch.rand(shape, device=device).contiguous(memory_format=torch.channels_last)
    trunk = build_run_encoder(config).trunk
    trunk.to(memory_format=torch.channels_last)
    trunk.to(device)
    trunk.train()
    compile_step(trunk, config, fabric)
    optimiser = build_optimiser(config.optimiser, [Group(trunk.named_parameters())], device)
    mixed = is_mixed(config, device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            features = trunk(views)
        features.float().square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def build_training_step(config: Config, images: Images, fabric: Fabric, folder: Path) -> Step:
    """Build the step exactly as the loop takes it; it makes a temporary run in the folder."""
    job = start_run(config, images, fabric, folder)
    feed = job.feed(0, 0)  # it has more epochs than are ever measured
    return lambda: job.advance(feed)


def start_run(config: Config, images: Images, fabric: Fabric, folder: Path) -> Pretraining:
    """Make a temporary run in the folder, ready to be trained."""
    labels = torch.arange(len(images)) % 10 if config.objective.needs_labels else None
    job = Pretraining(config, images, fabric, folder / secrets.token_hex(8), labels=labels)
    job.step_module.train()
    return job


def build_views_step(config: Config, images: ArrayImages, fabric: Fabric) -> Step:
    """Build the random views alone, compiled where the step is."""
    device = fabric.device
    views = build_views(config.views, config.data.image_size)
    compile_step(views, config, fabric)
    batch = images.pixels[: config.training.batch_size].to(device)
    generator = torch.Generator(device)
    return lambda: views(batch, None, views.draw(len(batch), device=device, generator=generator))
