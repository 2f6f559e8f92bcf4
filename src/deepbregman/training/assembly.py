"""The one place where the configuration meets the method and the data."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import Config
from deepbregman.data import Batches, Images, Source, open_batches, open_source
from deepbregman.errors import UserError
from deepbregman.launching import current_process
from deepbregman.method.base_network import (
    Encoder,
    build_encoder,
    build_projection,
    measure_width,
)
from deepbregman.method.divergence_network import BregmanNetwork
from deepbregman.method.losses import Losses, TotalLoss
from deepbregman.method.model import Model
from deepbregman.method.transformation import Views


def open_data(config: Config, source: str | None = None) -> Source:
    """Open a run's source, or another one in its place, with the run's settings.

    A folder without a test split has one set aside; which images depends on the folder alone, so
    that runs of several seeds are judged by the same.
    """
    return open_source(
        source or config.data.source,
        root=Path(config.data.root),
        image_size=config.data.image_size,
        skip_unreadable=config.data.skip_unreadable,
    )


def batches_of(images: Images, config: Config, device: torch.device) -> Batches:
    """Bring images to a device, resident or streamed, with the run's settings."""
    return open_batches(
        images,
        device,
        resident=config.data.resident,
        num_workers=config.data.workers,
        local_processes=current_process().local_processes,
        skip_unreadable=config.data.skip_unreadable,
    )


def build_views(config: Config) -> Views:
    """Build box 1."""
    views = config.views
    return Views(
        config.view_size,
        num_views=views.num_views,
        crop_area=views.crop_area,
        crop_aspect=views.crop_aspect,
        flip=views.flip,
        jitter=views.jitter,
        jitter_probability=views.jitter_probability,
        greyscale=views.greyscale,
        blur=views.blur,
        blur_sigma=views.blur_sigma,
        rotation=views.rotation,
        without=views.without,
    )


def build_encoder_of(
    config: Config,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    deviation: Sequence[float] = (1.0, 1.0, 1.0),
    trunk: nn.Module | None = None,
) -> Encoder:
    """Build the encoder that a configuration names, untrained; see :func:`build_model`."""
    name, image_size = config.encoder.name, config.data.image_size
    pixels = (mean, deviation) if config.encoder.normalise_pixels else ()
    if trunk is None and name == "custom":
        raise UserError(
            "encoder.name is 'custom': the encoder is a module of yours, which cannot be named on "
            "the command line; give it in Python, as `encoder=` of deepbregman.pretrain, resume, "
            "load_encoder, evaluate, embed, export, search or cluster"
        )
    if trunk is not None and name != "custom":
        raise UserError(
            f"an encoder was given, but encoder.name is {name!r}: leave the argument out, or name "
            "a run that was trained with an encoder of your own"
        )
    try:
        if trunk is None:
            encoder = build_encoder(name, image_size, config.encoder.stem, *pixels)
        else:
            own = copy.deepcopy(trunk).cpu()
            encoder = Encoder(own, measure_width(own, image_size), *pixels)
    except (ValueError, ImportError) as error:
        what = f"encoder.name is {name!r}" if trunk is None else "the encoder given cannot be used"
        raise UserError(f"{what}: {error}") from None
    if config.view_size != image_size:
        try:
            measure_width(encoder.trunk, config.view_size)  # a transformer may know one size only
        except ValueError as error:
            raise UserError(
                f"views.relative_size is {config.views.relative_size} and encoder.name {name!r}: "
                f"{error}; set views.relative_size to 1.0, for views of {image_size} px as the "
                "images"
            ) from None
    return encoder


def untrained_encoder(
    trained: Encoder,
    config: Config,
    mean: Sequence[float],
    deviation: Sequence[float],
    seed: int,
) -> Encoder:
    """Build an encoder of a trained one's structure with first weights of its own.

    A module of the user's own is copied, and each of its parts draws its weights anew.

    Args:
        trained: of the run; left as it is.
        config: of the run.
        mean: of the pixels, by channel.
        deviation: likewise.
        seed: of the weights.

    Raises:
        UserError: When a part of the user's module has weights and no way to draw them.
    """
    own = trained.trunk if config.encoder.name == "custom" else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = build_encoder_of(config, mean, deviation, own)
        if own is not None:
            _draw_anew(encoder.trunk)
    return encoder


