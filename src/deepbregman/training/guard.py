"""The guard of a run's numbers: it finds the step that went wrong, and nothing bad is saved."""

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from deepbregman.config import Config
from deepbregman.errors import Diverged, ReportedElsewhere


class Guard:
    """Watches losses, gradients and parameters for what is not finite.

    Where no batch may be skipped, all is counted on the device and read at the end of an epoch, so
    that the host never waits for a step. Otherwise it reads one number before each optimiser step.

    Args:
        objective: what is trained.
        optimiser: moves it.
        fabric: of the run.
        config: of the run.
    """

    def __init__(
        self, objective: nn.Module, optimiser: Optimizer, fabric: Fabric, config: Config
    ) -> None:
        self.objective, self.optimiser, self.fabric = objective, optimiser, fabric
        self.allowed = config.training.skip_nonfinite
        self.learning_rate = config.optimiser.learning_rate
        self.skipped = 0
        self.skipped_in_epoch = 0
        self.skipped_last = False
        self._first, self._sound_at = 0, -1
        self._finite = torch.zeros((), dtype=torch.int64, device=fabric.device)
        self._buffers: list[Tensor] = []

    def start_counting(self, step: int) -> None:
        """Count finite steps from this one on."""
        self._first = step
        self._finite.zero_()

    def count(self, sums: Tensor) -> None:
        """Count a step while the running sums of the losses are finite; waits for nothing."""
        self._finite += sums.isfinite().all()

    def remember(self) -> None:
        """Before a step, keep what its forward pass changes: the statistics of batches."""
        if self.allowed:
            self._buffers = [buffer.clone() for buffer in self.objective.buffers()]

    def skips(self, losses: Tensor, step: int) -> bool:
        """Whether to leave a step out, its loss or gradient not being finite.

        Args:
            losses: of the step.
            step: counted from 0.
        """
        self.skipped_last = False
        if not self.allowed:
            return False
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        is_bad = (~(norm + losses.sum()).isfinite()).float()
        # All processes must agree, or they would wait for each other for ever.
        if not self.fabric.all_reduce(is_bad, reduce_op="sum"):
            return False
        if self.skipped == self.allowed:
            raise self._said_once(
                f"the loss or a gradient is not finite at step {step + 1}, and training."
                f"skip_nonfinite lets no more than {self.allowed} batches pass"
            )
        self.skipped += 1
        self.skipped_in_epoch += 1
        self.skipped_last = True
        for buffer, before in zip(self.objective.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        return True

    def check(self, step: int) -> None:
        """Stop a run that has diverged by now, so many steps being done; waits for the device."""
        if step == self._sound_at:
            return
        finite = self._first + int(self._finite)
        if finite < step:
            raise Diverged(f"the loss is not finite from step {finite + 1} on: {self._advice()}")
        tensors = list(self.objective.state_dict().values())
        for moments in self.optimiser.state.values():
            tensors += [value for value in moments.values() if isinstance(value, Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not torch.nn.utils.get_total_norm(floats).isfinite():  # one number of all, one wait
            raise Diverged(f"the parameters are not finite after step {step}: {self._advice()}")
        self._sound_at = step

    def end_epoch(self, steps: int) -> int:
        """Return how many of an epoch's steps were not skipped, and count the next one's anew."""
        counted = steps - self.skipped_in_epoch
        if counted == 0:
            raise self._said_once("no batch of the epoch had a finite loss")
        self.skipped_in_epoch = 0
        return counted

    def _said_once(self, words: str) -> Exception:
        """Make the error of what all processes find at the same step: the first of them says it."""
        error = Diverged(f"{words}: {self._advice()}")
        return error if self.fabric.is_global_zero else ReportedElsewhere(2)

    def _advice(self) -> str:
        more = "" if self.allowed else ", or let single batches pass with training.skip_nonfinite"
        return (
            "training has diverged; the checkpoints from before are kept; lower "
            f"optimiser.learning_rate ({self.learning_rate}) or lengthen optimiser.warmup_epochs"
            f"{more}"
        )
