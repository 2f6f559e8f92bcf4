"""What is judged and on what; everything costly is computed when a protocol first asks for it."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from deepbregman.config import Config
from deepbregman.data import (
    Batches,
    Progress,
    Source,
    Split,
    channel_statistics,
    without_unreadable,
)
from deepbregman.errors import Notice, UserError
from deepbregman.method.model import Model
from deepbregman.training.assembly import batches_of, open_data
from deepbregman.training.seeds import derived

from .features import Features, compute_crop_features, compute_features, crop_and_flip
from .metrics import accuracies


@dataclass(frozen=True, eq=False)
class Side:
    """One labelled split, and what the frozen networks make of it."""

    model: Model
    config: Config
    split: Split
    device: torch.device

    @cached_property
    def labels(self) -> Tensor:
        """The labels, int64 (N,), on the device."""
        assert self.split.labels is not None  # open_labelled has made sure
        return self.split.labels.to(self.device)

    @cached_property
    def batches(self) -> Batches:
        """The images on the device, or streamed to it."""
        return batches_of(self.split.images, self.config, self.device)

    @cached_property
    def features(self) -> Features:
        """The features of the whole images, without augmentation."""
        features = compute_features(self.model, self.batches, self.config.data.image_size)
        _require_finite(features.representation)
        return features

    def averaged(self, crops: int, seed: int, progress: Progress | None = None) -> Tensor:
        """Return the representation (N, d) averaged over random crops and flips of each image."""
        views = crop_and_flip(self.config, crops)
        features = compute_crop_features(self.model, self.batches, views, seed, progress)
        _require_finite(features)
        return features

    @property
    def num_replaced(self) -> int:
        """How many unreadable images others have stood in for so far."""
        return len(self.batches.skipped) if "batches" in self.__dict__ else 0


class Averaged(NamedTuple):
    """Representations averaged over random crops and flips of each image."""

    train: Tensor  # (N, d)
    test: Tensor  # (T, d)
    crops: int  # of each image
    seed: int


@dataclass(frozen=True, eq=False)
class Subject:
    """A run's networks and the labelled source to judge them by."""

    model: Model
    config: Config
    source: Source
    device: torch.device
    balanced: bool = False
    """Whether accuracies are also given as means over the classes."""

    @cached_property
    def train(self) -> Side:
        """The training split."""
        return Side(self.model, self.config, self.source.train, self.device)

    @cached_property
    def test(self) -> Side:
        """The test split."""
        assert self.source.test is not None  # open_labelled has made sure
        return Side(self.model, self.config, self.source.test, self.device)

    @cached_property
    def pixels(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the training images' channels, for what is trained from scratch."""
        skip = self.config.data.skip_unreadable
        return channel_statistics(self.source.train.images, skip_unreadable=skip)

    @cached_property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return 1 + int(max(self.train.labels.max(), self.test.labels.max()))

    def averaged(self, crops: int, seed: int, progress: Progress | None = None) -> Averaged:
        """Average the representation over crops and flips of each image of both splits.

        Args:
            crops: of each image, drawn as the run's own views are, without their colour, and as
                large as the images.
            seed: of the crops.
            progress: called for each batch of images that is done.
        """
        train = self.train.averaged(crops, derived(seed, "crops of train"), progress)
        test = self.test.averaged(crops, derived(seed, "crops of test"), progress)
        return Averaged(train, test, crops, seed)

    def judge(self, *, predicted: Tensor, logits: Tensor | None = None) -> dict[str, float]:
        """Compare predictions for the test split with its labels."""
        return accuracies(
            self.test.labels, predicted=predicted, logits=logits, balanced=self.balanced
        )


def _require_finite(features: Tensor) -> None:
    if not features.isfinite().all():
        raise UserError(
            "the encoder's features are not finite: its training has diverged; judge an earlier "
            "checkpoint, or train again with a lower optimiser.learning_rate"
        )


def open_readable(config: Config, data: str | None = None, *, stacklevel: int = 3) -> Source:
    """Open a source to show images of by name: none is to stand in for one that is unreadable.

    Args:
        config: of the run.
        data: in place of its own source.
        stacklevel: of the notice of what was left out; 3 is the caller of the caller.
    """
    source = open_data(config, data)
    if not config.data.skip_unreadable:
        return source
    source = without_unreadable(source, names=("train", "test", "unlabelled"))
    if source.skipped_notice:
        where = data or config.data.source
        warnings.warn(f"{source.skipped_notice} of {where}", Notice, stacklevel=stacklevel)
    return source


def open_labelled(config: Config, data: str | None = None) -> Source:
    """Open the source of an evaluation, and see that it has labels to judge by."""
    return require_labelled(open_data(config, data), data or config.data.source)


def require_labelled(source: Source, spec: str) -> Source:
    """Return a source that has labels in both splits, and no class in the test split only.

    Args:
        source: already open.
        spec: what the user calls it.

    Raises:
        UserError: When it has not.
    """
    if source.train.labels is None or source.test is None or source.test.labels is None:
        raise UserError(
            f"data {spec!r} has no labels to judge by: give a labelled source with --data, such as "
            "a folder with one subfolder for each class"
        )
    strangers = sorted(set(source.test.labels.tolist()) - set(source.train.labels.tolist()))
    if strangers:
        names = ", ".join(class_name(source, label) for label in strangers[:5])
        raise UserError(
            f"data {spec!r}: no training image has the class {names}, which the test split has "
            f"({len(strangers)} such classes); both splits need the same classes"
        )
    return source


def class_name(source: Source, label: int) -> str:
    """Name a class as the source does, or by its number."""
    known = source.classes is not None and label < len(source.classes)
    return repr(source.classes[label]) if source.classes and known else str(label)
