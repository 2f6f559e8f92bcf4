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
    distinct pictures are repeated under many names: decoding does not remember.

    Args:
        folder: to write to.
        count: of files.
        distinct: of pictures.

    Returns:
        Mean bytes of a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    files = []

    def picture(seed: int) -> bytes:
        own = np.random.default_rng(seed)
        small = own.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = np.asarray(
            Image.fromarray(small).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32
        )
        noisy = smooth + own.normal(0.0, 18.0, smooth.shape)
        path = folder / f"source-{seed}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        data = path.read_bytes()
        path.unlink()
        return data

    with ThreadPoolExecutor() as pool:
        files = list(pool.map(picture, range(min(distinct, count))))
    for index in range(count):
        (folder / f"{index:06d}.jpg").write_bytes(files[int(random.integers(len(files)))])
    return sum(map(len, files)) // len(files)


def streaming_group(fabric: Fabric, console: Console, *, tiny: bool = False) -> Record:
    """Measure ResNet-50 at 224 px, bare and streamed from files.

    Args:
        fabric: launched.
        console: to draw on.
        tiny: a small encoder on a few files, to try the path.
    """
    count, batch_size, size = (64, 16, 32) if tiny else (12_000, 256, 224)
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
    turns, steps = (2, 2) if tiny else (4, 20)
    with tempfile.TemporaryDirectory() as folder:
        mean_bytes = write_photographs(Path(folder) / "images", count)
        source = open_source(str(Path(folder) / "images"), image_size=size)
        both, device, warmup = 2 * batch_size, fabric.device, 1 if tiny else 8
        arms = [
            prepare("bare encoder", both, lambda: bare_step(config, fabric), device, warmup),
            prepare(
                "K=100, streamed",
                both,
                lambda: our_step(config, source.train.images, fabric, Path(folder)),
                device,
                warmup,
                lead_in=3 * config.data.workers,
            ),
        ]
        console.print(f"streaming {count:,} files of {mean_bytes:,} bytes", highlight=False)
        timings = time_arms(arms, device, turns, steps)
    return {
        "encoder": config.encoder.name,
        "batch_size": batch_size,
        "image_size": size,
        "files": f"{count} JPEG files of {WIDTH}x{HEIGHT}, {mean_bytes} bytes on average",
        "workers": config.data.workers,
        "arms": [timing._asdict() for timing in timings],
    }
