"""A run of three epochs in a fraction of a second, and processes that are joined."""

import socket
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import Config, load_recipe, override, to_toml
from deepbregman.data import open_source
from deepbregman.runs import Run

TINY = {
    "data.image_size": 8,
    "data.holdout": 0.0,
    "training.epochs": 3,
    "training.batch_size": 32,
    "training.save_seconds": 0.0,
    "training.checkpoint_every": 2,
    "training.knn_every": 2,
    "training.health_every": 1,
    "training.tensorboard": False,
    "optimiser.warmup_epochs": 1.5,
    "encoder.projection_hidden": 16,
    "encoder.embedding": 8,
    "divergence.num_subnetworks": 4,
    "divergence.hidden": 4,
    "divergence.activation": "relu",
    "divergence.dropout": 0.2,  # draws from torch's global state
}


class RunJoined(Protocol):
    def __call__(self, *words: str, processes: int = 2) -> None: ...


@pytest.fixture(scope="session")
def run_joined(forks, tmp_path_factory) -> RunJoined:
    """Run a script with arguments in processes that are joined; all must end well."""

    def run(*words: str, processes: int = 2) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}
        shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        said = [tmp_path_factory.mktemp("joined") / "said.txt" for _ in range(processes)]
        started = []
        for rank, path in enumerate(said):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            order = {"script": True, "environment": own if processes > 1 else {}}
            with path.open("wb") as file:
                started.append(forks.start(file.fileno(), file.fileno(), *words, **order))
        codes = [forks.wait(process) for process in started]
        assert not any(codes), f"{codes}\n" + "\n".join(path.read_text() for path in said)

    return run


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory) -> Config:
    """Three epochs of two steps on 64 digits, each saved."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.npz"
    train = open_source("digits", image_size=8).train
    pixels = train.images.pixels[:64].permute(0, 2, 3, 1).numpy()
    np.savez(path, train_images=pixels, train_labels=train.labels[:64].numpy())
    return override(load_recipe("digits"), {**TINY, "data.source": str(path)})


@pytest.fixture(scope="session")
def recipe(tmp_path_factory, tiny_config) -> Path:
    """The same as a file."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(to_toml(tiny_config))
    return path


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, tiny_config) -> Run:
    return pretrain(tiny_config, run=tmp_path_factory.mktemp("runs") / "tiny")
