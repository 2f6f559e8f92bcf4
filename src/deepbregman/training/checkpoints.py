"""Checkpoints: how they are written, checked and read, and which of them a run resumes from.

A file is a line of text, followed by what ``torch.save`` wrote. The line ends with the SHA-256 of
everything else in the file, so that a damaged file is never used::

    deepbregman checkpoint 4 sha256 <64 digits>
"""

import hashlib
import io
import re
import shlex
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import Config, differing_fields, from_toml, override
from deepbregman.errors import UserError, first_line
from deepbregman.files import replace_file
from deepbregman.method.networks import Encoder, Model
from deepbregman.objectives import DivergenceTerm, OwnParts, Step, build_run_encoder, build_step
from deepbregman.objectives.objective import build_head
from deepbregman.runs import CHANGEABLE, Record, Run, list_changeable

FORMAT = 4
_HEADER = re.compile(rb"(deepbregman checkpoint (\d+) sha256 )([0-9a-f]{64})\n")
State = dict[str, Any]
Changes = dict[str, tuple[Any, Any]]
"""Fields that differ, with the value before and the value now."""
NETWORKS = ("objective", "teacher", "divergence", "rotation")
"""The networks of a step and of a checkpoint; some steps do not have all of them."""
REQUIRED = (
    *(*NETWORKS, "optimiser", "step", "epoch", "num_images", "data", "config"),
    *("sums", "seconds", "skipped", "skipped_in_epoch", "neighbours"),
)
"""Entries that a checkpoint needs for a run to resume from it."""
VANISHING = 1e-30
"""Weights of a smaller absolute value are those of channels that the network no longer uses."""


class DamagedCheckpoint(UserError):
    """A checkpoint that is not as it was written; an older one may replace it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is not a checkpoint that can be read ({reason}): it is damaged or comes from "
            "another program; use another checkpoint of the run, or train it again"
        )
        self.reason = reason


def save(path: Path, state: State, keep: Path | None = None) -> None:
    """Write a checkpoint; ``path`` always holds a whole one, and the old one goes to ``keep``."""
    buffer = io.BytesIO()  # torch would abort on a full disk; here it is an OSError
    torch.save({"format": FORMAT, **state}, buffer)
    title = f"deepbregman checkpoint {FORMAT} sha256 ".encode()
    with replace_file(path, keep) as file:
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
            f"{path} does not exist: a run writes its first checkpoint at the end of an epoch, "
            "once a minute has passed (training.save_seconds); wait for it, or continue a stopped "
            "run with --resume; a study deletes the checkpoints of evaluated runs unless it has "
            "--keep-checkpoints"
        )
    content = memoryview(path.read_bytes())
    header = _HEADER.match(content)
    if header is None:
        raise DamagedCheckpoint(path, "it begins as no checkpoint does")
    content = content[header.end() :]
    if _digest(header[1], content) != header[3]:
        raise DamagedCheckpoint(path, "its SHA-256 is not the one it was written with")
    if int(header[2]) != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {int(header[2])}, this version reads {FORMAT}: use the "
            "version of deepbregman that wrote it"
        )
    try:
        state: State = read_tensors(content, device)
        state["format"]  # a file of another program may hold something else
    except Exception as why:  # torch raises many kinds on bytes that it did not write
        raise DamagedCheckpoint(path, first_line(why)) from None
    return state


def read_tensors(content: bytes | memoryview, device: torch.device | str = "cpu") -> Any:
    """Read what ``torch.save`` wrote; nothing in it is executed.

    Compressed parts and the format from before 2020 are refused: ``torch.save`` writes neither, and
    torch would unpack compressed parts to any size.

    Raises:
        Exception: Of many kinds, on bytes that ``torch.save`` did not write.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(part.file_size for part in archive.infolist()) > len(content):
            raise ValueError("its parts are larger than the file")
    return torch.load(io.BytesIO(content), map_location=device, weights_only=True)


def require(state: State, parts: Iterable[str], origin: str) -> None:
    """Refuse a checkpoint that lacks a part."""
    missing = [part for part in parts if part not in state]
    if missing:
        raise UserError(
            f"{origin} has no {', '.join(missing)}: it was not written by `deepbregman pretrain`; "
            "use another checkpoint of the run, or train it again"
        )


def _find_shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def load_strictly(module: nn.Module, state: dict[str, Tensor], origin: str, more: str = "") -> None:
    """Load a state that must fit in every name and shape; ``origin`` names it in errors.

    ``more`` ends the error, with what else can be done.
    """
    problems = list_misfits(module.state_dict(), state)
    if problems:
        raise UserError(
            f"{origin} does not fit the configuration beside it: {join_misfits(problems)}; use the "
            "config.toml and the version of deepbregman that it was trained with, and the same "
            f"encoder and method if they are your own{more}"
        )
    module.load_state_dict(state)


