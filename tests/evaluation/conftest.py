"""The short run on digits, with the data that it is judged on."""

from dataclasses import replace

import pytest
import torch

from deepbregman.evaluation import linear
from deepbregman.evaluation.features import LabelledFeatures
from deepbregman.evaluation.inputs import load_run, open_labelled


@pytest.fixture(scope="session")
def labelled(short_run) -> LabelledFeatures:
    """The run's networks, judged on all digits."""
    loaded = load_run(short_run, "cpu")
    source = open_labelled(loaded.config)
    return LabelledFeatures(loaded.model, loaded.config, source, torch.device("cpu"))


@pytest.fixture(scope="session")
def few(labelled, few_digits) -> LabelledFeatures:
    """The run's networks, judged on few digits."""
    return replace(labelled, source=open_labelled(labelled.config, few_digits))


def with_gaps(labelled: LabelledFeatures) -> LabelledFeatures:
    """The same images, of classes that are numbered 1, 3, 5, ..."""
    source = labelled.source
    train, test = (
        replace(part, labels=2 * part.known_labels + 1)
        for part in (source.train, source.known_test)
    )
    return replace(labelled, source=replace(source, train=train, test=test, classes=None))


@pytest.fixture(autouse=True)
def strong_penalties(monkeypatch) -> None:
    """Let the protocols try strong penalties only: fits with weak ones take most of the time."""
    monkeypatch.setattr(linear, "L2_GRID", (1e-2, 1e-1))
