"""The mathematics of clustering with a learned divergence, in float64, hard form and smooth."""

import itertools
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch import Tensor

from deepbregman.commands.evaluate import evaluate
from deepbregman.evaluation import clustering
from deepbregman.evaluation.clustering import bregman_clusters, euclidean_clusters, purity
from deepbregman.evaluation.features import Features
from deepbregman.method.bregman import learned_divergence

from .conftest import with_gaps

seeds = st.integers(0, 2**31 - 1)
smoothings = st.sampled_from([0.0, 0.1, 1.0])


def points(seed: int, num_points: int, num_scores: int, rounded: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = 3.0 * torch.randn(num_points, num_scores, generator=generator, dtype=torch.float64)
    return drawn.round() if rounded else drawn  # rounded scores tie, at the top too


@given(seed=seeds, smoothing=smoothings, rounded=st.booleans(), count=st.integers(1, 9))
def test_the_mean_is_the_best_centroid(seed, smoothing, rounded, count):
    """Whatever s: sum D(x_i, s) - sum D(x_i, mean) = n D(mean, s) >= 0, hard form and ties too."""
    x, s = points(seed, count, 4, rounded), points(seed + 1, 1, 4, rounded)
    mean = x.mean(dim=0, keepdim=True)
    cost_s = learned_divergence(x, s, smoothing).sum()
    cost_mean = learned_divergence(x, mean, smoothing).sum()
    gap = count * learned_divergence(mean, s, smoothing).item()
    assert (cost_s - cost_mean).item() == pytest.approx(gap, abs=1e-9)
    assert gap >= 0.0


@given(
    seed=seeds,
    smoothing=smoothings,
    rounded=st.booleans(),
    num_points=st.integers(1, 40),
    num_clusters=st.integers(1, 8),
    num_scores=st.integers(1, 6),
)
def test_the_objective_never_increases(
    seed, smoothing, rounded, num_points, num_clusters, num_scores
):
    x = points(seed, num_points, num_scores, rounded)
    num_clusters = min(num_clusters, num_points)
    with patch.object(clustering, "RESTARTS", 2):
        found = bregman_clusters(x, num_clusters, smoothing, seed)
    steps = list(itertools.pairwise(found.objective))
    assert all(after <= before + 1e-12 for before, after in steps)
    # What is returned is what the last number says, and is a fixed point of both steps.
    matrix = learned_divergence(x, found.centroids, smoothing)
    chosen = matrix.gather(1, found.assignment[:, None])[:, 0]
    assert chosen.mean().item() == pytest.approx(found.objective[-1], abs=1e-12)
    assert torch.allclose(chosen, matrix.min(dim=1).values, atol=1e-12)
    for index in range(num_clusters):
        members = x[found.assignment == index]
        if len(members):
            assert torch.allclose(members.mean(dim=0), found.centroids[index])


@given(seed=seeds, num_clusters=st.integers(2, 6), smoothing=smoothings)
def test_starts_are_far_from_each_other(seed, num_clusters, smoothing):
    """Of many copies of a point one at most is drawn, while others are at a divergence from it."""
    corners = 9.0 * torch.eye(num_clusters, dtype=torch.float64)
    x = torch.cat([corners[:1].repeat(40, 1), corners])
    generator = torch.Generator().manual_seed(seed)
    diverge = clustering.prepare_divergence(x, num_clusters, smoothing)
    starts = clustering._draw_starts(x, num_clusters, diverge, generator)
    assert sorted(starts.argmax(dim=1).tolist()) == list(range(num_clusters))


@given(seed=seeds, num_clusters=st.integers(2, 6))
def test_empty_clusters_are_filled_from_others(seed, num_clusters):
    """Centroids that all coincide: the first takes every point, and the others end with some."""
    x = points(seed, 25, 5)
    diverge = clustering.prepare_divergence(x, num_clusters, 1.0)
    found = clustering._refine(x, x[:1].repeat(num_clusters, 1), diverge)
    assert torch.bincount(found.assignment, minlength=num_clusters).min() > 0
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(found.objective))


