"""The losses against naive loops and batches small enough to do by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepbregman.method.bregman import divergence, similarity, soft_divergence
from deepbregman.method.losses import (
    CONTRASTIVE_LOSSES,
    contrast_sets,
    divergence_loss,
    list_comparisons,
    nt_logistic,
    nt_xent,
    usage_entropy,
)

from ..conftest import normal


def cosine(a: Tensor, b: Tensor) -> float:
    return (a @ b / (a.norm() * b.norm())).item()


def xent_by_loops(views: list[Tensor], tau: float) -> float:
    """Eq. 1 and 2: every anchor, every positive, every other sample."""
    samples = [(m, i, view[i]) for m, view in enumerate(views) for i in range(len(view))]
    terms = []
    for m, i, a in samples:
        others = [(n, j, b) for n, j, b in samples if (n, j) != (m, i)]
        total = sum(math.exp(cosine(a, b) / tau) for _, _, b in others)
        terms += [-math.log(math.exp(cosine(a, b) / tau) / total) for _, j, b in others if j == i]
    return sum(terms) / len(terms)


def logistic_by_loops(views: list[Tensor], tau: float) -> float:
    samples = [(m, i, view[i]) for m, view in enumerate(views) for i in range(len(view))]
    per_anchor = []
    for m, i, a in samples:
        attract = [
            math.log(1 + math.exp(-cosine(a, b) / tau)) for n, j, b in samples if j == i and n != m
        ]
        repel = [math.log(1 + math.exp(cosine(a, b) / tau)) for n, j, b in samples if j != i]
        per_anchor.append(sum(attract) / len(attract) + sum(repel) / len(repel))
    return sum(per_anchor) / len(per_anchor)


@given(st.integers(2, 5), st.integers(2, 3), st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 99))
def test_contrastive_losses_equal_their_loops(num_images, num_views, tau, seed):
    views = list(normal(num_views, num_images, 3, seed=seed))
    assert nt_xent(*views, temperature=tau).item() == pytest.approx(xent_by_loops(views, tau))
    found = nt_logistic(*views, temperature=tau).item()
    assert found == pytest.approx(logistic_by_loops(views, tau))


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_nt_xent_is_lightlys(tau):
    losses = pytest.importorskip("lightly.loss")
    first, second = normal(6, 4), normal(6, 4, seed=1)
    expected = losses.NTXentLoss(temperature=tau)(first, second)
    found = nt_xent(first, second, temperature=tau)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def test_nt_xent_by_hand():
    """Two images on the axes, views identical: the positive at 1, two negatives at 0."""
    z = torch.eye(2, dtype=torch.float64)
    expected = -math.log(math.exp(1 / 0.5) / (math.exp(1 / 0.5) + 2))
    assert nt_xent(z, z, temperature=0.5).item() == pytest.approx(expected)


@pytest.mark.parametrize("loss", [nt_xent, nt_logistic])
def test_contrastive_losses_ignore_scale_and_permutation(loss):
    z1, z2, order = normal(6, 4), normal(6, 4, seed=1), torch.tensor([3, 1, 5, 0, 2, 4])
    reference = loss(z1, z2, temperature=0.2)
    for other in ((3 * z1, 0.1 * z2), (z1[order], z2[order]), (z2, z1)):
        torch.testing.assert_close(loss(*other, temperature=0.2), reference)
    broken = loss(z1[order], z2, temperature=0.2)
    assert not torch.isclose(broken, reference)  # positives matter


@pytest.mark.parametrize("loss", [nt_xent, nt_logistic])
def test_contrastive_gradients(loss):
    inputs = (normal(3, 4).requires_grad_(), normal(3, 4, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: loss(a, b, temperature=0.3), inputs)


def test_views_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="at least two"):
        nt_xent(normal(3, 4))
    with pytest.raises(ValueError, match=r"\(3, 4\), \(2, 4\)"):
        nt_xent(normal(3, 4), normal(2, 4))
    with pytest.raises(ValueError, match="N of 1 or more"):
        nt_xent(normal(0, 4), normal(0, 4))
    with pytest.raises(ValueError, match="one row or more"):
        divergence_loss(normal(0, 4), normal(0, 4))


def test_divergence_loss_by_hand():
    """Eq. 7 on two images and two subnetworks: D = [[0, 2], [3, 0]]."""
    o1 = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    o2 = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert divergence(o1, o2).tolist() == [[0.0, 2.0], [3.0, 0.0]]
    psi = [[1.0, math.exp(-2 / 4.5)], [math.exp(-3 / 4.5), 1.0]]
    rows = [
        -math.log(math.exp(psi[i][i]) / (math.exp(psi[i][0]) + math.exp(psi[i][1]))) for i in (0, 1)
    ]
    expected = sum(rows) / 2
    assert divergence_loss(o1, o2).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("pairs", ["views", "all"])
@pytest.mark.parametrize("smoothing", [None, 0.8])
@pytest.mark.parametrize("kernel", ["gaussian", "negative"])
def test_divergence_loss_equals_its_loop(pairs, smoothing, kernel):
    o1, o2, tau = normal(4, 6), normal(4, 6, seed=1), 0.3

    def psi(a: Tensor, b: Tensor) -> float:
        d = (
            divergence(a[None], b[None])
            if smoothing is None
            else soft_divergence(a[None], b[None], smoothing)
        )
        return similarity(d, kernel, sigma=0.9).item()

    terms = []
    if pairs == "views":
        for i in range(4):
            logits = [psi(o1[i], o2[j]) / tau for j in range(4)]
            terms.append(math.log(sum(map(math.exp, logits))) - logits[i])
    else:
        samples = [*o1, *o2]
        for i, a in enumerate(samples):
            logits = {j: psi(a, b) / tau for j, b in enumerate(samples) if j != i}
            terms.append(math.log(sum(map(math.exp, logits.values()))) - logits[(i + 4) % 8])
    found = divergence_loss(
        o1,
        o2,
        kernel=kernel,
        sigma=0.9,
        pairs=pairs,
        temperature=tau,
        smoothing=smoothing,
    )
    assert found.item() == pytest.approx(sum(terms) / len(terms))


@pytest.mark.parametrize("num_images", [8, 64])
def test_without_a_temperature_the_loss_can_hardly_move(num_images):
    """psi in (0, 1] pins the paper's loss between about log N - 1 and log N + 1."""
    perfect = 100.0 * torch.eye(num_images, dtype=torch.float64)
    worst = divergence_loss(perfect, perfect.roll(1, 0))
    best = divergence_loss(perfect, perfect)
    assert best.item() == pytest.approx(math.log(1 + (num_images - 1) / math.e), abs=1e-3)
    assert worst.item() < math.log(num_images) + 1
    assert divergence_loss(perfect, perfect, temperature=0.1).item() < 0.1


