"""deepbregman export: a run's encoder for another program."""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import tyro
from rich.console import Console

from deepbregman.config.sections import STAGED
from deepbregman.errors import UserError, require_known
from deepbregman.files import create_file
from deepbregman.runs import Run, check_new_file
from deepbregman.terminal import count_words, say

from .parameters import PythonOnly, RunFolder

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.exporting.formats import Content

RESNETS = tuple(name for name in STAGED if name.startswith("resnet"))


class Format(NamedTuple):
    """What can be known of a format before torch is loaded."""

    suffix: str
    needs: tuple[str, ...] = ()  # packages
    encoders: tuple[str, ...] = ()
    """Names that it holds, or beginnings of names that end in a colon; none: all."""


FORMATS = {
    "torchvision": Format(".pth", encoders=RESNETS),
    "timm": Format(".pth", encoders=(*RESNETS, "timm:")),
    "safetensors": Format(".safetensors"),
    "onnx": Format(".onnx", ("onnx", "onnxruntime", "onnxscript")),
    "detectron2": Format(".pth", encoders=("resnet50", "resnet101")),
}


class Exported(NamedTuple):
    """The files that were written, and the lines of Python that load them."""

    files: tuple[Path, ...]
    usage: str
    epoch: float
    """Epoch at which the encoder was saved."""
    epochs: int
    """Epochs of its pretraining, as configured."""


def export(
    run: tyro.conf.Positional[RunFolder],
    out: Path,
    *,
    format: Literal["torchvision", "timm", "safetensors", "onnx", "detectron2"],
    encoder: PythonOnly["nn.Module | None"] = None,
) -> Exported:
    """Write a run's encoder for torchvision, timm, ONNX, detectron2 or safetensors.

    The command prints the lines of Python that load the file.

    torchvision: ResNets for torchvision.models; a .pth file, and a .json file with the
    normalisation.

    timm: ResNets and timm:NAME for timm.create_model; a .pth file and a .json file.

    safetensors: any encoder, complete, for deepbregman.load_encoder without the run.

    onnx: any encoder, as a graph with the normalisation inside, for any batch size.

    detectron2: ResNet-50 and 101 for its detectors; a .pth file, and a .json file with settings.

    Args:
        run: Folder of a run, as `deepbregman pretrain` writes it.
        out: File to write. Neither it nor the .json file beside it may exist.
        format: Program that will load the file.
        encoder: If the run trained an encoder of your own: a module of the same structure.
    """
    out = Path(out)
    sidecar = out.with_name(f"{out.name}.json")
    _check_output(out, sidecar, format)
    run = Run.open(run)
    _check_encoder(run.config.encoder.name, format)

    from deepbregman.exporting.formats import MAKERS, load_to_export

    source = load_to_export(run, format, encoder)
    content = MAKERS[format](source)
    files = _write(out, sidecar, content)
    epochs = source.config.training.epochs
    return Exported(files, content.usage.replace("FILE", str(out)), source.record["epoch"], epochs)


def show(exported: Exported, console: Console) -> None:
    """Name the files and print the lines that load them."""
    for path in exported.files:
        say(console, f"wrote {path} ({path.stat().st_size:,} bytes)")
    if exported.epoch < exported.epochs:
        words = f"after {exported.epoch:.4g} of {count_words(exported.epochs, 'epoch')}"
        say(console, f"warning: this run is not finished; its encoder was exported {words}")
    say(console, f"\n{exported.usage}".rstrip())


def _check_output(out: Path, sidecar: Path, format: str) -> None:
    """Refuse what cannot succeed before anything is loaded."""
    require_known("format", format, FORMATS)
    check_new_file(out, FORMATS[format].suffix)
    check_new_file(sidecar, ".json")
    missing = [
        package for package in FORMATS[format].needs if importlib.util.find_spec(package) is None
    ]
    if missing:
        raise UserError(
            f"--format {format} needs {', '.join(missing)}: pip install 'deepbregman[{format}]'"
        )


def _check_encoder(name: str, format: str) -> None:
    """Refuse an encoder that a format cannot hold."""

    def holds(names: tuple[str, ...]) -> bool:
        return not names or "".join(name.partition(":")[:2]) in names

    names = FORMATS[format].encoders
    if not holds(names):
        listed = ", ".join(f"{known}NAME" if known.endswith(":") else known for known in names)
        *others, last = [other for other in FORMATS if holds(FORMATS[other].encoders)]
        raise UserError(
            f"--format {format} holds {listed}, and this run's encoder is {name}: export it as "
            f"{', '.join(others)} or {last}"
        )


def _write(out: Path, sidecar: Path, content: "Content") -> tuple[Path, ...]:
    """Write the sidecar, if there is one, and then the file; both or neither."""
    if content.sidecar is None:
        with create_file(out) as file:
            file.write(content.data)
        return (out,)
    with create_file(sidecar) as file:
        file.write(json.dumps(content.sidecar, indent=2).encode())
    try:
        with create_file(out) as file:
            file.write(content.data)
    except BaseException:
        sidecar.unlink(missing_ok=True)
        raise
    return out, sidecar
