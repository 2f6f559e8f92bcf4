"""Training streamed from JPEG files and from tar shards, against the bare encoder at the same size.

    python benchmarks/streaming.py [--tiny] [--out FOLDER]

ResNet-50 at 224 px, batch 256, from 51,200 generated files, decoded by 15 processes. Also how many
images a second these processes decode when nothing trains, and nvJPEG on the GPU.
"""

import tarfile
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console
from torchvision.io import ImageReadMode, decode_jpeg

from deepbregman.benchmarking import BARE, Effort, bare_step, measure, training_step
from deepbregman.commands.bench import keep_group
from deepbregman.config import load_recipe, override
from deepbregman.data import open_source
from deepbregman.data.batches import StreamingBatches
from deepbregman.data.images import Images
from deepbregman.runs import provenance
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


def decode_in_workers(images: Images, batch_size: int, workers: int, batches: int) -> float:
    """Return the images a second that worker processes bring to the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stream = StreamingBatches(images, device, num_workers=workers)
    order = torch.arange((batches + 3 * workers) * batch_size) % len(images)
    passing = stream.iterate(order, batch_size)
    for _ in range(3 * workers):  # until what was decoded ahead is used up
        next(passing)
    start = time.perf_counter()
    for _ in passing:
        pass
    return batches * batch_size / (time.perf_counter() - start)


def decode_on_device(pictures: Path, batch_size: int, batches: int) -> float:
    """Return the images a second that the device decodes: on a GPU by nvJPEG, at their own size."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paths = sorted(pictures.glob("*.jpg"))[:batch_size]
    encoded = [torch.frombuffer(bytearray(p.read_bytes()), dtype=torch.uint8) for p in paths]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision hands decoding over to another package
        for turn in range(batches + 1):
            if turn == 1:
                start = time.perf_counter()
            frames = decode_jpeg(encoded, ImageReadMode.RGB, device=device)
        int(frames[-1].sum())  # waits for the device
    return batches * len(encoded) / (time.perf_counter() - start)


def streaming(tiny: bool = False, out: Path | None = None) -> dict[str, Any]:
    """Time the bare encoder and the streamed training step in turns.

    Args:
        tiny: A small encoder on a few files, to try it out.
        out: Folder for bench.json and bench.png.
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
        turns = 2 if tiny else 40
        rates = {
            "files by workers": decode_in_workers(files, batch_size, workers, turns),
            "shards by workers": decode_in_workers(shards, batch_size, workers, turns),
            "by the device": decode_on_device(Path(folder) / "images", batch_size, turns // 2),
        }
        for name, rate in rates.items():
            console.print(f"decoding {name}: {rate:,.0f} images a second")
        arms = {
            BARE: lambda: bare_step(config, fabric),
            "K=100, files": lambda: training_step(config, files, fabric, Path(folder)),
            "K=100, shards": lambda: training_step(config, shards, fabric, Path(folder)),
        }
        ahead = dict.fromkeys(list(arms)[1:], 3 * workers)
        group = measure(config, arms, effort, fabric.device, console, ahead)
    group["decoded_per_second"] = rates
    group["files"] = f"{count} JPEG files of {WIDTH}x{HEIGHT}, {mean_bytes} bytes on average"
    group["workers"] = workers
    record = {**provenance(device_name(fabric.device)), "scale": "streaming", "groups": []}
    keep_group(record, group, out, console)
    return record


if __name__ == "__main__":
    tyro.cli(streaming)
