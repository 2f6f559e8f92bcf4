"""SwAV against its formula, and against lightly's loss."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.objectives import Samples, ViewGroups, gather_alone
from deepbregman.objectives.swav import SwAV

from .methods import build_objective, draw_views


def sinkhorn(scores: Tensor, epsilon: float, rounds: int) -> Tensor:
    """Row by row and column by column, as the paper's appendix: rows are prototypes."""
    q = (scores / epsilon).exp().T  # (K, N)
    q = q / q.sum()
    for _ in range(rounds):
        for k in range(len(q)):
            q[k] = q[k] / (q[k].sum() * len(q))
        for n in range(q.shape[1]):
            q[:, n] = q[:, n] / (q[:, n].sum() * q.shape[1])
    return (q * q.shape[1]).T


def score(objective: SwAV, views: Tensor) -> list[Tensor]:
    directions = F.normalize(objective.prototypes.weight, dim=1)
    return [F.normalize(z, dim=1) @ directions.T for z in objective.embed(views)[1]]


def by_hand(objective: SwAV, main: Tensor, small: Tensor | None, past: Tensor | None) -> float:
    """The mean over main views of the mean over all other views of their cross-entropy."""
    scores = score(objective, main)
    others = scores + ([] if small is None else score(objective, small))
    losses = []
    for a, own in enumerate(scores):
        together = own if past is None else torch.cat([past, own])
        target = sinkhorn(together.detach(), 0.05, 3)[-len(own) :]
        for b, view in enumerate(others):
            if b != a:
                log_p = (view / 0.1).log_softmax(dim=1)
                losses += [-(target[i] * log_p[i]).sum().item() for i in range(len(own))]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("crops", [0, 2])
def test_the_loss_is_the_papers(crops):
    objective = build_objective("swav")
    main = draw_views(2, 4, 8)
    small = draw_views(crops, 4, 4) if crops else None
    expected = by_hand(objective, main, small, None)
    found = objective(ViewGroups(main, None, small), gather_alone, Samples())
    assert found.terms["assignment"].item() == pytest.approx(expected, rel=1e-6)


def test_the_queue_joins_the_assignment_once_it_is_full_and_due():
    objective = build_objective("swav", **{"objective.queue": 32, "objective.queue_from": 0.2})
    main = draw_views(2, 4, 8)
    rows = F.normalize(torch.randn(32, 6, dtype=torch.float64), dim=1)
    directions = F.normalize(objective.prototypes.weight, dim=1).detach()
    expected = {
        False: by_hand(objective, main, None, None),
        True: by_hand(objective, main, None, rows @ directions.T),
    }
    assert abs(expected[True] - expected[False]) > 1e-3
    for pushed, progress, used in ((31, 0.5, False), (32, 0.1, False), (32, 0.2, True)):
        objective.queue.weight.copy_(rows)
        objective.queue.pushed.fill_(pushed)
        objective.after_step(progress)
        found = objective(ViewGroups(main), gather_alone, Samples()).terms["assignment"].item()
        assert found == pytest.approx(expected[used], rel=1e-6)
    fresh = F.normalize(objective.embed(main)[1][0].detach(), dim=1)
    torch.testing.assert_close(objective.queue.weight[:4], fresh)


def test_it_equals_lightlys_loss():
    losses = pytest.importorskip("lightly.loss")
    objective = build_objective("swav")
    main = draw_views(2, 8, 8)
    small = draw_views(2, 8, 4)
    theirs = losses.SwaVLoss(temperature=0.1, sinkhorn_iterations=3, sinkhorn_epsilon=0.05)
    expected = theirs(score(objective, main), score(objective, small))
    found = objective(ViewGroups(main, None, small), gather_alone, Samples())
    torch.testing.assert_close(found.terms["assignment"].view(1), expected, rtol=1e-6, atol=0.0)


def test_assignments_get_no_gradient_and_prototypes_do():
    objective = build_objective("swav")
    main = draw_views(2, 4, 8)
    scores = torch.stack(score(objective, main))
    assert not objective.assign(scores[0]).requires_grad
    objective(ViewGroups(main), gather_alone, Samples()).terms["assignment"].backward()
    gradient = objective.prototypes.weight.grad
    assert gradient.any()
