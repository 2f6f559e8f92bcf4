"""The methods, and how a configuration becomes what is trained.

To add a method: a file here with a subclass of :class:`Objective`, a class of settings in
``config.py`` with a line in ``METHODS``, and a line in :data:`OBJECTIVES`.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepbregman.config import Config, EncoderSettings, ViewSettings
from deepbregman.errors import UserError
from deepbregman.method.networks import ColourTrunk, Encoder, build_encoder, measure_width
from deepbregman.method.views import Views

from .amdim import AMDIM as AMDIM
from .barlow_twins import BarlowTwins as BarlowTwins
from .byol import BYOL as BYOL
from .cmc import CMC as CMC
from .cpc import CPC as CPC
from .deep_divergence import DeepDivergence as DeepDivergence
from .dim import DeepInfoMax as DeepInfoMax
from .dino import DINO as DINO
from .divergence import DivergenceTerm as DivergenceTerm
from .instdisc import InstDisc as InstDisc
from .moco import MoCo as MoCo
from .nnclr import NNCLR as NNCLR
from .objective import Gather as Gather
from .objective import Group as Group
from .objective import Objective as Objective
from .objective import Outputs as Outputs
from .objective import Samples as Samples
from .objective import ViewGroups as ViewGroups
from .pirl import PIRL as PIRL
from .ressl import ReSSL as ReSSL
from .sce import SCE as SCE
from .simclr import SimCLR as SimCLR
from .simsiam import SimSiam as SimSiam
from .ssl_hsic import SSLHSIC as SSLHSIC
from .step import Step as Step
from .step import StepOutputs as StepOutputs
from .step import gather_alone as gather_alone
from .supcon import SupCon as SupCon
from .supervised import Supervised as Supervised
from .swav import SwAV as SwAV
from .vicreg import VICReg as VICReg
from .wmse import WMSE as WMSE

OBJECTIVES: dict[str, Callable[[Any, Encoder, EncoderSettings], Objective]] = {
    "amdim": AMDIM,
    "barlow_twins": BarlowTwins,
    "byol": BYOL,
    "cmc": CMC,
    "cpc": CPC,
    "deep_divergence": DeepDivergence,
    "dim": DeepInfoMax,
    "dino": DINO,
    "instdisc": InstDisc,
    "moco": MoCo,
    "nnclr": NNCLR,
    "pirl": PIRL,
    "ressl": ReSSL,
    "sce": SCE,
    "simclr": SimCLR,
    "simsiam": SimSiam,
    "ssl_hsic": SSLHSIC,
    "supcon": SupCon,
    "supervised": Supervised,
    "swav": SwAV,
    "vicreg": VICReg,
    "wmse": WMSE,
}
"""``objective.name`` -> the class, made from its settings, an encoder and the heads' widths."""


def build_views(settings: ViewSettings, image_size: int) -> Views:
    """Build what makes a group of views.

    Args:
        settings: of the group.
        image_size: side of a whole image.
    """
    return Views(
        settings.side(image_size),
        num_views=settings.num_views,
        crop_area=settings.crop_area,
        crop_aspect=settings.crop_aspect,
        flip=settings.flip,
        jitter=settings.jitter,
        jitter_probability=settings.jitter_probability,
        greyscale=settings.greyscale,
        blur=settings.blur,
        blur_sigma=settings.blur_sigma,
        rotation=settings.rotation,
        solarise=settings.solarise,
        without=settings.without,
    )


def build_run_encoder(
    config: Config,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    deviation: Sequence[float] = (1.0, 1.0, 1.0),
    trunk: nn.Module | None = None,
) -> Encoder:
    """Build the encoder that a configuration names, untrained; see :func:`build_step`."""
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
        if config.objective.colour_space is not None:
            first, second = (build_encoder(name, image_size, config.encoder.stem) for _ in range(2))
            both = ColourTrunk(first.trunk, second.trunk, config.objective.colour_space)
            encoder = Encoder(both, 2 * first.num_features)  # it takes pixels as they are
        elif trunk is None:
            encoder = build_encoder(name, image_size, config.encoder.stem, *pixels)
        else:
            own = copy.deepcopy(trunk).cpu()
            encoder = Encoder(own, measure_width(own, image_size), *pixels)
    except (ValueError, ImportError) as error:
        what = f"encoder.name is {name!r}" if trunk is None else "the encoder given cannot be used"
        raise UserError(f"{what}: {error}") from None
    for group in config.view_groups.values():
        size = group.side(image_size)
        if size == image_size:
            continue
        try:
            measure_width(encoder.trunk, size)  # a transformer may know one size only
        except ValueError as error:
            raise UserError(
                f"{group.table}.relative_size is {group.relative_size} and encoder.name {name!r}: "
                f"{error}; set {group.table}.relative_size to 1.0, for views of {image_size} px as "
                "the images"
            ) from None
    return encoder


def build_untrained_encoder(
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
        encoder = build_run_encoder(config, mean, deviation, own)
        if own is not None:
            _reset_weights(encoder.trunk)
    return encoder


def _reset_weights(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
        elif next(part.parameters(recurse=False), None) is not None:
            raise UserError(
                f"the encoder given has weights in {name or 'itself'} ({type(part).__name__}) that "
                "cannot be drawn anew, and an untrained encoder is compared with: give that class "
                "a method reset_parameters, as those of torch.nn have"
            )


def build_step(
    config: Config,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    deviation: Sequence[float] = (1.0, 1.0, 1.0),
    gather: Gather = gather_alone,
    mixed: bool = False,
    trunk: nn.Module | None = None,
    num_images: int = 0,
    num_classes: int = 0,
) -> Step:
    """Build all that is trained, its initial weights drawn from the configuration's seed.

    Args:
        config: of the run.
        mean: of the training pixels, by channel; without effect when pixels are not normalised.
        deviation: likewise.
        gather: joins (M, n, d) tensors of all processes to (M, N, d), with gradient; the loss of
            several processes is then the loss of their joint batch.
        mixed: run the networks, and nothing else, in bfloat16 where it is safe to.
        trunk: (N, 3, H, W) -> (N, d), the user's own; a copy is used, its weights as they are.
        num_images: to train on, for a method that remembers each of them.
        num_classes: of them, for a method that learns from labels.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = build_run_encoder(config, mean, deviation, trunk)
        objective = OBJECTIVES[config.objective.name](config.objective, encoder, config.encoder)
        objective.size_by(num_images, num_classes)
        divergence = None
        if config.divergence.is_on:
            divergence = DivergenceTerm(config.divergence, config.encoder.embedding)
    objective.mixed = mixed
    size = config.data.image_size
    tables = ("views", "weak_views", "small_views")
    groups = [config.view_groups.get(table) for table in tables]
    main, weak, small = (None if group is None else build_views(group, size) for group in groups)
    assert main is not None  # every configuration has main views
    teacher = None if divergence is None else config.teacher
    return Step(ViewGroups(main, weak, small), objective, divergence, gather, teacher)
