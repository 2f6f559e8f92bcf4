"""The command line: a verb is a file here. It parses, calls, prints; errors become words."""

import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepbregman.errors import Notice, UserError, explanation, nearest
from deepbregman.launching import place

from .options import PROGRAM, print_note, say, screen, silence

VERBS = {
    "quickstart": "Pretrain on digits, under 3 minutes on a CPU, and see what it was good for.",
    "pretrain": "Pretrain an encoder: deepbregman pretrain RECIPE [options], or --resume RUN.",
    "evaluate": "Judge a run: kNN, linear, few labels, another data set, from scratch.",
    "embed": "Write the features of images to an .npz file.",
    "export": "Write a run's encoder for torchvision, timm, ONNX, detectron2 or safetensors.",
    "search": "Find the images most like a query, or measure how well searches find classes.",
    "cluster": "Group images by k-means of features and by the learned divergence.",
    "data": "List data sets, check one, or prepare one: deepbregman data list|check|prepare.",
    "study": "Run an ablation or a claim of the paper, with error bars: deepbregman study [NAME].",
    "tune": "Search hyperparameters on held-out images: deepbregman tune RECIPE --space ...",
    "report": "Write a page of runs and studies: deepbregman report RUNS... --out FOLDER.",
    "recipes": "List the recipes, or print one: deepbregman recipes [NAME].",
    "bench": "Measure the speed of a step against the bare encoder, and against peers.",
}
"""Verb -> what it does; the file of that name has its ``command``."""


def _overview() -> None:
    """Print the verbs, a line each."""
    console = Console()
    console.print(f"usage: {PROGRAM} VERB ...\n", highlight=False)
    console.print("Self-supervised visual representations with deep Bregman divergences.\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    for verb, purpose in VERBS.items():
        table.add_row(f"[bold]{verb}[/bold]", escape(purpose))
    console.print(table)
    console.print(f"\n{PROGRAM} VERB --help says what each takes.", highlight=False)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        _overview()
    elif arguments[0] == "--version":
        from importlib.metadata import version

        print(version(PROGRAM))
    elif arguments[0] in VERBS:
        importlib.import_module(f".{arguments[0]}", __name__).command(arguments[1:])
    else:
        raise UserError(
            f"verb {arguments[0]!r} is not one of {', '.join(VERBS)}{nearest(arguments[0], VERBS)}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's error is one paragraph on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name need not be text that can be shown
            stream.reconfigure(errors="backslashreplace")
    try:
        with _notices_in_a_line(), _all_printed():
            _dispatch(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:  # the reader has left
        _leave(1)
    except (Exception, KeyboardInterrupt) as error:
        explained = explanation(error)
        if explained is None and not _is_joined():
            raise
        message, code = explained or (traceback.format_exc(), 1)
        here = place()
        if isinstance(error, KeyboardInterrupt) and here.local_rank:
            message = ""  # it reaches every process of a machine, and the first says so
        if message:
            who = (
                f"process {here.rank} of processes 0 to {here.processes - 1}: " if here.rank else ""
            )
            say(screen(stderr=True), f"error: {who}{message}")
        _leave(code)


@contextmanager
def _all_printed() -> Iterator[None]:
    """Print what is held back while an error is still printed as one."""
    try:
        yield
    except SystemExit:  # of --help
        print(end="", flush=True)
        raise
    print(end="", flush=True)


@contextmanager
def _notices_in_a_line() -> Iterator[None]:
    """Print notices as words on stderr, and other warnings as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, Notice):
                print_note(str(message), sys.stderr)  # above a bar, where one runs
            else:
                shown(message, category, *rest, **more)

        warnings.showwarning = show
        yield


def _leave(code: int) -> NoReturn:
    """End the process with a code.

    One that is joined to others leaves at once: the threads that an error cut short in the middle
    of their talk would abort it on the way out, and the code would be another.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            silence(stream)
    if _is_joined():
        os._exit(code)
    sys.exit(code)


def _is_joined() -> bool:
    """Whether this process talks to others of a run."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
