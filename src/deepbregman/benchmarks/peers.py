"""Peers, timed as their own documentation uses them, when they can be imported."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

from deepbregman.config import Config
from deepbregman.data import ArrayImages
from deepbregman.training.assembly import build_model

from .timing import Step

PEER_WORKERS = 16


def has_lightly() -> bool:
    """Whether lightly can be imported."""
    return importlib.util.find_spec("lightly") is not None


class _Tensors(Dataset[Any]):
    """In-memory images through a transform."""

    def __init__(self, images: ArrayImages, transform: Any) -> None:
        self.pixels, self.transform = images.pixels, transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.pixels[index])


class _Pictures(Dataset[Any]):
    """In-memory images as PIL pictures through a transform, as a torchvision dataset gives them."""

    def __init__(self, images: ArrayImages, transform: Any) -> None:
        self.pictures = [to_pil_image(pixels) for pixels in images.pixels]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.pictures[index])


def lightly_step(
    config: Config, images: ArrayImages, device: torch.device, workers: int = PEER_WORKERS
) -> Step:
    """Build lightly's SimCLR: its transform in loader workers, its loss, our encoder in bfloat16.

    The encoder is compiled and channels-last as ours is, so that the difference is lightly's data
    path, loss and projection head.
    """
    from lightly.loss import NTXentLoss  # type: ignore[import-not-found]  # optional
    from lightly.models.modules import SimCLRProjectionHead  # type: ignore[import-not-found]  # optional
    from lightly.transforms import SimCLRTransform  # type: ignore[import-not-found]  # optional

    transform = SimCLRTransform(input_size=config.view_size, gaussian_blur=0.0)
    loader = DataLoader(
        _Pictures(images, transform),
        batch_size=config.training.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=True,
        persistent_workers=True,
    )
    encoder = build_model(config).encoder
    network = torch.nn.Sequential(
        encoder.trunk, SimCLRProjectionHead(encoder.num_features, encoder.num_features, 128)
    )
    network.to(memory_format=torch.channels_last)
    network.to(device)
    network.train()
    network.compile()
    criterion = NTXentLoss(temperature=config.contrastive.temperature)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    feed = endless()

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
    """Build the same views by torchvision's v2 transforms, image by image in loader workers."""
    views = config.views
    brightness, contrast, saturation, hue = views.jitter
    jitter = v2.ColorJitter(brightness, contrast, saturation, hue)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(config.view_size, views.crop_area, views.crop_aspect),
            v2.RandomHorizontalFlip(views.flip),
            v2.RandomApply([jitter], views.jitter_probability),
            v2.RandomGrayscale(views.greyscale),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    dataset = _Tensors(images, lambda pixels: [transform(pixels), transform(pixels)])
    loader = DataLoader(
        dataset,
        batch_size=config.training.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    feed = endless()

    def step() -> None:
        next(feed)

    return step
