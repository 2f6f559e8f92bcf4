"""Configuration: frozen dataclasses to and from TOML, and every check of a value; no torch.

A rule stands beside its field as an annotation and is enforced on construction, so a ``Config``
that exists is valid wherever it came from: a recipe, the command line or Python.
"""

import dataclasses
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tomli_w
import tyro

from .errors import UserError, abbreviate, suggest
from .rules import Name, Range, Section, matches

Count = Annotated[int, Range(low=1)]
Whole = Annotated[int, Range(low=0)]
Share = Annotated[float, Range(0.0, 1.0)]
Positive = Annotated[float, Range(above=0.0)]
NotNegative = Annotated[float, Range(low=0.0)]
Operator = Literal["crop", "rotation", "flip", "jitter", "greyscale", "blur"]
Sets = Literal["none", "halves", "rest"]


@dataclass(frozen=True)
class Data(Section):
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
    workers: Whole = 2
    """Most processes that decode when images are streamed; never more than a process has CPUs."""
    skip_unreadable: Annotated[bool, tyro.conf.arg(aliases=["--skip-unreadable"])] = False
    """Leave out images that cannot be read, and count them, instead of stopping."""


@dataclass(frozen=True)
class Views(Section):
    """Box 1, the transformation."""

    num_views: Annotated[int, Range(low=2)] = 2
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
    blur: Share = 0.0
    """Probability of a Gaussian blur."""
    blur_sigma: Annotated[tuple[float, float], Range(above=0.0, increasing=True)] = (0.1, 2.0)
    """Width of the blur in pixels, from and to."""
    rotation: Annotated[float, Range(0.0, 180.0)] = 0.0
    """Largest rotation in degrees, either way."""
    without: tuple[Operator, ...] = ()
    """Operators to leave out, by name."""

    def __post_init__(self) -> None:
        """Check the fields, and the hue, whose circle ends at one half."""
        super().__post_init__()
        if self.jitter[3] > 0.5:
            raise UserError(f"views.jitter is {self.jitter!r}: its hue must be 0.5 or less")


@dataclass(frozen=True)
class Encoder(Section):
    """Box 2, the base network and its projection."""

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
    """Batch-normalise the projection's hidden layer."""
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
class Contrastive(Section):
    """The contrastive loss on embeddings."""

    loss: Literal["nt_xent", "nt_logistic"] = "nt_xent"
    """Which loss."""
    temperature: Positive = 0.1
    """tau."""
    weight: NotNegative = 5.0
    """lambda of the paper."""
    sets: Sets = "none"
    """What is compared of an image's views: each with each (none), the mean of one half with the
    mean of the other (halves), or each with the mean of all the others (rest)."""


@dataclass(frozen=True)
class Divergence(Section):
    """Box 3 and the divergence loss."""

    weight: NotNegative = 1.0
    """Weight of the divergence loss; 0 turns it off, which leaves SimCLR."""
    num_subnetworks: Count = 100
    """K, the paper's kappa."""
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
    usage_bonus: NotNegative = 0.0
    """Weight of the bonus on using all subnetworks alike."""
    sets: Sets = "none"
    """Which of an image's views are taken as an empirical distribution: none, so that each is
    compared with each; one half against the other (halves); all the others of each (rest)."""
    warmup_epochs: NotNegative = 0.0
    """Epochs over which the weight rises from 0."""


@dataclass(frozen=True)
class Optimiser(Section):
    """How the parameters move."""

    name: Literal["adam", "adamw", "sgd", "lars"] = "adam"
    """Algorithm."""
    learning_rate: Positive = 0.005
    """At its highest; never scaled behind your back."""
    betas: Annotated[tuple[float, float], Range(0.0, 0.99999)] = (0.5, 0.999)
    """Of adam and adamw."""
    momentum: Annotated[float, Range(0.0, 0.99999)] = 0.9
    """Of sgd and lars."""
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
class Training(Section):
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
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""


