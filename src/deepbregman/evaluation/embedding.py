"""Features of any source, written to a file."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepbregman.config import override
from deepbregman.runs import check_new_file, replacing
from deepbregman.training.assembly import batches_of
from deepbregman.training.checkpoints import load_model
from deepbregman.training.processes import pick_device

from .features import compute_features
from .subject import open_readable


def embed(
    run: Path | str,
    out: Path | str,
    *,
    data: str | None = None,
    skip_unreadable: bool = False,
    accelerator: str = "auto",
    encoder: torch.nn.Module | None = None,
) -> dict[str, tuple[int, ...]]:
    """Write the features of a source's images, with labels, names and scores where there are any.

    Args:
        run: folder of the run.
        out: an ``.npz`` file; must not exist.
        data: a source; the run's own when None.
        skip_unreadable: go on without images that cannot be read; a ``Notice`` says how many.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        encoder: a module of the same structure, for a run whose encoder was your own.

    Returns:
        The name and shape of every array in the file: ``train_features``, ``train_scores``,
        ``train_labels``, ``train_names``, and the same for ``test`` and ``unlabelled``.
    """
    out = Path(out)
    check_new_file(out, ".npz")
    device = pick_device(accelerator)
    model, config = load_model(run, device, encoder)
    if skip_unreadable:
        config = override(config, {"data.skip_unreadable": True})
    source = open_readable(config, data)
    arrays: dict[str, Any] = {}
    for name in ("train", "test", "unlabelled"):
        split = getattr(source, name)
        if split is None:
            continue
        batches = batches_of(split.images, config, device)
        features = compute_features(model, batches, config.data.image_size)
        parts: dict[str, torch.Tensor | None] = {
            "features": features.representation,
            "scores": features.scores,
            "labels": split.labels,
        }
        arrays |= {f"{name}_{k}": v.cpu().numpy() for k, v in parts.items() if v is not None}
        if split.names is not None:
            arrays[f"{name}_names"] = np.array(split.names)
    with replacing(out) as file:
        np.savez(file, **arrays)
    return {name: array.shape for name, array in arrays.items()}
