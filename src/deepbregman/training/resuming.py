"""Going on with a run: what is saved, which checkpoint is taken, what may have changed since."""

from typing import TYPE_CHECKING, NamedTuple

from deepbregman.config import Config, from_toml, to_dict, to_toml
from deepbregman.errors import UserError
from deepbregman.runs import Record, Run

from .checkpoints import (
    DamagedCheckpoint,
    State,
    alternatives,
    load,
    load_strictly,
    require,
)

if TYPE_CHECKING:
    from .loop import Pretraining

PARTS = (
    *("model", "loss", "optimiser", "step", "epoch", "num_images", "config"),
    *("sums", "seconds", "skipped", "skipped_in_epoch"),
)
"""What a checkpoint must have for a run to go on from it."""
SAFE = frozenset(
    {
        *("data.root", "data.resident", "data.workers"),
        *("training.checkpoint_every", "training.save_seconds", "training.knn_every"),
        *("training.tensorboard", "training.compile", "training.skip_nonfinite"),
    }
)
"""Fields that say where, how often or how fast, and not what is trained.

So does training.epochs, unless the schedule of the learning rate is stretched over them.
"""


def snapshot(job: "Pretraining") -> State:
    """Collect all that a run needs to go on to the bit; randomness is a function of the step."""
    return {
        "model": job.objective.model.state_dict(),
        "loss": job.objective.loss.state_dict(),
        "optimiser": job.optimiser.state_dict(),
        "step": job.step,
        "epoch": job.step / job.steps_per_epoch,
        "num_images": job.batches.num_images,
        "config": to_toml(job.config),
        "sums": job.sums,
        "seconds": job.seconds(),
        "skipped": job.guard.skipped,
        "skipped_in_epoch": job.guard.skipped_in_epoch,
    }


def restore(job: "Pretraining", found: "Found") -> None:
    """Put a run back to where it was saved."""
    saved, origin = found.state, found.origin
    load_strictly(job.objective.model, saved["model"], origin)
    load_strictly(job.objective.loss, saved["loss"], origin)
    job.optimiser.load_state_dict(saved["optimiser"])
    job.step = job.saved_step = saved["step"]
    job.sums.copy_(saved["sums"])
    job.seconds_before = saved["seconds"]
    job.guard.start_counting(job.step)
    job.guard.skipped = saved["skipped"]
    job.guard.skipped_in_epoch = saved["skipped_in_epoch"]


class Found(NamedTuple):
    """The checkpoint that a run goes on from."""

    state: State
    origin: str
    notes: list[str]
    """What the user should know, a sentence each."""
    record: Record
    """The same for the provenance."""


def find_checkpoint(run: Run) -> Found | None:
    """Read the last checkpoint, or the previous one where the last is damaged or gone.

    Returns:
        None before a run has saved for the first time.
    """
    last, previous = run.last_checkpoint, run.previous_checkpoint
    reason = "it is missing"
    if last.exists():
        try:
            return Found(load(last), str(last), [], {})
        except DamagedCheckpoint as error:
            reason = error.reason
            if not previous.exists():
                raise UserError(f"{error}; {alternatives(run)}") from None
    elif not previous.exists():
        return None
    try:
        state = load(previous)
    except DamagedCheckpoint as error:
        raise UserError(
            f"neither {last} ({reason}) nor {previous} ({error.reason}) can be read; "
            f"{alternatives(run)}, or train the run again"
        ) from None
    note = (
        f"{last} cannot be read ({reason}): going on from {previous}, step {state.get('step')}; "
        "what came after is trained again"
    )
    return Found(state, str(previous), [note], {"from": "previous.pt", "last.pt": reason})


def settle(run: Run) -> None:
    """Make the previous checkpoint the last, as a run does that goes on from it.

    The damaged one is set aside as damaged.pt: kept under its name it would next be taken for the
    previous one.
    """
    if run.last_checkpoint.exists():
        run.last_checkpoint.replace(run.checkpoints / "damaged.pt")
    run.previous_checkpoint.replace(run.last_checkpoint)


def changed_fields(before: Config, after: Config) -> Record:
    """Return ``{"section.field": [value before, value after]}`` of every field that differs."""
    old, new = to_dict(before), to_dict(after)
    flat = [(name, value) for name, value in old.items() if not isinstance(value, dict)]
    pairs = {name: [value, new[name]] for name, value in flat}
    for section in old.keys() - pairs.keys():
        for field, value in old[section].items():
            pairs[f"{section}.{field}"] = [value, new[section][field]]
    return {name: pair for name, pair in sorted(pairs.items()) if pair[0] != pair[1]}


def check_resumable(found: Found, config: Config, num_images: int) -> Found:
    """Refuse to go on with other images, or with a configuration that trains something else.

    Args:
        found: the checkpoint.
        config: that the run folder holds now.
        num_images: there are to pretrain on now.

    Returns:
        The same with a note on the fields that changed and may.
    """
    state, origin = found.state, found.origin
    require(state, PARTS, origin)
    changes = changed_fields(from_toml(state["config"], origin), config)
    refused = {name: pair for name, pair in changes.items() if not _is_safe(name, state, config)}
    if refused:
        raise UserError(
            f"the config.toml beside {origin} was changed since in {_listed(refused)}: a run goes "
            "on as it began; put that back, or start a new run from the changed file (may change: "
            f"{', '.join(sorted(SAFE))}; and training.epochs to more than are done, unless "
            "optimiser.schedule is cosine)"
        )
    if state["num_images"] != num_images:
        raise UserError(
            f"{origin} was trained on {state['num_images']} images, {config.data.source} now has "
            f"{num_images} to pretrain on: a run goes on with the same images only; put them back, "
            "or start a new run"
        )
    if not changes:
        return found
    note = f"config.toml was changed in {_listed(changes)}; the run goes on with that"
    record = {**found.record, "changed": changes}
    return found._replace(notes=[*found.notes, note], record=record)


def _is_safe(name: str, state: State, config: Config) -> bool:
    if name == "training.epochs":
        return config.optimiser.schedule != "cosine" and config.training.epochs >= state["epoch"]
    return name in SAFE


def _listed(changes: Record) -> str:
    return ", ".join(f"{name} ({before} -> {after})" for name, (before, after) in changes.items())