def test_filling_a_cluster_empties_no_other_and_moves_nothing_for_nothing():
    assignment = torch.tensor([0, 1, 1, 1])  # cluster 0 has one point, clusters 2 and 3 none
    far = torch.tensor([9.0, 1.0, 3.0, 0.0], dtype=torch.float64)
    filled = clustering._fill_empty(clustering._Step(assignment, far), 4)
    assert filled[[0, 3]].tolist() == [0, 1]
    assert sorted(filled[[1, 2]].tolist()) == [2, 3]
    near = torch.zeros(4, dtype=torch.float64)
    still = clustering._fill_empty(clustering._Step(assignment, near), 4)
    assert still.tolist() == assignment.tolist()


def test_a_point_between_equal_centroids_stays():
    x, centroids = points(6, 10, 4), points(7, 1, 4).repeat(3, 1)
    current = torch.arange(10) % 3
    divergences = clustering.prepare_divergence(x, 3, 0.0)(centroids)
    assert torch.equal(clustering._assign(divergences, current).assignment, current)


def test_separate_groups_are_found_and_the_best_start_is_kept():
    centres = 20.0 * torch.eye(5, 8, dtype=torch.float64)
    noise = torch.randn(200, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(200) % 5
    x = centres[labels] + noise
    for smoothing in (0.0, 1.0):
        found = bregman_clusters(x, 5, smoothing, seed=0)
        assert purity(labels, found.assignment) == 1.0
        assert len(found.assignment.unique()) == 5
        alone = []
        for count in (1, 4, 8):
            with patch.object(clustering, "RESTARTS", count):
                alone.append(bregman_clusters(x, 3, smoothing, seed=1).objective[-1])
        assert alone == sorted(alone, reverse=True)


def test_the_hard_form_tells_winners_apart_and_nothing_else():
    x = points(3, 60, 4)
    found = bregman_clusters(x, 7, 0.0)
    assert found.objective[-1] == 0.0
    winners = {
        cluster: set(x[found.assignment == cluster].argmax(dim=1).tolist()) for cluster in range(7)
    }
    assert all(len(kinds) <= 1 for kinds in winners.values())
    fewer = bregman_clusters(x, 2, 0.0)  # two of four winners: it has to cost something
    assert fewer.objective[-1] > 0.0


def test_a_seed_repeats_and_every_point_may_be_a_cluster():
    x = points(4, 30, 6)
    first, again = (bregman_clusters(x, 4, 1.0, seed=9) for _ in range(2))
    assert torch.equal(first.assignment, again.assignment)
    assert first.objective == again.objective
    single = bregman_clusters(x, 30, 1.0, seed=0)
    assert sorted(single.assignment.tolist()) == list(range(30))
    assert single.objective[-1] == pytest.approx(0.0, abs=1e-12)


def test_chunks_change_nothing(monkeypatch):
    x = points(5, 50, 6)
    whole = bregman_clusters(x, 4, 1.0)
    monkeypatch.setattr("deepbregman.evaluation.clustering._ENTRIES", 28)  # 7 points at a time
    pieces = bregman_clusters(x, 4, 1.0)
    assert torch.equal(whole.assignment, pieces.assignment)
    assert whole.objective == pytest.approx(pieces.objective, abs=1e-12)


@pytest.mark.parametrize(
    ("rows", "width", "clusters", "seed"), [(300, 12, 7, 0), (200, 8, 5, 1), (60, 3, 2, 2)]
)
def test_k_means_is_that_of_scikit_learn(rows, width, clusters, seed, monkeypatch):
    """The same draws, steps and stop: points without groups have a hundred other local optima."""
    monkeypatch.setattr(clustering, "_ENTRIES", 1000)  # 142 points at a time, 200, or all
    x = 5.0 + points(seed, rows, width)
    expected = KMeans(clusters, n_init=clustering.RESTARTS, random_state=seed).fit(x.numpy())
    found = euclidean_clusters(x, clusters, seed)
    assert adjusted_rand_score(expected.labels_, found.assignment) == 1.0
    assert found.objective[-1] == pytest.approx(expected.inertia_ / rows, rel=1e-12)
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(found.objective))


def test_k_means_of_fewer_distinct_points_than_clusters():
    x = torch.eye(3, dtype=torch.float64).repeat(4, 1)
    found = euclidean_clusters(x, 5)
    assert found.objective[-1] == pytest.approx(0.0, abs=1e-15)
    assert adjusted_rand_score(torch.arange(12) % 3, found.assignment) == 1.0  # two stay empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_part_points_that_are_the_same(dtype):
    """Else the points would move between clusters that should stay empty, up to the last step."""
    x = points(3, 8, 40).to(dtype).repeat(20, 1)
    for found in (euclidean_clusters(x, 12), *(bregman_clusters(x, 12, s) for s in (0.1, 1.0))):
        assert adjusted_rand_score(torch.arange(160) % 8, found.assignment) == 1.0
        assert len(found.objective) < 10