def clear_vanishing(module: nn.Module) -> None:
    """Set vanishing weights to zero, so that a CPU computes at full speed.

    In a long training the weights of channels that the network no longer uses shrink to subnormal
    numbers, and a CPU is many times slower with them. Zeros in their place change features by far
    less than their rounding error.
    """
    for weight in module.parameters():
        if weight.dtype in (torch.float32, torch.float64, torch.bfloat16):
            weight.detach().masked_fill_(weight.detach().abs() < VANISHING, 0.0)


def list_misfits(expected: dict[str, Tensor], state: dict[str, Tensor]) -> list[str]:
    """List what keeps a state from taking the place of another: names first, then shapes."""
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is not expected" for name in state if name not in expected]
    problems += [
        f"{name} has shape {shape}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and (shape := _find_shape(state[name])) != tuple(tensor.shape)
    ]
    return problems


def join_misfits(problems: list[str]) -> str:
    """Join the first problems to a sentence."""
    return "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" * (len(problems) > 4))


def collect_networks(step: Step) -> State:
    """Collect the networks of a step, as a checkpoint holds them."""
    parts = {name: getattr(step, name) for name in NETWORKS}
    return {name: {} if part is None else part.state_dict() for name, part in parts.items()}


def load_networks(step: Step, saved: State, origin: str) -> None:
    """Put the networks of a checkpoint into a step."""
    encoder = select_part(saved.get("objective", {}), "encoder.")
    fits = not list_misfits(step.objective.encoder.state_dict(), encoder)
    more = "; the encoder fits: deepbregman.load_encoder reads it alone" if fits else ""
    for name in NETWORKS:
        load_strictly(getattr(step, name) or nn.Identity(), saved.get(name, {}), origin, more)


def describe_alternatives(run: Run) -> str:
    """Name the other checkpoints of a run whose last one is damaged."""
    words = []
    if run.previous_checkpoint.is_file():
        place = shlex.quote(str(run.path))
        words.append(f"deepbregman pretrain --resume {place} goes on from previous.pt")
    kept = sorted(path.name for path in run.checkpoints.glob("epoch-*.pt"))
    if kept:
        words.append(f"of {', '.join(kept)} one can be copied to {run.last_checkpoint}")
    return "; ".join(words) or "this run has no other"


def fingerprint_weights(module: nn.Module) -> str:
    """Return a digest of the weights of a module, and of patches that an encoder in it cuts."""
    digest = hashlib.sha256()
    for part in module.modules():
        if isinstance(part, Encoder) and part.patch is not None:
            digest.update(f"patch {part.patch}".encode())
    tensors: dict[str, Tensor] = module.state_dict()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class Trained(NamedTuple):
    """The networks of a run and how far they are trained."""

    model: Model
    """Its projection is empty where none was trained, or where it is a method's own."""
    config: Config
    epoch: float
    data_fingerprint: str | None
    """Fingerprint of the images of the pretraining, if it is known."""


def _load_last(run: Run, parts: Iterable[str]) -> State:
    """Read the last checkpoint, or fail: an evaluation must not judge an older one."""
    try:
        saved = load(run.last_checkpoint)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; {describe_alternatives(run)}") from None
    require(saved, parts, str(run.last_checkpoint))
    return saved


def load_trained(
    run: Run | Path | str, device: torch.device | str = "cpu", encoder: nn.Module | None = None
) -> Trained:
    """Load the networks of a run, in evaluation mode, with the epoch they were saved at.

    ``encoder`` is a module of the same structure, if it was the user's own; it is copied.
    """
    run = Run.open(run)
    # Those from before there was a rotation can be evaluated too.
    saved = _load_last(run, (*(name for name in NETWORKS if name != "rotation"), "epoch"))
    counts = {name: saved.get(name, 0) for name in ("num_images", "num_classes")}
    config = run.config
    custom = [table for table, group in config.view_groups.items() if group.custom]
    config = override(config, {f"{table}.custom": False for table in custom})  # none are made
    if config.objective.name == "custom":
        model = _load_custom(run, saved, encoder)
    else:
        step = build_step(config, own=OwnParts(encoder), **counts)
        load_networks(step, saved, str(run.last_checkpoint))
        model = step.model
    epoch, data = float(saved["epoch"]), saved.get("data")
    if epoch == 0:  # of a run of no epochs the heads are random
        model = Model(model.encoder, nn.Sequential(), None)
    clear_vanishing(model)
    model.to(memory_format=torch.channels_last)
    return Trained(model.to(device).eval(), run.config, epoch, data)


def _load_custom(run: Run, saved: State, encoder: nn.Module | None) -> Model:
    """Load the encoder of a method of the user's own, and its projection if the settings made it.

    Other parts are known to the method's code alone. Where the projection is another one, there is
    none, nor the divergence network behind it.
    """
    loaded = build_run_encoder(run.config, trunk=encoder)
    head = build_head(loaded, run.config.encoder)
    state, origin = saved["objective"], str(run.last_checkpoint)
    load_strictly(loaded, select_part(state, "encoder."), origin)
    projection = select_part(state, "projection.")
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if expected != {name: _find_shape(tensor) for name, tensor in projection.items()}:
        return Model(loaded, nn.Sequential(), None)
    load_strictly(head, projection, origin)
    settings = run.config.divergence
    if not settings.is_on:
        return Model(loaded, head, None)
    term = DivergenceTerm(settings, run.config.encoder.embedding)
    load_strictly(term, saved["divergence"], origin)
    return Model(loaded, head, term.network, term.sigma)


