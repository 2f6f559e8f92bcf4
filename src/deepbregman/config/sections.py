"""The tables of a configuration, and the configuration that they make up."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, get_type_hints

import tyro

from deepbregman.errors import UserError, abbreviate

from .methods import ObjectiveSettings, Sets, SimCLRSettings
from .rules import (
    MAX_IMAGE_SIDE,
    Chances,
    Count,
    Name,
    NotNegative,
    Positive,
    Range,
    Section,
    Share,
    Shares,
    Whole,
    has_type,
)

STAGED = ("resnet18", "resnet34", "resnet50", "resnet101", "small")
"""Encoders that give feature maps and take images of any size."""
Operator = Literal["crop", "rotation", "flip", "jitter", "greyscale", "blur", "solarise"]


@dataclass(frozen=True)
class DataSettings(Section):
    """The dataset, and how its images are loaded."""

    source: Annotated[str, tyro.conf.arg(aliases=["--data"])] = "cifar10"
    """digits, cifar10, cifar100, stl10, tiny-imagenet, imagenet, isic2018 (see `deepbregman data
    list`), a folder of images, a .csv file with the columns image and label, an .npz file, tar
    shards, Parquet tables, or hf:NAME."""
    root: str = "data"
    """Folder of the datasets that are known by name; downloads go there."""
    image_size: Annotated[int, Range(4, MAX_IMAGE_SIDE)] = 32
    """Side of images in pixels, as evaluations use them. Views have this times
    views.relative_size."""
    holdout: Annotated[float, Range(0.0, 0.9)] = 0.0
    """Share of the training images held out of pretraining: a validation split for the kNN monitor
    and for choosing settings."""
    resident: Literal["auto", "yes", "no"] = "auto"
    """yes keeps all images on the device, no streams them, auto decides by the free memory."""
    workers: Whole = 16
    """Largest number of processes that decode streamed images; never more than there are CPUs."""
    skip_unreadable: Annotated[bool, tyro.conf.arg(aliases=["--skip-unreadable"])] = False
    """Leave out images that cannot be read, and count them, instead of stopping."""


_FIELDS_OF = {
    "crop": ("crop_area", "crop_aspect"),
    "jitter": ("jitter", "jitter_probability"),
    "blur": ("blur", "blur_sigma"),
}
"""Fields of transformations that have not just one, of the same name."""


@dataclass(frozen=True)
class ViewSettings(Section, table="views"):
    """A group of random views of each image."""

    num_views: Count = 2
    """Views of each image in a batch."""
    relative_size: Annotated[float, Range(above=0.0, high=1.0)] = 1.0
    """Side of a view as a share of data.image_size. Random crops enlarge objects; with 0.75 these
    are about as large as in whole images."""
    crop_area: Shares = (0.2, 1.0)
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
    """Probability of inverting pixels above one half; a list has one for each view in turn."""
    without: tuple[Operator, ...] = ()
    """Transformations to leave out, by name."""
    custom: bool = False
    """Your own code makes these views, given in Python; then only num_views and relative_size of
    this table are used."""

    def __post_init__(self) -> None:
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

    @property
    def unused_fields(self) -> dict[str, str]:
        """Fields that training does not use with these settings, and why."""
        found = {}
        if self.jitter_probability == 0.0:
            found["jitter"] = f"{self.table}.jitter_probability is 0"
        if not (any(self.blur) if isinstance(self.blur, tuple) else self.blur):
            found["blur_sigma"] = f"{self.table}.blur is 0"
        for operator in self.without:
            names = _FIELDS_OF.get(operator, (operator,))
            found |= dict.fromkeys(names, f"{self.table}.without has {operator!r}")
        return found

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
    crop_area: Shares = (0.05, 0.4)


@dataclass(frozen=True)
class EncoderSettings(Section):
    """The base network and its projection."""

    name: Annotated[str, Name((*STAGED, "custom"), "timm:")] = "resnet18"
    """resnet18, resnet34, resnet50, resnet101, small (four convolutions, for thumbnails on a CPU),
    or timm:NAME, any architecture of timm; custom is a module of your own, given in Python."""
    weights: str = "auto"
    """Weights to start from: random, torchvision:NAME (such as torchvision:DEFAULT), timm, the
    folder of a run, a file (also an export), or FILE:NAME for one of several networks in a file.
    The heads are always new. auto: those of the tag if encoder.name has one, as in timm:NAME.tag,
    else random."""
    stem: Literal["auto", "thumbnail", "standard"] = "auto"
    """First layers of a ResNet: thumbnail keeps the resolution, standard divides it by four; auto
    takes thumbnail for images of up to 64 px."""
    normalise_pixels: bool = True
    """Normalise pixels by the mean and deviation of the training images, or by those that
    encoder.weights bring."""
    projection_hidden: Count = 1024
    """Width of the projection's hidden layer."""
    projection_norm: bool = True
    """Batch-normalise the projection's hidden layers."""
    projection_layers: Annotated[int, Range(low=2)] = 2
    """Linear layers of the projection."""
    projection_output_norm: bool = False
    """Batch-normalise the embedding as well, without a learned gain and shift."""
    embedding: Count = 128
    """Width of the embedding z."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stem != "auto" and not self.name.startswith("resnet"):
            raise UserError(
                f"encoder.stem is {self.stem!r} with encoder.name {self.name!r}: only the ResNets "
                "known by name have a choice of stem; leave it at auto"
            )
        if self.weights == "timm" and not self.name.startswith("timm:"):
            raise UserError(
                f"encoder.weights is 'timm' with encoder.name {self.name!r}: timm has weights of "
                f"its own architectures; set encoder.name to timm:{self.name}, or give other "
                "weights"
            )
        if self.weights.startswith("torchvision:") and not self.name.startswith("resnet"):
            raise UserError(
                f"encoder.weights is {self.weights!r} with encoder.name {self.name!r}: only "
                "resnet18, resnet34, resnet50 and resnet101 are torchvision's; name one of them, "
                "or give other weights"
            )


@dataclass(frozen=True)
class DivergenceSettings(Section):
    """The divergence and its loss, which can be added to any method."""

    weight: NotNegative = 1.0
    """Weight of the divergence loss; 0 turns it off."""
    source: Literal["learned", "bank", "prototypes"] = "learned"
    """Where the subnetworks come from: learned (the paper), a bank of the teacher's last
    embeddings, or learned prototypes of which the teacher has a copy."""
    compare: Literal["contrast", "match"] = "contrast"
    """contrast (the paper): make the divergence between views of an image smaller than that to
    other images. match: lower the divergence of each view to the teacher's target of the image."""
    num_subnetworks: Count = 100
    """Number of subnetworks: K, the paper's kappa. Of a bank its size, 4096 in best."""
    hidden: Count = 32
    """Width of the hidden layer of a learned subnetwork."""
    norm: Literal["output", "standard", "hidden", "none"] = "output"
    """What a learned subnetwork batch-normalises. output: its output, with a learned gain.
    standard: its output without a gain, so that scores keep the scale that smoothing and
    temperature are set for. hidden: its hidden layer."""
    activation: Literal["none", "relu"] = "none"
    """Activation between the layers of a learned subnetwork."""
    dropout: Annotated[float, Range(0.0, 0.99)] = 0.0
    """Dropout on the hidden layer of a learned subnetwork."""
    normalise_input: bool = False
    """L2-normalise z before learned subnetworks; a bank and prototypes always do."""
    kernel: Literal["gaussian", "inverse", "sqrt", "linear", "arccot", "negative"] = "gaussian"
    """psi, which turns a divergence into a similarity, to contrast it; not used by match."""
    sigma: Positive = 1.5
    """Width of the gaussian kernel."""
    alpha: Positive = 1.0
    """Slope of the arccot kernel."""
    learn_sigma: bool = False
    """Train sigma, starting from its value here."""
    pairs: Literal["views", "all"] = "views"
    """Contrast view 1 with view 2 (the paper), or every sample with every other."""
    temperature: Positive = 1.0
    """tau_div: psi is divided by it; 1 is as in the paper. Also the temperature of info_nce."""
    smoothing: NotNegative = 0.0
    """Temperature T of the smooth divergence; 0 is the hard form of the paper."""
    target_smoothing: NotNegative = 0.0
    """Temperature of the teacher's scores when the smooth form is matched; 0 uses the value
    of smoothing. Lower is sharper."""
    centring: Literal["none", "mean", "sinkhorn"] = "none"
    """Keeps the teacher's scores from collapsing onto one subnetwork: mean subtracts the mean of a
    batch, sinkhorn equalises the use of all subnetworks."""
    info_nce: NotNegative = 0.0
    """Weight of InfoNCE between a view and the teacher's target, with the targets of other images
    in the batch and the bank as negatives. It is the control of the matched divergence if weight is
    0, and a second term beside it otherwise."""
    usage_bonus: NotNegative = 0.0
    """Weight of an entropy bonus, which rewards equal use of all subnetworks."""
    sets: Sets = "none"
    """How an image's views form empirical distributions: none compares each view with each other
    one, halves the first half with the second, rest each view with all the others together. With
    targets, halves and rest both compare each view with all targets together."""
    warmup_epochs: NotNegative = 0.0
    """Epochs over which the weight rises from 0."""

    def __post_init__(self) -> None:
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
    def unused_fields(self) -> dict[str, str]:
        """Fields that training does not use with these settings, and why."""
        if not self.is_on:
            names = {each.name for each in fields(self)} - {"weight", "info_nce"}
            return dict.fromkeys(names, "divergence.weight is 0")
        found: dict[str, str] = {}
        if self.source != "learned":
            subnetwork = ("hidden", "norm", "activation", "dropout", "normalise_input")
            found |= dict.fromkeys(subnetwork, f"divergence.source is {self.source!r}")
        users = {"sigma": "gaussian", "learn_sigma": "gaussian", "alpha": "arccot"}
        unused = [name for name, kernel in users.items() if self.kernel != kernel]
        found |= dict.fromkeys(unused, f"divergence.kernel is {self.kernel!r}")
        if self.smoothing == 0.0:
            found["target_smoothing"] = "divergence.smoothing is 0"
        elif self.compare == "contrast" and self.centring != "sinkhorn":
            found["target_smoothing"] = "divergence.compare is 'contrast'"
        contrast = ["kernel", "sigma", "alpha", "learn_sigma", "pairs"]
        if self.compare == "match":
            unused = contrast + (["temperature"] if self.info_nce == 0.0 else [])
            found |= dict.fromkeys(unused, "divergence.compare is 'match'")
        if self.weight == 0.0:  # InfoNCE stands alone
            unused = [*contrast, "compare", "target_smoothing", "centring", "sets", "warmup_epochs"]
            if self.usage_bonus == 0.0:
                unused.append("smoothing")
            found |= dict.fromkeys(unused, "divergence.weight is 0")
        return found

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
    """Schedule of the momentum; cosine rises to 1 at the end of training."""


