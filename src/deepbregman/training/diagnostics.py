"""Numbers that tell whether training is healthy, and the words for when it is not."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.errors import UserError
from deepbregman.objectives import Step, StepOutputs

SHARE_OFFSET = 1e-7
"""Added to the shares of a spectrum by RankMe and LiDAR."""
WITHIN_OFFSET = 1e-4
"""Added to the variances within an image by LiDAR, so that they can be inverted."""
FITTED = (5, 50)
"""Places of the eigenvalues, from 1, to which alpha-ReQ fits its line."""
COLLAPSED_RANK = 2.0
COLLAPSED_SPREAD = 0.05
RECORDED = {
    *("epoch", "step", "total", "learning_rate", "skipped", "images_per_second"),
    *("views_per_second", "peak_gigabytes", "alignment", "uniformity", "spread", "effective_rank"),
    *("knn", "divergence_positives", "divergence_negatives", "active_subnetworks"),
    *("usage_entropy", "sigma", "rankme", "alpha_req", "lidar", "neighbour_stability"),
    *("long_stability", "verdict", "reason", "stopped"),
}
"""Names in the record of an epoch that neither a method nor a callback may give to its own."""


def alignment(z1: Tensor, z2: Tensor) -> Tensor:
    """Mean squared distance of positives (N, d) on the sphere (Wang and Isola 2020); 0 is best."""
    return (F.normalize(z1, dim=1) - F.normalize(z2, dim=1)).square().sum(dim=1).mean()


def uniformity(z: Tensor) -> Tensor:
    """Log of the mean Gaussian potential of all pairs of ``z`` (N, d) on the sphere (as above)."""
    z = F.normalize(z, dim=1)
    squared = (2.0 - 2.0 * z @ z.T).clamp_min(0.0)  # (N, N)
    others = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    return ((-2.0 * squared).exp() * others).sum().div(others.sum()).log()


def effective_rank(h: Tensor) -> Tensor:
    """Exponential of the entropy of the singular values of centred ``h`` (Roy, Vetterli 2007)."""
    values = torch.linalg.svdvals(h - h.mean(dim=0))
    share = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    entropy: Tensor = torch.special.entr(share).sum()
    return entropy.exp()


def rankme(h: Tensor) -> Tensor:
    """Exponential of the entropy of the singular values of ``h`` (N, d) (Garrido et al. 2023).

    Unlike the effective rank it does not centre, so the mean of ``h`` counts as a direction.
    """
    return _count_shares(torch.linalg.svdvals(h))


def _count_shares(spectrum: Tensor) -> Tensor:
    """Return the exponential of the entropy of a spectrum, with the offset of RankMe and LiDAR."""
    share = spectrum / spectrum.sum().clamp_min(torch.finfo(spectrum.dtype).tiny) + SHARE_OFFSET
    entropy: Tensor = -(share * share.log()).sum()
    return entropy.exp()


def alpha_req(h: Tensor) -> Tensor:
    """Decay of the spectrum of ``h`` (N, d): the alpha of ``lambda_j ~ j^-alpha`` (Agrawal 2022).

    The slope of a least-squares line through the logarithms of the eigenvalues of the covariance,
    against the logarithms of their places. NaN where fewer than two are above rounding.
    """
    values = torch.linalg.svdvals(h - h.mean(dim=0)).square()  # descending
    rounding = values[:1] * torch.finfo(values.dtype).eps
    first, last = FITTED
    places = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)
    kept = (places >= first) & (places <= last) & (values > rounding)
    x, y = places[kept].log(), values[kept].log()
    x = x - x.mean()
    slope: Tensor = (x * y).sum() / x.square().sum()  # 0 / 0 of fewer than two
    return -slope


def lidar(views: Tensor) -> Tensor:
    """Effective rank of the LDA matrix of views (M, N, d), each image a class (Thilak et al. 2024).

    With S_b the covariance of the images' means and S_w that of views around them, it counts the
    eigenvalues of ``S_w^-1/2 S_b S_w^-1/2``: directions that differ more between images than
    between the views of one.
    """
    num_views, num_images, width = views.shape
    means = views.mean(dim=0)  # (N, d)
    apart = (means - means.mean(dim=0)) / num_images**0.5
    inside = (views - means).flatten(0, 1) / (num_views * num_images) ** 0.5
    # By eigenvectors: of large representations rounding exceeds the offset, and Cholesky fails.
    values, vectors = torch.linalg.eigh(inside.T @ inside)  # S_w without the offset
    scale = (values.clamp_min(0.0) + WITHIN_OFFSET).rsqrt()
    half = scale[:, None] * (vectors.T @ apart.T)  # (d, N); a rotation of S_w^-1/2 S_b^1/2
    values = torch.linalg.svdvals(half).square()
    return _count_shares(F.pad(values, (0, width - len(values))))


def find_nearest(h: Tensor, k: int) -> Tensor:
    """Return the k nearest others (N, k) by cosine of each of ``h`` (N, d)."""
    z = F.normalize(h, dim=1)
    return (z @ z.T).fill_diagonal_(-torch.inf).topk(k, dim=1).indices


def neighbour_stability(before: Tensor, after: Tensor) -> Tensor:
    """Share of the nearest neighbours (N, k) of each image that are the same as before."""
    return (after[:, :, None] == before[:, None, :]).any(dim=2).double().mean()


def spread(z: Tensor) -> Tensor:
    """Deviation of ``z`` (N, d) on the sphere: about 1 spread evenly, 0 in one point."""
    return F.normalize(z, dim=1).std(dim=0, correction=0).square().sum().sqrt()


def check_names(step: Step) -> None:
    """Refuse a method whose losses or metrics have names that the record of an epoch uses."""
    method = step.objective
    beside = [term.weights for term in (step.divergence, step.rotation) if term is not None]
    taken = RECORDED.union(*beside)
    for kind, names in (("loss term", method.weights), ("metric", method.metrics())):
        for name in sorted(taken & names.keys()):
            raise UserError(
                f"the method {type(method).__name__} has a {kind} {name!r}, a name that the run's "
                "metrics use for something else: give it another name"
            )
        taken |= names.keys()


def diagnose(step: Step, outputs: StepOutputs) -> dict[str, float]:
    """Compute every diagnostic of a batch, whose representations are those of every process."""
    z, h = outputs.student.float(), outputs.representation[0].float()
    targets = [] if outputs.teacher is None else [outputs.teacher[0].float()]
    partners = [*z[1:], *targets]  # none of a single view without a target
    found = {
        **({"alignment": alignment(z[0], partners[0])} if partners else {}),
        "uniformity": uniformity(z[0]),
        "spread": torch.minimum(spread(z[0]), spread(h)),
        "effective_rank": effective_rank(h),
        **step.diagnose(outputs),
        **step.metrics(),
    }
    return {name: float(value) for name, value in found.items()}


def find_collapse(record: dict[str, float]) -> list[str]:
    """Say whether the representations of a batch have collapsed, by what diagnose found."""
    rank, deviation = record["effective_rank"], record["spread"]
    if rank >= COLLAPSED_RANK and deviation >= COLLAPSED_SPREAD:
        return []
    # Without a divergence beside it, a larger weight acts as a higher learning rate does.
    weight = " or raise objective.weight" if "active_subnetworks" in record else ""
    return [
        f"representations have collapsed (effective rank {rank:.1f}, spread {deviation:.3f}): "
        f"lower the learning rate{weight}"
    ]
