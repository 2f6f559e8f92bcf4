"""Forks processes that need not import torch again: see ``Forks`` in conftest.py.

usage: fork_server.py SOCKET STAGES: a file descriptor on which orders come, and the stages of the
small encoder as JSON.
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pathlib
import pydoc
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from deepbregman.cli import main
from deepbregman.method import networks

# What takes long to import, so that the forked need not.
for name in ("deepbregman.training.loop", "deepbregman.evaluation.knn", "typeguard", "rich.status"):
    importlib.import_module(name)


def exit_at(target: str, moment: str, call: int) -> None:
    """Let the process end, as if killed, before or after the n-th call of a function."""
    owner_name, name = target.rsplit(".", 1)
    owner: Any = pydoc.locate(owner_name)
    plain, calls = getattr(owner, name), []

    def patched(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call and moment == "before":
            os._exit(9)
        result = plain(*arguments, **options)
        if len(calls) == call and moment == "after":
            os._exit(9)
        return result

    setattr(owner, name, patched)


def hang_with_checkpoints(fsync: Callable[[int], None]) -> Callable[[int], None]:
    """Who kills the process while it writes one need not hit a moment."""

    def patched(handle: int) -> None:
        while "/.last.pt." in os.readlink(f"/proc/self/fd/{handle}"):
            time.sleep(1.0)
        fsync(handle)

    return patched


def refuse_links(path: pathlib.Path, target: pathlib.Path) -> NoReturn:
    raise OSError(95, "no links here")


def wait_for_orders(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork at every order, and return in the child with what is to be done there."""
    while True:
        message, handles, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        if not message:
            sys.exit()
        order: dict[str, Any] = json.loads(message)
        if "wait" in order:
            code = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
            channel.send(str(code).encode())
            continue
        child = os.fork()
        if not child:
            channel.close()
            return order, handles
        for handle in handles:
            os.close(handle)
        channel.send(str(child).encode())


def obey(order: dict[str, Any], handles: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have ignored
    if order.get("controlled"):  # by its terminal
        os.setsid()
    for number, handle in enumerate(handles, start=1):
        os.dup2(handle, number)
    if order.get("controlled"):
        import fcntl
        import termios

        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    if size := order.get("largest_file"):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    os.environ.update(COLUMNS="200", TERM="xterm", **order.get("environment", {}))
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  # likewise
    if order.get("closed"):
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]  # as Python itself does where it is closed
    if order.get("stuck_disk"):
        os.fsync = hang_with_checkpoints(os.fsync)  # type: ignore[assignment]  # in its place
    if order.get("no_links"):
        pathlib.Path.hardlink_to = refuse_links  # type: ignore[method-assign]  # in its place
    if order.get("exit_at"):
        exit_at(*order["exit_at"])
    if order.get("script"):
        sys.argv = order["words"]
        runpy.run_path(order["words"][0], run_name="__main__")
    else:
        main(order["words"])


def end(code: int) -> NoReturn:
    """End as Python does, but for taking down every module: that takes seconds after torch."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            code = 120  # Python's own
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    networks.SMALL_STAGES = json.loads(sys.argv[2])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(["pretrain", "digits", "--help"])  # what tyro looks up once it keeps
    gc.freeze()  # or every forked process would copy what it need not look at
    order = wait_for_orders(socket.socket(fileno=int(sys.argv[1])))
    try:
        obey(*order)
    except SystemExit as ended:
        end(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)
