"""Causes that stop a run: signals, a full disk or memory, non-finite numbers."""

import os
import shlex
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepbregman.config import Config
from deepbregman.errors import (
    Diverged,
    ReportedElsewhere,
    UserError,
    explain_error,
    explain_workers,
    first_line,
    is_out_of_memory,
)
from deepbregman.launching import (
    COMMAND_LINE,
    LAUNCHER,
    find_process,
    handle_signals,
    list_stopping_signals,
    name_signal,
)
from deepbregman.terminal import count_words, join_words

if TYPE_CHECKING:
    from .fabric import Fabric


GRACE_SECONDS = 1.0
"""Time that Python gets to answer a second Ctrl-C, before the process ends."""


class Interrupted(Exception):
    """A signal stopped the run, which has saved itself; ``advice`` says how to continue."""

    def __init__(self, number: int, advice: str) -> None:
        super().__init__(f"stopped by {name_signal(number)}; everything is saved, {advice}")
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
    command: str = "", has_nothing_to_save: Callable[[], bool] = lambda: False
) -> Iterator[list[int]]:
    """Collect signals that ask the program to end in a list; a second Ctrl-C stops at once.

    Args:
        command: what continues the run; with it, the first Ctrl-C is confirmed on standard
            error, and the second ends the process even within a long call of C code, unless the
            process is a program of the user's own.
        has_nothing_to_save: whether a signal raises :class:`StoppedAtOnce` now.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if has_nothing_to_save():
            raise StoppedAtOnce(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    watched = list_stopping_signals()
    with handle_signals(watched, receive) as is_watching:
        answers = _answer_at_once(watched, has_nothing_to_save, command)
        can_answer = hasattr(os, "set_blocking")  # not on Windows before Python 3.12
        with answers if is_watching and command and can_answer else nullcontext():
            yield received


def describe_hard_stop(command: str) -> str:
    """Say what a second Ctrl-C did."""
    words = "stopped at once, without saving; an earlier checkpoint, if there is one, is kept"
    return f"{words}; continue with: {command}"


@contextmanager
def _answer_at_once(
    watched: Collection[int], has_nothing_to_save: Callable[[], bool], command: str
) -> Iterator[None]:
    """Confirm a Ctrl-C, if it is the first of the watched signals, from a thread.

    Python's own handlers wait until a call of C code has ended, and the backward pass of a large
    batch takes minutes on a CPU. So a second Ctrl-C that Python does not get to in time ends the
    process here, as a kill would: files are never half-written.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    ended = threading.Event()
    is_ours = COMMAND_LINE.get() is not None  # a notebook would lose all that it has computed

    def wait_for(*numbers: int) -> int:
        while (number := os.read(reading, 1)[0]) not in (0, *numbers):  # 0 is the end
            pass
        return number

    def answer() -> None:
        if wait_for(*watched) != signal.SIGINT or has_nothing_to_save():
            return
        with suppress(OSError):  # standard error is closed
            os.write(2, b"\nsaving after this step; Ctrl-C again stops at once\n")
        if not is_ours or wait_for(signal.SIGINT) == 0 or ended.wait(GRACE_SECONDS):
            return
        with suppress(OSError):
            shown = "\x1b[?25h" if os.isatty(2) else ""  # the bar hides the cursor
            os.write(2, f"{shown}\n{describe_hard_stop(command)}\n".encode())
        os._exit(128 + signal.SIGINT)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)


def format_resume_command(config: Config, folder: Path) -> str:
    """Return the command that continues a run, or the call, if a part is the user's own code."""
    named = (config.data.source, config.encoder.name, config.objective.name)
    if "custom" in named or any(group.custom for group in config.view_groups.values()):
        return f"deepbregman.resume({str(folder)!r}, ...) in Python, with the same parts"
    command = f"deepbregman pretrain --resume {shlex.quote(str(folder))}"
    here = find_process()
    if LAUNCHER not in os.environ:
        return command + ", by torchrun or srun as before" * (here.processes > 1)
    nodes = f" --nodes {here.nodes}" if here.nodes > 1 else ""
    return f"{command} --devices {here.local_processes}{nodes}"


@contextmanager
def explain_faults(config: Config, folder: Path) -> Iterator[None]:
    """Explain to the user how the disk, the memory or a second Ctrl-C stopped a run."""
    command = format_resume_command(config, folder)
    try:
        yield
    except KeyboardInterrupt as error:
        if (folder / "config.toml").is_file():
            error.args = (describe_hard_stop(command),)
        raise
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
        training = config.training
        raise UserError(
            f"out of memory ({first_line(error)}) with training.batch_size {training.batch_size} "
            f"times {count_words(config.views.num_views, 'view')} of {config.view_size} px and "
            f"encoder {config.encoder.name}: lower training.batch_size and raise "
            f"training.accumulate ({training.accumulate}) in proportion, lower "
            "views.relative_size, data.image_size or divergence.num_subnetworks, or keep the "
            "images off the device with --data.resident no"
        ) from error


