"""Losses: contrastive, on divergences, and with labels. Each is a scalar of tensors and numbers.

Views are separate arguments: ``z1`` and ``z2`` hold two views of the same N images in the same
order, so row i of one is the positive of row i of the other.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .bregman import (
    Number,
    cosine_scores,
    find_temperature,
    learned_divergence,
    of_distribution,
    paired_divergence,
    require_positive,
    similarity,
    widen,
)

Gather = Callable[[Tensor], Tensor]
"""Joins a tensor of every process, with gradient."""
Pairs = Literal["views", "all"]
Sets = Literal["none", "halves", "rest"]


def _compare_all(views: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine similarity of every sample to every other, and where the positives and the self are.

    Args:
        views: M tensors (N, d).

    Returns:
        (MN, MN) similarities, (MN, MN) mask of the other views of the same image, (MN, MN) mask of
        the diagonal.
    """
    for view in views:
        if not isinstance(view, Tensor):
            raise TypeError(
                f"a view of type {type(view).__name__}: give each view as a tensor, and what is no "
                "view by its name, such as temperature=0.1"
            )
    alike = all(view.shape == views[0].shape and view.ndim == 2 and len(view) for view in views)
    if len(views) < 2 or not alike:
        raise ValueError(
            f"{len(views)} views of shapes {[tuple(view.shape) for view in views]}: at least two "
            "views of one shape (N, d) are needed, with N of 1 or more"
        )
    z = torch.cat(views)
    z = F.normalize(widen(z), dim=1)  # (MN, d)
    with torch.autocast(z.device.type, enabled=False):
        cosines = z @ z.T  # (MN, MN)
    image = torch.arange(len(z), device=z.device) % len(views[0])
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    return cosines, (image[:, None] == image) & ~itself, itself


def _join(parts: tuple[Tensor, ...], gather: Gather | None) -> tuple[Tensor, ...]:
    """Join each part of all processes, where there are several."""
    return parts if gather is None else tuple(gather(part) for part in parts)


def nt_xent(*views: Tensor, temperature: Number = 0.1, gather: Gather | None = None) -> Tensor:
    """Normalised-temperature cross-entropy (Eq. 1 and 2).

    The mean over all anchors of the cross-entropy of the positive among every other sample. With
    more than two views each of the others is a positive in turn.

    Args:
        views: two or more tensors (N, d).
        temperature: tau.
        gather: joins the rows of all processes, such as :func:`deepbregman.gather`.

    Returns:
        A scalar.
    """
    require_positive("temperature", temperature)
    cosines, positive, itself = _compare_all(_join(views, gather))
    logits = (cosines / temperature).masked_fill(itself, -torch.inf)
    log_likelihood = cosines / temperature - torch.logsumexp(logits, dim=1, keepdim=True)
    return -(log_likelihood * positive).sum() / (len(cosines) * (len(views) - 1))


