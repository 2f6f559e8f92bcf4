"""Features of frozen networks, computed once and shared by every protocol."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import Config
from deepbregman.data import Batch, Batches, Progress, Source, Split, channel_statistics
from deepbregman.data.opening import batch_images
from deepbregman.errors import Diverged
from deepbregman.method.networks import Model
from deepbregman.method.views import Views, centre_view
from deepbregman.terminal import ignore_progress

from .classes import FeatureBank
from .feature_cache import FeatureCache
from .frozen import BatchOutputs, SharedBatches, map_batches
from .results import measure_accuracies

BATCH_SIZE = 512
Change = Callable[[Tensor, int], Tensor]
"""Takes a batch of views (b, 3, H, W) in [0, 1] and its number; returns changed views."""


class Features(NamedTuple):
    """The outputs of the networks for a set of images, in their order."""

    representation: Tensor  # (N, d), the encoder's output
    scores: Tensor | None  # (N, K), the subnetworks' outputs, or None without divergence
    embedding: Tensor | None = None  # (N, d'), the projection's output; scores are computed from it

    def select(self, rows: Tensor) -> "Features":
        """Return the features of some images, by index or as a mask."""

        def pick(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[rows]

        return Features(self.representation[rows], pick(self.scores), pick(self.embedding))

    def require_finite(self) -> "Features":
        """Return the features, or raise ``Diverged`` where one is not a finite number."""
        if not all(part.isfinite().all() for part in self if part is not None):
            raise Diverged(
                "the networks' features are not finite: training has diverged; use an earlier "
                "checkpoint, or train again with a lower optimiser.learning_rate"
            )
        return self


def compute_features(
    model: Model,
    batches: Batches | SharedBatches,
    image_size: int,
    progress: Progress = ignore_progress,
    change: Change | None = None,
) -> Features:
    """Pass every image, resized and centre-cropped, through the frozen networks.

    Args:
        batches: the images; the features have their order and their device, the first of several.
        change: applied to each batch of views, such as a corruption.
    """
    # A method of the user's own may have a projection that is no sequence.
    is_empty = isinstance(model.projection, nn.Sequential) and not len(model.projection)

    def encode(model: Model, batch: Batch, number: int) -> BatchOutputs:
        view = centre_view(batch.images, batch.sizes, image_size)
        h, z, o = model(view if change is None else change(view, number))
        return h, o, None if is_empty else z

    found = map_batches(model, batches, BATCH_SIZE, encode, progress)
    h, o, z = ([part for part in parts if part is not None] for parts in zip(*found, strict=True))
    return Features(torch.cat(h), torch.cat(o) if o else None, torch.cat(z) if z else None)


def build_crop_and_flip(config: Config) -> Views:
    """Build the augmentation that classifiers are trained with: the run's crop and flip, no colour.

    Unlike in pretraining, views are as large as the images.
    """
    return Views(
        config.data.image_size,
        num_views=1,
        crop_area=config.views.crop_area,
        crop_aspect=config.views.crop_aspect,
        flip=config.views.flip,
        without=("rotation", "jitter", "greyscale", "blur", "solarise"),
    )


@dataclass(frozen=True, eq=False)
class SplitFeatures:
    """A split of a dataset with its features, which are computed when first used."""

    model: Model
    config: Config
    split: Split
    device: torch.device
    progress: Progress = ignore_progress
    """Called while the features are computed."""
    cache: FeatureCache | None = None
    """Cache from which features are read, or to which they are written."""
    other_devices: tuple[torch.device, ...] = ()
    """Further devices that share the images when features are computed."""

    @cached_property
    def labels(self) -> Tensor:
        """The labels, int64 (N,), on the device; only of a split that has labels."""
        assert self.split.labels is not None
        return self.split.labels.to(self.device)

    @cached_property
    def batches(self) -> Batches:
        """The images on the device, or streamed to it."""
        return batch_images(self.split.images, self.config, self.device)

    @cached_property
    def shared_batches(self) -> Batches | SharedBatches:
        """The images for a pass through the networks, dealt out to all devices."""
        if not self.other_devices:
            return self.batches
        devices = (self.device, *self.other_devices)
        return SharedBatches(self.split.images, self.config, devices, BATCH_SIZE)

    @cached_property
    def features(self) -> Features:
        """The features of the whole images, without augmentation."""
        images, cache = self.split.images, self.cache
        found = None if cache is None else cache.read(images)
        if found is not None:
            return Features(found["representation"], found.get("scores"), found.get("embedding"))
        size = self.config.data.image_size
        features = compute_features(
            self.model, self.shared_batches, size, self.progress
        ).require_finite()
        if cache is not None:
            parts = features._asdict().items()
            cache.write(images, {name: part for name, part in parts if part is not None})
        return features

    @cached_property
    def feature_bank(self) -> FeatureBank:
        """All images as a bank that others are compared by."""
        return FeatureBank.gather(self.features.representation)


@dataclass(frozen=True, eq=False)
class LabelledFeatures:
    """A run's networks and both splits of the labelled dataset of an evaluation."""

    model: Model
    config: Config
    source: Source
    device: torch.device
    balanced: bool = False
    """Whether accuracies are also given as means over the classes."""
    other_devices: tuple[torch.device, ...] = ()

    def of(self, split: Split) -> SplitFeatures:
        """Return a split with its features."""
        return SplitFeatures(
            self.model, self.config, split, self.device, other_devices=self.other_devices
        )

    @cached_property
    def train(self) -> SplitFeatures:
        """The training split."""
        return self.of(self.source.train)

    @cached_property
    def test(self) -> SplitFeatures:
        """The test split."""
        assert self.source.test is not None  # require_labelled has made sure
        return self.of(self.source.test)

    @cached_property
    def pixel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the training images' channels, for what is trained from scratch."""
        return channel_statistics(self.source.train.images)

    @cached_property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return 1 + int(max(self.train.labels.max(), self.test.labels.max()))

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of training and test images."""
        return len(self.train.labels), len(self.test.labels)

    def measure(self, predicted: Tensor, logits: Tensor | None = None) -> dict[str, float]:
        """Compare predictions for the test split with its labels, in per cent."""
        return measure_accuracies(
            self.test.labels, predicted=predicted, logits=logits, balanced=self.balanced
        )
