"""Loading an encoder: from a run, or from a file that was exported from one."""

from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from torch import Tensor, nn

from deepbregman.config import Config, from_toml
from deepbregman.errors import UserError, first_line
from deepbregman.files import Record, check_shape, parse_json
from deepbregman.method.networks import Encoder
from deepbregman.objectives import build_run_encoder
from deepbregman.runs import Run
from deepbregman.training.checkpoints import (
    clear_vanishing,
    load_strictly,
    load_trained_encoder,
    read_tensors,
)

from .formats import VERSION

State = dict[str, Tensor]


def load_encoder(
    run: Run | Path | str, device: torch.device | str = "cpu", encoder: nn.Module | None = None
) -> Encoder:
    """Load a trained encoder: an ``nn.Module`` from images to features.

    Args:
        run: a run or its folder, or a file that :func:`export` wrote from one: ``.safetensors``, or
            ``.pth`` in torchvision's or timm's layout with the ``.json`` beside it.
        encoder: a module of the same structure, for a run whose encoder was your own; it is copied
            and the trained weights are put into the copy.

    Returns:
        In evaluation mode; takes (N, 3, H, W) images, uint8 or floats in [0, 1].
    """
    if isinstance(run, Run) or not Path(run).is_file():
        loaded = load_trained_encoder(run, device, encoder)
    else:
        loaded = read_export(Path(run)).build(device, encoder)
    loaded.register_forward_pre_hook(_refuse_other_scales)
    return loaded


def _refuse_other_scales(encoder: nn.Module, inputs: tuple[object, ...]) -> None:
    """Refuse floats that are not from 0 to 1: in 0..255, or normalised already.

    On the CPU only: of a GPU, the host would have to wait for the answer.
    """
    images = inputs[0] if inputs else None
    is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # not in its stubs
    if is_traced or torch.compiler.is_compiling() or not isinstance(images, Tensor):
        return
    if images.device.type != "cpu" or not images.is_floating_point() or not images.numel():
        return
    low, high = (float(value) for value in images.detach().aminmax())
    if low < -1.0 or high > 2.0:  # resizing may go somewhat beyond 0 and 1
        raise ValueError(
            f"images from {low:.3g} to {high:.3g}: give uint8 in 0..255, or floating point in "
            "[0, 1]; the encoder normalises them itself"
        )


class Export(NamedTuple):
    """The content of a file that was exported from a run."""

    path: Path
    config: Config
    """The run's."""
    state: State

    def build(self, device: torch.device | str, encoder: nn.Module | None = None) -> Encoder:
        """Build the encoder; see :func:`load_encoder`."""
        loaded = build_run_encoder(self.config, trunk=encoder)
        load_strictly(loaded, self.state, str(self.path))
        clear_vanishing(loaded)
        loaded.to(memory_format=torch.channels_last)
        return loaded.to(device).eval()


def read_export(path: Path) -> Export:
    """Read a file that :func:`export` wrote; see :func:`load_encoder` for the formats."""
    readers = {".safetensors": _read_safetensors, ".pth": _read_state_dict}
    if path.suffix not in readers:
        raise UserError(
            f"{path} is a file, but neither .safetensors nor .pth: name a run's folder, or a file "
            "that `deepbregman export` wrote in one of these formats"
        )
    state, record = readers[path.suffix](path)
    if record.get("version") != VERSION or not isinstance(record.get("config"), str):
        raise UserError(
            f"{path} has export version {record.get('version')}, this version reads {VERSION}: "
            "export it again from its run"
        )
    return Export(path, from_toml(record["config"], str(path)), state)


def _read_safetensors(path: Path) -> tuple[State, Record]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file that can be read: {error}") from None
    if "deepbregman" not in metadata:
        raise UserError(
            f"{path} was not written by `deepbregman export`: it does not describe its encoder"
        )
    return state, _parse_record(metadata["deepbregman"], path)


def _read_state_dict(path: Path) -> tuple[State, Record]:
    sidecar = path.with_name(f"{path.name}.json")
    if not sidecar.is_file():
        raise UserError(
            f"{sidecar} does not exist: it describes the encoder of {path}; put back "
            "the file that `deepbregman export` wrote beside them"
        )
    record = _parse_record(sidecar.read_text(encoding="utf-8", errors="replace"), sidecar)
    if record.get("format") not in ("torchvision", "timm"):
        raise UserError(
            f"{path} has the layout of {record.get('format')}, which only that program reads: load "
            "the run, or an export to torchvision, timm or safetensors"
        )
    try:
        trunk = read_tensors(path.read_bytes())
        if not all(isinstance(tensor, Tensor) for tensor in trunk.values()):
            raise ValueError("it holds something else than tensors")
        state = {f"trunk.{name}": tensor for name, tensor in trunk.items()}
        state["mean"] = torch.tensor(record["mean"]).view(1, -1, 1, 1)
        state["deviation"] = torch.tensor(record["std"]).view(1, -1, 1, 1)
    except Exception as why:  # torch's reader fails in a dozen ways on bytes it did not write
        raise UserError(
            f"{path} and {sidecar} cannot be read ({first_line(why)}): they are damaged; export "
            "them again"
        ) from None
    return state, record


def _parse_record(text: str, origin: Path) -> Record:
    try:
        record: Record = parse_json(text)
        check_shape(record, {})
    except ValueError as error:
        raise UserError(f"{origin} cannot be used ({error}): export it again") from None
    return record
