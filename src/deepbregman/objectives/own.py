"""Parts of a run that are the user's own code, which no configuration can name.

A configuration says ``custom`` where one belongs. Such a run is trained and resumed from Python
only, where the part is given again.
"""

import contextlib
import difflib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from deepbregman.config import Config, EncoderSettings
from deepbregman.errors import UserError, abbreviate
from deepbregman.method.networks import Encoder
from deepbregman.method.views import Views

from .divergence import DivergenceTerm
from .objective import Objective, Outputs

Augment = Callable[..., Tensor]
"""Turns a batch of uint8 images (n, 3, H, W), on its device, into one view of each."""
MakeObjective = Callable[[Encoder, EncoderSettings], Objective]
"""Builds a method around an encoder; a class with such a constructor is one."""
VIEW_TABLES = ("views", "weak_views", "small_views")
HOOKS = ("size_by", "draw", "after_step", "parameter_groups", "metrics")
"""Methods of an objective that training calls and that a subclass need not have."""


class OwnParts(NamedTuple):
    """The parts that a user has given."""

    encoder: nn.Module | None = None
    """(N, 3, H, W) -> (N, d); a copy is used, its weights as they are."""
    augment: "Augment | Mapping[str, Augment] | None" = None
    """Makes the main views, or the views of each table that is named."""
    objective: MakeObjective | None = None

    @property
    def augments(self) -> dict[str, Augment]:
        """The code that makes views, by the name of their table."""
        if self.augment is None:
            return {}
        if isinstance(self.augment, Mapping):
            return dict(self.augment)
        return {"views": self.augment}

    def as_changes(self) -> dict[str, Any]:
        """Return the fields that mark these parts as the user's own in a configuration."""
        changes: dict[str, Any] = {}
        if self.encoder is not None:
            if not isinstance(self.encoder, nn.Module):
                raise UserError(
                    f"encoder is {abbreviate(self.encoder)}: give a torch.nn.Module, or name an "
                    'encoder of the package by changes={"encoder.name": "resnet18"}'
                )
            changes |= {"encoder.name": "custom", "encoder.stem": "auto"}
        for table, augment in self.augments.items():
            if table not in VIEW_TABLES or not callable(augment):
                wrong = table if table not in VIEW_TABLES else augment
                raise UserError(
                    f"augment has {abbreviate(wrong)}: give one callable, or a mapping from "
                    f"{', '.join(VIEW_TABLES)} to callables"
                )
            changes[f"{table}.custom"] = True
        if self.objective is not None:
            if not callable(self.objective) or isinstance(self.objective, nn.Module):
                raise UserError(
                    f"objective is {abbreviate(self.objective)}: give a subclass of "
                    "deepbregman.Objective, or a function that makes one of the encoder and the "
                    "widths of the heads; a method of the package is a recipe"
                )
            changes["objective.name"] = "custom"
        return changes

    def describe(self) -> dict[str, str]:
        """Name the code of each part, for the record."""
        parts = {"encoder": self.encoder, "objective": self.objective, **self.augments}
        return {name: _name_of(part) for name, part in parts.items() if part is not None}

    def check(self, config: Config) -> None:
        """Refuse a run whose parts are not all given, and parts that a run does not have."""
        custom = {f"{table}.custom" for table, group in config.view_groups.items() if group.custom}
        custom |= {"objective.name"} if config.objective.name == "custom" else set()
        given = {f"{table}.custom" for table in self.augments}
        given |= {"objective.name"} if self.objective is not None else set()
        for name in sorted(custom ^ given):
            argument = "objective" if name == "objective.name" else "augment"
            if name in custom:
                raise UserError(
                    f"{name} says that this part is your own code, which the command line cannot "
                    f"name: give it in Python, as `{argument}=` to deepbregman.pretrain or resume"
                )
            raise UserError(
                f"`{argument}=` was given for {name.partition('.')[0]}, but the run has no such "
                "part of your own: leave the argument out, or start a new run with it"
            )

    def build_objective(self, config: Config, encoder: Encoder) -> Objective:
        """Build the user's method; ``objective.weight`` multiplies all its terms."""
        assert self.objective is not None  # check has made sure
        made = self.objective(encoder, config.encoder)
        if not isinstance(made, Objective) or not made.weights:
            raise UserError(
                f"the objective given makes {type(made).__name__} with weights of "
                f"{', '.join(getattr(made, 'weights', {})) or 'no term'}: it must make a "
                "deepbregman.Objective with the weight of each of its loss terms"
            )
        if made.encoder is not encoder:
            raise UserError(
                "the objective given has another encoder than it was given: pass the encoder on to "
                "Objective.__init__"
            )
        _check_forward(made)
        _check_hooks(type(made))
        for name, value in vars(made).items():
            if isinstance(value, Tensor):
                raise UserError(
                    f"{type(made).__name__} keeps the tensor {name!r} of shape "
                    f"{tuple(value.shape)} as a plain attribute, which checkpoints do not save and "
                    f"no device gets: write self.register_buffer({name!r}, ...) instead"
                )
        made.weights = {
            name: config.objective.weight * float(weight) for name, weight in made.weights.items()
        }
        return made


