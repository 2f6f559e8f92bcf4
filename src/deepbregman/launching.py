"""Which process of how many this one is, and the start and supervision of several; no torch.

Whoever starts the processes says so by environment variables. Those of torchrun and of srun are
understood; :func:`supervise` sets torchrun's itself, so that a process of a run need not know who
started it.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from .errors import SaidElsewhere, UserError, explanation

GRACE = 15.0
"""Seconds that the processes of a run have to end by themselves once one of them has failed."""
LAUNCHER = "DEEPBREGMAN_LAUNCHER"
"""Names the process that supervises, in the environment of those it started."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_POLL = 0.1


class ProcessDied(Exception):
    """A signal killed a process of the run, from outside.

    Args:
        words: that name the process and say what to do.
        number: of the signal.
    """

    def __init__(self, words: str, number: int) -> None:
        super().__init__(words)
        self.signal_number = number


class Place(NamedTuple):
    """Where a process stands among those of its run."""

    rank: int = 0
    """Of all processes; process 0 writes and talks."""
    processes: int = 1
    local_rank: int = 0
    """Among those of the same machine."""
    local_processes: int = 1

    @property
    def nodes(self) -> int:
        """How many machines take part, each with as many processes."""
        return self.processes // self.local_processes


def under_torchrun() -> bool:
    """Whether torchrun started this process, or somebody who sets the same variables."""
    return all(name in os.environ for name in _TORCHRUN)


def under_srun() -> bool:
    """Whether srun started this process as a task of several; a batch script alone does not."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


def place() -> Place:
    """Read this process's place from the environment; alone when nothing says otherwise."""
    if under_torchrun():
        return Place(*(int(os.environ[name]) for name in _TORCHRUN))
    if under_srun():
        processes = int(os.environ["SLURM_STEP_NUM_TASKS"])
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", "1")))
        if processes % nodes:
            raise UserError(
                f"srun started {processes} tasks on {nodes} nodes: every node must have as many; "
                "use --ntasks-per-node"
            )
        local = processes // nodes
        ranks = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
        return Place(next(ranks), processes, next(ranks), local)
    return Place()


@contextmanager
def said_by_first() -> Iterator[None]:
    """Let an error that every process of a machine meets be printed by the first of them.

    For what comes before the processes can talk to each other: their arguments, their devices.
    """
    try:
        yield
    except Exception as error:
        explained = explanation(error)
        if explained is None or place().local_rank == 0:
            raise
        raise SaidElsewhere(explained[1]) from error


def check_asked_for(devices: int | None, nodes: int | None) -> bool:
    """Say whether processes are still to be started; refuse numbers that contradict those running.

    Args:
        devices: processes on each machine, as asked for; None leaves it to who starts them.
        nodes: machines, likewise.
    """
    for name, count in (("devices", devices), ("nodes", nodes)):
        if count is not None and count < 1:
            raise UserError(f"--{name} is {count}: it must be 1 or more")
    if not under_torchrun() and not under_srun():
        return (devices or 1) * (nodes or 1) > 1
    here = place()
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


def _environments(devices: int, nodes: int) -> list[dict[str, str]]:
    """Make the environment of each process of this machine."""
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
                f"--nodes is {nodes}, but {' and '.join(absent)} is not set: run this command on "
                "every node with MASTER_ADDR, the address of the first, and NODE_RANK, 0 to "
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


def supervise(arguments: Sequence[str], devices: int, nodes: int, advice: str) -> int:
    """Run the command line in several processes until all have ended.

    When one fails, the others get a moment to end by themselves, then are killed: a process that
    waits for a dead one would wait for long. Signals are passed on, once.

    Args:
        arguments: of the command line, the verb first.
        devices: processes on this machine.
        nodes: machines, each of which runs this.
        advice: what to do after a process died, for the error.

    Returns:
        The exit code of the first process that failed, or 0.

    Raises:
        ProcessDied: a signal killed one of them.
    """
    command = [sys.executable, "-m", "deepbregman", *arguments]
    environments = _environments(devices, nodes)
    started: list[subprocess.Popen[bytes]] = []
    with _passing_on(started):
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
    if failed is None:
        return 0
    code = started[failed].returncode
    if code < 0:
        rank = environments[failed]["RANK"]
        raise ProcessDied(
            f"process {rank} of processes 0 to {devices * nodes - 1} was killed by "
            f"{signal.Signals(-code).name}; the others were stopped; {advice}",
            -code,
        )
    return code


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended, or one has failed and the others had their grace."""
    deadline = None
    first: int | None = None
    while any(process.poll() is None for process in started):
        failed = [index for index, process in enumerate(started) if process.returncode]
        if failed and deadline is None:
            deadline, first = time.monotonic() + GRACE, _cause(started, failed)
        if deadline is not None and time.monotonic() > deadline:
            return first
        time.sleep(_POLL)
    failed = [index for index, process in enumerate(started) if process.returncode]
    return first if first is not None or not failed else _cause(started, failed)


def _cause(started: Sequence[subprocess.Popen[bytes]], failed: Sequence[int]) -> int:
    """Pick the process whose end explains the others': one that was killed could not say so."""
    return min(failed, key=lambda index: (started[index].returncode > 0, index))


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Name the signals that ask for an end: SIGTERM, Ctrl-C, and SIGHUP of a terminal that is gone.

    Where the last is ignored, as under nohup, it stays so.
    """
    signals = (signal.SIGTERM, signal.SIGINT)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        return *signals, signal.SIGHUP
    return signals


@contextmanager
def _passing_on(started: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass signals that ask for an end on to processes."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    watched = stopping_signals()
    before = [signal.signal(number, pass_on) for number in watched]
    try:
        yield
    finally:
        for number, handler in zip(watched, before, strict=True):
            signal.signal(number, handler)


def when_left_alone(act: Callable[[], None]) -> None:
    """Call something, from a thread, once the process that started this one is gone."""
    import threading

    parent = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        act()

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()
