"""Rankings against a loop in float64, and their quality against scikit-learn and by hand."""

import math
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor

from deepbregman.commands.evaluate import evaluate
from deepbregman.config import override
from deepbregman.evaluation import retrieval
from deepbregman.evaluation.inputs import Evaluation
from deepbregman.evaluation.knn import rank_bank
from deepbregman.evaluation.options import Options
from deepbregman.evaluation.retrieval import measure_retrieval, ranking_quality
from deepbregman.method.bregman import soft_divergence

seeds = st.integers(0, 2**31 - 1)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def likeness(measure: str, query: list[float], item: list[float], smoothing: float) -> float:
    """Cosine, or -D(query || item), from the definitions and number by number."""
    if measure == "cosine":
        dot = sum(a * b for a, b in zip(query, item, strict=True))
        return dot / math.hypot(*query) / math.hypot(*item)
    if smoothing == 0.0:
        winner = item.index(max(item))
        return -(max(query) - query[winner])

    def phi(scores: list[float]) -> float:
        return smoothing * math.log(sum(math.exp(score / smoothing) for score in scores))

    slopes = [math.exp((score - phi(item)) / smoothing) for score in item]
    inner = sum(g * (a - b) for g, a, b in zip(slopes, query, item, strict=True))
    return -(phi(query) - phi(item) - inner)


CASES = [("cosine", 0.0), ("divergence", 0.0), ("divergence", 0.5)]


@pytest.mark.parametrize(("measure", "smoothing"), CASES)
@given(seed=seeds)
def test_rankings_equal_a_loop(measure, smoothing, seed):
    queries, bank = normal(seed, 4, 5), normal(seed + 1, 12, 5)
    found = rank_bank(measure, queries, bank, 12, smoothing=smoothing, seed=seed)
    for row, query in enumerate(queries.tolist()):
        expected = [likeness(measure, query, item, smoothing) for item in bank.tolist()]
        indices = found.indices[row].tolist()
        assert sorted(indices) == list(range(12))
        along = [expected[index] for index in indices]
        assert found.similarities[row].tolist() == pytest.approx(along, abs=1e-6)
        assert all(a >= b - 1e-6 for a, b in pairwise(along))


def test_the_query_is_the_first_argument():
    """D(query || item) is 1 - 0 at the item's winner; the other way round it would be 5."""
    query, item = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 5.0]])
    assert rank_bank("divergence", query, item, 1).similarities.item() == -1.0


def test_what_is_nearly_alike_is_not_ranked_by_rounding():
    """Divergences of 1e-9, below the resolution of entropies in float32."""
    query = torch.zeros(1, 10)
    bank = torch.zeros(6, 10)
    bank[:, 0] = torch.tensor([5e-4, 1e-4, 6e-4, 3e-4, 2e-4, 4e-4])
    for seed in range(5):
        found = rank_bank("divergence", query, bank, 6, smoothing=1.0, seed=seed)
        assert found.indices[0].tolist() == [1, 4, 3, 5, 0, 2]
        assert len(set(found.similarities[0].tolist())) == 6


def test_equals_are_ranked_by_the_seed_and_not_by_the_banks_order():
    query, bank = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]] * 50)
    orders = [
        tuple(rank_bank("divergence", query, bank, 50, seed=seed).indices[0].tolist())
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != tuple(range(50))


@pytest.mark.parametrize(("measure", "smoothing"), CASES[::2])
@given(seed=seeds, chunk=st.integers(1, 4))
def test_mean_average_precision_equals_scikit_learns(measure, smoothing, seed, chunk):
    """Without ties, and whatever the number of queries at a time."""
    queries, bank = normal(seed, 7, 6), normal(seed + 1, 20, 6)
    random = np.random.default_rng(seed)
    query_labels, bank_labels = random.integers(0, 4, 7), random.integers(0, 3, 20)
    expected, hits = [], []
    for query, label in zip(queries.tolist(), query_labels, strict=True):
        scores = [likeness(measure, query, item, smoothing) for item in bank.tolist()]
        relevant = bank_labels == label
        if relevant.any():  # class 3 is not in the bank
            expected.append(average_precision_score(relevant, scores))
            hits.append(relevant[np.argsort(scores)[::-1][:5]].mean())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "_ENTRIES", 20 * chunk)
        arguments = (queries, torch.from_numpy(query_labels), bank, torch.from_numpy(bank_labels))
        if not expected:
            with pytest.raises(ZeroDivisionError):
                ranking_quality(measure, *arguments, k=5, smoothing=smoothing)
            return
        found = ranking_quality(measure, *arguments, k=5, smoothing=smoothing, seed=seed)
    assert found.mean_average_precision == pytest.approx(np.mean(expected), abs=1e-9)
    assert found.precision == pytest.approx(np.mean(hits), abs=1e-9)
    assert found.num_queries == len(expected)


