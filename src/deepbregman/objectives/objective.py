"""The interface of a method of self-supervised learning."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from deepbregman.config import EncoderSettings, ObjectiveSettings
from deepbregman.method.networks import Encoder, build_projection

Gather = Callable[[Tensor], Tensor]
"""Joins (M, n, d) of every process to (M, N, d), with gradient; one process has nothing to join."""


T = TypeVar("T")


class ViewGroups(NamedTuple, Generic[T]):
    """One value for each group of views, such as the views themselves, (M, n, 3, S, S)."""

    main: T  #: what every method sees
    weak: T | None = None  #: for a teacher
    small: T | None = None  #: parts of the image (multi-crop)


class Samples(NamedTuple):
    """Data about the images of the joint batch, in the order of the embeddings.

    Each is None unless the method asks for it, by a field of its settings or by drawing.
    """

    indices: Tensor | None = None  #: (N,) places in the dataset, by ``needs_indices``
    labels: Tensor | None = None  #: (N,) classes from 0, by ``needs_labels``
    random: Tensor | None = None  #: what ``Objective.draw`` drew, the same in every process
    first: int = 0  #: where in the joint batch this process's images begin


class Outputs(NamedTuple):
    """The outputs of a method for a batch."""

    terms: dict[str, Tensor]  #: scalar losses of the joint batch, named as in ``weights``
    student: Tensor  #: (M, N, d) embeddings of every process, with gradient
    teacher: Tensor | None  #: (M', N, d) targets of every process, detached; None without a teacher
    representation: Tensor  #: (M, n, h) of this process, detached, for diagnostics


class Group(NamedTuple):
    """Parameters that the optimiser treats alike."""

    parameters: Iterable[tuple[str, nn.Parameter]]  #: name and parameter
    rate: float = 1.0  #: factor of the learning rate
    scheduled: bool = True  #: whether the rate follows the schedule
    decayed: bool = True  #: whether weight decay may apply
    frozen_until: float = 0.0  #: share of training during which the rate is 0


def build_head(encoder: Encoder, widths: EncoderSettings) -> nn.Sequential:
    """Build the projection that the settings describe."""
    return build_projection(
        encoder.num_features,
        widths.projection_hidden,
        widths.embedding,
        widths.projection_norm,
        widths.projection_layers,
        widths.projection_output_norm,
    )


def build_predictor(widths: EncoderSettings, hidden: int, output_norm: bool = False) -> nn.Module:
    """Build a head from embeddings to embeddings, with one hidden layer."""
    width = widths.embedding
    return build_projection(width, hidden, width, output_norm=output_norm)


OBJECTIVES: dict[str, Callable[[Any, Encoder, EncoderSettings], "Objective"]] = {}
"""``objective.name`` -> the class, made from its settings, an encoder and the heads' widths."""


class Objective(nn.Module):
    """A method: it owns the networks and turns views into loss terms.

    ``class MoCo(Objective, settings=MoCoSettings)`` is the method of these settings: a
    configuration with their name trains it.

    All that it needs to go on is in its state: heads, teacher, queue. Networks see this process's
    images, so that batch normalisation inside them can be synchronised; losses see the joint batch.

    Args:
        encoder: image -> h; what one keeps.
        projection: h -> z.
        weights: of each loss term in the total; ``forward`` returns terms of exactly these names.
    """

    mixed = False
    """Whether networks run in bfloat16 where that is safe; the builder sets it."""
    momentum = 0.99
    """Momentum of the method's teacher. The copy of a divergence's prototypes has it, too."""
    teaches_same_views = False
    """Whether the teacher's target m comes from the same view as the student's embedding m."""

    def __init_subclass__(cls, settings: type[ObjectiveSettings] | None = None) -> None:
        super().__init_subclass__()
        if settings is not None:
            OBJECTIVES[settings.name] = cls

    def __init__(
        self, encoder: Encoder, projection: nn.Sequential, weights: dict[str, float]
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.weights = weights

    def size_by(self, num_images: int, num_classes: int) -> None:
        """Make what has the size of the data, such as a memory bank; before training or loading.

        Args:
            num_classes: of them, 0 unless the method needs labels.
        """

    def draw(
        self, num_images: int, *, device: torch.device, generator: torch.Generator
    ) -> Tensor | None:
        """Draw the randomness of one call; every process draws the same.

        Args:
            num_images: in the joint batch.
            generator: to draw from, and from nothing else.
        """
        return None

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Compute the loss terms of a batch.

        Args:
            views: of this process's images.
            samples: of the joint batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward(views, gather, samples)")

    def after_step(self, progress: float) -> None:
        """Update what no gradient moves: a momentum teacher, a queue; equally on every process.

        ``progress`` is the share of the training steps that are done, up to 1.
        """

    def parameter_groups(self) -> list[Group]:
        """List the parameters to train; one group unless some need a rate of their own."""
        return [Group(self.named_parameters())]

    def set_apart(
        self, part: str, scheduled: bool = True, frozen_until: float = 0.0
    ) -> list[Group]:
        """List the parameters with those of one part in a group of their own; see :class:`Group`.

        Args:
            frozen_until: share of training during which the part stays as it is.
        """
        named = list(self.named_parameters())
        mine = [pair for pair in named if pair[0].startswith(f"{part}.")]
        rest = [pair for pair in named if not pair[0].startswith(f"{part}.")]
        return [Group(rest), Group(mine, scheduled=scheduled, frozen_until=frozen_until)]

    def metrics(self) -> dict[str, Tensor]:
        """Return scalars to log after each epoch, such as a learned temperature."""
        return {}

    def autocast(self) -> AbstractContextManager[None]:
        """Return the precision context: for networks, and for scores if a method has very many."""
        kind = self.encoder.mean.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.mixed)

    def join_student(self) -> nn.Sequential:
        """Return encoder and projection as one network, of which a teacher is a copy."""
        return nn.Sequential(self.encoder, self.projection)

    def embed_by(self, teacher: nn.Module, views: Tensor, gather: Gather) -> Tensor:
        """Embed views (M, n, 3, S, S) by a teacher and join all processes': (M, N, d), detached."""
        with self.autocast():
            z: Tensor = teacher(views.flatten(0, 1))
        return gather(z.view(*views.shape[:2], -1)).detach()

    def embed(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Pass views (M, n, 3, S, S) through the networks; return h (M, n, h) and z (M, n, d)."""
        with self.autocast():
            h = self.encoder(views.flatten(0, 1))
            z = self.projection(h)
        return h.unflatten(0, views.shape[:2]), z.unflatten(0, views.shape[:2])

    def embed_with_small(
        self, views: ViewGroups[Tensor], gather: Gather
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return h (M, n, h) and z (M, N, d) of the main views, and z (V, N, d) of all views."""
        h, z = self.embed(views.main)
        z = gather(z)
        if views.small is None:
            return h, z, z
        return h, z, torch.cat([z, gather(self.embed(views.small)[1])])

    def apply_head(self, head: nn.Module, z: Tensor) -> Tensor:
        """Pass embeddings (M, n, d) through a further head, all at once."""
        with self.autocast():
            found: Tensor = head(z.flatten(0, 1))
        return found.view(*z.shape[:2], -1)


def list_pairs(num_views: int) -> list[tuple[int, int]]:
    """List the pairs of view and target: each view with the target of every other view."""
    # Not itertools.permutations, which torch 2.7 does not compile.
    return [(i, j) for i in range(num_views) for j in range(num_views) if i != j]
