import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from deepbregman.evaluation.knn import (
    VOTE_TEMPERATURE,
    Neighbours,
    cosine_neighbours,
    cosine_to,
    knn_accuracy,
    nearest_by,
    vote,
)

NUM_CLASSES = 4


def data(seed: int, queries: int = 23, bank: int = 61, width: int = 7) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(queries, width, generator=generator),
        torch.randint(NUM_CLASSES, (queries,), generator=generator),
        torch.randn(bank, width, generator=generator),
        torch.randint(NUM_CLASSES, (bank,), generator=generator),
    )


def naive_predictions(
    queries: Tensor, bank: Tensor, bank_labels: Tensor, k: int, temperature: float
) -> list[int]:
    """The definition, in Python floats."""
    predictions = []
    for query in queries.double().tolist():
        similarities = []
        for index, entry in enumerate(bank.double().tolist()):
            dot = math.fsum(a * b for a, b in zip(query, entry, strict=True))
            norms = math.hypot(*query) * math.hypot(*entry)
            similarities.append((-dot / norms, index))
        totals = [0.0] * NUM_CLASSES
        for negative, index in sorted(similarities)[:k]:
            totals[int(bank_labels[index])] += math.exp(-negative / temperature)
        predictions.append(max(range(NUM_CLASSES), key=lambda c: totals[c]))
    return predictions


@pytest.mark.parametrize("k", [1, 2, 20, 61])
@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
def test_agrees_with_a_naive_loop_in_float64(k, temperature):
    queries, query_labels, bank, bank_labels = data(0)
    expected = naive_predictions(queries, bank, bank_labels, k, temperature)
    neighbours = cosine_neighbours(queries, bank, k)
    assert vote(neighbours, bank_labels, NUM_CLASSES, temperature=temperature).tolist() == expected
    if temperature == VOTE_TEMPERATURE:
        accuracy = knn_accuracy(queries, query_labels, bank, bank_labels, k=k)
        assert accuracy == pytest.approx(100 * np.mean(np.array(expected) == query_labels.numpy()))


@pytest.mark.parametrize("k", [1, 20, 200])
def test_agrees_with_scikit_learn_on_digits(k):
    digits = load_digits()
    features = torch.tensor(digits.data, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    reference = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.1)
    ).fit(digits.data[:1200], digits.target[:1200])
    expected = 100 * reference.score(digits.data[1200:], digits.target[1200:])
    actual = knn_accuracy(features[1200:], labels[1200:], features[:1200], labels[:1200], k=k)
    assert actual == pytest.approx(expected, abs=1e-9)
    assert 80 < actual < 99.9


def test_one_neighbour_gives_its_label():
    queries, _, bank, bank_labels = data(1)
    neighbours = cosine_neighbours(queries, bank, 1)
    similarities = torch.nn.functional.cosine_similarity(queries[:, None], bank[None], dim=2)
    assert neighbours.similarities.shape == neighbours.indices.shape == (23, 1)
    assert neighbours.indices[:, 0].equal(similarities.argmax(1))
    assert vote(neighbours, bank_labels, NUM_CLASSES).equal(bank_labels[similarities.argmax(1)])


def test_neighbours_are_descending_float32_cosines_whatever_the_input():
    queries, _, bank, _ = data(2)
    found = cosine_neighbours(1e3 * queries.double(), 1e-3 * bank.double(), 9)
    assert found.similarities.dtype == torch.float32
    exact = torch.nn.functional.cosine_similarity(queries[:, None].double(), bank[None], dim=2)
    expected = exact.sort(dim=1, descending=True)
    torch.testing.assert_close(
        found.similarities.double(), expected.values[:, :9], atol=1e-6, rtol=0
    )
    assert found.indices.equal(expected.indices[:, :9])


