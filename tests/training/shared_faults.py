"""Runs a pair of processes into one fault after the other; each writes down how every one ended.

Not a test itself: ``test_shared_faults.py`` starts it, twice at the same time.
"""

import errno
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import load_recipe, override
from deepbregman.data import Source, Split
from deepbregman.data.images import FileImages
from deepbregman.errors import explain_error
from deepbregman.launching import find_process
from deepbregman.method.views import Views
from deepbregman.runs import Record, Run
from deepbregman.training import loop

FIRST = find_process().rank == 0
SMALL: dict[str, Any] = {
    **{"training.epochs": 3, "training.batch_size": 512, "training.save_seconds": 0.0},
    **{"training.knn_every": 0, "training.tensorboard": False},
    **{"encoder.projection_hidden": 32, "encoder.embedding": 16},
    **{"divergence.num_subnetworks": 10, "divergence.hidden": 8},
}  # two steps an epoch
NAN = mock.patch.object(
    Views, "forward", lambda views, images, *_: torch.full((2, len(images), 3, 8, 8), math.nan)
)
append = Run.append_metrics


def stopped(run: Run, record: Record) -> None:
    """Be told to stop while the second epoch is closed, whose checkpoint is then written."""
    append(run, record)
    if record["epoch"] == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def full(run: Run, record: Record) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(run.path / "metrics.jsonl"))


def no_events(run: Run, step: int) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(run.path / "tensorboard"))


FAULTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "signal while an epoch is closed": (mock.patch.object(Run, "append_metrics", stopped), {}),
    "full disk": (mock.patch.object(Run, "append_metrics", full), {}),
    "no events": (
        mock.patch.object(loop, "open_events", no_events),
        {"training.tensorboard": True},
    ),
    "diverged": (NAN, {}),
    "more to skip than allowed": (NAN, {"training.skip_nonfinite": 1}),
    "an epoch without a good batch": (NAN, {"training.skip_nonfinite": 5}),
}


def ending(work: Callable[[], Any]) -> tuple[str, int]:
    try:
        work()
    except Exception as error:
        explained = explain_error(error)
        if explained is None:
            raise
        return explained
    return "", 0


def unreadable(folder: Path, resident: str) -> str:
    """Train on files of which every fourth is broken; return what this process says."""
    paths = [folder / "images" / f"{index:02d}.png" for index in range(48)]
    if FIRST and not paths[0].parent.exists():
        pixels = np.random.default_rng(0).integers(0, 256, (48, 8, 8, 3), dtype=np.uint8)
        paths[0].parent.mkdir()
        for index, path in enumerate(paths):
            Image.fromarray(pixels[index]).save(path)
            if index % 4 == 0:
                path.write_bytes(b"broken")
    changes = {"data.skip_unreadable": True, "data.resident": resident, "data.workers": 0}
    changes |= {"data.holdout": 0.0, "training.batch_size": 16, "training.epochs": 1}
    config = override(load_recipe("digits"), SMALL | changes)
    source = Source("files", Split(FileImages(tuple(paths), 8)))
    console = Console(file=io.StringIO(), width=200)
    out = folder / f"unreadable-{resident}"
    pretrain(config, run=out, source=source, console=console)
    return str(console.file.getvalue())


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    config = load_recipe("digits")
    found = {}
    for index, (name, (fault, changes)) in enumerate(FAULTS.items()):
        with fault:
            found[name] = ending(
                lambda index=index, changes=changes: pretrain(
                    override(config, SMALL | changes), run=folder / str(index)
                )
            )
        print(find_process().rank, name, found[name], flush=True, file=sys.stderr)
    for resident in ("no", "yes"):
        found[f"unreadable, resident {resident}"] = unreadable(folder, resident), 0
    (folder / f"found{find_process().rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
