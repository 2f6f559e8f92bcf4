import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepbregman.config import Config, load_recipe, override
from deepbregman.objectives import Step, StepOutputs, build_step
from deepbregman.objectives.divergence import count_usage
from deepbregman.training import diagnostics
from deepbregman.training.diagnostics import (
    alignment,
    effective_rank,
    find_collapse,
    spread,
    uniformity,
)

from ..conftest import normal


def make_step(smoothing: float = 0.0, num_subnetworks: int = 4, weight: float = 1.0) -> Step:
    changes = {
        "divergence.weight": weight,
        "divergence.smoothing": smoothing,
        "divergence.num_subnetworks": num_subnetworks,
        "divergence.hidden": 2,
    }
    return build_step(override(load_recipe("digits"), changes))


def diagnose(h: Tensor, z: Tensor, scores: Tensor | None, smoothing: float) -> dict[str, float]:
    step = make_step(smoothing, weight=0.0 if scores is None else 1.0)
    return diagnostics.diagnose(
        step, StepOutputs(z.new_zeros(()), z.new_zeros(1), z, None, h, scores)
    )


def warnings(record: dict[str, float], num_subnetworks: int, num_samples: int) -> list[str]:
    step = make_step(0.0, num_subnetworks, float("active_subnetworks" in record))
    return find_collapse(record) + step.warn(record, num_samples)


def unit(row: list[float]) -> list[float]:
    return [value / math.hypot(*row) for value in row]


def squared_distance(a: list[float], b: list[float]) -> float:
    return math.fsum((x - y) ** 2 for x, y in zip(unit(a), unit(b), strict=True))


def naive_alignment(z1: Tensor, z2: Tensor) -> float:
    pairs = list(zip(z1.tolist(), z2.tolist(), strict=True))
    return math.fsum(squared_distance(a, b) for a, b in pairs) / len(pairs)


def naive_uniformity(z: Tensor) -> float:
    rows = z.tolist()
    potentials = [
        math.exp(-2.0 * squared_distance(a, b))
        for i, a in enumerate(rows)
        for j, b in enumerate(rows)
        if i != j
    ]
    return math.log(math.fsum(potentials) / len(potentials))


def naive_spread(z: Tensor) -> float:
    """Root of the mean squared distance of the points on the sphere from their mean."""
    rows = [unit(row) for row in z.tolist()]
    mean = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    return math.sqrt(math.fsum(math.dist(row, mean) ** 2 for row in rows) / len(rows))


def naive_effective_rank(h: Tensor) -> float:
    """By the eigenvalues of the scatter, whose roots are the singular values."""
    centred = h.numpy() - h.numpy().mean(axis=0)
    eigenvalues = np.linalg.eigvalsh(centred.T @ centred)
    singular = [math.sqrt(value) for value in eigenvalues if value > 1e-12]
    total = math.fsum(singular)
    return math.exp(-math.fsum(s / total * math.log(s / total) for s in singular))


# On the sphere


def test_alignment_agrees_with_a_naive_loop():
    z1, z2 = normal(9, 5), normal(9, 5, seed=1)
    assert float(alignment(z1, z2)) == pytest.approx(naive_alignment(z1, z2), rel=1e-12)


def test_alignment_of_equal_orthogonal_and_opposite():
    z = torch.eye(4)
    assert float(alignment(z, 3.0 * z)) == pytest.approx(0.0)
    assert float(alignment(z, z.roll(1, 0))) == pytest.approx(2.0)
    assert float(alignment(z, -0.1 * z)) == pytest.approx(4.0)


def test_uniformity_agrees_with_a_naive_loop():
    z = normal(9, 5)
    assert float(uniformity(z)) == pytest.approx(naive_uniformity(z), rel=1e-12)


def test_uniformity_of_one_point_a_basis_and_two_poles():
    assert float(uniformity(torch.ones(6, 3))) == pytest.approx(0.0, abs=1e-5)
    assert float(uniformity(5.0 * torch.eye(6))) == pytest.approx(-4.0)
    assert float(uniformity(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]))) == pytest.approx(-8.0)


def test_spread_agrees_with_a_naive_loop():
    z = normal(9, 5) + 1.0
    assert float(spread(z)) == pytest.approx(naive_spread(z), rel=1e-12)
    assert 0.1 < naive_spread(z) < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spread_of_a_point_and_a_little_noise_is_nearly_nothing(dtype):
    point = normal(1, 16).to(dtype)
    assert float(spread(point.expand(50, -1))) < 1e-6
    noisy = point + 1e-6 * normal(50, 16, seed=1).to(dtype)
    assert float(spread(noisy)) < 1e-5


# Rank


