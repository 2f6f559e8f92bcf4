"""Methods that ask for labels, for places in the dataset and for randomness get the right ones."""

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from deepbregman import load_encoder
from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, load_recipe, override
from deepbregman.data import ArrayImages, Source, Split
from deepbregman.errors import UserError
from deepbregman.objectives import Samples
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.faults import Interrupted
from deepbregman.training.loop import Pretraining
from deepbregman.training.processes import launch

from .toy import InformedSettings

SMALL = {
    "objective.name": InformedSettings.name,
    "data.holdout": 0.0,
    "training.epochs": 2,
    "optimiser.warmup_epochs": 0.5,
    "training.batch_size": 8,
    "training.knn_every": 0,
    "training.tensorboard": False,
    "encoder.projection_hidden": 12,
    "encoder.embedding": 6,
    "divergence.weight": 0.0,
}


def configure(**changes: Any) -> Config:
    return override(load_recipe("digits"), {**SMALL, **changes})


def images(count: int) -> ArrayImages:
    """Image i is of one shade, i."""
    shades = torch.arange(count, dtype=torch.uint8)
    return ArrayImages(shades.view(-1, 1, 1, 1).repeat(1, 3, 8, 8))


def labels_of(indices: Tensor) -> Tensor:
    return indices * 7 % 5


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_a_batch_comes_with_its_places_and_labels(resident, tmp_path):
    config = configure(**{"data.resident": resident})
    job = Pretraining(
        config, images(27), launch("cpu"), tmp_path / "run", labels=labels_of(torch.arange(27))
    )
    for draw, batch in enumerate(job.feed(0, 1)):  # over the end of an epoch
        samples = job._collect_samples(batch, draw)
        assert samples.indices is not None
        assert torch.equal(samples.indices, batch.images[:, 0, 0, 0].long())
        assert samples.labels is not None
        assert torch.equal(samples.labels, labels_of(samples.indices))
        assert draw < 5
    assert job.num_classes == 5


def test_the_draws_depend_on_the_step_alone(tmp_path):
    job = Pretraining(
        configure(), images(27), launch("cpu"), tmp_path / "run", labels=torch.zeros(27).long()
    )
    objective = job.step_module.objective
    first, second, again = (job.share.draw_for(objective, draw) for draw in (0, 1, 0))
    assert first is not None
    assert second is not None
    assert again is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_method_that_asks_for_nothing_gets_nothing(tmp_path):
    config = configure(**{"objective.name": "simclr"})
    job = Pretraining(config, images(27), launch("cpu"), tmp_path / "run")
    (batch,) = islice(job.feed(0, 0), 1)
    assert job._collect_samples(batch, 0) == Samples(None, None, None, 0)


def source(labelled: bool, unlabelled: int = 0) -> Source:
    labels = labels_of(torch.arange(27)) if labelled else None
    rest = Split(images(unlabelled)) if unlabelled else None
    return Source("greys", Split(images(27), labels), unlabelled=rest)


def test_without_labels_it_is_refused_by_name(tmp_path):
    words = r"objective.name is 'informed': it learns from labels, and greys has none; give"
    with pytest.raises(UserError, match=words):
        pretrain(configure(), run=tmp_path / "run", source=source(False))
    assert not (tmp_path / "run").exists()


def test_labels_train_on_labelled_images_alone(tmp_path):
    for name, count in (("informed", 27), ("simclr", 37)):
        config = configure(**{"objective.name": name, "training.epochs": 1})
        data = source(True, unlabelled=10)
        run = pretrain(config, run=tmp_path / name, source=data)
        assert checkpoints.load(run.last_checkpoint)["num_images"] == count


def test_it_goes_on_to_the_bit_and_loads(tmp_path, stop_after):
    config = configure(**{"divergence.weight": 1.0})
    whole = pretrain(config, run=tmp_path / "whole", source=source(True))
    with stop_after(2), pytest.raises(Interrupted):
        pretrain(config, run=tmp_path / "run", source=source(True))
    resumed = resume(tmp_path / "run", source=source(True))
    found, expected = (checkpoints.load(run.last_checkpoint) for run in (resumed, whole))
    assert found["objective"]["memory"].shape == (27, 6)
    for name, tensor in expected["objective"].items():
        assert torch.equal(found["objective"][name], tensor), name
    trained = checkpoints.load_trained(Run.open(whole.path))
    for name, tensor in trained.model.encoder.state_dict().items():
        assert torch.equal(load_encoder(whole.path).state_dict()[name], tensor)
