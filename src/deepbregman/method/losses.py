"""Box 4 of the figure: the contrastive loss, the divergence loss and their sum.

Each takes its views as separate arguments: ``z1`` and ``z2`` hold the two views of the same N
images in the same order, so row i of one is the positive of row i of the other.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .bregman import Number, learned_divergence, of_distribution, similarity

Pairs = Literal["views", "all"]
Sets = Literal["none", "halves", "rest"]


def _cosines(views: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine similarity of every sample to every other, and where the positives and the self are.

    Args:
        views: M tensors (N, d).

    Returns:
        (MN, MN) similarities, (MN, MN) mask of the other views of the same image, (MN, MN) mask of
        the diagonal.
    """
    if len(views) < 2 or any(view.shape != views[0].shape for view in views):
        raise ValueError(
            f"{len(views)} views of shapes {[tuple(view.shape) for view in views]}: at least two "
            "views of one shape (N, d) are needed"
        )
    z = torch.cat(views)
    z = F.normalize(z.to(torch.promote_types(z.dtype, torch.float32)), dim=1)  # (MN, d)
    with torch.autocast(z.device.type, enabled=False):
        cosines = z @ z.T  # (MN, MN)
    image = torch.arange(len(z), device=z.device) % len(views[0])
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    return cosines, (image[:, None] == image) & ~itself, itself


def nt_xent(*views: Tensor, temperature: Number = 0.1) -> Tensor:
    """Normalised-temperature cross-entropy (Eq. 1 and 2).

    The mean over all anchors of the cross-entropy of the positive among every other sample. With
    more than two views each of the others is a positive in turn.

    Args:
        views: two or more tensors (N, d).
        temperature: tau.

    Returns:
        A scalar.
    """
    cosines, positive, itself = _cosines(views)
    logits = (cosines / temperature).masked_fill(itself, -torch.inf)
    log_likelihood = cosines / temperature - torch.logsumexp(logits, dim=1, keepdim=True)
    return -(log_likelihood * positive).sum() / (len(cosines) * (len(views) - 1))


def nt_logistic(*views: Tensor, temperature: Number = 0.1) -> Tensor:
    """Normalised-temperature logistic loss: every pair judged by itself.

    For each anchor, the mean over its positives of ``-log sigmoid(s / tau)`` plus the mean over its
    negatives of ``-log sigmoid(-s / tau)``; then the mean over the anchors.

    Args:
        views: two or more tensors (N, d), N >= 2.
        temperature: tau.

    Returns:
        A scalar.
    """
    cosines, positive, itself = _cosines(views)
    scaled = cosines / temperature
    negative = ~(positive | itself)
    attract = -(F.logsigmoid(scaled) * positive).sum() / (len(scaled) * (len(views) - 1))
    repel = -(F.logsigmoid(-scaled) * negative).sum() / (len(scaled) * (len(scaled) - len(views)))
    return attract + repel


def divergence_loss(
    o1: Tensor,
    o2: Tensor,
    *,
    kernel: str = "gaussian",
    sigma: Number = 1.5,
    alpha: Number = 1.0,
    pairs: Pairs = "views",
    temperature: Number | None = None,
    smoothing: Number | None = None,
) -> Tensor:
    """Cross-entropy of the positive among similarities of divergences (Eq. 7 and 8).

    Args:
        o1: (N, K) scores of the first view, or (N, S, K): each image's S views as a distribution.
        o2: the same of the second view.
        kernel: psi, see :func:`~deepbregman.method.bregman.similarity`.
        sigma: width of the Gaussian kernel.
        alpha: slope of the arccot kernel.
        pairs: ``views``: rows of view 1 against columns of view 2, N x N (the paper); ``all``:
            every sample against every other, 2N x 2N without the diagonal (the authors' code).
        temperature: tau_div, divides psi. Without one the loss hardly moves: psi of at most 1
            bounds it between log N - 1 and log N + 1.
        smoothing: T of the smooth form; ``None`` takes the hard one (Eq. 6).

    Returns:
        A scalar.
    """
    o1, o2 = of_distribution(o1), of_distribution(o2)
    if pairs == "views":
        rows, columns = o1, o2
        target = torch.arange(len(o1), device=o1.device)
    elif pairs == "all":
        rows = columns = torch.cat([o1, o2])  # (2N, K)
        target = torch.arange(len(rows), device=o1.device).roll(len(o1))
    else:
        raise ValueError(f"pairs {pairs!r} is not one of views, all")
    logits = similarity(learned_divergence(rows, columns, smoothing), kernel, sigma, alpha)
    if temperature is not None:
        logits = logits / temperature
    if pairs == "all":
        itself = torch.eye(len(rows), dtype=torch.bool, device=o1.device)
        logits = logits.masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, target)