@dataclass(frozen=True)
class RotationSettings(Section):
    """Prediction of how far small views are turned, beside any method.

    Four small views are turned by 0, 90, 180 and 270 degrees, further ones likewise. Leave it out
    for images without an upright position, such as those of skin or of cells.
    """

    weight: Positive = 0.4
    """Weight of its cross-entropy in the loss."""
    hidden: Count = 2048
    """Width of the hidden layer of the head that predicts."""


@dataclass(frozen=True)
class OptimiserSettings(Section):
    """The optimiser, its learning rate and its schedule."""

    name: Literal["adam", "adamw", "sgd", "lars", "clipped-lars", "muon"] = "adam"
    """Algorithm; clipped-lars is sgd whose gradient moves no weight by more than 2 % of its norm;
    muon is for the convolutions of networks with batch normalisation, and sgd for all other
    parameters."""
    learning_rate: Positive = 0.005
    """Peak learning rate; it is not scaled by the batch size."""
    convolution_rate: Positive = 0.02
    """Peak learning rate of muon for convolutions: the share by which a step rotates their weights.
    It follows the same schedule."""
    betas: Annotated[tuple[float, float], Range(0.0, 0.99999)] = (0.5, 0.999)
    """Coefficients of adam and adamw."""
    momentum: Annotated[float, Range(0.0, 0.99999)] = 0.9
    """Momentum of sgd, lars, clipped-lars and muon."""
    weight_decay: NotNegative = 1e-4
    """L2 penalty (decoupled in adamw)."""
    decay_all: bool = True
    """Apply weight decay to biases and normalisation parameters as well."""
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """Schedule of the learning rate."""
    warmup_epochs: NotNegative = 0.0
    """Epochs over which the learning rate rises from 0."""
    milestones: tuple[Count, ...] = ()
    """Epochs at which the step schedule multiplies the learning rate by step_factor."""
    step_factor: Positive = 0.1
    """Factor at each milestone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.milestones) != (self.schedule == "step"):
            raise UserError(
                f"optimiser.milestones is {list(self.milestones)} with optimiser.schedule "
                f"{self.schedule!r}: the step schedule needs milestones, the others take none"
            )

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates, by the names of their fields: muon has one for convolutions."""
        rates = {"optimiser.learning_rate": self.learning_rate}
        if self.name == "muon":
            rates["optimiser.convolution_rate"] = self.convolution_rate
        return rates

    @property
    def unused_fields(self) -> dict[str, str]:
        """Fields that training does not use with these settings, and why."""
        unused = ["momentum"] if self.name in ("adam", "adamw") else ["betas"]
        unused += [] if self.name == "muon" else ["convolution_rate"]
        found = dict.fromkeys(unused, f"optimiser.name is {self.name!r}")
        if self.schedule != "step":
            found["step_factor"] = f"optimiser.schedule is {self.schedule!r}"
        return found


