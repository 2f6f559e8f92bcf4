"""The supervised baseline: it learns, it is judged by its own divergence, and its folder loads."""

from pathlib import Path

import pytest
import torch

from deepbregman.config import Config, override
from deepbregman.data import Source, Split
from deepbregman.errors import UserError
from deepbregman.evaluation.features import Features
from deepbregman.evaluation.protocols import Side, Subject, evaluate, open_labelled
from deepbregman.method.model import Model
from deepbregman.runs import Run
from deepbregman.studies.deep_divergence import (
    _knn_by_divergence,
    configured,
    deep_divergence,
    deep_divergence_cell,
    judged,
)
from deepbregman.studies.divergence_learning import Form, MetricLoss
from deepbregman.training.assembly import build_objective


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
    config = override(short_config, {"optimiser.learning_rate": 5e-3, "training.batch_size": 64})
    few = Source("few digits", source.train.select(torch.arange(640)), source.test)
    found = deep_divergence(few, config, form=form, loss=loss, num_subnetworks=30, epochs=5)
    assert found.losses[-1] < 0.7 * found.losses[0]
    metrics = judged(found, few, form=form)
    assert metrics["knn, divergence, k=20"] > 40.0  # chance is 10
    assert metrics["knn, cosine, k=20"] > 70.0


def test_a_cell_is_a_run_like_any_other(
    tmp_path: Path, short_config: Config, source: Source
) -> None:
    config = override(short_config, {"training.epochs": 1, "divergence.num_subnetworks": 7})
    folder = tmp_path / "cell"
    outcome = deep_divergence_cell(
        config, "max", "triplet", folder, source=source, accelerator="cpu"
    )
    assert outcome["supervised"] is True
    assert "supervised" in outcome["series"]
    run = Run.open(folder)
    assert run.result()["study"] == outcome
    assert run.config.divergence.num_subnetworks == 7
    # The verbs that read runs find the same networks: the same features, the same accuracy.
    rows = {f"{row['protocol']}, {row['variant']}": row["value"] for row in evaluate(run, epochs=0)}
    assert rows == pytest.approx(outcome["metrics"])
    with pytest.raises(UserError, match="never overwrites"):
        deep_divergence_cell(config, "max", "triplet", folder, source=source)


def test_neighbours_are_those_of_the_form(short_config: Config) -> None:
    # Class 0 has the largest score first; by moments the query is nearest to the far, flat class 1.
    config = configured(short_config, "moment")
    bank = torch.tensor([[9.0, 0.0], [8.0, 0.0], [1.0, 1.1], [1.2, 1.3]])
    query = torch.tensor([[1.3, 1.2]])
    labels, truth = torch.tensor([0, 0, 1, 1]), torch.tensor([1])
    model = build_objective(config, (0.0,) * 3, (1.0,) * 3).model
    subject = subject_of(model, config, (bank, labels), (query, truth))
    assert _knn_by_divergence(subject, "moment") == {"knn, divergence, k=4": 100.0}
    assert _knn_by_divergence(subject, "max") == {"knn, divergence, k=4": 0.0}


def subject_of(
    model: Model,
    config: Config,
    bank: tuple[torch.Tensor, torch.Tensor],
    queries: tuple[torch.Tensor, torch.Tensor],
) -> Subject:
    def side(part: tuple[torch.Tensor, torch.Tensor]) -> Side:
        return Side(None, part[1], Features(part[0], part[0]))  # type: ignore[arg-type]

    return Subject(model, config, side(bank), side(queries), 2, 0, 0)


def test_images_without_labels_are_refused(short_config: Config, source: Source) -> None:
    with pytest.raises(UserError, match="supervised; give a labelled source"):
        deep_divergence(Source("bare", Split(source.train.images)), short_config)
