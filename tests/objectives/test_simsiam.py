"""SimSiam against its formula, and against lightly's loss."""

import pytest
import torch
from torch import Tensor

from deepbregman.objectives import Samples, ViewGroups, build_step, gather_alone
from deepbregman.objectives.simsiam import SimSiam
from deepbregman.training.optimisers import build_optimiser, set_learning_rates

from .methods import build_objective, configure, draw_views


def embed(objective: SimSiam, views: Tensor) -> tuple[Tensor, Tensor]:
    z = objective.embed(views)[1]
    return z, objective.predictor(z.flatten(0, 1)).view_as(z)


@pytest.mark.parametrize("num_views", [2, 3])
def test_the_loss_is_the_papers(num_views):
    """Half of D(p1, z2) and half of D(p2, z1), each the mean of negative cosines (Eq. 1 to 3)."""
    objective = build_objective("simsiam")
    views = draw_views(num_views, 4, 8)
    z, p = embed(objective, views)
    losses = []
    for a in range(num_views):
        for b in range(num_views):
            if a != b:
                losses += [
                    -(p[a, i] @ z[b, i] / (p[a, i].norm() * z[b, i].norm())).item()
                    for i in range(4)
                ]
    found = objective(ViewGroups(views), gather_alone, Samples())
    assert found.terms["prediction"].item() == pytest.approx(sum(losses) / len(losses), abs=1e-12)
    torch.testing.assert_close(found.student, z)
    assert found.teacher is None


def test_it_equals_lightlys_loss():
    losses = pytest.importorskip("lightly.loss")
    objective = build_objective("simsiam")
    views = draw_views(2, 6, 8)
    z, p = embed(objective, views)
    theirs = losses.NegativeCosineSimilarity()
    expected = 0.5 * (theirs(p[0], z[1]) + theirs(p[1], z[0]))
    found = objective(ViewGroups(views), gather_alone, Samples())
    torch.testing.assert_close(found.terms["prediction"], expected)


def test_no_gradient_comes_back_through_the_target():
    objective = build_objective("simsiam")
    views = draw_views(2, 4, 8)
    found = objective(ViewGroups(views), gather_alone, Samples()).terms["prediction"]
    weights = objective.projection[-1].weight
    (got,) = torch.autograd.grad(found, weights)
    z, p = embed(objective, views)
    stopped = -(
        torch.cosine_similarity(p[0], z[1].detach()) + torch.cosine_similarity(p[1], z[0].detach())
    ).mean()
    (expected,) = torch.autograd.grad(stopped / 2.0, weights, retain_graph=True)
    through = -(torch.cosine_similarity(p[0], z[1]) + torch.cosine_similarity(p[1], z[0])).mean()
    (wrong,) = torch.autograd.grad(through / 2.0, weights)
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(got, wrong)


def test_the_predictors_rate_does_not_fall():
    config = configure("simsiam")
    objective = build_step(config).objective
    groups = objective.parameter_groups()
    optimiser = build_optimiser(config.optimiser, groups, torch.device("cpu"))
    set_learning_rates(config, 9, 5, optimiser)
    highest = config.optimiser.learning_rate
    mine = {id(p) for p in objective.predictor.parameters()}
    for group in optimiser.param_groups:
        inside = {id(p) in mine for p in group["params"]}
        assert len(inside) == 1
        assert (group["lr"] == highest) == inside.pop()