def check_outputs(outputs: object, name: str, term_names: Sequence[str]) -> None:
    """Refuse what the ``forward`` of a method of the user's own must not return.

    Args:
        name: of the method's class.
        term_names: of its loss terms.
    """
    if not isinstance(outputs, Outputs):
        raise UserError(
            f"{name}.forward returned {type(outputs).__name__}: it must return deepbregman."
            "Outputs(terms, student, teacher, representation)"
        )
    is_dict = isinstance(outputs.terms, dict)
    if not is_dict or set(outputs.terms) != set(term_names):
        found = ", ".join(outputs.terms) if is_dict else _describe(outputs.terms)
        raise UserError(
            f"{name}.forward returned the loss terms {found}: they must be a dict of "
            f"{', '.join(term_names)}, the names in weights"
        )
    for term, value in outputs.terms.items():
        if not isinstance(value, Tensor) or value.ndim:
            raise UserError(
                f"{name}.forward returned the loss term {term!r} as {_describe(value)}: it must "
                "be a scalar tensor; take its mean, without .item() or float()"
            )
    embeddings = "(M, N, d), the embeddings of M views of N images"
    for part, views, rule in (
        ("student", outputs.student, embeddings),
        ("teacher", outputs.teacher, f"{embeddings}, or None"),
        ("representation", outputs.representation, "(M, n, h), the first output of embed"),
    ):
        is_left_out = part == "teacher" and views is None
        if not is_left_out and (not isinstance(views, Tensor) or views.ndim != 3):
            raise UserError(
                f"{name}.forward returned {part} as {_describe(views)}: it must be a tensor of "
                f"shape {rule}"
            )


def _describe(value: object) -> str:
    """Name the type of a value, and the shape of a tensor."""
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"


def check_divergence_inputs(
    outputs: Outputs, name: str, divergence: DivergenceTerm, is_taught: bool
) -> None:
    """Refuse embeddings of a method of the user's own that the divergence cannot compare.

    Args:
        name: of the method's class.
        is_taught: whether a teacher beside the method gives the divergence its targets.
    """
    num_views, width = len(outputs.student), outputs.student.shape[-1]
    if width != divergence.in_features:
        raise UserError(
            f"{name} makes embeddings of width {width}, and the divergence beside it takes "
            f"{divergence.in_features}, by encoder.embedding: build the head with "
            "deepbregman.build_head, or leave the divergence out with divergence.weight 0"
        )
    if is_taught:
        return
    if outputs.teacher is not None:
        if outputs.teacher.shape[1:] != outputs.student.shape[1:]:
            raise UserError(
                f"{name}.forward returned teacher of shape {tuple(outputs.teacher.shape)} "
                f"beside a student of shape {tuple(outputs.student.shape)}: a divergence "
                "compares them, so both must be embeddings of the same images, of the same "
                "width, and gathered from all processes"
            )
    elif divergence.needs_target or num_views < 2:
        needs = "targets" if divergence.needs_target else "two views to compare"
        raise UserError(
            f"{name}.forward returned None as teacher and {num_views} views as student, and "
            f"the divergence beside it needs {needs}: return them, add a [teacher] table, or "
            "leave the divergence out with divergence.weight 0"
        )


