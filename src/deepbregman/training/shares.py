"""Which images and which random numbers of every step belong to a process.

The joint batch of all processes is decided first, by the configuration and the step alone; each
process then takes its share. So a run takes the same steps in any number of processes.
"""

import torch
from torch import Tensor

from deepbregman.config import Config
from deepbregman.errors import UserError
from deepbregman.method.transformation import Views

from .seeds import derived, epoch_order, seed_dropout


def steps_in_epoch(config: Config, num_images: int, world_size: int = 1) -> int:
    """Count the optimiser steps of an epoch; the images of a last, short batch are left out."""
    settings = config.training
    if settings.batch_size % world_size:
        raise UserError(
            f"training.batch_size is {settings.batch_size}: it is the batch of all {world_size} "
            "processes together and must be a multiple of their number"
        )
    needed = settings.batch_size * settings.accumulate
    if num_images < needed:
        raise UserError(
            f"training.batch_size {settings.batch_size} (times training.accumulate "
            f"{settings.accumulate}) needs {needed} images for a step, but there are {num_images} "
            "to pretrain on: lower it, or give more images"
        )
    return num_images // needed


class Share:
    """One process's share of the batches.

    Args:
        config: of the run.
        num_images: there are to pretrain on.
        device: of this process.
        rank: of this process.
        world_size: number of processes; the batch size is a multiple of it.
    """

    def __init__(
        self, config: Config, num_images: int, device: torch.device, rank: int, world_size: int
    ) -> None:
        self.config, self.num_images, self.device = config, num_images, device
        self.rank, self.world_size = rank, world_size
        self.batch_size = config.training.batch_size // world_size
        self.generator = torch.Generator(device)
        self.steps_per_epoch = steps_in_epoch(config, num_images, world_size)

    def order(self, epoch: int, offset: int) -> Tensor:
        """Return the images (n,) of this process in an epoch from a step on, batch after batch."""
        settings = self.config.training
        order = epoch_order(self.num_images, self.config.seed, epoch)
        chunks = self.steps_per_epoch * settings.accumulate
        order = order[: chunks * settings.batch_size].view(chunks, self.world_size, self.batch_size)
        return order[offset * settings.accumulate :, self.rank].flatten()

    def uniforms(self, views: Views, draw: int) -> Tensor:
        """Draw the views' randomness of the joint batch and take this process's share (M, n, R)."""
        self.generator.manual_seed(derived(self.config.seed, "views", draw))
        joint = views.draw(
            self.config.training.batch_size, device=self.device, generator=self.generator
        )
        return joint.chunk(self.world_size, dim=1)[self.rank]

    def seed_dropout(self, draw: int) -> None:
        """Seed the dropout of a forward pass.

        Processes get masks of their own, so that with dropout, and with nothing else, a run in
        another number of processes is another run. A resumed one draws what it would have drawn.
        """
        position = draw * self.world_size + self.rank
        seed_dropout(derived(self.config.seed, "dropout", position), self.device)
