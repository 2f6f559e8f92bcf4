"""deepbregman embed: images to features."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from deepbregman.files import create_file
from deepbregman.runs import check_new_file
from deepbregman.terminal import MaybeText, ignore_progress, say

from .parameters import Accelerator, Devices, PythonOnly, Reporter, RunFolder, open_images

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.data import Source


class Shapes(dict[str, tuple[int, ...]]):
    """The name and shape of every array in a file."""

    path: Path


def embed(
    run: Annotated[RunFolder, tyro.conf.Positional],
    out: Path,
    *,
    data: MaybeText = None,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    progress: Reporter = None,
) -> Shapes:
    """Write features of images to an .npz file, with labels, names and scores if there are any.

    The scores are the outputs of the divergence's subnetworks, one number for each of them.

    Args:
        run: Folder of a run, as `deepbregman pretrain` writes it.
        out: File to write; it must not exist.
        data: A dataset instead of the run's own; labels are not needed.
        skip_unreadable: Leave out images that cannot be read; a note gives their number.
        accelerator: Device to compute on; auto takes a GPU if there is one.
        devices: Number of GPUs that compute features together, or all.
        source: Images of your program, by :func:`own_data`, instead of a dataset.
        encoder: If the run trained an encoder of your own: a module of the same structure.

    Returns:
        The name and shape of every array in the file. The names are train_features, train_scores,
        train_labels, train_names, and the same for test and unlabelled.
    """
    out = Path(out)
    check_new_file(out, ".npz")
    images = open_images(run, data, source, accelerator, devices, encoder, skip_unreadable)
    import numpy as np

    arrays: dict[str, Any] = {}
    for name in ("train", "test", "unlabelled"):
        split = getattr(images.source, name)
        if split is None:
            continue
        features = images.features_of(split, name, progress or ignore_progress).features
        parts = {
            "features": features.representation,
            "scores": features.scores,
            "labels": split.labels,
        }
        arrays |= {f"{name}_{k}": v.cpu().numpy() for k, v in parts.items() if v is not None}
        if split.names is not None:
            arrays[f"{name}_names"] = np.array(split.names)
    with create_file(out) as file:
        np.savez(file, **arrays)
    shapes = Shapes((name, array.shape) for name, array in arrays.items())
    shapes.path = out
    return shapes


def show(shapes: Shapes, console: Console) -> None:
    """Name the file, and the name and shape of every array."""
    say(console, f"wrote {shapes.path} ({shapes.path.stat().st_size:,} bytes):")
    for name, shape in shapes.items():
        print(f"{name:<20} {' x '.join(map(str, shape))}")
