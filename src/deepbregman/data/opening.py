"""Opening data with the settings of a run."""

from pathlib import Path

import torch
from torch import Tensor

from deepbregman.config import Config
from deepbregman.data import (
    ArrayImages,
    Batches,
    Images,
    Source,
    Split,
    join_arrays,
    open_batches,
    open_source,
    stratified_split,
)
from deepbregman.data.folders import Listing
from deepbregman.data.memory import count_cpus
from deepbregman.data.own import own_data
from deepbregman.errors import UserError
from deepbregman.launching import find_process


def open_data(
    config: Config,
    source: str | None = None,
    own: object | None = None,
    listing: Listing | None = None,
) -> Source:
    """Open a run's source, or another one in its place, with the run's settings.

    A folder without a test split has one set aside; which images depends on the folder alone, so
    that runs of several seeds have the same test images. ``own`` are images of the user's program;
    ``listing`` are the files of a folder, if they are listed already.
    """
    if own is not None:
        return own_data(own, image_size=config.data.image_size)
    return open_source(
        source or config.data.source,
        root=Path(config.data.root),
        image_size=config.data.image_size,
        skip_unreadable=config.data.skip_unreadable,
        listing=listing,
    )


def batch_images(
    images: Images,
    config: Config,
    device: torch.device,
    *,
    sharing: int = 1,
    may_replace: bool = False,
) -> Batches:
    """Bring images to a device.

    Args:
        sharing: devices of this process that share its CPUs.
        may_replace: with ``data.skip_unreadable``, another image may take the place of one that
            cannot be decoded; not of one that is judged, or shown by its name.
    """
    workers = config.data.workers
    return open_batches(
        images,
        device,
        resident=config.data.resident,
        num_workers=min(workers, max(1, count_cpus() // sharing)) if sharing > 1 else workers,
        local_processes=find_process().local_processes,
        skip_unreadable=may_replace and config.data.skip_unreadable,
    )


def split_for_monitor(train: Split, config: Config) -> tuple[Tensor, Tensor]:
    """Return the indices to pretrain on and those held out from it, by ``data.holdout``."""
    return stratified_split(train.labels, len(train), config.data.holdout, config.seed)


def select_images(source: Source, kept: Tensor, labelled: bool = False) -> Images:
    """Join training images that are not held out with unlabelled ones, unless ``labelled``."""
    everything = len(kept) == len(source.train)
    images = source.train.images if everything else source.train.images.select(kept)
    if labelled or source.unlabelled is None:
        return images
    unlabelled = source.unlabelled.images
    assert isinstance(images, ArrayImages)
    assert isinstance(unlabelled, ArrayImages)  # only .npz files and STL-10 have unlabelled images
    return join_arrays(images, unlabelled)


def select_labels(source: Source, kept: Tensor, config: Config) -> Tensor | None:
    """Return the labels (N,) of the images to pretrain on, if the method learns from labels."""
    if not config.objective.needs_labels:
        return None
    if source.train.labels is None:
        raise UserError(
            f"objective.name is {config.objective.name!r}: it learns from labels, and "
            f"{source.name} has none; give a labelled dataset, such as a folder with "
            "a folder for each class, or choose a method that learns without labels"
        )
    return source.train.labels[kept]
