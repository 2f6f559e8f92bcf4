"""Messages before a run trains: the plan, the job, its processes, and warnings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from torch import nn

from deepbregman.config import Config
from deepbregman.data import Source
from deepbregman.data.folders import NOT_CLASSES, describe_ignored, explain_ignored
from deepbregman.runs import is_complete
from deepbregman.terminal import count_words, format_duration, join_words, say

from .checkpoints import list_changes
from .planning import Plan

if TYPE_CHECKING:
    from .loop import Pretraining


def show_plan(plan: Plan, console: Console) -> None:
    """Print what was chosen and why, and how long it takes."""
    table = Table(title="chosen for these images and this machine", title_justify="left")
    for column in ("setting", "value", "why"):
        table.add_column(column, overflow="fold", no_wrap=column == "setting")
    for field, value, why in plan.choices:
        table.add_row(field, f"{value:g}" if isinstance(value, float) else str(value), why)
    console.print(table, highlight=False)
    say(console, f"estimated time: {format_duration(plan.seconds)}")


def find_surprises(config: Config, num_seen: int) -> Iterator[str]:
    """Yield warnings about settings that are rarely meant.

    Args:
        num_seen: images that the run trains on, those of every epoch counted.
    """
    warmup, epochs = config.optimiser.warmup_epochs, config.training.epochs
    if 0 < epochs <= warmup:
        yield (
            f"warning: optimiser.warmup_epochs is {warmup:g} and training.epochs {epochs}: the run "
            "ends while the learning rate still rises; set optimiser.warmup_epochs to "
            f"{0.05 * epochs:g} or so"
        )
    divergence = config.divergence
    if divergence.is_on and divergence.source == "bank":
        views = config.view_groups.get("weak_views", config.views).num_views
        per_image = views if config.teacher else config.objective.count_targets(views)
        # The targets of a batch come into the bank after its loss.
        targets = per_image * (num_seen - config.training.batch_size)
        if num_seen > 0 and targets < divergence.num_subnetworks:
            yield (
                f"warning: the divergence stays 0: it counts once the bank is full of "
                f"{divergence.num_subnetworks:,} embeddings, and the run ends before; train longer "
                "or lower divergence.num_subnetworks"
            )
    if config.training.stop_when_saturated and not config.training.health_every:
        yield (
            "warning: --stop-when-saturated does not stop a run whose health is never measured; "
            "set training.health_every to 1 or more"
        )
    elif config.training.stop_when_saturated and config.optimiser.schedule != "constant":
        yield (
            "note: --stop-when-saturated does not stop a run whose learning rate falls, since much "
            "is gained then; to stop early, use --optimiser.schedule constant"
        )


def describe_job(
    job: "Pretraining", source: Source, num_held_out: int, start: str | None, resuming: bool
) -> Iterator[str]:
    """Describe the run, its starting weights, and the images that it leaves out."""
    config, settings, num_images = job.config, job.config.training, job.batches.num_images
    if job.changes:
        words = list_changes(job.changes)
        yield f"changed since the last checkpoint: {words}; the run continues with that"
    if not settings.epochs:
        origin = "its random weights" if start is None else f"the weights of {start}"
        yield f"nothing is trained: {config.encoder.name} keeps {origin}; run {job.run.path}"
        return
    is_done = job.step >= settings.epochs * job.steps_per_epoch
    what = "pretraining" if not resuming else "checking" if is_done else "resuming"
    yield (
        f"{what} {config.encoder.name} on {num_images:,} "
        f"images of {config.data.source} at {config.data.image_size} px: "
        f"{count_words(settings.epochs, 'epoch')} of {count_words(job.steps_per_epoch, 'step')}, "
        f"batch {settings.batch_size}, "
        f"{'resident on' if job.batches.resident else 'streamed to'} {job.fabric.device}; run "
        f"{job.run.path}"
    )
    if resuming and job.is_restored:
        total = settings.epochs * job.steps_per_epoch
        if job.step < total and not is_complete(job.run):
            yield f"it continues after step {job.step:,} of {total:,}"
    elif resuming:
        yield "nothing had been saved, so it begins again"
    if source.classes and source.train.labels is not None and not config.objective.needs_labels:
        named = ", ".join(source.classes[:5]) + ", ..." * (len(source.classes) > 5)
        words = "labels evaluate the encoder, they do not train it"
        names = None if source.test is None else source.test.names
        if names and not resuming and names[0].partition("/")[0] in source.classes:
            words = f"{words}; {NOT_CLASSES}"  # test images were set aside
        yield f"{count_words(len(source.classes), 'class')}: {named}; {words}"
    if start is not None:
        yield f"the encoder starts from the weights of {start}; its heads are new"
    per_epoch = job.steps_per_epoch * settings.batch_size * settings.accumulate
    counts = {
        "images of the test split": 0 if source.test is None else len(source.test),
        "held out for the monitor": num_held_out,
        "of each epoch, which fill no batch (other images each time)": num_images - per_epoch,
    }
    unused = [f"{count:,} {what}" for what, count in counts.items() if count]
    if source.ignored:
        unused.append(describe_ignored(source.ignored))
    if unused:
        yield f"not trained on: {'; '.join(unused)}{explain_ignored(source.ignored)}"


def describe_sharing(config: Config, processes: int, before: int, network: nn.Module) -> list[str]:
    """Describe how processes share the work, and the effect of another number than before."""
    words = []
    settings = config.training
    if processes > 1:
        share = settings.batch_size // processes
        norm = "the whole batch" if settings.sync_norm else f"each process's {share}"
        words.append(
            f"batch {settings.batch_size} = {processes} processes x {share}; negatives from all; "
            f"batch normalisation over {norm}"
        )
    if before != processes:
        differs = ["statistics of batch normalisation"] * (not settings.sync_norm)
        rates = [
            each.p for each in network.modules() if isinstance(each, (nn.Dropout, nn.Dropout2d))
        ]
        differs += ["masks of dropout"] * any(rates)
        differs += ["views of your own"] * any(g.custom for g in config.view_groups.values())
        effect = "the steps depend on the joint batch alone and are the same up to rounding"
        if differs:
            effect = f"{join_words(differs)} differ between the two"
        earlier = count_words(before, "process")
        words.append(f"the run had {earlier} before and has {processes} now: {effect}")
    return words
