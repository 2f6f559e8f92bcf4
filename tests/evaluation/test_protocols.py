"""Whole protocols: what they measure on features whose answer is known, and what they leave."""

from dataclasses import replace

import pytest
import torch

from deepbregman.config import override
from deepbregman.data import ArrayImages, Source, Split
from deepbregman.errors import UserError
from deepbregman.evaluation.frozen_protocols import knn, linear
from deepbregman.evaluation.protocols import evaluate
from deepbregman.evaluation.subject import Subject, open_labelled
from deepbregman.method.bregman import divergence, soft_divergence
from deepbregman.runs import Run
from deepbregman.training.checkpoints import load_model
from deepbregman.training.seeds import epoch_order


@pytest.fixture(scope="module")
def subject(short_run: Run) -> Subject:
    model, config = load_model(short_run)
    return Subject(model, config, open_labelled(config), torch.device("cpu"))


def of(subject: Subject, train: Split | None = None, test: Split | None = None) -> Subject:
    """The same networks, judged by other images or labels."""
    source = subject.source
    return replace(
        subject, source=replace(source, train=train or source.train, test=test or source.test)
    )


def test_an_untrained_encoder_scores_less(short_run: Run, subject: Subject) -> None:
    """Loading is real: the run's weights do better than fresh ones of the same shape."""
    from deepbregman.training.assembly import build_model

    fresh = build_model(subject.config).eval()
    trained = {row["variant"]: row["value"] for row in knn(subject, seed=0)}
    other = replace(subject, model=fresh)
    untrained = {row["variant"]: row["value"] for row in knn(other, seed=0)}
    assert trained["divergence, k=20"] > untrained["divergence, k=20"]


@pytest.mark.parametrize("smoothing", [0.0, 1.0])
def test_knn_by_divergence_equals_a_loop(subject: Subject, smoothing: float) -> None:
    """The nearest neighbours of each query by D(query || bank), votes weighted by psi."""
    config = override(subject.config, {"divergence.smoothing": smoothing})
    bank = subject.source.train.select(torch.arange(1297)[::21][:60])
    few = replace(of(subject, train=bank), config=config)
    found = {row["variant"]: row["value"] for row in knn(few, seed=0)}
    assert few.train.features.scores is not None
    assert few.test.features.scores is not None
    form = (lambda p, q: soft_divergence(p, q, smoothing)) if smoothing else divergence
    distance = form(few.test.features.scores, few.train.features.scores)
    shuffled = epoch_order(60, 0, 0)  # decides among equals, of which the hard form has many
    correct = 0
    for row, label in zip(distance, few.test.labels, strict=True):
        nearest = shuffled[row[shuffled].argsort(stable=True)[:20]]
        votes = torch.zeros(few.num_classes, dtype=torch.float64)
        for index in nearest:
            psi = torch.exp(-row[index].double() / (2 * config.divergence.sigma**2))
            votes[few.train.labels[index]] += torch.exp(psi / 0.1)
        correct += int(votes.argmax() == label)
    expected = 100 * correct / len(few.test.labels)
    assert found["divergence, k=20"] == pytest.approx(expected, abs=0.41)  # two queries of 500
    assert "cosine, k=200" not in found  # the bank has 60


def test_linear_is_above_chance_and_reports_what_it_chose(subject: Subject) -> None:
    cached, augmented = linear(subject, seed=0, epochs=2)
    assert cached["value"] > 90.0
    assert cached["l2"] in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    assert augmented["value"] > 30.0
    assert augmented["epochs"] == 2


def test_evaluation_leaves_the_networks_alone(subject: Subject) -> None:
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    knn(subject, seed=0)
    linear(subject, seed=0, epochs=1)
    assert all(
        torch.equal(value, before[name]) for name, value in subject.model.state_dict().items()
    )
    assert not any(part.training for part in subject.model.modules())


def test_rows_replace_older_rows_of_their_kind(short_run: Run) -> None:
    first = evaluate(short_run, protocols=["knn"], accelerator="cpu")
    again = evaluate(short_run, protocols=["knn"], accelerator="cpu")
    kept = [row for row in short_run.result()["evaluations"] if row["protocol"] == "knn"]
    assert kept == again
    assert [row["value"] for row in first] == [row["value"] for row in again]
    assert short_run.result()["pretrain"]["epoch"] == 2  # and nothing else is lost


def test_test_labels_do_not_influence_the_classifier(subject: Subject) -> None:
    """Shuffled test labels change the score, not what was chosen on the training split."""
    test = subject.source.test
    assert test is not None
    assert test.labels is not None
    shuffled = of(subject, test=replace(test, labels=test.labels.roll(7)))
    (honest,), (other,) = linear(subject, 0, epochs=0), linear(shuffled, 0, epochs=0)
    assert honest["l2"] == other["l2"]
    assert other["value"] < 40.0


def test_unknown_protocol_and_negative_epochs_are_refused(short_run: Run) -> None:
    with pytest.raises(UserError, match="did you mean 'linear'"):
        evaluate(short_run, protocols=["liner"])
    with pytest.raises(UserError, match="epochs is -1"):
        evaluate(short_run, epochs=-1)


def test_labels_are_needed(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Source("bare", Split(ArrayImages(torch.zeros(3, 3, 8, 8, dtype=torch.uint8))))
    monkeypatch.setattr("deepbregman.evaluation.subject.open_data", lambda *_: bare)
    with pytest.raises(UserError, match="has no labels"):
        open_labelled(subject.config)


def test_rows_say_how_far_the_run_was_and_older_epochs_leave(short_run: Run) -> None:
    rows = evaluate(short_run, protocols=["knn"], accelerator="cpu")
    assert {(row["epoch"], row["epochs"]) for row in rows} == {(2.0, 2)}
    stale = {**rows[0], "protocol": "linear", "epoch": 1.0}
    short_run.add_result(evaluations=[stale])
    evaluate(short_run, protocols=["knn"], accelerator="cpu")
    assert all(row["epoch"] == 2.0 for row in short_run.result()["evaluations"])


def test_no_protocol_is_refused(short_run: Run) -> None:
    with pytest.raises(UserError, match="no protocol"):
        evaluate(short_run, protocols=[])
