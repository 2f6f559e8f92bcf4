"""Optimisers, what they decay, and the learning rate as a function of the step."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepbregman.config import Config, OptimiserSettings
from deepbregman.method.bregman import Number
from deepbregman.objectives import Group
from deepbregman.objectives.divergence import compute_warmup

CLIPPED_TRUST = 0.02
"""Share of its norm by which a gradient may move a weight in the clipped form."""
TINY = 1e-12


class MomentumOptimiser(Optimizer):
    """Base of LARS and Muon: keeps a velocity for each weight, from its first gradient on."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody gives one
        """Take one step."""
        weights = [
            [w for w in group["params"] if w.grad is not None] for group in self.param_groups
        ]
        for weight in itertools.chain(*weights):
            if "velocity" not in self.state[weight]:
                self.state[weight]["velocity"] = torch.zeros_like(weight)
        self.move(weights)

    def move(self, weights: list[list[Tensor]]) -> None:
        """Move the weights of every group by their gradients."""
        raise NotImplementedError

    def velocities(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """Return the velocity of each weight."""
        return [self.state[weight]["velocity"] for weight in weights]


class Lars(MomentumOptimiser):
    """SGD with momentum and a learning rate adapted to each weight's norm, as SimCLR uses it.

    Two things differ from You et al. 2017: the norm in the denominator is that of gradient plus
    weight decay, and the learning rate multiplies the velocity, not the gradient. Biases and
    normalisation (groups that say ``is_weight: False``, or else parameters of one dimension) are
    not adapted.
    The local rate is ``trust * ||w|| / ||g + decay * w||``, times the global one. With ``clip`` it
    is a limit instead: a weight moves as by SGD, but by no more than its share ``trust``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        clip: bool = False,
    ) -> None:
        rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**rates, "trust": trust, "clip": clip})

    def move(self, weights: list[list[Tensor]]) -> None:
        """Move the weights of a group together: one by one, a GPU waits for the launches."""
        for group_weights, group in zip(weights, self.param_groups, strict=True):
            if group_weights:
                self._move_group(group_weights, group)

    def _move_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        updates = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        adapted = [group.get("is_weight", weight.ndim > 1) for weight in weights]
        if any(adapted):
            sizes, changes = (torch.stack(torch._foreach_norm(each)) for each in (weights, updates))
            factors = group["trust"] * sizes / changes
            if group["clip"]:
                factors = (factors / group["lr"]).clamp_max(1.0)
            # Chosen on the device: reading the norms here would make the host wait.
            factors = torch.where((sizes > 0) & (changes > 0), factors, 1.0)
            for update, factor, is_adapted in zip(updates, factors.unbind(), adapted, strict=True):
                if is_adapted:
                    update.mul_(factor)
        velocities = self.velocities(weights)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates)
        torch._foreach_add_(weights, velocities, alpha=-group["lr"])


class Muon(MomentumOptimiser):
    """Orthogonalised momentum for convolutions (Jordan et al. 2024), SGD for the rest.

    A convolution's weight is a matrix of a row for each output channel. Its step is the momentum
    made nearly orthogonal by a few Newton-Schulz iterations, scaled to the norm of the weight. The
    weight keeps that norm, the square root of its number of rows: batch normalisation behind it
    undoes any scale, so that the learning rate is the share by which a step turns the weight.
    Groups say ``is_convolution: True``; weight decay has no effect on them.

    Weights of one shape are stacked, so that one product serves them all. Still a step has hundreds
    of kernels, which the host could not launch as fast as a GPU runs them: on a GPU they are
    recorded at the second step, and replayed as one CUDA graph.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a quintic with a steep slope at 0
    ITERATIONS = 4

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "is_convolution": False}
        self._recorded: _RecordedStep | None = None
        self._last_key: tuple[Any, ...] = ()
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; what was recorded of another is forgotten."""
        super().load_state_dict(state_dict)
        self._recorded, self._last_key = None, ()

    def move(self, weights: list[list[Tensor]]) -> None:
        """Turn the convolutions and let the rest descend; see :meth:`_update`."""
        gradients = [
            [weight.grad for weight in group_weights if weight.grad is not None]
            for group_weights in weights
        ]
        if all(weight.is_cuda for weight in itertools.chain(*weights)):
            self._replay(weights, gradients)
        else:
            self._update(weights, gradients, [group["lr"] for group in self.param_groups])

    def _replay(self, weights: list[list[Tensor]], gradients: list[list[Tensor]]) -> None:
        settings = [(group["momentum"], group["weight_decay"]) for group in self.param_groups]
        key = (*(id(weight) for weight in itertools.chain(*weights)), *settings)
        rates = [group["lr"] for group in self.param_groups]
        if key != self._last_key:  # launched one by one, which also sets up the libraries
            self._recorded, self._last_key = None, key
            self._update(weights, gradients, rates)
            return
        if self._recorded is None:
            self._recorded = _RecordedStep.record(self._update, weights, gradients)
        self._recorded.replay(gradients, rates)

    def _update(
        self, weights: list[list[Tensor]], gradients: list[list[Tensor]], rates: Sequence[Number]
    ) -> None:
        groups = zip(weights, gradients, rates, self.param_groups, strict=True)
        for group_weights, updates, rate, group in groups:
            velocities = self.velocities(group_weights)
            if group["is_convolution"]:
                for places in _group_by_shape(group_weights):
                    of_one_shape = (
                        [tensors[place] for place in places]
                        for tensors in (group_weights, updates, velocities)
                    )
                    self._turn(*of_one_shape, rate=rate, momentum=group["momentum"])
            elif group_weights:
                if group["weight_decay"]:
                    decay = group["weight_decay"]
                    updates = list(torch._foreach_add(updates, group_weights, alpha=decay))
                torch._foreach_mul_(velocities, group["momentum"])
                torch._foreach_add_(velocities, updates)
                torch._foreach_sub_(group_weights, torch._foreach_mul(velocities, rate))

    def _turn(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        velocities: list[Tensor],
        *,
        rate: Number,
        momentum: float,
    ) -> None:
        torch._foreach_lerp_(velocities, gradients, 1.0 - momentum)
        ahead = torch._foreach_lerp(gradients, velocities, momentum)  # Nesterov
        update = orthogonalise(torch.stack(ahead).flatten(2), self.ITERATIONS, self.COEFFICIENTS)
        size = math.sqrt(len(weights[0]))
        update = update * (size / update.norm(dim=(1, 2), keepdim=True).clamp_min(TINY))
        moved = torch.stack(weights).flatten(2) - rate * update
        moved = moved * (size / moved.norm(dim=(1, 2), keepdim=True).clamp_min(TINY))
        shape = weights[0].shape
        torch._foreach_copy_(weights, [weight.view(shape) for weight in moved])


class _RecordedStep(NamedTuple):
    """A step as a CUDA graph, and the places from which it reads its inputs."""

    graph: torch.cuda.CUDAGraph
    gradients: list[Tensor]
    rates: list[Tensor]

    @classmethod
    def record(
        cls,
        update: Callable[[list[list[Tensor]], list[list[Tensor]], Sequence[Number]], None],
        weights: list[list[Tensor]],
        gradients: list[list[Tensor]],
    ) -> "_RecordedStep":
        """Record an update of weights; nothing moves yet."""
        places = [[torch.zeros_like(gradient) for gradient in group] for group in gradients]
        device = next(itertools.chain(*weights)).device
        rates = [torch.zeros((), device=device) for _ in weights]
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls matter: another may pin memory for the next batch meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            update(weights, places, rates)
        return cls(graph, list(itertools.chain(*places)), rates)

    def replay(self, gradients: list[list[Tensor]], rates: Sequence[float]) -> None:
        """Update by these gradients, at a rate for each group."""
        torch._foreach_copy_(self.gradients, list(itertools.chain(*gradients)))
        for place, rate in zip(self.rates, rates, strict=True):
            place.fill_(rate)
        self.graph.replay()


def _group_by_shape(weights: Iterable[Tensor]) -> list[list[int]]:
    places: dict[torch.Size, list[int]] = {}
    for place, weight in enumerate(weights):
        places.setdefault(weight.shape, []).append(place)
    return list(places.values())


def orthogonalise(
    matrices: Tensor, iterations: int, coefficients: tuple[float, float, float]
) -> Tensor:
    """Bring the singular values of matrices near 1 by Newton-Schulz iterations.

    ``X <- a X + b (X X^T) X + c (X X^T)^2 X`` of (B, m, n); in bfloat16 on a GPU.
    """
    a, b, c = coefficients
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(TINY)
    for _ in range(iterations):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    wide: Tensor = x.mT if is_tall else x
    return wide.to(matrices.dtype)


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


def merge_groups(settings: OptimiserSettings, groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Merge a method's groups into as few as possible: each costs a kernel launch."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        decay = settings.weight_decay if group.decayed else 0.0
        schedule = {name: getattr(group, name) for name in ("rate", "scheduled", "frozen_until")}
        for part in split_by_decay(group.parameters, decay, settings.decay_all):
            key = (part["weight_decay"], part["is_weight"], *schedule.values())
            merged.setdefault(key, {**part, **schedule, "params": []})["params"] += part["params"]
    return list(merged.values())


def _split_convolutions(settings: OptimiserSettings, group: dict[str, Any]) -> list[dict[str, Any]]:
    relative = settings.convolution_rate / settings.learning_rate
    parts = []
    for is_convolution in (False, True):
        chosen = [weight for weight in group["params"] if (weight.ndim == 4) == is_convolution]
        rate = group["rate"] * relative if is_convolution else group["rate"]
        part = {**group, "params": chosen, "rate": rate, "is_convolution": is_convolution}
        parts += [part] if chosen else []
    return parts


def build_optimiser(
    settings: OptimiserSettings, groups: Iterable[Group], device: torch.device
) -> Optimizer:
    """Build the optimiser; on a GPU its fused form."""
    merged = merge_groups(settings, groups)
    fused, rate, momentum = device.type == "cuda", settings.learning_rate, settings.momentum
    if settings.name == "adam":
        return torch.optim.Adam(merged, rate, betas=settings.betas, fused=fused)
    if settings.name == "adamw":
        return torch.optim.AdamW(merged, rate, betas=settings.betas, fused=fused)
    if settings.name == "muon":
        parts = [part for group in merged for part in _split_convolutions(settings, group)]
        return Muon(parts, rate, momentum=momentum)
    if settings.name == "sgd":
        return torch.optim.SGD(merged, rate, momentum=momentum, fused=fused)
    if settings.name == "clipped-lars":
        return Lars(merged, rate, momentum=momentum, trust=CLIPPED_TRUST, clip=True)
    return Lars(merged, rate, momentum=momentum)


def learning_rate(
    settings: OptimiserSettings, step: int, steps_per_epoch: int, epochs: int
) -> float:
    """Return the learning rate of a step, counted from 0.

    Warm-up rises linearly to the full rate; the cosine then falls to 0 at the end of training.
    """
    warmup = round(settings.warmup_epochs * steps_per_epoch)
    if step < warmup:
        share = compute_warmup(settings.warmup_epochs, step, steps_per_epoch)
        return settings.learning_rate * share
    if settings.schedule == "cosine":
        progress = (step - warmup) / max(1, epochs * steps_per_epoch - warmup)
        return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    if settings.schedule == "step":
        passed = sum(step >= milestone * steps_per_epoch for milestone in settings.milestones)
        return settings.learning_rate * settings.step_factor**passed
    return settings.learning_rate


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
