"""Streaming: a folder of JPEG files at 224 px against the bare encoder at that size."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from lightning_fabric import Fabric
from PIL import Image
from rich.console import Console

from deepbregman.config import load_recipe, override
from deepbregman.data import open_source
from deepbregman.runs import Record

from .arms import bare_step, our_step
from .timing import prepare, time_arms

WIDTH, HEIGHT, QUALITY = 500, 375, 90
"""ImageNet's usual size; the record says how large the files came out."""


def write_photographs(folder: Path, count: int, distinct: int = 256) -> int:
    """Write JPEG files that cost as much to decode as photographs do.

    Smooth fields plus fine noise, so that neither the entropy coder nor the file is idle. A few
    distinct pictures stand under many names (hard links): decoding does not remember.

    Args:
        folder: to write to.
        count: of files.
        distinct: of pictures.

    Returns:
        Mean bytes of a file.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def picture(seed: int) -> Path:
        random = np.random.default_rng(seed)
        small = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = np.asarray(
            Image.fromarray(small).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32
        )
        noisy = smooth + random.normal(0.0, 18.0, smooth.shape)
        path = folder / f"{seed:06d}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        return path

    with ThreadPoolExecutor() as pool:
        pictures = list(pool.map(picture, range(min(distinct, count))))
    for index in range(len(pictures), count):
        (folder / f"{index:06d}.jpg").hardlink_to(pictures[index % len(pictures)])
    return sum(path.stat().st_size for path in pictures) // len(pictures)


def streaming_group(fabric: Fabric, console: Console, *, tiny: bool = False) -> Record:
    """Measure ResNet-50 at 224 px, bare and streamed from files.

    Args:
        fabric: launched.
        console: to draw on.
        tiny: a small encoder on a few files, to try the path.
    """
    count, batch_size, size = (64, 16, 32) if tiny else (51_200, 256, 224)
    config = override(
        load_recipe("paper-imagenet"),
        {
            "encoder.name": "small" if tiny else "resnet50",
            "data.image_size": size,
            "data.resident": "no",
            "data.workers": 1 if tiny else 15,
            "training.batch_size": batch_size,
            "training.tensorboard": False,
        },
    )
    turns, steps = (2, 2) if tiny else (3, 30)
    with tempfile.TemporaryDirectory() as folder:
        mean_bytes = write_photographs(Path(folder) / "images", count)
        source = open_source(str(Path(folder) / "images"), image_size=size)
        console.print(f"streaming {count:,} files of {mean_bytes:,} bytes", highlight=False)
        both, device, warmup = 2 * batch_size, fabric.device, 1 if tiny else 4
        bare = prepare("bare encoder", both, lambda: bare_step(config, fabric), device, warmup)
        console.print(f"bare encoder ready in {bare.first_step_seconds:.1f} s", highlight=False)
        streamed = prepare(
            "K=100, streamed",
            both,
            lambda: our_step(config, source.train.images, fabric, Path(folder)),
            device,
            warmup,
            lead_in=3 * config.data.workers,
        )
        console.print(f"streamed ready in {streamed.first_step_seconds:.1f} s", highlight=False)
        arms = [bare, streamed]
        timings = time_arms(arms, device, turns, steps)
    return {
        "encoder": config.encoder.name,
        "batch_size": batch_size,
        "image_size": size,
        "files": f"{count} JPEG files of {WIDTH}x{HEIGHT}, {mean_bytes} bytes on average",
        "workers": config.data.workers,
        "arms": [timing._asdict() for timing in timings],
    }
