"""Deep Divergence Learning in the plane: a network on points, trained on labelled sets of them."""

from typing import Literal

import torch
from torch import Tensor, nn

from deepbregman.method.losses import METRIC_LOSSES
from deepbregman.method.networks import BregmanNetwork
from deepbregman.objectives.deep_divergence import FORMS
from deepbregman.training.randomness import derive_seed

Form = Literal["moment", "max", "smooth"]
MetricLoss = Literal["contrastive", "triplet"]

SMOOTHING: dict[str, float] = {"max": 0.0, "smooth": 1.0}
"""Temperature of the forms that have one; 0 is the hard form."""


class PlaneNetwork(nn.Module):
    """Maps points of the plane to features (moment form) or scores of K subnetworks (the others).

    Args:
        widths: of the shared hidden layers, each with ReLU; none leaves the point itself.
        subnetworks: end with K subnetworks, as in Deep Divergence, instead of one linear layer.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        num_outputs: int,
        *,
        subnetworks: bool,
        activation: Literal["relu"] | None = "relu",
        hidden: int = 32,
    ) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        layers: list[nn.Module] = []
        width = 2
        for wider in widths:
            layers += [nn.Linear(width, wider), nn.ReLU()]
            width = wider
        if subnetworks:
            # Without a norm the same subnetwork often wins everywhere at the start. Then every hard
            # divergence is 0, and nothing is learned.
            last: nn.Module = BregmanNetwork(
                width, num_outputs, hidden, norm="output", activation=activation
            )
        else:
            last = nn.Linear(width, num_outputs)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, points: Tensor) -> Tensor:
        """Map points (N, 2) to (N, K), or sets of them (N, S, 2) to (N, S, K)."""
        outputs: Tensor = self.layers(points.flatten(0, -2))
        return outputs.view(*points.shape[:-1], -1)


def fit(
    network: PlaneNetwork,
    points: Tensor,
    labels: Tensor,
    *,
    form: Form,
    loss: MetricLoss,
    margin: float,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> PlaneNetwork:
    """Train a network on labelled points (N, 2) or sets of points (N, S, 2), in place.

    Adam, the learning rate falling to 0 along a cosine; batches of a shuffled order, epoch after
    epoch, a last, short one left out.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "order"))
    optimiser = torch.optim.Adam(network.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    batch_size = min(batch_size, len(points))
    order = torch.empty(0, dtype=torch.int64)
    network.train()
    for _ in range(steps):
        if len(order) < batch_size:
            order = torch.randperm(len(points), generator=generator)
        chosen, order = order[:batch_size], order[batch_size:]
        outputs = network(points[chosen])
        distance = FORMS[form](outputs, outputs)  # (B, B)
        optimiser.zero_grad()
        value = METRIC_LOSSES[loss](distance, labels[chosen], margin)
        value.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
        optimiser.step()
        schedule.step()
    return network.eval()
