"""What an evaluation can be told; no torch, so that the command line reads it at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from deepbregman.config import Count, NotNegative, Positive
from deepbregman.errors import UserError
from deepbregman.rules import Range, Section, matches

from .detection.options import Detect


@dataclass(frozen=True)
class Semi(Section):
    """Options of semi."""

    labels: tuple[Annotated[float, Range(above=0.0, high=1.0)], ...] = (0.01, 0.1)
    """Shares of the training labels to fine-tune on, drawn class by class with each seed."""
    labelled_list: Path | None = None
    """In place of shares: a file with the names or paths of the labelled images, one on a line."""

    def __post_init__(self) -> None:
        """Check the fields, and that some labels are asked for."""
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

    learning_rate: tuple[Positive, ...] = (0.05,)
    """Of several, each arm takes the best on a held-out fifth of its labels, then uses them all."""
    weight_decay: NotNegative = 1e-4
    """L2 penalty on weights, not on biases and normalisation."""
    batch_size: Annotated[int, Range(low=2)] = 128
    """Images in a step; all labelled ones where there are fewer."""

    def __post_init__(self) -> None:
        """Check the fields, and that there is a rate."""
        super().__post_init__()
        if not self.learning_rate:
            raise UserError("tuning.learning_rate is empty: give one rate, or several to choose of")


@dataclass(frozen=True)
class Options(Section):
    """What every protocol is told."""

    data: str | None = None
    epochs: int | None = None
    seed: Annotated[int, Range(low=0)] = 0
    seeds: Count = 1
    crops: Annotated[int, Range(low=0)] = 0
    image_size: Annotated[int, Range(low=0)] = 0
    balanced: bool = False
    skip_unreadable: bool = False
    semi: Semi = Semi()
    tuning: Tuning = Tuning()
    detect: Detect = Detect()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        """Check the fields, and those whose rule an annotation cannot hold."""
        if self.epochs is not None and not (matches(self.epochs, int) and self.epochs >= 0):
            raise UserError(f"epochs is {self.epochs!r}: it must be 0 or more")
        super().__post_init__()
        if self.crops == 1:
            raise UserError(
                "crops is 1: it must be 2 or more, to average over, or 0, to leave the average out"
            )
        if 0 < self.image_size < 4:
            raise UserError(
                f"image_size is {self.image_size}: it must be at least 4 pixels, or 0 for that of "
                "the run"
            )
        if self.seed + self.seeds > 2**32:
            raise UserError(
                f"seed is {self.seed} and seeds {self.seeds}: seeds run from 0 to 2^32 - 1"
            )

    @property
    def each_seed(self) -> range:
        """The seeds: ``seed`` and those that follow it."""
        return range(self.seed, self.seed + self.seeds)
