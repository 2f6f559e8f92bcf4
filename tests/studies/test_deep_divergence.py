"""The supervised baseline: it learns, it is judged by its own divergence, and its folder loads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepbregman.commands.evaluate import evaluate
from deepbregman.config import Config, override
from deepbregman.data import Source, Split
from deepbregman.errors import UserError
from deepbregman.evaluation.features import Features
from deepbregman.evaluation.inputs import open_labelled
from deepbregman.evaluation.knn import knn_by_divergence
from deepbregman.runs import Run
from deepbregman.studies.deep_divergence import (
    baseline_config,
    evaluate_baseline,
    train_deep_divergence,
)
from deepbregman.studies.definition import Form, MetricLoss
from deepbregman.studies.engine import EvaluationPlan, Trial, run_trial
from deepbregman.studies.plane import FORMS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(short_config: Config) -> Source:
    return open_labelled(short_config)


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        ("max", "triplet"),
        pytest.param("max", "contrastive", marks=pytest.mark.slow),
        pytest.param("moment", "contrastive", marks=pytest.mark.slow),
        pytest.param("smooth", "triplet", marks=pytest.mark.slow),
    ],
)
def test_it_learns_the_labels(
    form: Form, loss: MetricLoss, short_config: Config, source: Source
) -> None:
    changes: dict[str, Any] = {"optimiser.learning_rate": 5e-3, "training.batch_size": 64}
    changes |= {"divergence.num_subnetworks": 30, "training.epochs": 4}
    config = override(short_config, changes)
    few = Source("few digits", source.train.select(torch.arange(384)), source.test)
    found = train_deep_divergence(few, baseline_config(config, form), form, loss, CPU)
    assert found.losses[-1] < 0.7 * found.losses[0]
    metrics = evaluate_baseline(found, few, form, CPU)
    assert metrics["knn, divergence, k=20"] > 40.0  # chance is 10
    assert metrics["knn, cosine, k=20"] > 70.0


def test_a_trial_is_a_run_like_any_other(
    tmp_path: Path, short_config: Config, few_digits: str
) -> None:
    changes = {"training.epochs": 1, "divergence.num_subnetworks": 7, "data.source": few_digits}
    config = override(short_config, {**changes, "training.batch_size": 64})
    source, folder = open_labelled(config), tmp_path / "trial"
    how = EvaluationPlan("test", keep_checkpoints=True, accelerator="cpu")
    outcome = run_trial(Trial(folder, config, ("max", "triplet")), source, how)
    assert outcome["supervised"] is True
    run = Run.open(folder)
    assert run.result()["study"] == outcome
    assert run.config.divergence.num_subnetworks == 7
    # The verbs that read runs find the same networks: the same features, the same accuracy.
    rows = {
        f"{row['protocol']}, {row['variant']}": row["value"]
        for row in evaluate(run, epochs=0)
        if row["metric"] == "top1"
    }
    assert rows == pytest.approx(outcome["metrics"])


def test_a_loss_that_is_not_finite_ends_the_trial(
    tmp_path: Path, short_config: Config, source: Source
) -> None:
    changes = {"optimiser.learning_rate": 1e30, "training.epochs": 2}
    few = Source("few digits", source.train.select(torch.arange(256)), source.test)
    trial = Trial(tmp_path / "cell", override(short_config, changes), ("moment", "contrastive"))
    outcome = run_trial(trial, few, EvaluationPlan("holdout", accelerator="cpu"))
    assert (outcome["state"], outcome["metrics"]) == ("diverged", {})
    assert outcome["judge"] == "holdout"
    assert "lower optimiser.learning_rate" in outcome["why"]
    assert Run.open(tmp_path / "cell").result()["study"] == outcome


def test_neighbours_are_those_of_the_form(short_config: Config) -> None:
    # Class 0 has the largest score first, as the query; by moments class 1 is nearest to it.
    bank = torch.tensor([[9.0, 0.0], [8.0, 0.0], [1.0, 1.1], [1.2, 1.3]])
    train, test = torch.tensor([0, 0, 1, 1]), torch.tensor([1])
    subject: Any = SimpleNamespace(
        train=SimpleNamespace(labels=train, features=Features(bank, bank), num_replaced=0),
        test=SimpleNamespace(
            labels=test, features=Features(bank[:1], torch.tensor([[1.3, 1.2]])), num_replaced=0
        ),
        config=baseline_config(short_config, "moment"),
        model=SimpleNamespace(sigma=None),
        counts=(4, 1, 0),
        num_classes=2,
        measure=lambda predicted: {"top1": 100.0 * (predicted == test).double().mean().item()},
    )
    (moment,) = knn_by_divergence(subject, 0, FORMS["moment"])
    assert moment.values == {"top1": 100.0}
    assert knn_by_divergence(subject, 0, FORMS["max"])[0].values == {"top1": 0.0}
    assert knn_by_divergence(subject, 0)[0].values == {"top1": 0.0}  # the configuration's: Eq. 6


def test_images_without_labels_are_refused(short_config: Config, source: Source) -> None:
    bare = Source("bare", Split(source.train.images))
    with pytest.raises(UserError, match="supervised; give a labelled source"):
        train_deep_divergence(bare, short_config, "max", "triplet", CPU)


def test_two_runs_of_one_seed_are_the_same_with_dropout(
    short_config: Config, source: Source
) -> None:
    changes = {"divergence.dropout": 0.5, "divergence.activation": "relu", "training.epochs": 1}
    config = override(short_config, changes)
    few = Source("few digits", source.train.select(torch.arange(256)), source.test)
    first, second = (
        train_deep_divergence(few, baseline_config(config, "max"), "max", "triplet", CPU).losses
        for _ in range(2)
    )
    assert first == second
