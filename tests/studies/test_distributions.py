"""Distributions on rings: what is drawn, what is learned, and what the command leaves."""

import json

import pytest
import torch

from deepbregman.errors import UserError
from deepbregman.studies.distributions import (
    ARMS,
    Rings,
    cluster_arm,
    draw_rings,
    run_distributions,
)
from deepbregman.studies.plane import PlaneNetwork

TINY = Rings(num_points=10, num_train=60, num_test=30, widths=(8,), steps=3, batch_size=30)


def test_the_means_lie_on_the_rings():
    settings = Rings(num_points=4000, ring_noise=0.0)
    points, labels = draw_rings(settings, 30, seed=1)
    radii = points.mean(dim=1).norm(dim=1)
    assert torch.allclose(radii, torch.tensor(settings.radii)[labels], atol=0.03)
    assert torch.allclose(points.var(dim=1), torch.tensor(0.1), atol=0.015)
    assert labels.bincount().tolist() == [10, 10, 10]
    assert torch.equal(points, draw_rings(settings, 30, seed=1).points)
    assert not torch.equal(points, draw_rings(settings, 30, seed=2).points)


def test_a_set_is_scored_point_by_point():
    torch.manual_seed(0)
    network = PlaneNetwork((5,), 4, subnetworks=True).eval()
    points = torch.randn(3, 7, 2)
    scores = network(points)
    assert scores.shape == (3, 7, 4)
    assert torch.allclose(scores[1, 2], network(points[1, 2:3])[0], atol=1e-6)


def test_the_moment_form_tells_the_rings_apart_and_euclidean_distance_does_not():
    settings = Rings(num_points=25, num_train=150, num_test=60, variance=0.02, steps=300)
    train, test = draw_rings(settings, 150, seed=1), draw_rings(settings, 60, seed=2)
    learned = cluster_arm("moment, contrastive", settings, train, test, 0)
    assert learned.metrics["ARI"] > 0.85
    assert cluster_arm("Euclidean, means", settings, train, test, 0).metrics["ARI"] < 0.3
    assert cluster_arm("oracle, nearest ring", settings, train, test, 0).metrics["ARI"] > 0.9


def test_every_arm_leaves_its_rows_and_the_figure(tmp_path):
    out = tmp_path / "study"
    results = run_distributions(out, seeds=2, settings=TINY).results
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    shown = {row["arm"]: row for row in results["rows"] if row["metric"] == "ARI"}
    assert list(shown) == list(ARMS)
    assert all(row["n"] == 2 and len(row["values"]) == 2 for row in shown.values())
    assert "not stated" in results["notes"]
    assert (out / "rings.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (out / "rings.svg").read_bytes()
    with pytest.raises(UserError, match="not an empty folder"):
        run_distributions(out, seeds=1, settings=TINY)


def test_bad_options_are_refused_before_anything_is_made(refused):
    refused(["study", "distributions", "--seeds", "0"], "--seeds 0")


def test_studies_are_listed_and_an_unknown_one_is_refused(output, refusal):
    listed = output("study")
    assert all(name in listed for name in ("distributions", "divergence-2d", "tsne"))
    for words, answer in (
        (["distribution"], "did you mean 'distributions'"),
        (["--seeds", "2", "tsne"], "write its name before"),
    ):
        assert answer in refusal("study", *words)


@pytest.mark.slow
def test_three_runs_reach_what_was_published(tmp_path):
    results = run_distributions(tmp_path / "study", seeds=3).results
    ari = {row["arm"]: row["mean"] for row in results["rows"] if row["metric"] == "ARI"}
    assert ari["moment, contrastive"] >= 0.95
    assert ari["moment, triplet"] >= 0.95
    assert ari["Euclidean, means"] < 0.5
