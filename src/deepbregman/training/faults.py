"""Causes that stop a run: signals, a full disk or memory, non-finite numbers."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepbregman.config import Config
from deepbregman.errors import (
    Diverged,
    UserError,
    explain_error,
    explain_workers,
    first_line,
    is_out_of_memory,
)
from deepbregman.launching import LAUNCHER, find_process, list_stopping_signals


class Interrupted(Exception):
    """A signal stopped the run, which has saved itself; ``advice`` says how to continue."""

    def __init__(self, folder: Path, number: int, advice: str | None = None) -> None:
        advice = advice or f"continue with: deepbregman pretrain --resume {folder}"
        super().__init__(f"stopped by {signal.Signals(number).name}; everything is saved, {advice}")
        self.signal_number = number


class Fault(UserError):
    """The disk or the machine stopped a run; a study says otherwise how to continue."""

    def __init__(self, words: str, command: str) -> None:
        super().__init__(f"{words}; then continue with: {command}")
        self.words = words


class StoppedAtOnce(BaseException):
    """A signal came while there was nothing to save; no library in between catches this."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal_number = number


@contextmanager
def watch_signals(
    announce: bool = False, has_nothing_to_save: Callable[[], bool] = lambda: False
) -> Iterator[list[int]]:
    """Collect signals that ask the program to end in a list; a second Ctrl-C stops at once.

    Args:
        announce: confirm the first Ctrl-C on standard error.
        has_nothing_to_save: whether a signal raises :class:`StoppedAtOnce` now.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set handlers
        return

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if has_nothing_to_save():
            raise StoppedAtOnce(number)
        if announce and number == signal.SIGINT:
            with suppress(OSError):  # print() is not safe in a signal handler
                os.write(2, b"\nsaving after this step; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, receive) for number in list_stopping_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def name_resume(config: Config, folder: Path) -> str:
    """Return the command that continues a run, or the call, if a part is the user's own code."""
    named = (config.data.source, config.encoder.name, config.objective.name)
    if "custom" in named or any(group.custom for group in config.view_groups.values()):
        return f"deepbregman.resume({str(folder)!r}, ...) in Python, with the same parts"
    command = f"deepbregman pretrain --resume {folder}"
    here = find_process()
    if LAUNCHER not in os.environ:
        return command + ", by torchrun or srun as before" * (here.processes > 1)
    nodes = f" --nodes {here.nodes}" if here.nodes > 1 else ""
    return f"{command} --devices {here.local_processes}{nodes}"


@contextmanager
def explain_faults(config: Config, folder: Path) -> Iterator[None]:
    """Explain to the user how the disk, the memory or a second Ctrl-C stopped a run."""
    command = name_resume(config, folder)
    try:
        yield
    except KeyboardInterrupt:
        if not (folder / "config.toml").is_file():
            raise
        words = "stopped at once, without saving; what was saved before is kept"
        raise KeyboardInterrupt(f"{words}, continue with: {command}") from None
    except OSError as error:
        if not folder.exists() and str(error.filename or "").startswith(str(folder)):
            raise Fault(
                f"the run folder {folder} is gone: it was removed or moved while the run was "
                "training; put it back",
                command,
            ) from error
        explained = explain_error(error)
        if explained is None or not (folder / "config.toml").is_file():
            raise
        raise Fault(explained[0], command) from error
    except (RuntimeError, MemoryError) as error:
        workers = explain_workers(error)
        if workers is not None:
            raise Fault(workers, command) from error
        if not is_out_of_memory(error):
            raise
        raise UserError(_explain_memory(config, error)) from error


def _explain_memory(config: Config, error: BaseException) -> str:
    training = config.training
    return (
        f"out of memory ({first_line(error)}) with training.batch_size {training.batch_size} times "
        f"{config.views.num_views} views of {config.view_size} px and encoder "
        f"{config.encoder.name}: lower training.batch_size and raise training.accumulate "
        f"({training.accumulate}) in proportion, lower views.relative_size, data.image_size or "
        "divergence.num_subnetworks, or keep the images off the device with --data.resident no"
    )


class Guard:
    """Finds losses and parameters that are not finite.

    Finite steps are counted on the device and read at the end of an epoch, so that the host never
    waits for a step.
    """

    def __init__(
        self, step: nn.Module, optimiser: Optimizer, config: Config, device: torch.device
    ) -> None:
        self.module, self.optimiser = step, optimiser
        self.learning_rate = config.optimiser.learning_rate
        self._first, self._sound_at = 0, -1
        self._finite = torch.zeros((), dtype=torch.int64, device=device)

    def start_counting(self, step: int) -> None:
        """Count finite steps from this one on."""
        self._first = step
        self._finite.zero_()

    def count(self, sums: Tensor) -> None:
        """Count a step if the running sums of the losses are finite; the host does not wait."""
        self._finite += sums.isfinite().all()

    def check(self, step: int) -> None:
        """Stop a run that has diverged by ``step``; the host waits for the device."""
        if step == self._sound_at:
            return
        finite = self._first + int(self._finite)
        if finite < step:
            raise self._make_error(f"the loss is not finite from step {finite + 1} on")
        tensors = list(self.module.state_dict().values())
        for moments in self.optimiser.state.values():
            tensors += [value for value in moments.values() if isinstance(value, Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        # One norm of them all, so that the host waits once.
        if not torch.nn.utils.get_total_norm(floats).isfinite():
            raise self._make_error(f"the parameters are not finite after step {step}")
        self._sound_at = step

    def _make_error(self, words: str) -> Diverged:
        return Diverged(
            f"{words}: training has diverged; the checkpoints from before are kept; lower "
            f"optimiser.learning_rate ({self.learning_rate}) or lengthen optimiser.warmup_epochs"
        )
