"""Barlow Twins, VICReg and W-MSE against loops written from their papers, and against lightly."""

import math

import pytest
import torch
from torch import Tensor

from deepbregman.config import load_recipe, override
from deepbregman.errors import UserError
from deepbregman.objectives import Samples, ViewGroups, build_step
from deepbregman.objectives.barlow_twins import redundancy
from deepbregman.objectives.step import gather_alone
from deepbregman.objectives.vicreg import covariance, lack_of_variance
from deepbregman.objectives.wmse import whiten

from ..conftest import normal


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def standardised(column: list[float]) -> list[float]:
    """By the deviation over all n, with the small number that batch normalisation adds."""
    centre = mean(column)
    variance = mean([(value - centre) ** 2 for value in column])
    return [(value - centre) / math.sqrt(variance + 1e-5) for value in column]


def test_barlow_twins_is_its_formula():
    z1, z2 = normal(7, 4), 0.5 * normal(7, 4) + normal(7, 4, seed=1)
    first, second = ([standardised(column) for column in z.T.tolist()] for z in (z1, z2))
    expected = 0.0
    for i in range(4):
        for j in range(4):
            c = mean([a * b for a, b in zip(first[i], second[j], strict=True)])
            expected += (1.0 - c) ** 2 if i == j else 0.02 * c**2
    assert float(redundancy(z1, z2, 0.02)) == pytest.approx(expected, rel=1e-9)


def test_vicreg_is_its_formula():
    z = 0.7 * normal(6, 3)
    rows, columns = z.tolist(), z.T.tolist()
    centres = [mean(column) for column in columns]
    hinge, squares = 0.0, 0.0
    for i in range(3):
        for j in range(3):
            c = sum((row[i] - centres[i]) * (row[j] - centres[j]) for row in rows) / 5
            if i == j:
                hinge += max(0.0, 1.0 - math.sqrt(c + 1e-4)) / 3
            else:
                squares += c**2 / 3
    assert float(lack_of_variance(z)) == pytest.approx(hinge, rel=1e-9)
    assert float(covariance(z)) == pytest.approx(squares, rel=1e-9)
    assert hinge > 0.0


def test_whitened_components_have_variance_1_and_no_covariance():
    z = normal(2, 9, 4) @ normal(4, 4, seed=1)
    white = whiten(z)
    for part in white:
        torch.testing.assert_close(part.mean(dim=0), torch.zeros(4, dtype=torch.float64))
        torch.testing.assert_close(torch.cov(part.T), torch.eye(4, dtype=torch.float64))
    # The rows of a Cholesky factor: the first component is only scaled, not mixed.
    first = z[0, :, 0] - z[0, :, 0].mean()
    torch.testing.assert_close(white[0, :, 0], first / first.std())
    assert whiten(torch.ones(3, 2, dtype=torch.float64)).isnan().all()
    z[0, :, 1] = z[0, :, 0]  # a factor of such a covariance stops half-way, with finite numbers
    assert whiten(z)[0].isnan().all()
    assert whiten(z)[1].isfinite().all()
    assert whiten(torch.ones(3, 2, dtype=torch.float64), shrinkage=0.1).isfinite().all()


