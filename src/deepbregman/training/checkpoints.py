"""Checkpoints: written whole, checked to the byte, read without executing anything.

A file is a line of text and then what ``torch.save`` wrote. The line ends with the SHA-256 of all
that surrounds it, so that a byte that is wrong or missing anywhere is found before use::

    deepbregman checkpoint 2 sha256 <64 digits>

Format 1 was ``torch.save`` alone; it is still read, by the CRC-32 of its parts.
"""

import hashlib
import io
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import Config
from deepbregman.errors import UserError
from deepbregman.method.model import Model
from deepbregman.runs import Run, replacing

from .assembly import build_model
from .tensor_files import check_parts, read_tensors

FORMAT = 2
_HEADER = re.compile(rb"(deepbregman checkpoint (\d+) sha256 )([0-9a-f]{64})\n")
State = dict[str, Any]


class DamagedCheckpoint(UserError):
    """A checkpoint that is not what was written; an older one may do in its place."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is not a checkpoint that can be read ({reason}): it is damaged or comes from "
            "another program; use another checkpoint of the run, or train it again"
        )
        self.reason = reason


def save(path: Path, state: State, keep: Path | None = None) -> None:
    """Write a checkpoint so that ``path`` always holds a complete one.

    Args:
        path: to write.
        state: to save.
        keep: where to keep the checkpoint that ``path`` held before.
    """
    buffer = io.BytesIO()  # so that a full disk is an OSError here, not an abort inside torch
    torch.save({"format": FORMAT, **state}, buffer)
    title = f"deepbregman checkpoint {FORMAT} sha256 ".encode()
    with replacing(path, keep) as file:
        file.write(title + _digest(title, buffer.getbuffer()) + b"\n")
        file.write(buffer.getbuffer())


def _digest(title: bytes, content: memoryview) -> bytes:
    digest = hashlib.sha256(title)
    digest.update(content)
    return digest.hexdigest().encode()


def load(path: Path, device: torch.device | str = "cpu") -> State:
    """Read a checkpoint; nothing in it is executed."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: the run has no checkpoint yet, and is to finish an epoch or "
            "be continued with --resume; or it is a study's, which deletes those of judged runs "
            "unless it is begun with --keep-checkpoints"
        )
    content = memoryview(path.read_bytes())
    header = _HEADER.match(content)
    if header is None:
        return _load_format_1(path, content, device)
    content = content[header.end() :]
    if _digest(header[1], content) != header[3]:
        raise DamagedCheckpoint(path, "its SHA-256 is not the one it was written with")
    if int(header[2]) != FORMAT:
        raise _other_format(path, int(header[2]))
    return _read(path, content, device)


def _read(path: Path, content: memoryview, device: torch.device | str) -> State:
    try:
        state: State = read_tensors(content, device)
        state["format"]  # another program's need not be a dictionary
    except Exception as why:  # torch's reader fails in a dozen ways on bytes it did not write
        reason = str(why).splitlines()[0] if str(why) else type(why).__name__
        raise DamagedCheckpoint(path, reason) from None
    return state


def _load_format_1(path: Path, content: memoryview, device: torch.device | str) -> State:
    """Read a checkpoint of the first version, which had no checksum, as one of today.

    Its archive is written anew from parts whose CRC-32 is right: torch looks neither at those nor
    at the rest of a directory that is wrong.
    """
    sound = io.BytesIO()
    if bytes(content[:2]) != b"PK":
        raise DamagedCheckpoint(path, "it begins as no checkpoint does")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(sound, "w") as new:
            check_parts(old, len(content))
            for part in old.namelist():
                new.writestr(part, old.read(part))
    except Exception as why:  # as below: of any kind, on bytes that are no archive
        raise DamagedCheckpoint(path, str(why) or type(why).__name__) from None
    state = _read(path, sound.getbuffer(), device)
    if state["format"] == FORMAT:
        raise DamagedCheckpoint(path, "its first line is missing")
    if type(state["format"]) is not int or state["format"] != 1:
        raise _other_format(path, state["format"])
    return {**state, "format": FORMAT, "skipped": 0, "skipped_in_epoch": 0}


def _other_format(path: Path, number: Any) -> UserError:
    return UserError(
        f"{path} has checkpoint format {number}, this version reads 1 and {FORMAT}: use the "
        "version of deepbregman that wrote it"
    )


def require(state: State, parts: Iterable[str], origin: str) -> None:
    """Refuse a checkpoint that lacks a part."""
    missing = [part for part in parts if part not in state]
    if missing:
        raise UserError(
            f"{origin} has no {', '.join(missing)}: it was not written by `deepbregman pretrain`; "
            "use another checkpoint of the run, or train it again"
        )


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor, None of anything else."""
    return tuple(value.shape) if isinstance(value, Tensor) else None


def load_strictly(module: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """Load a state that must fit in every name and shape.

    Args:
        module: to load into.
        state: name -> tensor.
        origin: what the state came from, for the error.
    """
    expected = module.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is not expected" for name in state if name not in expected]
    problems += [
        f"{name} has shape {shape}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and (shape := _shape(state[name])) != tuple(tensor.shape)
    ]
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" * (len(problems) > 4))
        raise UserError(
            f"{origin} does not fit the configuration beside it: {shown}; use the config.toml, and "
            "the encoder if it is your own, that the checkpoint was trained with"
        )
    module.load_state_dict(state)


def alternatives(run: Run) -> str:
    """Say which other checkpoints a run has, for when its last one is damaged."""
    words = []
    if run.previous_checkpoint.is_file():
        words.append(f"deepbregman pretrain --resume {run.path} goes on from previous.pt")
    kept = sorted(path.name for path in run.checkpoints.glob("epoch-*.pt"))
    if kept:
        words.append(f"of {', '.join(kept)} one can be copied to {run.last_checkpoint}")
    return "; ".join(words) or "this run has no other"


def fingerprint(module: nn.Module) -> str:
    """Return a digest of every tensor of a module, to tell one from another."""
    digest = hashlib.sha256()
    tensors: dict[str, Tensor] = module.state_dict()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class Trained(NamedTuple):
    """The networks of a run and how far they are trained."""

    model: Model
    config: Config
    epoch: float


def load_model(
    run: Run | Path | str, device: torch.device | str = "cpu", encoder: nn.Module | None = None
) -> tuple[Model, Config]:
    """Load the networks of a run from its last checkpoint, in evaluation mode."""
    return load_trained(run, device, encoder)[:2]


def load_trained(
    run: Run | Path | str, device: torch.device | str = "cpu", encoder: nn.Module | None = None
) -> Trained:
    """Load the networks of a run, in evaluation mode, with the epoch they were saved at.

    Args:
        run: a run, or its folder.
        device: where to put them.
        encoder: a module of the same structure, for a run whose encoder was the user's own; it is
            copied.
    """
    run = run if isinstance(run, Run) else Run.open(Path(run))
    config = run.config
    model = build_model(config, trunk=encoder)
    try:
        saved = load(run.last_checkpoint)
    except DamagedCheckpoint as error:  # never judge another one instead
        raise UserError(f"{error}; {alternatives(run)}") from None
    require(saved, ("model", "epoch"), str(run.last_checkpoint))
    load_strictly(model, saved["model"], str(run.last_checkpoint))
    model.to(memory_format=torch.channels_last)
    return Trained(model.to(device).eval(), config, float(saved["epoch"]))
