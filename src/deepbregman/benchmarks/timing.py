"""Timing arms fairly: warmed up, taking turns, the median of the turns."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

Step = Callable[[], object]


@dataclass
class Arm:
    """Something whose steps are timed, ready to go.

    Attributes:
        name: of the arm.
        step: takes one step; may return before the device is done.
        images_per_step: images that pass the encoder in a step, every view counted.
        first_step_seconds: from nothing to the end of the first step, compiling included.
        peak_bytes: device memory above what was taken before the arm was made; 0 on a CPU.
        lead_in: steps to take untimed before every turn: an arm with loader workers must first
            use up the batches that they piled up while other arms had their turn.
    """

    name: str
    step: Step
    images_per_step: int
    first_step_seconds: float = 0.0
    peak_bytes: int = 0
    lead_in: int = 0


class Timing(NamedTuple):
    """What was measured of an arm."""

    name: str
    images_per_second: float
    milliseconds: float  # of a step, the median turn
    spread: float  # slowest over fastest turn
    first_step_seconds: float
    peak_gigabytes: float


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prepare(
    name: str,
    images_per_step: int,
    build: Callable[[], Step],
    device: torch.device,
    warmup: int,
    lead_in: int = 0,
) -> Arm:
    """Build an arm, take its first step and warm it up.

    Args:
        name: of the arm.
        images_per_step: images that pass the encoder in a step.
        build: makes the step.
        device: that it runs on.
        warmup: steps to take before any is timed.
        lead_in: steps to take untimed before every turn.
    """
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    started = time.perf_counter()
    step = build()
    step()
    wait(device)
    first = time.perf_counter() - started
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warmup):
        step()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    return Arm(name, step, images_per_step, first, peak, lead_in)


def time_arms(arms: list[Arm], device: torch.device, turns: int, steps: int) -> list[Timing]:
    """Time arms in turns, so that a slow moment of the machine hits all of them.

    Args:
        arms: prepared.
        device: that they run on.
        turns: of every arm.
        steps: in a turn.
    """
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(turns):
        for arm in arms:
            for _ in range(arm.lead_in):
                arm.step()
            wait(device)
            started = time.perf_counter()
            for _ in range(steps):
                arm.step()
            wait(device)
            seconds[arm.name].append((time.perf_counter() - started) / steps)
    timings = []
    for arm in arms:
        median = statistics.median(seconds[arm.name])
        timings.append(
            Timing(
                arm.name,
                arm.images_per_step / median,
                1e3 * median,
                max(seconds[arm.name]) / min(seconds[arm.name]),
                arm.first_step_seconds,
                arm.peak_bytes / 1e9,
            )
        )
    return timings
