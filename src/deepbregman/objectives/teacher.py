"""A momentum teacher, and the sources of subnetworks that go with it: a bank, and prototypes."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman.method.bregman import cosine_scores


class Teacher(nn.Module):
    """A copy of a network that follows it slowly; its outputs carry no gradient.

    In training mode its batch normalisation uses the batch, as the student's does.

    Args:
        network: to copy, with its present weights.
        momentum: share of the old weights that an update keeps.
    """

    def __init__(self, network: nn.Module, momentum: float = 0.99) -> None:
        super().__init__()
        _require_share(momentum)
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.momentum = momentum

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Embed images."""
        z: Tensor = self.network(images)
        return z

    def update(self, network: nn.Module, momentum: float | None = None) -> None:
        """Move towards a network of the same structure, by a momentum or the teacher's own."""
        momentum = self.momentum if momentum is None else momentum
        _require_share(momentum)
        follow(self.network, network, momentum)


def _require_share(momentum: float) -> None:
    if not 0.0 <= momentum <= 1.0:
        raise ValueError(f"momentum is {momentum!r}: it must be between 0 and 1")


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, momentum: float) -> None:
    """Set the weights of a network to ``momentum * its own + (1 - momentum) * the other's``."""
    theirs, mine = list_weights(fast), list_weights(slow)
    if len(mine) != len(theirs):
        raise ValueError(
            f"the network has {len(theirs)} weights and its teacher {len(mine)}: give the network "
            "that the teacher was made from"
        )
    for own, other in zip(mine, theirs, strict=True):
        if own.shape != other.shape:
            raise ValueError(
                f"the network has weights of shape {tuple(other.shape)} where its teacher has "
                f"{tuple(own.shape)}: give the network that the teacher was made from"
            )
    torch._foreach_lerp_(mine, theirs, 1.0 - momentum)


def list_weights(network: nn.Module) -> list[Tensor]:
    """List the weights of a network as ``parameters()`` does: each once, and depth first.

    A teacher needs two such lists at each step, and the step of a small network waits for the host;
    ``parameters()`` takes two to three times as long.
    """
    found: dict[Tensor, None] = {}
    modules = [network]
    while modules:
        module = modules.pop()
        for weight in module._parameters.values():
            if weight is not None:
                found[weight] = None
        modules += [each for each in reversed(module._modules.values()) if each is not None]
    return list(found)


def momentum_at(momentum: float, schedule: str, progress: float, final: float = 1.0) -> float:
    """Return the momentum after a share of training; a ``cosine`` schedule rises to ``final``."""
    if schedule == "constant":
        return momentum
    return final - (final - momentum) * (1.0 + math.cos(math.pi * progress)) / 2.0


class Bank(nn.Module):
    """The last K embeddings of a teacher, as K linear subnetworks.

    A ring: new embeddings replace the oldest. Until it is full, its other rows are random.
    """

    weight: Tensor
    pushed: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        for name, count in (("size", size), ("width", width)):
            if count < 1:
                raise ValueError(f"{name} is {count}: it must be 1 or more")
        self.num_subnetworks = size
        self.register_buffer("weight", F.normalize(torch.randn(size, width), dim=1))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))

    def forward(self, z: Tensor) -> Tensor:
        """Score embeddings by their cosines with the rows: (N, d) to (N, K)."""
        # A copy: a push may change the rows before the gradient has come back through them.
        return cosine_scores(z, self.weight.clone())

    @property
    def is_full(self) -> Tensor:
        """Whether every row is an embedding; a tensor, so that the host need not wait."""
        return self.pushed >= self.num_subnetworks

    @torch.no_grad()
    def push(self, embeddings: Tensor) -> None:
        """Put in embeddings (N, d), oldest first. Of more than K, only the last K are kept."""
        if embeddings.ndim != 2 or embeddings.shape[1] != self.weight.shape[1]:
            raise ValueError(
                f"embeddings of shape {tuple(embeddings.shape)}: expected (N, "
                f"{self.weight.shape[1]}), by the width of the bank"
            )
        count = len(embeddings)
        latest = embeddings[-self.num_subnetworks :]
        rows = F.normalize(latest.to(self.weight.dtype), dim=1)
        first = self.pushed + (count - len(latest))
        places = (first + torch.arange(len(rows), device=rows.device)) % self.num_subnetworks
        self.weight.index_copy_(0, places, rows)
        self.pushed.add_(count)


class Prototypes(nn.Module):
    """K learned directions; the score of an embedding is its cosine with each."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.num_subnetworks = size
        self.weight = nn.Parameter(F.normalize(torch.randn(size, width), dim=1))

    def forward(self, z: Tensor) -> Tensor:
        """Score embeddings: (N, d) to (N, K)."""
        return cosine_scores(z, self.weight)
