"""Health without labels: the formulas, the sample, the verdict, and a run that stops by it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepbregman.training.diagnostics import (
    alpha_req,
    lidar,
    nearest_indices,
    neighbour_stability,
    rankme,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def naive_count(spectrum: list[float]) -> float:
    """exp(-sum p log p) with p = share + 1e-7, as RankMe and LiDAR write it."""
    total = math.fsum(spectrum)
    shares = [value / total + 1e-7 for value in spectrum]
    return math.exp(-math.fsum(p * math.log(p) for p in shares))


def rotation(d: int) -> Tensor:
    return torch.linalg.qr(normal(d, d, seed=9)).Q


# RankMe


def test_rankme_agrees_with_the_definition() -> None:
    h = (normal(20, 6) + 2.0) * torch.tensor([5.0, 2.0, 1.0, 1.0, 0.1, 0.01])
    eigenvalues = np.linalg.eigvalsh((h.T @ h).numpy())
    assert float(rankme(h)) == pytest.approx(naive_count(np.sqrt(eigenvalues).tolist()), rel=1e-9)


@given(st.integers(2, 8), st.integers(0, 5), st.floats(0.01, 100.0))
def test_rankme_lies_between_one_and_the_width_and_ignores_scale_and_rotation(
    d: int, seed: int, scale: float
) -> None:
    h = normal(12, d, seed=seed)
    value = float(rankme(h))
    assert 1.0 <= value <= d + 1e-4
    assert float(rankme(scale * h @ rotation(d))) == pytest.approx(value, rel=1e-6)


def test_rankme_counts_equal_directions_and_the_mean_as_one() -> None:
    assert float(rankme(torch.eye(7, dtype=torch.float64))) == pytest.approx(7.0, rel=1e-4)
    assert float(rankme(torch.ones(9, 7, dtype=torch.float64))) == pytest.approx(1.0, rel=1e-4)


# alpha-ReQ


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.5])
def test_alpha_is_that_of_a_power_law(alpha: float) -> None:
    """Rows whose covariance has exactly the eigenvalues j^-alpha."""
    values = torch.arange(1, 31, dtype=torch.float64) ** (-alpha / 2)
    axes = torch.diag(values) @ rotation(30)
    assert float(alpha_req(torch.cat([axes, -axes]) + 3.0)) == pytest.approx(alpha, abs=1e-9)


def test_alpha_is_the_slope_that_polyfit_finds() -> None:
    h = normal(80, 60) * torch.linspace(1, 5, 60, dtype=torch.float64)
    eigenvalues = np.linalg.eigvalsh(np.cov(h.numpy().T))[::-1]
    slope, _ = np.polyfit(np.log(np.arange(5, 51)), np.log(eigenvalues[4:50]), 1)
    assert float(alpha_req(h)) == pytest.approx(-slope, rel=1e-9)


def test_alpha_of_a_point_or_a_plane_is_undefined() -> None:
    assert math.isnan(float(alpha_req(torch.ones(20, 8, dtype=torch.float64))))
    assert math.isnan(float(alpha_req(normal(20, 2) @ normal(2, 8, seed=1))))


# LiDAR


def naive_lidar(views: Tensor) -> float:
    num_views, num_images, d = views.shape
    means = [views[:, i].numpy().mean(axis=0) for i in range(num_images)]
    centre = np.mean(means, axis=0)
    between, within = np.zeros((d, d)), 1e-4 * np.eye(d)
    for i, mean in enumerate(means):
        between += np.outer(mean - centre, mean - centre) / num_images
        for m in range(num_views):
            away = views[m, i].numpy() - mean
            within += np.outer(away, away) / (num_images * num_views)
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    return naive_count(np.clip(np.linalg.eigvalsh(root @ between @ root), 0.0, None).tolist())


@pytest.mark.parametrize(("num_images", "d"), [(12, 5), (4, 9)])
def test_lidar_agrees_with_the_definition(num_images: int, d: int) -> None:
    centres, scales = normal(1, num_images, d, seed=1), torch.linspace(0.1, 3.0, d)
    views = centres + scales * normal(6, num_images, d)
    assert float(lidar(views)) == pytest.approx(naive_lidar(views), rel=1e-8)


def test_lidar_ignores_directions_that_only_views_differ_in() -> None:
    """Two directions tell images apart; four hold large noise of the views."""
    angles = torch.arange(40, dtype=torch.float64) * 2 * math.pi / 40
    images = torch.stack([angles.cos(), angles.sin()], dim=1)
    views = torch.cat([images.expand(64, -1, -1), torch.zeros(64, 40, 4)], dim=2)
    noise = normal(64, 40, 6) * torch.tensor([0.01, 0.01, 9.0, 9.0, 9.0, 9.0])
    assert float(lidar(views + noise)) == pytest.approx(2.0, abs=0.05)
    assert float(rankme((views + noise)[0])) > 4.0


# Neighbours


@given(st.integers(3, 9), st.integers(0, 5))
def test_neighbours_and_their_stability_agree_with_naive_loops(n: int, seed: int) -> None:
    before, after = normal(n, 4, seed=seed), normal(n, 4, seed=seed + 100)
    k = 2
    sets = []
    for h in (before, after):
        rows = h.tolist()
        cosine = [
            [
                math.fsum(x * y for x, y in zip(a, b, strict=True))
                / (math.hypot(*a) * math.hypot(*b))
                for b in rows
            ]
            for a in rows
        ]
        order = [
            sorted((-c, j) for j, c in enumerate(row) if j != i) for i, row in enumerate(cosine)
        ]
        sets.append([{j for _, j in row[:k]} for row in order])
    expected = math.fsum(len(a & b) / k for a, b in zip(*sets, strict=True)) / n
    found = [nearest_indices(h, k) for h in (before, after)]
    assert [[set(row) for row in part.tolist()] for part in found] == sets
    assert float(neighbour_stability(found[0], found[1])) == pytest.approx(expected)
    assert float(neighbour_stability(found[0], found[0].flip(1))) == 1.0