@pytest.mark.parametrize("smoothing", [None, 0.3, 2.0])
def test_what_moves_a_sample_is_a_difference_of_assignments(smoothing):
    """With psi = -D the gradient by o1[i] is (sum_j w_ij q_j - q_i) / (N tau), whatever o1[i] is.

    q_j is the assignment of o2[j] to the subnetworks, softmax or one-hot, and w_ij the share of j
    in the softmax of row i; docs/log.md argues from it.
    """
    o1, o2 = normal(5, 4).requires_grad_(), normal(5, 4, seed=1)
    options = {"kernel": "negative", "temperature": 0.4, "smoothing": smoothing}
    (found,) = torch.autograd.grad(divergence_loss(o1, o2, **options), o1)  # type: ignore[arg-type]  # of several kinds
    distances = divergence(o1, o2) if smoothing is None else soft_divergence(o1, o2, smoothing)
    shares = (-distances / 0.4).softmax(dim=1)
    assigned = torch.eye(4, dtype=o2.dtype)[o2.argmax(1)]
    if smoothing is not None:
        assigned = (o2 / smoothing).softmax(dim=1)
    torch.testing.assert_close(found, (shares @ assigned - assigned) / (5 * 0.4))


def test_sets_are_reduced_before_they_are_compared():
    sets = normal(4, 3, 6), normal(4, 3, 6, seed=1)
    points = (sets[0].mean(1), sets[1].mean(1))
    assert torch.equal(divergence_loss(*sets, pairs="all"), divergence_loss(*points, pairs="all"))


