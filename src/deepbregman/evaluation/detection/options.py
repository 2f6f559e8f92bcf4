"""The options of detection, checked on construction; no torch, so that a help text stays fast."""

from dataclasses import dataclass
from typing import Annotated, Literal

from deepbregman.config import Count, NotNegative, Positive, Whole
from deepbregman.errors import UserError
from deepbregman.rules import Range, Section

Architecture = Literal["c4", "fpn"]
Norm = Literal["train", "frozen"]
Arm = Literal["pretrained", "random"]


@dataclass(frozen=True)
class Detect(Section):
    """Options of detect; the defaults are MoCo's protocol."""

    architectures: tuple[Architecture, ...] = ("c4",)
    """c4: one feature map, of stride 16, and the fourth stage as the head. fpn: a pyramid."""
    arms: tuple[Arm, ...] = ("pretrained", "random")
    """pretrained: the run's encoder. random: the same network, untrained, for comparison."""
    iterations: Count = 24_000
    """Of SGD; the learning rate falls by 10 after 3/4 and after 11/12 of them."""
    batch_size: Count = 16
    """Images in an iteration."""
    learning_rate: Positive = 0.02
    """For batches of 16; never scaled behind your back, so lower it for smaller batches."""
    image_side: Annotated[tuple[int, int], Range(low=32, increasing=True)] = (480, 800)
    """Short side of a training image in pixels, from and to; test images have the latter."""
    norm: Norm = "train"
    """train: batch norms are fine-tuned, as MoCo does. frozen: as pretrained (no random arm)."""
    regions: Count = 512
    """Sampled in each training image for the head; fewer for small trials."""
    proposals: Count = 1000
    """Handed to the head in each test image; fewer for small trials."""
    train_on_difficult: bool = True
    """Train on objects marked difficult too, as detectron2 does; the test never counts them."""
    clip_gradient: NotNegative = 0.0
    """Largest norm of the gradient; 0 is off."""
    workers: Whole = 4
    """Processes that decode images."""
    save_seconds: NotNegative = 300.0
    """What a crash can cost; a signal saves at once."""
    keep_weights: bool = False
    """Leave the fine-tuned detector in detector.safetensors."""

    def __post_init__(self) -> None:
        """Check every value, and what spans several."""
        super().__post_init__()
        for name in ("architectures", "arms"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise UserError(f"detect.{name} is {list(given)}: name at least one, each once")
        if self.norm == "frozen" and "random" in self.arms:
            raise UserError(
                "detect.norm is 'frozen' with the random arm: an untrained network has no "
                "statistics to keep, and would not train; use train, or the pretrained arm alone"
            )