def _check_forward(made: Objective) -> None:
    """Refuse a method that training cannot call."""
    name = type(made).__name__
    if type(made).forward is Objective.forward:
        raise UserError(f"{name} has no forward(views, gather, samples): write it")
    signature = inspect.signature(made.forward)
    try:
        signature.bind("views", "gather", "samples")
    except TypeError:
        taken = ", ".join(map(str, signature.parameters.values()))
        raise UserError(
            f"{name}.forward takes ({taken}): training calls forward(views, gather, samples), and "
            "passes these three by position"
        ) from None


def _check_hooks(kind: type[Objective]) -> None:
    """Refuse a method whose name is nearly that of one which training calls: it would do nothing.

    A class that has the right one too may have both.
    """
    absent = [name for name in HOOKS if getattr(kind, name) is getattr(Objective, name)]
    for name in dir(kind):
        meant = difflib.get_close_matches(name, absent, n=1, cutoff=0.85)
        is_own = callable(getattr(kind, name)) and not hasattr(Objective, name)
        if meant and is_own and not name.startswith("_"):
            raise UserError(
                f"{kind.__name__} has a method {name}, which training does not call; it calls "
                f"{meant[0]}: rename it, or give it a name that is less like that"
            )


def _name_of(part: object) -> str:
    named = part if inspect.isroutine(part) or isinstance(part, type) else type(part)
    return f"{named.__module__}.{getattr(named, '__qualname__', type(named).__name__)}"


