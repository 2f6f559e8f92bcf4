import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepbregman.data import labelled_subset, stratified_split
from deepbregman.errors import UserError

label_lists = st.lists(st.integers(0, 4), min_size=0, max_size=60)
percents = st.integers(0, 99)


@settings(max_examples=200, deadline=None)
@given(labels=label_lists, percent=percents, seed=st.integers(0, 100), labelled=st.booleans())
def test_split_is_complete_disjoint_sorted_and_repeatable(
    labels: list[int], percent: int, seed: int, labelled: bool
) -> None:
    given_labels = torch.tensor(labels, dtype=torch.int64) if labelled else None
    kept, held = stratified_split(given_labels, len(labels), percent / 100, seed)
    assert sorted(kept.tolist() + held.tolist()) == list(range(len(labels)))
    assert kept.tolist() == sorted(kept.tolist())
    assert held.tolist() == sorted(held.tolist())
    assert kept.dtype == held.dtype == torch.int64
    again = stratified_split(given_labels, len(labels), percent / 100, seed)
    assert torch.equal(held, again[1])
    if percent == 0:
        assert len(held) == 0


@settings(max_examples=200, deadline=None)
@given(labels=label_lists, percent=st.integers(1, 99))
def test_every_class_gets_its_share_rounded_one_way_or_the_other(
    labels: list[int], percent: int
) -> None:
    _, held = stratified_split(
        torch.tensor(labels, dtype=torch.int64), len(labels), percent / 100, 0
    )
    held_counts = Counter(labels[i] for i in held.tolist())
    for label, count in Counter(labels).items():
        share = Fraction(count * percent, 100)
        assert held_counts[label] in (math.floor(share), math.ceil(share))
        if count >= 2:
            assert 1 <= held_counts[label] <= count - 1
        else:
            assert held_counts[label] == 0


def test_total_is_exact_and_largest_remainders_come_first() -> None:
    # Shares of a fifth: 1.4, 2.2, 2.6, so 1 + 2 + 2 and one more for the largest remainder.
    labels = torch.tensor([0] * 7 + [1] * 11 + [2] * 13)
    _, held = stratified_split(labels, 31, 0.2, 3)
    assert torch.bincount(labels[held]).tolist() == [1, 2, 3]


def test_decimal_fractions_are_meant_exactly() -> None:
    assert 0.29 * 100 < 29  # in floating point
    assert len(stratified_split(torch.zeros(100, dtype=torch.int64), 100, 0.29, 0)[1]) == 29
    assert len(stratified_split(None, 100, 0.29, 0)[1]) == 29


def test_seeds_differ_and_the_order_of_the_items_does_not_matter_for_shares() -> None:
    labels = torch.arange(1000) % 7
    splits = [stratified_split(labels, 1000, 0.1, seed)[1] for seed in range(5)]
    assert len({tuple(held.tolist()) for held in splits}) == 5
    assert len({tuple(stratified_split(None, 1000, 0.1, s)[1].tolist()) for s in range(5)}) == 5


def test_split_is_the_one_it_has_always_been() -> None:
    # Drawn from the frozen generator by hand: numpy.random.RandomState(0).permutation(10)[:3].
    assert stratified_split(None, 10, 0.3, 0)[1].tolist() == [2, 4, 8]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan")])
def test_fraction_outside_its_range(fraction: float) -> None:
    with pytest.raises(UserError, match=f"held-out fraction {fraction}"):
        stratified_split(None, 10, fraction, 0)


def test_labels_of_another_length() -> None:
    with pytest.raises(UserError, match="10 items"):
        stratified_split(torch.zeros(9, dtype=torch.int64), 10, 0.1, 0)


@settings(max_examples=100, deadline=None)
@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=60), seed=st.integers(0, 50))
def test_labelled_subset_takes_the_same_number_of_each(labels: list[int], seed: int) -> None:
    counts = Counter(labels)
    per_class = min(counts.values())
    chosen = labelled_subset(torch.tensor(labels), per_class, seed).tolist()
    assert Counter(labels[i] for i in chosen) == dict.fromkeys(counts, per_class)
    assert chosen == sorted(set(chosen))
    assert chosen == labelled_subset(torch.tensor(labels), per_class, seed).tolist()


def test_labelled_subset_differs_by_seed_and_refuses_too_many() -> None:
    labels = torch.arange(300) % 3
    assert not torch.equal(labelled_subset(labels, 10, 0), labelled_subset(labels, 10, 1))
    with pytest.raises(UserError, match=r"per class 4: class 1 has only 2; ask for at most 2"):
        labelled_subset(torch.tensor([0] * 9 + [1] * 2), 4, 0)
    with pytest.raises(UserError, match="per class 0: must be at least 1"):
        labelled_subset(labels, 0, 0)
