"""The benchmark: every figure in one run, on this machine."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from rich.console import Console

from deepbregman.data import ArrayImages
from deepbregman.errors import UserError
from deepbregman.reporting.speed import speed_figure, speed_table
from deepbregman.runs import Record, provenance, write_json
from deepbregman.training.processes import device_name, launch

from .arms import NUM_IMAGES, bare_step, configuration, our_step, random_images, views_step
from .peers import PEER_WORKERS, has_lightly, lightly_step, torchvision_views_step
from .streaming import streaming_group
from .timing import Arm, Step, prepare, time_arms

DIVERGENCE = {"divergence.weight": 1.0, "divergence.temperature": 0.2}
"""On, by the paper's hard form on views, unless an arm says otherwise."""


FLOOR = "bare encoder"
PEER = "lightly SimCLR"
PEER_VIEWS = "torchvision views"


class Group(NamedTuple):
    """Arms that take turns: an encoder, a batch size, and which arms; all when empty."""

    encoder: str
    batch_size: int
    arms: tuple[str, ...] = ()


class Scale(NamedTuple):
    """How much to measure."""

    groups: tuple[Group, ...]
    images: int
    warmup: int
    turns: int
    steps: int
    streaming: bool = False


MAIN = (Group("resnet18", 512), Group("resnet50", 512, (FLOOR, "SimCLR", "K=100")))
LARGE = tuple(Group("resnet18", size, (FLOOR, "SimCLR", "K=100")) for size in (1024, 4096))
SCALES = {
    "main": Scale(MAIN, NUM_IMAGES, 12, 5, 40),
    "large": Scale(LARGE, NUM_IMAGES, 10, 5, 15),
    "streaming": Scale((), 0, 0, 0, 0, streaming=True),
    "full": Scale((*MAIN, *LARGE), NUM_IMAGES, 12, 5, 30, streaming=True),
    "cpu": Scale((Group("small", 256),), 2048, 2, 5, 4),
    "tiny": Scale((Group("small", 64),), 512, 1, 2, 2, streaming=True),
}


def _arms(
    group: Group, images: ArrayImages, fabric: Fabric, folder: Path
) -> dict[str, tuple[int, Callable[[], Step]]]:
    """List the arms of a group: name -> images per step, builder."""
    encoder, batch_size = group.encoder, group.batch_size

    def config(**changes: Any) -> Any:
        dotted = {name.replace("__", "."): value for name, value in changes.items()}
        return configuration(encoder, batch_size, dotted)

    off, on = config(), {name.replace(".", "__"): value for name, value in DIVERGENCE.items()}
    both = 2 * batch_size
    arms: dict[str, tuple[int, Callable[[], Step]]] = {
        FLOOR: (both, lambda: bare_step(off, fabric)),
        "SimCLR": (both, lambda: our_step(off, images, fabric, folder)),
    }
    for count in (10, 100, 1000):
        of_views = config(**on, divergence__num_subnetworks=count)
        arms[f"K={count}"] = (both, lambda c=of_views: our_step(c, images, fabric, folder))  # type: ignore[misc]  # a lambda
    all_pairs = config(**on, divergence__pairs="all")
    smooth = config(**on, divergence__smoothing=1.0)
    arms["K=100, all pairs"] = (both, lambda: our_step(all_pairs, images, fabric, folder))
    arms["K=100, smooth"] = (both, lambda: our_step(smooth, images, fabric, folder))
    arms["views alone"] = (both, lambda: views_step(off, images, fabric))
    if fabric.device.type == "cpu":
        arms[PEER_VIEWS] = (both, lambda: torchvision_views_step(off, images))
    if has_lightly():
        arms[PEER] = (both, lambda: lightly_step(off, images, fabric.device))
    return arms


def _measure(
    group: Group, settings: Scale, only: tuple[str, ...], fabric: Fabric, console: Console
) -> Record:
    """Prepare the arms of a group, then let them take turns."""
    images = random_images(max(settings.images, 2 * group.batch_size), 32)
    arms: list[Arm] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (count, build) in _arms(group, images, fabric, Path(folder)).items():
            wanted = not group.arms or name in group.arms
            if not wanted or (only and name not in (*only, FLOOR)):
                continue
            lead_in = {PEER: 3 * PEER_WORKERS, PEER_VIEWS: 6}.get(name, 0)
            arms.append(prepare(name, count, build, fabric.device, settings.warmup, lead_in))
            console.print(
                f"{group.encoder}, batch {group.batch_size}: {name} ready in "
                f"{arms[-1].first_step_seconds:.1f} s",
                highlight=False,
            )
        timings = time_arms(arms, fabric.device, settings.turns, settings.steps)
    torch._dynamo.reset()  # or the next group's graphs would keep this one's memory
    return {
        "encoder": group.encoder,
        "batch_size": group.batch_size,
        "image_size": 32,
        "arms": [timing._asdict() for timing in timings],
    }


def bench(
    *,
    scale: str = "main",
    only: tuple[str, ...] = (),
    out: Path | None = None,
    accelerator: str = "auto",
    console: Console | None = None,
) -> Record:
    """Measure the speed of a step.

    Args:
        scale: ``main`` (ResNet-18 and ResNet-50 at batch 512), ``large`` (batches of 1024 and
            4096), ``streaming`` (ResNet-50 at 224 px from a folder of generated JPEG files),
            ``full`` (all three), ``cpu`` (a small encoder), or ``tiny`` (a trial).
        only: names of arms; all when empty. The bare encoder is always measured.
        out: folder for ``bench.json`` and ``bench.png``.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        console: to draw on.

    Returns:
        The record: machine, versions, commit, and the groups with their timings.
    """
    if scale not in SCALES:
        raise UserError(f"scale {scale!r} is not one of {', '.join(SCALES)}")
    console = console or Console(quiet=True)
    fabric = launch(accelerator)
    settings = SCALES[scale]
    record: Record = {**provenance(device_name(fabric.device)), "scale": scale, "groups": []}

    def keep(measured: Record) -> None:
        """Show a group and write what there is: a later one may be cut off."""
        record["groups"].append(measured)
        console.print(speed_table(measured))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / "bench.json", record)
            speed_figure(out / "bench.png", record)

    for group in settings.groups:
        keep(_measure(group, settings, only, fabric, console))
    if settings.streaming:
        keep(streaming_group(fabric, console, tiny=scale == "tiny"))
    return record