@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
def test_chunk_is_irrelevant_and_bounds_the_work(chunk):
    queries, _, bank, _ = data(3)
    seen: list[int] = []

    def negative_distance(part: Tensor) -> Tensor:
        seen.append(len(part))
        return -(part[:, None] - bank[None]).square().sum(2)

    found = nearest_by(negative_distance, queries, 5, chunk)
    expected = (-torch.cdist(queries, bank)).topk(5).indices
    assert found.indices.equal(expected)
    assert sum(seen) == len(queries)
    assert max(seen) == min(chunk, len(queries))
    parts = nearest_by(cosine_to(bank), queries, 5, chunk)
    assert parts.indices.equal(cosine_neighbours(queries, bank, 5).indices)


def test_equal_similarities_keep_the_lowest_indices():
    values = torch.tensor([[0.5, -0.0, 0.5, 0.0, -1.0, 0.5, 0.0, -1.0, -2.0]])
    expected = [0, 2, 5, 1, 3, 6, 4, 7, 8]
    for k in range(1, 10):
        found = nearest_by(lambda _: values, torch.zeros(1, 1), k, 1)
        assert found.indices.tolist() == [expected[:k]]
        assert found.similarities.equal(values[:, expected[:k]])


def test_a_tied_vote_goes_to_the_lowest_class():
    # Classes 3 and 1 get the same three weights in opposite orders; class 0 gets less.
    similarities = torch.tensor([[0.9, 0.9, 0.4, 0.4, 0.1, 0.1, 0.0]])
    labels = torch.tensor([3, 1, 1, 3, 3, 1, 0])
    assert vote(Neighbours(similarities, torch.arange(7)[None]), labels, 4).tolist() == [1]


def test_many_far_neighbours_outvote_a_near_one_only_at_high_temperature():
    neighbours = Neighbours(torch.tensor([[1.0, 0.7, 0.7, 0.7]]), torch.arange(4)[None])
    labels = torch.tensor([2, 0, 0, 0])
    assert vote(neighbours, labels, 3, temperature=0.1).tolist() == [2]  # 3 exp(-3) < 1
    assert vote(neighbours, labels, 3, temperature=1.0).tolist() == [0]  # 3 exp(-0.3) > 1


def test_vote_survives_extreme_similarities():
    # exp(1e4) is infinite and exp(-1e4) zero: the order must survive all the same.
    for shift in (-1e4, 1e4):
        similarities = torch.tensor([[3.0, 2.0, 2.0]]) + shift
        neighbours = Neighbours(similarities, torch.arange(3)[None])
        assert vote(neighbours, torch.tensor([1, 0, 0]), 2, temperature=0.5).tolist() == [1]


def test_one_search_serves_every_smaller_k():
    queries, _, bank, bank_labels = data(4)
    neighbours = cosine_neighbours(queries, bank, 60)
    predictions = []
    for k in (1, 5, 40):
        separate = vote(cosine_neighbours(queries, bank, k), bank_labels, NUM_CLASSES)
        predictions.append(vote(neighbours, bank_labels, NUM_CLASSES, k=k))
        assert predictions[-1].equal(separate)
    assert not predictions[0].equal(predictions[2])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), k=st.integers(1, 40))
def test_permuting_the_bank_changes_nothing(seed, k):
    queries, _, bank, bank_labels = data(seed, queries=6, bank=40, width=5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    before = cosine_neighbours(queries, bank, k)
    after = cosine_neighbours(queries, bank[order], k)
    torch.testing.assert_close(after.similarities, before.similarities, atol=1e-6, rtol=0)
    assert vote(before, bank_labels, NUM_CLASSES).equal(
        vote(after, bank_labels[order], NUM_CLASSES)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    queries, _, bank, bank_labels = data(6)
    expected = vote(cosine_neighbours(queries, bank, 20), bank_labels, NUM_CLASSES)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = cosine_neighbours(queries.cuda(), bank.cuda(), 20)
    assert vote(found, bank_labels, NUM_CLASSES).cpu().equal(expected)
    torch.testing.assert_close(
        found.similarities.cpu(), cosine_neighbours(queries, bank, 20).similarities
    )