@dataclass(frozen=True)
class Config:
    """Everything a pretraining run depends on."""

    seed: Whole = 0
    """Of initial weights, order and transformation."""
    data: Data = Data()
    views: Views = Views()
    encoder: Encoder = Encoder()
    contrastive: Contrastive = Contrastive()
    divergence: Divergence = Divergence()
    optimiser: Optimiser = Optimiser()
    training: Training = Training()

    def __post_init__(self) -> None:
        """Check what spans sections."""
        if not matches(self.seed, int) or not 0 <= self.seed < 2**32:
            raise UserError(
                f"seed is {abbreviate(self.seed)}: it must be a whole number from 0 to 2^32 - 1"
            )
        for name, kind in get_type_hints(Config).items():
            if not isinstance(getattr(self, name), kind):
                raise UserError(f"{name} is {getattr(self, name)!r}: it must be a {kind.__name__}")
        if self.contrastive.weight == 0.0 and self.divergence.weight == 0.0:
            raise UserError(
                "contrastive.weight and divergence.weight are both 0: nothing would be trained; "
                "raise one of them"
            )
        if self.view_size < 4:
            raise UserError(
                f"views.relative_size is {self.views.relative_size} and data.image_size "
                f"{self.data.image_size}: a view would have {self.view_size} pixels a side, and it "
                "must have 4 or more; raise one of them"
            )
        late = [m for m in self.optimiser.milestones if m >= self.training.epochs]
        if late:
            raise UserError(
                f"optimiser.milestones {late} never come: training.epochs is "
                f"{self.training.epochs}; lower them or train longer"
            )

    @property
    def view_size(self) -> int:
        """Side of a view in pixels, while pretraining."""
        return int(self.views.relative_size * self.data.image_size + 0.5)


def from_dict(values: dict[str, Any]) -> Config:
    """Build a configuration from nested tables, as TOML gives them; the rest takes its default."""
    hints: dict[str, type] = get_type_hints(Config)
    sections: dict[str, type[Any]] = {
        name: hint for name, hint in hints.items() if issubclass(hint, Section)
    }
    parts: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"unknown field {abbreviate(name)}{suggest(name, hints)}")
        if name not in sections:
            parts[name] = value
            continue
        if not isinstance(value, dict):
            raise UserError(
                f"{name} is {abbreviate(value)}: it is a table of fields, written [{name}]"
            )
        known = [field.name for field in dataclasses.fields(sections[name])]
        for key in value:
            if key not in known:
                raise UserError(f"unknown field {abbreviate(f'{name}.{key}')}{suggest(key, known)}")
        parts[name] = sections[name](**value)
    return Config(**parts)


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with fields changed by their dotted names.

    Args:
        config: to start from.
        changes: such as ``{"training.epochs": 10, "seed": 1}``.
    """
    values = to_dict(config)
    for name, value in changes.items():
        section, _, field = name.partition(".")
        if field and isinstance(values.get(section), dict):
            values[section][field] = value
        else:
            values[name] = value
    return from_dict(values)


def to_dict(config: Config) -> dict[str, Any]:
    """Turn a configuration into nested tables of plain values."""
    values: dict[str, Any] = dataclasses.asdict(config)
    return {
        key: {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in values.items()
    }


def fields_of(config: Config) -> dict[str, Any]:
    """Return the value of every field by its dotted name."""
    flat: dict[str, Any] = {}
    for key, value in to_dict(config).items():
        is_section = isinstance(value, dict)
        flat |= {f"{key}.{name}": v for name, v in value.items()} if is_section else {key: value}
    return flat


def differing_fields(*configs: Config) -> dict[str, tuple[Any, ...]]:
    """Return the fields in which configurations are not all equal, with the value of each."""
    flat = [fields_of(config) for config in configs]
    columns = {name: tuple(each[name] for each in flat) for name in flat[0]}
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
        return from_dict(_as_now(tomllib.loads(text)))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    except (ValueError, RecursionError) as error:  # of the syntax, or of the reader's own limits
        raise UserError(f"{origin} is not valid TOML: {error}") from None


def _as_now(values: dict[str, Any]) -> dict[str, Any]:
    """Turn fields as earlier versions wrote them into those of today."""
    divergence, views, data = (values.get(name, {}) for name in ("divergence", "views", "data"))
    if isinstance(divergence, dict) and isinstance(divergence.get("sets"), bool):
        divergence["sets"] = "halves" if divergence["sets"] else "none"
    if isinstance(views, dict) and isinstance(data, dict) and "relative_size" not in views:
        side, size = data.get("image_size", Data.image_size), views.get("image_size")
        if type(side) is type(size) is int and 0 <= size <= side != 0:
            # It was in pixels, and 0 was as large as the images.
            views["relative_size"] = (views.pop("image_size") or side) / side
    return values


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