def select_part(state: State, prefix: str) -> State:
    """Return the tensors of one part, under their names in it."""
    return {n.removeprefix(prefix): tensor for n, tensor in state.items() if n.startswith(prefix)}


def load_trained_encoder(
    run: Run | Path | str, device: torch.device | str = "cpu", encoder: nn.Module | None = None
) -> Encoder:
    """Load the encoder of a run alone, whatever method trained it; see :func:`load_trained`."""
    run = Run.open(run)
    loaded = build_run_encoder(run.config, trunk=encoder)
    saved = _load_last(run, ("objective",))["objective"]
    load_strictly(loaded, select_part(saved, "encoder."), str(run.last_checkpoint))
    clear_vanishing(loaded)
    loaded.to(memory_format=torch.channels_last)
    return loaded.to(device).eval()


class FoundCheckpoint(NamedTuple):
    """The checkpoint that a run resumes from."""

    state: State
    origin: str
    notes: list[str]
    """For the user, a sentence each."""
    record: Record
    changes: Changes
    """Settings that have changed since."""


def find_checkpoint(run: Run) -> FoundCheckpoint | None:
    """Read the last checkpoint, or the previous one if it is damaged or gone; None without any."""
    last, previous = run.last_checkpoint, run.previous_checkpoint
    reason = "it is missing"
    if last.exists():
        try:
            return FoundCheckpoint(load(last), str(last), [], {}, {})
        except DamagedCheckpoint as error:
            reason = error.reason
            if not previous.exists():
                raise UserError(f"{error}; {describe_alternatives(run)}") from None
    elif not previous.exists():
        return None
    try:
        state = load(previous)
    except DamagedCheckpoint as error:
        raise UserError(
            f"neither {last} ({reason}) nor {previous} ({error.reason}) can be read; "
            f"{describe_alternatives(run)}, or train the run again"
        ) from None
    note = (
        f"{last} cannot be read ({reason}): going on from {previous}, step {state.get('step')}; "
        "what came after is trained again"
    )
    record = {"from": "previous.pt", "last.pt": reason}
    return FoundCheckpoint(state, str(previous), [note], record, {})


def replace_last_by_previous(run: Run) -> None:
    """Make the previous checkpoint the last one, and rename a damaged one to damaged.pt.

    Under its old name the damaged file would become the previous checkpoint at the next save.
    """
    if run.last_checkpoint.exists():
        run.last_checkpoint.replace(run.checkpoints / "damaged.pt")
    run.previous_checkpoint.replace(run.last_checkpoint)


def check_settings(before: Config, config: Config, epoch: float, origin: str) -> Changes:
    """Refuse changes after so many epochs that affect what is trained; return the others."""
    changes = differing_fields(before, config)
    refused = {name: pair for name, pair in changes.items() if not _may_change(name, epoch, config)}
    if refused:
        raise UserError(
            f"{origin} was made with other settings: {list_changes(refused)}; a run goes on as it "
            "began: undo the change, in config.toml or in your command, or start a new run with it "
            f"(may change: {', '.join(sorted(CHANGEABLE))}; and training.epochs to more than are "
            "done, unless a schedule depends on it, such as a cosine of the learning rate or of a "
            "teacher's momentum)"
        )
    return changes


def check_resumable(
    found: FoundCheckpoint, config: Config, num_images: int, data: str
) -> FoundCheckpoint:
    """Refuse to resume with other images or with other settings of training.

    Args:
        data: fingerprint of the images.
    """
    state, origin = found.state, found.origin
    require(state, REQUIRED, origin)
    before = from_toml(state["config"], origin)
    changes = check_settings(before, config, state["epoch"], origin)
    fix = (
        "a run continues only with the same images; put them back, or start a new run from its "
        "weights, with --encoder.weights"
    )
    if state["num_images"] != num_images:
        raise UserError(
            f"{origin} was trained on {state['num_images']} images, {config.data.source} now has "
            f"{num_images} to pretrain on: {fix}"
        )
    if state["data"] != data:
        raise UserError(
            f"{origin} was trained on other images than {config.data.source} now has: names, sizes "
            f"or contents differ; {fix}"
        )
    if not changes:
        return found
    record = {**found.record, "changed": {name: list(pair) for name, pair in changes.items()}}
    return found._replace(record=record, changes=changes)


def _may_change(name: str, epoch: float, config: Config) -> bool:
    is_long_enough = name != "training.epochs" or config.training.epochs >= epoch
    return name in list_changeable(config) and is_long_enough


def list_changes(changes: Changes) -> str:
    """Name the fields that have changed, with both values."""
    return ", ".join(f"{name} ({before} -> {after})" for name, (before, after) in changes.items())
