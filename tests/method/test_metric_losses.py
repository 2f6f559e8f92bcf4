"""The supervised losses against loops over pairs and triplets, in float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepbregman.method.losses import contrastive_margin, triplet_margin


def batch(num_samples: int, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Divergences that are not symmetric, some of them equal, and labels."""
    generator = torch.Generator().manual_seed(seed)
    distance = torch.rand(num_samples, num_samples, generator=generator, dtype=torch.float64) * 3
    distance[distance < 0.5] = 0.0  # the hard form has many zeros
    return distance, torch.randint(num_classes, (num_samples,), generator=generator)


def contrastive_by_loops(distance: Tensor, labels: Tensor, margin: float) -> float:
    attract, repel = [], []
    for i, j in itertools.permutations(range(len(labels)), 2):
        d = distance[i, j].item()
        if labels[i] == labels[j]:
            attract.append(d)
        else:
            repel.append(max(margin - d, 0.0) ** 2)
    return 0.5 * sum(sum(part) / max(1, len(part)) for part in (attract, repel))


def triplet_by_loops(distance: Tensor, labels: Tensor, margin: float) -> float:
    terms = [
        max((distance[a, p] - distance[a, n]).item() + margin, 0.0)
        for a, p, n in itertools.product(range(len(labels)), repeat=3)
        if a != p and labels[a] == labels[p] and labels[a] != labels[n]
    ]
    return sum(terms) / max(1, len(terms))


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.2, 1.0, 5.0]), st.integers(0, 999))
def test_losses_equal_their_loops(num_samples, num_classes, margin, seed):
    distance, labels = batch(num_samples, num_classes, seed)
    found = contrastive_margin(distance, labels, margin).item()
    assert found == pytest.approx(contrastive_by_loops(distance, labels, margin))
    found = triplet_margin(distance, labels, margin).item()
    assert found == pytest.approx(triplet_by_loops(distance, labels, margin))


@pytest.mark.parametrize("loss", [contrastive_margin, triplet_margin])
def test_gradients_are_exact(loss):
    generator = torch.Generator().manual_seed(1)
    distance = torch.rand(6, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 0, 1, 0])
    assert torch.autograd.gradcheck(lambda d: loss(d, labels, 0.3), (distance,))


def test_the_anchor_is_the_row():
    # Only D(0 || 2), of anchor 0, is within the margin of D(0 || 1); the transpose would see none.
    distance = torch.tensor([[0.0, 1.0, 1.5], [0.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([0, 0, 1])
    assert triplet_margin(distance, labels, 1.0).item() == pytest.approx(0.5 / 2)
    assert triplet_margin(distance.T, labels, 1.0).item() == pytest.approx((1 + 2) / 2)


def test_what_cannot_be_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) with 2 labels"):
        contrastive_margin(torch.zeros(2, 3), torch.tensor([0, 1]))
