"""One training step: views, the method, the divergence, and the weighted sum of their losses."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import TeacherSettings
from deepbregman.errors import UserError
from deepbregman.method.networks import Model

from .divergence import DivergenceTerm
from .objective import Gather, Group, Objective, Outputs, Samples, ViewGroups
from .own import AnyViews, check_divergence_inputs, check_outputs
from .rotation import RotationTerm
from .teacher import Teacher, momentum_at

NO_SAMPLES = Samples()


def gather_alone(mine: Tensor) -> Tensor:
    """Join the embeddings of one process: there is nothing to join."""
    return mine


class StepOutputs(NamedTuple):
    """The outputs of a step: the loss, with gradient, and detached tensors for diagnostics."""

    total: Tensor
    losses: Tensor  # (1 + T,) the total and its T terms, in the order of ``Step.weights``
    student: Tensor  # (M, N, d) of every process
    teacher: Tensor | None  # (M', N, d) of every process
    representation: Tensor  # (M, n, h) of this process
    scores: Tensor | None  # (M, N, K) of every process, None without divergence


class Step(nn.Module):
    """Everything that is trained, and the weighted sum of its losses; compiled as one.

    Args:
        divergence: the term beside it, or None.
        teacher_settings: of the teacher that gives the divergence its targets where the method has
            none; it sees the weak views.
        rotation: another term beside it, which sees the small views, or None.
    """

    factors: Tensor

    def __init__(
        self,
        views: ViewGroups[AnyViews],
        objective: Objective,
        divergence: DivergenceTerm | None,
        gather: Gather = gather_alone,
        teacher_settings: TeacherSettings | None = None,
        rotation: RotationTerm | None = None,
    ) -> None:
        super().__init__()
        self.views = views
        self.objective = objective
        self.divergence = divergence
        self.rotation = rotation
        self.teacher_settings = teacher_settings
        self.teacher: Teacher | None = None
        if teacher_settings is not None:
            self.teacher = Teacher(objective.join_student(), teacher_settings.momentum)
        self.gather = gather
        self.weights = dict(objective.weights)
        """Weight of each loss term in the total, by name."""
        for term in (divergence, rotation):
            self.weights |= {} if term is None else term.weights
        # A compiled step that reads the names from the dictionary is tied to its values.
        self.term_names = tuple(self.weights)
        self._method_terms = tuple(objective.weights)
        factors = torch.tensor(list(self.weights.values()))
        self.register_buffer("factors", factors, persistent=False)

    @property
    def model(self) -> Model:
        """The networks that evaluation looks at."""
        networks = self.objective.encoder, self.objective.projection
        term = self.divergence
        return (
            Model(*networks, None) if term is None else Model(*networks, term.network, term.sigma)
        )

    def forward(
        self,
        images: Tensor,
        sizes: Tensor | None,
        uniforms: ViewGroups[Tensor],
        samples: Samples = NO_SAMPLES,
    ) -> StepOutputs:
        """Compute the losses of a batch.

        Args:
            images: (n, 3, H, W) uint8 of this process.
            sizes: (n, 2) true sizes of padded images, or None.
            uniforms: the randomness of each group of views, (M, n, R).
            samples: of this process, where the method asks for them.
        """
        main = self.views.main(images, sizes, uniforms.main)
        # By name, since the compiler of torch 2.7 cannot slice a named tuple.
        pairs = ((self.views.weak, uniforms.weak), (self.views.small, uniforms.small))
        weak, small = (
            None if group is None else group(images, sizes, random) for group, random in pairs
        )
        outputs: Outputs = self.objective(
            ViewGroups(main, weak, small), self.gather, self._join(samples)
        )
        name, is_taught = type(self.objective).__name__, self.teacher is not None
        check_outputs(outputs, name, self._method_terms)
        if self.divergence is not None:
            check_divergence_inputs(outputs, name, self.divergence, is_taught)
        terms, scores = outputs.terms, None
        targets, same_views = outputs.teacher, self.objective.teaches_same_views
        if self.teacher is not None and weak is not None:  # the teacher beside the method
            targets = self.objective.embed_by(self.teacher, weak, self.gather)
            same_views = False
        if self.divergence is not None:
            found = self.divergence(outputs.student, targets, same_views)
            terms, scores = {**terms, **found.terms}, found.scores
        if self.rotation is not None and small is not None:
            terms = {**terms, **self.rotation(self.objective, small, self.gather)}
        weighted = [
            factor * terms[name]
            for name, factor in zip(self.term_names, self.factors.unbind(), strict=True)
        ]
        total = weighted[0]
        for value in weighted[1:]:
            total = total + value
        if torch.is_grad_enabled() and not total.requires_grad:
            raise UserError(
                f"no loss term of {name} depends on a weight that is trained: leave out detach() "
                "and torch.no_grad() where the loss is computed"
            )
        return StepOutputs(
            total,
            torch.stack([total, *(terms[name] for name in self.term_names)]).detach(),
            outputs.student.detach(),
            targets,
            outputs.representation.detach(),
            scores,
        )

    def _join(self, samples: Samples) -> Samples:
        """Join the samples of all processes, in the order in which embeddings are joined."""
        indices, labels = (
            None if mine is None else self.gather(mine.view(1, -1, 1)).flatten()
            for mine in (samples.indices, samples.labels)
        )
        return Samples(indices, labels, samples.random, samples.first)

    def follow_schedule(self, step: int, steps_per_epoch: int) -> None:
        """Set the weight of the divergence, which may warm up."""
        term = self.divergence
        if term is None or "divergence" not in self.term_names:
            return
        # At the first step after the warm-up, the weight gets its full value.
        if step <= round(term.settings.warmup_epochs * steps_per_epoch):
            place = self.term_names.index("divergence")
            self.factors[place].fill_(term.weight_at(step, steps_per_epoch))

    def after_step(self, progress: float) -> None:
        """Update what has no gradient: parts of the method, then the teacher."""
        self.objective.after_step(progress)
        momentum = self.objective.momentum
        if self.teacher is not None and self.teacher_settings is not None:
            settings = self.teacher_settings
            momentum = momentum_at(settings.momentum, settings.schedule, progress)
            self.teacher.update(self.objective.join_student(), momentum)
        if self.divergence is not None:
            self.divergence.after_step(momentum)

    def parameter_groups(self) -> list[Group]:
        """List the parameters to train."""
        groups = self.objective.parameter_groups()
        for term in (self.divergence, self.rotation):
            groups = groups if term is None else groups + term.parameter_groups()
        return groups

    def metrics(self) -> dict[str, Tensor]:
        """Return scalars to log after each epoch."""
        return self.objective.metrics() | (
            {} if self.divergence is None else self.divergence.metrics()
        )

    def diagnose(self, outputs: StepOutputs) -> dict[str, Tensor]:
        """Compute diagnostics of the divergence; empty without one."""
        if self.divergence is None or outputs.scores is None:
            return {}
        return self.divergence.diagnose(outputs.scores)

    def warn(self, record: dict[str, float], num_samples: int) -> list[str]:
        """Say what looks wrong in the diagnostics of a batch; see :class:`DivergenceTerm`."""
        return [] if self.divergence is None else self.divergence.warn(record, num_samples)
