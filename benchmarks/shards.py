"""Images a second from a folder of JPEG files and from tar shards, decoded by worker processes.

    python benchmarks/shards.py [--count 2000] [--workers 2] [--size 224] [--out FILE.json]

No network is trained: this is what the data alone allow. On a GPU, the images are brought to it.
Both read the same pictures, which the system holds in memory after the first pass, in a new random
order at every turn.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import tyro
from streaming import HEIGHT, WIDTH, write_photographs, write_shards

from deepbregman.data import StreamingBatches, open_source
from deepbregman.data.images import FileImages
from deepbregman.files import create_file
from deepbregman.runs import collect_provenance
from deepbregman.training.devices import device_name, pick_device

BATCH = 128


def shards(
    count: int = 2000,
    workers: int = 2,
    size: int = 224,
    turns: int = 5,
    shard: int = 500,
    out: Path | None = None,
) -> dict[str, Any]:
    """Time passes over both in turns.

    Args:
        count: Number of images.
        workers: Processes that decode.
        size: Side of the images that are trained on.
        turns: Passes over each; the median counts.
        shard: Images in an archive.
        out: JSON file to write.
    """
    device, generator = pick_device("auto"), torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        files, archives = Path(folder) / "files", Path(folder) / "shards"
        mean_bytes = write_photographs(files, count)
        write_shards(archives, files, shard)
        feeds = {}
        for name, path in (("folder", files), ("tar shards", archives)):
            images = open_source(str(path), image_size=size).train.images
            assert isinstance(images, FileImages)
            feeds[name] = StreamingBatches(images, device, num_workers=workers)
        seconds: dict[str, list[float]] = {name: [] for name in feeds}
        for _ in range(turns + 1):
            for name, feed in feeds.items():
                order = torch.randperm(feed.num_images, generator=generator)
                begun = time.perf_counter()
                seen = sum(len(batch.images) for batch in feed.iterate(order, BATCH))
                seconds[name].append((time.perf_counter() - begun) / seen)
    record = {
        **collect_provenance(device_name(device)),
        "files": f"{count} JPEG files of {WIDTH}x{HEIGHT}, {mean_bytes} bytes on average",
        "image_size": size,
        "workers": workers,
        "images_per_shard": shard,
        "images_per_second": {  # the first pass fills the memory of the system
            name: 1 / statistics.median(times[1:]) for name, times in seconds.items()
        },
        "spread": {name: max(times[1:]) / min(times[1:]) for name, times in seconds.items()},
    }
    for name, speed in record["images_per_second"].items():
        print(f"{name}: {speed:.0f} images a second")
    if out is not None:
        with create_file(out) as file:
            file.write((json.dumps(record, indent=1) + "\n").encode())
    return record


if __name__ == "__main__":
    tyro.cli(shards)
