"""Start the processes of a run, watch them, and find the rank of this one. Needs no torch.

Whoever starts the processes describes them by environment variables. Those of torchrun and of srun
are understood. :func:`run_in_processes` sets torchrun's, so a process need not know who started it.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import NamedTuple, NoReturn

from .errors import ReportedElsewhere, UserError

COMMAND_LINE: ContextVar[list[str] | None] = ContextVar("COMMAND_LINE", default=None)
"""The words of the command line under way; None when Python calls a function itself."""
GRACE_SECONDS = 15.0
"""How long the processes of a run have to end by themselves once one of them has failed."""
LAUNCHER = "DEEPBREGMAN_LAUNCHER"
"""Environment variable that holds the process id of our launcher in the processes it started."""
ANNOUNCEMENTS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that announce an end: SIGHUP, when a terminal closes, and the others, of which batch
systems send one before a job's time limit."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_POLL_SECONDS = 0.1


class ProcessDied(Exception):
    """A signal from outside killed a process of the run."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal_number = number


class Process(NamedTuple):
    """The position of a process among those of its run."""

    rank: int = 0
    """Among all processes; process 0 writes and prints."""
    processes: int = 1
    local_rank: int = 0
    """Among the processes of the same machine."""
    local_processes: int = 1

    @property
    def nodes(self) -> int:
        """How many machines take part, each with the same number of processes."""
        return self.processes // self.local_processes


def under_torchrun() -> bool:
    """Whether torchrun started this process, or a program that sets the same variables."""
    return all(name in os.environ for name in _TORCHRUN)