def test_a_small_example_by_hand():
    """Relevant at ranks 1, 3 and 4 of 5: (1/1 + 2/3 + 3/4) / 3."""
    angles = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    bank = torch.stack([angles.cos(), angles.sin()], dim=1)
    labels = torch.tensor([7, 2, 7, 7, 2])
    found = ranking_quality(
        "cosine", torch.tensor([[1.0, 0.0]]), torch.tensor([7]), bank, labels, k=4
    )
    assert found.mean_average_precision == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert found.precision == pytest.approx(3 / 4)


def test_ties_give_the_expectation_over_their_orders_in_the_mean():
    """All of the bank at divergence 0: neither the best order of equals nor the worst counts."""
    labels = torch.tensor([1, 1, 0, 0, 0])
    expected = np.mean(
        [
            np.mean([sum(order[: r + 1]) / (r + 1) for r in range(5) if order[r]])
            for order in permutations(labels.tolist())
        ]
    )
    query, bank = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]] * 5)
    found = [
        ranking_quality(
            "divergence", query, torch.tensor([1]), bank, labels, k=1, seed=seed
        ).mean_average_precision
        for seed in range(800)
    ]
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - expected) < 4 * error
    assert max(found) == 1.0
    assert min(found) < expected - 0.1


def test_a_search_over_a_bank_equals_one_of_explicit_scores(few):
    """A score for each training image, in NumPy, instead of the covariance."""
    items, asked = (part.features.representation.double().numpy() for part in (few.train, few.test))
    items, asked = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (items, asked))
    middle = items.mean(axis=0)
    items, asked = items - middle, asked - middle
    scores, queries = items @ items.T, asked @ items.T
    likenesses = queries @ scores.T / np.linalg.norm(scores, axis=1)
    labels = few.train.labels.numpy()
    expected = [
        average_precision_score(labels == label, row)
        for label, row in zip(few.test.labels.numpy(), likenesses, strict=True)
    ]
    (found,) = measure_retrieval(few.train, few.test, ("bank",), 5, smoothing=0.0, seed=0)
    assert found.variant == "divergence over a bank"
    assert found.values["mAP"] == pytest.approx(100 * np.mean(expected), abs=0.05)


def test_the_protocol_searches_the_training_images_for_each_test_image(short_run, few_digits, few):
    rows = evaluate(short_run, protocols=["retrieval"], data=few_digits, seeds=2)
    assert {(row["num_train"], row["num_test"], row["n"]) for row in rows} == {(200, 100, 1)}
    found = {(row["variant"], row["metric"]): row["value"] for row in rows}
    asked, known = few.test.features, few.train.features
    smoothing = few.config.divergence.smoothing
    likenesses = {
        "cosine": cosine_similarity(asked.representation, known.representation),
        "cosine of embeddings": cosine_similarity(asked.embedding, known.embedding),
        "divergence": -soft_divergence(asked.scores.double(), known.scores.double(), smoothing),
    }
    labels = few.train.labels.numpy()
    for name, likeness in likenesses.items():
        relevant = few.test.labels.numpy()[:, None] == labels
        pairs = [*zip(relevant, np.asarray(likeness), strict=True)]
        average = np.mean([average_precision_score(*pair) for pair in pairs])
        first = np.mean([truth[np.argsort(-row)[:10]].mean() for truth, row in pairs])
        assert found[name, "mAP"] == pytest.approx(100 * average, abs=0.01)
        assert found[name, "precision@10"] == pytest.approx(100 * first, abs=0.11)  # one hit


def test_only_the_hard_form_has_ties_for_the_seeds(short_run, few):
    evaluation = Evaluation(short_run, Options(seeds=2), "cpu")
    config = override(few.config, {"divergence.smoothing": 0.0})
    evaluation.__dict__["labelled"] = replace(few, config=config)
    rows = retrieval.retrieval(evaluation)
    assert [row["n"] for row in rows] == [1] * 6 + [2] * 2
    assert len(set(rows[-2]["values"])) == 2
