"""The one exception that means "the user can fix this", and what else a user is told."""

import difflib
import errno
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Iterable
from numbers import Integral
from typing import Any

_NO_ROOM = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "; free space there or choose another folder"
) | dict.fromkeys(
    (errno.EACCES, errno.EROFS, errno.EPERM), "; make it writable or choose another folder"
)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
# Compilers of kernels speak of a GPU's shared memory, in other words.
_NO_SHARED_MEMORY = ("shared memory(shm)", "shared memory object", "out of shared memory")
_NO_COMPILER = ("failed to find c compiler", "no working c++ compiler found")
_PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "vl_convert": "vl-convert-python"}
"""Modules whose packages have another name."""
_NO_CONNECTION = ("DistNetworkError", "DistStoreError")
_CONNECTION_LOST = (
    *("connection closed by peer", "connection reset by peer", "nccl communicator was aborted"),
    *("ms for recv operation to complete", "ms for send operation to complete"),
)


class UserError(Exception):
    """Bad input: the message names the value, the rule and the fix; the command exits with 2."""


class Diverged(UserError):
    """Training blew up: fatal to a run, but only one bad cell to a study or a search."""


class Notice(UserWarning):
    """A note to the user that stops nothing; the command line prints it in one line."""


def notify(words: str) -> None:
    """Give the user a note, at the line of their program that called this package."""
    frames = traceback.walk_stack(inspect.currentframe())
    names = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    own = [place for place, name in enumerate(names) if name.partition(".")[0] == __package__]
    warnings.warn(words, Notice, stacklevel=own[-1] + 2)  # 1 is this function


class ReportedElsewhere(Exception):
    """This process ends because of an error that another process of the run prints."""

    def __init__(self, code: int) -> None:
        super().__init__(f"another process of the run ended it with code {code}")
        self.code = code


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word closest to ``word``, or nothing."""
    # A program may give anything, such as a torch.device for an accelerator.
    matches = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def require_known(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not among those known, and suggest the closest."""
    if name not in known:
        raise UserError(f"{what} {name!r} is not one of {', '.join(known)}{suggest(name, known)}")


def require_list(what: str, names: object) -> None:
    """Refuse a text where a list is meant: its letters would be taken for names."""
    if isinstance(names, str):
        raise UserError(f"{what} is {names!r}: give a list, as [{names!r}]")


def require_whole(what: str, value: object, low: int) -> int:
    """Return a whole number from ``low`` on, also one of NumPy, as an int; refuse anything else."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise UserError(f"{what} is {value!r}: it must be a whole number, {low} or more")
    return int(value)


def require_seed(value: object) -> int:
    """Return a seed that every generator of random numbers takes; refuse anything else."""
    seed = require_whole("seed", value, 0)
    if seed >= 2**32:
        raise UserError(f"seed is {seed}: it must be a whole number from 0 to 2^32 - 1")
    return seed


def abbreviate(value: Any) -> str:
    """Write a value for an error, at bearable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more than 4300 digits, perhaps in it
        return "beyond what can be written"
    return text if len(text) <= 200 else f"{text[:200]}..."


def mask_secrets(text: str) -> str:
    """Replace what may be secret in the addresses of a text by ``***``; see `mask_address`."""
    return re.sub(r"[A-Za-z][\w+.-]*://\S+", lambda found: mask_address(found[0]), text)


def mask_address(address: str) -> str:
    """Replace the user, the password and all options of an address by ``***``."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    place, question, options = rest.partition("?")
    if "@" in options:  # the password may have a ? in it
        return f"{scheme}://***"
    if "@" in place:
        place = f"***@{place.rpartition('@')[2]}"
    return f"{scheme}://{place}{question}{'***' * bool(options)}"


def make_printable(text: str) -> str:
    """Write what a terminal would obey, or could not show, as an escape; lines stay lines."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its name where it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's own, or the words of torch and CUDA."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in _OUT_OF_MEMORY)


def explain_no_shared_memory(error: BaseException) -> str:
    """Explain that worker processes cannot hand over what they decode, as in a small container."""
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return (
        f"the worker processes that decode images have no room in /dev/shm ({last}): make it "
        "larger, in Docker by --shm-size 1g, or decode without them by --data.workers 0"
    )


def explain_no_workers(error: OSError) -> str:
    """Explain why worker processes that decode images cannot be started."""
    if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        smaller = ", or a smaller batch" if error.errno == errno.ENOMEM else ""
        return (
            f"the worker processes that decode images cannot be started ({error}): use fewer by "
            f"--data.workers, or none by --data.workers 0{smaller}"
        )
    return explain_no_shared_memory(error)


def explain_workers(error: BaseException) -> str | None:
    """Explain an error of torch about the worker processes that decode images; else None."""
    said = str(error)
    if isinstance(error, RuntimeError) and any(words in said for words in _NO_SHARED_MEMORY):
        return explain_no_shared_memory(error)
    if said.startswith("DataLoader worker") and ("killed by" in said or "exited" in said):
        return (
            f"a worker process that decodes images has died ({first_line(error)}), often for lack "
            "of memory: use fewer by --data.workers, or give the job more memory"
        )
    return None


def explain_error(error: BaseException) -> tuple[str, int] | None:
    """Return words (empty if another process has them) and exit code; None for a fault of ours."""
    if isinstance(error, ReportedElsewhere):
        return "", error.code
    if isinstance(error, UserError):
        return str(error), 2
    number = getattr(error, "signal_number", None)  # of a run or a command that was stopped
    if isinstance(error, KeyboardInterrupt) and number is None:
        return str(error) or "stopped", 130
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        advice = _NO_ROOM.get(error.errno or 0, "")
        words = f"{where}{error.strerror or error}{advice}; nothing that was complete is lost"
        return words, 2
    module = getattr(error, "name", "") or ""
    is_ours = module in ("", "deepbregman") or module in sys.stdlib_module_names
    if isinstance(error, ModuleNotFoundError) and "." not in module and not is_ours:
        package = _PACKAGES.get(module, module)
        return (
            f"the package {package} is not installed: `pip install {package}`, then repeat the "
            "command; nothing that was complete is lost"
        ), 2
    if number is not None:
        return str(error), 128 + int(number)
    if any(words in str(error).lower() for words in _CONNECTION_LOST):
        return (
            "lost the connection to another process of the run; its own error says why; what the "
            "run has saved is whole: continue it with --resume"
        ), 1
    workers = explain_workers(error)
    if workers is not None:
        return workers, 2
    if any(words in str(error).lower() for words in _NO_COMPILER):
        return (
            "torch compiles the training step and finds no C compiler: install gcc and g++, name "
            "one in the environment variables CC and CXX, or train with --training.compile no"
        ), 2
    if type(error).__name__ in _NO_CONNECTION:  # torch's, which need not be imported for this
        address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        return (
            f"the processes could not meet at {address}, port {port} ({first_line(error)}): set "
            "MASTER_ADDR to the address of the first machine and MASTER_PORT to a port that is "
            "free there, the same for all"
        ), 2
    if is_out_of_memory(error):
        return (
            f"out of memory ({first_line(error)}); lower training.batch_size, "
            "the size of images or divergence.num_subnetworks, or stream with --data.resident no"
        ), 2
    return None
