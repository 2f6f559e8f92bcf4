"""The settings of each method, and what the method needs of the other tables.

They stand apart from the objectives so that a configuration is read and checked without torch.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from deepbregman.errors import UserError

from .rules import Count, NotNegative, Positive, Range, Section, Share, Whole

Sets = Literal["none", "halves", "rest"]
METHODS: dict[str, type["ObjectiveSettings"]] = {}
"""``objective.name`` -> the class of its settings."""


@dataclass(frozen=True)
class ObjectiveSettings(Section):
    """The method that trains the encoder; each method has its own class of settings.

    A subclass with a ``name`` is a method, known by it from then on.
    """

    groups: ClassVar[tuple[str, ...]] = ()
    """Optional groups of views that the method takes: ``weak_views``, ``small_views``."""
    fewest_views: ClassVar[int] = 2
    """Views of the main group that the method needs."""
    most_views: ClassVar[float] = math.inf
    """Views of the main group that the method takes."""
    needs_pair_for_divergence: ClassVar[bool] = False
    """Whether a divergence needs two views: the method makes one embedding of each."""
    needs_weak_views: ClassVar[bool] = False
    """Whether the method cannot do without ``weak_views``."""
    needs_stages: ClassVar[bool] = False
    """Whether the method takes only encoders with stages: it looks at parts of images, or has two
    networks."""
    queues_batches: ClassVar[bool] = False
    """Whether the field ``queue``, unless it is 0, must hold a batch."""
    needs_labels: ClassVar[bool] = False
    """Whether the method learns from labels."""
    needs_indices: ClassVar[bool] = False
    """Whether the method must know which image of the dataset is which."""
    has_teacher: ClassVar[bool] = False
    """Whether the method returns targets of a teacher of its own."""
    has_memory: ClassVar[bool] = False
    """Whether the method returns targets from its memory; those of a [teacher] take their place."""

    name: str = ""
    """Name of the method."""
    weight: NotNegative = 1.0
    """Weight of the method's own loss in the total; lambda of the paper."""

    def __init_subclass__(cls) -> None:
        """Enter a method in :data:`METHODS`; a class of the same name replaces its old self."""
        super().__init_subclass__(table="objective")
        name = vars(cls).get("name")
        if name is None:  # a base of several methods
            return
        known = METHODS.setdefault(name, cls)
        if known.__qualname__ != cls.__qualname__:
            raise ValueError(
                f"{cls.__qualname__} has the name {name!r}, which is that of "
                f"{known.__qualname__}: give it another"
            )
        METHODS[name] = cls

    def check_sizes(self, view_size: int, batch_size: int, embedding: int) -> None:
        """Check the method's own numbers against those of other tables."""

    @property
    def batch_multiple(self) -> int:
        """The number that the batch must be a multiple of."""
        return 1

    @property
    def depends_on_length(self) -> bool:
        """Whether a step depends on the share of training that is done, so on its length."""
        return False

    @property
    def colour_space(self) -> str | None:
        """Colour space in which brightness and colours are split; None without a split."""
        return None

    def patch_side(self, view_size: int) -> int | None:
        """Return the side in pixels of the patches that the encoder sees; None if it sees views."""
        return None

    def count_targets(self, num_views: int) -> int:
        """Count the targets that a method with its own teacher or memory has for each image.

        Args:
            num_views: views that the teacher sees.
        """
        return num_views


@dataclass(frozen=True)
class MomentumSettings(ObjectiveSettings):
    """A method with a teacher: a moving average of the networks."""

    has_teacher = True
    momentum: Share = 0.99
    """Share of its weights that the teacher keeps at each step, at the start of training."""
    final_momentum: Share = 1.0
    """Momentum at the end of training; in between it follows a cosine."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the momentum changes."""
        return self.momentum != self.final_momentum


@dataclass(frozen=True)
class RelationSettings(MomentumSettings):
    """A method that matches the similarities of its views to past images with the teacher's."""

    groups = ("weak_views",)
    needs_weak_views = True
    queues_batches = True
    fewest_views = 1
    temperature: Positive = 0.1
    """Temperature of the student."""
    target_temperature: Positive = 0.04
    """Temperature of the teacher; lower is sharper."""
    queue: Count = 4096
    """Past embeddings of the teacher that views are compared with."""


