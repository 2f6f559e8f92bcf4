"""Bregman hard clustering against scikit-learn's k-means and the theory of its centroids."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from deepbregman.evaluation.clustering import _settle, bregman_clustering
from deepbregman.method.bregman import divergence, moment_divergence, soft_divergence

FORMS = {
    "moment": moment_divergence,
    "max": divergence,
    "smooth": partial(soft_divergence, temperature=0.5),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_with_the_euclidean_form_it_is_k_means(seed: int) -> None:
    rows = normal(90, 4, seed=seed)
    rows[30:60, 0] += 6.0
    rows[60:, 1] += 6.0
    found = bregman_clustering(rows, 3, moment_divergence, seed=seed)
    reference = KMeans(3, n_init=10, random_state=seed).fit(rows.numpy())
    assert adjusted_rand_score(found.assignment, reference.labels_) == 1.0
    assert found.objective == pytest.approx(reference.inertia_)


@given(st.sampled_from(sorted(FORMS)), st.integers(2, 6), st.integers(0, 999))
def test_the_mean_is_the_best_centroid(form: str, num_scores: int, seed: int) -> None:
    rows = normal(7, num_scores, seed=seed)
    other = rows.mean(dim=0, keepdim=True) + normal(1, num_scores, seed=seed + 1)
    at_mean = FORMS[form](rows, rows.mean(dim=0, keepdim=True)).sum()
    assert at_mean <= FORMS[form](rows, other).sum() + 1e-9


@given(st.sampled_from(sorted(FORMS)), st.integers(0, 999))
def test_it_settles_where_no_row_would_move_and_never_above_its_start(form: str, seed: int) -> None:
    rows, start = normal(20, 4, seed=seed), normal(3, 4, seed=seed + 1)
    before = FORMS[form](rows, start).amin(dim=1).sum().item()
    found = _settle(rows, start, FORMS[form])
    assert found.objective <= before + 1e-9
    distance = FORMS[form](rows, found.centroids)
    assert torch.equal(distance.argmin(dim=1), found.assignment)


def test_distributions_of_distinct_winners_are_told_apart_by_the_max_form() -> None:
    rows = torch.eye(3, dtype=torch.float64).repeat(10, 1) + 0.05 * normal(30, 3)
    found = bregman_clustering(rows, 3, divergence)
    assert adjusted_rand_score(found.assignment, torch.arange(30) % 3) == 1.0
    assert found.objective == 0.0


def test_rows_that_no_divergence_tells_apart_do_not_break_it() -> None:
    found = bregman_clustering(torch.ones(5, 2), 3, divergence)
    assert found.objective == 0.0


@pytest.mark.parametrize(("clusters", "restarts"), [(0, 1), (6, 1), (2, 0)])
def test_what_cannot_be_is_refused(clusters: int, restarts: int) -> None:
    with pytest.raises(ValueError, match=r"ask for 1 to 5|must be 1 or more"):
        bregman_clustering(torch.ones(5, 2), clusters, divergence, restarts=restarts)
