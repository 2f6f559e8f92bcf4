"""Other libraries beside our training step, each used as its own documentation says.

    pip install lightly
    python benchmarks/peers.py [--scale main|cpu|tiny] [--only ARM ...] [--out FOLDER]

On a GPU: lightly's SimCLR and BYOL with their own transforms, losses, heads and 16 loader workers,
if lightly is installed. On a CPU: torchvision's transforms for the same views.
"""

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from torch import Tensor, nn
from torch.nn import Sequential
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

from deepbregman.benchmarking import (
    BARE,
    QUIET,
    Effort,
    Step,
    build_training_step,
    configure,
    list_arms,
    make_random_images,
    measure,
)
from deepbregman.commands.bench import SCALES, keep_group
from deepbregman.config import Config, fields_of, load_recipe, override
from deepbregman.data import ArrayImages
from deepbregman.errors import UserError
from deepbregman.objectives import build_run_encoder
from deepbregman.runs import collect_provenance
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


def lightly_batches(config: Config, images: ArrayImages, transform: Any) -> Iterator[Any]:
    """Yield batches as lightly's documentation loads them."""
    loader = DataLoader(
        Pictures(images, transform, as_pil=True),
        batch_size=config.training.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        pin_memory=True,
        persistent_workers=True,
    )
    return endless(loader)


def lightly_simclr(config: Config, images: ArrayImages, device: torch.device) -> Step:
    """Build lightly's SimCLR around our encoder.

    The difference is then lightly's data path, loss and projection head.
    """
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    transform = SimCLRTransform(input_size=config.view_size, gaussian_blur=0.0)
    encoder = build_run_encoder(config)
    width = encoder.num_features
    network = Sequential(encoder.trunk, SimCLRProjectionHead(width, width, 128))
    compile_as_ours(network, device)
    criterion = NTXentLoss(temperature=fields_of(config)["objective.temperature"])

    def compute_loss(views: list[Tensor]) -> Tensor:
        loss: Tensor = criterion(*(network(view) for view in views))
        return loss

    feed = lightly_batches(config, images, transform)
    return lightly_step(feed, compute_loss, list(network.parameters()), device)


def lightly_byol(config: Config, images: ArrayImages, device: torch.device) -> Step:
    """Build lightly's BYOL around our encoder."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import update_momentum
    from lightly.transforms import BYOLTransform, BYOLView1Transform, BYOLView2Transform

    sizes = {"input_size": config.view_size, "gaussian_blur": 0.0}
    transform = BYOLTransform(BYOLView1Transform(**sizes), BYOLView2Transform(**sizes))
    encoder = build_run_encoder(config)
    student = Sequential(encoder.trunk, BYOLProjectionHead(encoder.num_features, 4096, 256))
    predictor = BYOLPredictionHead(256, 4096, 256)
    teacher = copy.deepcopy(student).requires_grad_(False)
    for network in (student, predictor, teacher):
        compile_as_ours(network, device)
    criterion = NegativeCosineSimilarity()

    def compute_loss(views: list[Tensor]) -> Tensor:
        update_momentum(student, teacher, 0.99)
        predicted = [predictor(student(view)) for view in views]
        with torch.no_grad():
            targets = [teacher(view) for view in views]
        loss: Tensor = criterion(predicted[0], targets[1]) + criterion(predicted[1], targets[0])
        return 0.5 * loss

    parameters = [*student.parameters(), *predictor.parameters()]
    return lightly_step(
        lightly_batches(config, images, transform), compute_loss, parameters, device
    )


def compile_as_ours(network: nn.Module, device: torch.device) -> None:
    """Move a network to the device, channels-last and compiled as ours is."""
    network.to(memory_format=torch.channels_last)
    network.to(device)
    network.train()
    network.compile()


def lightly_step(
    feed: Iterator[Any],
    compute_loss: Callable[[list[Tensor]], Tensor],
    parameters: list[nn.Parameter],
    device: torch.device,
) -> Step:
    """Build a step of the kind that lightly's documentation shows, in mixed precision."""
    optimiser = torch.optim.SGD(parameters, lr=0.06, momentum=0.9, weight_decay=5e-4)

    def step() -> None:
        views = [
            view.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
            for view in next(feed)
        ]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = compute_loss(views)
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


def configure_byol(encoder: str, batch_size: int) -> Config:
    """Return our BYOL with views as large as lightly's; those of the recipe are smaller."""
    changes = {"encoder.name": encoder, "training.batch_size": batch_size}
    return override(load_recipe("byol"), {**QUIET, **changes, "views.relative_size": 1.0})


def peers(
    scale: Literal["main", "cpu", "tiny"] = "main",
    only: tuple[str, ...] = (),
    out: Path | None = None,
) -> None:
    """Time our step and those of other libraries in turns.

    Args:
        scale: As in `deepbregman bench`; the first group of it.
        only: Arms to measure besides the bare encoder, such as BYOL "lightly BYOL". By default all.
        out: Folder for bench.json and bench.png.
    """
    settings, console, fabric = SCALES[scale], Console(), launch("auto")
    encoder, batch_size = settings.groups[0]
    config = configure(encoder, batch_size)
    images = make_random_images(max(settings.images, 2 * batch_size), 32)
    with tempfile.TemporaryDirectory() as folder:
        ours = list_arms(encoder, batch_size, images, fabric, Path(folder))
        arms = {name: ours[name] for name in (BARE, "SimCLR")}
        if fabric.device.type == "cpu":
            arms["views alone"] = ours["views alone"]
            arms["torchvision views"] = lambda: torchvision_views_step(config, images)
        byol = configure_byol(encoder, batch_size)
        arms["BYOL"] = lambda: build_training_step(byol, images, fabric, Path(folder))
        if importlib.util.find_spec("lightly") is not None:
            arms["lightly SimCLR"] = lambda: lightly_simclr(config, images, fabric.device)
            arms["lightly BYOL"] = lambda: lightly_byol(config, images, fabric.device)
        if unknown := set(only) - set(arms):
            raise UserError(f"--only {unknown.pop()!r} is not one of {'; '.join(arms)}")
        arms = {name: arms[name] for name in arms if not only or name in (BARE, *only)}
        # A peer with workers must first use up what they piled up during the others' turns.
        lead_in = {
            "torchvision views": 6,
            "lightly SimCLR": 3 * WORKERS,
            "lightly BYOL": 3 * WORKERS,
        }
        effort = Effort(*settings.effort)
        group = measure(config, arms, effort, fabric.device, console, lead_in)
    record = {**collect_provenance(device_name(fabric.device)), "scale": scale, "groups": []}
    keep_group(record, group, out, console)


if __name__ == "__main__":
    tyro.cli(peers)
