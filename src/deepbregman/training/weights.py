"""The weights that an encoder starts from: ``encoder.weights``.

They come from torchvision, from timm, from another run, or from a file. Only the trunk and the
normalisation of pixels that belongs to it are taken; the projection and all other heads are new.
Nothing in a file is executed.
"""

import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from deepbregman.config import Config
from deepbregman.errors import UserError, first_line
from deepbregman.files import parse_json
from deepbregman.method.networks import TIMM, Encoder, create_timm
from deepbregman.runs import Record, Run, is_run

from . import checkpoints

RANDOM, AUTO, TORCHVISION = "random", "auto", "torchvision:"
HEADS = ("fc.", "head.", "head_dist.", "head_drop.", "classifier.", "last_linear.")
"""Prefixes of a classifier's tensors: a pretrained file may have them, a trunk does not."""
WRAPPERS = ("state_dict", "model")
"""Entries under which other programs keep the weights."""
PIXELS = ("mean", "deviation")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class StartingWeights:
    """Tensors of a trunk by name, and where they come from."""

    trunk: Weights
    origin: str
    """Their origin, for messages."""
    record: Record
    """Their origin, for the provenance."""
    pixels: tuple[Tensor, Tensor] | None = None
    """Mean and deviation (3,) of the pixels that the trunk was trained with, where known."""

    def put_into(self, encoder: Encoder) -> None:
        """Put the weights into an encoder of the same structure; refuse one of another."""
        trunk = encoder.trunk
        expected = trunk.state_dict()
        found = self._find_part(expected)
        heads = {n for n in found if n not in expected and n.startswith(HEADS)}
        state = {name: tensor for name, tensor in found.items() if name not in heads}
        counters = {n: t for n, t in expected.items() if n.endswith("num_batches_tracked")}
        state = {name: t for name, t in counters.items() if name not in state} | state
        problems = checkpoints.list_misfits(expected, state)
        if problems:
            raise UserError(
                f"encoder.weights: {self.origin} does not fit the encoder: "
                f"{checkpoints.join_misfits(problems)}; {_suggest_fix(problems)}"
            )
        trunk.load_state_dict(state)
        checkpoints.clear_vanishing(trunk)
        if self.pixels is not None:
            for name, values in zip(PIXELS, self.pixels, strict=True):
                getattr(encoder, name).copy_(values.view(1, -1, 1, 1))

    def _find_part(self, expected: Weights) -> Weights:
        """Return the tensors of the trunk: all, or those behind the one prefix that has them all.

        Files of other programs hold a whole method, with names such as ``backbone.conv1.weight``.
        """
        names = [name for name in expected if not name.endswith("num_batches_tracked")]
        if not names or names[0] in self.trunk:
            return self.trunk
        starts = [n.removesuffix(names[0]) for n in self.trunk if n.endswith(f".{names[0]}")]
        prefixes = [start for start in starts if all(start + n in self.trunk for n in names)]
        if len(prefixes) > 1:
            raise UserError(
                f"encoder.weights: {self.origin} holds {len(prefixes)} encoders: choose one by "
                f"--encoder.weights {self.origin}:NAME, where NAME is "
                f"{' or '.join(prefix[:-1] for prefix in prefixes)}"
            )
        return checkpoints.select_part(self.trunk, prefixes[0]) if prefixes else self.trunk

    def describe(self, config: Config) -> str:
        """Return the origin, and what it does not say about the pixels."""
        if self.pixels is not None or not config.encoder.normalise_pixels:
            return self.origin
        return (
            f"{self.origin} (no {Path(self.origin).name}.json says how its pixels were normalised: "
            "the mean and deviation of these images are used)"
        )


def _suggest_fix(problems: list[str]) -> str:
    for side, stem in ((7, "standard"), (3, "thumbnail")):
        if problems[0].startswith(f"conv1.weight has shape (64, 3, {side}, {side})"):
            return f"set --encoder.stem {stem}, which these weights were trained with"
    return "name the encoder that these weights belong to with --encoder.name"


