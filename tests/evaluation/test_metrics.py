"""Accuracies against scikit-learn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, recall_score, top_k_accuracy_score

from deepbregman.evaluation.results import balanced_accuracy, measure_accuracies, top_k_accuracy


@given(st.integers(0, 1000), st.integers(6, 12), st.integers(1, 5))
def test_top_k(seed, num_classes, k):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(60, num_classes, generator=generator)
    labels = torch.randint(num_classes, (60,), generator=generator)
    expected = top_k_accuracy_score(labels, logits.numpy(), k=k, labels=range(num_classes))
    assert top_k_accuracy(logits, labels, k) == pytest.approx(100 * expected)


@given(st.integers(0, 1000))
def test_balanced_where_every_class_occurs(seed):
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(5, (40,), generator=generator).square() // 5  # uneven
    labels = torch.cat([few, torch.arange(4)])
    predicted = torch.randint(4, (44,), generator=generator)
    expected = balanced_accuracy_score(labels, predicted)
    assert balanced_accuracy(predicted, labels) == pytest.approx(100 * expected)


def test_balanced_leaves_absent_classes_out():
    labels, predicted = torch.tensor([0, 0, 0, 5]), torch.tensor([0, 0, 2, 5])
    found = recall_score(labels, predicted, labels=[0, 5], average="macro")
    assert balanced_accuracy(predicted, labels) == pytest.approx(100 * found)


def test_which_metrics_there_are():
    logits = torch.eye(6)
    labels, predicted = torch.tensor([0, 1, 2, 3, 4, 4]), logits.argmax(1)
    assert measure_accuracies(labels, predicted=predicted) == {"top1": pytest.approx(500 / 6)}
    assert set(measure_accuracies(labels, predicted=predicted, logits=logits)) == {"top1", "top5"}
    five = logits[:, :5]
    assert set(measure_accuracies(labels, predicted=predicted, logits=five)) == {"top1"}
    found = measure_accuracies(labels, predicted=predicted, logits=logits, balanced=True)
    assert list(found) == ["top1", "top5", "balanced"]
    assert found["balanced"] == pytest.approx(90.0)


def test_top_5_is_five():
    """The fifth largest of six counts, the sixth does not."""
    logits = torch.arange(6.0).repeat(2, 1)
    found = measure_accuracies(torch.tensor([1, 0]), predicted=logits.argmax(1), logits=logits)
    assert found == {"top1": 0.0, "top5": 50.0}
