"""deepbregman bench: measure the speed of a training step."""

import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from deepbregman.errors import UserError, require_known
from deepbregman.files import Record, check_can_be_folder, write_json
from deepbregman.runs import collect_provenance
from deepbregman.terminal import MaybePath, say_loading

from .parameters import Accelerator, PythonOnly


class Scale(NamedTuple):
    """Extent of a benchmark: groups of encoder and batch size, images, and length."""

    groups: tuple[tuple[str, int], ...]
    images: int
    effort: tuple[int, int, int]
    """Untimed steps, turns, and steps in a turn."""


SCALES = {
    "main": Scale((("resnet18", 512), ("resnet50", 512)), 50_000, (12, 5, 40)),
    "large": Scale((("resnet18", 1024), ("resnet18", 4096)), 50_000, (10, 5, 15)),
    "cpu": Scale((("small", 256),), 2048, (2, 5, 4)),
    "tiny": Scale((("small", 16),), 64, (0, 2, 1)),
}
MAIN_ARMS = ("SimCLR", "K=100")
"""All arms are measured at the first group of main, cpu and tiny; these at the others."""


def bench(
    *,
    scale: Literal["main", "large", "cpu", "tiny"] = "main",
    only: tuple[str, ...] = (),
    out: MaybePath = None,
    accelerator: Accelerator = "auto",
    console: PythonOnly[Console | None] = None,
) -> Record:
    """Measure the speed of a training step, compared with its encoder alone.

    The unit is views per second; an image has two. Several kinds of steps, the arms, take turns,
    and the result is the median of the turns. "bare encoder" is the reference: forward pass,
    backward pass and optimiser on one fixed batch. "SimCLR" and "K=..." are whole training steps.
    "views alone" is only the random transformation. In the table, "over bare" is the ratio to the
    reference, "first step" includes compilation, and "memory" is the peak of the arm itself.

    Args:
        scale: main: ResNet-18 and 50 at batch 512. large: batches of 1024 and 4096. cpu: a small
            encoder. tiny: a test of a few seconds.
        only: Arms to measure besides the bare encoder, such as "K=100". By default all.
        out: Folder for bench.json and bench.png.
        accelerator: Device to measure; auto takes a GPU if there is one.
        console: Where to print; nothing is printed when None.

    Returns:
        The record: machine, versions, commit, and the groups with their timings.
    """
    require_known("scale", scale, SCALES)
    if out is not None:
        check_can_be_folder(out)
    console = console or Console(quiet=True)
    settings = SCALES[scale]

    with say_loading(console):
        from deepbregman import benchmarking
        from deepbregman.training.devices import device_name
        from deepbregman.training.processes import launch

    fabric = launch(accelerator)
    record: Record = {
        **collect_provenance(device_name(fabric.device)),
        "scale": scale,
        "groups": [],
    }
    for index, (encoder, batch_size) in enumerate(settings.groups):
        images = benchmarking.make_random_images(max(settings.images, 2 * batch_size), 32)
        with tempfile.TemporaryDirectory() as folder:
            arms = benchmarking.list_arms(encoder, batch_size, images, fabric, Path(folder))
            if unknown := set(only) - set(arms):
                raise UserError(f"--only {unknown.pop()!r} is not one of {'; '.join(arms)}")
            wanted = set(only or (arms if index == 0 and scale != "large" else MAIN_ARMS))
            wanted.add(benchmarking.BARE)
            chosen = {name: build for name, build in arms.items() if name in wanted}
            config = benchmarking.configure(encoder, batch_size)
            effort = benchmarking.Effort(*settings.effort)
            group = benchmarking.measure(config, chosen, effort, fabric.device, console)
        keep_group(record, group, out, console)
    return record


def keep_group(record: Record, group: Record, out: Path | None, console: Console) -> None:
    """Show a group and write what there is: a later group may be cut off."""
    from deepbregman.reporting.figures import save_speed_figure
    from deepbregman.reporting.screen import draw_speeds

    record["groups"].append(group)
    console.print(draw_speeds(group))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "bench.json", record)
        save_speed_figure(out / "bench.png", record)
