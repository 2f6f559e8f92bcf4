"""SSL-HSIC against the definition of the criterion, and its features against their kernel."""

import math

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from deepbregman.config.methods import SSLHSICSettings
from deepbregman.objectives import Samples, ViewGroups, build_step
from deepbregman.objectives.ssl_hsic import dependence_on_image, fourier_features, self_dependence
from deepbregman.objectives.step import gather_alone

from ..conftest import normal
from .methods import configure, draw_views


def drawn(num_features: int, width: int) -> Tensor:
    uniform = torch.rand(num_features, 1, dtype=torch.float64)
    return torch.cat([normal(num_features, width + 1), uniform], dim=1)


def test_features_estimate_the_inverse_multiquadric_kernel():
    torch.manual_seed(0)
    z = normal(5, 3, seed=1)
    features = fourier_features(z, drawn(200_000, 3), 1.5)
    for i in range(5):
        for j in range(5):
            squared = sum((a - b) ** 2 for a, b in zip(z[i].tolist(), z[j].tolist(), strict=True))
            expected = 1.5 / math.sqrt(1.5**2 + squared)
            assert float(features[i] @ features[j]) == pytest.approx(expected, abs=0.01)


def test_directions_and_lengths_are_drawn_normal_and_phases_uniform():
    objective = build_step(configure("ssl-hsic", **{"objective.features": 2000})).objective
    generator = torch.Generator().manual_seed(0)
    drawn = objective.draw(5, device=torch.device("cpu"), generator=generator)
    assert drawn.shape == (2, 2000, 6 + 2)
    for column in range(8):
        law = "norm" if column < 7 else "uniform"
        for part in drawn[..., column].numpy():
            assert kstest(part, law).pvalue > 1e-3
    assert not torch.equal(drawn[0], drawn[1])


def kernel(a: Tensor, b: Tensor) -> float:
    return sum(map(float.__mul__, a.tolist(), b.tolist()))


def test_dependence_on_the_image_is_its_formula():
    features = normal(3, 4, 5)  # views, images, features
    own = [
        kernel(features[p, i], features[q, i])
        for i in range(4)
        for p in range(3)
        for q in range(3)
        if p != q
    ]
    rows = features.flatten(0, 1)
    every = [kernel(a, b) for a in rows for b in rows]
    expected = sum(own) / len(own) - sum(every) / len(every)
    assert float(dependence_on_image(features)) == pytest.approx(expected, rel=1e-9)


def test_self_dependence_is_the_trace_of_centred_kernels():
    first, second = normal(6, 4), normal(6, 4, seed=1)
    centre = torch.eye(6, dtype=torch.float64) - 1.0 / 6
    kernels = [
        torch.tensor([[kernel(a, b) for b in rows] for a in rows], dtype=torch.float64)
        for rows in (first, second)
    ]
    expected = torch.trace(kernels[0] @ centre @ kernels[1] @ centre) / 36
    torch.testing.assert_close(self_dependence(first, second), expected)


def test_gradients():
    draw = drawn(6, 3)
    inputs = (normal(2, 4, 3).requires_grad_(),)
    assert torch.autograd.gradcheck(
        lambda z: dependence_on_image(fourier_features(z, draw, 2.0)), inputs
    )
    assert torch.autograd.gradcheck(
        lambda z: self_dependence(*fourier_features(z, draw, 2.0)), inputs
    )


def test_each_view_goes_with_the_teachers_embedding_of_the_other():
    torch.manual_seed(0)
    objective = build_step(configure("ssl-hsic")).double().objective
    random = objective.draw(5, device=torch.device("cpu"), generator=torch.Generator()).double()
    outputs = objective(ViewGroups(draw_views(2, 5)), gather_alone, Samples(random=random))
    assert random.shape == (2, 9, 6 + 2)
    student, teacher = (
        part / part.norm(dim=2, keepdim=True) for part in (outputs.student, outputs.teacher)
    )
    values, roots = [], []
    for a, b in ((0, 1), (1, 0)):
        pair = torch.stack([student[a], teacher[b]])
        one, other = (fourier_features(pair, draw, objective.kernel_scale) for draw in random)
        values.append(dependence_on_image(one))
        roots.append(self_dependence(one.flatten(0, 1), other.flatten(0, 1)).sqrt())
    torch.testing.assert_close(outputs.terms["dependence"], sum(values) / 2)
    torch.testing.assert_close(outputs.terms["self_dependence"], sum(roots) / 2)
    (outputs.terms["dependence"] + outputs.terms["self_dependence"]).backward()
    assert all(p.grad is None for p in objective.teacher.parameters())
    assert all(p.grad is not None for p in objective.predictor.parameters())


def test_the_kernel_is_steepest_between_embeddings_at_right_angles():
    """The authors learn it to be: the slope is in the squared distance, here 2."""

    def slope(c: float) -> float:
        return 0.5 * c * (c * c + 2.0) ** -1.5

    scale = SSLHSICSettings().kernel_scale
    assert slope(scale) == pytest.approx(max(slope(i / 100) for i in range(1, 1000)))


def test_the_objective_is_the_papers():
    """``-HSIC(Z, Y) + gamma sqrt(HSIC(Z, Z))`` by loops over features, samples and pairs."""
    torch.manual_seed(0)
    step = build_step(configure("ssl-hsic", **{"objective.gamma": 2.5})).double()
    random = step.objective.draw(4, device=torch.device("cpu"), generator=torch.Generator())
    outputs = step.objective(
        ViewGroups(draw_views(2, 4)), gather_alone, Samples(random=random.double())
    )
    student, teacher = (
        [[[x / math.hypot(*z) for x in z] for z in view] for view in part.tolist()]
        for part in (outputs.student, outputs.teacher)
    )

    def describe(z: list[float], draws: list[list[float]]) -> list[float]:
        angles = []
        for *direction, length, phase in draws:
            frequency = [length * w / step.objective.kernel_scale for w in direction]
            angles.append(sum(map(float.__mul__, frequency, z)) + 2.0 * math.pi * phase)
        return [math.sqrt(2.0 / len(draws)) * math.cos(angle) for angle in angles]

    expected = 0.0
    for a, b in ((0, 1), (1, 0)):
        rows = [*student[a], *teacher[b]]  # image i is in rows i and i + 4
        kernels = []
        for draws in random.double().tolist():
            features = [describe(z, draws) for z in rows]
            kernels.append([[sum(map(float.__mul__, f, g)) for g in features] for f in features])
        k, other = kernels
        own = sum(k[i][i + 4] + k[i + 4][i] for i in range(4)) / 8
        of_image = own - sum(map(sum, k)) / 64
        # trace(K H L H): centred rows and columns of one kernel, times the other.
        means = [sum(row) / 8 for row in other]
        centred = [
            [other[i][j] - means[i] - means[j] + sum(means) / 8 for j in range(8)] for i in range(8)
        ]
        of_itself = sum(k[i][j] * centred[i][j] for i in range(8) for j in range(8)) / 64
        expected += (-of_image + 2.5 * math.sqrt(of_itself)) / 2
    total = sum(step.weights[name] * value for name, value in outputs.terms.items())
    assert total.item() == pytest.approx(expected, rel=1e-6)