def test_shrinkage_moves_variances_towards_1():
    z = 3.0 * normal(9, 1)
    centred = z - z.mean()
    expected = centred / (0.8 * z.var() + 0.2).sqrt()
    torch.testing.assert_close(whiten(z, shrinkage=0.2), expected)


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: redundancy(a, b, 0.1),
        lambda a, _: covariance(a),
        lambda a, _: lack_of_variance(0.1 * a),  # below the hinge
    ],
)
def test_gradients_of_the_smooth_ones(loss):
    inputs = (normal(5, 3).requires_grad_(), normal(5, 3, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradcheck(whiten, (inputs[0],))


SMALL = {"encoder.projection_hidden": 8, "encoder.embedding": 5, "divergence.weight": 0.0}


def outputs_of(random: Tensor | None = None, **changes: object):
    step = build_step(override(load_recipe("digits"), {**SMALL, **changes})).double()
    views = ViewGroups(torch.rand(2, 16, 3, 8, 8, dtype=torch.float64))
    outputs = step.objective(views, gather_alone, Samples(random=random))
    return step, outputs


@pytest.mark.parametrize("name", ["barlow_twins", "vicreg"])
def test_as_lightly_has_it(name):
    losses = pytest.importorskip("lightly.loss")
    step, outputs = outputs_of(**{"objective.name": name})
    total = sum(step.weights[term] * value for term, value in outputs.terms.items())
    theirs = losses.BarlowTwinsLoss(0.0051) if name == "barlow_twins" else losses.VICRegLoss()
    torch.testing.assert_close(total, theirs(*outputs.student), rtol=1e-6, atol=0.0)


def test_wmse_as_lightly_has_it(monkeypatch):
    wmse = pytest.importorskip("lightly.loss.wmse_loss")
    random = torch.rand(1, 16)
    whitened_by = {"objective.name": "wmse", "objective.whitening_batch": 8, "encoder.embedding": 4}
    changes = {**whitened_by, "training.batch_size": 16}
    _, outputs = outputs_of(random, **changes)
    monkeypatch.setattr(torch, "randperm", lambda _: random[0].argsort())
    theirs = wmse.WMSELoss(embedding_dim=4, w_size=8, track_running_stats=False)
    expected = theirs(outputs.student.flatten(0, 1))
    torch.testing.assert_close(outputs.terms["distance"], expected, rtol=1e-6, atol=0.0)


def whiten_by_loops(rows: list[list[float]]) -> list[list[float]]:
    """W (v - mean) with W = L^-1 and the covariance L L^T, to unit length (Eq. 2 and 3)."""
    n, d = len(rows), len(rows[0])
    centre = [mean([row[k] for row in rows]) for k in range(d)]
    rows = [[row[k] - centre[k] for k in range(d)] for row in rows]
    factor = [[0.0] * d for _ in range(d)]
    for i in range(d):
        for j in range(i + 1):
            c = sum(row[i] * row[j] for row in rows) / (n - 1)
            rest = c - sum(factor[i][k] * factor[j][k] for k in range(j))
            factor[i][j] = math.sqrt(rest) if i == j else rest / factor[j][j]
    found = []
    for row in rows:
        white: list[float] = []
        for i in range(d):  # L white = row
            white.append((row[i] - sum(factor[i][k] * white[k] for k in range(i))) / factor[i][i])
        found.append([value / math.hypot(*white) for value in white])
    return found


def test_wmse_is_its_formula():
    """The mean squared distance of two views, each whitened in the same random sub-batches."""
    random = torch.rand(2, 16, generator=torch.Generator().manual_seed(0))
    small = {"objective.whitening_batch": 8, "encoder.embedding": 4, "training.batch_size": 16}
    _, outputs = outputs_of(random, **{"objective.name": "wmse", "objective.rounds": 2, **small})
    distances = []
    for draws in random.tolist():
        order = sorted(range(16), key=draws.__getitem__)
        for part in (order[:8], order[8:]):
            first, second = (
                whiten_by_loops([view[i].tolist() for i in part]) for view in outputs.student
            )
            distances += [math.dist(a, b) ** 2 for a, b in zip(first, second, strict=True)]
    assert outputs.terms["distance"].item() == pytest.approx(mean(distances), rel=1e-9)


def test_vicregs_invariance_is_its_formula():
    """The squared distance of two views, over images and, as the authors' code, components."""
    step, outputs = outputs_of(**{"objective.name": "vicreg"})
    squares = [
        (a - b) ** 2
        for first, second in zip(*outputs.student.tolist(), strict=True)
        for a, b in zip(first, second, strict=True)
    ]
    assert len(squares) == 16 * 5
    assert outputs.terms["invariance"].item() == pytest.approx(mean(squares), rel=1e-9)
    assert step.weights == {"invariance": 25.0, "variance": 25.0, "covariance": 1.0}


def test_too_few_images_to_whiten_are_refused_by_name():
    recipe = override(load_recipe("digits"), {"encoder.embedding": 16, "training.batch_size": 64})
    with pytest.raises(UserError, match=r"objective.whitening_batch is 16 with encoder.embedding"):
        override(recipe, {"objective.name": "wmse", "objective.whitening_batch": 16})
    with pytest.raises(UserError, match=r"training.batch_size 64: the batch must be a multiple"):
        override(recipe, {"objective.name": "wmse", "objective.whitening_batch": 24})
