"""Configuration: frozen dataclasses to and from TOML, and every check of a value; no torch.

A rule stands beside its field as an annotation and is enforced on construction, so a ``Config``
that exists is valid wherever it came from: a recipe, the command line or Python.
"""

import dataclasses
import importlib.resources
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import tomli_w
import tyro

from .errors import UserError, abbreviate, suggest

LARGEST = 1e30
"""Of any number: float32 ends at 3e38, and numbers get multiplied."""


@dataclass(frozen=True)
class Range:
    """The rule for a number, or for each number of a tuple."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    increasing: bool = False
    """A (low, high) pair must be in that order."""

    def broken_by(self, value: Any) -> str | None:
        """Say which part of the rule the value breaks, or None."""
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(_is_finite(number) for number in numbers):
            return "it must be finite"
        if any(abs(number) > LARGEST for number in numbers):
            return f"it must be at most {LARGEST:g}"
        if any(number <= self.above or not self.low <= number <= self.high for number in numbers):
            return f"it must be {self._words()}"
        if self.increasing and list(numbers) != sorted(numbers):
            return "it must go from low to high"
        return None

    def _words(self) -> str:
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"between {self.low:g} and {self.high:g}"
        bounds = [
            f"above {self.above:g}" if math.isfinite(self.above) else "",
            f"{self.low:g} or more" if math.isfinite(self.low) else "",
            f"at most {self.high:g}" if math.isfinite(self.high) else "",
        ]
        return " and ".join(filter(None, bounds))


@dataclass(frozen=True)
class Name:
    """The rule for a name: one of those known here, or one that another library knows."""

    known: tuple[str, ...]
    prefix: str
    """What a name of the other library begins with."""

    def broken_by(self, value: str) -> str | None:
        """Say that the name is none, with the nearest one, or None."""
        if value in self.known or (value.startswith(self.prefix) and value != self.prefix):
            return None
        foreign = f"{self.prefix}{value.rpartition(':')[2]}"  # a prefix misspelt, or left out
        guess = suggest(value, (*self.known, foreign))
        return f"it must be one of {', '.join(self.known)}, or {self.prefix}NAME{guess}"


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        return False


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has the type of its field; a whole number will do for a float."""
    if get_origin(hint) is Annotated:
        return has_type(value, get_args(hint)[0])
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is UnionType:
        return any(has_type(value, kind) for kind in get_args(hint))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if items[-1] is Ellipsis:
            return all(has_type(item, items[0]) for item in value)
        return len(value) == len(items) and all(map(has_type, value, items))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    """Name a type for the reader of an error."""
    if get_origin(hint) is Annotated:
        return describe(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is UnionType:
        return " or ".join(map(describe, get_args(hint)))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return f"a list, each item {describe(items[0])}"
        return f"a list of {len(items)} items, each {describe(items[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]


def find_broken_rule(value: Any, hint: Any) -> str | None:
    """Say which rule of its annotation a value of the right type breaks, or None."""
    if get_origin(hint) is tuple:
        items = get_args(hint)
        hints = items[:1] * len(value) if items[-1] is Ellipsis else items
        return next(filter(None, map(find_broken_rule, value, hints)), None)
    if get_origin(hint) is Annotated:
        rules = [rule for rule in hint.__metadata__ if isinstance(rule, Range | Name)]
        words = next(filter(None, (rule.broken_by(value) for rule in rules)), None)
        return words or find_broken_rule(value, get_args(hint)[0])
    if hint is str:
        if "\0" in value:
            return "it must not hold a null character"
        try:
            value.encode()
        except UnicodeEncodeError:  # a file's name in another encoding, as the shell passed it
            return "it must be valid Unicode; rename the file or folder"
    return None


class Section:
    """A table of the configuration that checks its own fields by their annotations."""

    table: ClassVar[str] = ""
    """How the table is called in TOML and in errors."""

    def __init_subclass__(cls, table: str | None = None) -> None:
        """Name the table; by default after the class, without ``Settings``."""
        words = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Settings")).lower()
        cls.table = table or words

    def __post_init__(self) -> None:
        """Check every field."""
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            if get_origin(hint) is ClassVar:
                continue
            value, where = getattr(self, name), f"{self.table}.{name}"
            if isinstance(value, list):  # as TOML has it, and JSON
                value = tuple(value)
                object.__setattr__(self, name, value)
            if not has_type(value, hint):
                choices = map(str, get_args(hint)) if get_origin(hint) is Literal else ()
                guess = suggest(value, choices) if isinstance(value, str) else ""
                raise UserError(
                    f"{where} is {abbreviate(value)}: it must be {describe(hint)}{guess}"
                )
            words = find_broken_rule(value, hint)
            if words:
                raise UserError(f"{where} is {abbreviate(value)}: {words}")


Count = Annotated[int, Range(low=1)]
Whole = Annotated[int, Range(low=0)]
Share = Annotated[float, Range(0.0, 1.0)]
Positive = Annotated[float, Range(above=0.0)]
NotNegative = Annotated[float, Range(low=0.0)]
Chances = Annotated[float | tuple[float, ...], Range(0.0, 1.0)]
"""A probability of all views, or one of each."""
Operator = Literal["crop", "rotation", "flip", "jitter", "greyscale", "blur", "solarise"]
Sets = Literal["none", "halves", "rest"]


@dataclass(frozen=True)
class DataSettings(Section):
    """Where the images come from."""

    source: Annotated[str, tyro.conf.arg(aliases=["--data"])] = "cifar10"
    """digits, cifar10, cifar100, stl10, tiny-imagenet, imagenet, isic2018 (see `deepbregman data
    list`), a folder of images, or an .npz file."""
    root: str = "data"
    """Folder in which the datasets that are known by name lie or are put."""
    image_size: Annotated[int, Range(low=4)] = 32
    """Side in pixels of a whole image where it is judged; of a view, times views.relative_size."""
    holdout: Annotated[float, Range(0.0, 0.9)] = 0.0
    """Share of the training images kept from pretraining, for the kNN monitor and for choices."""
    resident: Literal["auto", "yes", "no"] = "auto"
    """Keep all images on the device, stream them, or decide by the memory that is free."""
    workers: Whole = 16
    """Most processes that decode when images are streamed; never more than a process has CPUs."""
    skip_unreadable: Annotated[bool, tyro.conf.arg(aliases=["--skip-unreadable"])] = False
    """Leave out images that cannot be read, and count them, instead of stopping."""


@dataclass(frozen=True)
class ViewSettings(Section, table="views"):
    """A group of random views of each image."""

    num_views: Count = 2
    """Views of each image in a batch."""
    relative_size: Annotated[float, Range(above=0.0, high=1.0)] = 1.0
    """Side of a view as a share of data.image_size. A crop enlarges things: in views of 0.75
    they are about as large as in whole images."""
    crop_area: Annotated[tuple[float, float], Range(above=0.0, high=1.0, increasing=True)] = (
        0.2,
        1.0,
    )
    """Share of the area that a random crop keeps, from and to."""
    crop_aspect: Annotated[tuple[float, float], Range(above=0.0, increasing=True)] = (0.75, 4 / 3)
    """Aspect ratio of a random crop, from and to."""
    flip: Share = 0.5
    """Probability of a horizontal flip."""
    jitter: Annotated[tuple[float, float, float, float], Range(low=0.0)] = (0.4, 0.4, 0.4, 0.1)
    """Strength of the jitter of brightness, contrast, saturation and hue."""
    jitter_probability: Share = 0.8
    """Probability of a colour jitter."""
    greyscale: Share = 0.2
    """Probability of greyscale."""
    blur: Chances = 0.0
    """Probability of a Gaussian blur; a list has one for each view in turn."""
    blur_sigma: Annotated[tuple[float, float], Range(above=0.0, increasing=True)] = (0.1, 2.0)
    """Width of the blur in pixels, from and to."""
    rotation: Annotated[float, Range(0.0, 180.0)] = 0.0
    """Largest rotation in degrees, either way."""
    solarise: Chances = 0.0
    """Probability of inverting what is brighter than half; a list has one for each view in turn."""
    without: tuple[Operator, ...] = ()
    """Operators to leave out, by name."""

    def __post_init__(self) -> None:
        """Check the fields, and the hue, whose circle ends at one half."""
        super().__post_init__()
        if self.jitter[3] > 0.5:
            raise UserError(f"{self.table}.jitter is {self.jitter!r}: its hue must be 0.5 or less")
        for name in ("blur", "solarise"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.num_views:
                raise UserError(
                    f"{self.table}.{name} is {abbreviate(list(value))} with {self.table}.num_views "
                    f"{self.num_views}: give one probability, or one for each view"
                )

    def side(self, image_size: int) -> int:
        """Return the side of a view in pixels."""
        return int(self.relative_size * image_size + 0.5)


@dataclass(frozen=True)
class WeakViewSettings(ViewSettings, table="weak_views"):
    """Views for a teacher: crop and flip only, unless said otherwise."""

    num_views: Count = 1
    jitter_probability: Share = 0.0
    greyscale: Share = 0.0


@dataclass(frozen=True)
class SmallViewSettings(ViewSettings, table="small_views"):
    """Small crops that see a part of the image (multi-crop)."""

    num_views: Count = 6
    relative_size: Annotated[float, Range(above=0.0, high=1.0)] = 0.5
    crop_area: Annotated[tuple[float, float], Range(above=0.0, high=1.0, increasing=True)] = (
        0.05,
        0.4,
    )


@dataclass(frozen=True)
class EncoderSettings(Section):
    """The base network and its projection."""

    name: Annotated[
        str, Name(("resnet18", "resnet34", "resnet50", "resnet101", "small", "custom"), "timm:")
    ] = "resnet18"
    """resnet18, resnet34, resnet50, resnet101, small (four convolutions, for thumbnails on a CPU),
    or timm:NAME, any architecture of timm; custom is a module of your own, given in Python."""
    stem: Literal["auto", "thumbnail", "standard"] = "auto"
    """First layers of a ResNet: auto keeps the resolution of images of up to 64 px."""
    normalise_pixels: bool = True
    """Normalise pixels by the mean and deviation of the training images."""
    projection_hidden: Count = 1024
    """Width of the projection's hidden layer."""
    projection_norm: bool = True
    """Batch-normalise the projection's hidden layers."""
    projection_layers: Annotated[int, Range(low=2)] = 2
    """Linear layers of the projection."""
    projection_output_norm: bool = False
    """Batch-normalise the embedding as well, without a learnt gain and shift."""
    embedding: Count = 128
    """Width of the embedding z."""

    def __post_init__(self) -> None:
        """Check the fields, and that a stem is chosen only where there is a choice."""
        super().__post_init__()
        if self.stem != "auto" and self.name.startswith(("timm:", "custom")):
            raise UserError(
                f"encoder.stem is {self.stem!r} with encoder.name {self.name!r}: only the ResNets "
                "known by name have a choice of stem; leave it at auto"
            )


@dataclass(frozen=True)
class ObjectiveSettings(Section, table="objective"):
    """The method that trains the encoder; each method has a class of settings of its own."""

    groups: ClassVar[tuple[str, ...]] = ()
    """Optional groups of views that the method takes: ``weak_views``, ``small_views``."""
    fewest_views: ClassVar[int] = 2
    """Views of the main group that the method needs."""
    needs_labels: ClassVar[bool] = False
    """Whether the method learns from labels."""
    needs_indices: ClassVar[bool] = False
    """Whether the method must know which image of the dataset is which."""
    has_teacher: ClassVar[bool] = False
    """Whether the method returns targets of a teacher of its own."""

    name: str = ""
    """Of the method."""
    weight: NotNegative = 1.0
    """Of the method's own loss in the total; lambda of the paper."""

    def check_with(self, config: "Config") -> None:
        """Check what the method needs of the other tables."""

    @property
    def colour_space(self) -> str | None:
        """Where brightness and colours are split, if each has an encoder of its own."""
        return None


@dataclass(frozen=True)
class SimCLRSettings(ObjectiveSettings, table="objective"):
    """A contrastive loss on the embeddings of two or more views."""

    name: Literal["simclr"] = "simclr"
    """Of the method."""
    weight: NotNegative = 5.0
    """Of the contrastive loss; lambda of the paper."""
    loss: Literal["nt_xent", "nt_logistic"] = "nt_xent"
    """Which loss."""
    temperature: Positive = 0.1
    """tau."""
    sets: Sets = "none"
    """What is compared of an image's views: each with each (none), the mean of one half with the
    mean of the other (halves), or each with the mean of all the others (rest)."""


@dataclass(frozen=True)
class BarlowTwinsSettings(ObjectiveSettings, table="objective"):
    """The cross-correlation of the embeddings of two views, driven to the identity."""

    name: Literal["barlow_twins"] = "barlow_twins"
    """Of the method."""
    off_diagonal: NotNegative = 0.0051
    """Weight of the correlations between different components; lambda of its paper."""


@dataclass(frozen=True)
class VICRegSettings(ObjectiveSettings, table="objective"):
    """Variance, invariance and covariance of the embeddings."""

    name: Literal["vicreg"] = "vicreg"
    """Of the method."""
    invariance: NotNegative = 25.0
    """Weight of the squared distance of two views."""
    variance: NotNegative = 25.0
    """Weight of the hinge that keeps the deviation of every component at 1 or more."""
    covariance: NotNegative = 1.0
    """Weight of the squared covariances between components."""


@dataclass(frozen=True)
class WMSESettings(ObjectiveSettings, table="objective"):
    """The distance of two views after whitening."""

    name: Literal["wmse"] = "wmse"
    """Of the method."""
    whitening_batch: Annotated[int, Range(low=2)] = 128
    """Images that are whitened together; twice encoder.embedding is a good value."""
    rounds: Count = 1
    """Random partitions of a batch into whitening batches over which the loss is averaged."""
    shrinkage: Share = 0.0
    """Share of the identity in the covariance that is inverted."""

    def check_with(self, config: "Config") -> None:
        """Check that there are enough images to whiten."""
        width, size = config.encoder.embedding, config.training.batch_size
        if self.whitening_batch <= width:
            raise UserError(
                f"objective.whitening_batch is {self.whitening_batch} with encoder.embedding "
                f"{width}: fewer images than {width + 1} have no covariance that can be inverted; "
                "raise the first, better to twice the second, or lower the second"
            )
        if size % self.whitening_batch:
            raise UserError(
                f"objective.whitening_batch is {self.whitening_batch} with training.batch_size "
                f"{size}: the batch must be a multiple of it"
            )


def _check_two_views(config: "Config") -> None:
    if config.divergence.is_on and config.views.num_views < 2 and config.teacher is None:
        raise UserError(
            f"divergence.weight is {config.divergence.weight:g} with views.num_views "
            f"{config.views.num_views}: the divergence compares views, and the method "
            f"{config.objective.name} makes one embedding of each; set views.num_views to 2 or "
            "more, or divergence.weight to 0"
        )


STAGED = ("resnet18", "resnet34", "resnet50", "resnet101", "small")
"""Encoders that give feature maps and take images of any size."""


def _check_parts(config: "Config") -> None:
    if config.encoder.name not in STAGED:
        raise UserError(
            f"objective.name is {config.objective.name!r} with encoder.name "
            f"{config.encoder.name!r}: the method looks at parts of images, which only "
            f"{', '.join(STAGED)} can; choose one of them"
        )


@dataclass(frozen=True)
class SupervisedSettings(ObjectiveSettings, table="objective"):
    """Cross-entropy with labels, as a reference."""

    needs_labels = True
    fewest_views = 1
    name: Literal["supervised"] = "supervised"
    """Of the method."""
    label_smoothing: Annotated[float, Range(0.0, 0.99)] = 0.0
    """Share of the label that is spread over all classes."""

    def check_with(self, config: "Config") -> None:
        """Check that a divergence has two views to compare."""
        _check_two_views(config)


@dataclass(frozen=True)
class SupConSettings(ObjectiveSettings, table="objective"):
    """A contrastive loss with labels, as a reference."""

    needs_labels = True
    name: Literal["supcon"] = "supcon"
    """Of the method."""
    temperature: Positive = 0.1
    """tau."""


@dataclass(frozen=True)
class DeepDivergenceSettings(ObjectiveSettings, table="objective"):
    """A divergence learned from labels, as a reference."""

    needs_labels = True
    fewest_views = 1
    name: Literal["deep_divergence"] = "deep_divergence"
    """Of the method."""
    form: Literal["max", "smooth", "moment"] = "moment"
    """Of its divergence: Eq. 6 (max), the smooth form, or the distance of means (moment)."""
    loss: Literal["contrastive", "triplet"] = "contrastive"
    """On pairs of samples, or on triplets."""
    margin: Positive = 1.0
    """By which samples of two classes are to be apart."""
    num_subnetworks: Count = 100
    """Of its divergence; those of the [divergence] table are others."""
    hidden: Count = 32
    """Width of a subnetwork's hidden layer."""

    def check_with(self, config: "Config") -> None:
        """Check that a divergence has two views to compare."""
        _check_two_views(config)


@dataclass(frozen=True)
class InstDiscSettings(ObjectiveSettings, table="objective"):
    """Every image is a class of its own, kept in a memory."""

    needs_indices = True
    has_teacher = True  # the memory's vectors are targets
    fewest_views = 1
    name: Literal["instdisc"] = "instdisc"
    """Of the method."""
    loss: Literal["nce", "softmax"] = "nce"
    """Judge each pair by itself, own or noise, as the paper does; or find the own vector among the
    others (softmax), which stands higher learning rates."""
    temperature: Positive = 0.1
    """tau."""
    negatives: Count = 4096
    """Images of the memory that a batch is compared with, drawn at each step."""
    momentum: Share = 0.5
    """Share of its vector that the memory keeps when it sees an image."""
    proximal: NotNegative = 0.0
    """Weight of the squared distance between an embedding and its vector in the memory."""


@dataclass(frozen=True)
class PIRLSettings(ObjectiveSettings, table="objective"):
    """An image and its jigsaw puzzle are told alike; the second view becomes the puzzle."""

    needs_indices = True
    has_teacher = True  # the memory's vectors are targets
    name: Literal["pirl"] = "pirl"
    """Of the method."""
    grid: Annotated[int, Range(low=2)] = 3
    """Cells of the puzzle along each side; 2 for images of 32 px."""
    patch: Annotated[float, Range(above=0.0, high=1.0)] = 0.85
    """Side of a patch as a share of its cell, in which it lies at random."""
    temperature: Positive = 0.07
    """tau."""
    negatives: Count = 4096
    """Images of the memory that a batch is compared with, drawn at each step."""
    momentum: Share = 0.5
    """Share of its vector that the memory keeps when it sees an image."""
    puzzle_share: Share = 0.5
    """Weight of the puzzle's loss; the image's own has the rest."""

    def patch_side(self, view_size: int) -> int:
        """Return the side of a patch in pixels."""
        return int(self.patch * (view_size // self.grid) + 0.5)

    def check_with(self, config: "Config") -> None:
        """Check that there are two views, large enough to be cut, and that the encoder suits."""
        _check_parts(config)
        if config.views.num_views != 2:
            raise UserError(
                f"views.num_views is {config.views.num_views}: the method pirl takes 2, a whole "
                "one and the one that becomes a puzzle"
            )
        if (side := self.patch_side(config.view_size)) < 2:
            raise UserError(
                f"objective.grid is {self.grid} with views of {config.view_size} px: patches would "
                f"have {side} px a side, and must have 2 or more; lower it, or raise objective."
                "patch or data.image_size"
            )


@dataclass(frozen=True)
class CMCSettings(ObjectiveSettings, table="objective"):
    """The brightness of an image and its colours are two views of it."""

    needs_indices = True
    fewest_views = 1
    name: Literal["cmc"] = "cmc"
    """Of the method."""
    space: Literal["lab", "ycbcr"] = "lab"
    """In which brightness and colours are split."""
    loss: Literal["nce", "softmax"] = "nce"
    """Judge each pair by itself, own or noise, as the paper does; or find the own vector among the
    others (softmax), which stands higher learning rates."""
    temperature: Positive = 0.07
    """tau."""
    negatives: Count = 16384
    """Images of the memories that a batch is compared with, drawn at each step."""
    momentum: Share = 0.5
    """Share of its vectors that the memory keeps when it sees an image."""

    def check_with(self, config: "Config") -> None:
        """Check that the encoder can be built twice."""
        _check_parts(config)

    @property
    def colour_space(self) -> str:
        """Where brightness and colours are split."""
        return self.space


@dataclass(frozen=True)
class DIMSettings(ObjectiveSettings, table="objective"):
    """The whole of an image fits its parts (Deep InfoMax)."""

    fewest_views = 1
    name: Literal["dim"] = "dim"
    """Of the method."""
    loss: Literal["jsd", "info_nce"] = "jsd"
    """Estimate of the information: by Jensen and Shannon, or by InfoNCE."""

    def check_with(self, config: "Config") -> None:
        """Check that the encoder suits, and that a divergence has two views to compare."""
        _check_parts(config)
        _check_two_views(config)


@dataclass(frozen=True)
class AMDIMSettings(ObjectiveSettings, table="objective"):
    """The whole of one view fits the parts of another, at two scales."""

    name: Literal["amdim"] = "amdim"
    """Of the method."""
    clip: Positive = 20.0
    """c; a score s becomes c tanh(s / c)."""
    penalty: NotNegative = 0.04
    """Weight of the mean square of the scores."""

    def check_with(self, config: "Config") -> None:
        """Check that the encoder suits."""
        _check_parts(config)


@dataclass(frozen=True)
class CPCSettings(ObjectiveSettings, table="objective"):
    """What lies above in an image predicts the patches below."""

    fewest_views = 1
    name: Literal["cpc"] = "cpc"
    """Of the method."""
    patch: Annotated[float, Range(above=0.0, high=1.0)] = 0.25
    """Side of a patch as a share of the view's; patches overlap by half."""
    steps: Count = 3
    """Rows below that are predicted, after the one that overlaps."""
    directions: Annotated[int, Range(1, 4)] = 4
    """In which images are read: from the top alone, or from further sides as well."""
    layers: Count = 4
    """Blocks of a context network."""
    negatives: Count = 1024
    """Patches of the batch that a prediction is compared with, drawn at each step."""

    def patch_side(self, view_size: int) -> int:
        """Return the side of a patch in pixels."""
        return int(self.patch * view_size + 0.5)

    def check_with(self, config: "Config") -> None:
        """Check that there are rows to predict, and two views for a divergence to compare."""
        _check_parts(config)
        _check_two_views(config)
        size, side = config.view_size, self.patch_side(config.view_size)
        rows = (size - side) // (side // 2) + 1 if side >= 2 else 0
        if rows < self.steps + 2:
            raise UserError(
                f"objective.patch is {self.patch:g} with views of {size} px and objective.steps "
                f"{self.steps}: patches of {side} px make {rows} rows, and {self.steps + 2} or "
                "more are needed; lower objective.steps, or set objective.patch so that a patch "
                "has 2 px or more and more patches fit"
            )


def _check_queue(queue: int, config: "Config") -> None:
    batch = config.training.batch_size
    if queue < batch:
        raise UserError(
            f"objective.queue is {queue} with training.batch_size {batch}: the queue of the method "
            f"{config.objective.name} must hold a batch or more; raise it, or lower the batch size"
        )


@dataclass(frozen=True)
class SimSiamSettings(ObjectiveSettings, table="objective"):
    """Each view predicts the embedding of the other, which gets no gradient."""

    name: Literal["simsiam"] = "simsiam"
    """Of the method."""
    predictor_hidden: Count = 512
    """Width of the predictor's hidden layer."""


@dataclass(frozen=True)
class NNCLRSettings(ObjectiveSettings, table="objective"):
    """A contrastive loss whose positive is the nearest neighbour in a queue."""

    name: Literal["nnclr"] = "nnclr"
    """Of the method."""
    temperature: Positive = 0.2
    """tau."""
    predictor_hidden: Count = 4096
    """Width of the predictor's hidden layer."""
    queue: Count = 65536
    """Embeddings of past batches among which a neighbour is looked for."""

    def check_with(self, config: "Config") -> None:
        """Check that the queue holds a batch."""
        _check_queue(self.queue, config)


@dataclass(frozen=True)
class SwAVSettings(ObjectiveSettings, table="objective"):
    """Each view predicts which prototypes another view of the image is assigned to."""

    groups = ("small_views",)
    name: Literal["swav"] = "swav"
    """Of the method."""
    prototypes: Count = 3000
    """K, the number of prototypes."""
    temperature: Positive = 0.1
    """Of the predictions."""
    assignment_temperature: Positive = 0.05
    """Of the assignments; epsilon of the paper."""
    assignment_rounds: Count = 3
    """Of evening out how often each prototype is assigned (Sinkhorn)."""
    queue: Whole = 3840
    """Embeddings of past batches that are assigned with the batch, for batches smaller than the
    number of prototypes; 0 has none."""
    queue_from: Share = 0.05
    """Share of training after which the queue is used."""
    freeze_prototypes: Share = 0.002
    """Share of training during which the prototypes stay as they are."""

    def check_with(self, config: "Config") -> None:
        """Check that the queue, where there is one, holds a batch."""
        if self.queue:
            _check_queue(self.queue, config)


@dataclass(frozen=True)
class MomentumSettings(ObjectiveSettings, table="objective"):
    """A method with a teacher, a copy of the networks that follows them slowly."""

    has_teacher = True
    momentum: Share = 0.99
    """Share of its weights that the teacher keeps at a step, at the start of training."""
    final_momentum: Share = 1.0
    """The same at the end; in between it follows a cosine."""


@dataclass(frozen=True)
class BYOLSettings(MomentumSettings, table="objective"):
    """Each view predicts how the teacher embeds the other."""

    name: Literal["byol"] = "byol"
    """Of the method."""
    predictor_hidden: Count = 4096
    """Width of the predictor's hidden layer."""


@dataclass(frozen=True)
class MoCoSettings(MomentumSettings, table="objective"):
    """A contrastive loss to the teacher's keys; versions 2, 2+ and 3 are settings of it."""

    name: Literal["moco"] = "moco"
    """Of the method."""
    temperature: Positive = 0.2
    """tau."""
    queue: Whole = 32768
    """Keys of past batches that are the negatives; 0 takes the batch's keys instead."""
    symmetric: bool = True
    """Let each view be query and key in turn; false: the first is the query, as in version 2."""
    predictor_hidden: Whole = 0
    """Width of the hidden layer of the queries' predictor; 0 has none."""

    def check_with(self, config: "Config") -> None:
        """Check that the queue, where there is one, holds a batch."""
        if self.queue:
            _check_queue(self.queue, config)


@dataclass(frozen=True)
class DINOSettings(MomentumSettings, table="objective"):
    """Each view predicts the teacher's distribution over prototypes of another view."""

    groups = ("small_views",)
    name: Literal["dino"] = "dino"
    """Of the method."""
    momentum: Share = 0.9995
    """Share of its weights that the teacher keeps at a step, at the start of training."""
    prototypes: Count = 4096
    """K, the width of the last layer."""
    temperature: Positive = 0.1
    """Of the student."""
    target_temperature: Positive = 0.07
    """Of the teacher: the lower, the sharper."""
    first_target_temperature: Positive = 0.04
    """The same at the start of training."""
    target_warmup: Share = 0.05
    """Share of training over which the teacher's temperature rises from one to the other."""
    centre_momentum: Share = 0.9
    """Share of the old centre of the teacher's scores that a step keeps."""
    freeze_prototypes: Share = 0.001
    """Share of training during which the prototypes stay as they are."""


@dataclass(frozen=True)
class RelationSettings(MomentumSettings, table="objective"):
    """A method whose views relate to past images as the teacher says of a weak view."""

    groups = ("weak_views",)
    fewest_views = 1
    temperature: Positive = 0.1
    """Of the student."""
    target_temperature: Positive = 0.04
    """Of the teacher: the lower, the sharper."""
    queue: Count = 4096
    """Past embeddings of the teacher that views relate to."""

    def check_with(self, config: "Config") -> None:
        """Check that there are weak views, and that the queue holds a batch."""
        if config.weak_views is None:
            raise UserError(
                f"objective.name is {self.name!r} without [weak_views], the views that its teacher "
                "sees: add them, such as with --weak-views.num-views 1"
            )
        _check_queue(self.queue, config)


@dataclass(frozen=True)
class ReSSLSettings(RelationSettings, table="objective"):
    """Each view relates to past images as the teacher says of a weak view."""

    name: Literal["ressl"] = "ressl"
    """Of the method."""


@dataclass(frozen=True)
class SCESettings(RelationSettings, table="objective"):
    """The relations of ReSSL with InfoNCE, in one soft target."""

    name: Literal["sce"] = "sce"
    """Of the method."""
    final_momentum: Share = 0.99
    """Share of its weights that the teacher keeps at the end."""
    target_temperature: Positive = 0.05
    """Of the teacher: the lower, the sharper."""
    coefficient: Share = 0.5
    """Share of InfoNCE in the target; the rest are the relations."""


@dataclass(frozen=True)
class SSLHSICSettings(MomentumSettings, table="objective"):
    """Embeddings depend on which image it is, and little on each other."""

    name: Literal["ssl_hsic"] = "ssl_hsic"
    """Of the method."""
    gamma: NotNegative = 3.0
    """Weight of the self-dependence."""
    kernel_scale: Positive = 3.0
    """c of the inverse multiquadric kernel c / sqrt(c^2 + distance^2)."""
    features: Count = 512
    """Random Fourier features by which the kernel is estimated."""
    predictor_hidden: Count = 4096
    """Width of the predictor's hidden layer."""


METHODS: dict[str, type[ObjectiveSettings]] = {
    "amdim": AMDIMSettings,
    "barlow_twins": BarlowTwinsSettings,
    "byol": BYOLSettings,
    "cmc": CMCSettings,
    "cpc": CPCSettings,
    "deep_divergence": DeepDivergenceSettings,
    "dim": DIMSettings,
    "dino": DINOSettings,
    "instdisc": InstDiscSettings,
    "moco": MoCoSettings,
    "nnclr": NNCLRSettings,
    "pirl": PIRLSettings,
    "ressl": ReSSLSettings,
    "sce": SCESettings,
    "simclr": SimCLRSettings,
    "simsiam": SimSiamSettings,
    "ssl_hsic": SSLHSICSettings,
    "supcon": SupConSettings,
    "supervised": SupervisedSettings,
    "swav": SwAVSettings,
    "vicreg": VICRegSettings,
    "wmse": WMSESettings,
}
"""``objective.name`` -> the class of its settings."""


@dataclass(frozen=True)
class DivergenceSettings(Section):
    """The divergence network and its loss, which any method can carry."""

    weight: NotNegative = 1.0
    """Weight of the divergence loss; 0 turns it off."""
    source: Literal["learned", "bank", "prototypes"] = "learned"
    """Where the subnetworks come from: learned (the paper), a bank of the teacher's last
    embeddings, or learned prototypes of which the teacher has a copy."""
    compare: Literal["contrast", "match"] = "contrast"
    """Contrast an image's own divergence with those to other images (the paper), or match: lower
    the divergence of each view to the teacher's target of the same image."""
    num_subnetworks: Count = 100
    """K, the paper's kappa; the size of the bank."""
    hidden: Count = 32
    """Width of a subnetwork's hidden layer."""
    norm: Literal["output", "standard", "hidden", "none"] = "output"
    """Where a subnetwork is batch-normalised: its output with a learnt gain (output) or without,
    so that scores keep the scale that smoothing and temperature are set for (standard)."""
    activation: Literal["none", "relu"] = "none"
    """Between a subnetwork's layers."""
    dropout: Annotated[float, Range(0.0, 0.99)] = 0.0
    """On a subnetwork's hidden layer."""
    normalise_input: bool = False
    """L2-normalise z before the subnetworks."""
    kernel: Literal["gaussian", "inverse", "sqrt", "linear", "arccot", "negative"] = "gaussian"
    """psi, which turns a divergence into a similarity."""
    sigma: Positive = 1.5
    """Width of the gaussian kernel."""
    alpha: Positive = 1.0
    """Slope of the arccot kernel."""
    learn_sigma: bool = False
    """Train sigma, starting from its value here."""
    pairs: Literal["views", "all"] = "views"
    """Compare view 1 with view 2 (the paper), or every sample with every other."""
    temperature: Positive = 1.0
    """tau_div, divides psi; 1 is the paper, which has none."""
    smoothing: NotNegative = 0.0
    """Temperature T of the smooth divergence; 0 is the hard form of the paper."""
    target_smoothing: NotNegative = 0.0
    """Temperature of the teacher's scores when the smooth form is matched; 0 takes that of
    smoothing. Lower is sharper."""
    centring: Literal["none", "mean", "sinkhorn"] = "none"
    """What keeps the teacher's scores from one favourite: nothing, taking away the mean of the
    batch, or evening out the use of all subnetworks."""
    info_nce: NotNegative = 0.0
    """Weight of InfoNCE between a view and the teacher's target, with the bank as negatives: the
    control of the matched divergence."""
    usage_bonus: NotNegative = 0.0
    """Weight of the bonus on using all subnetworks alike."""
    sets: Sets = "none"
    """Which of an image's views are taken as an empirical distribution: none, so that each is
    compared with each; one half against the other (halves); all the others of each (rest)."""
    warmup_epochs: NotNegative = 0.0
    """Epochs over which the weight rises from 0."""

    def __post_init__(self) -> None:
        """Check the fields, and that InfoNCE has its negatives."""
        super().__post_init__()
        if self.info_nce > 0.0 and self.source != "bank":
            raise UserError(
                f"divergence.info_nce is {self.info_nce} with divergence.source {self.source!r}: "
                "its negatives are the bank's; set divergence.source to bank"
            )

    @property
    def is_on(self) -> bool:
        """Whether the term is there at all."""
        return self.weight > 0.0 or self.info_nce > 0.0

    @property
    def needs_target(self) -> bool:
        """Whether the term compares with a teacher."""
        return self.is_on and (self.source != "learned" or self.compare == "match")


@dataclass(frozen=True)
class TeacherSettings(Section):
    """A momentum copy of encoder and projection, beside a method that has no teacher of its own.

    It sees the weak views and gives the divergence its targets.
    """

    momentum: Share = 0.99
    """Share of its weights that the teacher keeps at each step; 0 copies the student."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the momentum: cosine rises to 1 at the end of training."""


@dataclass(frozen=True)
class OptimiserSettings(Section):
    """How the parameters move."""

    name: Literal["adam", "adamw", "sgd", "lars", "muon"] = "adam"
    """Algorithm; muon is for the convolutions of networks with batch normalisation, and sgd for
    all other parameters."""
    learning_rate: Positive = 0.005
    """At its highest; never scaled behind your back."""
    convolution_rate: Positive = 0.02
    """Of muon's convolutions, at its highest: the share by which a step turns the weights. It
    follows the same schedule."""
    betas: Annotated[tuple[float, float], Range(0.0, 0.99999)] = (0.5, 0.999)
    """Of adam and adamw."""
    momentum: Annotated[float, Range(0.0, 0.99999)] = 0.9
    """Of sgd, lars and muon."""
    weight_decay: NotNegative = 1e-4
    """L2 penalty (decoupled in adamw)."""
    decay_all: bool = True
    """Decay biases and normalisation parameters as well; lars never adapts to them."""
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """Of the learning rate."""
    warmup_epochs: NotNegative = 0.0
    """Epochs over which the learning rate rises from 0."""
    milestones: tuple[Count, ...] = ()
    """Epochs at which the step schedule multiplies the learning rate by step_factor."""
    step_factor: Positive = 0.1
    """Factor at each milestone."""

    def __post_init__(self) -> None:
        """Check the fields, and that milestones and schedule agree."""
        super().__post_init__()
        if bool(self.milestones) != (self.schedule == "step"):
            raise UserError(
                f"optimiser.milestones is {list(self.milestones)} with optimiser.schedule "
                f"{self.schedule!r}: the step schedule needs milestones, the others take none"
            )


@dataclass(frozen=True)
class TrainingSettings(Section):
    """The loop."""

    epochs: Count = 400
    """Passes over the training images."""
    batch_size: Annotated[int, Range(low=2)] = 512
    """Images (not views) in one forward pass, over all processes; the last, short batch is left."""
    accumulate: Count = 1
    """Forward passes whose gradients are added up before a step; negatives stay within each."""
    sync_norm: bool = True
    """Batch normalisation over the batch of all processes; false: each over its share."""
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    """auto is bf16-mixed on a GPU and 32-true on a CPU."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """torch.compile the step; auto does on a GPU."""
    checkpoint_every: Whole = 0
    """Keep a checkpoint every so many epochs beside the last one; 0 keeps the last only."""
    save_seconds: NotNegative = 60.0
    """At the end of an epoch, save when the last save is this old; what a crash can cost."""
    skip_nonfinite: Whole = 0
    """Batches of non-finite loss or gradient to leave out before stopping; above 0, steps wait."""
    knn_every: Whole = 5
    """Run the kNN monitor every so many epochs; 0 never."""
    health_every: Whole = 5
    """Judge without labels how training goes every so many epochs, and at the end; 0 never."""
    stop_when_saturated: Annotated[bool, tyro.conf.arg(aliases=["--stop-when-saturated"])] = False
    """End the run early once two judgements in a row say that more epochs bring little."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""


@dataclass(frozen=True)
class Config:
    """Everything a pretraining run depends on."""

    seed: Whole = 0
    """Of initial weights, order and transformation."""
    data: DataSettings = DataSettings()
    views: ViewSettings = ViewSettings()
    weak_views: WeakViewSettings | None = None
    small_views: SmallViewSettings | None = None
    encoder: EncoderSettings = EncoderSettings()
    objective: ObjectiveSettings = SimCLRSettings()
    teacher: TeacherSettings | None = None
    divergence: DivergenceSettings = DivergenceSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    training: TrainingSettings = TrainingSettings()

    def __post_init__(self) -> None:
        """Check what spans sections."""
        if not has_type(self.seed, int) or not 0 <= self.seed < 2**32:
            raise UserError(
                f"seed is {abbreviate(self.seed)}: it must be a whole number from 0 to 2^32 - 1"
            )
        for name, kind in SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name in OPTIONAL):
                raise UserError(f"{name} is {abbreviate(value)}: it must be a {kind.__name__}")
        if self.objective.weight == 0.0 and not self.divergence.is_on:
            raise UserError(
                "objective.weight and divergence.weight are both 0: nothing would be trained; "
                "raise one of them"
            )
        self._check_teacher()
        self._check_views()
        self.objective.check_with(self)
        late = [m for m in self.optimiser.milestones if m >= self.training.epochs]
        if late:
            raise UserError(
                f"optimiser.milestones {late} never come: training.epochs is "
                f"{self.training.epochs}; lower them or train longer"
            )

    def _check_teacher(self) -> None:
        method = self.objective
        if self.divergence.needs_target and self.teacher is None and not method.has_teacher:
            raise UserError(
                f"divergence.source is {self.divergence.source!r} and divergence.compare "
                f"{self.divergence.compare!r}: they need the targets of a teacher, which the "
                f"method {method.name} has not; add a [teacher] table, such as with "
                "--teacher.momentum 0.99, and [weak_views] for what it sees"
            )
        if self.teacher is None:
            return
        if method.has_teacher:
            raise UserError(
                f"[teacher] is given, but the method {method.name} has a teacher of its own: "
                "leave the table out"
            )
        if self.weak_views is None:
            raise UserError(
                "[teacher] is given without [weak_views], the views that it sees: add them, such "
                f"as with --weak-views.relative-size {self.views.relative_size:g}"
            )

    def _check_views(self) -> None:
        objective = self.objective
        if self.views.num_views < objective.fewest_views:
            raise UserError(
                f"views.num_views is {self.views.num_views}: the method {objective.name} needs "
                f"{objective.fewest_views} or more"
            )
        for group in self.view_groups.values():
            takes = objective.groups + (() if self.teacher is None else ("weak_views",))
            if group.table in OPTIONAL and group.table not in takes:
                raise UserError(
                    f"[{group.table}] is given, but the method {objective.name} takes no such "
                    "views: leave the table out, or choose another objective"
                )
            side = group.side(self.data.image_size)
            if side < 4:
                raise UserError(
                    f"{group.table}.relative_size is {group.relative_size} and data.image_size "
                    f"{self.data.image_size}: a view would have {side} pixels a side, and it must "
                    "have 4 or more; raise one of them"
                )

    @property
    def view_groups(self) -> dict[str, ViewSettings]:
        """The groups of views that are made, by the name of their table.

        Without a divergence nobody looks at the teacher, nor at the views that it would see.
        """
        groups = (self.views, self.weak_views, self.small_views)
        idle = self.teacher is not None and not self.divergence.is_on
        return {
            group.table: group
            for group in groups
            if group is not None and not (idle and group is self.weak_views)
        }

    @property
    def view_size(self) -> int:
        """Side of a view of the main group in pixels, while pretraining."""
        return self.views.side(self.data.image_size)


OPTIONAL: dict[str, type[Section]] = {
    "teacher": TeacherSettings,
    "weak_views": WeakViewSettings,
    "small_views": SmallViewSettings,
}
"""Tables that may be left out."""
SECTIONS: dict[str, type[Section]] = {
    name: hint
    for name, hint in (get_type_hints(Config) | OPTIONAL).items()
    if isinstance(hint, type) and issubclass(hint, Section)
}
"""Every table, and the class that it is made into; of the objective, the base of all."""


def _section_class(name: str, values: dict[str, Any]) -> type[Section]:
    """Return the class for a table; the objective's depends on its name."""
    if name != ObjectiveSettings.table:
        return SECTIONS[name]
    method = values.get("name", SimCLRSettings.name)
    if not isinstance(method, str) or method not in METHODS:
        guess = suggest(method, METHODS) if isinstance(method, str) else ""
        raise UserError(
            f"objective.name is {abbreviate(method)}: it must be one of {', '.join(METHODS)}{guess}"
        )
    return METHODS[method]


def from_dict(values: dict[str, Any]) -> Config:
    """Build a configuration from nested tables, as TOML gives them; the rest takes its default."""
    known = [field.name for field in dataclasses.fields(Config)]
    parts: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown field {abbreviate(name)}{suggest(name, known)}")
        if name not in SECTIONS or (value is None and name in OPTIONAL):
            parts[name] = value
            continue
        if not isinstance(value, dict):
            raise UserError(
                f"{name} is {abbreviate(value)}: it is a table of fields, written [{name}]"
            )
        kind: type[Any] = _section_class(name, value)
        fields = [field.name for field in dataclasses.fields(kind)]
        for key in value:
            if key not in fields:
                raise UserError(
                    f"unknown field {abbreviate(f'{name}.{key}')}{suggest(key, fields)}"
                )
        parts[name] = kind(**value)
    return Config(**parts)


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with fields changed by their dotted names.

    Another ``objective.name`` brings the defaults of that method.

    Args:
        config: to start from.
        changes: such as ``{"training.epochs": 10, "seed": 1, "weak_views": None}``.
    """
    values = to_dict(config)
    if changes.get("objective.name", config.objective.name) != config.objective.name:
        values["objective"] = {}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        if field and section in SECTIONS:
            values.setdefault(section, {})[field] = value
        else:
            values[name] = value
    return from_dict(values)


def to_dict(config: Config) -> dict[str, Any]:
    """Turn a configuration into nested tables of plain values; a table that is off is left out."""
    values: dict[str, Any] = dataclasses.asdict(config)
    return {
        key: {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in values.items()
        if value is not None
    }


def fields_of(config: Config) -> dict[str, Any]:
    """Return the value of every field by its dotted name."""
    flat: dict[str, Any] = {}
    for key, value in to_dict(config).items():
        is_section = isinstance(value, dict)
        flat |= {f"{key}.{name}": v for name, v in value.items()} if is_section else {key: value}
    return flat


def differing_fields(*configs: Config) -> dict[str, tuple[Any, ...]]:
    """Return the fields in which configurations are not all equal, with the value of each.

    A field that a configuration does not have, such as another method's, is None there.
    """
    flat = [fields_of(config) for config in configs]
    names = dict.fromkeys(name for each in flat for name in each)
    columns = {name: tuple(each.get(name) for each in flat) for name in names}
    return {
        name: values
        for name, values in columns.items()
        if any(value != values[0] for value in values)
    }


def to_toml(config: Config) -> str:
    """Write a configuration as a complete TOML document."""
    return tomli_w.dumps(to_dict(config))


def from_toml(text: str, origin: str) -> Config:
    """Read a configuration; ``origin`` names the document in errors."""
    try:
        return from_dict(tomllib.loads(text))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    except (ValueError, RecursionError) as error:  # of the syntax, or of the reader's own limits
        raise UserError(f"{origin} is not valid TOML: {error}") from None


def recipes() -> dict[str, str]:
    """Return the text of every named recipe."""
    folder = importlib.resources.files(__package__) / "recipes"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        f.name.removesuffix(".toml"): f.read_text(encoding="utf-8")
        for f in files
        if f.name.endswith(".toml")
    }


def load_recipe(name: str) -> Config:
    """Load a recipe by its name or from a ``.toml`` file."""
    known = recipes()
    if name in known:
        return from_toml(known[name], f"recipe {name}")
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"recipe {name!r} is neither one of {', '.join(known)} nor a .toml file that exists"
            f"{suggest(name, known)}"
        )
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {name!r} is not a text file in UTF-8: {error.reason}") from None
