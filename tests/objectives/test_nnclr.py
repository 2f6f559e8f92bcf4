"""NNCLR against its formula and lightly: neighbours from a queue of past embeddings."""

import math

import pytest
import torch
from torch.nn import functional as F

from deepbregman.objectives import Samples, ViewGroups, gather_alone

from .methods import build_objective, draw_views


def test_the_loss_is_the_papers():
    """``-log exp(nn_i p_i / tau) / sum_k exp(nn_i p_k / tau)``, both ways round (Eq. 3 and 4)."""
    objective = build_objective("nnclr")
    views = draw_views(2, 5, 8)
    z = objective.embed(views)[1]
    p = F.normalize(objective.predictor(z.flatten(0, 1)).view_as(z), dim=2)
    z = F.normalize(z, dim=2)
    queue = [row / row.norm() for row in objective.queue.weight.clone()]
    total = 0.0
    for a, b in ((0, 1), (1, 0)):
        for i in range(5):
            near = [float((row - z[a, i].detach()).norm()) for row in queue]
            neighbour = queue[near.index(min(near))]
            logits = [float(neighbour @ p[b, k].detach()) / 0.2 for k in range(5)]
            total += math.log(sum(math.exp(x) for x in logits)) - logits[i]
    found = objective(ViewGroups(views), gather_alone, Samples())
    assert found.terms["contrastive"].item() == pytest.approx(total / 10, rel=1e-6)


def test_the_queue_takes_the_first_view_after_it_was_used():
    objective = build_objective("nnclr")
    before = objective.queue.weight.clone()
    views = draw_views(2, 5, 8)
    z = objective.embed(views)[1]
    objective(ViewGroups(views), gather_alone, Samples())
    torch.testing.assert_close(objective.queue.weight[:5], F.normalize(z[0].detach(), dim=1))
    assert torch.equal(objective.queue.weight[5:], before[5:])
    assert not objective.queue.weight.requires_grad
    assert torch.equal(objective.find_neighbours(z)[0], objective.queue.weight[:5])  # themselves


def test_predictions_get_gradient_and_neighbours_none():
    objective = build_objective("nnclr")
    views = draw_views(2, 5, 8)
    neighbours = objective.find_neighbours(objective.embed(views)[1])
    assert not neighbours.requires_grad
    objective(ViewGroups(views), gather_alone, Samples()).terms["contrastive"].backward()
    assert all(p.grad is not None and p.grad.any() for p in objective.predictor.parameters())


def test_neighbours_and_loss_are_lightlys():
    """Its loss with a memory bank, one image at a time: the other predictions are the bank."""
    losses = pytest.importorskip("lightly.loss")
    modules = pytest.importorskip("lightly.models.modules")
    objective, views = build_objective("nnclr"), draw_views(2, 5, 8)
    z = objective.embed(views)[1]
    p = F.normalize(objective.predictor(z.flatten(0, 1)).view_as(z), dim=2).detach()
    search = modules.NNMemoryBankModule(size=(40, 6))
    search.bank = objective.queue.weight.clone()
    neighbours = [search(view.detach()) for view in z]
    theirs = losses.NTXentLoss(temperature=0.2, memory_bank_size=(4, 6))
    expected = []
    for a, b in ((0, 1), (1, 0)):
        for i in range(5):
            theirs.memory_bank.bank = p[b, [k for k in range(5) if k != i]]
            theirs.memory_bank.bank_ptr = torch.zeros(1, dtype=torch.long)
            expected.append(theirs(neighbours[a][i : i + 1], p[b, i : i + 1]))
    assert torch.equal(objective.find_neighbours(z), torch.stack(neighbours))
    found = objective(ViewGroups(views), gather_alone, Samples()).terms["contrastive"]
    torch.testing.assert_close(found, torch.stack(expected).mean(), rtol=1e-6, atol=0.0)
