import math
from collections import Counter
from fractions import Fraction

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepbregman.data import grouped_split, stratified_split

label_lists = st.lists(st.integers(0, 4), min_size=0, max_size=60)
percents = st.integers(0, 99)


@settings(max_examples=200, deadline=None)
@given(labels=label_lists, percent=percents, seed=st.integers(0, 100), labelled=st.booleans())
def test_split_is_complete_disjoint_sorted_and_repeatable(labels, percent, seed, labelled):
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
@example(labels=[0, 1, 2, 3, 4, *[5] * 10], percent=20)  # one more, and no class that can give it
def test_every_class_gets_its_share_rounded_one_way_or_the_other(labels, percent):
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


def test_total_is_exact_and_largest_remainders_come_first():
    # Shares of a fifth: 1.4, 2.2, 2.6, so 1 + 2 + 2 and one more for the largest remainder.
    labels = torch.tensor([0] * 7 + [1] * 11 + [2] * 13)
    _, held = stratified_split(labels, 31, 0.2, 3)
    assert torch.bincount(labels[held]).tolist() == [1, 2, 3]
    labels = torch.tensor([0] * 7 + [1] * 7)  # a fifth of 14 is 2.8, which is rounded
    assert torch.bincount(labels[stratified_split(labels, 14, 0.2, 3)[1]]).tolist() == [2, 1]


def test_decimal_fractions_are_meant_exactly():
    assert 0.29 * 100 < 29  # in floating point
    assert len(stratified_split(torch.zeros(100, dtype=torch.int64), 100, 0.29, 0)[1]) == 29
    assert len(stratified_split(None, 100, 0.29, 0)[1]) == 29


def test_seeds_differ_and_the_order_of_the_items_does_not_matter_for_shares():
    labels = torch.arange(1000) % 7
    splits = [stratified_split(labels, 1000, 0.1, seed)[1] for seed in range(5)]
    assert len({tuple(held.tolist()) for held in splits}) == 5
    assert len({tuple(stratified_split(None, 1000, 0.1, s)[1].tolist()) for s in range(5)}) == 5


def test_split_is_the_one_it_has_always_been():
    # Drawn from the frozen generator by hand: numpy.random.RandomState(0).permutation(10)[:3].
    assert stratified_split(None, 10, 0.3, 0)[1].tolist() == [2, 4, 8]


# Groups as lesions are: each of one class, of one to six images; its place says which it is.
lesions = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=40)


def _expand(groups: list[tuple[int, int]], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the label and the group of every image, in a random order."""
    labels = torch.tensor([label for label, size in groups for _ in range(size)])
    members = torch.tensor([group for group, (_, size) in enumerate(groups) for _ in range(size)])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return labels[order], members[order] * 7 - 3  # numbers of groups need not be 0, 1, 2


@settings(max_examples=200, deadline=None)
@given(groups=lesions, percent=st.integers(1, 99), seed=st.integers(0, 1000))
def test_no_group_is_divided_and_every_class_keeps_its_share(groups, percent, seed):
    labels, members = _expand(groups, seed)
    kept, held = grouped_split(labels, members, percent / 100, seed)
    assert sorted(kept.tolist() + held.tolist()) == list(range(len(labels)))
    assert held.tolist() == sorted(held.tolist())
    assert not set(members[kept].tolist()) & set(members[held].tolist())
    assert torch.equal(grouped_split(labels, members, percent / 100, seed)[1], held)
    for label in set(labels.tolist()):
        sizes = [size for kind, size in groups if kind == label]
        num_held = int((labels[held] == label).sum())
        if len(sizes) == 1:
            assert num_held == 0
        else:
            assert 0 < num_held < sum(sizes)
            # The quota itself is within one of the share; a group more or less, beyond that.
            assert abs(num_held - sum(sizes) * percent / 100) <= max(sizes) + 1


@settings(max_examples=50, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    percent=st.integers(1, 99),
    seed=st.integers(0, 100),
)
def test_groups_of_one_are_split_like_items(labels, percent, seed):
    given_labels = torch.tensor(labels)
    _, held = grouped_split(given_labels, torch.arange(len(labels)), percent / 100, seed)
    _, expected = stratified_split(given_labels, len(labels), percent / 100, seed)
    assert Counter(given_labels[held].tolist()) == Counter(given_labels[expected].tolist())


def test_the_share_is_close_on_a_set_like_isic():
    """Many small groups: within half a group of a fifth for each class."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 6, (3000,), generator=generator).tolist()
    labels, members = _expand([(i % 7, size) for i, size in enumerate(sizes)], 0)
    _, held = grouped_split(labels, members, 0.2, 0)
    shares = torch.bincount(labels[held]) - 0.2 * torch.bincount(labels)
    assert shares.abs().max() <= 3.5
    others = [grouped_split(labels, members, 0.2, seed)[1] for seed in (1, 2)]
    assert all(other.tolist() != held.tolist() for other in others)


def test_a_group_of_several_classes_is_not_divided_either():
    labels = torch.tensor([0, 1, 1, 0, 0, 1] * 10)
    members = torch.arange(60) // 3
    kept, held = grouped_split(labels, members, 0.3, 0)
    assert not set(members[kept].tolist()) & set(members[held].tolist())
    assert abs(len(held) - 18) <= 3
