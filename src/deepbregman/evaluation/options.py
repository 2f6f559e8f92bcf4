"""The options of an evaluation; without torch, so that `--help` is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from deepbregman.config.rules import (
    MAX_IMAGE_SIDE,
    Count,
    Distinct,
    NotNegative,
    Positive,
    Range,
    Section,
    Whole,
)
from deepbregman.errors import UserError, require_known, require_whole
from deepbregman.terminal import MaybePath

Architecture = Literal["c4", "fpn"]
Norm = Literal["train", "frozen"]
Trunk = Literal["pretrained", "random"]
Start = Literal["encoder", "projection", "scratch"]
ClassProtocol = Literal[
    "knn",
    "linear",
    "semi",
    "transfer",
    "supervised",
    "retrieval",
    "cluster",
    "few",
    "ood",
    "corruptions",
]
ProtocolName = Literal[ClassProtocol, "detect"]
PROTOCOL_NAMES: tuple[ProtocolName, ...] = get_args(ProtocolName)


@dataclass(frozen=True)
class Semi(Section):
    """Options of semi."""

    labels: tuple[Annotated[float, Range(above=0.0, high=1.0)], ...] = (0.01, 0.1)
    """Shares of the training labels to fine-tune on; each seed draws them class by class, at least
    one image of each."""
    labelled_list: MaybePath = None
    """Instead of shares: a file with the names or paths of the labelled images, one per line."""
    starts: Annotated[tuple[Start, ...], Distinct()] = ("encoder", "projection", "scratch")
    """Networks to start from: the run's encoder, the same with the projection's first layer, or
    random weights."""

    def __post_init__(self) -> None:
        if isinstance(self.labelled_list, str):
            object.__setattr__(self, "labelled_list", Path(self.labelled_list))
        super().__post_init__()
        if not self.labels and self.labelled_list is None:
            raise UserError("semi.labels is empty: give a share of the labels, such as 0.01")
        if self.labelled_list is not None and self.labels not in ((), Semi.labels):
            raise UserError(
                f"--labels {' '.join(map(str, self.labels))} with --labelled-list "
                f"{self.labelled_list}: the labels are a share or those of a list; give one"
            )


@dataclass(frozen=True)
class Tuning(Section):
    """Options of semi, transfer and supervised, which train all weights."""

    learning_rate: Annotated[tuple[Positive, ...], Distinct()] = (0.05,)
    """If several are given, the best on a held-out fifth of the labels is used."""
    weight_decay: NotNegative = 1e-4
    """Weight decay; biases and normalisation parameters have none."""
    batch_size: Annotated[int, Range(low=2)] = 128
    """Images in a step; fewer if there are fewer labelled images."""


@dataclass(frozen=True)
class Detect(Section):
    """Options of detect; the defaults are MoCo's protocol."""

    architectures: Annotated[tuple[Architecture, ...], Distinct()] = ("c4",)
    """c4: one feature map of stride 16, the fourth stage is the head. fpn: a feature pyramid."""
    arms: Annotated[tuple[Trunk, ...], Distinct()] = ("pretrained", "random")
    """pretrained: the run's encoder. random: the same network with random weights."""
    iterations: Count = 24_000
    """Iterations of SGD; the learning rate is divided by 10 after 3/4 and 11/12 of them."""
    batch_size: Count = 16
    """Images in an iteration."""
    learning_rate: Positive = 0.02
    """For batches of 16. It is not scaled automatically: lower it for smaller batches."""
    image_side: Annotated[tuple[int, int], Range(32, MAX_IMAGE_SIDE, increasing=True)] = (480, 800)
    """Range of the short side of training images in pixels; test images have the larger one."""
    norm: Norm = "train"
    """train: fine-tune batch norms, as MoCo does. frozen: keep them (not with the random arm)."""
    regions: Count = 512
    """Regions sampled in each training image for the head; fewer for small trials."""
    proposals: Count = 1000
    """Proposals that the head gets in each test image; fewer for small trials."""
    clip_gradient: NotNegative = 0.0
    """Largest norm of the gradient; 0 is off."""
    workers: Whole = 4
    """Processes that decode images."""
    save_seconds: NotNegative = 300.0
    """Seconds between checkpoints; a signal saves at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm == "frozen" and "random" in self.arms:
            raise UserError(
                "detect.norm is 'frozen' with the random arm: an untrained network has no "
                "statistics to keep, and would not train; use train, or the pretrained arm alone"
            )


@dataclass(frozen=True)
class Few(Section):
    """Options of few."""

    labels_per_class: Annotated[tuple[Count, ...], Distinct()] = (1, 2, 5, 10, 20)
    """Numbers of labelled images of each class."""
    draws: Count = 10
    """Draws of the labelled images; a seed's value is their mean."""


NOISE = "noise"
"""Names images of noise where a dataset is asked for."""


@dataclass(frozen=True)
class Ood(Section):
    """Options of ood."""

    against: Annotated[tuple[str, ...], Distinct()] = (NOISE,)
    """Out-of-distribution images: datasets, or noise (every byte is random)."""
    neighbours: Count = 50
    """k: the distance of an image is that to its k-th nearest training image."""


@dataclass(frozen=True)
class Options(Section, table=""):
    """The options of an evaluation; `deepbregman.evaluate` explains them."""

    protocols: tuple[str, ...] = ("knn", "linear")
    data: str | None = None
    epochs: int | None = None
    seed: Annotated[int, Range(low=0)] = 0
    seeds: Count = 1
    balanced: bool = False
    skip_unreadable: bool = False
    semi: Semi = Semi()
    tuning: Tuning = Tuning()
    detect: Detect = Detect()
    few: Few = Few()
    ood: Ood = Ood()

    def __post_init__(self) -> None:
        if self.epochs is not None:
            require_whole("epochs", self.epochs, 0)
        super().__post_init__()
        self._check_protocols()
        if self.seed + self.seeds > 2**32:
            raise UserError(
                f"seed is {self.seed} and seeds {self.seeds}: seeds run from 0 to 2^32 - 1"
            )

    def _check_protocols(self) -> None:
        names = dict.fromkeys(self.protocols)
        object.__setattr__(self, "protocols", tuple(names))
        if not names:
            raise UserError(f"no protocol was named: choose from {', '.join(PROTOCOL_NAMES)}")
        for name in names:
            require_known("protocol", name, PROTOCOL_NAMES)
        if "detect" in names and len(names) > 1:
            others = ", ".join(name for name in names if name != "detect")
            raise UserError(
                f"protocols detect and {others}: detect takes boxes of Pascal VOC as --data and "
                "the others images of classes; give two commands"
            )
        if self.data is None and "transfer" in names:
            raise UserError(
                "transfer needs another dataset than that of the pretraining: name it with --data"
            )
        if self.data is None and "detect" in names:
            raise UserError(
                "protocol 'detect' needs --data: the folder VOCdevkit of Pascal VOC, or the one "
                "that holds it; `deepbregman data check voc` shows how to get it"
            )
        trains = {"semi", "transfer", "supervised"}.intersection(names)
        if self.epochs == 0 and trains:
            raise UserError("epochs is 0: semi, transfer and supervised train for 1 epoch or more")

    @property
    def each_seed(self) -> range:
        """The seeds: ``seed`` and those that follow it."""
        return range(self.seed, self.seed + self.seeds)