def nt_logistic(*views: Tensor, temperature: Number = 0.1, gather: Gather | None = None) -> Tensor:
    """Normalised-temperature logistic loss: every pair judged by itself.

    For each anchor, the mean over its positives of ``-log sigmoid(s / tau)`` plus the mean over its
    negatives of ``-log sigmoid(-s / tau)``; then the mean over the anchors.

    Args:
        views: two or more tensors (N, d), N >= 2.
        temperature: tau.
        gather: joins the rows of all processes, such as :func:`deepbregman.gather`.

    Returns:
        A scalar.
    """
    require_positive("temperature", temperature)
    cosines, positive, itself = _compare_all(_join(views, gather))
    if len(cosines) == len(views):
        raise ValueError("N is 1: an image is compared with others; give 2 images or more")
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
    gather: Gather | None = None,
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
        gather: joins the rows of all processes, such as :func:`deepbregman.gather`.

    Returns:
        A scalar.
    """
    o1, o2 = _join((of_distribution(o1), of_distribution(o2)), gather)
    if o1.shape != o2.shape or not len(o1):
        raise ValueError(
            f"scores of shapes {tuple(o1.shape)} and {tuple(o2.shape)}: row i of both must be the "
            "same image, so they must have the same shape, with one row or more"
        )
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
        require_positive("temperature", temperature)
        logits = logits / temperature
    if pairs == "all":
        itself = torch.eye(len(rows), dtype=torch.bool, device=o1.device)
        logits = logits.masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, target)


def match_scores(
    scores: Tensor,
    target: Tensor,
    *,
    temperature: Number = 0.2,
    target_temperature: Number | None = None,
) -> Tensor:
    """Mean divergence of each row of scores to its own target, which gets no gradient.

    ``mean_i KL(softmax(target_i / T_t) || softmax(scores_i / T_s))``: the smooth divergence of the
    functionals divided by their temperatures. Its gradient in the scores of a row is
    ``(softmax(scores_i / T_s) - softmax(target_i / T_t)) / T_s``, bounded.

    Args:
        scores: (N, K) of the student, or (N, S, K) sets.
        target: (N, K) of the teacher, or (N, S, K) sets.
        temperature: T_s; 0 takes the hard form (Eq. 6), which has no temperature: the gap between
            the best score of a row and its score at the target's winner.
        target_temperature: T_t; None takes T_s. Below T_s the target is the sharper of the two.
    """
    p, q = of_distribution(scores), of_distribution(target).detach()
    student_temperature = find_temperature(temperature, "temperature")
    if student_temperature is None:
        return paired_divergence(p, q).mean()
    if target_temperature is None:
        target_temperature = student_temperature
    require_positive("target_temperature", target_temperature)
    return paired_divergence(p / student_temperature, q / target_temperature, 1.0).mean()


def _require_rows(z: Tensor, target: Tensor, **others: Tensor) -> None:
    """Refuse embeddings and targets that do not belong together, and other rows of another width.

    Args:
        z: (N, d)
        target: (N, d)
        others: (K, d), one at most, by the name of the argument.
    """
    given = {"z": z, "target": target, **others}
    for name, rows in given.items():
        if not isinstance(rows, Tensor):
            raise TypeError(
                f"{name} is of type {type(rows).__name__}: it must be a tensor; of a Bank, give "
                "bank.weight"
            )
    fits = z.ndim == 2 and z.shape == target.shape and len(z) > 0
    for rows in others.values():
        fits = fits and rows.ndim == 2 and rows.shape[1] == z.shape[1] and len(rows) > 0
    if not fits:
        words = ", ".join(f"{name} of shape {tuple(rows.shape)}" for name, rows in given.items())
        expected = ", ".join(["(N, d)", "(N, d)", "(K, d)"][: len(given)])
        raise ValueError(f"{words}: expected {expected}, with one row or more")


def match_divergence(
    z: Tensor,
    target: Tensor,
    weight: Tensor,
    *,
    temperature: Number = 0.2,
    target_temperature: Number | None = 0.1,
) -> Tensor:
    """Mean divergence of embeddings to their targets, with the rows of a matrix as subnetworks.

    The scores of an embedding are its cosines with the rows of ``weight``, such as a bank of the
    teacher's last embeddings: the student learns to place an image among them as the teacher does.

    Args:
        z: (N, d) of the student, with gradient.
        target: (N, d) of the teacher; no gradient reaches it, nor the weight.
        weight: (K, d).
        temperature: T_s, see :func:`match_scores`.
        target_temperature: T_t.

    Returns:
        A scalar.
    """
    _require_rows(z, target, weight=weight)
    weight = weight.detach()
    return match_scores(
        cosine_scores(z, weight),
        cosine_scores(target.detach(), weight),
        temperature=temperature,
        target_temperature=target_temperature,
    )


def info_nce(
    z: Tensor,
    target: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: Number = 0.2,
    in_batch: bool = True,
    gather: Gather | None = None,
) -> Tensor:
    """Cross-entropy of an image's own target among the targets of the batch and the negatives.

    Args:
        z: (N, d) of the student.
        target: (N, d) of the teacher, row i of the same image as row i of z, each image once.
        negatives: (K, d) further embeddings that no image of the batch matches, such as a bank.
        temperature: tau.
        in_batch: whether the targets of the batch's other images are negatives as well.
        gather: joins the rows of all processes, such as :func:`deepbregman.gather`.

    Returns:
        A scalar.
    """
    require_positive("temperature", temperature)
    z, target = _join((z, target), gather)
    _require_rows(z, target, **({} if negatives is None else {"negatives": negatives}))
    target = target.detach()
    if in_batch:
        others = target if negatives is None else torch.cat([target, negatives.detach()])
        logits = cosine_scores(z, others) / temperature
        return F.cross_entropy(logits, torch.arange(len(z), device=z.device))
    if negatives is None:
        raise ValueError("negatives is None and in_batch False: nothing is left to compare with")
    own = paired_cosines(z, target) / temperature  # (N,)
    others = cosine_scores(z, negatives.detach()) / temperature  # (N, K)
    return (torch.logaddexp(own, others.logsumexp(dim=1)) - own).mean()


def bank_share_loss(
    z: Tensor, target: Tensor, negatives: Tensor, *, temperature: Number = 0.2
) -> Tensor:
    """Mean of ``-log(B / (A + B))``: the third term of SCE (Denize et al. 2023), the "ceiling".

    A is exp(similarity / temperature) of an image and its own target, and B is the sum of the same
    over the negatives. It limits A, which the relation to the negatives does not see.

    Args:
        z: (N, d) of the student.
        target: (N, d) of the teacher.
        negatives: (K, d)
    """
    require_positive("temperature", temperature)
    own = paired_cosines(z, target.detach()) / temperature  # (N,)
    others = (cosine_scores(z, negatives.detach()) / temperature).logsumexp(dim=1)  # (N,)
    return F.softplus(own - others).mean()


def paired_cosines(z: Tensor, target: Tensor) -> Tensor:
    """Return the cosine (N,) of each row of z (N, d) with the same row of the target (N, d)."""
    return (F.normalize(widen(z), dim=1) * F.normalize(widen(target), dim=1)).sum(dim=1)


def cross_view_entropy(targets: Tensor, scores: Tensor, temperature: Number = 0.1) -> Tensor:
    """Mean cross-entropy of each target with the scores of every view but its own.

    Up to the entropy of the targets, which has no gradient, it is the smooth divergence of the
    scores to the targets.

    Args:
        targets: (A, N, K) probabilities, of the first A of the views; no gradient reaches them.
        scores: (V, N, K) of every view, V >= 2.
    """
    require_positive("temperature", temperature)
    targets = targets.detach()
    log_p = F.log_softmax(scores / temperature, dim=2)
    # All pairs less each target with its own view: no tensor of pairs is made.
    every = (targets.sum(dim=0) * log_p.sum(dim=0)).sum()
    own = (targets * log_p[: len(targets)]).sum()
    return (own - every) / (targets[..., 0].numel() * (len(scores) - 1))


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
    log_p = F.log_softmax(of_distribution(scores) / temperature, dim=1)
    log_usage = log_p.logsumexp(dim=0) - math.log(len(log_p))  # (K,)
    log_usage = log_usage.clamp_min(torch.finfo(log_usage.dtype).min)  # not minus infinity
    # Of logarithms, since a share may be too small for float32: its entropy has no gradient at 0.
    return -(log_usage.exp() * log_usage).sum() / math.log(scores.shape[1])


def list_comparisons(views: Tensor, sets: Sets) -> list[tuple[Tensor, Tensor]]:
    """List what is compared of each image's M views: points, or empirical distributions of them.

    Args:
        views: (M, N, d), M >= 2.
        sets: ``none``: every view with every other, once; ``halves``: the first half of the views
            with the second, as two distributions; ``rest``: every view with the distribution of the
            others; with two views that is ``none`` in both directions.

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


