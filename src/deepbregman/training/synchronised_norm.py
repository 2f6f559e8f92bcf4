"""Batch normalisation over the joint batch of several processes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from deepbregman.errors import UserError

from .processes import gather_with_gradient


class SynchronisedNorm(_BatchNorm):
    """Batch normalisation whose mean and variance are those of every process's batch together.

    Equal to ordinary batch normalisation of the joint batch: outputs, gradients and running
    statistics. Each process sends its count, mean and centred sum of squares, which combine without
    the cancellation that sums of squares suffer from. torch's own needs GPUs.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"input has {input.ndim} dimensions: at least (N, C) is needed")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise.

        Args:
            input: (N, C, ...)

        Returns:
            The same shape and type.
        """
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=False,
                eps=self.eps,
            )
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(input)

    def _normalise(self, input: Tensor) -> Tensor:
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(input.ndim) if dim != 1]
        broadcast = (1, -1, *(1,) * (input.ndim - 2))
        own_mean = values.mean(others)  # (C,)
        own_squares = (values - own_mean.view(broadcast)).square().sum(others)  # (C,)
        count = values.new_full((1,), values.numel() / values.shape[1])
        every: Tensor = gather_with_gradient(
            torch.cat([count, own_mean, own_squares])
        )  # (W, 1 + 2C)
        counts = every[:, :1].detach()  # (W, 1)
        means, squares = every[:, 1:].chunk(2, dim=1)  # (W, C) each
        total = counts.sum()
        mean = (counts * means).sum(dim=0) / total  # (C,)
        variance = (squares + counts * (means - mean).square()).sum(dim=0) / total  # (C,)
        self._remember(mean.detach(), variance.detach() * (total / (total - 1)))
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        result: Tensor = (values - mean.view(broadcast)) * scale.view(broadcast)
        if self.bias is not None:
            result = result + self.bias.view(broadcast)
        return result.to(input.dtype)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of a batch, as torch does."""
        if self.num_batches_tracked is None or self.running_mean is None:
            return
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = (
            torch.tensor(self.momentum, device=mean.device)
            if self.momentum is not None
            else 1.0 / self.num_batches_tracked
        )
        self.running_mean.lerp_(mean, share.to(mean.dtype))
        self.running_var.lerp_(variance, share.to(mean.dtype))


def synchronise(module: nn.Module, device: torch.device) -> None:
    """Replace every batch normalisation inside a module; parameters and their names stay.

    Args:
        module: with batch normalisation somewhere inside.
        device: that it will run on; on a GPU torch's own fused kernels are taken.
    """
    for name, child in module.named_children():
        if not isinstance(child, _BatchNorm):
            synchronise(child, device)
            continue
        if type(child) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            raise UserError(
                f"training.sync_norm is true, but the encoder's {type(child).__name__} does more "
                "than normalise and cannot be replaced: set training.sync_norm to false, choose "
                "another encoder, or train in one process"
            )
        if device.type == "cuda":
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm  # untyped
            setattr(module, name, convert(child))
            continue
        replacement = SynchronisedNorm(
            child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
        )
        for attribute in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(replacement, attribute, getattr(child, attribute))
        replacement.training = child.training
        setattr(module, name, replacement)
