"""Build what a configuration describes: views, encoder, objective, divergence."""

import copy
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from deepbregman.config import METHODS, Config, EncoderSettings, ViewSettings
from deepbregman.errors import UserError, first_line
from deepbregman.method.networks import ColourTrunk, Encoder, build_encoder, measure_width
from deepbregman.method.views import Views

from .divergence import DivergenceTerm
from .objective import OBJECTIVES, Gather, Objective, ViewGroups
from .own import VIEW_TABLES, AnyViews, OwnParts, OwnViews
from .rotation import RotationTerm
from .step import Step, gather_alone


def build_views(settings: ViewSettings, image_size: int) -> Views:
    """Build what makes a group of views."""
    fields = asdict(settings)
    del fields["relative_size"], fields["custom"]  # Views has no such parameters
    return Views(settings.side(image_size), **fields)


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
            "encoder.name is 'custom': the encoder is your own module, which the command line "
            "cannot name; give it in Python, as `encoder=` to the function"
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
            own = _copy(trunk).cpu()
            encoder = Encoder(own, measure_width(own, image_size), *pixels)
    except (ValueError, ImportError) as error:
        what = f"encoder.name is {name!r}" if trunk is None else "the encoder given cannot be used"
        raise UserError(f"{what}: {error}") from None
    encoder.patch = config.objective.patch_side(config.view_size)
    _check_view_sizes(encoder, config)
    return encoder


def _copy(trunk: nn.Module) -> nn.Module:
    """Copy a module of the user's; refuse one that training cannot use."""
    wanted = torch.get_default_dtype()
    kinds = [each.dtype for each in trunk.parameters() if each.is_floating_point()]
    if odd := [kind for kind in kinds if kind != wanted]:
        raise ValueError(f"its weights are {odd[0]}, and must be {wanted}: give its .to({wanted})")
    try:
        return copy.deepcopy(trunk)
    except RuntimeError as error:  # tensors that were computed, as torch's old weight_norm has
        raise ValueError(f"it cannot be copied: {first_line(error)}") from error


def _check_view_sizes(encoder: Encoder, config: Config) -> None:
    """Refuse views of a size that the encoder does not take: a transformer may know one only."""
    image_size = config.data.image_size
    for group in config.view_groups.values():
        size = group.side(image_size)
        if size == image_size:
            continue
        try:
            measure_width(encoder.trunk, size)
        except ValueError as error:
            raise UserError(
                f"{group.table}.relative_size is {group.relative_size} and encoder.name "
                f"{config.encoder.name!r}: {error}; set {group.table}.relative_size to 1.0, for "
                f"views of {image_size} px as the images"
            ) from None


def build_untrained_encoder(
    trained: Encoder,
    config: Config,
    mean: Sequence[float],
    deviation: Sequence[float],
    seed: int,
) -> Encoder:
    """Build an encoder with the structure of a trained one, and new random weights.

    A module of the user's own is copied, and each of its parts draws its weights anew; a part that
    cannot is refused.
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
                "cannot be made random again, and the run is compared with an untrained encoder: "
                "give that class a method reset_parameters, as those of torch.nn have"
            )


def _find_objective(name: str) -> Callable[[Any, Encoder, EncoderSettings], Objective]:
    """Return the class of a method; one of ours is in the module of its name."""
    module = f"{__package__}.{name}"
    if name not in OBJECTIVES and importlib.util.find_spec(module) is not None:
        importlib.import_module(module)
    if name not in OBJECTIVES:
        raise UserError(
            f"objective.name is {name!r}: the method has settings, but no objective; import the "
            f"module with `class ...(Objective, settings={METHODS[name].__name__})` first"
        )
    return OBJECTIVES[name]


def build_step(
    config: Config,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    deviation: Sequence[float] = (1.0, 1.0, 1.0),
    gather: Gather = gather_alone,
    mixed: bool = False,
    own: OwnParts = OwnParts(),  # noqa: B008  # immutable
    num_images: int = 0,
    num_classes: int = 0,
    prepare: Callable[[Encoder], None] | None = None,
) -> Step:
    """Build all that is trained, its initial weights drawn from the configuration's seed.

    Args:
        mean: of the training pixels, by channel; without effect when pixels are not normalised.
        deviation: likewise.
        gather: joins (M, n, d) tensors of all processes to (M, N, d), with gradient; the loss of
            several processes is then the loss of their joint batch.
        mixed: run the networks, and nothing else, in bfloat16 where it is safe to.
        own: what the user has given instead of parts that a configuration names.
        num_images: to train on, for a method that remembers each of them.
        num_classes: of them, for a method that learns from labels.
        prepare: called with the encoder before anything is made from it, to give it weights.
    """
    own.check(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = build_run_encoder(config, mean, deviation, own.encoder)
        if prepare is not None:
            prepare(encoder)
        if own.objective is None:
            make = _find_objective(config.objective.name)
            objective = make(config.objective, encoder, config.encoder)
        else:
            objective = own.build_objective(config, encoder)
        objective.size_by(num_images, num_classes)
        divergence = None
        if config.divergence.is_on:
            divergence = DivergenceTerm(config.divergence, config.encoder.embedding)
        rotation = None
        if config.rotation is not None:
            rotation = RotationTerm(config.rotation, encoder.num_features)
    objective.mixed = mixed
    size = config.data.image_size

    def build(table: str) -> AnyViews | None:
        group = config.view_groups.get(table)
        if group is None:
            return None
        if table in own.augments:
            side = group.side(size)
            return OwnViews(own.augments[table], side, group.num_views, table)
        return build_views(group, size)

    main, weak, small = map(build, VIEW_TABLES)
    assert main is not None  # every configuration has main views
    teacher = None if divergence is None else config.teacher
    return Step(ViewGroups(main, weak, small), objective, divergence, gather, teacher, rotation)