@dataclass(frozen=True)
class TrainingSettings(Section):
    """Length and batch size of training, precision, checkpoints and monitoring."""

    epochs: Whole = 400
    """Passes over the training images. 0: train nothing, keep the encoder as it starts."""
    batch_size: Annotated[int, Range(low=2)] = 512
    """Images (not views) in a batch, over all processes; the last, incomplete one is dropped."""
    accumulate: Count = 1
    """Batches whose gradients are added before a step; negatives come from the same batch."""
    sync_norm: bool = True
    """Synchronise batch normalisation over all processes; false: each uses its own share."""
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    """auto is bf16-mixed on a GPU and 32-true on a CPU."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """torch.compile the step; auto does on a GPU."""
    checkpoint_every: Whole = 0
    """Epochs between checkpoints that are kept besides the last one; 0 keeps the last only."""
    save_seconds: NotNegative = 60.0
    """At the end of an epoch, save if the last checkpoint is older than so many seconds."""
    skip_nonfinite: Whole = 0
    """Batches with a non-finite loss or gradient to skip before stopping; above 0, each step waits
    for the device."""
    knn_every: Whole = 5
    """Epochs between runs of the kNN monitor; 0 turns it off."""
    health_every: Whole = 5
    """Epochs between health checks, which need no labels; 0 turns them off."""
    stop_when_saturated: Annotated[bool, tyro.conf.arg(aliases=["--stop-when-saturated"])] = False
    """Stop early once two health checks in a row find the run saturated."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    logger: tuple[Literal["csv", "tensorboard", "mlflow", "wandb"], ...] = ()
    """Further loggers: csv writes metrics.csv in the run's folder; mlflow and wandb need their
    packages. If a logger fails, the run continues without it."""


