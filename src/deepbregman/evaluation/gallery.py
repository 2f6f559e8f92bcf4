"""Images of a run's data with their features, names and labels: what one searches or clusters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from deepbregman.data import FileImages, Images, ResidentBatches, Source, Split
from deepbregman.data.folders import Listing
from deepbregman.errors import UserError, notify, require_known, require_list
from deepbregman.runs import Run, is_complete
from deepbregman.terminal import ReportProgress, count_words, ignore_progress
from deepbregman.training.faults import format_resume_command

from .features import Features, SplitFeatures, compute_features
from .inputs import LoadedRun, load_run

Pixels = npt.NDArray[np.uint8]
PICTURE = 160
"""Longer side of the pictures on contact sheets, before they are fitted into their places."""
SPLITS = ("train", "test", "all")
_TOGETHER = 64  # images that are decoded at a time


class Shown(NamedTuple):
    """What people see of an image, as an :class:`~.search_index.Image` takes it."""

    name: str
    class_name: str | None
    read: Callable[[], Pixels]


class OpenedRun(NamedTuple):
    """A run's networks, and the dataset that they are to look at."""

    loaded: LoadedRun
    source: Source
    data: str
    data_changed: bool | None
    """Whether the run's own dataset has changed since pretraining; None where not known."""
    is_finished: bool

    @property
    def other_data(self) -> str | None:
        """The name of the dataset, if it is not the run's own."""
        return None if self.data == self.loaded.config.data.source else self.data

    def splits(self, choice: str) -> dict[str, Split]:
        """Return the splits that ``train``, ``test`` or ``all`` names."""
        require_known("split", choice, SPLITS)
        present = {"train": self.source.train}
        if self.source.test is not None:
            present["test"] = self.source.test
        if choice == "all":
            return present
        if choice not in present:
            raise UserError(f"data {self.data!r} has no test split: use --split train or all")
        return {choice: present[choice]}

    def choose_measures(self, by: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
        """Check the measures that are asked for, of those ``known``; by default all the run has."""
        require_list("by", by)
        for name in by:
            require_known("by", name, known)
        has_scores = self.loaded.model.divergence_network is not None
        if "divergence" in by and not has_scores:
            loaded, why = self.loaded, "divergence.weight is 0"
            if loaded.config.divergence.is_on:
                why = "nothing was trained" if loaded.epoch == 0 else "its projection is your own"
            raise UserError(
                f"run {loaded.run.path} has no divergence network ({why}), so there is no learned "
                f"divergence: use --by {known[0]}"
            )
        possible = (name for name in known if has_scores or name != "divergence")
        return tuple(name for name in possible if name in by or not by)

    def compute(self, images: Images) -> Features:
        """Compute the features of a few images that are not of the dataset."""
        batches = ResidentBatches(images, self.loaded.device)
        size = self.loaded.config.data.image_size
        return compute_features(self.loaded.model, batches, size).require_finite()

    def features_of(
        self, split: Split, name: str, progress: ReportProgress = ignore_progress
    ) -> SplitFeatures:
        """Return the features of a split; they are read or computed when first used."""
        report = partial(progress, f"features of {name}")
        loaded = self.loaded
        return SplitFeatures(
            loaded.model,
            loaded.config,
            split,
            loaded.device,
            report,
            loaded.cache,
            loaded.other_devices,
        )


def open_run(
    run: Run,
    data: str | None,
    source: Source | None = None,
    accelerator: str = "auto",
    devices: int | str = 1,
    encoder: nn.Module | None = None,
    skip_unreadable: bool = False,
    listing: Listing | None = None,
) -> OpenedRun:
    """Load a run's networks, and open its own dataset or another one.

    If the dataset is open already (``source``), ``data`` only names it. ``listing`` are its files,
    if they are listed already.
    """
    loaded = load_run(run, accelerator, encoder, devices=devices, skip_unreadable=skip_unreadable)
    opened, changed = loaded.open_images(data, source, ignore_progress, listing)
    name = loaded.name_data(data, source)
    if loaded.config.data.skip_unreadable and opened.skipped_notice:
        notify(f"{opened.skipped_notice} of {name}")
    epochs = loaded.config.training.epochs
    is_finished = loaded.epoch >= epochs or is_complete(run)
    if not is_finished:
        words = f"its encoder has seen {loaded.epoch:.4g} of {count_words(epochs, 'epoch')}"
        again = format_resume_command(loaded.config, run.path)
        notify(f"run {run.path} is not finished: {words}; to continue it: {again}")
    return OpenedRun(loaded, opened, name, changed, is_finished)


@dataclass(frozen=True, eq=False)
class Gallery:
    """Images of one or both splits of a source, one split after the other."""

    parts: dict[str, SplitFeatures]
    source: Source

    @cached_property
    def features(self) -> Features:
        """The features of all images."""
        return join_features([part.features for part in self.parts.values()])

    @cached_property
    def labels(self) -> Tensor | None:
        """The labels (N,) on the device, or None where a split has none."""
        if any(part.split.labels is None for part in self.parts.values()):
            return None
        return torch.cat([part.labels for part in self.parts.values()])

    @cached_property
    def classes(self) -> list[str | None]:
        """The class of each image; None where there are no labels."""
        if self.labels is None:
            return [None] * len(self.names)
        return [self.source.class_name(label) for label in self.labels.tolist()]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each image; as ``split:index`` where it has no file."""
        return tuple(
            image_name(name, part.split, index)
            for name, part in self.parts.items()
            for index in range(len(part.split))
        )

    @property
    def starts(self) -> dict[str, int]:
        """Position of the first image of each split."""
        ends = accumulate(len(part.split) for part in self.parts.values())
        return dict(zip(self.parts, (0, *ends), strict=False))

    def show(self, indices: Sequence[int]) -> dict[int, Shown]:
        """Describe images for people; those that stand together here are decoded together."""
        starts = range(0, len(indices), _TOGETHER)
        decode = cache(self.pictures)

        def read(together: tuple[int, ...], index: int) -> Pixels:
            return decode(together)[index]

        return {
            index: Shown(self.names[index], self.classes[index], partial(read, together, index))
            for together in (tuple(indices[start : start + _TOGETHER]) for start in starts)
            for index in together
        }

    def pictures(self, indices: Sequence[int], side: int = PICTURE) -> dict[int, Pixels]:
        """Return images (H, W, 3) for people, who want to see more than small encoders do.

        Args:
            side: pixels that the longer side has at least, if the image is as large; 0 takes the
                images as they are decoded.
        """
        pixels: dict[int, Pixels] = {}
        for name, start in self.starts.items():
            part = self.parts[name].split
            wanted = sorted({i - start for i in indices if 0 <= i - start < len(part)})
            if wanted:  # decode these alone, not the whole split
                images = read_pictures(part.images.select(torch.tensor(wanted)), side)
                pixels |= {start + i: image for i, image in zip(wanted, images, strict=True)}
        return pixels


def open_gallery(
    opened: OpenedRun, split: str, progress: ReportProgress = ignore_progress
) -> Gallery:
    """Take the images of ``train``, ``test`` or ``all`` of the data."""
    splits = opened.splits(split).items()
    parts = {name: opened.features_of(part, name, progress) for name, part in splits}
    return Gallery(parts, opened.source)


def join_features(parts: Sequence[Features]) -> Features:
    """Join features of several sets of images, by the same networks, one after the other."""
    scores = [part.scores for part in parts if part.scores is not None]
    embedding = [part.embedding for part in parts if part.embedding is not None]
    return Features(
        torch.cat([part.representation for part in parts]),
        torch.cat(scores) if scores else None,
        torch.cat(embedding) if embedding else None,
    )


def image_name(split: str, images: Split, index: int) -> str:
    """Name an image by its file, or by its split and position, which a query may be named by."""
    return f"{split}:{index}" if images.names is None else images.names[index]


def read_pictures(images: Images, side: int = PICTURE) -> list[Pixels]:
    """Decode images as (H, W, 3); from large files with a longer side of ``side`` or more."""
    if isinstance(images, FileImages) and images.side < side:
        images = replace(images, side=side, fills_frame=False)
    batches, pictures = ResidentBatches(images, torch.device("cpu")), []
    for batch in batches.iterate(torch.arange(len(images)), 256):
        for position, image in enumerate(batch.images):
            if batch.sizes is not None:  # without the padding of its frame
                height, width = batch.sizes[position].tolist()
                image = image[:, :height, :width]
            pictures.append(image.permute(1, 2, 0).contiguous().numpy())
    return pictures
