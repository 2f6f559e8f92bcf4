"""Checkpoints: written whole, read without executing anything, loaded strictly."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import Config, from_toml
from deepbregman.errors import UserError
from deepbregman.method.model import Model
from deepbregman.runs import Run, replacing

from .assembly import build_model

FORMAT = 1
PARTS = (
    *("model", "loss", "optimiser", "step", "epoch", "num_images", "config"),
    *("sums", "seconds", "random", "random_cuda"),
)
"""What a checkpoint must have for a run to go on from it."""
State = dict[str, Any]


def save(path: Path, state: State) -> None:
    """Write a checkpoint so that ``path`` always holds a complete one."""
    buffer = io.BytesIO()  # so that a full disk is an OSError here, not an abort inside torch
    torch.save({"format": FORMAT, **state}, buffer)
    with replacing(path) as file:
        file.write(buffer.getbuffer())


def load(path: Path, device: torch.device | str = "cpu") -> State:
    """Read a checkpoint; nothing in it is executed."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: the run has no checkpoint yet; let it finish an epoch, or "
            "continue it with --resume"
        )
    content = io.BytesIO(path.read_bytes())
    try:
        state: State = torch.load(content, map_location=device, weights_only=True)
        number = state["format"]
    except Exception as why:  # torch's reader fails in a dozen ways on bytes it did not write
        reason = str(why).splitlines()[0] if str(why) else type(why).__name__
        raise UserError(
            f"{path} is not a checkpoint that can be read ({reason}): it is damaged or comes from "
            "another program; use another checkpoint of the run, or train it again"
        ) from None
    if type(number) is not int or number != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {number}, this version reads {FORMAT}: use the version "
            "of deepbregman that wrote it"
        )
    return state


def require(state: State, parts: Iterable[str], origin: str) -> None:
    """Refuse a checkpoint that lacks a part."""
    missing = [part for part in parts if part not in state]
    if missing:
        raise UserError(
            f"{origin} has no {', '.join(missing)}: it was not written by `deepbregman pretrain`; "
            "use another checkpoint of the run, or train it again"
        )


def check_resumable(state: State, config: Config, num_images: int, origin: str) -> None:
    """Refuse to go on with other images or another configuration than before.

    Args:
        state: of the checkpoint.
        config: that the run folder holds now.
        num_images: there are to pretrain on now.
        origin: the checkpoint's file.
    """
    require(state, PARTS, origin)
    if state["num_images"] != num_images:
        raise UserError(
            f"{origin} was trained on {state['num_images']} images, {config.data.source} now has "
            f"{num_images} to pretrain on: a run goes on with the same images only; put them back, "
            "or start a new run"
        )
    if from_toml(state["config"], origin) != config:
        raise UserError(
            f"the config.toml beside {origin} was changed since: a run goes on as it began; put it "
            "back, or start a new run from the changed file"
        )


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
        f"{name} has shape {tuple(state[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" * (len(problems) > 4))
        raise UserError(
            f"{origin} does not fit the configuration beside it: {shown}; use the config.toml, and "
            "the encoder if it is your own, that the checkpoint was trained with"
        )
    module.load_state_dict(state)


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
    saved = load(run.last_checkpoint)
    require(saved, ("model", "epoch"), str(run.last_checkpoint))
    load_strictly(model, saved["model"], str(run.last_checkpoint))
    model.to(memory_format=torch.channels_last)
    return Trained(model.to(device).eval(), config, float(saved["epoch"]))
