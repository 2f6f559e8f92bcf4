"""Every formula of the divergences against loops, closed forms and autograd."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepbregman.method import bregman as bregman_module
from deepbregman.method.bregman import (
    KERNELS,
    bregman,
    cosine_scores,
    divergence,
    find_tangents,
    itakura_saito,
    kl,
    learned_divergence,
    log_sum_exp,
    moment_divergence,
    prepare_points,
    prepare_targets,
    similarity,
    soft_divergence,
    squared_euclidean,
)

from ..conftest import normal

PAPER_KERNELS = ("gaussian", "inverse", "sqrt", "linear", "arccot")


@st.composite
def score_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    rows, columns, subnetworks = (draw(st.integers(1, 6)) for _ in range(3))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    seed = draw(st.integers(0, 2**31))
    return (
        scale * normal(rows, subnetworks, seed=seed),
        scale * normal(columns, subnetworks, seed=seed + 1),
    )


def by_loops(p: Tensor, q: Tensor) -> Tensor:
    """Eq. 6, one pair at a time, by Python's own max."""
    rows = []
    for a in p.tolist():
        row = []
        for b in q.tolist():
            winner = b.index(max(b))
            row.append(max(a) - a[winner])
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


class TestHardDivergence:
    @given(score_pairs())
    def test_equals_the_loop(self, scores):
        torch.testing.assert_close(divergence(*scores), by_loops(*scores), rtol=0, atol=1e-12)

    @given(score_pairs())
    def test_is_never_negative_and_zero_to_itself(self, scores):
        p, q = scores
        assert (divergence(p, q) >= 0).all()
        assert (divergence(p, p).diagonal() == 0).all()

    @given(score_pairs(), st.floats(-50, 50))
    def test_does_not_see_a_shift_of_all_scores(self, scores, shift):
        p, q = scores
        torch.testing.assert_close(
            divergence(p + shift, q - shift), divergence(p, q), rtol=0, atol=1e-10
        )

    @given(score_pairs(), st.integers(0, 99))
    def test_permuting_the_batch_permutes_it(self, scores, seed):
        p, q = scores
        generator = torch.Generator().manual_seed(seed)
        rows, columns = (torch.randperm(len(x), generator=generator) for x in (p, q))
        assert torch.equal(divergence(p[rows], q[columns]), divergence(p, q)[rows][:, columns])

    def test_is_not_symmetric_pinned(self):
        p = torch.tensor([[3.0, 1.0, 0.0]])
        q = torch.tensor([[0.0, 2.0, 5.0]])
        assert divergence(p, q).item() == 3.0  # p: 3 at its own winner, 0 at q's
        assert divergence(q, p).item() == 5.0  # q: 5 at its own winner, 0 at p's

    def test_the_first_argument_is_the_row(self):
        assert divergence(normal(2, 5), normal(3, 5)).shape == (2, 3)

    def test_one_subnetwork_gives_zero(self):
        assert (divergence(normal(4, 1), normal(3, 1, seed=1)) == 0).all()

    def test_gradient_away_from_ties(self):
        p, q = normal(3, 4).requires_grad_(), normal(2, 4, seed=1)
        assert torch.autograd.gradcheck(lambda x: divergence(x, q), (p,))

    def test_equal_winners_send_no_gradient_and_others_touch_two_scores(self):
        """The dead gradient of the hard form, which the smooth form is there for."""
        p = torch.tensor([[3.0, 1.0, 0.0, 0.5]], requires_grad=True)
        same, other = torch.tensor([[9.0, 1.0, 2.0, 3.0]]), torch.tensor([[0.0, 1.0, 2.0, 0.5]])
        (dead,) = torch.autograd.grad(divergence(p, same).sum(), p)
        assert dead.tolist() == [[0.0, 0.0, 0.0, 0.0]]
        (alive,) = torch.autograd.grad(divergence(p, other).sum(), p)
        assert alive.tolist() == [[1.0, 0.0, -1.0, 0.0]]

    def test_never_sends_gradient_to_its_second_argument(self):
        q = normal(2, 4).requires_grad_()
        assert not divergence(normal(3, 4), q).requires_grad

    @pytest.mark.parametrize("compare", [divergence, soft_divergence, moment_divergence])
    def test_scores_of_two_precisions_are_compared_in_the_wider_one(self, compare):
        p, q = normal(3, 4), normal(2, 4)
        expected = compare(p.float().double(), q)
        assert torch.equal(compare(p.float(), q), expected)
        assert torch.equal(compare(q, p.float()), compare(q, p.float().double()))

    def test_bfloat16_scores_are_compared_in_float32(self):
        assert divergence(normal(3, 4).bfloat16(), normal(2, 4).bfloat16()).dtype == torch.float32