def find_weights(config: Config) -> StartingWeights | None:
    """Find the weights that a configuration starts from; None if they are random."""
    name, wanted = config.encoder.name, config.encoder.weights
    if are_fetched(config):
        if wanted.startswith(TORCHVISION):
            return _download(wanted, name, lambda: _fetch_torchvision(name, wanted))
        return _download(wanted, name, lambda: _fetch_timm(name.removeprefix(TIMM), config))
    return None if wanted in (RANDOM, AUTO) else _read_path(Path(wanted))


def are_fetched(config: Config) -> bool:
    """Whether a library fetches the weights by their name, from its cache or the network."""
    name, wanted = config.encoder.name, config.encoder.weights
    tagged = name.startswith(TIMM) and "." in name
    return wanted == "timm" or wanted.startswith(TORCHVISION) or (wanted == AUTO and tagged)


def describe_encoder(wanted: str) -> dict[str, Any]:
    """Return the fields of the encoder that a run was trained with; nothing of other weights."""
    if not is_run(Path(wanted)):
        return {}
    settings = Run.open(wanted).config.encoder
    return {"encoder.name": settings.name, "encoder.stem": settings.stem}


def _download(wanted: str, name: str, fetch: Callable[[], StartingWeights]) -> StartingWeights:
    """Fetch weights by their name; without a network, say what else can be done."""
    try:
        return fetch()
    except UserError:
        raise
    except Exception as error:  # network, hub or cache: each library has its own errors
        raise UserError(
            f"encoder.weights is {wanted!r}: the weights of {name} cannot be downloaded "
            f"({first_line(error)}); connect to the network for the first run, copy the cache of a "
            "machine that has them (TORCH_HOME of torchvision, HF_HOME of timm), name a file with "
            "--encoder.weights FILE, or train from --encoder.weights random"
        ) from None


def _fetch_timm(name: str, config: Config) -> StartingWeights:
    import timm

    try:
        known = timm.get_pretrained_cfg(name)
    except RuntimeError:  # a tag that it does not know
        known = None
    if known is None or not known.has_weights:
        tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
        raise UserError(
            f"encoder.weights: timm {timm.__version__} has no weights of {name}"
            + (f"; it has {', '.join(tags[:4])}" if tags else "; train from random ones")
        )
    model, _ = create_timm(name, config.data.image_size, pretrained=True)
    pixels = torch.tensor(known.mean), torch.tensor(known.std)
    full = f"{name.partition('.')[0]}.{known.tag}" if known.tag else name
    record = {"from": f"timm:{full}", "timm": timm.__version__}
    return StartingWeights(model.state_dict(), f"timm's {full}", record, pixels)


def _fetch_torchvision(name: str, wanted: str) -> StartingWeights:
    import torchvision  # takes seconds to load

    known = torchvision.models.get_model_weights(name)
    tag = wanted.removeprefix(TORCHVISION)
    if tag not in known.__members__:
        raise UserError(
            f"encoder.weights is {wanted!r}: torchvision has {', '.join(known.__members__)} of "
            f"{name}"
        )
    chosen = known[tag]
    state = chosen.get_state_dict(progress=False, check_hash=True, weights_only=True)
    preset = chosen.transforms()
    pixels = torch.tensor(preset.mean), torch.tensor(preset.std)
    record = {"from": f"{TORCHVISION}{name}.{chosen.name}", "address": chosen.url}
    return StartingWeights(state, f"torchvision's {chosen.name} of {name}", record, pixels)


def _read_path(path: Path) -> StartingWeights:
    if is_run(path):
        return _read_checkpoint(Run.open(path).last_checkpoint)
    if not path.is_file():
        whole, colon, part = str(path).rpartition(":")
        if colon and Path(whole).is_file():
            return _select_network(_read_path(Path(whole)), part)
        raise UserError(
            f"encoder.weights is {str(path)!r}: no run and no file is there; give random, auto, "
            "torchvision:NAME such as torchvision:DEFAULT, timm, the folder of a run, or a file "
            "(.safetensors, .pth, .pt)"
        )
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    with path.open("rb") as file:
        is_checkpoint = file.read(24).startswith(b"deepbregman checkpoint ")
    return _read_checkpoint(path) if is_checkpoint else _read_torch_file(path)


COLOUR_PIXELS = (torch.full((3,), 0.5), torch.full((3,), 0.25))
"""Mean and deviation by which the two networks of a :class:`ColourTrunk` get their pixels."""


