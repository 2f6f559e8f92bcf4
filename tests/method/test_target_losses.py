"""Losses of a view and a target: against loops in float64, and their gradients."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.method.bregman import balance_scores
from deepbregman.method.losses import (
    bank_share_loss,
    cross_view_entropy,
    divergence_loss,
    info_nce,
    match_divergence,
    nt_logistic,
    nt_xent,
    paired_cosines,
)

from ..conftest import normal


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


Z, TARGET, BANK = normal(4, 5), normal(4, 5, seed=1), normal(7, 5, seed=2)


def test_cosines_of_pairs():
    expected = [cosine(a, b) for a, b in zip(Z, TARGET, strict=True)]
    assert paired_cosines(Z, TARGET).tolist() == pytest.approx(expected)
    assert paired_cosines(Z.bfloat16(), TARGET.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("with_bank", [True, False])
def test_info_nce_equals_its_loop(in_batch, with_bank):
    if not in_batch and not with_bank:
        with pytest.raises(ValueError, match="nothing is left to compare with"):
            info_nce(Z, TARGET, in_batch=False)
        return
    total = 0.0
    for i in range(4):
        others = [TARGET[j] for j in range(4) if j != i] if in_batch else []
        others += list(BANK) if with_bank else []
        logits = [cosine(Z[i], other) / 0.3 for other in [TARGET[i], *others]]
        total += math.log(sum(math.exp(x) for x in logits)) - logits[0]
    bank = BANK if with_bank else None
    found = info_nce(Z, TARGET, bank, temperature=0.3, in_batch=in_batch)
    assert found.item() == pytest.approx(total / 4, rel=1e-12)


def test_the_share_of_the_bank_equals_its_loop():
    total = 0.0
    for i in range(4):
        own = math.exp(cosine(Z[i], TARGET[i]) / 0.3)
        rest = sum(math.exp(cosine(Z[i], row) / 0.3) for row in BANK)
        total -= math.log(rest / (own + rest))
    found = bank_share_loss(Z, TARGET, BANK, temperature=0.3)
    assert found.item() == pytest.approx(total / 4, rel=1e-12)


@pytest.mark.parametrize(("targets", "views"), [(2, 2), (2, 5), (1, 3), (3, 3)])
def test_the_entropy_across_views_equals_its_loop(targets, views):
    shares, scores = normal(targets, 3, 6).softmax(dim=2), normal(views, 3, 6, seed=1)
    losses = [
        -float((shares[t, i] * (scores[v, i] / 0.2).log_softmax(0)).sum())
        for t in range(targets)
        for v in range(views)
        for i in range(3)
        if t != v
    ]
    found = cross_view_entropy(shares, scores, 0.2)
    assert found.item() == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_gradients_are_right_and_reach_no_target():
    z, target, bank = (each.clone().requires_grad_() for each in (Z, TARGET, BANK))
    scores, shares = normal(3, 3, 6).requires_grad_(), normal(2, 3, 6).softmax(2).requires_grad_()
    for loss, sources, fixed in (
        (lambda z: info_nce(z, target, bank, temperature=0.3), (z,), (target, bank)),
        (lambda z: info_nce(z, target, bank, in_batch=False), (z,), (target, bank)),
        (lambda z: bank_share_loss(z, target, bank), (z,), (target, bank)),
        (lambda z: match_divergence(z, target, bank), (z,), (target, bank)),
        (lambda s: cross_view_entropy(shares, s, 0.5), (scores,), (shares,)),
    ):
        assert torch.autograd.gradcheck(loss, sources)
        loss(*sources).backward()
        assert all(tensor.grad is None for tensor in fixed)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, target: nt_xent(z, target),
        lambda z, target: nt_logistic(z, target),
        lambda z, target: divergence_loss(z, target, smoothing=0.5),
        lambda z, target: divergence_loss(z, target),
        lambda z, target: match_divergence(z, target, BANK.float()),
        lambda z, target: info_nce(z, target, BANK.float()),
    ],
)
def test_autocast_changes_no_loss(loss):
    """Networks under it make bfloat16; what is computed from that is the same inside of it."""
    for dtype in (torch.bfloat16, torch.float32):  # scores of subnetworks are float32
        z, target = Z.to(dtype), TARGET.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = loss(z, target)
        assert found.dtype == torch.float32
        assert torch.equal(found, loss(z, target))


def test_samples_that_count_differently_are_balanced_as_if_they_came_again():
    scores, counts = normal(4, 3), torch.tensor([2.0, 1.0, 0.0, 3.0])
    again = torch.cat([scores[i : i + 1] for i in range(4) for _ in range(int(counts[i]))])
    expected = (balance_scores(again, 0.5) / 0.5).softmax(dim=1)
    found = (balance_scores(scores, 0.5, counts=counts) / 0.5).softmax(dim=1)
    torch.testing.assert_close(found[[0, 0, 1, 3, 3, 3]], expected)
    assert found.isfinite().all()
    even = balance_scores(scores, 0.5, counts=torch.ones(4))
    torch.testing.assert_close(F.softmax(even, 1), F.softmax(balance_scores(scores, 0.5), 1))