class OwnViews(nn.Module):
    """Views by the user's own code, in the place of :class:`~deepbregman.Views`.

    Each call is seeded by the run's seed and the step: torch's generators of the CPU and of the
    device, Python's ``random`` and NumPy's. Transforms of torchvision draw one set of numbers for
    a whole batch, so they are called image by image, each image with a seed of its own: their
    views do not depend on how many processes share a batch. Any other callable gets the batch of a
    process at once.
    """

    def __init__(self, augment: Augment, size: int, num_views: int, table: str = "views") -> None:
        super().__init__()
        self.augment = augment
        self.size, self.num_views, self.table = size, num_views, table
        self.one_by_one = _is_of_torchvision(augment)
        self.takes_sizes = not self.one_by_one and _takes_sizes(augment)
        self.checked = False
        # Not by a decorator, which would load the compiler, for seconds, with this module.
        whole = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]  # torch's
        self.forward = whole  # type: ignore[method-assign]  # as torch's documentation does it

    def draw(
        self,
        num_images: int,
        *,
        device: torch.device | str,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw a seed for each view of each image: (M, num_images, 1), on the host.

        A generator of another device is not drawn from: a new one on the host gets its seed.
        """
        if generator is not None and generator.device.type != "cpu":
            generator = torch.Generator().manual_seed(generator.initial_seed())
        shape = (self.num_views, num_images, 1)
        return torch.randint(2**62, shape, generator=generator)

    @torch.no_grad()
    def forward(
        self, images: Tensor, sizes: Tensor | None = None, uniforms: Tensor | None = None
    ) -> Tensor:
        """Make M views of each image; see :meth:`deepbregman.Views.forward`."""
        if sizes is not None and not (self.one_by_one or self.takes_sizes):
            raise UserError(
                "the images have different sizes, and lie in frames of one size: let augment take "
                "a second argument `sizes`, (n, 2) with the height and width of each, or give "
                "transforms of torchvision.transforms.v2"
            )
        if uniforms is None:
            uniforms = self.draw(len(images), device=images.device)
        seeds: list[list[int]] = uniforms[..., 0].tolist()
        with _own_randomness(images.device):
            views = [self._make_view(images, sizes, each) for each in seeds]
        return torch.stack(views)  # (M, n, 3, size, size)

    def _make_view(self, images: Tensor, sizes: Tensor | None, seeds: list[int]) -> Tensor:
        if not self.one_by_one:
            _seed_everything(seeds[0], images.device)
            arguments = (images, sizes) if self.takes_sizes else (images,)
            return self._accept(self._call(*arguments), len(images))
        corners = [tuple(images.shape[-2:])] * len(images) if sizes is None else sizes.tolist()
        made = []
        for image, (height, width), seed in zip(images, corners, seeds, strict=True):
            _seed_everything(seed, images.device)
            made.append(self._accept_type(self._call(image[:, :height, :width])))
        return self._accept(torch.stack(made))

    def _call(self, images: Tensor, *sizes: Tensor) -> Any:
        """Call the user's code; if it fails, add the shape of its input to the error."""
        try:
            return self.augment(images, *sizes)
        except Exception as error:
            error.add_note(
                f"augment was called with a uint8 tensor of shape {tuple(images.shape)} on "
                f"{images.device}. It must take such a tensor. Transforms that take PIL images fit "
                "behind torchvision.transforms.v2.ToPILImage in a v2.Compose."
            )
            raise

    def _accept_type(self, found: Any) -> Tensor:
        if not isinstance(found, Tensor):
            advice = "leave out transforms that make PIL images"
            if isinstance(found, list | tuple):
                advice = "it is called once for each view"
            raise UserError(
                f"augment returned a {type(found).__name__}: it must return one tensor, uint8 or "
                f"float in [0, 1]; {advice}"
            )
        return found.as_subclass(Tensor)  # torchvision's own kinds of tensors stay outside

    def _accept(self, found: Any, count: int | None = None) -> Tensor:
        """Check what the user's code returned, and bring it to float32 in [0, 1]."""
        view = self._accept_type(found)
        count = len(view) if count is None else count
        wanted = (count, 3, self.size, self.size)
        if tuple(view.shape) != wanted:
            raise UserError(
                f"augment returned a view of shape {tuple(view.shape)}: {wanted} is expected, with "
                f"the side by data.image_size and {self.table}.relative_size; let it crop or "
                f"resize to {self.size}"
            )
        view = view.float() / 255 if view.dtype == torch.uint8 else view.to(torch.float32)
        if not self.checked:  # once: it waits for the device
            low, high = view.min().item(), view.max().item()
            if not (low >= -1e-3 and high <= 1 + 1e-3):
                raise UserError(
                    f"augment returned values from {low:.3g} to {high:.3g}: a view is uint8, or "
                    "float in [0, 1]; leave out Normalize, since the encoder normalises pixels "
                    "itself"
                )
            self.checked = True
        return view.contiguous()


AnyViews = Views | OwnViews
"""Code that makes the views of a group."""


def _is_of_torchvision(augment: Augment) -> bool:
    """Whether a callable is, or is made of, transforms of torchvision; without importing it."""
    parts = augment.modules() if isinstance(augment, nn.Module) else (augment,)
    return any(
        kind.__module__.startswith("torchvision.transforms")
        for part in parts
        for kind in type(part).__mro__
    )


def _takes_sizes(augment: Augment) -> bool:
    called = augment.forward if isinstance(augment, nn.Module) else augment
    try:
        return "sizes" in inspect.signature(called).parameters
    except (TypeError, ValueError):  # the callable is not written in Python
        return False


def _seed_everything(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Put the global random states back at the end of the block: dropout draws from one of them."""
    python, numpy = random.getstate(), np.random.get_state()
    here = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=here):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