def test_unknown_pairs_are_refused():
    with pytest.raises(ValueError, match="'both' is not one of views, all"):
        divergence_loss(normal(2, 3), normal(2, 3), pairs="both")


def test_usage_entropy_spans_zero_to_one():
    one_winner = torch.zeros(5, 4)
    one_winner[:, 2] = 100.0
    assert usage_entropy(one_winner).item() == pytest.approx(0.0, abs=1e-6)
    assert usage_entropy(100.0 * torch.eye(4)).item() == pytest.approx(1.0, abs=1e-6)
    assert usage_entropy(torch.zeros(3, 1)).item() == 1.0


def test_usage_entropy_has_a_gradient_where_a_share_is_too_small_for_float32():
    scores = torch.tensor([[0.0, 0.3, -200.0], [0.9, 0.4, -200.0]], requires_grad=True)
    wide = scores.detach().double().requires_grad_()  # has shares down to 1e-308
    usage = wide.softmax(dim=1).mean(dim=0)
    (expected,) = torch.autograd.grad(-(usage * usage.log()).sum() / math.log(3), wide)
    (found,) = torch.autograd.grad(usage_entropy(scores), scores)
    torch.testing.assert_close(found, expected.float())


def test_unknown_sets_are_refused():
    with pytest.raises(ValueError, match="'all' is not one of none, halves, rest"):
        list_comparisons(normal(3, 4, 2), "all")  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("name", ["nt_xent", "nt_logistic"])
def test_contrastive_loss_of_views_against_the_mean_direction_of_the_rest(name):
    z = normal(3, 4, 2)
    unit = z / z.square().sum(2, keepdim=True).sqrt()
    means = [(unit[1] + unit[2]) / 2, (unit[0] + unit[2]) / 2, (unit[0] + unit[1]) / 2]
    loss = CONTRASTIVE_LOSSES[name]
    expected = sum(loss(z[a], means[a], temperature=0.3) for a in range(3)) / 3
    torch.testing.assert_close(contrast_sets(loss, z, "rest", 0.3), expected, rtol=1e-6, atol=0)


def test_of_two_views_the_rest_is_the_other_one():
    z = normal(2, 4, 3)
    torch.testing.assert_close(contrast_sets(nt_xent, z, "rest"), contrast_sets(nt_xent, z, "none"))


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf])
def test_numbers_that_mean_nothing_are_refused(value):
    """0 and less would divide by 0 and give NaN in silence."""
    o1, o2 = normal(2, 3, 4)
    for name in ("sigma", "alpha", "temperature"):
        with pytest.raises(ValueError, match=f"{name} is {value!r}: it must be a finite number"):
            divergence_loss(o1, o2, **{name: value})  # type: ignore[arg-type]  # what is tested
    if value != 0:
        with pytest.raises(ValueError, match=r"(temperature|smoothing) is .*above 0"):
            divergence_loss(o1, o2, smoothing=value)
    for loss in (nt_xent, nt_logistic):
        with pytest.raises(ValueError, match=r"(temperature|smoothing) is .*above 0"):
            loss(o1, o2, temperature=value)


@pytest.mark.parametrize("shape", [(3, 4), (2, 5)])
@pytest.mark.parametrize("pairs", ["views", "all"])
def test_scores_of_other_images_or_other_subnetworks_are_refused(shape, pairs):
    with pytest.raises(ValueError, match=r"\(2, 4\) and .*must have the same shape"):
        divergence_loss(normal(2, 4), normal(*shape), pairs=pairs)


def test_the_usage_of_subnetworks_that_cannot_win_is_nothing():
    scores = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    assert usage_entropy(scores).item() == pytest.approx(0.5)  # log 2 of log 4
