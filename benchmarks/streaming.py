"""Training streamed from JPEG files and from tar shards, against the bare encoder at the same size.

    python benchmarks/streaming.py [--tiny] [--out FOLDER]

ResNet-50 at 224 px, batch 256, from 51,200 generated files, decoded by 15 processes, and by the GPU
(nvJPEG), alone or for a share of each batch. Also how many images a second each of them decodes
when nothing trains, and where the time of one image goes.
"""

import itertools
import queue
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from torchvision.io import ImageReadMode, decode_jpeg

from deepbregman.benchmarking import (
    BARE,
    Effort,
    build_bare_step,
    build_training_step,
    measure,
    start_run,
)
from deepbregman.config import load_recipe, override
from deepbregman.data import open_source
from deepbregman.data.batches import Batch, StreamingBatches, cut_orders
from deepbregman.data.decoding import decode_to, fit_size
from deepbregman.data.images import FileImages, Images
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
    encoded = [read_bytes(path) for path in sorted(pictures.glob("*.jpg"))[:batch_size]]
    for turn in range(batches + 1):
        if turn == 1:
            start = time.perf_counter()
        frames = decode_encoded(encoded, _device())
    int(frames[-1].sum())  # waits for the device
    return batches * len(encoded) / (time.perf_counter() - start)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_bytes(path: Path) -> Tensor:
    """Return the bytes of a file, uint8 (n,)."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def decode_encoded(encoded: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decode JPEG files on a device, each uint8 (3, H, W)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision hands decoding over to another package
        return decode_jpeg(encoded, ImageReadMode.RGB, device=device)


Ready = tuple[Batch, Any] | Exception | None
"""A batch and the event that it waits for; why there is none; or the end."""


class DeviceBatches:
    """Batches whose images, or the last of each batch, the device decodes.

    A thread works ahead by a few batches. Images are shrunk in groups of one size. Pixels differ
    by a few levels from those of the worker processes, which decode the others.

    Args:
        share: of each batch, for the device.
        workers: processes that decode the rest; unused where there is none.
    """

    def __init__(
        self, images: FileImages, device: torch.device, share: float, workers: int
    ) -> None:
        self._images, self._device, self._share = images, device, share
        self.num_images = len(images)
        self._stream = StreamingBatches(images, device, num_workers=workers) if share < 1 else None

    def chain(self, orders: Iterable[Tensor], batch_size: int) -> Iterator[Batch]:
        """Yield the batches of several orders."""
        mine = round(self._share * batch_size)
        cut = cut_orders(orders, batch_size, torch.device("cpu"))
        parts, again = itertools.tee(cut)
        others: Iterator[Batch] = iter(())
        if self._stream is not None:
            heads = (part[: len(part) - mine] for part in again)
            others = self._stream.chain(heads, batch_size - mine)
        ready: queue.Queue[Ready] = queue.Queue(maxsize=3)
        threading.Thread(
            target=self._work_ahead, args=(parts, mine, ready), daemon=True, name="decoder"
        ).start()
        while (found := ready.get()) is not None:
            if isinstance(found, Exception):
                raise found
            batch, event = found
            if event is not None:
                event.wait()
                for tensor in (batch.images, batch.sizes):
                    tensor.record_stream(torch.cuda.current_stream())
            if (other := next(others, None)) is not None:
                batch = Batch(
                    torch.cat([other.images, batch.images]), torch.cat([other.sizes, batch.sizes])
                )
            yield batch

    def _work_ahead(self, parts: Iterator[Tensor], mine: int, ready: "queue.Queue[Ready]") -> None:
        stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        try:
            with ThreadPoolExecutor(8) as readers, torch.cuda.stream(stream):
                for part in parts:
                    paths = [self._images.paths[i] for i in part[len(part) - mine :].tolist()]
                    batch = self.decode(list(readers.map(read_bytes, paths)))
                    ready.put((batch, None if stream is None else stream.record_event()))
            ready.put(None)
        except Exception as error:
            ready.put(error)

    def decode(self, encoded: list[Tensor]) -> Batch:
        """Decode and shrink JPEG files on the device."""
        decoded = decode_encoded(encoded, self._device)
        side, count = self._images.side, len(decoded)
        frames = torch.zeros((count, side, side, 3), dtype=torch.uint8, device=self._device)
        sizes = torch.empty((count, 2), dtype=torch.int64)
        groups: dict[tuple[int, int], list[int]] = {}
        for place, image in enumerate(decoded):
            groups.setdefault((image.shape[1], image.shape[2]), []).append(place)
        for size, places in groups.items():
            height, width = fit_size(*size, side)
            pixels = torch.stack([decoded[place] for place in places]).float()
            pixels = functional.interpolate(
                pixels, (height, width), mode="bilinear", antialias=True
            )
            index = torch.tensor(places, device=self._device)
            frames[index, :height, :width] = pixels.round().to(torch.uint8).permute(0, 2, 3, 1)
            sizes[places] = torch.tensor([height, width])
        return Batch(frames.permute(0, 3, 1, 2), sizes.to(self._device))


def compare_decoders(images: FileImages, device: torch.device) -> float:
    """Return the mean difference, in levels of 255, of pixels by the device and by workers."""
    places = torch.arange(min(16, len(images)))
    (batch,) = StreamingBatches(images, device, num_workers=0).iterate(places, len(places))
    encoded = [read_bytes(images.paths[i]) for i in places.tolist()]
    other = DeviceBatches(images, device, 1.0, 0).decode(encoded)
    assert torch.equal(batch.sizes, other.sizes)
    return float((batch.images.float() - other.images.float()).abs().mean())


def time_parts(pictures: Path, side: int) -> dict[str, float]:
    """Return the milliseconds that one image takes on one core, by what is done to it."""
    paths = sorted(pictures.glob("*.jpg"))[:64]
    frame = np.zeros((side, side, 3), dtype=np.uint8)

    def load(path: Path) -> Image.Image:
        with Image.open(path) as image:
            image.load()
            return image.copy()

    pictures_there = [load(path) for path in paths]
    target = fit_size(HEIGHT, WIDTH, side)
    arrays = [torch.from_numpy(np.array(image)) for image in pictures_there]

    def shrink(image: Tensor) -> Tensor:
        batch = image.permute(2, 0, 1)[None]
        return functional.interpolate(batch, target, mode="bilinear", antialias=True)

    def resize(image: Image.Image) -> Image.Image:
        return image.resize((target[1], target[0]), Image.Resampling.BILINEAR)

    works: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
        "whole": (lambda path: decode_to(path, frame), paths),
        "decode by Pillow": (load, paths),
        "decode by torchvision": (lambda path: decode_jpeg(read_bytes(path)), paths),
        "copy to NumPy": (np.array, pictures_there),
        "shrink by torch": (shrink, arrays),
        "shrink by Pillow": (resize, pictures_there),
    }
    threads, found = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    for name, (work, items) in works.items():
        turns = []
        for _ in range(3):
            start = time.perf_counter()
            for item in items:
                work(item)
            turns.append(1e3 * (time.perf_counter() - start) / len(items))
        found[name] = min(turns)
    torch.set_num_threads(threads)
    return found


def streaming(
    tiny: bool = False, share: float = 0.25, nvjpeg: bool = True, out: Path | None = None
) -> dict[str, Any]:
    """Time the bare encoder and the training step in turns: streamed, and from memory.

    Args:
        tiny: A small encoder on a few files, to try it out.
        share: Of each batch, decoded by the GPU beside the worker processes.
        nvjpeg: Try decoding by the GPU as well.
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
        parts = time_parts(Path(folder) / "images", size)
        for name, milliseconds in parts.items():
            console.print(f"one image, {name}: {milliseconds:.2f} ms")
        write_shards(Path(folder) / "shards", Path(folder) / "images", count // 8)
        files, shards = (
            open_source(str(Path(folder) / name), image_size=size).train.images
            for name in ("images", "shards")
        )
        turns = 2 if tiny else 40
        rates = {
            "files by workers": decode_in_workers(files, batch_size, workers, turns),
            "shards by workers": decode_in_workers(shards, batch_size, workers, turns),
        }
        difference, refused = None, "" if nvjpeg else "not tried"
        if nvjpeg:
            try:
                rates["by the device"] = decode_on_device(
                    Path(folder) / "images", batch_size, turns // 2
                )
                difference = compare_decoders(files, fabric.device)
                console.print(f"pixels by the device differ by {difference:.2f} levels on average")
            except RuntimeError as error:  # torchvision without nvJPEG
                refused = str(error)
                console.print(f"the device decodes nothing: {refused}")
        for name, rate in rates.items():
            console.print(f"decoding {name}: {rate:,.0f} images a second")

        few = torch.arange(min(count, 8 * batch_size))  # one epoch after the other

        def by_device(part: float) -> Callable[[], object]:
            job = start_run(config, files, fabric, Path(folder))
            job.batches = DeviceBatches(files, fabric.device, part, workers)
            feed = job.feed(0, 0)
            return lambda: job.advance(feed)

        arms: dict[str, Callable[[], Any]] = {
            BARE: lambda: build_bare_step(config, fabric),
            "K=100, from memory": lambda: build_training_step(
                override(config, {"data.resident": "yes"}), files.select(few), fabric, Path(folder)
            ),
            "K=100, files": lambda: build_training_step(config, files, fabric, Path(folder)),
            "K=100, shards": lambda: build_training_step(config, shards, fabric, Path(folder)),
        }
        if not refused:
            arms[f"K=100, {share:.0%} by the device"] = lambda: by_device(share)
            arms["K=100, all by the device"] = lambda: by_device(1.0)
        ahead = dict.fromkeys(list(arms)[2:], 3 * workers)
        if not refused:
            ahead["K=100, all by the device"] = 4  # batches that its thread keeps ready
        group = measure(config, arms, effort, fabric.device, console, ahead)
    group["decoded_per_second"] = rates
    group["milliseconds_of_an_image"] = parts
    group["files"] = f"{count} JPEG files of {WIDTH}x{HEIGHT}, {mean_bytes} bytes on average"
    group["workers"] = workers
    group["device"] = {"refused": refused} if refused else {"difference_in_levels": difference}
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
