"""Box 3 of the figure: K independent subnetworks map an embedding to K scores."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Literal["output", "standard", "hidden", "none"]


class BregmanNetwork(nn.Module):
    """K subnetworks, each Linear(d, hidden), Linear(hidden, 1), with batch normalisation.

    All K are evaluated by one operation. Without an activation, dropout or hidden normalisation
    the two layers of a subnetwork compose to one affine map, so the weights are multiplied first,
    (d, K) in all, and the (N, K, hidden) activations are never formed: the function and its
    gradients are those of the two layers, the memory O(NK).

    Args:
        in_features: d, width of the embedding.
        num_subnetworks: K, the paper's kappa.
        hidden_features: width of each subnetwork's hidden layer.
        norm: batch normalisation of the ``output`` (K channels; the paper), the same without a
            learnt gain and shift (``standard``: every score keeps mean 0 and deviation 1, so that
            a temperature means the same throughout), of the ``hidden`` layer (K * hidden
            channels), or ``none``.
        activation: ``None`` (the paper: linear) or ``"relu"`` (the authors' code).
        dropout: probability of dropping a hidden unit (the authors' code: 0.2).
        normalise_input: L2-normalise z first.
    """

    def __init__(
        self,
        in_features: int = 128,
        num_subnetworks: int = 100,
        hidden_features: int = 32,
        norm: Norm = "output",
        activation: Literal["relu"] | None = None,
        dropout: float = 0.0,
        normalise_input: bool = False,
    ) -> None:
        super().__init__()
        for name, count in (
            ("in_features", in_features),
            ("num_subnetworks", num_subnetworks),
            ("hidden_features", hidden_features),
        ):
            if count < 1:
                raise ValueError(f"{name} is {count}: it must be 1 or more")
        if norm not in get_args(Norm):
            raise ValueError(f"norm {norm!r} is not one of {', '.join(get_args(Norm))}")
        if activation not in (None, "relu"):
            raise ValueError(f"activation {activation!r} is not None or 'relu'")
        self.num_subnetworks = num_subnetworks
        self.activation = activation
        self.normalise_input = normalise_input
        self.weight1 = nn.Parameter(torch.empty(in_features, num_subnetworks, hidden_features))
        self.bias1 = nn.Parameter(torch.empty(num_subnetworks, hidden_features))
        self.weight2 = nn.Parameter(torch.empty(num_subnetworks, hidden_features))
        self.bias2 = nn.Parameter(torch.empty(num_subnetworks))
        self.dropout = nn.Dropout(dropout)
        self.norm = norm
        self.norm_hidden = (
            nn.BatchNorm1d(num_subnetworks * hidden_features) if norm == "hidden" else nn.Identity()
        )
        self.norm_output = (
            nn.BatchNorm1d(num_subnetworks, affine=norm == "output")
            if norm in ("output", "standard")
            else nn.Identity()
        )
        self.is_affine = activation is None and dropout == 0.0 and norm != "hidden"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every subnetwork as ``nn.Linear`` would, each on its own draw."""
        in_features, _, hidden_features = self.weight1.shape
        for parameter, fan_in in (
            (self.weight1, in_features),
            (self.bias1, in_features),
            (self.weight2, hidden_features),
            (self.bias2, hidden_features),
        ):
            nn.init.uniform_(parameter, -1.0 / math.sqrt(fan_in), 1.0 / math.sqrt(fan_in))

    def forward(self, z: Tensor) -> Tensor:
        """Score embeddings.

        Args:
            z: (N, d)

        Returns:
            (N, K)
        """
        # In full precision also under autocast: in bfloat16 the largest score is often a tie.
        with torch.autocast(z.device.type, enabled=False):
            return self._score(z.to(self.weight1.dtype))

    def _score(self, z: Tensor) -> Tensor:
        if self.normalise_input:
            z = F.normalize(z, dim=1)
        if self.is_affine:
            weight = (self.weight1 * self.weight2).sum(dim=2)  # (d, K)
            bias = (self.bias1 * self.weight2).sum(dim=1) + self.bias2  # (K,)
            scores = torch.addmm(bias, z, weight)  # (N, K)
        else:
            hidden = torch.addmm(self.bias1.flatten(), z, self.weight1.flatten(1))  # (N, K * H)
            hidden = self.norm_hidden(hidden)
            if self.activation == "relu":
                hidden = F.relu(hidden)
            hidden = self.dropout(hidden).view(-1, *self.weight2.shape)  # (N, K, H)
            scores = (hidden * self.weight2).sum(dim=2) + self.bias2  # (N, K)
        normalised: Tensor = self.norm_output(scores)
        return normalised