def usage_entropy(scores: Tensor, temperature: Number = 1.0) -> Tensor:
    """Entropy of the batch's mean assignment to subnetworks, as a share of its maximum.

    1 when the batch uses all K subnetworks alike, 0 when one takes everything. As a bonus it keeps
    subnetworks from dying; nothing of the paper, off by default.

    Args:
        scores: (N, K)
        temperature: of the assignment softmax(o / T).

    Returns:
        A scalar in [0, 1].
    """
    if scores.shape[1] == 1:
        return scores.new_ones(())
    usage = F.softmax(of_distribution(scores) / temperature, dim=1).mean(dim=0)  # (K,)
    entropy: Tensor = torch.special.entr(usage).sum()
    return entropy / math.log(scores.shape[1])


def compared(views: Tensor, sets: Sets) -> list[tuple[Tensor, Tensor]]:
    """List what is compared of each image's M views: points, or empirical distributions of them.

    Args:
        views: (M, N, d), M >= 2.
        sets: ``none``: every view with every other, once; ``halves``: the first half of the views
            with the second, as two distributions; ``rest``: every view with the distribution of the
            others, which of two views is ``none`` both ways round.

    Returns:
        Pairs of (N, d) points or (N, S, d) sets, to be reduced by ``of_distribution``.
    """
    num_views, by_image = len(views), views.transpose(0, 1)  # (N, M, d)
    if sets == "halves":
        first, second = by_image.tensor_split(2, dim=1)
        return [(first, second)]
    if sets == "rest":
        rest = [[b for b in range(num_views) if b != a] for a in range(num_views)]
        return [(views[a], by_image[:, others]) for a, others in enumerate(rest)]
    if sets != "none":
        raise ValueError(f"sets {sets!r} is not one of none, halves, rest")
    return [(views[a], views[b]) for a in range(num_views) for b in range(a + 1, num_views)]


CONTRASTIVE: dict[str, Callable[..., Tensor]] = {"nt_xent": nt_xent, "nt_logistic": nt_logistic}


class Losses(NamedTuple):
    """The total and its terms, each a scalar; terms that are off are zero."""

    total: Tensor
    contrastive: Tensor
    divergence: Tensor
    usage: Tensor


