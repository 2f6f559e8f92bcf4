"""Training streamed from JPEG files and from tar shards, against the bare encoder at the same size.

    python benchmarks/streaming.py [--tiny] [--out FOLDER]

ResNet-50 at 224 px, batch 256, from 51,200 generated files, decoded by 15 processes. `shards.py`
measures how fast such processes decode when nothing trains.
"""

import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console

from deepbregman.benchmarking import BARE, Effort, build_bare_step, build_training_step, measure
from deepbregman.config import load_recipe, override
from deepbregman.data import open_source
from deepbregman.files import write_json
from deepbregman.reporting.screen import draw_speeds
from deepbregman.runs import collect_provenance
from deepbregman.training.devices import device_name
from deepbregman.training.processes import launch

WIDTH, HEIGHT, QUALITY = 500, 375, 90
"""The usual size in ImageNet; the record says how large the files came out."""


def write_photographs(folder: Path, count: int, distinct: int = 256) -> int:
    """Write JPEG files that cost as much to decode as photographs do.

    Smooth fields plus fine noise keep the decoder as busy as photographs. A few distinct pictures
    stand under many names (hard links): decoding does not remember.

    Returns:
        Mean bytes of a file.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def write_picture(seed: int) -> Path:
        random = np.random.default_rng(seed)
        small = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
        noisy = smooth + random.normal(0.0, 18.0, smooth.shape)
        path = folder / f"{seed:06d}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        return path

    with ThreadPoolExecutor() as pool:
        pictures = list(pool.map(write_picture, range(min(distinct, count))))
    for index in range(len(pictures), count):
        (folder / f"{index:06d}.jpg").hardlink_to(pictures[index % len(pictures)])
    return sum(path.stat().st_size for path in pictures) // len(pictures)


def write_shards(folder: Path, pictures: Path, per_shard: int) -> None:
    """Write tar shards of the files of a folder."""
    folder.mkdir(parents=True)
    paths = sorted(pictures.glob("*.jpg"))
    for number, start in enumerate(range(0, len(paths), per_shard)):
        with tarfile.open(folder / f"{number:05d}.tar", "w", dereference=True) as shard:
            for path in paths[start : start + per_shard]:
                shard.add(path, path.name)


def streaming(tiny: bool = False, out: Path | None = None) -> dict[str, Any]:
    """Time the bare encoder and the training step in turns: streamed, and from memory.

    Args:
        tiny: A small encoder on a few files, to try it out.
        out: Folder for bench.json.
    """
    count, batch_size, size = (64, 16, 32) if tiny else (51_200, 256, 224)
    workers = 1 if tiny else 15
    config = override(
        load_recipe("paper-imagenet"),
        {
            "encoder.name": "small" if tiny else "resnet50",
            "data.image_size": size,
            "data.resident": "no",
            "data.workers": workers,
            "training.batch_size": batch_size,
            "training.tensorboard": False,
        },
    )
    console, fabric = Console(), launch("auto")
    effort = Effort(1, 2, 2) if tiny else Effort(4, 3, 30)
    with tempfile.TemporaryDirectory() as folder:
        mean_bytes = write_photographs(Path(folder) / "images", count)
        write_shards(Path(folder) / "shards", Path(folder) / "images", count // 8)
        files, shards = (
            open_source(str(Path(folder) / name), image_size=size).train.images
            for name in ("images", "shards")
        )
        few = torch.arange(min(count, 8 * batch_size))  # one epoch after the other
        arms: dict[str, Callable[[], Any]] = {
            BARE: lambda: build_bare_step(config, fabric),
            "K=100, from memory": lambda: build_training_step(
                override(config, {"data.resident": "yes"}), files.select(few), fabric, Path(folder)
            ),
            "K=100, files": lambda: build_training_step(config, files, fabric, Path(folder)),
            "K=100, shards": lambda: build_training_step(config, shards, fabric, Path(folder)),
        }
        ahead = dict.fromkeys(("K=100, files", "K=100, shards"), 3 * workers)
        group = measure(config, arms, effort, fabric.device, console, ahead)
    group["files"] = f"{count} JPEG files of {WIDTH}x{HEIGHT}, {mean_bytes} bytes on average"
    group["workers"] = workers
    record = {
        **collect_provenance(device_name(fabric.device)),
        "scale": "streaming",
        "groups": [group],
    }
    console.print(draw_speeds(group))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "bench.json", record)
    return record


if __name__ == "__main__":
    tyro.cli(streaming)