@dataclass(frozen=True)
class MemorySettings(ObjectiveSettings):
    """A method that compares a batch with a memory of every image."""

    needs_indices = True
    temperature: Positive = 0.07
    """Temperature of the loss."""
    negatives: Count = 4096
    """Images of the memory that a batch is compared with, drawn at each step."""
    momentum: Share = 0.5
    """Momentum of the memory: the share of an image's vector that an update keeps."""

    def count_targets(self, num_views: int) -> int:
        """Count the targets of an image: its vector in the memory."""
        return 1


@dataclass(frozen=True)
class AMDIMSettings(ObjectiveSettings):
    """The embedding of one view matches local features of another, at two scales."""

    needs_stages = True
    name: Literal["amdim"] = "amdim"
    clip: Positive = 20.0
    """c; a score s becomes c tanh(s / c)."""
    penalty: NotNegative = 0.04
    """Weight of the mean square of the scores."""


@dataclass(frozen=True)
class BarlowTwinsSettings(ObjectiveSettings):
    """The cross-correlation of the embeddings of two views, driven to the identity."""

    name: Literal["barlow_twins"] = "barlow_twins"
    off_diagonal: NotNegative = 0.0051
    """Weight of the correlations between different components; lambda of its paper."""


@dataclass(frozen=True)
class BYOLSettings(MomentumSettings):
    """Each view predicts how the teacher embeds the other."""

    name: Literal["byol"] = "byol"
    predictor_hidden: Count = 4096
    """Width of the predictor's hidden layer."""


@dataclass(frozen=True)
class CMCSettings(MemorySettings):
    """Brightness and colours of an image are its two views."""

    fewest_views = 1
    needs_stages = True
    name: Literal["cmc"] = "cmc"
    space: Literal["lab", "ycbcr"] = "lab"
    """Colour space in which brightness and colours are split."""
    loss: Literal["nce", "softmax"] = "nce"
    """nce, as in the paper, classifies each pair as the image's own or noise; softmax finds the
    image's own vector among the others, which allows higher learning rates."""
    negatives: Count = 16384

    @property
    def colour_space(self) -> str:
        """Colour space in which brightness and colours are split."""
        return self.space


@dataclass(frozen=True)
class CPCSettings(ObjectiveSettings):
    """The upper patches of an image predict the lower ones."""

    fewest_views = 1
    needs_pair_for_divergence = True
    needs_stages = True
    name: Literal["cpc"] = "cpc"
    patch: Annotated[float, Range(above=0.0, high=1.0)] = 0.25
    """Side of a patch as a share of the view's; patches overlap by half."""
    steps: Count = 3
    """Rows below that are predicted, after the one that overlaps."""
    directions: Annotated[int, Range(1, 4)] = 4
    """Directions in which images are read: from the top only, or from further sides."""
    layers: Count = 4
    """Blocks of a context network."""
    negatives: Count = 1024
    """Patches of the batch that a prediction is compared with, drawn at each step."""

    def patch_side(self, view_size: int) -> int:
        """Return the side of a patch in pixels."""
        return int(self.patch * view_size + 0.5)

    def check_sizes(self, view_size: int, batch_size: int, embedding: int) -> None:
        """Check that there are rows to predict."""
        side = self.patch_side(view_size)
        rows = (view_size - side) // (side // 2) + 1 if side >= 2 else 0
        if rows < self.steps + 2:
            raise UserError(
                f"objective.patch is {self.patch:g} with views of {view_size} px and objective."
                f"steps {self.steps}: patches of {side} px make {rows} rows, and {self.steps + 2} "
                "or more are needed; lower objective.steps, or set objective.patch so that a patch "
                "has 2 px or more and more patches fit"
            )