class TotalLoss(nn.Module):
    """``lambda * contrastive + weight * divergence - usage_bonus * usage`` (Eq. 9 and ours).

    Every number is a buffer (sigma a parameter when learnable), so that a compiled step serves all
    their values.

    Args:
        contrastive: ``nt_xent`` or ``nt_logistic``.
        temperature: tau of the contrastive loss.
        contrastive_weight: lambda, a constant: minimising over it would send it to 0.
        divergence_weight: of the divergence loss; 0 leaves it out, which is SimCLR.
        kernel: psi.
        sigma: width of the Gaussian kernel.
        alpha: slope of the arccot kernel.
        learn_sigma: train sigma, as exp of a parameter so that it stays positive.
        pairs: ``views`` or ``all``.
        divergence_temperature: tau_div; 1 is the paper's none.
        smoothing: T of the smooth form; 0 takes the hard form.
        usage_bonus: weight of :func:`usage_entropy`; 0 leaves it out.
        sets: what of an image's views the divergence loss compares, see :func:`compared`; the loss
            is the mean over what there is.
        contrastive_sets: the same of the contrastive loss, where a distribution is the mean of its
            normalised embeddings; with ``none`` each sample meets all others in one comparison.
    """

    numbers: Tensor

    def __init__(
        self,
        *,
        contrastive: str = "nt_xent",
        temperature: float = 0.1,
        contrastive_weight: float = 5.0,
        divergence_weight: float = 1.0,
        kernel: str = "gaussian",
        sigma: float = 1.5,
        alpha: float = 1.0,
        learn_sigma: bool = False,
        pairs: Pairs = "views",
        divergence_temperature: float = 1.0,
        smoothing: float = 0.0,
        usage_bonus: float = 0.0,
        sets: Sets = "none",
        contrastive_sets: Sets = "none",
    ) -> None:
        super().__init__()
        self.contrastive = CONTRASTIVE[contrastive]
        self.kernel, self.pairs = kernel, pairs
        self.sets, self.contrastive_sets = sets, contrastive_sets
        self.is_smooth = smoothing > 0.0
        self.has_divergence = divergence_weight > 0.0
        self.has_usage = self.has_divergence and usage_bonus > 0.0
        # Only where it is used: several processes wait for the gradient of every parameter.
        learns = learn_sigma and self.has_divergence and kernel == "gaussian"
        self.log_sigma = nn.Parameter(torch.tensor(sigma).log()) if learns else None
        values = [
            *(temperature, contrastive_weight, divergence_weight, sigma, alpha),
            *(divergence_temperature, smoothing, usage_bonus),
        ]
        self.divergence_weight = divergence_weight
        self.register_buffer("numbers", torch.tensor(values), persistent=False)

    def weigh_divergence(self, share: float) -> None:
        """Set the divergence's weight to a share of its full one, as its warm-up does."""
        self.numbers[2].fill_(share * self.divergence_weight)

    def forward(self, z: Tensor, scores: Tensor | None) -> Losses:
        """Compute the loss of a batch.

        Args:
            z: (M, N, d) embeddings of M views.
            scores: (M, N, K), or None when the divergence is off.

        Returns:
            The total and its terms.
        """
        (tau, contrastive_weight, divergence_weight, sigma, alpha, tau_div, smoothing, bonus) = (
            self.numbers.unbind()
        )
        zero = torch.zeros((), device=z.device)
        contrastive = self._contrast(z, tau)
        total, divergent, usage = contrastive_weight * contrastive, zero, zero
        if self.has_divergence and scores is not None:
            terms = [
                divergence_loss(
                    first,
                    second,
                    kernel=self.kernel,
                    sigma=sigma if self.log_sigma is None else self.log_sigma.exp(),
                    alpha=alpha,
                    pairs=self.pairs,
                    temperature=tau_div,
                    smoothing=smoothing if self.is_smooth else None,
                )
                for first, second in compared(scores, self.sets)
            ]
            divergent = torch.stack(terms).mean()
            total = total + divergence_weight * divergent
            if self.has_usage:
                usage = usage_entropy(scores.flatten(0, 1))
                total = total - bonus * usage
        return Losses(total, contrastive, divergent, usage)

    def _contrast(self, z: Tensor, temperature: Tensor) -> Tensor:
        """Return the contrastive loss of embeddings (M, N, d)."""
        if self.contrastive_sets == "none":
            return self.contrastive(*z.unbind(), temperature=temperature)
        z = F.normalize(z.to(torch.promote_types(z.dtype, torch.float32)), dim=2)
        terms = [
            self.contrastive(of_distribution(a), of_distribution(b), temperature=temperature)
            for a, b in compared(z, self.contrastive_sets)
        ]
        return torch.stack(terms).mean()
