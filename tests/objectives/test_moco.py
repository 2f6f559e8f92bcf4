"""MoCo against its formula, and against lightly's loss with a memory bank."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.objectives import Samples, ViewGroups, gather_alone
from deepbregman.objectives.moco import MoCo

from .methods import build_taught, draw_views


def contrast(query: Tensor, own: Tensor, negatives: list[Tensor]) -> float:
    """``-log exp(q k / tau) / (exp(q k / tau) + sum_j exp(q k_j / tau))`` of unit vectors."""
    units = [F.normalize(v.detach(), dim=0) for v in (query, own, *negatives)]
    logits = [float(units[0] @ unit) / 0.2 for unit in units[1:]]
    return math.log(sum(math.exp(x) for x in logits)) - logits[0]


def by_hand(objective: MoCo, views: Tensor, pairs: list[tuple[int, int]]) -> float:
    """With the queue as negatives or, without one, the keys of the batch's other images."""
    queried, taught = (views, views) if objective.symmetric else (views[:1], views[1:])
    z = objective.embed(queried)[1]
    queries = objective.predictor(z.flatten(0, 1)).view_as(z)
    keys = objective.teacher(taught.flatten(0, 1)).view_as(z)
    losses = []
    for a, b in pairs:
        for i in range(queries.shape[1]):
            others = (
                [key for j, key in enumerate(keys[b]) if j != i]
                if objective.queue is None
                else list(objective.queue.weight)
            )
            losses.append(contrast(queries[a, i], keys[b, i], others))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [("moco-v2", [(0, 0)]), ("moco-v2plus", [(0, 1), (1, 0)]), ("moco-v3", [(0, 1), (1, 0)])],
)
def test_the_loss_is_the_papers(name, pairs):
    objective, views = build_taught(name), draw_views(2, 5)
    expected = by_hand(objective, views, pairs)
    found = objective(ViewGroups(views), gather_alone, Samples())
    assert found.terms["contrastive"].item() == pytest.approx(expected, rel=1e-6)
    assert len(found.student) == len(found.teacher) == len(pairs)


def test_version_3_weighs_both_directions_by_twice_tau():
    from deepbregman.config import load_recipe

    settings = load_recipe("moco-v3").objective
    assert settings.weight == pytest.approx(2 * 2 * settings.temperature)


@pytest.mark.parametrize("name", ["moco-v2", "moco-v2plus"])
def test_the_queue_holds_keys_of_past_batches_only(name):
    objective, views = build_taught(name), draw_views(2, 5)
    queue = objective.queue
    before = queue.weight.clone()
    first = objective(ViewGroups(views), gather_alone, Samples())
    count = 5 * len(first.teacher)
    expected = F.normalize(first.teacher.flatten(0, 1), dim=1)
    torch.testing.assert_close(queue.weight[:count], expected)
    assert torch.equal(queue.weight[count:], before[count:])
    first.terms["contrastive"].backward()  # through the rows that the batch met
    second = objective(ViewGroups(views), gather_alone, Samples())
    assert second.terms["contrastive"] > first.terms["contrastive"]  # its own key is a negative now


def test_it_equals_lightlys_loss_with_a_memory_bank():
    losses = pytest.importorskip("lightly.loss")
    objective, views = build_taught("moco-v2"), draw_views(2, 5)
    theirs = losses.NTXentLoss(temperature=0.2, memory_bank_size=(40, 6))
    query = objective.embed(views[:1])[1][0]
    key = objective.teacher(views[1])
    theirs.memory_bank.bank = objective.queue.weight.clone()
    theirs.memory_bank.bank_ptr = torch.zeros(1, dtype=torch.long)
    expected = theirs(query, key)
    found = objective(ViewGroups(views), gather_alone, Samples()).terms["contrastive"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