def under_srun() -> bool:
    """Whether srun started this process as one of several tasks; a batch script alone does not."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return tasks not in ("", "0", "1") and "SLURM_PROCID" in os.environ


def find_process() -> Process:
    """Read this process's position from the environment; without variables it is alone."""
    if under_torchrun():
        return Process(*map(_read_count, _TORCHRUN))
    if not under_srun():
        return Process()
    processes = _read_count("SLURM_STEP_NUM_TASKS")
    nodes = _read_count("SLURM_STEP_NUM_NODES", default="1")
    uneven = "," in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if nodes < 1 or processes % nodes or uneven:
        raise UserError(
            f"srun started {processes} tasks on {nodes} nodes: every node must have the same "
            "number; use --ntasks-per-node"
        )
    ranks = [_read_count(name) for name in ("SLURM_PROCID", "SLURM_LOCALID")]
    return Process(ranks[0], processes, ranks[1], processes // nodes)


def _read_count(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise UserError(f"environment variable {name} is {text!r}: it must be a whole number")
    return int(text)


def is_first_of_machine() -> bool:
    """Whether this process prints what every process of its machine would print."""
    name = "LOCAL_RANK" if under_torchrun() else "SLURM_LOCALID" if under_srun() else ""
    return os.environ.get(name, "0") == "0"


def leave_group() -> Process:
    """Separate this process from the group that it was started in."""
    here = find_process()
    for name in (*_TORCHRUN, "SLURM_STEP_NUM_TASKS", LAUNCHER):
        os.environ.pop(name, None)
    return here


def require_one_process(command: str) -> None:
    """Refuse a command in one of several processes: each would do all the work and write it."""
    here = find_process()
    if here.processes > 1:
        who = "torchrun" if under_torchrun() else "srun"
        raise UserError(
            f"{command} runs in one process, but {who} started {here.processes}: start one (srun "
            "--ntasks=1), and give it the GPUs of the machine by --devices all"
        )


def must_start_processes(devices: int | None, nodes: int | None) -> bool:
    """Whether processes are still to be started; refuse numbers that contradict those running.

    Args:
        devices: processes on each machine, as asked for; None leaves it to torchrun or srun.
    """
    for name, count in (("devices", devices), ("nodes", nodes)):
        if count is not None and count < 1:
            raise UserError(f"--{name} is {count}: it must be 1 or more")
    if not under_torchrun() and not under_srun():
        return (devices or 1) * (nodes or 1) > 1
    here = find_process()
    for name, asked, running in (
        ("devices", devices, here.local_processes),
        ("nodes", nodes, here.nodes),
    ):
        if asked is not None and asked != running:
            who = "torchrun" if under_torchrun() else "srun"
            raise UserError(
                f"--{name} is {asked}, but {who} started {here.processes} processes on "
                f"{here.nodes} nodes: leave --{name} out, or start as many"
            )
    return False


def run_in_processes(
    devices: int, nodes: int, extra: Sequence[str], advise: Callable[[], str]
) -> NoReturn:
    """Run the command line under way in several processes until all have ended.

    When one fails, the others have a moment to end by themselves, then they are killed: a process
    that waits for a dead one would wait for long. Signals are passed on, once.

    Args:
        extra: words to add to the command line.
        advise: says what to do after a process died, for the error.

    Raises:
        ReportedElsewhere: always, with the exit code of the first process that failed, or 0.
        ProcessDied: a signal killed one of them.
    """
    words = COMMAND_LINE.get()
    if words is None:
        raise UserError(
            f"devices is {devices} and nodes is {nodes}: only the command line starts processes; "
            "start your script by torchrun and leave both out"
        )
    command = [sys.executable, "-m", "deepbregman", *words, *extra]
    environments = _make_environments(devices, nodes)
    started: list[subprocess.Popen[bytes]] = []
    with _pass_on_signals(started):
        try:
            # A session of their own: a Ctrl-C of the terminal reaches them through this process
            # only, and so once.
            for environment in environments:
                started.append(subprocess.Popen(command, env=environment, start_new_session=True))
            failed = _wait(started)
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    code = 0 if failed is None else started[failed].returncode
    if failed is not None and code < 0:
        rank = environments[failed]["RANK"]
        raise ProcessDied(
            f"process {rank} of processes 0 to {devices * nodes - 1} was killed by "
            f"{signal.Signals(-code).name}; the others were stopped; {advise()}",
            -code,
        )
    raise ReportedElsewhere(code)


def _make_environments(devices: int, nodes: int) -> list[dict[str, str]]:
    shared = {"WORLD_SIZE": str(devices * nodes), "LOCAL_WORLD_SIZE": str(devices)}
    if nodes == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        node = 0
    else:
        absent = [name for name in ("MASTER_ADDR", "NODE_RANK") if name not in os.environ]
        if absent:
            raise UserError(
                f"--nodes is {nodes}, but there is no {' and no '.join(absent)}: run this command "
                "on every node with MASTER_ADDR, the address of the first, and NODE_RANK, 0 to "
                f"{nodes - 1}; or start it by srun or torchrun"
            )
        node = int(os.environ["NODE_RANK"]) if os.environ["NODE_RANK"].isdecimal() else nodes
        if node >= nodes:
            raise UserError(
                f"NODE_RANK is {os.environ['NODE_RANK']!r}: with --nodes {nodes} it must be a "
                f"whole number from 0 to {nodes - 1}"
            )
        shared["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29500")
    shared |= {"GROUP_RANK": str(node), LAUNCHER: str(os.getpid())}
    return [
        os.environ | shared | {"RANK": str(node * devices + local), "LOCAL_RANK": str(local)}
        for local in range(devices)
    ]


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended, or some time after a failure; return the index of its cause."""
    deadline, cause = float("inf"), None
    while True:
        running = any(process.poll() is None for process in started)
        failed = [index for index, process in enumerate(started) if process.returncode]
        if failed and cause is None:
            # A process that was killed comes first: it could not report an error itself.
            cause = min(failed, key=lambda index: (started[index].returncode > 0, index))
            deadline = time.monotonic() + GRACE_SECONDS
        if not running or time.monotonic() > deadline:
            return cause
        time.sleep(_POLL_SECONDS)


class StoppedBySignal(KeyboardInterrupt):
    """A signal that is taken as Ctrl-C is, which evaluations and Optuna know."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {name_signal(number)}")
        self.signal_number = number


def take_as_ctrl_c(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal as Python handles Ctrl-C."""
    raise StoppedBySignal(number)


def find_signal(error: KeyboardInterrupt) -> int:
    """Return the signal that an exception stands for."""
    return error.signal_number if isinstance(error, StoppedBySignal) else signal.SIGINT


def name_signal(number: int) -> str:
    """Name a signal as the user knows it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def handle_signals(
    numbers: Collection[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[bool]:
    """Give signals to a function until the block ends.

    Yields False where it does not: only the main thread may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield True
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def list_stopping_signals() -> tuple[signal.Signals, ...]:
    """List the signals that ask for an end: SIGTERM, Ctrl-C, and those of ``ANNOUNCEMENTS``.

    One that is ignored stays ignored, as SIGHUP is under nohup; one for which a program has a
    Python handler of its own stays with it.
    """
    announced = [getattr(signal, name) for name in ANNOUNCEMENTS if hasattr(signal, name)]
    free = [number for number in announced if signal.getsignal(number) == signal.SIG_DFL]
    return signal.SIGTERM, signal.SIGINT, *free


@contextmanager
def _pass_on_signals(started: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass signals that ask for an end on to processes."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    with handle_signals(list_stopping_signals(), pass_on):
        yield


def when_launcher_ends(act: Callable[[], None]) -> None:
    """Call a function, from a thread, once the launcher that started this process is gone."""
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        act()

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()
