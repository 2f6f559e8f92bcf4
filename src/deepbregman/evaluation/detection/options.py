"""The options of detection, checked on construction; no torch, so that a help text stays fast."""

from dataclasses import dataclass
from typing import Literal, get_args

from deepbregman.errors import UserError, nearest

Architecture = Literal["c4", "fpn"]
Norm = Literal["train", "frozen"]
Arm = Literal["pretrained", "random"]


@dataclass(frozen=True)
class DetectOptions:
    """How an encoder is judged by detection; the defaults are MoCo's protocol."""

    architectures: tuple[Architecture, ...] = ("c4",)
    """c4: one feature map, of stride 16, and the fourth stage as the head. fpn: a pyramid."""
    arms: tuple[Arm, ...] = ("pretrained", "random")
    """pretrained: the run's encoder. random: the same network, untrained, for comparison."""
    iterations: int = 24_000
    """Of SGD; the learning rate falls by 10 after 3/4 and after 11/12 of them."""
    batch_size: int = 16
    """Images in an iteration."""
    learning_rate: float = 0.02
    """For batches of 16; never scaled behind your back, so lower it for smaller batches."""
    image_side: tuple[int, int] = (480, 800)
    """Short side of a training image in pixels, from and to; test images have the latter."""
    norm: Norm = "train"
    """train: batch norms are fine-tuned, as MoCo does. frozen: as pretrained (no random arm)."""
    regions: int = 512
    """Sampled in each training image for the head; fewer for small trials."""
    proposals: int = 1000
    """Handed to the head in each test image; fewer for small trials."""
    train_on_difficult: bool = True
    """Train on objects marked difficult too, as detectron2 does; the test never counts them."""
    clip_gradient: float = 0.0
    """Largest norm of the gradient; 0 is off."""
    seeds: int = 1
    """Repetitions, with the seeds that follow the first; MoCo averages 5."""
    seed: int = 0
    """The first, of new layers, order and augmentation."""
    workers: int = 4
    """Processes that decode images."""
    save_seconds: float = 300.0
    """What a crash can cost; a signal saves at once."""
    keep_weights: bool = False
    """Leave the fine-tuned detector in detector.safetensors."""

    def __post_init__(self) -> None:
        """Check every value."""
        choices = (("architectures", Architecture), ("arms", Arm))
        for name, kind in choices:
            given, known = getattr(self, name), get_args(kind)
            wrong = [value for value in given if value not in known]
            if not given or wrong or len(set(given)) < len(given):
                advice = nearest(wrong[0], known) if wrong else ""
                words = f"{name} is {given!r}: choose from {', '.join(known)}, each once{advice}"
                raise UserError(words)
        if self.norm not in get_args(Norm):
            raise UserError(f"norm is {self.norm!r}: it must be train or frozen")
        if self.norm == "frozen" and "random" in self.arms:
            raise UserError(
                "norm is 'frozen' with the random arm: an untrained network has no statistics to "
                "keep, and would not train; use norm train, or the pretrained arm alone"
            )
        for name in ("iterations", "batch_size", "regions", "proposals", "seeds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        for name in ("clip_gradient", "seed", "workers", "save_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"learning_rate is {self.learning_rate}: it must be above 0")
        if not 32 <= self.image_side[0] <= self.image_side[1]:
            raise UserError(
                f"image_side is {self.image_side}: it must go from low to high, from 32 pixels on"
            )