@pytest.mark.parametrize(
    ("scores", "options"),
    [
        (torch.zeros(3, 2), {"num_clusters": 4}),
        (torch.zeros(3, 2), {"num_clusters": 0}),
        (torch.zeros(3), {"num_clusters": 1}),
    ],
)
def test_impossible_clusterings_are_refused(scores, options):
    for cluster in (bregman_clusters, euclidean_clusters):
        with pytest.raises(ValueError, match="1 to N"):
            cluster(scores, **options)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=30),
)
def test_purity_equals_a_loop(pairs):
    right = 0
    for cluster in {cluster for cluster, _ in pairs}:
        members = Counter(label for other, label in pairs if other == cluster)
        right += members.most_common(1)[0][1]
    labels, clusters = torch.tensor([b for _, b in pairs]), torch.tensor([a for a, _ in pairs])
    assert purity(labels, clusters) == pytest.approx(right / len(pairs))


def test_the_protocol_groups_test_images_into_as_many_as_there_are_classes(short_run, few):
    """k-means of directions by scikit-learn; numbers of classes may have gaps."""
    source = with_gaps(few).source
    rows = evaluate(short_run, protocols=["cluster"], source=source, seed=3, seeds=2)
    found = {(row["variant"], row["metric"]): row["values"] for row in rows}
    truth, features = few.test.labels, few.test.features

    def directions(part: Tensor) -> Tensor:
        return torch.nn.functional.normalize(part.double(), dim=1)

    def group(points: Tensor, seed: int) -> Tensor:
        fit = KMeans(10, n_init=clustering.RESTARTS, random_state=seed).fit(points.numpy())
        return torch.from_numpy(fit.labels_)

    smoothing = few.config.divergence.smoothing
    for number, seed in enumerate((3, 4)):
        groups = {
            "k-means, cosine features": group(directions(features.representation), seed),
            "k-means, cosine embeddings": group(directions(features.embedding), seed),
            "Bregman, learned divergence": bregman_clusters(
                features.scores, 10, smoothing, seed
            ).assignment,
        }
        for name, clusters in groups.items():
            expected = {
                "NMI": normalized_mutual_info_score(truth, clusters),
                "ARI": adjusted_rand_score(truth, clusters),
                "purity": purity(truth, clusters),
            }
            for metric, value in expected.items():
                values = found[f"{name}, test split", metric]
                assert values[number] == pytest.approx(100 * value, abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_the_most_typical_image_is_nearest_to_the_mean(smoothing):
    """``D(image || mean)``, in which the image is the first argument, or one minus the cosine."""
    members, scores, h = torch.tensor([7, 2, 5, 0, 9]), points(1, 10, 4), points(2, 10, 3)
    features = Features(h, scores)
    mean = scores[members].mean(dim=0)
    middle = (h[members] / h[members].norm(dim=1, keepdim=True)).mean(dim=0)
    far = {"divergence": {}, "features": {}}
    for place in members.tolist():
        p, shares = scores[place], (mean / (smoothing or 1.0)).softmax(dim=0)
        logs = (p / (smoothing or 1.0)).log_softmax(dim=0)
        smooth = smoothing * float((shares * (shares.log() - logs)).sum())
        hard = float(p.max() - p[mean.argmax()])
        far["divergence"][place] = smooth if smoothing else hard
        far["features"][place] = 1.0 - float(torch.cosine_similarity(h[place], middle, dim=0))
    for method, distances in far.items():
        order, values = clustering.rank_members(method, features, members, smoothing)
        assert values.tolist() == pytest.approx(sorted(distances.values()), abs=1e-12)
        along = [distances[place] for place in order.tolist()]
        assert along == pytest.approx(values.tolist(), abs=1e-12)


def test_clusters_are_numbered_by_their_size():
    assignment = torch.tensor([2, 0, 3, 3, 0, 3, 3])  # cluster 1 is empty
    numbers = clustering.number_by_size(assignment, 4)
    assert numbers.tolist() == [2, 1, 0, 0, 1, 0, 0]
