"""The base of methods with a momentum teacher."""

from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import MomentumSettings
from deepbregman.method.networks import Encoder

from .objective import Gather, Objective, build_head
from .teacher import Teacher, momentum_at


class MomentumObjective(Objective):
    """A method with a teacher: a copy of its encoder and projection that follows them slowly.

    Where several processes train, batch normalisation of student and teacher is over the joint
    batch. So no image can tell its target by the statistics of a small batch, and batches need not
    be shuffled between processes, as MoCo does.
    """

    def __init__(
        self,
        settings: MomentumSettings,
        encoder: Encoder,
        widths: EncoderSettings,
        weights: dict[str, float],
    ) -> None:
        super().__init__(encoder, build_head(encoder, widths), weights)
        self.first_momentum, self.final_momentum = settings.momentum, settings.final_momentum
        self.momentum = settings.momentum
        self.teacher = Teacher(self.join_student(), settings.momentum)

    def teach(self, views: Tensor, gather: Gather) -> Tensor:
        """Embed views (M, n, 3, S, S) by the teacher and join all processes': (M, N, d)."""
        return self.embed_by(self.teacher, views, gather)

    def after_step(self, progress: float) -> None:
        """Let the teacher follow."""
        self.momentum = momentum_at(self.first_momentum, "cosine", progress, self.final_momentum)
        self.teacher.update(self.join_student(), self.momentum)
