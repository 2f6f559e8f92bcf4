"""The main job: a recipe and images in, a pretrained run out, watched by the kNN monitor."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from deepbregman.config import Config, load_recipe, override
from deepbregman.data import Images, Source, join_images
from deepbregman.evaluation.monitor import knn_monitor, split_for_monitor
from deepbregman.files import exclusive
from deepbregman.launching import said_by_first
from deepbregman.method.model import Model
from deepbregman.runs import Run, default_folder
from deepbregman.training.assembly import build_encoder_of, open_data
from deepbregman.training.faults import explained
from deepbregman.training.loop import Monitor, Pretraining
from deepbregman.training.processes import first_then_others, from_all, from_first, launch, together

Watch = Callable[[int, Mapping[str, float]], None]
"""Is told the epoch and what the monitor measured; what it raises ends the run."""


def pretrain(
    recipe: str | Config,
    *,
    data: str | None = None,
    run: Path | str | None = None,
    changes: Mapping[str, Any] | None = None,
    encoder: torch.nn.Module | None = None,
    accelerator: str = "auto",
    console: Console | None = None,
    source: Source | None = None,
    watch: Watch | None = None,
) -> Run:
    """Pretrain an encoder.

    Args:
        recipe: a recipe's name, a ``.toml`` file, or a configuration.
        data: a source, in place of the recipe's: ``digits``, ``cifar10``, a folder, an ``.npz``.
        run: folder of the run, which must not exist; by default a new one under ``runs/``.
        changes: fields by their dotted names, such as ``{"training.epochs": 10}``.
        encoder: a module of your own, in place of the recipe's: images (N, 3, H, W), normalised
            floats, to vectors (N, d). A copy is trained, from the weights it has; yours stays as
            it is. Whoever loads the run gives a module of the same structure again.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        console: to draw progress on; quiet when None.
        source: the data, already open, for who trains many runs on them.
        watch: hears what the kNN monitor measured.

    Returns:
        The run, complete; its ``path`` is what :func:`load_encoder` takes.
    """
    with said_by_first():
        config = load_recipe(recipe) if isinstance(recipe, str) else recipe
        if data is not None:
            config = override(config, {"data.source": data})
        config = override(config, changes or {})
        if encoder is not None:
            config = override(config, {"encoder.name": "custom", "encoder.stem": "auto"})
    name = Path(recipe).stem if isinstance(recipe, str) else "run"
    folder = default_folder(name) if run is None else Path(run)
    return _pretrain(config, folder, False, accelerator, console, encoder, source, watch)


def resume(
    run: Path | str,
    *,
    encoder: torch.nn.Module | None = None,
    accelerator: str = "auto",
    console: Console | None = None,
    source: Source | None = None,
    watch: Watch | None = None,
) -> Run:
    """Go on with a run that was interrupted, exactly where its last checkpoint is.

    Args:
        run: folder of the run.
        encoder: a module of the same structure, for a run whose encoder was your own.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        console: to draw progress on; quiet when None.
        source: the run's data, already open.
        watch: hears what the kNN monitor measured.
    """
    with said_by_first():
        opened = Run.open(Path(run))
        config, folder = opened.config, opened.path
    return _pretrain(config, folder, True, accelerator, console, encoder, source, watch)


def images_to_pretrain_on(source: Source, kept: torch.Tensor) -> Images:
    """Join the training images that are not held out with a source's unlabelled ones."""
    everything = len(kept) == len(source.train)
    images = source.train.images if everything else source.train.images.select(kept)
    return images if source.unlabelled is None else join_images(images, source.unlabelled.images)