ContrastiveLoss = Callable[..., Tensor]
"""Takes two or more views (N, d) and ``temperature=``."""
CONTRASTIVE_LOSSES: dict[str, ContrastiveLoss] = {"nt_xent": nt_xent, "nt_logistic": nt_logistic}


def contrast_sets(
    loss: ContrastiveLoss, z: Tensor, sets: Sets, temperature: Number = 0.1
) -> Tensor:
    """Apply a contrastive loss to views, or to sets of them; see :func:`list_comparisons`.

    With ``none`` each sample meets all others in one comparison; otherwise a set is the mean of its
    normalised embeddings, and the loss the mean over the comparisons.

    Args:
        z: (M, N, d) embeddings of M views.
    """
    if sets == "none":
        return loss(*z.unbind(), temperature=temperature)
    units = torch.stack([F.normalize(widen(view), dim=1) for view in z.unbind()])  # (M, N, d)
    values = [
        loss(of_distribution(first), of_distribution(second), temperature=temperature)
        for first, second in list_comparisons(units, sets)
    ]
    return torch.stack(values).mean()


# Supervised losses on a matrix of divergences, as Deep Divergence Learning trains (ICML 2020):
# distance[i, j] is D(i || j), the anchor is the row, and the diagonal is never a pair. With a
# divergence that is not symmetric both directions of a pair count, each with its own anchor.


