"""Features of frozen networks, computed once and shared by every protocol."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from deepbregman.config import Config
from deepbregman.data import Batch, Batches, Progress, Source, Split, channel_statistics
from deepbregman.data.opening import batch_images
from deepbregman.errors import Diverged
from deepbregman.method.networks import Model
from deepbregman.method.views import Views, centre_view
from deepbregman.training.randomness import derive_seed

from .classes import FeatureBank
from .feature_cache import FeatureCache
from .frozen import OrderedDraws, Outputs, SharedBatches, map_batches
from .results import measure_accuracies

BATCH_SIZE = 512
Change = Callable[[Tensor, int], Tensor]
"""Makes other views of a batch of views (b, 3, H, W) in [0, 1] and of its number."""


class Features(NamedTuple):
    """What the networks make of a set of images, in its order."""

    representation: Tensor  # (N, d), the encoder's output
    scores: Tensor | None  # (N, K), the subnetworks' outputs, or None without divergence
    embedding: Tensor | None = None  # (N, d'), the projection's output, which the scores are of

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
    progress: Progress | None = None,
    change: Change | None = None,
) -> Features:
    """Pass every image, resized and centre-cropped, through the frozen networks.

    Args:
        batches: the images; the features have their order and their device, the first of several.
        change: applied to each batch of views, such as a corruption.
    """

    def look(model: Model, batch: Batch, number: int) -> Outputs:
        view = centre_view(batch.images, batch.sizes, image_size)
        h, z, o = model(view if change is None else change(view, number))
        return h, o, z

    found = map_batches(model, batches, BATCH_SIZE, look, progress)
    h, o, z = ([part for part in parts if part is not None] for parts in zip(*found, strict=True))
    return Features(torch.cat(h), torch.cat(o) if o else None, torch.cat(z))


def compute_crop_features(
    model: Model,
    batches: Batches | SharedBatches,
    views: Views,
    seed: int,
    progress: Progress | None = None,
) -> Tensor:
    """Average the frozen encoder's output over the random views of every image.

    The random numbers are drawn on the host, image after image, so that the views of an image
    depend on the seed and its position alone, not on the devices or the size of the batches.
    """
    generator = torch.Generator().manual_seed(seed)
    # As many views in one pass as whole images elsewhere, so that it takes no more memory.
    together = max(1, BATCH_SIZE // views.num_views)

    def draw(number: int) -> Tensor:
        count = min(BATCH_SIZE, batches.num_images - number * BATCH_SIZE)
        drawn = [views.draw(1, device="cpu", generator=generator) for _ in range(count)]
        return torch.cat(drawn, dim=1)  # (M, B, R)

    uniforms = OrderedDraws(draw)

    def average(model: Model, batch: Batch, number: int) -> Outputs:
        images, sizes, _ = batch
        drawn, means = uniforms.take(number), []
        for start in range(0, len(images), together):
            part = slice(start, start + together)
            there = drawn[:, part].to(images.device)
            shown = views(images[part], None if sizes is None else sizes[part], there)
            h = model.encoder(shown.flatten(0, 1)).float()  # (M * b, d)
            means.append(h.unflatten(0, shown.shape[:2]).mean(dim=0))
        return (torch.cat(means),)

    found = map_batches(model, batches, BATCH_SIZE, average, progress)
    return torch.cat([means for (means,) in found if means is not None])


def build_crop_and_flip(config: Config, num_views: int = 1) -> Views:
    """Build the augmentation that classifiers are trained with: the run's crop and flip, no colour.

    Unlike in pretraining, views are as large as the images.
    """
    return Views(
        config.data.image_size,
        num_views=num_views,
        crop_area=config.views.crop_area,
        crop_aspect=config.views.crop_aspect,
        flip=config.views.flip,
        without=("rotation", "jitter", "greyscale", "blur", "solarise"),
    )


@dataclass(frozen=True, eq=False)
class SplitFeatures:
    """A split of a dataset and what frozen networks make of it, computed when first used."""

    model: Model
    config: Config
    split: Split
    device: torch.device
    progress: Progress | None = None
    """Called while the features are computed."""
    cache: FeatureCache | None = None
    """Where features are read from if they are there, and written to if not."""
    helpers: tuple[torch.device, ...] = ()
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
    def shared(self) -> Batches | SharedBatches:
        """The images for a pass through the networks, dealt out to all devices."""
        if not self.helpers:
            return self.batches
        devices = (self.device, *self.helpers)
        return SharedBatches(self.split.images, self.config, devices, BATCH_SIZE)

    @cached_property
    def features(self) -> Features:
        """The features of the whole images, without augmentation."""
        images, cache = self.split.images, self.cache
        found = None if cache is None else cache.read(images)
        if found is not None and {"representation", "embedding"} <= found.keys():
            return Features(found["representation"], found.get("scores"), found["embedding"])
        size = self.config.data.image_size
        features = compute_features(self.model, self.shared, size, self.progress).require_finite()
        if cache is not None and not self.num_replaced:
            parts = features._asdict().items()
            cache.write(images, {name: part for name, part in parts if part is not None})
        return features

    @cached_property
    def feature_bank(self) -> FeatureBank:
        """All images as a bank that others are compared by."""
        return FeatureBank.gather(self.features.representation)

    def average_crops(self, crops: int, seed: int, progress: Progress | None = None) -> Tensor:
        """Return the representation (N, d) averaged over random crops and flips of each image."""
        views = build_crop_and_flip(self.config, crops)
        features = compute_crop_features(self.model, self.shared, views, seed, progress)
        return Features(features, None).require_finite().representation

    @property
    def num_replaced(self) -> int:
        """How many unreadable images have been replaced by others so far."""
        known = vars(self)
        alone = len(self.batches.skipped) if "batches" in known else 0
        shared = known.get("shared")
        return max(alone, shared.num_skipped if isinstance(shared, SharedBatches) else 0)


class AveragedFeatures(NamedTuple):
    """Representations averaged over random crops and flips of each image."""

    train: Tensor  # (N, d)
    test: Tensor  # (T, d)
    crops: int  # of each image
    seed: int


@dataclass(frozen=True, eq=False)
class LabelledFeatures:
    """A run's networks and both splits of the labelled dataset of an evaluation."""

    model: Model
    config: Config
    source: Source
    device: torch.device
    balanced: bool = False
    """Whether accuracies are also given as means over the classes."""
    helpers: tuple[torch.device, ...] = ()

    def of(self, split: Split) -> SplitFeatures:
        """Return what the networks make of a split."""
        return SplitFeatures(self.model, self.config, split, self.device, helpers=self.helpers)

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
        skip = self.config.data.skip_unreadable
        return channel_statistics(self.source.train.images, skip_unreadable=skip)

    @cached_property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return 1 + int(max(self.train.labels.max(), self.test.labels.max()))

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of training images, test images, and unreadable images replaced so far."""
        replaced = self.train.num_replaced + self.test.num_replaced
        return len(self.train.labels), len(self.test.labels), replaced

    def average_crops(
        self, crops: int, seed: int, progress: Progress | None = None
    ) -> AveragedFeatures:
        """Average the representation over random crops and flips of each image of both splits."""
        train = self.train.average_crops(crops, derive_seed(seed, "crops of train"), progress)
        test = self.test.average_crops(crops, derive_seed(seed, "crops of test"), progress)
        return AveragedFeatures(train, test, crops, seed)

    def representations(self, averaged: AveragedFeatures | None) -> tuple[Tensor, Tensor]:
        """Return training (N, d) and test (T, d) representations, averaged or of whole images."""
        if averaged is not None:
            return averaged.train, averaged.test
        return self.train.features.representation, self.test.features.representation

    def measure(self, predicted: Tensor, logits: Tensor | None = None) -> dict[str, float]:
        """Compare predictions for the test split with its labels, in per cent."""
        return measure_accuracies(
            self.test.labels, predicted=predicted, logits=logits, balanced=self.balanced
        )
