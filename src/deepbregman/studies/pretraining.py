"""The main job: a recipe and images in, a pretrained run out, watched by the kNN monitor."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from deepbregman.config import Config, load_recipe, override
from deepbregman.data import ArrayImages, Images, Source
from deepbregman.evaluation.monitor import knn_monitor, split_for_monitor
from deepbregman.files import exclusive
from deepbregman.runs import Run, default_folder
from deepbregman.training.assembly import open_data
from deepbregman.training.faults import explained
from deepbregman.training.loop import Pretraining
from deepbregman.training.processes import launch


def pretrain(
    recipe: str | Config,
    *,
    data: str | None = None,
    run: Path | str | None = None,
    changes: Mapping[str, Any] | None = None,
    accelerator: str = "auto",
    console: Console | None = None,
) -> Run:
    """Pretrain an encoder.

    Args:
        recipe: a recipe's name, a ``.toml`` file, or a configuration.
        data: a source, in place of the recipe's: ``digits``, ``cifar10``, a folder, an ``.npz``.
        run: folder of the run, which must not exist; by default a new one under ``runs/``.
        changes: fields by their dotted names, such as ``{"training.epochs": 10}``.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        console: to draw progress on; quiet when None.

    Returns:
        The run, complete; its ``path`` is what :func:`load_encoder` takes.
    """
    config = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if data is not None:
        config = override(config, {"data.source": data})
    config = override(config, changes or {})
    name = Path(recipe).stem if isinstance(recipe, str) else "run"
    folder = default_folder(name) if run is None else Path(run)
    return _pretrain(config, folder, False, accelerator, console)


def resume(run: Path | str, *, accelerator: str = "auto", console: Console | None = None) -> Run:
    """Go on with a run that was interrupted, exactly where its last checkpoint is.

    Args:
        run: folder of the run.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        console: to draw progress on; quiet when None.
    """
    opened = Run.open(Path(run))
    return _pretrain(opened.config, opened.path, True, accelerator, console)


def images_to_pretrain_on(source: Source, kept: torch.Tensor) -> Images:
    """Join the training images that are not held out with a source's unlabelled ones."""
    everything = len(kept) == len(source.train)
    images = source.train.images if everything else source.train.images.select(kept)
    extra = None if source.unlabelled is None else source.unlabelled.images
    if isinstance(images, ArrayImages) and isinstance(extra, ArrayImages):
        return ArrayImages(torch.cat([images.pixels, extra.pixels]))
    return images


def _pretrain(
    config: Config, folder: Path, resuming: bool, accelerator: str, console: Console | None
) -> Run:
    console = console or Console(quiet=True)
    if not resuming:
        Run.check_free(folder)
    fabric = launch(accelerator)
    with explained(config, folder), ExitStack() as held:
        if resuming and fabric.is_global_zero:
            held.enter_context(exclusive(folder))
        with console.status(f"opening {escape(config.data.source)} ..."):
            source = open_data(config)
        if source.num_skipped:
            console.print(f"left out {source.num_skipped} unreadable images", style="yellow")
        kept, held_out = split_for_monitor(source.train, config)
        images = images_to_pretrain_on(source, kept)
        job = Pretraining(config, images, fabric, folder, resuming)
        if not resuming and fabric.is_global_zero:
            held.enter_context(exclusive(folder))
        for note in job.notes:
            console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)
        console.print(
            f"{'resuming' if resuming else 'pretraining'} {config.encoder.name} on "
            f"{len(images):,} images of {config.data.source} ({len(held_out):,} held out), "
            f"{'resident on' if job.batches.resident else 'streamed to'} {fabric.device}; run "
            f"{folder}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
        monitor = knn_monitor(source.train, config, fabric.device)
        run = job.fit(monitor, console)
    if job.batches.num_skipped:
        console.print(
            f"{job.batches.num_skipped} images could not be decoded; others stood in for them",
            style="yellow",
        )
    return run