def test_effective_rank_agrees_with_the_definition():
    h = normal(30, 6) * torch.tensor([5.0, 2.0, 1.0, 1.0, 0.1, 0.01]) + 7.0
    assert float(effective_rank(h)) == pytest.approx(naive_effective_rank(h), rel=1e-9)


@pytest.mark.parametrize("d", [2, 5, 16])
def test_effective_rank_of_orthonormal_directions_is_their_number(d):
    axes = torch.eye(d, dtype=torch.float64)
    rotation = torch.linalg.qr(normal(d, d)).Q
    both_ways = torch.cat([axes, -axes]) @ rotation  # its mean is 0
    assert float(effective_rank(both_ways)) == pytest.approx(d)
    assert float(effective_rank(100.0 * both_ways + 3.0)) == pytest.approx(d)
    assert float(effective_rank(axes)) == pytest.approx(d - 1)  # centring takes one away


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_effective_rank_of_a_point_is_one(value):
    assert float(effective_rank(torch.full((20, 8), value))) == pytest.approx(1.0, abs=1e-3)


# Usage


def test_usage_agrees_with_a_naive_loop():
    scores = normal(40, 6) + torch.arange(6.0) / 3
    wins = [0] * 6
    for row in scores.tolist():
        wins[row.index(max(row))] += 1
    entropy = -math.fsum(w / 40 * math.log(w / 40) for w in wins if w) / math.log(6)
    active, found = count_usage(scores)
    assert int(active) == sum(w > 0 for w in wins)
    assert float(found) == pytest.approx(entropy, rel=1e-6)
    assert 0 < entropy < 1


def test_usage_of_a_single_subnetwork():
    active, entropy = count_usage(torch.zeros(4, 1))
    assert (int(active), float(entropy)) == (1, 0.0)


# All of them


def naive_divergence(p: list[float], q: list[float], smoothing: float) -> float:
    """D(p || q): Eq. 6, or T KL(softmax(q / T) || softmax(p / T))."""
    if smoothing == 0.0:
        return max(p) - p[q.index(max(q))]
    total_p = math.fsum(math.exp(value / smoothing) for value in p)
    total_q = math.fsum(math.exp(value / smoothing) for value in q)
    terms = []
    for a, b in zip(p, q, strict=True):
        share_p, share_q = math.exp(a / smoothing) / total_p, math.exp(b / smoothing) / total_q
        terms.append(share_q * math.log(share_q / share_p))
    return smoothing * math.fsum(terms)


@pytest.mark.parametrize("smoothing", [0.0, 0.7])
@pytest.mark.parametrize("num_views", [2, 3])
def test_diagnose_agrees_with_naive_loops(smoothing, num_views):
    h, z, scores = normal(num_views, 8, 12), normal(num_views, 8, 5), normal(num_views, 8, 4)
    found = diagnose(h, z, scores, smoothing)
    distance = [
        [naive_divergence(p, q, smoothing) for q in scores[1].tolist()] for p in scores[0].tolist()
    ]
    positives = [distance[i][i] for i in range(8)]
    negatives = [distance[i][j] for i in range(8) for j in range(8) if i != j]
    active, entropy = count_usage(scores.reshape(-1, 4))
    assert found == pytest.approx(
        {
            "alignment": naive_alignment(z[0], z[1]),
            "uniformity": naive_uniformity(z[0]),
            "spread": min(naive_spread(z[0]), naive_spread(h[0])),
            "effective_rank": naive_effective_rank(h[0]),
            "divergence_positives": math.fsum(positives) / 8,
            "divergence_negatives": math.fsum(negatives) / 56,
            "active_subnetworks": int(active),
            "usage_entropy": float(entropy),
        },
        rel=1e-4,
    )
    assert all(type(value) is float for value in found.values())


def test_diagnose_without_divergence():
    found = diagnose(normal(2, 8, 12), normal(2, 8, 5), None, 0.0)
    assert set(found) == {"alignment", "uniformity", "spread", "effective_rank"}


def test_alignment_is_with_the_second_view_or_else_with_the_target():
    h, z, target = normal(2, 8, 12), normal(2, 8, 5), normal(1, 8, 5, seed=1)
    step, nothing = make_step(0.0, weight=0.0), torch.zeros(1)
    for views, other, partner in ((z, target, z[1]), (z[:1], target, target[0])):
        outputs = StepOutputs(nothing[0], nothing, views, other, h, None)
        found = diagnostics.diagnose(step, outputs)
        assert found["alignment"] == pytest.approx(naive_alignment(z[0], partner), rel=1e-4)
    alone = StepOutputs(nothing[0], nothing, z[:1], None, h, None)
    assert "alignment" not in diagnostics.diagnose(step, alone)


def test_diagnose_in_bfloat16_is_as_in_float32():
    h, z, scores = (normal(2, 8, d).bfloat16() for d in (12, 5, 4))
    expected = diagnose(h.float(), z.float(), scores.float(), 0.0)
    assert diagnose(h, z, scores, 0.0) == pytest.approx(expected, rel=1e-5)


