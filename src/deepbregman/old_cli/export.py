"""deepbregman export: a run's encoder for another program."""

from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from .options import parse, say


def command(arguments: list[str]) -> None:
    """Write a run's encoder for torchvision, timm, ONNX, detectron2 or safetensors."""

    def options(
        run: tyro.conf.Positional[Path],
        format: Literal["torchvision", "timm", "safetensors", "onnx", "detectron2"],
        out: Path,
    ) -> None:
        """Write a run's encoder to one file, and print the lines of Python that load it.

        torchvision: ResNets, for torchvision.models; .pth and a .json with the normalisation.

        timm: ResNets and timm:NAME, for timm.create_model; .pth and a .json.

        safetensors: any encoder, whole, for deepbregman.load_encoder without the run.

        onnx: any encoder, as a graph that needs no Python; normalisation inside, any batch size.

        detectron2: ResNet-50 and 101, for its detectors; .pth and a .json with its settings.

        Args:
            run: Folder of the run.
            format: For which program.
            out: File to write; must not exist.
        """
        from deepbregman.exporting.export import export

        written = export(run, out, format=format)
        console = Console()
        for path in written.files:
            say(console, f"wrote {path} ({path.stat().st_size:,} bytes)")
        say(console, f"\n{written.usage}".rstrip())

    parse(options, "export", arguments)