def _draw_anew(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
        elif next(part.parameters(recurse=False), None) is not None:
            raise UserError(
                f"the encoder given has weights in {name or 'itself'} ({type(part).__name__}) that "
                "cannot be drawn anew, and an untrained encoder is compared with: give that class "
                "a method reset_parameters, as those of torch.nn have"
            )


def build_model(
    config: Config,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    deviation: Sequence[float] = (1.0, 1.0, 1.0),
    trunk: nn.Module | None = None,
) -> Model:
    """Build boxes 2 and 3, untrained.

    Args:
        config: of the run.
        mean: of the training pixels, by channel; without effect when pixels are not normalised.
        deviation: likewise.
        trunk: (N, 3, H, W) -> (N, d), the user's own; a copy is used, its weights as they are.
    """
    encoder = build_encoder_of(config, mean, deviation, trunk)
    projection = build_projection(
        encoder.num_features,
        config.encoder.projection_hidden,
        config.encoder.embedding,
        config.encoder.projection_norm,
    )
    divergence = config.divergence
    network = None
    if divergence.weight > 0.0:
        network = BregmanNetwork(
            config.encoder.embedding,
            divergence.num_subnetworks,
            divergence.hidden,
            norm=divergence.norm,
            activation="relu" if divergence.activation == "relu" else None,
            dropout=divergence.dropout,
            normalise_input=divergence.normalise_input,
        )
    return Model(encoder, projection, network)


def build_loss(config: Config) -> TotalLoss:
    """Build box 4."""
    divergence = config.divergence
    return TotalLoss(
        contrastive=config.contrastive.loss,
        temperature=config.contrastive.temperature,
        contrastive_weight=config.contrastive.weight,
        divergence_weight=divergence.weight,
        kernel=divergence.kernel,
        sigma=divergence.sigma,
        alpha=divergence.alpha,
        learn_sigma=divergence.learn_sigma,
        pairs=divergence.pairs,
        divergence_temperature=divergence.temperature,
        smoothing=divergence.smoothing,
        usage_bonus=divergence.usage_bonus,
        sets=divergence.sets,
        contrastive_sets=config.contrastive.sets,
    )


class StepOutputs(NamedTuple):
    """What one step hands to the loop: losses to descend, and detached tensors to diagnose."""

    losses: Losses
    representation: Tensor  # (M, N, d) of this process
    embedding: Tensor  # (M, N, 128) of every process
    scores: Tensor | None  # (M, N, K) of every process


class Objective(nn.Module):
    """Algorithm 1 of the paper: views, networks, losses.

    Args:
        views: box 1.
        model: boxes 2 and 3.
        loss: box 4.
        gather: joins (M, n, d) tensors of all processes to (M, N, d), with gradient; the loss of
            several processes is then the loss of their joint batch.
        mixed: run the networks, and nothing else, in bfloat16 where it is safe to.
    """

    def __init__(
        self,
        views: Views,
        model: Model,
        loss: TotalLoss,
        gather: Callable[[Tensor], Tensor] | None = None,
        mixed: bool = False,
    ) -> None:
        super().__init__()
        self.views = views
        self.model = model
        self.loss = loss
        self.gather = gather
        self.mixed = mixed

    def forward(self, images: Tensor, sizes: Tensor | None, uniforms: Tensor) -> StepOutputs:
        """Compute the losses of a batch.

        Args:
            images: (N, 3, H, W) uint8.
            sizes: (N, 2) true sizes of padded images, or None.
            uniforms: (M, N, R), the randomness of the views.
        """
        views = self.views(images, sizes, uniforms)  # (M, N, 3, S, S)
        grid = views.shape[:2]
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=self.mixed):
            h, z, scores = self.model(views.flatten(0, 1))  # one forward pass for all views
        h, z = h.unflatten(0, grid), z.unflatten(0, grid)  # (M, N, d)
        scores = None if scores is None else scores.unflatten(0, grid)  # (M, N, K)
        if self.gather is not None:
            z = self.gather(z)
            scores = None if scores is None else self.gather(scores)
        losses = self.loss(z, scores)
        return StepOutputs(
            losses, h.detach(), z.detach(), None if scores is None else scores.detach()
        )


def build_objective(
    config: Config,
    mean: Sequence[float],
    deviation: Sequence[float],
    gather: Callable[[Tensor], Tensor] | None = None,
    mixed: bool = False,
    trunk: nn.Module | None = None,
) -> Objective:
    """Build everything that is trained, its initial weights drawn from the configuration's seed.

    Args:
        config: of the run.
        mean: of the training pixels, by channel.
        deviation: likewise.
        gather: see :class:`Objective`.
        mixed: see :class:`Objective`.
        trunk: see :func:`build_model`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(config, mean, deviation, trunk)
    return Objective(build_views(config), model, build_loss(config), gather, mixed)
