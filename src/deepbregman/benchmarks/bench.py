"""The benchmark: every figure in one run, on this machine."""

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
from .peers import PEER_WORKERS, has_lightly, lightly_step
from .streaming import streaming_group
from .timing import Arm, Step, prepare, time_arms

DIVERGENCE = {"divergence.weight": 1.0, "divergence.temperature": 0.2}
"""On, by the paper's hard form on views, unless an arm says otherwise."""


PEER = "lightly SimCLR"


class Scale(NamedTuple):
    """How much to measure."""

    groups: tuple[tuple[str, int], ...]  # encoder and batch size
    images: int
    warmup: int
    turns: int
    steps: int


SCALES = {
    "full": Scale(
        (
            *(("resnet18", 512), ("resnet18", 1024), ("resnet18", 4096)),
            *(("resnet50", 512), ("resnet50", 1024)),
        ),
        NUM_IMAGES,
        12,
        5,
        30,
    ),
    "main": Scale((("resnet18", 512), ("resnet50", 512)), NUM_IMAGES, 12, 5, 40),
    "tiny": Scale((("small", 64),), 512, 1, 2, 2),
}


def _arms(
    encoder: str, batch_size: int, images: ArrayImages, fabric: Fabric, peers: bool
) -> dict[str, tuple[int, Callable[[], Step]]]:
    """List the arms of a group: name -> images per step, builder."""

    def config(**changes: Any) -> Any:
        dotted = {name.replace("__", "."): value for name, value in changes.items()}
        return configuration(encoder, batch_size, dotted)

    off, on = config(), {name.replace(".", "__"): value for name, value in DIVERGENCE.items()}
    both = 2 * batch_size
    arms: dict[str, tuple[int, Callable[[], Step]]] = {
        "bare encoder": (both, lambda: bare_step(off, fabric)),
        "SimCLR": (both, lambda: our_step(off, images, fabric)),
    }
    for count in (10, 100, 1000):
        of_views = config(**on, divergence__num_subnetworks=count)
        arms[f"K={count}"] = (both, lambda c=of_views: our_step(c, images, fabric))  # type: ignore[misc]
    all_pairs = config(**on, divergence__pairs="all")
    smooth = config(**on, divergence__smoothing=1.0)
    arms["K=100, all pairs"] = (both, lambda: our_step(all_pairs, images, fabric))
    arms["K=100, smooth"] = (both, lambda: our_step(smooth, images, fabric))
    arms["views alone"] = (both, lambda: views_step(off, images, fabric))
    if peers and has_lightly():
        arms[PEER] = (both, lambda: lightly_step(off, images, fabric.device))
    return arms


def bench(
    *,
    scale: str = "main",
    only: tuple[str, ...] = (),
    out: Path | None = None,
    streaming: bool = False,
    accelerator: str = "auto",
    console: Console | None = None,
) -> Record:
    """Measure the speed of a step.

    Args:
        scale: ``full``, ``main`` (ResNet-18 and ResNet-50 at batch 512), or ``tiny``.
        only: names of arms; all when empty. The bare encoder is always measured.
        out: folder for ``bench.json`` and ``bench.png``.
        streaming: also measure ResNet-50 at 224 px from a folder of generated JPEG files.
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
    groups: list[Record] = []
    for encoder, batch_size in settings.groups:
        images = random_images(max(settings.images, 2 * batch_size), 32)
        peers = batch_size == 512 and encoder == "resnet18"
        arms: list[Arm] = []
        for name, (count, build) in _arms(encoder, batch_size, images, fabric, peers).items():
            if only and name not in (*only, "bare encoder"):
                continue
            lead_in = 3 * PEER_WORKERS if name == PEER else 0
            arms.append(prepare(name, count, build, fabric.device, settings.warmup, lead_in))
            console.print(
                f"{encoder}, batch {batch_size}: {name} ready in "
                f"{arms[-1].first_step_seconds:.1f} s",
                highlight=False,
            )
        timings = time_arms(arms, fabric.device, settings.turns, settings.steps)
        groups.append(
            {
                "encoder": encoder,
                "batch_size": batch_size,
                "image_size": 32,
                "arms": [timing._asdict() for timing in timings],
            }
        )
        console.print(speed_table(groups[-1]))
        del arms
        torch._dynamo.reset()
    if streaming:
        groups.append(streaming_group(fabric, console, tiny=scale == "tiny"))
        console.print(speed_table(groups[-1]))
    record = {**provenance(device_name(fabric.device)), "scale": scale, "groups": groups}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "bench.json", record)
        speed_figure(out / "bench.png", record)
    return record
