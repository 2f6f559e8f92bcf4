"""Settings that train few digits in a moment, and what studies leave."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepbregman.data import Source
from deepbregman.evaluation import linear

TINY = (
    "training.batch_size=64",
    "training.knn_every=1",
    "training.tensorboard=false",
    "optimiser.warmup_epochs=0.5",
    "encoder.projection_hidden=16",
    "encoder.embedding=8",
    "divergence.num_subnetworks=6",
    "divergence.hidden=4",
)
Record = dict[str, Any]


def read(folder: Path) -> Record:
    """Read the results of a study."""
    record: Record = json.loads((folder / "results.json").read_text())
    return record


@pytest.fixture
def tiny(few_digits) -> list[str]:
    """Options that make any study tiny."""
    return [
        *("--recipe", "digits", "--data", few_digits, "--epochs", "1", "--seeds", "1"),
        "--set",
        *TINY,
    ]


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "study"


@pytest.fixture
def explosive(monkeypatch) -> Callable[[str], None]:
    """Make a module open sources whose test images cannot be looked at."""

    def arm(module: str) -> None:
        opening = importlib.import_module(module)
        real = opening.open_data

        class Closed:
            def __getattr__(self, name: str) -> None:
                raise AssertionError(f"somebody asked for {name} of the test images")

        def opened(*arguments: Any) -> Source:
            return dataclasses.replace(real(*arguments), test=Closed())

        monkeypatch.setattr(opening, "open_data", opened)

    return arm


@pytest.fixture(autouse=True)
def one_penalty(monkeypatch) -> None:
    """Let linear classifiers choose among one penalty: they take most of a tiny cell's time."""
    monkeypatch.setattr(linear, "L2_GRID", (0.1,))


@pytest.fixture
def refused(out, refusal) -> Callable[..., None]:
    """Check that a command is refused with a message, before its folder is made."""

    def check(command: list[str], message: str) -> None:
        assert message in refusal(*command, "--out", out)
        assert not out.exists()

    return check