class TestDistributions:
    @pytest.mark.parametrize("form", [divergence, soft_divergence, moment_divergence])
    def test_a_set_of_one_is_a_point(self, form):
        p, q = normal(3, 5), normal(4, 5, seed=1)
        assert torch.equal(form(p[:, None], q[:, None]), form(p, q))

    def test_a_set_has_the_mean_of_its_samples_scores(self):
        p, q = normal(3, 6, 5), normal(4, 2, 5, seed=1)
        mean_p = torch.stack([sum(samples) / 6 for samples in p])
        mean_q = torch.stack([sum(samples) / 2 for samples in q])
        torch.testing.assert_close(divergence(p, q), by_loops(mean_p, mean_q))

    def test_other_shapes_are_refused_by_name(self):
        with pytest.raises(ValueError, match=r"\(5,\).*\(N, K\)"):
            divergence(normal(5), normal(2, 5))

    def test_moment_form_against_a_loop(self):
        p, q = normal(3, 6, 5) + 100.0, normal(4, 2, 5, seed=1) + 100.0
        expected = [[((a.mean(0) - b.mean(0)) ** 2).sum() for b in q] for a in p]
        torch.testing.assert_close(moment_divergence(p, q), torch.tensor(expected).double())

    def test_moment_form_far_from_the_origin_keeps_its_digits(self):
        p, q = normal(3, 5).float() + 1e3, normal(4, 5, seed=1).float() + 1e3
        expected = torch.cdist(p.double(), q.double()).square()
        torch.testing.assert_close(moment_divergence(p, q).double(), expected, rtol=1e-5, atol=0)


class TestSmoothDivergence:
    @given(score_pairs(), st.sampled_from([0.1, 1.0, 7.0]))
    def test_is_the_bregman_divergence_of_log_sum_exp(self, scores, temperature):
        p, q = scores
        by_autograd = bregman(lambda x: log_sum_exp(x, temperature), p[:, None], q[None])
        torch.testing.assert_close(
            soft_divergence(p, q, temperature), by_autograd, rtol=1e-9, atol=1e-9
        )

    def test_is_the_kl_divergence_of_q_from_p(self):
        p, q = normal(3, 5), normal(4, 5, seed=1)
        expected = torch.empty(3, 4, dtype=torch.float64)
        for i in range(3):
            for j in range(4):
                a, b = (p[i] / 0.7).softmax(0), (q[j] / 0.7).softmax(0)
                expected[i, j] = 0.7 * sum(b[k] * math.log(b[k] / a[k]) for k in range(5))
        torch.testing.assert_close(soft_divergence(p, q, 0.7), expected)

    @given(score_pairs(), st.sampled_from([1e-3, 1.0, 100.0]))
    def test_is_never_negative(self, scores, temperature):
        p, q = (side.float() for side in scores)
        assert (soft_divergence(p, q, temperature) >= 0).all()
        assert soft_divergence(p, p, temperature).diagonal().abs().max() < 1e-4 * max(
            1.0, temperature
        )

    def test_tends_to_the_hard_form(self):
        p, q = normal(6, 5), normal(7, 5, seed=1)
        gaps = [(soft_divergence(p, q, t) - divergence(p, q)).abs().max() for t in (1, 0.1, 1e-3)]
        assert gaps[0] > gaps[1] > gaps[2]
        assert gaps[2] < 1e-2

    def test_every_pair_and_every_subnetwork_gets_gradient(self):
        p, q = normal(3, 4).requires_grad_(), normal(2, 4, seed=1).requires_grad_()
        for entry in soft_divergence(p, q).flatten():
            grad_p, grad_q = torch.autograd.grad(entry, (p, q), retain_graph=True)
            assert (grad_p.abs().sum(0) > 0).all()
            assert (grad_q.abs().sum(0) > 0).all()

    def test_gradient(self):
        p, q = normal(3, 4).requires_grad_(), normal(2, 4, seed=1).requires_grad_()
        assert torch.autograd.gradcheck(soft_divergence, (p, q))


