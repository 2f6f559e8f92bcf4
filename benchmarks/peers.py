"""Other libraries beside our training step, each used as its own documentation says.

    pip install lightly
    python benchmarks/peers.py [--scale main|cpu|tiny] [--out FOLDER]

On a GPU: lightly's SimCLR with its own transform, loss, projection head and 16 loader workers, if
lightly is installed. On a CPU: torchvision's transforms for the same views.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

from deepbregman.benchmarking import (
    BARE,
    Effort,
    Step,
    configure,
    measure,
    random_images,
    standard_arms,
)
from deepbregman.commands.bench import SCALES, keep_group
from deepbregman.config import Config, fields_of
from deepbregman.data import ArrayImages
from deepbregman.objectives import build_run_encoder
from deepbregman.runs import provenance
from deepbregman.training.devices import device_name
from deepbregman.training.processes import launch

WORKERS = 16


class Pictures(Dataset[Any]):
    """In-memory images through a transform, as PIL pictures or as tensors."""

    def __init__(self, images: ArrayImages, transform: Any, as_pil: bool) -> None:
        self.pictures = [to_pil_image(p) if as_pil else p for p in images.pixels]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.pictures[index])


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield batches without end."""
    while True:
        yield from loader


def lightly_step(config: Config, images: ArrayImages, device: torch.device) -> Step:
    """Build lightly's SimCLR around our encoder, compiled and channels-last as ours is.

    The difference is then lightly's data path, loss and projection head.
    """
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    transform = SimCLRTransform(input_size=config.view_size, gaussian_blur=0.0)
    loader = DataLoader(
        Pictures(images, transform, as_pil=True),
        batch_size=config.training.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        pin_memory=True,
        persistent_workers=True,
    )
    encoder = build_run_encoder(config)
    network = torch.nn.Sequential(
        encoder.trunk, SimCLRProjectionHead(encoder.num_features, encoder.num_features, 128)
    )
    network.to(memory_format=torch.channels_last)
    network.to(device)
    network.train()
    network.compile()
    criterion = NTXentLoss(temperature=fields_of(config)["objective.temperature"])
    optimiser = torch.optim.SGD(network.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
    feed = endless(loader)

    def step() -> None:
        views = [view.to(device, non_blocking=True) for view in next(feed)]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            z0, z1 = (network(view.contiguous(memory_format=torch.channels_last)) for view in views)
            loss = criterion(z0, z1)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def torchvision_views_step(config: Config, images: ArrayImages, workers: int = 2) -> Step:
    """Build the same views by torchvision's transforms, image by image in loader workers."""
    views = config.views
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(config.view_size, views.crop_area, views.crop_aspect),
            v2.RandomHorizontalFlip(views.flip),
            v2.RandomApply([v2.ColorJitter(*views.jitter)], views.jitter_probability),
            v2.RandomGrayscale(views.greyscale),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    loader = DataLoader(
        Pictures(images, lambda pixels: [transform(pixels), transform(pixels)], as_pil=False),
        batch_size=config.training.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    feed = endless(loader)
    return lambda: next(feed)


def peers(scale: Literal["main", "cpu", "tiny"] = "main", out: Path | None = None) -> None:
    """Time our step and those of other libraries in turns.

    Args:
        scale: As in `deepbregman bench`; the first group of it.
        out: Folder for bench.json and bench.png.
    """
    settings, console, fabric = SCALES[scale], Console(), launch("auto")
    encoder, batch_size = settings.groups[0]
    config = configure(encoder, batch_size)
    images = random_images(max(settings.images, 2 * batch_size), 32)
    with tempfile.TemporaryDirectory() as folder:
        ours = standard_arms(encoder, batch_size, images, fabric, Path(folder))
        arms = {name: ours[name] for name in (BARE, "SimCLR", "K=100", "views alone")}
        if fabric.device.type == "cpu":
            arms["torchvision views"] = lambda: torchvision_views_step(config, images)
        if importlib.util.find_spec("lightly") is not None:
            arms["lightly SimCLR"] = lambda: lightly_step(config, images, fabric.device)
        # A peer with workers must first use up what they piled up during the others' turns.
        lead_in = {"torchvision views": 6, "lightly SimCLR": 3 * WORKERS}
        effort = Effort(*settings.effort)
        group = measure(config, arms, effort, fabric.device, console, lead_in)
    record = {**provenance(device_name(fabric.device)), "scale": scale, "groups": []}
    keep_group(record, group, out, console)


if __name__ == "__main__":
    tyro.cli(peers)
