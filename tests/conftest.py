"""What several test modules share: one short run on digits, made once."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from deepbregman.config import Config, load_recipe, override
from deepbregman.runs import Run
from deepbregman.studies.pretraining import pretrain

torch.set_num_threads(2)
settings.register_profile("fast", max_examples=40, deadline=None)
settings.register_profile(
    "shared", parent=settings.get_profile("fast"), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

SHORT: Mapping[str, Any] = {
    "training.epochs": 2,
    "training.batch_size": 128,
    "training.knn_every": 1,
    "training.tensorboard": False,
    "encoder.projection_hidden": 32,
    "encoder.embedding": 16,
    "divergence.num_subnetworks": 10,
    "divergence.hidden": 8,
}


@pytest.fixture(scope="session")
def short_config() -> Config:
    return override(load_recipe("digits"), SHORT)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory, short_config: Config) -> Run:
    return pretrain(short_config, run=tmp_path_factory.mktemp("runs") / "short", accelerator="cpu")
