"""ReSSL and SCE against their formulas, and as settings of the divergence."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import override
from deepbregman.errors import UserError
from deepbregman.objectives import Samples, ViewGroups, build_step, gather_alone
from deepbregman.objectives.ressl import ReSSL

from .methods import build_taught, configure, draw_views


def softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def embed(objective: ReSSL, views: ViewGroups[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    z = F.normalize(objective.embed(views.main)[1].detach(), dim=2)
    targets = objective.teacher(views.weak.flatten(0, 1)).unflatten(0, views.weak.shape[:2])
    bank = [F.normalize(row, dim=0) for row in objective.bank.weight.clone()]
    return z, F.normalize(targets, dim=2), bank


def total(objective: ReSSL, views: ViewGroups[Tensor]) -> float:
    terms = objective(views, gather_alone, Samples()).terms
    assert terms.keys() == objective.weights.keys()
    return sum(weight * terms[name].item() for name, weight in objective.weights.items())


def test_ressl_is_the_papers_less_the_entropy_of_its_target():
    """The cross-entropy of the relations to the bank at 0.1 with the teacher's at 0.04."""
    objective, views = build_taught("ressl"), ViewGroups(draw_views(2, 4), draw_views(1, 4))
    z, targets, bank = embed(objective, views)
    expected = 0.0
    for view in z:
        for i in range(4):
            p = softmax([float(view[i] @ row) / 0.1 for row in bank])
            q = softmax([float(targets[0, i] @ row) / 0.04 for row in bank])
            cross = -sum(b * math.log(a) for a, b in zip(p, q, strict=True))
            entropy = -sum(b * math.log(b) for b in q)
            expected += (cross - entropy) / 8
    assert total(objective, views) == pytest.approx(expected, rel=1e-6)


def test_sce_is_the_papers_less_the_entropy_of_its_relations():
    """``-sum_k w_k log p_k`` with w of the own key and the relations, p over both (Eq. 3 to 6)."""
    coefficient = 0.3
    objective = build_taught("sce", **{"objective.coefficient": coefficient})
    views = ViewGroups(draw_views(1, 4), draw_views(2, 4, 8))
    z, targets, bank = embed(objective, views)
    expected = 0.0
    for target in targets:
        for i in range(4):
            p = softmax([float(z[0, i] @ row) / 0.1 for row in [target[i], *bank]])
            q = softmax([float(target[i] @ row) / 0.05 for row in bank])
            w = [coefficient, *((1.0 - coefficient) * share for share in q)]
            cross = -sum(b * math.log(a) for a, b in zip(p, w, strict=True))
            entropy = -sum(b * math.log(b) for b in q)
            expected += (cross - (1.0 - coefficient) * entropy) / 8
    assert total(objective, views) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["ressl", "sce"])
def test_the_bank_takes_the_targets_after_they_were_compared(name):
    objective, views = build_taught(name), ViewGroups(draw_views(1, 4), draw_views(2, 4))
    before = objective.bank.weight.clone()
    outputs = objective(views, gather_alone, Samples())
    expected = F.normalize(outputs.teacher.flatten(0, 1), dim=1)
    torch.testing.assert_close(objective.bank.weight[:8], expected)
    assert torch.equal(objective.bank.weight[8:], before[8:])
    sum(outputs.terms.values()).backward()  # through the rows that the batch met


def test_ressl_is_a_setting_of_the_divergence():
    """The same term beside any method: its gradient, with the same bank and targets."""
    method = build_step(configure("ressl"))
    as_term = build_step(
        override(
            configure("ressl"),
            {
                "divergence.weight": 1.0,
                "divergence.source": "bank",
                "divergence.compare": "match",
                "divergence.num_subnetworks": 40,
                "divergence.smoothing": 0.1,
                "divergence.target_smoothing": 0.04,
            },
        )
    )
    bank = as_term.divergence.network
    bank.weight.copy_(method.objective.bank.weight)
    bank.pushed.fill_(40)
    student, teacher = torch.randn(1, 4, 6), torch.randn(1, 4, 6)
    expected = method.objective.compare(student[0], teacher[0], bank.weight.clone())
    found = as_term.divergence(student, teacher).terms["divergence"]
    torch.testing.assert_close(found, expected["relation"])


@pytest.mark.parametrize("name", ["ressl", "sce"])
def test_without_weak_views_it_is_refused_by_name(name):
    with pytest.raises(UserError, match=rf"objective.name is '{name}' without \[weak_views\]"):
        configure(name, **{"weak_views": None})
