"""The plane: the divergences that are drawn, and how well they separate."""

import json

import pytest
import torch
from scipy.special import kl_div

from deepbregman.studies.divergence_2d import (
    draw_classes,
    learn,
    list_classical,
    measure_separation,
    run_divergence_2d,
)


def test_classical_divergences_are_of_the_shifted_plane():
    x, y = torch.tensor([[-1.0, 2.0], [0.5, 0.0]]), torch.tensor([[0.0, -1.0]])
    shift = torch.tensor([2.0, 3.0])
    found = list_classical(shift)
    expected = 0.5 * (x - y).square().sum(dim=1, keepdim=True)
    assert torch.allclose(found["squared Euclidean"](x, y), expected)
    by_scipy = kl_div((x + shift).numpy(), (y + shift).numpy()).sum(axis=1)
    assert found["Kullback-Leibler"](x, y)[:, 0].numpy() == pytest.approx(by_scipy, abs=1e-5)
    ratio = (x + shift) / (y + shift)
    by_hand = (ratio - ratio.log() - 1).sum(dim=1, keepdim=True)
    assert torch.allclose(found["Itakura-Saito"](x, y), by_hand, atol=1e-5)


def test_the_learned_divergence_is_zero_within_a_class_and_convex_in_its_first_argument():
    points, labels = draw_classes(100, seed=3)
    measures, _ = learn(points, labels, steps=150, seed=0)
    hard = measures["learned, max form"]
    found = measure_separation(hard(points, points), labels)
    assert found["same class at zero"] > 0.8
    assert found["other class at zero"] < 0.1
    # Affine subnetworks: phi is convex on the plane, so D(. || x0) is.
    a, b, x0 = points[:40], points[40:80], points[80:81]
    for measure in measures.values():
        middle = measure((a + b) / 2, x0)
        assert (middle <= (measure(a, x0) + measure(b, x0)) / 2 + 1e-4).all()


def test_separation_on_a_matrix_done_by_hand():
    distance = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [1.0, 3.0, 0.0]])
    found = measure_separation(distance, torch.tensor([0, 0, 1]))
    # Pairs of two classes: 2, 0, 1, 3; of one: 0, 0. One of the four ties with both.
    assert found["AUC"] == pytest.approx((3 + 0.5) / 4)
    assert found["same class at zero"] == 1.0
    assert found["other class at zero"] == pytest.approx(0.25)


def test_the_command_leaves_results_and_figures(tmp_path):
    out = tmp_path / "plane"
    run_divergence_2d(out, seeds=1, samples=40, steps=5, resolution=12)
    results = json.loads((out / "results.json").read_text())
    assert {row["arm"] for row in results["rows"]} >= {"learned, max form", "Itakura-Saito"}
    assert "supervised" in results["notes"]
    assert (out / "divergence-2d.png").stat().st_size > 10_000
    assert (out / "divergence-2d.svg").is_file()