class TestGenericDivergence:
    @pytest.fixture
    def points(self) -> tuple[Tensor, Tensor]:
        return normal(6, 4).abs() + 0.1, normal(6, 4, seed=1).abs() + 0.1

    def test_squared_euclidean(self, points):
        x, y = points
        expected = 0.5 * ((x - y) ** 2).sum(1)
        torch.testing.assert_close(bregman(squared_euclidean, x, y), expected)

    def test_kl(self, points):
        x, y = points
        expected = (x * (x / y).log() - x + y).sum(1)
        torch.testing.assert_close(bregman(kl, x, y), expected)

    def test_kl_of_a_distribution_with_zeros(self):
        x, y = torch.tensor([0.0, 1.0]), torch.tensor([0.25, 0.75])
        assert bregman(kl, x, y).item() == pytest.approx(math.log(4 / 3))

    def test_itakura_saito(self, points):
        x, y = points
        expected = (x / y - (x / y).log() - 1).sum(1)
        torch.testing.assert_close(bregman(itakura_saito, x, y), expected)

    def test_gradients_reach_both_points_and_the_generator(self):
        x, y = normal(3, 4).requires_grad_(), normal(3, 4, seed=1).requires_grad_()
        weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda a, b, w: bregman(lambda point: (w * point**4).sum(-1), a, b), (x, y, weight)
        )

    def test_without_gradients_there_is_no_graph(self):
        assert not bregman(kl, torch.rand(3) + 1, torch.rand(3) + 1).requires_grad


class TestSimilarity:
    @pytest.mark.parametrize("kernel", KERNELS)
    @given(values=st.lists(st.floats(0, 0.99), min_size=2, max_size=8, unique=True))
    def test_is_strictly_decreasing(self, kernel, values):
        distance = torch.tensor(sorted(values), dtype=torch.float64)
        if (distance.diff() < 1e-6).any():
            return
        assert (similarity(distance, kernel).diff() < 0).all()

    def test_closed_forms(self):
        d = torch.tensor([0.0, 0.5, 0.8], dtype=torch.float64)
        expected = {
            "gaussian": [math.exp(-x / (2 * 0.7**2)) for x in d.tolist()],
            "inverse": [1 / (1 + x) for x in d.tolist()],
            "sqrt": [math.sqrt(1 - x) for x in d.tolist()],
            "linear": [1 - x / 0.8 for x in d.tolist()],
            "arccot": [math.atan2(1, 3 * x) for x in d.tolist()],
            "negative": [-x for x in d.tolist()],
        }
        assert set(expected) == set(KERNELS)
        for kernel, values in expected.items():
            found = similarity(d, kernel, sigma=0.7, alpha=3.0)
            torch.testing.assert_close(found, torch.tensor(values).double())

    def test_sqrt_takes_larger_divergences_as_one_with_a_finite_gradient(self):
        d = torch.tensor([0.5, 1.0, 3.0], requires_grad=True)
        psi = similarity(d, "sqrt")
        assert psi[1:].tolist() == [0.0, 0.0]
        (grad,) = torch.autograd.grad(psi.sum(), d)
        assert grad.isfinite().all()

    @pytest.mark.parametrize("value", [0.0, 1e-43])
    def test_linear_of_nothing_but_zeros_is_one(self, value):
        distance = torch.full((3, 3), value, requires_grad=True)
        psi = similarity(distance, "linear")
        assert psi.tolist() == [[1.0] * 3] * 3
        (grad,) = torch.autograd.grad(psi[0, 0], distance)
        assert grad.abs().max() <= 1  # a huge one would throw the weights away

    @pytest.mark.parametrize("kernel", PAPER_KERNELS)
    def test_the_papers_kernels_are_positive_and_highest_at_zero(self, kernel):
        psi = similarity(torch.linspace(0, 0.9, 10), kernel)
        assert (psi >= 0).all()
        assert psi.argmax() == 0

    def test_unknown_kernel_is_named(self):
        with pytest.raises(ValueError, match="'cubic' is not one of gaussian"):
            similarity(torch.zeros(1), "cubic")


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("rows", "count", "rank"), [(7, 5, 3), (600, 540, 8), (600, 540, 540)])
def test_prepared_targets_give_the_same_divergence(rows, count, rank, smoothing):
    """Scores of any rank, and first arguments outside the space of the second."""
    weight = normal(rank, count)
    diverge = prepare_targets(q := normal(rows, rank, seed=1) @ weight, smoothing)
    inside, sets = normal(4, rank, seed=2) @ weight, normal(4, 2, rank, seed=3) @ weight
    nearly = inside + 1e-3 * normal(4, count, seed=5)
    for p in (inside, sets, nearly, normal(4, count, seed=4)):
        assert torch.allclose(diverge(p), learned_divergence(p, q, smoothing), atol=1e-9, rtol=1e-9)
    assert (diverge(q[:50]) >= 0).all()  # rounding leaves some below 0 on the diagonal


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.2])
def test_prepared_points_give_the_same_divergence_to_the_bit(smoothing):
    for p in (normal(6, 5), normal(6, 3, 5)):
        diverge = prepare_points(p, smoothing)
        for q in (normal(4, 5, seed=1), normal(1, 5, seed=2)):
            assert torch.equal(diverge(q), learned_divergence(p, q, smoothing))