class Guard:
    """Finds losses, gradients and parameters that are not finite.

    Where no batch may be skipped, finite steps are counted on the device and read at the end of an
    epoch, so that the host never waits for a step. Otherwise the host reads one number before each
    optimiser step.
    """

    def __init__(
        self,
        step: nn.Module,
        term_names: Sequence[str],
        optimiser: Optimizer,
        fabric: "Fabric",
        config: Config,
    ) -> None:
        self.term_names = term_names
        self.module, self.optimiser, self.fabric = step, optimiser, fabric
        self.allowed = config.training.skip_nonfinite
        self.learning_rate = config.optimiser.learning_rate
        self.skipped = 0
        self.skipped_in_epoch = 0
        self.skipped_last = False
        self._first_step, self._checked_step = 0, -1
        # For each loss, how many steps its running sum has been finite.
        self._finite = torch.zeros(len(term_names), dtype=torch.int64, device=fabric.device)
        self._buffers: list[Tensor] = []
        # A mask of the user's may hold the infinite from the start.
        self._odd_buffers = {
            name
            for name, buffer in step.named_buffers(remove_duplicate=False)
            if buffer.is_floating_point() and not torch.linalg.vector_norm(buffer).isfinite()
        }

    def start_counting(self, step: int) -> None:
        """Count finite steps from this one on."""
        self._first_step = step
        self._finite.zero_()

    def count(self, sums: Tensor) -> None:
        """Count a step for each loss whose running sum is finite; the host does not wait."""
        self._finite += sums.isfinite()

    def keep_buffers(self) -> None:
        """Keep what the forward pass changes, such as running means, to undo a skipped step."""
        if self.allowed:
            self._buffers = [buffer.clone() for buffer in self.module.buffers()]

    def should_skip(self, losses: Tensor, step: int) -> bool:
        """Whether to skip a step, counted from 0, because its loss or gradient is not finite."""
        self.skipped_last = False
        if not self.allowed:
            return False
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        is_bad = (~(norm + losses.sum()).isfinite()).float()
        # All processes must agree: otherwise they would wait for each other forever.
        if not self.fabric.all_reduce(is_bad, reduce_op="sum"):
            return False
        if self.skipped == self.allowed:
            raise self._make_error(
                f"the loss or a gradient is not finite at step {step + 1}, and training."
                f"skip_nonfinite lets no more than {count_words(self.allowed, 'batch')} pass",
                step - self.skipped,
            )
        self.skipped += 1
        self.skipped_in_epoch += 1
        self.skipped_last = True
        for buffer, before in zip(self.module.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        return True

    def check(self, step: int) -> None:
        """Stop a run that has diverged by ``step``; the host waits for the device."""
        if step == self._checked_step:
            return
        counts = self._finite.tolist()
        finite = self._first_step + min(counts)
        if finite < step:
            named = zip(self.term_names, counts, strict=True)
            first = [name for name, count in named if count == min(counts) and name != "total"]
            noun = "term" if len(first) == 1 else "terms"
            where = f", first in the {noun} {join_words(first)}" if first else ""
            raise Diverged(
                f"the loss is not finite from step {finite + 1} on{where}: {self._advice(finite)}"
            )
        state = self.module.state_dict()
        tensors = [tensor for name, tensor in state.items() if name not in self._odd_buffers]
        for moments in self.optimiser.state.values():
            tensors += [value for value in moments.values() if isinstance(value, Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        # One norm of them all, so that the host waits once.
        if not torch.nn.utils.get_total_norm(floats).isfinite():
            raise Diverged(f"the parameters are not finite after step {step}: {self._advice(step)}")
        self._checked_step = step

    def end_epoch(self, steps: int) -> int:
        """Return how many steps of an epoch were not skipped, and reset the count."""
        counted = steps - self.skipped_in_epoch
        if counted == 0:
            raise self._make_error("no batch of the epoch had a finite loss", self._first_step)
        self.skipped_in_epoch = 0
        return counted

    def _make_error(self, words: str, taken: int) -> Exception:
        """Make the error that every process raises at the same step; process 0 prints it."""
        error = Diverged(f"{words}: {self._advice(taken)}")
        return error if self.fabric.is_global_zero else ReportedElsewhere(2)

    def _advice(self, taken: int) -> str:
        """Say what to do about numbers that are not finite after so many sound steps."""
        more = "" if self.allowed else ", or let single batches pass with training.skip_nonfinite"
        if taken == 0:
            return (
                "no weight had changed before, so the learning rate is not the cause; look at the "
                "loss, at the images and at the weights that the run started from, for example "
                f"for a division by zero or the logarithm of zero{more}"
            )
        return (
            "training has diverged; the checkpoints from before are kept; lower "
            f"optimiser.learning_rate ({self.learning_rate}) or lengthen optimiser.warmup_epochs"
            f"{more}"
        )
