"""The optimum of multinomial logistic regression, by L-BFGS in coordinates of even curvature."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

# torch's L-BFGS discards curvature below 1e-10, all there is near the optimum: scale the objective.
_SCALE = 2.0**20
_ONE_THREAD_ELEMENTS = 2**18
# With fewer rows the classes are soon separated, where the curvature at the start says little.
_ROWS_PER_FEATURE = 4
_ROWS_AT_ONCE = 2**16


def minimise(
    design: Tensor, targets: Tensor, weight: Tensor, bias: Tensor, l2: float, max_iterations: int
) -> None:
    """Move a classifier to the optimum of mean cross-entropy plus ``l2 / 2 * ||weight||^2``.

    Features are correlated, so in the weights the objective is a long narrow valley, in which
    L-BFGS is slow. With rows enough it works in coordinates z instead, ``weight = z @ basis``, in
    which the curvature at the start is even: two to four times fewer evaluations.
    The objective, and with it the optimum, is that of the weights either way.

    Args:
        design: (n, d), standardised features.
        targets: (n,), classes from 0 to C - 1, each of them present.
        weight: (C, d), the start; changed in place.
        bias: (C,), the same.
        l2: The penalty.
        max_iterations: A limit; stopping short of the optimum gives a RuntimeWarning.
    """
    # The distance to the optimum is at most the slope over l2, so a small l2 asks for more.
    tolerance = min(1e-7, 1e-3 * l2) if design.dtype == torch.float64 else 1e-5
    coordinates, growth, basis = weight, 1.0, None
    with _few_threads(design):
        if len(design) >= _ROWS_PER_FEATURE * design.shape[1]:
            factor = _curvature_factor(
                design, design @ weight.T + bias, l2
            )  # (d, d), lower triangular
            identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
            basis = torch.linalg.solve_triangular(factor, identity, upper=False)
            coordinates = weight @ factor  # (C, d)
            # The slope by weight is that by z times factor.T: at most so many times as large.
            growth = max(1.0, math.sqrt(len(factor)) * float(factor.norm(dim=1).max()))
        parameters = [coordinates.requires_grad_(), bias.requires_grad_()]

        def slopes(at: Tensor, by: list[Tensor]) -> tuple[float, list[Tensor]]:
            loss = functional.cross_entropy(design @ at.T + bias, targets)
            loss = _SCALE * (loss + l2 / 2 * at.square().sum())
            return loss.item(), list(torch.autograd.grad(loss, by))

        def objective() -> float:
            at = coordinates if basis is None else coordinates @ basis
            loss, (coordinates.grad, bias.grad) = slopes(at, parameters)
            return loss

        optimiser: torch.optim.Optimizer = torch.optim.LBFGS(
            parameters,
            max_iter=max_iterations,
            max_eval=2 * max_iterations,
            tolerance_grad=_SCALE * tolerance / growth,
            tolerance_change=torch.finfo(design.dtype).eps,
            history_size=20,
            line_search_fn="strong_wolfe",
        )
        optimiser.step(objective)
        if basis is not None:
            weight.copy_((coordinates @ basis).detach())
        # Measured anew: the line search may have left the gradient of another point.
        _, at_end = slopes(weight.requires_grad_(), [weight, bias])
    slope = max(float(part.abs().max()) for part in at_end) / _SCALE
    if not slope <= 100 * tolerance:
        message = (
            f"L-BFGS stopped at slope {slope:.1e}, above {100 * tolerance:.0e}, after at most "
            f"{max_iterations} iterations: raise max_iterations or l2"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _curvature_factor(design: Tensor, logits: Tensor, l2: float) -> Tensor:
    """Return the Cholesky factor (d, d) of the curvature at the start, as a mean over the classes.

    That is the covariance, each row weighted by its mean p (1 - p), plus l2, over the bias's own.
    """
    probabilities = logits.softmax(dim=1)  # (n, C)
    # Rows that are certain already keep a little weight: they may not be at the optimum.
    shares = (probabilities * (1 - probabilities)).mean(dim=1).clamp_min(1e-5)  # (n,)
    curvature = design.new_zeros(design.shape[1], design.shape[1])
    parts = zip(*(torch.split(t, _ROWS_AT_ONCE) for t in (design, shares)), strict=True)
    for rows, share in parts:  # a copy of all rows would be 9 GB of ImageNet
        curvature += rows.T @ (rows * share[:, None])
    curvature /= shares.sum()
    # Any factor gives the same optimum; the rounding of collinear features must not make it fail.
    rounding = 10 * torch.finfo(design.dtype).eps * curvature.diagonal().sum()
    curvature.diagonal().add_(rounding + l2 / shares.mean())
    factor: Tensor = torch.linalg.cholesky(curvature)
    return factor


@contextmanager
def _few_threads(design: Tensor) -> Iterator[None]:
    """Solve a small problem with one thread: on a busy machine several wait for each other."""
    before = torch.get_num_threads()
    if design.numel() <= _ONE_THREAD_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
