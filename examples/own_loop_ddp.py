"""The divergence in a plain loop, in one process or several.

    python examples/own_loop_ddp.py
    torchrun --nproc-per-node 2 examples/own_loop_ddp.py

Both take the same steps and print the same losses: the losses see the joint batch.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepbregman import BregmanNetwork, Views, divergence_loss, gather, nt_xent

BATCH, STEPS = 64, 5  # the batch of all processes together


class Network(nn.Module):
    """An encoder with a projection, and the subnetworks behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 32)
        )
        # Batch normalisation would see the part of one process: convert it, or leave it out.
        self.subnetworks = BregmanNetwork(in_features=32, num_subnetworks=20, norm="none")

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        z = self.base(views)
        return z, self.subnetworks(z)


def main() -> None:
    """Take a few steps on digits."""
    together = "RANK" in os.environ  # set by torchrun
    if together:
        dist.init_process_group("gloo")  # "nccl" with a GPU for each process
    rank, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)

    torch.manual_seed(0)  # the same first weights everywhere
    network = DistributedDataParallel(Network()) if together else Network()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    views = Views(size=8)
    pixels = (
        torch.from_numpy(load_digits().images * 15.9).to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
    )

    for step in range(STEPS):
        chosen = torch.randperm(len(pixels))[:BATCH]  # the same in every process
        first, second = (view.chunk(size)[rank] for view in views(pixels[chosen]))
        z, scores = network(torch.cat([first, second]))
        (z1, z2), (o1, o2) = z.chunk(2), scores.chunk(2)
        contrastive = nt_xent(z1, z2, temperature=0.2, gather=gather)
        loss = contrastive + 0.2 * divergence_loss(o1, o2, sigma=1.5, gather=gather)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    if together:
        del network  # before its group: torch may otherwise wait forever for the group's thread
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
