"""Optimisers, what they decay, and the learning rate as a function of the step."""

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepbregman.config import Config, OptimiserSettings
from deepbregman.objectives import Group
from deepbregman.objectives.divergence import rise


class Lars(Optimizer):
    """SGD with momentum and a learning rate adapted to each weight's norm, as SimCLR uses it.

    After You et al. 2017, with two habits of later code: the norm below is taken after the decay is
    added, and the velocity holds no learning rate, as in torch's SGD. Biases and normalisation
    (groups that say ``is_weight: False``, or else parameters of one dimension) are not adapted.
    The local rate is ``trust * ||w|| / ||g + decay * w||``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, group)
        return loss

    def _move(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        update = grad.add(weight, alpha=group["weight_decay"])
        if group.get("is_weight", weight.ndim > 1):
            size, change = weight.norm(), update.norm()
            # Chosen on the device: reading the norms here would make the host wait.
            local = torch.where((size > 0) & (change > 0), group["trust"] * size / change, 1.0)
            update.mul_(local)
        state = self.state[weight]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(weight)
        velocity = state["velocity"].mul_(group["momentum"]).add_(update)
        weight.add_(velocity, alpha=-group["lr"])


def split_by_decay(
    parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, decay_all: bool
) -> list[dict[str, Any]]:
    """Split parameters into weights and the rest, biases and normalisation, for an optimiser.

    The rest decays only with ``decay_all``. Parameters without gradient are left out.
    """
    weights: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in parameters:
        if parameter.requires_grad:
            # The subnetworks' biases have two dimensions, one of them the subnetwork.
            is_bias = "bias" in name.rpartition(".")[2]
            (weights if parameter.ndim > 1 and not is_bias else rest).append(parameter)
    decay_of_rest = weight_decay if decay_all else 0.0
    groups = [
        {"params": weights, "weight_decay": weight_decay, "is_weight": True},
        {"params": rest, "weight_decay": decay_of_rest, "is_weight": False},
    ]
    return [group for group in groups if group["params"]]


def merge_groups(config: OptimiserSettings, groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Turn a method's groups into as few of the optimiser as will do: each is a launch."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        decay = config.weight_decay if group.decayed else 0.0
        ways = {name: getattr(group, name) for name in ("rate", "scheduled", "frozen_until")}
        for part in split_by_decay(group.parameters, decay, config.decay_all):
            key = (part["weight_decay"], part["is_weight"], *ways.values())
            merged.setdefault(key, {**part, **ways, "params": []})["params"] += part["params"]
    return list(merged.values())


def build_optimiser(
    config: OptimiserSettings, groups: Iterable[Group], device: torch.device
) -> Optimizer:
    """Build the optimiser; on a GPU its fused form."""
    merged = merge_groups(config, groups)
    fused = device.type == "cuda"
    if config.name == "adam":
        return torch.optim.Adam(merged, config.learning_rate, betas=config.betas, fused=fused)
    if config.name == "adamw":
        return torch.optim.AdamW(merged, config.learning_rate, betas=config.betas, fused=fused)
    if config.name == "sgd":
        return torch.optim.SGD(merged, config.learning_rate, momentum=config.momentum, fused=fused)
    return Lars(merged, config.learning_rate, momentum=config.momentum)


def learning_rate(config: OptimiserSettings, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Return the learning rate of a step, counted from 0.

    Warm-up rises linearly and reaches the full rate at its end; the cosine then falls from the full
    rate to 0 at the end of training.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return config.learning_rate * rise(config.warmup_epochs, step, steps_per_epoch)
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, epochs * steps_per_epoch - warmup)
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule == "step":
        passed = sum(step >= milestone * steps_per_epoch for milestone in config.milestones)
        return config.learning_rate * config.step_factor**passed
    return config.learning_rate


def set_learning_rates(
    config: Config, step: int, steps_per_epoch: int, optimiser: Optimizer
) -> None:
    """Set the learning rate of every group for a step, counted from 0."""
    epochs = config.training.epochs
    current = learning_rate(config.optimiser, step, steps_per_epoch, epochs)
    progress = step / (epochs * steps_per_epoch)
    for group in optimiser.param_groups:
        rate = current if group["scheduled"] else config.optimiser.learning_rate
        group["lr"] = 0.0 if progress < group["frozen_until"] else rate * group["rate"]