@dataclass(frozen=True)
class CustomSettings(ObjectiveSettings):
    """A method of the user's own, given in Python."""

    groups = ("weak_views", "small_views")
    fewest_views = 1

    name: Literal["custom"] = "custom"
    needs_labels: bool = False  # type: ignore[misc]  # here the user says what others know
    """Whether the method learns from labels."""
    needs_indices: bool = False  # type: ignore[misc]  # likewise
    """Whether the method must know which image of the dataset is which."""
    has_teacher: bool = False  # type: ignore[misc]  # likewise
    """Whether the method returns targets of a teacher of its own."""

    @property
    def depends_on_length(self) -> bool:
        """It may: its ``after_step`` gets the share of training that is done."""
        return True


@dataclass(frozen=True)
class DeepDivergenceSettings(ObjectiveSettings):
    """A divergence learned from labels, as a reference."""

    needs_labels = True
    fewest_views = 1
    needs_pair_for_divergence = True
    name: Literal["deep_divergence"] = "deep_divergence"
    form: Literal["max", "smooth", "moment"] = "moment"
    """Form of its divergence: Eq. 6 (max), the smooth form, or the distance of means (moment)."""
    loss: Literal["contrastive", "triplet"] = "contrastive"
    """On pairs of samples, or on triplets."""
    margin: Positive = 1.0
    """Distance that samples of different classes are to have."""
    num_subnetworks: Count = 100
    """Number of its subnetworks; those of the [divergence] table are others."""
    hidden: Count = 32
    """Width of a subnetwork's hidden layer."""


@dataclass(frozen=True)
class DIMSettings(ObjectiveSettings):
    """The embedding of an image matches its local features (Deep InfoMax)."""

    fewest_views = 1
    needs_pair_for_divergence = True
    needs_stages = True
    name: Literal["dim"] = "dim"
    loss: Literal["jsd", "info_nce"] = "jsd"
    """Estimate of the information: by Jensen and Shannon, or by InfoNCE."""
    stage: Annotated[int, Range(1, 4)] = 3
    """Stage of the encoder, of four, that local features come from. Those of a later stage see more
    of the image: in ResNet-18 for thumbnails 11, 25, 53 and 109 px."""


@dataclass(frozen=True)
class DINOSettings(MomentumSettings):
    """Each view predicts the teacher's distribution over prototypes of another view."""

    groups = ("small_views",)
    name: Literal["dino"] = "dino"
    momentum: Share = 0.9995
    prototypes: Count = 4096
    """K, the width of the last layer."""
    temperature: Positive = 0.1
    """Temperature of the student."""
    target_temperature: Positive = 0.07
    """Temperature of the teacher; lower is sharper."""
    first_target_temperature: Positive = 0.04
    """The same at the start of training."""
    target_warmup: Share = 0.05
    """Share of training over which the teacher's temperature rises from one to the other."""
    centre_momentum: Share = 0.9
    """Share of the old centre of the teacher's scores that a step keeps."""
    freeze_prototypes: Share = 0.001
    """Share of training during which the prototypes stay as they are."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the momentum or the temperature changes, or the prototypes are frozen."""
        return super().depends_on_length or max(self.target_warmup, self.freeze_prototypes) > 0.0


@dataclass(frozen=True)
class InstDiscSettings(MemorySettings):
    """Every image is a class of its own, kept in a memory."""

    has_memory = True
    fewest_views = 1
    name: Literal["instdisc"] = "instdisc"
    loss: Literal["nce", "softmax"] = "nce"
    """nce, as in the paper, classifies each pair as the image's own or noise; softmax finds the
    image's own vector among the others, which allows higher learning rates."""
    temperature: Positive = 0.1
    proximal: NotNegative = 0.0
    """Weight of the squared distance between an embedding and its vector in the memory."""


@dataclass(frozen=True)
class MoCoSettings(MomentumSettings):
    """A contrastive loss to the teacher's keys; versions 2, 2+ and 3 are settings of it."""

    queues_batches = True
    name: Literal["moco"] = "moco"
    temperature: Positive = 0.2
    """Temperature of the loss."""
    queue: Whole = 32768
    """Keys of past batches that are the negatives; 0 takes the batch's keys instead."""
    symmetric: bool = True
    """Let each view be query and key in turn; false: the first is the query, as in version 2."""
    predictor_hidden: Whole = 0
    """Width of the hidden layer of the queries' predictor; 0 has none."""

    def count_targets(self, num_views: int) -> int:
        """Count the keys of an image; the first view is a query only, if it is not symmetric."""
        return num_views if self.symmetric else num_views - 1


