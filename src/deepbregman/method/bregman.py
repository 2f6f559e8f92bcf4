"""Scores to divergences to similarities: the only copy of each formula.

Symbols, as in the paper. ``p`` and ``q`` are rows of scores, one score for each of the K
subnetworks: ``p[i, k] = w_k(z_i) + b_k``. A row may also stand for an empirical distribution, a set
of S samples; its scores are then the mean of its samples' scores, ``E_p[w_k] + b_k``. In every
matrix below ``D[i, j]`` is D(p_i || q_j): the first argument is the row.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Generator = Callable[[Tensor], Tensor]
"""A convex function phi: (..., d) -> (...)."""

Number = float | Tensor
_ENTRIES = 2**24
"""Numbers of a matrix that are copied to float64 at a time, which takes 128 MiB."""
_SAMPLE = 512
"""Rows of scores from which their rank is found."""
_ROUNDING = 1e-6
"""Largest error, as a share of the largest score, that counts as rounding."""


def require_positive(name: str, value: Number) -> None:
    """Refuse a number that cannot divide; a tensor is not read, which would make the host wait."""
    if not isinstance(value, Tensor) and not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: it must be a finite number above 0")


def widen(values: Tensor) -> Tensor:
    """Return values in float32 or wider, as losses need them after networks in bfloat16."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def of_distribution(samples: Tensor) -> Tensor:
    """Reduce each set of samples to one row, its mean.

    Args:
        samples: (N, K) points, or (N, S, K) sets of S samples each.

    Returns:
        (N, K), in float32 or wider: a difference of two close scores means nothing in bfloat16.
    """
    if samples.ndim not in (2, 3):
        raise ValueError(
            f"scores of shape {tuple(samples.shape)}: expected (N, K) for points or (N, S, K) for "
            "sets of S samples; add or flatten dimensions until it is one of the two"
        )
    samples = widen(samples)
    return samples.mean(dim=1) if samples.ndim == 3 else samples


