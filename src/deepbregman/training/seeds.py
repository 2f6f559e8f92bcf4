"""Randomness without state: every draw is a function of the seed, its purpose and its position.

A run that is resumed, or spread over other processes, therefore draws what it would have drawn.
"""

import hashlib

import torch
from torch import Tensor


def derived(seed: int, purpose: str, position: int = 0) -> int:
    """Return an independent 63-bit seed for one purpose and position."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def epoch_order(num_images: int, seed: int, epoch: int) -> Tensor:
    """Return the order (num_images,) in which an epoch visits its images, on the CPU."""
    generator = torch.Generator().manual_seed(derived(seed, "order", epoch))
    return torch.randperm(num_images, generator=generator)


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seed torch's own generator, which only dropout draws from, for one forward pass."""
    # torch.manual_seed would also go through every kind of device, at ten times the cost.
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