@dataclass(frozen=True)
class NNCLRSettings(ObjectiveSettings):
    """A contrastive loss whose positive is the nearest neighbour in a queue."""

    queues_batches = True
    name: Literal["nnclr"] = "nnclr"
    temperature: Positive = 0.2
    """Temperature of the loss."""
    predictor_hidden: Count = 4096
    """Width of the predictor's hidden layer."""
    queue: Count = 65536
    """Embeddings of past batches among which a neighbour is looked for."""


@dataclass(frozen=True)
class PIRLSettings(MemorySettings):
    """An image and its jigsaw puzzle share an embedding; the second view becomes the puzzle."""

    has_memory = True
    most_views = 2  # a whole one, and the one that becomes a puzzle
    needs_stages = True
    name: Literal["pirl"] = "pirl"
    grid: Annotated[int, Range(low=2)] = 3
    """Cells of the puzzle along each side; 2 for images of 32 px."""
    patch: Annotated[float, Range(above=0.0, high=1.0)] = 0.85
    """Side of a patch as a share of its cell, in which it lies at random."""
    puzzle_share: Share = 0.5
    """Weight of the puzzle's loss; the image's own has the rest."""

    def piece_side(self, view_size: int) -> int:
        """Return the side in pixels of a patch of the puzzle; the encoder also sees whole views."""
        return int(self.patch * (view_size // self.grid) + 0.5)

    def check_sizes(self, view_size: int, batch_size: int, embedding: int) -> None:
        """Check that the views are large enough to be cut."""
        if (side := self.piece_side(view_size)) < 2:
            raise UserError(
                f"objective.grid is {self.grid} with views of {view_size} px: patches would "
                f"have {side} px a side, and must have 2 or more; lower it, or raise objective."
                "patch or data.image_size"
            )


@dataclass(frozen=True)
class ReSSLSettings(RelationSettings):
    """The similarities of a view to past images match those of the teacher's weak view."""

    name: Literal["ressl"] = "ressl"


@dataclass(frozen=True)
class SCESettings(RelationSettings):
    """ReSSL and InfoNCE in one soft target."""

    name: Literal["sce"] = "sce"
    final_momentum: Share = 0.99
    target_temperature: Positive = 0.05
    coefficient: Share = 0.5
    """Share of InfoNCE in the target; the rest are the relations."""


@dataclass(frozen=True)
class SimCLRSettings(ObjectiveSettings):
    """A contrastive loss on the embeddings of two or more views."""

    name: Literal["simclr"] = "simclr"
    weight: NotNegative = 5.0
    """Weight of the contrastive loss; lambda of the paper."""
    loss: Literal["nt_xent", "nt_logistic"] = "nt_xent"
    """Contrastive loss: normalised cross-entropy, or logistic."""
    temperature: Positive = 0.1
    """Temperature of the loss."""
    sets: Sets = "none"
    """How an image's views are compared: each with each other (none), the mean of the first half
    with that of the second (halves), or each with the mean of the others (rest)."""

    @property
    def unused_fields(self) -> dict[str, str]:
        """Fields that training does not use with these settings, and why."""
        names = ("loss", "temperature", "sets") if self.weight == 0.0 else ()
        return dict.fromkeys(names, "objective.weight is 0")


@dataclass(frozen=True)
class SimSiamSettings(ObjectiveSettings):
    """Each view predicts the embedding of the other, which gets no gradient."""

    name: Literal["simsiam"] = "simsiam"
    predictor_hidden: Count = 512
    """Width of the predictor's hidden layer."""


@dataclass(frozen=True)
class SSLHSICSettings(MomentumSettings):
    """Embeddings depend on the identity of the image, and little on each other (HSIC)."""

    name: Literal["ssl_hsic"] = "ssl_hsic"
    gamma: NotNegative = 3.0
    """Weight of the self-dependence."""
    kernel_scale: Positive = 1.0
    """c of the inverse multiquadric kernel c / sqrt(c^2 + distance^2); at 1 it is steepest between
    embeddings at right angles."""
    features: Count = 512
    """Random Fourier features by which the kernel is estimated."""
    predictor_hidden: Count = 4096
    """Width of the predictor's hidden layer."""


@dataclass(frozen=True)
class SupConSettings(ObjectiveSettings):
    """A contrastive loss with labels, as a reference."""

    needs_labels = True
    name: Literal["supcon"] = "supcon"
    temperature: Positive = 0.1
    """Temperature of the loss."""


@dataclass(frozen=True)
class SupervisedSettings(ObjectiveSettings):
    """Cross-entropy with labels, as a reference."""

    needs_labels = True
    fewest_views = 1
    needs_pair_for_divergence = True
    name: Literal["supervised"] = "supervised"
    label_smoothing: Annotated[float, Range(0.0, 0.99)] = 0.0
    """Share of the label that is spread over all classes."""


@dataclass(frozen=True)
class SwAVSettings(ObjectiveSettings):
    """Each view predicts which prototypes another view of the image is assigned to."""

    groups = ("small_views",)
    queues_batches = True
    name: Literal["swav"] = "swav"
    prototypes: Count = 3000
    """K, the number of prototypes."""
    temperature: Positive = 0.1
    """Temperature of the predictions."""
    assignment_temperature: Positive = 0.05
    """Temperature of the assignments; epsilon of the paper."""
    assignment_rounds: Count = 3
    """Rounds of Sinkhorn, which makes all prototypes equally frequent."""
    queue: Whole = 3840
    """Embeddings of past batches that are assigned with the batch, for batches smaller than the
    number of prototypes; 0 has none."""
    queue_from: Share = 0.05
    """Share of training after which the queue is used."""
    freeze_prototypes: Share = 0.002
    """Share of training during which the prototypes stay as they are."""

    @property
    def unused_fields(self) -> dict[str, str]:
        """Fields that training does not use with these settings, and why."""
        return {} if self.queue else {"queue_from": "objective.queue is 0"}

    @property
    def depends_on_length(self) -> bool:
        """Whether the queue comes later, or the prototypes are frozen at first."""
        return max(self.queue_from if self.queue else 0.0, self.freeze_prototypes) > 0.0


@dataclass(frozen=True)
class VICRegSettings(ObjectiveSettings):
    """Variance, invariance and covariance of the embeddings."""

    name: Literal["vicreg"] = "vicreg"
    invariance: NotNegative = 25.0
    """Weight of the squared distance of two views."""
    variance: NotNegative = 25.0
    """Weight of the hinge that keeps the deviation of every component at 1 or more."""
    covariance: NotNegative = 1.0
    """Weight of the squared covariances between components."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.invariance == self.variance == self.covariance == 0.0:
            raise UserError(
                "objective.invariance, objective.variance and objective.covariance are all 0: "
                "vicreg would train nothing; raise one of them, or set objective.weight to 0"
            )


@dataclass(frozen=True)
class WMSESettings(ObjectiveSettings):
    """The distance of two views after whitening."""

    name: Literal["wmse"] = "wmse"
    whitening_batch: Annotated[int, Range(low=2)] = 128
    """Images that are whitened together; twice encoder.embedding is a good value."""
    rounds: Count = 1
    """Random partitions of a batch into whitening batches over which the loss is averaged."""
    shrinkage: Share = 0.0
    """Share of the identity in the covariance that is inverted."""

    @property
    def batch_multiple(self) -> int:
        """Only whole groups of images are whitened."""
        return self.whitening_batch

    def check_sizes(self, view_size: int, batch_size: int, embedding: int) -> None:
        """Check that there are enough images to whiten."""
        if self.whitening_batch <= embedding:
            raise UserError(
                f"objective.whitening_batch is {self.whitening_batch} with encoder.embedding "
                f"{embedding}: fewer images than {embedding + 1} have no covariance that can be "
                "inverted; raise the first, better to twice the second, or lower the second"
            )
        if batch_size % self.whitening_batch:
            raise UserError(
                f"objective.whitening_batch is {self.whitening_batch} with training.batch_size "
                f"{batch_size}: the batch must be a multiple of it"
            )