def _reduce_both(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce two batches of scores, of the same subnetworks, in the wider of their precisions."""
    rows, columns = of_distribution(p), of_distribution(q)
    if rows.shape[1] != columns.shape[1] or rows.shape[1] == 0:
        raise ValueError(
            f"scores of shapes {tuple(p.shape)} and {tuple(q.shape)}: the last dimension is that "
            "of the subnetworks, and must be the same in both and 1 or more"
        )
    wide = torch.promote_types(rows.dtype, columns.dtype)
    return rows.to(wide), columns.to(wide)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Functional Bregman divergence of the max generator (Eq. 6): the gap at q's winner.

    ``D(p, q) = max_k p_k - p_{k*}`` with ``k* = argmax_k q_k``. Never negative, zero where both
    pick the same subnetwork (and there without gradient), not symmetric. Memory is O(NM + NK).

    Args:
        p: (N, K) scores, or (N, S, K) sets.
        q: (M, K) scores, or (M, S, K) sets.

    Returns:
        (N, M)
    """
    p, q = _reduce_both(p, q)
    return _prepare_hard(p)(q)


def _prepare_hard(p: Tensor) -> Callable[[Tensor], Tensor]:
    best = p.max(dim=1, keepdim=True).values  # (N, 1)

    def diverge(q: Tensor) -> Tensor:
        # Column j of p at q_j's winner, as a product with one-hot rows: exact, and unlike a gather
        # its backward pass adds in a fixed order, so that a resumed run repeats to the bit on a
        # GPU too.
        winner = F.one_hot(q.argmax(dim=1), q.shape[1]).to(p.dtype)  # (M, K)
        with torch.autocast(p.device.type, enabled=False):
            return best - p @ winner.T  # (N, M)

    return diverge


def soft_divergence(p: Tensor, q: Tensor, temperature: Number = 1.0) -> Tensor:
    """Functional Bregman divergence of the log-sum-exp generator: Eq. 6 made smooth.

    ``phi_T(p) = T log sum_k exp(p_k / T)`` is convex in p and generates
    ``D_T(p, q) = T KL(softmax(q / T) || softmax(p / T))``, which tends to :func:`divergence` as
    T tends to 0 and sends gradient through every pair and every subnetwork.

    Args:
        p: (N, K) scores, or (N, S, K) sets.
        q: (M, K) scores, or (M, S, K) sets.
        temperature: T > 0, the width of the smoothing, in units of the scores.

    Returns:
        (N, M)
    """
    require_positive("temperature", temperature)
    p, q = _reduce_both(p, q)
    return _prepare_soft(p, temperature)(q)


def _prepare_soft(p: Tensor, temperature: Number) -> Callable[[Tensor], Tensor]:
    log_p = F.log_softmax(p / temperature, dim=1)  # (N, K)

    def diverge(q: Tensor) -> Tensor:
        log_q = F.log_softmax(q / temperature, dim=1)  # (M, K)
        prob_q = log_q.exp()
        with torch.autocast(p.device.type, enabled=False):
            cross = log_p @ prob_q.T  # (N, M)
        # Rounding can leave a difference of two equal entropies a hair below zero.
        return (temperature * ((prob_q * log_q).sum(dim=1) - cross)).clamp_min(0.0)

    return diverge


def find_temperature(smoothing: Number | None, name: str = "smoothing") -> Number | None:
    """Return the T of the smooth form, or None for the hard one: None, or the number 0.

    A tensor is always a T. It is not read, which would make the host wait.
    """
    if smoothing is None or (not isinstance(smoothing, Tensor) and smoothing == 0):
        return None
    require_positive(name, smoothing)
    return smoothing


def learned_divergence(p: Tensor, q: Tensor, smoothing: Number | None = None) -> Tensor:
    """Take the smooth form at a temperature, or the hard one when it is None or the number 0."""
    temperature = find_temperature(smoothing)
    return divergence(p, q) if temperature is None else soft_divergence(p, q, temperature)


def prepare_points(p: Tensor, smoothing: Number | None = None) -> Callable[[Tensor], Tensor]:
    """Return the function from q, (M, K), to D(p, q), to compare the same p with many q.

    It is :func:`learned_divergence` to the bit. What depends on p alone is computed once.
    """
    p, temperature = of_distribution(p), find_temperature(smoothing)
    return _prepare_hard(p) if temperature is None else _prepare_soft(p, temperature)


class Tangents(NamedTuple):
    """Planes that touch a generator phi at rows q: D(p, q) is how far they lie below phi at p.

    ``D(p, q) = phi(p) - (slope_q . p + offset_q)``, which is 0 at p = q. In the hard form a slope
    is 1 at q's winner and 0 elsewhere, so the number of the winner stands for it.
    """

    slopes: Tensor  # (M, K), the gradient of phi at each q; (M, r) in the basis; hard: (M,) winners
    offsets: Tensor  # (M,)
    basis: Tensor | None  # (K, r), orthonormal, where the scores have a rank r far below K

    def reduce(self, p: Tensor) -> Tensor | None:
        """Return p in the basis, (N, r); None if p is not in its space."""
        return p if self.basis is None else _project(p, self.basis)

    def heights(self, reduced: Tensor) -> Tensor:
        """Return the height (N, M) of each plane at rows p, which are given in the basis."""
        if self.slopes.ndim == 1:
            return reduced[:, self.slopes]
        return reduced @ self.slopes.T + self.offsets


def find_tangents(q: Tensor, smoothing: Number | None = None) -> Tangents:
    """Find the tangents of the max generator, or of the log-sum-exp generator, at rows q.

    The K scores of a bank of vectors are made of the d numbers of an embedding, so they have rank
    d; then d numbers describe a plane instead of K.

    Args:
        q: (M, K) scores, or (M, S, K) sets.
        smoothing: T of the smooth form; None or 0 takes the hard one (Eq. 6).
    """
    q, temperature = of_distribution(q), find_temperature(smoothing)
    if temperature is None:
        return Tangents(q.argmax(dim=1), q.new_zeros(len(q), dtype=torch.float64), None)
    basis, slopes, offsets = _find_basis(q), [], []
    for part in split_rows(q):
        log_q = F.log_softmax(part.double() / temperature, dim=1)
        prob_q = log_q.exp()
        slopes.append(prob_q if basis is None else prob_q @ basis)
        offsets.append(-temperature * (prob_q * log_q).sum(dim=1))
    return Tangents(torch.cat(slopes), torch.cat(offsets), basis)


def prepare_targets(q: Tensor, smoothing: Number | None = None) -> Callable[[Tensor], Tensor]:
    """Return the function from p to D(p, q), to compare the same q with many p, in float64.

    It is :func:`learned_divergence` up to rounding. The tangents at q are computed once.

    Args:
        q: (M, K) scores, or (M, S, K) sets.
        smoothing: T of the smooth form; None or 0 takes the hard one (Eq. 6).

    Returns:
        A function from p, (N, K) or (N, S, K), to (N, M).
    """
    tangents, temperature = find_tangents(q, smoothing), find_temperature(smoothing)

    def diverge(p: Tensor) -> Tensor:
        rows = of_distribution(p.double())
        reduced = tangents.reduce(rows)
        if reduced is None:  # scores of other subnetworks than q's
            return learned_divergence(rows, q.double(), smoothing)
        top = rows.amax(dim=1) if temperature is None else log_sum_exp(rows, temperature)
        return (top[:, None] - tangents.heights(reduced)).clamp_min(0.0)

    return diverge


def split_rows(rows: Tensor) -> tuple[Tensor, ...]:
    """Split rows (N, K) into parts, so that copies in float64 fit into memory one at a time."""
    return torch.split(rows, max(1, _ENTRIES // rows.shape[1]))


def _find_basis(scores: Tensor) -> Tensor | None:
    """Return an orthonormal basis (K, r) of the space of scores (M, K); None if it saves little."""
    num_rows, num_scores = scores.shape
    if num_rows < _SAMPLE or num_scores < _SAMPLE:
        return None
    places = torch.linspace(0, num_rows - 1, _SAMPLE, device=scores.device).long()
    sample = scores[places].double()
    squares, rotation = torch.linalg.eigh(sample @ sample.T)  # far faster than the SVD
    kept = squares > _ROUNDING**2 * squares[-1]
    if int(kept.sum()) > _SAMPLE // 2:
        return None
    basis = sample.T @ (rotation[:, kept] / squares[kept].sqrt())
    return None if _project(scores, basis) is None else basis


def _project(scores: Tensor, basis: Tensor) -> Tensor | None:
    """Return scores (N, K) in a basis (K, r), in float64; None if they are not in its space."""
    largest = torch.linalg.vector_norm(scores, ord=math.inf)
    found = []
    for part in split_rows(scores):
        wide = part.double()
        found.append(wide @ basis)
        if not (found[-1] @ basis.T - wide).abs().max() <= _ROUNDING * largest:  # also for NaN
            return None
    return torch.cat(found)


def paired_divergence(p: Tensor, q: Tensor, smoothing: Number | None = None) -> Tensor:
    """Divergence of each row of p to the same row of q: the diagonal of the matrix, and no more.

    Args:
        p: (N, K) scores, or (N, S, K) sets.
        q: (N, K) scores, or (N, S, K) sets.
        smoothing: T of the smooth form; None or 0 takes the hard one (Eq. 6).

    Returns:
        (N,)
    """
    p, q = of_distribution(p), of_distribution(q)
    if p.shape != q.shape:
        raise ValueError(
            f"scores of shapes {tuple(p.shape)} and {tuple(q.shape)}: row i of one is compared "
            "with row i of the other, so they must have the same shape"
        )
    temperature = find_temperature(smoothing)
    if temperature is None:
        winner = F.one_hot(q.argmax(dim=1), q.shape[1]).to(p.dtype)  # (N, K)
        return p.max(dim=1).values - (p * winner).sum(dim=1)
    log_p = F.log_softmax(p / temperature, dim=1)
    log_q = F.log_softmax(q / temperature, dim=1)
    return temperature * (log_q.exp() * (log_q - log_p)).sum(dim=1)


def cosine_scores(z: Tensor, weight: Tensor) -> Tensor:
    """Score embeddings by linear functionals of unit norm: the cosine of every z with every row.

    Args:
        z: (N, d)
        weight: (K, d), its rows the K functionals; of any norm above 0.

    Returns:
        (N, K), in float32 or wider also under autocast.
    """
    wide = widen(z)
    with torch.autocast(z.device.type, enabled=False):
        return F.normalize(wide, dim=1) @ F.normalize(weight.to(wide.dtype), dim=1).T


def balance_scores(
    scores: Tensor, temperature: Number, iterations: int = 3, counts: Tensor | None = None
) -> Tensor:
    """Shift scores until the batch uses all functionals alike (Sinkhorn-Knopp, in logarithms).

    Of the scores that come back, ``softmax(scores / T)`` is the assignment of SwAV: each row sums
    to 1, and each column to about N / K.

    Args:
        scores: (N, K)
        temperature: T of the assignment.
        iterations: rounds of evening out columns, then rows.
        counts: (N,) how often each sample counts in its column, 0 or more; None: each once.

    Returns:
        (N, K)
    """
    logits = scores / temperature
    weight = scores.new_zeros(1) if counts is None else counts.to(scores.dtype).log()
    for _ in range(iterations):
        # Every functional has the same share.
        logits = logits - (logits + weight[:, None]).logsumexp(dim=0, keepdim=True)
        logits = F.log_softmax(logits, dim=1)  # every sample counts once
    return logits * temperature


def moment_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Symmetric divergence of Deep Divergence Learning: ``||E_p f - E_q f||^2``.

    Args:
        p: (N, F) features, or (N, S, F) sets.
        q: (M, F) features, or (M, S, F) sets.

    Returns:
        (N, M)
    """
    p, q = _reduce_both(p, q)
    centre = q.mean(dim=0, keepdim=True).detach()  # far from the origin the squares would cancel
    p, q = p - centre, q - centre
    with torch.autocast(p.device.type, enabled=False):
        cross = p @ q.T  # (N, M)
    squared = p.square().sum(dim=1, keepdim=True) + q.square().sum(dim=1) - 2.0 * cross
    return squared.clamp_min(0.0)


def bregman(phi: Generator, x: Tensor, y: Tensor) -> Tensor:
    """Bregman divergence of any convex generator, its gradient by autograd (Eq. 3).

    ``D_phi(x, y) = phi(x) - phi(y) - <x - y, grad phi(y)>``, row by row; leading dimensions
    broadcast, so ``bregman(phi, x[:, None], y[None])`` is the matrix of all pairs.

    Args:
        phi: convex, maps (..., d) to (...), each row by itself.
        x: (..., d)
        y: (..., d)

    Returns:
        (...)
    """
    if x.shape[-1:] != y.shape[-1:] or x.ndim == 0:
        raise ValueError(
            f"x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}: both are points of one "
            "space, so their last dimensions must be the same"
        )
    slope: Tensor = torch.func.grad(lambda point: phi(point).sum())(y)  # (..., d)
    return phi(x) - phi(y) - ((x - y) * slope).sum(dim=-1)


def squared_euclidean(x: Tensor) -> Tensor:
    """Generator of half the squared Euclidean distance: ``||x||^2 / 2``."""
    return 0.5 * x.square().sum(dim=-1)


def kl(x: Tensor) -> Tensor:
    """Generator of the generalised KL divergence: ``sum_i x_i log x_i``, x >= 0 and y > 0."""
    return torch.xlogy(x, x).sum(dim=-1)


def itakura_saito(x: Tensor) -> Tensor:
    """Generator of the Itakura-Saito distance: ``-sum_i log x_i``, x > 0."""
    return -x.log().sum(dim=-1)


def log_sum_exp(x: Tensor, temperature: Number = 1.0) -> Tensor:
    """Generator of :func:`soft_divergence`, as a function of scores."""
    require_positive("temperature", temperature)
    return temperature * torch.logsumexp(x / temperature, dim=-1)


def _sqrt(distance: Tensor) -> Tensor:
    """Compute ``sqrt(1 - D)`` for D < 1 and 0 beyond, with a finite gradient on both sides."""
    room = 1.0 - distance
    inside = room > 0.0
    return torch.where(inside, torch.where(inside, room, 1.0).sqrt(), 0.0)


def _linear(distance: Tensor) -> Tensor:
    """Compute ``1 - D / max D``.

    If max D is no more than rounding, D is divided by 1: a tiny divisor would make a huge gradient.
    """
    largest = distance.max()
    return 1.0 - distance / torch.where(largest > torch.finfo(distance.dtype).eps, largest, 1.0)


KERNELS: dict[str, Callable[[Tensor, Number, Number], Tensor]] = {
    "gaussian": lambda d, sigma, alpha: torch.exp(-d / (2.0 * sigma**2)),
    "inverse": lambda d, sigma, alpha: 1.0 / (1.0 + d),
    "sqrt": lambda d, sigma, alpha: _sqrt(d),
    "linear": lambda d, sigma, alpha: _linear(d),
    "arccot": lambda d, sigma, alpha: torch.pi / 2.0 - torch.atan(alpha * d),
    "negative": lambda d, sigma, alpha: -d,
}


def similarity(
    distance: Tensor, kernel: str = "gaussian", sigma: Number = 1.5, alpha: Number = 1.0
) -> Tensor:
    """Turn divergences into similarities psi, strictly decreasing in D.

    The paper's five, and ``negative``, which keeps its gradient for far pairs. ``sqrt`` takes
    D >= 1 as 1; ``linear`` divides by the largest D of the matrix, so it depends on the batch.

    Args:
        distance: divergences >= 0 of any shape.
        kernel: ``gaussian`` exp(-D / 2 sigma^2), ``inverse`` 1 / (1 + D), ``sqrt`` sqrt(1 - D),
            ``linear`` 1 - D / max D, ``arccot`` arccot(alpha D) or ``negative`` -D.
        sigma: width of ``gaussian``.
        alpha: slope of ``arccot``.

    Returns:
        The shape of ``distance``.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is not one of {', '.join(KERNELS)}")
    require_positive("sigma", sigma)
    require_positive("alpha", alpha)
    return KERNELS[kernel](distance, sigma, alpha)