@dataclass(frozen=True)
class Config:
    """Everything a pretraining run depends on."""

    seed: Whole = 0
    """Seed of initial weights, order and transformations."""
    data: DataSettings = DataSettings()
    views: ViewSettings = ViewSettings()
    weak_views: WeakViewSettings | None = None
    small_views: SmallViewSettings | None = None
    encoder: EncoderSettings = EncoderSettings()
    objective: ObjectiveSettings = field(default_factory=SimCLRSettings)
    teacher: TeacherSettings | None = None
    rotation: RotationSettings | None = None
    divergence: DivergenceSettings = DivergenceSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    training: TrainingSettings = TrainingSettings()

    def __post_init__(self) -> None:
        if not has_type(self.seed, int) or not 0 <= self.seed < 2**32:
            raise UserError(
                f"seed is {abbreviate(self.seed)}: it must be a whole number from 0 to 2^32 - 1"
            )
        for name, kind in SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name in OPTIONAL):
                raise UserError(f"{name} is {abbreviate(value)}: it must be a {kind.__name__}")
        terms_are_off = self.objective.weight == 0.0 and not self.divergence.is_on
        if terms_are_off and self.rotation is None:
            raise UserError(
                "objective.weight and divergence.weight are both 0: nothing would be trained; "
                "raise one of them"
            )
        self._check_teacher()
        self._check_views()
        self._check_rotation()
        self._check_method()
        late = [m for m in self.optimiser.milestones if m >= self.training.epochs]
        if late and self.training.epochs:
            raise UserError(
                f"optimiser.milestones {late} never come: training.epochs is "
                f"{self.training.epochs}; lower them or train longer"
            )

    def _check_teacher(self) -> None:
        method = self.objective
        if self.divergence.needs_target and not self.has_targets:
            raise UserError(
                f"divergence.source is {self.divergence.source!r} and divergence.compare "
                f"{self.divergence.compare!r}: they need the targets of a teacher, which the "
                f"method {method.name} does not have; add a [teacher] table, such as with "
                "--teacher.momentum 0.99, and [weak_views] for what it sees"
            )
        if self.teacher is None:
            return
        if method.has_teacher:
            raise UserError(
                f"[teacher] is given, but the method {method.name} has a teacher of its own: "
                'leave the table out; in Python, changes={"teacher": None}'
            )
        if self.weak_views is None:
            raise UserError(
                "[teacher] is given without [weak_views], the views that it sees: add them, such "
                f"as with --weak-views.relative-size {self.views.relative_size:g}"
            )

    def _check_views(self) -> None:
        objective = self.objective
        count = self.views.num_views
        for suits, rule in (
            (count >= objective.fewest_views, f"needs {objective.fewest_views} or more"),
            (count <= objective.most_views, f"takes {objective.most_views} at most"),
        ):
            if not suits:
                raise UserError(f"views.num_views is {count}: the method {objective.name} {rule}")
        taken = set(objective.groups)
        if self.teacher is not None:
            taken.add("weak_views")
        if self.rotation is not None:
            taken.add("small_views")
        for group in self.view_groups.values():
            if group.table in OPTIONAL and group.table not in taken:
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

    def _check_rotation(self) -> None:
        if self.rotation is None:
            return
        count = 0 if self.small_views is None else self.small_views.num_views
        if count < 4:
            raise UserError(
                f"[rotation] is given with {count} small views: it needs 4 or more, one for each "
                "quarter turn; set them with --small-views.num-views 4, or leave the table out"
            )

    def _check_method(self) -> None:
        """Check what the method needs of the other tables."""
        method, batch = self.objective, self.training.batch_size
        if method.needs_weak_views and self.weak_views is None:
            raise UserError(
                f"objective.name is {method.name!r} without [weak_views], the views that its "
                "teacher sees: add them, such as with --weak-views.num-views 1"
            )
        if method.needs_stages and self.encoder.name not in STAGED:
            raise UserError(
                f"objective.name is {method.name!r} with encoder.name {self.encoder.name!r}: the "
                f"method takes only {', '.join(STAGED)}; choose one of them"
            )
        alone = self.views.num_views < 2 and self.teacher is None
        if method.needs_pair_for_divergence and alone and self.divergence.is_on:
            raise UserError(
                f"divergence.weight is {self.divergence.weight:g} with views.num_views "
                f"{self.views.num_views}: the divergence compares views, and the method "
                f"{method.name} makes one embedding of each; set views.num_views to 2 or more, or "
                "divergence.weight to 0, or add a [teacher] table"
            )
        queue: int = vars(method)["queue"] if method.queues_batches else 0
        if 0 < queue < batch:
            raise UserError(
                f"objective.queue is {queue} with training.batch_size {batch}: the queue of the "
                f"method {method.name} must hold a batch or more; raise it, or lower the batch size"
            )
        method.check_sizes(self.view_size, batch, self.encoder.embedding)

    @property
    def has_targets(self) -> bool:
        """Whether views can be compared with targets: of a teacher, or of the method's memory."""
        return self.teacher is not None or self.objective.has_teacher or self.objective.has_memory

    @property
    def unused_fields(self) -> dict[str, str]:
        """Fields that training does not use with these settings, by dotted name, and why."""
        found: dict[str, str] = {}
        for table in SECTIONS:
            section: Section | None = getattr(self, table)
            if section is not None:
                unused = section.unused_fields
                found |= {f"{table}.{name}": why for name, why in unused.items()}
        if self.divergence.is_on and not self.has_targets:
            found["divergence.centring"] = f"the method {self.objective.name} has no teacher"
        if not self.divergence.is_on:
            # Neither is the teacher used, nor the views that it alone sees.
            off: list[TeacherSettings | WeakViewSettings] = []
            if self.teacher is not None:
                off.append(self.teacher)
            if self.weak_views is not None and "weak_views" not in self.view_groups:
                off.append(self.weak_views)
            names = [f"{part.table}.{each.name}" for part in off for each in fields(part)]
            found |= dict.fromkeys(names, "divergence.weight is 0")
        return found

    @property
    def depends_on_length(self) -> bool:
        """Whether a step depends on the length of the run, as with a cosine schedule."""
        schedules = [self.optimiser.schedule]
        if self.teacher is not None and self.divergence.is_on:
            schedules.append(self.teacher.schedule)
        return "cosine" in schedules or self.objective.depends_on_length

    @property
    def view_groups(self) -> dict[str, ViewSettings]:
        """The groups of views that are made, by the name of their table.

        Without a divergence the teacher is not used. The views that it sees are then not made,
        unless the method takes them, too.
        """
        weak_views = self.weak_views
        is_teacher_off = self.teacher is not None and not self.divergence.is_on
        if is_teacher_off and WeakViewSettings.table not in self.objective.groups:
            weak_views = None
        groups = (self.views, weak_views, self.small_views)
        return {group.table: group for group in groups if group is not None}

    def count_views(self, table: str) -> int:
        """Return how many views of a group are made of each image; 0 if there is no such group."""
        groups = self.view_groups
        return groups[table].num_views if table in groups else 0

    @property
    def view_size(self) -> int:
        """Side of a view of the main group in pixels, while pretraining."""
        return self.views.side(self.data.image_size)


OPTIONAL: dict[str, type[Section]] = {
    "teacher": TeacherSettings,
    "rotation": RotationSettings,
    "weak_views": WeakViewSettings,
    "small_views": SmallViewSettings,
}
"""Tables that may be left out."""
SECTIONS: dict[str, type[Section]] = {
    name: hint
    for name, hint in (get_type_hints(Config) | OPTIONAL).items()
    if isinstance(hint, type) and issubclass(hint, Section)
}
"""Every table and its class; for the objective, the base class of all methods."""