def _select_network(whole: StartingWeights, part: str) -> StartingWeights:
    """Keep tensors with this part in their names; a file may hold a student and a teacher."""
    trunk = {name: t for name, t in whole.trunk.items() if f".{part}." in f".{name}"}
    if not trunk:
        names = dict.fromkeys(name.partition(".")[0] for name in whole.trunk)
        raise UserError(
            f"encoder.weights: {whole.origin} holds no {part}, but {', '.join(names)}: name one of "
            f"these, or give {whole.origin} alone"
        )
    pixels = whole.pixels
    if any(name.startswith(("bright.", "colour.")) for name in whole.trunk):
        pixels = COLOUR_PIXELS  # the whole takes pixels as they are, and scales them for its parts
    return replace(whole, trunk=trunk, record={"from": f"{whole.origin}:{part}"}, pixels=pixels)


def _read_checkpoint(path: Path) -> StartingWeights:
    saved = checkpoints.load(path)
    checkpoints.require(saved, ("objective",), str(path))
    state = checkpoints.select_part(saved["objective"], "encoder.")
    record = {"from": str(path), "epoch": saved.get("epoch")}
    return _take_trunk(state, str(path), record)


def _read_safetensors(path: Path) -> StartingWeights:
    with _explain_damage(path), safetensors.safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    return _take_file(state, path)


def _read_torch_file(path: Path) -> StartingWeights:
    with _explain_damage(path):
        try:
            with torch.serialization.safe_globals([Namespace]):  # DINO keeps its arguments so
                found = checkpoints.read_tensors(path.read_bytes())
        except pickle.UnpicklingError:
            raise ValueError(
                "it holds objects of Python, not tensors alone, and nothing from a file is "
                "executed: save model.state_dict()"
            ) from None
        for name in WRAPPERS:
            if isinstance(found, dict) and isinstance(found.get(name), dict):
                found = found[name]
        if isinstance(found, dict) and not any(isinstance(v, Tensor) for v in found.values()):
            tables = {name: table for name, table in found.items() if isinstance(table, dict)}
            found = {  # such as those of a student and of a teacher
                f"{name}.{inner}": tensor
                for name, table in tables.items()
                for inner, tensor in table.items()
                if isinstance(tensor, Tensor)
            }
        named = isinstance(found, dict) and all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()
        )
        if not named or not found:
            raise ValueError("it holds no dictionary of tensors by name")
    return _take_file(found, path)


def _take_file(state: Weights, path: Path) -> StartingWeights:
    """Take the tensors of a file; an encoder of ours has the normalisation of pixels among them."""
    if all(name.startswith("trunk.") or name in PIXELS for name in state):
        taken = _take_trunk(state, str(path), {"from": str(path)})
        return taken if taken.pixels is not None else replace(taken, pixels=_read_pixels(path))
    return StartingWeights(state, str(path), {"from": str(path)}, _read_pixels(path))


def _read_pixels(path: Path) -> tuple[Tensor, Tensor] | None:
    """Read mean and deviation of the pixels from the file beside it, as exports of ours have it."""
    sidecar = path.with_name(f"{path.name}.json")
    if not sidecar.is_file():
        return None
    with _explain_damage(sidecar):
        described = parse_json(sidecar.read_text(encoding="utf-8", errors="replace"))
        mean, std = torch.tensor(described["mean"]), torch.tensor(described["std"])
        return mean.view(3), std.view(3)


def _take_trunk(state: Weights, origin: str, record: Record) -> StartingWeights:
    """Take the trunk and the normalisation out of the state of a whole encoder."""
    pixels = None
    if all(isinstance(state.get(name), Tensor) for name in PIXELS):
        pixels = state["mean"].flatten(), state["deviation"].flatten()
    return StartingWeights(checkpoints.select_part(state, "trunk."), origin, record, pixels)


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as why:  # torch's reader fails in a dozen ways on bytes it did not write
        raise UserError(
            f"encoder.weights is {str(path)!r}, which cannot be read ({first_line(why)}): "
            "give a file of torch.save with tensors by name, or of safetensors"
        ) from None