def _mask_pairs(distance: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masks (N, N) of pairs of one class, without the diagonal, and of two classes."""
    if distance.ndim != 2 or distance.shape != (len(labels), len(labels)):
        raise ValueError(
            f"divergences of shape {tuple(distance.shape)} with {len(labels)} labels: expected "
            "(N, N) and (N,), every sample against every sample"
        )
    same = labels[:, None] == labels
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return same & ~itself, ~same


def contrastive_margin(distance: Tensor, labels: Tensor, margin: Number = 1.0) -> Tensor:
    """Pull pairs of one class together, push the others apart up to a margin.

    ``1/2 (mean of d over pairs of one class + mean of max(margin - d, 0)^2 over the others)``. Each
    kind is averaged by itself, so that the number of classes does not set their balance; a kind of
    which the batch has none counts 0.

    Args:
        distance: (N, N) divergences >= 0.
        labels: (N,) integers.
        margin: beyond which pairs of two classes are left alone.
    """
    same, different = _mask_pairs(distance, labels)
    attract = (distance * same).sum() / same.sum().clamp_min(1)
    gap = (margin - distance).clamp_min(0.0).square()
    repel = (gap * different).sum() / different.sum().clamp_min(1)
    return 0.5 * (attract + repel)


def triplet_margin(distance: Tensor, labels: Tensor, margin: Number = 1.0) -> Tensor:
    """Mean over all triplets of a batch of ``max(d(a, p) - d(a, n) + margin, 0)``.

    Every anchor a with every p of its class and every n of another. The cube of triplets is never
    formed: with an anchor's negatives sorted, those nearer than ``d(a, p) + margin`` are a prefix,
    whose size and sum are all that is needed. Memory is O(N^2), the value and the gradient exact.

    Args:
        distance: (N, N) divergences >= 0.
        labels: (N,) integers.
        margin: by which a negative is to be further than a positive.

    Returns:
        A scalar; 0 where the batch has no triplet.
    """
    same, different = _mask_pairs(distance, labels)
    negatives, order = distance.masked_fill(~different, torch.inf).sort(dim=1)
    is_negative = different.gather(1, order)
    sums = torch.where(is_negative, negatives, 0.0).cumsum(dim=1)  # (N, N), of the nearest ones
    sums = torch.cat([sums.new_zeros(len(sums), 1), sums], dim=1)  # (N, N + 1)
    reach = distance + margin  # (N, N)
    count = torch.searchsorted(negatives.detach(), reach.detach().contiguous())  # (N, N)
    hinge = count * reach - sums.gather(1, count)
    triplets = (same.sum(dim=1) * different.sum(dim=1)).sum()
    return (hinge * same).sum() / triplets.clamp_min(1)


METRIC_LOSSES: dict[str, Callable[[Tensor, Tensor, Number], Tensor]] = {
    "contrastive": contrastive_margin,
    "triplet": triplet_margin,
}
