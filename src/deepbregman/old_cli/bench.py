"""deepbregman bench: how fast a step is."""

from pathlib import Path
from typing import Literal

from .options import Accelerator, parse, screen


def command(arguments: list[str]) -> None:
    """Measure the speed of a step against the bare encoder, and against peers."""

    def options(
        scale: Literal["main", "large", "streaming", "full", "cpu", "tiny"] = "main",
        out: Path | None = None,
        only: tuple[str, ...] = (),
        accelerator: Accelerator = "auto",
    ) -> None:
        """Measure images per second, every view counted, arms taking turns, median of the turns.

        "bare encoder" is the floor: forward, backward and optimiser on one fixed batch, compiled.
        "SimCLR" and "K=..." are our whole step as training takes it: order, gather, views,
        networks, losses, optimiser. "views alone" is the transformation. "lightly SimCLR" is timed
        where lightly can be imported. "over bare" divides by the floor; "first step" includes
        compiling; "memory" is the arm's own peak.

        Args:
            scale: main: ResNet-18 and 50 at batch 512. large: batches of 1024 and 4096. streaming:
                ResNet-50 at 224 px from generated JPEG files. full: all of these. cpu: a small
                encoder, and the views beside torchvision's. tiny: a trial.
            out: Folder for bench.json and bench.png.
            only: Arms to measure beside the bare encoder, such as "K=100".
            accelerator: Where to measure; auto takes a GPU if there is one.
        """
        from deepbregman.benchmarks.bench import bench

        bench(scale=scale, out=out, only=only, accelerator=accelerator, console=screen())

    parse(options, "bench", arguments)
