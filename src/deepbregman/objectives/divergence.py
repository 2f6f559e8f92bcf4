"""The divergence as a loss term of its own, which any method can carry."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import DivergenceSettings
from deepbregman.method.bregman import balance_scores, learned_divergence
from deepbregman.method.losses import (
    divergence_loss,
    info_nce,
    list_comparisons,
    match_scores,
    usage_entropy,
)
from deepbregman.method.networks import BregmanNetwork

from .objective import Group
from .teacher import Bank, Prototypes, follow

FEW_ACTIVE = 0.1
"""Warn if fewer than this share of the subnetworks wins for any sample."""


class Divergences(NamedTuple):
    """Loss terms of a batch, and the scores that they come from."""

    terms: dict[str, Tensor]
    scores: Tensor  # (M, N, K), of the student's views


class Numbers(NamedTuple):
    """The numbers of the settings, as scalar tensors."""

    sigma: Tensor
    alpha: Tensor
    temperature: Tensor
    smoothing: Tensor
    target_smoothing: Tensor


class DivergenceTerm(nn.Module):
    """K subnetworks score embeddings; the loss compares an image's scores (Eq. 6 to 8).

    Views are compared with each other, or with the teacher's targets where there are any. The
    subnetworks see the joint batch, so that their batch normalisation needs no synchronising.

    The numbers are a buffer (sigma a parameter when learnable), so that a compiled step serves all
    their values.
    """

    values: Tensor

    def __init__(self, settings: DivergenceSettings, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.network = _build_subnetworks(settings, in_features)
        # If prototypes scored their own targets, they would soon give all images to one of them.
        copied = settings.source == "prototypes"
        self.teacher_network = copy.deepcopy(self.network).requires_grad_(False) if copied else None
        self.settings = settings
        # Not read from the settings while training: a compiled step would be tied to its value.
        self.is_smooth, self.needs_target = settings.smoothing > 0.0, settings.needs_target
        self.weights = {"divergence": settings.weight} if settings.weight > 0.0 else {}
        if settings.info_nce > 0.0:
            self.weights["info_nce"] = settings.info_nce
        if settings.usage_bonus > 0.0:
            self.weights["usage"] = -settings.usage_bonus
        self.term_names = tuple(self.weights)
        # Only where it is used: several processes wait for the gradient of every parameter.
        learns = settings.learn_sigma and "learn_sigma" not in settings.unused_fields
        self.log_sigma = nn.Parameter(torch.tensor(settings.sigma).log()) if learns else None
        chosen = {name: getattr(settings, name) for name in Numbers._fields}
        chosen["target_smoothing"] = settings.target_smoothing or settings.smoothing
        values = torch.tensor(list(chosen.values()))
        self.register_buffer("values", values, persistent=False)

    @property
    def numbers(self) -> Numbers:
        """The numbers of the settings, on the device."""
        return Numbers(*self.values.unbind())

    def forward(
        self, student: Tensor, teacher: Tensor | None, same_views: bool = False
    ) -> Divergences:
        """Compute the loss terms; in training, put the targets into the bank afterwards.

        Args:
            student: (M, N, d) embeddings of every process.
            teacher: (M', N, d) targets, or None.
            same_views: whether target m is of view m, from which there is nothing to learn: a view
                is then compared with the targets of the others.
        """
        scores = _score(self.network, student)  # (M, N, K)
        terms: dict[str, Tensor] = {}
        if "divergence" in self.term_names:
            targets = None if teacher is None else self._score_targets(teacher)  # (M', N, K)
            pairs = self._list_pairs(scores, targets, same_views)
            terms["divergence"] = torch.stack([self._compare(*pair) for pair in pairs]).mean()
        if "info_nce" in self.term_names:
            assert teacher is not None  # the configuration has made sure
            assert isinstance(self.network, Bank)  # likewise
            bank, tau = self.network.weight.clone(), self.numbers.temperature
            losses = [
                info_nce(view, target, bank, temperature=tau)
                for view, target in _pair_with_targets(student, teacher, same_views)
            ]
            terms["info_nce"] = torch.stack(losses).mean()
        if "usage" in self.term_names:
            temperature = self.numbers.smoothing if self.is_smooth else 1.0
            terms["usage"] = usage_entropy(scores.flatten(0, 1), temperature)
        if isinstance(self.network, Bank) and teacher is not None:
            full = self.network.is_full.to(scores.dtype)
            terms = {name: full * value for name, value in terms.items()}
            if self.training:
                self.network.push(teacher.flatten(0, 1))
        return Divergences(terms, scores.detach())

    @torch.no_grad()
    def _score_targets(self, teacher: Tensor) -> Tensor:
        scores = _score(self.teacher_network or self.network, teacher)  # (M', N, K)
        if self.settings.centring == "mean":
            return scores - scores.mean(dim=(0, 1))
        if self.settings.centring == "sinkhorn":
            temperature = self.numbers.target_smoothing if self.is_smooth else 1.0
            return torch.stack([balance_scores(view, temperature) for view in scores])
        return scores

    def _list_pairs(
        self, scores: Tensor, targets: Tensor | None, same_views: bool
    ) -> list[tuple[Tensor, Tensor]]:
        if targets is None:
            return list_comparisons(scores, self.settings.sets)
        if self.settings.sets == "none":
            return _pair_with_targets(scores, targets, same_views)
        compared = _list_targets(len(scores), len(targets), same_views)
        # The teacher's views as one distribution.
        return [(scores[a], targets[others].transpose(0, 1)) for a, others in enumerate(compared)]

    def _compare(self, first: Tensor, second: Tensor) -> Tensor:
        numbers, settings = self.numbers, self.settings
        if settings.compare == "match":
            return match_scores(
                first,
                second,
                temperature=numbers.smoothing if self.is_smooth else 0.0,
                target_temperature=numbers.target_smoothing,
            )
        return divergence_loss(
            first,
            second,
            kernel=settings.kernel,
            sigma=numbers.sigma if self.log_sigma is None else self.log_sigma.exp(),
            alpha=numbers.alpha,
            pairs=settings.pairs,
            temperature=numbers.temperature,
            smoothing=numbers.smoothing if self.is_smooth else None,
        )

    def after_step(self, momentum: float) -> None:
        """Let the teacher's copy of the subnetworks follow them."""
        if self.teacher_network is not None:
            follow(self.teacher_network, self.network, momentum)

    def weight_at(self, step: int, steps_per_epoch: int) -> float:
        """Return the weight of the divergence at a step, counted from 0; it may warm up."""
        share = compute_warmup(self.settings.warmup_epochs, step, steps_per_epoch)
        return self.settings.weight * share

    def parameter_groups(self) -> list[Group]:
        """Keep weight decay away from sigma: it would be pulled to 1."""
        groups = [Group(list(self.network.named_parameters(prefix="network")))]
        if self.log_sigma is not None:
            groups.append(Group([("log_sigma", self.log_sigma)], decayed=False))
        return groups

    @property
    def sigma(self) -> float:
        """The width of the Gaussian kernel: as set, or as learned so far."""
        return self.settings.sigma if self.log_sigma is None else self.log_sigma.exp().item()

    def metrics(self) -> dict[str, Tensor]:
        """Return the learned sigma, if it is learned."""
        return {} if self.log_sigma is None else {"sigma": self.log_sigma.detach().exp()}

    def diagnose(self, scores: Tensor) -> dict[str, Tensor]:
        """Compute diagnostics of the subnetworks from scores (M, N, K).

        Divergences are those of the first view to the second; a single view has none to itself.
        """
        active, entropy = count_usage(scores.flatten(0, 1))
        found = {"active_subnetworks": active, "usage_entropy": entropy}
        if len(scores) < 2:
            return found
        distance = learned_divergence(scores[0], scores[1], self.settings.smoothing)  # (N, N)
        count, own = len(distance), distance.diagonal().sum()
        others = (distance.sum() - own) / (count * max(1, count - 1))
        return {"divergence_positives": own / count, "divergence_negatives": others, **found}

    def warn(self, record: dict[str, float], num_samples: int) -> list[str]:
        """Say what looks wrong in the diagnostics of a batch.

        Args:
            num_samples: in the batch, all views counted; no more subnetworks than that can win.
        """
        if isinstance(self.network, Bank) and not self.network.is_full:
            return []  # most of its rows are random yet
        active, total = record["active_subnetworks"], self.settings.num_subnetworks
        if active >= FEW_ACTIVE * min(total, num_samples):
            return []
        *others, last = self._list_remedies()
        remedies = f"{', '.join(others)} or {last}" if others else last
        return [f"only {active:.0f} of {total} subnetworks are in use; try {remedies}"]

    def _list_remedies(self) -> list[str]:
        """List settings that bring more subnetworks into use, and that are not made yet."""
        settings = self.settings
        if settings.source == "bank":
            return ["a larger objective.weight, which keeps embeddings apart"]
        found = []
        if settings.source == "prototypes" and settings.centring != "sinkhorn":
            found.append("divergence.centring sinkhorn")
        if settings.source == "learned" and settings.norm in ("hidden", "none"):
            found.append("divergence.norm output")
        if settings.source == "learned" and not self.is_smooth:
            found.append("divergence.smoothing above 0")
        larger = "larger " if settings.usage_bonus else ""
        return [*found, f"a {larger}divergence.usage_bonus"]


def _build_subnetworks(settings: DivergenceSettings, in_features: int) -> nn.Module:
    if settings.source == "bank":
        return Bank(settings.num_subnetworks, in_features)
    if settings.source == "prototypes":
        return Prototypes(settings.num_subnetworks, in_features)
    return BregmanNetwork(
        in_features,
        settings.num_subnetworks,
        settings.hidden,
        norm=settings.norm,
        activation="relu" if settings.activation == "relu" else None,
        dropout=settings.dropout,
        normalise_input=settings.normalise_input,
    )


def _score(network: nn.Module, embeddings: Tensor) -> Tensor:
    """Score the embeddings (M, N, d) of several views at once: (M, N, K)."""
    scores: Tensor = network(embeddings.flatten(0, 1))
    return scores.view(*embeddings.shape[:2], -1)


def _list_targets(num_views: int, num_targets: int, same_views: bool) -> list[list[int]]:
    """List for each view the targets that it is compared with: all but that of the view itself."""
    return [
        [target for target in range(num_targets) if not same_views or target != view]
        for view in range(num_views)
    ]


def _pair_with_targets(
    student: Tensor, teacher: Tensor, same_views: bool
) -> list[tuple[Tensor, Tensor]]:
    """Pair each view with each target that it is compared with."""
    views, targets = student.unbind(), teacher.unbind()
    compared = _list_targets(len(views), len(targets), same_views)
    return [(views[a], targets[b]) for a, others in enumerate(compared) for b in others]


def count_usage(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Count the subnetworks that win for some row of scores (N, K); measure the winners' entropy.

    The entropy is a share of log K.
    """
    num_subnetworks = scores.shape[1]
    wins = nn.functional.one_hot(scores.argmax(dim=1), num_subnetworks).sum(dim=0)  # (K,)
    entropy = torch.special.entr(wins / wins.sum()).sum()
    return (wins > 0).sum(), entropy / torch.tensor(max(num_subnetworks, 2)).log()


def compute_warmup(epochs: float, step: int, steps_per_epoch: int) -> float:
    """Return the factor of a linear warm-up over some epochs at a step, counted from 0."""
    steps = round(epochs * steps_per_epoch)
    return (step + 1) / steps if step < steps else 1.0
