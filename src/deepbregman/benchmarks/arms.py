"""What is timed: the bare encoder, our step as the loop takes it, the transformation, peers."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from deepbregman.config import Config, load_recipe, override
from deepbregman.data import ArrayImages, Images
from deepbregman.training.assembly import build_model, build_views
from deepbregman.training.loop import Pretraining
from deepbregman.training.optimisers import build_optimiser
from deepbregman.training.processes import compile_step, is_mixed

from .timing import Step

NUM_IMAGES = 50_000


def random_images(count: int, side: int) -> ArrayImages:
    """Make images of noise: what is in them does not change how long a step takes."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, side, side)
    return ArrayImages(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))


def configuration(encoder: str, batch_size: int, changes: Mapping[str, Any]) -> Config:
    """Return the simclr recipe with the divergence as asked for."""
    common = {
        "encoder.name": encoder,
        "views.relative_size": 1.0,  # as large as the peers'
        "training.batch_size": batch_size,
        "training.tensorboard": False,
        "training.knn_every": 0,
        "training.epochs": 1000,
    }
    return override(load_recipe("simclr"), {**common, **changes})


def bare_step(config: Config, fabric: Fabric) -> Step:
    """Build the floor: encoder forward, backward and optimiser on one fixed batch of views."""
    device = fabric.device
    count = config.training.batch_size * config.views.num_views
    shape = (count, 3, config.view_size, config.view_size)
    views = torch.rand(shape, device=device).contiguous(memory_format=torch.channels_last)
    trunk = build_model(config).encoder.trunk
    trunk.to(memory_format=torch.channels_last)
    trunk.to(device)
    trunk.train()
    compile_step(trunk, config, fabric)
    optimiser = build_optimiser(config.optimiser, trunk, device)
    mixed = is_mixed(config, device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            h = trunk(views)
        h.float().square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def our_step(config: Config, images: Images, fabric: Fabric, folder: Path) -> Step:
    """Build the step exactly as the loop takes it: order, gather, views, networks, losses.

    Args:
        config: of the arm.
        images: to train on.
        fabric: launched.
        folder: for the run folder, which nobody will read.
    """
    job = Pretraining(config, images, fabric, folder / secrets.token_hex(8))
    job.objective.train()

    feed = job.feed(0, 0)  # of so many epochs that it does not end

    def step() -> None:
        job.advance(feed)

    return step


def views_step(config: Config, images: ArrayImages, fabric: Fabric) -> Step:
    """Build the transformation alone, compiled where the step is."""
    device = fabric.device
    views = build_views(config)
    compile_step(views, config, fabric)
    batch = images.pixels[: config.training.batch_size].to(device)
    generator = torch.Generator(device)

    def step() -> None:
        views(batch, None, views.draw(len(batch), device=device, generator=generator))

    return step
