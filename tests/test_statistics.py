"""Mean, deviation and intervals against numpy, scipy and printed tables."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from deepbregman.statistics import (
    format_difference,
    format_spread,
    format_summary,
    interval_over_images,
    summarise,
    summarise_pairs,
)

accuracies = st.lists(
    st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0)), min_size=2, max_size=9
)


def test_mean_and_deviation_are_those_of_numpy():
    values = [90.1, 91.7, 88.8]
    summary = summarise(values)
    assert summary["mean"] == pytest.approx(np.mean(values), rel=1e-12)
    assert summary["deviation"] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert summarise([90.0]) == {"mean": 90.0, "deviation": None, "n": 1}


@given(accuracies)
def test_paired_differences_are_those_of_scipy(values):
    mine, base = (dict(enumerate(column)) for column in zip(*values, strict=True))
    summary = summarise_pairs(mine, base)
    changes = [a - b for a, b in values]
    mean = sum(changes) / len(changes)
    variance = sum((change - mean) ** 2 for change in changes) / (len(changes) - 1)
    assert summary["n"] == len(values)
    assert summary["mean"] == pytest.approx(mean, abs=1e-9)
    assert summary["deviation"] == pytest.approx(math.sqrt(variance), abs=1e-9)
    if variance > 1e-12:  # scipy warns of a point otherwise
        interval = stats.ttest_rel(list(mine.values()), list(base.values())).confidence_interval()
        assert summary["interval"] == pytest.approx([interval.low, interval.high], abs=1e-7)
    low, high = summary["interval"]
    assert low <= summary["mean"] <= high


def test_only_common_seeds_are_paired():
    summary = summarise_pairs({2: 90.0, 0: 80.0, 5: 1.0}, {0: 79.0, 2: 91.0, 9: 3.0})
    assert (summary["mean"], summary["n"]) == (0.0, 2)
    expected = stats.ttest_rel([90.0, 80.0], [91.0, 79.0]).confidence_interval()
    assert summary["interval"] == pytest.approx(list(expected))  # of two, though each has three
    one = summarise_pairs({0: 80.0}, {0: 79.5})
    assert one == {"mean": 0.5, "deviation": None, "n": 1, "interval": None}
    assert summarise_pairs({0: 1.0}, {1: 1.0}) is None


def test_how_summaries_are_written():
    assert format_spread(91.25, None, digits=1) == "91.2"
    assert format_summary({"mean": 1.0, "deviation": 0.5, "n": 2}) == "1.00 ± 0.50 (n=2)"
    change = {"mean": -0.001, "deviation": 1.0, "n": 3, "interval": [-2.0, 2.0]}
    assert format_difference(change) == "+0.00 ± 1.00 [-2.00, +2.00] (n=3)"


@pytest.mark.parametrize("count", [2, 50])
def test_one_seed_leaves_the_interval_over_images(count):
    changes = np.random.default_rng(0).integers(-1, 2, count).astype(float)
    expected = stats.t.interval(0.95, count - 1, changes.mean(), stats.sem(changes))
    assert interval_over_images([changes.tolist()]) == pytest.approx(list(expected))


def test_images_that_all_change_alike_leave_the_interval_over_seeds():
    per_seed = [0.1, 0.3, 0.35]
    found = interval_over_images([[value] * 20 for value in per_seed])
    paired = summarise_pairs(dict(enumerate(per_seed)), dict.fromkeys(range(3), 0.0))
    assert found == pytest.approx(paired["interval"])
    assert interval_over_images([[0.5, 0.5], [0.5, 0.5]]) == [0.5, 0.5]
    # In the mean over the seeds all images change alike here, too, and all seeds have one mean.
    assert interval_over_images([[0.0, 1.0], [1.0, 0.0]]) == [0.5, 0.5]


def test_classes_count_alike_whatever_their_size():
    """Of two classes, the variance of the mean is a quarter of the sum of the variances."""
    first, second = np.array([1.0, 0, 0, 1, 0, 1]), np.array([0.0, -1, 1])
    low, high = interval_over_images([[*first, *second]], [0] * 6 + [1] * 3)
    parts = [first.var(ddof=1) / 6 / 4, second.var(ddof=1) / 3 / 4]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 5 + parts[1] ** 2 / 2)
    assert (low + high) / 2 == pytest.approx(0.25)
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts)))


def test_the_interval_holds_the_truth_for_other_seeds_and_images():
    """Drawn anew 400 times: that over seeds alone does not, where images differ much."""
    random, held, held_by_seeds = np.random.default_rng(1), 0, 0
    for _ in range(400):
        seeds, images = 0.02 * random.standard_normal(3), random.standard_normal(100)
        table = seeds[:, None] + 0.5 * images + 0.2 * random.standard_normal((3, 100))
        low, high = interval_over_images(table.tolist())
        held += low <= 0.0 <= high
        means = dict(enumerate(table.mean(axis=1)))
        paired = summarise_pairs(means, dict.fromkeys(range(3), 0.0))
        held_by_seeds += paired["interval"][0] <= 0.0 <= paired["interval"][1]
    assert held >= 0.93 * 400
    assert held_by_seeds < 0.9 * 400


def test_the_interval_is_rather_too_wide_where_a_seed_changes_single_images():
    """Seeds do nothing but that here: with S seeds the variance is twice the true one."""
    random, held = np.random.default_rng(2), 0
    for _ in range(1000):
        low, high = interval_over_images(random.standard_normal((3, 100)))
        held += low <= 0.0 <= high
    assert held / 1000 == pytest.approx(0.99, abs=0.01)


@pytest.mark.parametrize(("num_seeds", "share"), [(2, 0.88), (3, 0.92)])
def test_the_interval_is_too_narrow_where_few_seeds_differ_far_more_than_images(num_seeds, share):
    """The variance over seeds is five times that over images: docs/results.md names the shares."""
    random, held = np.random.default_rng(0), 0
    for _ in range(2000):
        seeds = math.sqrt(5 * num_seeds / 100) * random.standard_normal((num_seeds, 1))
        low, high = interval_over_images(seeds + random.standard_normal(100))
        held += low <= 0.0 <= high
    assert held / 2000 == pytest.approx(share, abs=0.01)
