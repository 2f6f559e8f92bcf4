"""BYOL against its formula, and against lightly's loss."""

import pytest
import torch
from torch import Tensor

from deepbregman.objectives import Samples, ViewGroups, gather_alone
from deepbregman.objectives.byol import BYOL

from .methods import build_taught, draw_views


def predict(objective: BYOL, views: Tensor) -> tuple[Tensor, Tensor]:
    z = objective.embed(views)[1]
    targets = objective.teacher(views.flatten(0, 1)).view_as(z)
    return objective.predictor(z.flatten(0, 1)).view_as(z), targets


def test_the_loss_is_the_papers():
    """The squared distance of the two unit vectors, both ways round, halved (Eq. 2)."""
    objective, views = build_taught("byol"), draw_views(2, 5)
    p, targets = predict(objective, views)
    total = 0.0
    for a, b in ((0, 1), (1, 0)):
        for i in range(5):
            gap = p[a, i] / p[a, i].norm() - targets[b, i] / targets[b, i].norm()
            total += gap.detach().square().sum().item()
    found = objective(ViewGroups(views), gather_alone, Samples())
    assert found.terms["prediction"].item() == pytest.approx(total / 10, rel=1e-9)
    torch.testing.assert_close(found.student, p)
    torch.testing.assert_close(found.teacher, targets)


def test_it_is_lightlys_loss_moved_and_doubled():
    losses = pytest.importorskip("lightly.loss")
    objective, views = build_taught("byol"), draw_views(2, 6)
    p, targets = predict(objective, views)
    theirs = losses.NegativeCosineSimilarity()
    expected = 2.0 + theirs(p[0], targets[1]) + theirs(p[1], targets[0])
    found = objective(ViewGroups(views), gather_alone, Samples()).terms["prediction"]
    torch.testing.assert_close(found, expected)