def test_prepared_targets_compare_as_many_numbers_as_the_rank_is(monkeypatch):
    """The slow way is not taken: the scores of a bank have the rank of its vectors."""
    z, bank = normal(600, 8).float(), normal(540, 8, seed=1).float()
    q = cosine_scores(z, bank).double()
    basis = bregman_module._find_basis(q)
    assert basis.shape == (540, 8)
    monkeypatch.setattr(bregman_module, "learned_divergence", None)
    assert prepare_targets(q, 0.2)(q[:3]).argmin(dim=1).tolist() == [0, 1, 2]


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest float64 tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for part in tree_leaves(made):
            if isinstance(part, torch.Tensor) and part.dtype == torch.float64:
                self.largest = max(self.largest, part.numel())
        return made


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_targets_of_a_large_bank_are_prepared_in_parts(smoothing, monkeypatch):
    """50,000 images with 65,536 scores are 26 GB in float64, and five such matrices were made."""
    monkeypatch.setattr(bregman_module, "_ENTRIES", 100 * 540)
    z, bank = normal(2000, 8).float(), normal(540, 8, seed=1).float()
    q = cosine_scores(z, bank)
    with LargestTensor() as made:
        found = prepare_targets(q, smoothing)(q[:5])
    assert found.dtype == torch.float64
    assert torch.allclose(found, learned_divergence(q[:5].double(), q.double(), smoothing))
    assert made.largest <= 512 * 540  # the rows that show the rank; all would be 2000 * 540


@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 1), (0.2, 8)])
def test_tangents_at_a_large_bank_take_few_numbers(smoothing, numbers):
    """In the hard form its winner describes a plane; a one-hot row was as long as the bank."""
    q = cosine_scores(normal(2000, 8), normal(540, 8, seed=1))
    tangents = find_tangents(q, smoothing)
    assert tangents.slopes.numel() == 2000 * numbers
    p = q[:5]
    below = learned_divergence(p, q, smoothing)  # the planes touch the generator at q itself
    heights = tangents.heights(tangents.reduce(p))
    assert torch.allclose(heights.diagonal()[:, None] - heights, below, atol=1e-9)


def test_a_row_that_is_no_number_leaves_the_others_right():
    q, p = cosine_scores(normal(600, 8), normal(540, 8, seed=1)), normal(3, 540, seed=2)
    expected = learned_divergence(p[1:], q, 0.2)
    p[0, 0] = torch.nan
    assert torch.allclose(prepare_targets(q, 0.2)(p)[1:], expected)