# Words

HEALTHY: dict[str, Any] = {"effective_rank": 20.0, "spread": 0.9, "active_subnetworks": 60.0}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, []),
        ({"effective_rank": 2.0}, []),
        ({"effective_rank": 1.94}, ["effective rank 1.9"]),
        ({"spread": 0.05}, []),
        ({"spread": 0.049}, ["spread 0.049"]),
        ({"spread": 0.0, "effective_rank": 1.0}, ["effective rank 1.0, spread 0.0"]),
        ({"active_subnetworks": 10.0}, []),
        ({"active_subnetworks": 9.0}, ["only 9 of 100 subnetworks"]),
        (
            {"effective_rank": 1.0, "active_subnetworks": 1.0},
            ["effective rank 1.0", "only 1 of 100 subnetworks"],
        ),
    ],
)
def test_warnings_appear_when_they_should(changes, parts):
    words = warnings({**HEALTHY, **changes}, 100, 1024)
    assert len(words) == len(parts)
    for word, part in zip(words, parts, strict=True):
        assert part in word


def test_warnings_without_divergence():
    assert warnings({"effective_rank": 5.0, "spread": 0.9}, 100, 1024) == []


@pytest.mark.parametrize(
    ("num_subnetworks", "num_samples", "fewest"),
    [(50, 1024, 5), (100, 1024, 10), (1000, 1024, 100), (1000, 256, 26), (1000, 16, 2)],
)
def test_warnings_count_against_what_could_be_in_use(num_subnetworks, num_samples, fewest):
    """A tenth of the subnetworks, or of the samples where they are fewer."""
    for active, count in ((fewest, 0), (fewest - 1, 1)):
        found = {**HEALTHY, "active_subnetworks": float(active)}
        assert len(warnings(found, num_subnetworks, num_samples)) == count


def test_few_samples_that_all_differ_are_no_reason_to_warn():
    scores = torch.eye(1000)[torch.arange(16) * 50].view(2, 8, 1000)  # 16 winners, all different
    found = diagnose(normal(2, 8, 12), normal(2, 8, 5), scores, 0.0)
    assert found["active_subnetworks"] == 16
    assert warnings(found, 1000, 16) == []
    same = diagnose(normal(2, 8, 12), normal(2, 8, 5), scores[:1, :1].expand(2, 8, -1), 0.0)
    (words,) = warnings(same, 1000, 16)
    assert "only 1 of 1000 subnetworks" in words


def test_warnings_advise_fields_that_exist():
    found = {"effective_rank": 1.0, "spread": 0.0, "active_subnetworks": 1.0}
    words = " ".join(warnings(found, 100, 1024)).replace(";", " ")
    fields = {
        word.strip(",.") for word in words.split() if word.startswith(("objective.", "divergence."))
    }
    assert fields == {"objective.weight", "divergence.smoothing", "divergence.usage_bonus"}
    for field in fields:
        section, name = field.split(".")
        override(Config(), {field: getattr(getattr(Config(), section), name)})


def test_warnings_of_a_healthy_and_a_collapsed_batch():
    z, scores = normal(2, 8, 5), normal(2, 8, 4)
    assert warnings(diagnose(normal(2, 8, 12), z, scores, 0.0), 4, 16) == []
    collapsed = warnings(diagnose(torch.ones(2, 8, 12), z, scores, 0.0), 4, 16)
    assert len(collapsed) == 1
    assert "collapsed" in collapsed[0]
    assert "raise objective.weight" in collapsed[0]
    (alone,) = warnings(diagnose(torch.ones(2, 8, 12), z, None, 0.0), 4, 16)
    assert "objective.weight" not in alone  # it would raise the rate of the only loss


@pytest.mark.parametrize("recipe", ["digits", "best"])
def test_collapse_to_a_point_and_a_little_noise_is_seen(recipe):
    """The rank of the noise is full, so the rank alone would not tell."""
    torch.manual_seed(0)
    model = build_step(override(load_recipe(recipe), {"encoder.name": "small"})).model
    spread_out = normal(2, 64, model.encoder.num_features).float()
    point = spread_out[:1, :1]
    for h, is_collapsed in (
        (point + 1e-6 * spread_out, True),
        (point + 1e-4 * spread_out, True),
        (spread_out, False),
    ):
        with torch.no_grad():
            z = model.projection(h.flatten(0, 1)).unflatten(0, (2, 64))
        found = diagnose(h, z, None, 0.0)
        assert found["effective_rank"] > 20.0
        words = warnings(found, 100, 128)
        assert len(words) == is_collapsed
        assert all("collapsed" in word for word in words)
