"""Randomness without state: every draw is a function of the seed, its purpose and its position.

A run that is resumed draws what it would have drawn. The joint batch of all processes is decided
first, by the configuration and the step alone; each process then takes its share. So a run takes
the same steps in any number of processes.
"""

import hashlib

import torch
from torch import Tensor

from deepbregman.config import Config
from deepbregman.errors import UserError
from deepbregman.objectives import Objective, ViewGroups
from deepbregman.objectives.own import AnyViews

SHUFFLED = 4096
"""Images over which those of shards are shuffled; as many or fewer are shuffled altogether."""


def derive_seed(seed: int, purpose: str, position: int = 0) -> int:
    """Return an independent 63-bit seed for one purpose and position."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def epoch_order(num_images: int, seed: int, epoch: int) -> Tensor:
    """Return the order (num_images,) in which an epoch visits its images, on the CPU."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_images, generator=generator)


def shard_order(shards: Tensor, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Return an order (N,) that reads shards in turn, for images in large files.

    The shards are shuffled and laid end to end. A batch takes equal parts from up to eight places
    in this line (lanes), each of which moves on through its own shards; within a lane, an image is
    moved by up to ``SHUFFLED`` places. So every process reads few shards at a time, and every step
    sees images of many. It is a function of the seed and the epoch alone, like any order: neither
    resuming nor the number of processes changes it.

    Args:
        shards: (N,) the shard of each image.
        batch_size: of all processes together.
    """
    count = len(shards)
    if count <= SHUFFLED:
        return epoch_order(count, seed, epoch)
    generator = torch.Generator().manual_seed(derive_seed(seed, "shards", epoch))
    names, number = torch.unique(shards, return_inverse=True)
    turn = torch.randperm(len(names), generator=generator)
    line = turn[number].argsort(stable=True)  # images of the first shard, of the second, ...
    lanes = max(lanes for lanes in (1, 2, 4, 8) if batch_size % lanes == 0 and lanes <= len(names))
    used = count // batch_size * batch_size
    each = used // lanes
    parts = line[:used].view(lanes, each)
    shift = SHUFFLED * torch.rand((lanes, each), generator=generator, dtype=torch.float64)
    parts = parts.gather(1, (torch.arange(each) + shift).argsort(dim=1, stable=True))
    batches = parts.view(lanes, used // batch_size, batch_size // lanes).transpose(0, 1)
    return torch.cat([batches.flatten(), line[used:]])


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seed torch's own generator, which only dropout draws from, for one forward pass."""
    # torch.manual_seed would also go through every kind of device, at ten times the cost.
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def count_steps(config: Config, num_images: int, world_size: int = 1) -> int:
    """Count the optimiser steps of an epoch; the images of a last, short batch are left out."""
    settings = config.training
    if settings.batch_size % world_size:
        raise UserError(
            f"training.batch_size is {settings.batch_size}: it is the batch of all {world_size} "
            "processes together and must be a multiple of their number"
        )
    needed = settings.batch_size * settings.accumulate
    if num_images < needed and settings.epochs:
        times = f" times training.accumulate {settings.accumulate}" * (settings.accumulate > 1)
        most = num_images // settings.accumulate // world_size * world_size
        lower = f"lower it to {most} or less, or " * (most > 1)  # a batch has two images or more
        have = "is 1" if num_images == 1 else f"are {num_images}"
        raise UserError(
            f"training.batch_size {settings.batch_size}{times} needs {needed} images for a step, "
            f"but there {have} to pretrain on: {lower}give more images"
        )
    return max(1, num_images // needed)  # a run without epochs may have fewer images


class BatchShare:
    """One process's share of the batches; the batch size is a multiple of ``world_size``.

    Args:
        shards: (num_images,) the shard of each image, where shards are to be read in turn.
    """

    def __init__(
        self,
        config: Config,
        num_images: int,
        device: torch.device,
        rank: int,
        world_size: int,
        shards: Tensor | None = None,
    ) -> None:
        self.config, self.num_images, self.device = config, num_images, device
        self.shards = shards
        self.rank, self.world_size = rank, world_size
        self.batch_size = config.training.batch_size // world_size
        self.generator = torch.Generator(device)
        self.steps_per_epoch = count_steps(config, num_images, world_size)

    def order(self, epoch: int, offset: int) -> Tensor:
        """Return the images (n,) of this process in an epoch from a step on, batch after batch."""
        settings = self.config.training
        seed = self.config.seed
        if self.shards is None:
            order = epoch_order(self.num_images, seed, epoch)
        else:
            order = shard_order(self.shards, settings.batch_size, seed, epoch)
        chunks = self.steps_per_epoch * settings.accumulate
        order = order[: chunks * settings.batch_size].view(chunks, self.world_size, self.batch_size)
        return order[offset * settings.accumulate :, self.rank].flatten()

    def draw_uniforms(self, views: ViewGroups[AnyViews], draw: int) -> ViewGroups[Tensor]:
        """Draw the views' randomness of the joint batch and take this process's share (M, n, R).

        Each group draws from a seed of its own, so that one more leaves the others as they were.
        """

        def share(group: AnyViews | None, purpose: str) -> Tensor | None:
            if group is None:
                return None
            self.generator.manual_seed(derive_seed(self.config.seed, purpose, draw))
            joint = group.draw(
                self.config.training.batch_size, device=self.device, generator=self.generator
            )
            return joint.chunk(self.world_size, dim=1)[self.rank]

        main = share(views.main, "views")
        assert main is not None
        return ViewGroups(main, share(views.weak, "weak_views"), share(views.small, "small_views"))

    def draw_for(self, objective: Objective, draw: int) -> Tensor | None:
        """Draw what a method needs in addition to views, the same in all processes.

        A method without such a need gets None.
        """
        self.generator.manual_seed(derive_seed(self.config.seed, "objective", draw))
        return objective.draw(
            self.config.training.batch_size, device=self.device, generator=self.generator
        )

    def seed_dropout(self, draw: int) -> None:
        """Seed dropout for a forward pass.

        Processes get masks of their own, so that with dropout, and with nothing else, a run in
        another number of processes is another run.
        """
        position = draw * self.world_size + self.rank
        seed_dropout(derive_seed(self.config.seed, "dropout", position), self.device)