def _watched(monitor: Monitor, job: Pretraining, watch: Watch) -> Monitor:
    """Let somebody hear what a monitor measures, and at which epoch."""

    def measure(model: Model) -> dict[str, float]:
        values = monitor(model)
        watch(job.step // job.steps_per_epoch, values)
        return values

    return measure


def _pretrain(
    config: Config,
    folder: Path,
    resuming: bool,
    accelerator: str,
    console: Console | None,
    encoder: torch.nn.Module | None,
    source: Source | None,
    watch: Watch | None,
) -> Run:
    fabric = launch(accelerator)
    if console is None or not fabric.is_global_zero:
        console = Console(quiet=True)
    folder = from_first(fabric, folder)  # a default one is named by the clock
    if not resuming:
        together(fabric, lambda: Run.check_free(folder))
    together(fabric, lambda: _try_encoder(config, encoder))
    with explained(config, folder), ExitStack() as held:

        def hold() -> None:
            """Keep other processes out of the run's folder."""
            if fabric.is_global_zero:
                held.enter_context(exclusive(folder))

        if resuming:
            together(fabric, hold)
        if source is None:
            with console.status(f"opening {escape(config.data.source)} ..."):
                source = first_then_others(fabric, lambda: open_data(config))
        train = source.train
        if source.said_of_skipped:
            console.print(source.said_of_skipped, style="yellow", highlight=False)
        kept, held_out = together(fabric, lambda: split_for_monitor(train, config))
        images = images_to_pretrain_on(source, kept)
        sharing = together(
            fabric, lambda: _sharing(config, fabric.world_size, Run(folder) if resuming else None)
        )
        job = Pretraining(config, images, fabric, folder, resuming, encoder)
        if not resuming:
            together(fabric, hold)
        for note in job.notes:
            console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)
        _say(
            console,
            f"{'resuming' if resuming else 'pretraining'} {config.encoder.name} on "
            f"{len(images):,} images of {config.data.source} ({len(held_out):,} held out), "
            f"{'resident on' if job.batches.resident else 'streamed to'} {fabric.device}; run "
            f"{folder}",
        )
        for words in sharing:
            _say(console, words)

        def build_monitor() -> Monitor | None:
            zero = fabric.is_global_zero  # which judges for all
            monitor = knn_monitor(train, config, fabric.device) if zero else None
            if monitor is not None and watch is not None:
                monitor = _watched(monitor, job, watch)
            return monitor

        run = job.fit(together(fabric, build_monitor), console)
    met = from_all(fabric, job.batches.skipped) if config.data.skip_unreadable else []
    if skipped := frozenset().union(*met):  # streamed, each process has met those of its share
        console.print(
            f"{len(skipped)} images could not be decoded; others stood in for them",
            style="yellow",
        )
    return run


def _try_encoder(config: Config, encoder: torch.nn.Module | None) -> None:
    """Build the encoder on trial: fail now, not after reading the images."""
    with torch.random.fork_rng(devices=[]):
        build_encoder_of(config, trunk=encoder)


def _sharing(config: Config, processes: int, resumed: Run | None) -> list[str]:
    """Say how several processes share the work, and what another number of them than before means.

    Args:
        config: of the run.
        processes: that take part now.
        resumed: the run that is resumed, if one is.
    """
    words = []
    settings = config.training
    if processes > 1:
        share = settings.batch_size // processes
        norm = "the whole batch" if settings.sync_norm else f"each process's {share}"
        words.append(
            f"batch {settings.batch_size} = {processes} processes x {share}; negatives from all; "
            f"batch normalisation over {norm}"
        )
    before = processes if resumed is None else _processes_before(resumed)
    if before != processes:
        differs = ["batch normalisation"] * (not settings.sync_norm)
        differs += ["dropout"] * (config.divergence.dropout > 0.0)
        words.append(
            f"the run had {before} processes before and has {processes} now: "
            + (
                f"{' and '.join(differs)} differ between the two"
                if differs
                else "the steps depend on the joint batch alone and are the same up to rounding"
            )
        )
    return words


def _processes_before(run: Run) -> int:
    record = run.provenance()
    last = (record.get("resumed") or [record])[-1]
    return int(last.get("processes", 1))  # older records name none: there was one


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, soft_wrap=True, markup=False)
