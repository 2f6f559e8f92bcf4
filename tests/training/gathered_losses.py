"""What each process of test_gathering.py runs: a loop of the user's own, with ``gather=``.

usage: gathered_losses.py FILE, with torchrun's variables in the environment for several processes.
"""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepbregman import BregmanNetwork, divergence_loss, gather, info_nce, nt_logistic, nt_xent

IMAGES = 12


def main(path: str) -> None:
    together = "RANK" in os.environ
    if together:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    torch.manual_seed(0)
    inputs, bank = torch.randn(2, IMAGES, 7, dtype=torch.float64), torch.randn(9, 5)
    base = torch.nn.Linear(7, 5)
    network = torch.nn.Sequential(base, BregmanNetwork(5, 6, 3, norm="none")).double()
    trained = DistributedDataParallel(network) if together else network
    kept = {}
    base.register_forward_hook(lambda module, args, result: kept.update(z=result))
    mine = torch.cat([view.chunk(size)[rank] for view in inputs])
    o1, o2 = trained(mine).chunk(2)
    z1, z2 = kept["z"].chunk(2)
    losses = torch.stack(
        [
            nt_xent(z1, z2, gather=gather),
            nt_logistic(z1, z2, gather=gather),
            divergence_loss(o1, o2, temperature=0.5, smoothing=0.7, pairs="all", gather=gather),
            info_nce(z1, z2, bank, gather=gather),
        ]
    )
    losses.sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    torch.save({"losses": losses.detach(), "gradients": gradients}, f"{path}.{rank}")
    if together:
        refuse_other_rows(rank)
        # Freeing the wrapper or the group can wait forever for a thread of the group that frees its
        # buffers and wants Python's lock (seen with torch 2.7 and 2.11): let it finish first.
        time.sleep(0.5)
        del trained
        dist.destroy_process_group()


def refuse_other_rows(rank: int) -> None:
    """The process whose last batch is short says so, also if all had as many rows before."""
    for rows in (5, 6):
        assert len(gather(torch.rand(rows, 2))) == 2 * rows
    if rank == 0:  # what the other process knows of it
        both = torch.empty(2, 1, dtype=torch.int64)
        dist.all_gather(list(both.unbind()), torch.tensor([6]))
        return
    with pytest.raises(
        ValueError, match="the processes gather 6, 5 rows: each must have the same number"
    ):
        gather(torch.rand(5, 2))


if __name__ == "__main__":
    main(sys.argv[1])
