"""Exporting: from a run to one file that another program loads."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
from torch import nn

from deepbregman.config import to_toml
from deepbregman.errors import UserError, nearest
from deepbregman.runs import Run, replacing, write_json
from deepbregman.training.checkpoints import load_trained

from .detectron2 import to_detectron2
from .onnx_graph import to_onnx
from .state_dicts import to_timm, to_torchvision
from .subject import VERSION, Content, Subject, detached, pixel_statistics


class Exported(NamedTuple):
    """What was written, and how it is used."""

    files: tuple[Path, ...]
    usage: str


class Format(NamedTuple):
    """A format: how a file of it is named, made, and what must be installed for that."""

    suffix: str
    make: Callable[[Subject], Content]
    needs: tuple[str, ...] = ()


def to_safetensors(subject: Subject) -> Content:
    """Write the whole encoder, its configuration beside the tensors, for this library."""
    metadata = {"format": "pt", "deepbregman": json.dumps(subject.record)}
    data = safetensors.torch.save(detached(subject.encoder.state_dict()), metadata)
    own = ", encoder=module" if subject.config.encoder.name == "custom" else ""
    usage = (
        "from deepbregman import load_encoder\n"
        f'encoder = load_encoder("FILE"{own})  # needs no run; the normalisation is inside\n'
    )
    return Content(data, usage)


FORMATS = {
    "torchvision": Format(".pth", to_torchvision),
    "timm": Format(".pth", to_timm),
    "safetensors": Format(".safetensors", to_safetensors),
    "onnx": Format(".onnx", to_onnx, ("onnx", "onnxruntime", "onnxscript")),
    "detectron2": Format(".pth", to_detectron2),
}


def sidecar_of(path: Path) -> Path:
    """Name the file beside an exported one that says what the weights are."""
    return path.with_name(f"{path.name}.json")


def export(
    run: Run | Path | str, out: Path | str, *, format: str, encoder: nn.Module | None = None
) -> Exported:
    """Write the encoder of a run for another program.

    Args:
        run: a run, or its folder.
        out: file to write; neither it nor the ``.json`` beside it may exist.
        format: ``torchvision``, ``timm``, ``safetensors``, ``onnx`` or ``detectron2``.
        encoder: a module of the same structure, for a run whose encoder was your own.

    Returns:
        The files, and the lines of Python that load them.
    """
    if format not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"format {format!r} is not one of {known}{nearest(format, FORMATS)}")
    chosen, out = FORMATS[format], Path(out)
    _check(out, format, chosen)
    run = run if isinstance(run, Run) else Run.open(Path(run))
    model, config, epoch = load_trained(run, encoder=encoder)
    mean, deviation = pixel_statistics(model.encoder)
    trunk = model.encoder.trunk
    name = config.encoder.name
    record = {
        "format": format,
        "version": VERSION,
        "architecture": type(trunk).__name__ if name == "custom" else name,
        "num_features": model.encoder.num_features,
        "image_size": config.data.image_size,
        "pixels": "RGB in [0, 1], (x - mean) / std",
        "mean": mean,
        "std": deviation,
        "epoch": epoch,
        "config": to_toml(config),
        "provenance": run.provenance(),
    }
    content = chosen.make(Subject(model.encoder, config, record))
    files = _write(out, content)
    return Exported(files, content.usage.replace("FILE", str(out)))


def _check(out: Path, format_name: str, chosen: Format) -> None:
    """Refuse what cannot end well before anything is loaded."""
    if out.suffix != chosen.suffix:
        raise UserError(
            f"--out {out}: {format_name} is written as {chosen.suffix}; name a file that ends so"
        )
    for path in (out, sidecar_of(out)):
        if path.exists():
            raise UserError(f"--out {out}: {path} exists; name another file, or remove it")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    missing = [name for name in chosen.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format {format_name} needs {', '.join(missing)}: pip install "
            f"'deepbregman[{format_name}]'"
        )


def _write(out: Path, content: Content) -> tuple[Path, ...]:
    """Write the file and, first, what belongs beside it; both or neither."""
    if content.sidecar is None:
        with replacing(out) as file:
            file.write(content.data)
        return (out,)
    sidecar = sidecar_of(out)
    write_json(sidecar, content.sidecar)
    try:
        with replacing(out) as file:
            file.write(content.data)
    except BaseException:
        sidecar.unlink(missing_ok=True)
        raise
    return out, sidecar
