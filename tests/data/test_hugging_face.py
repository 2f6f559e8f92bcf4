"""Hugging Face datasets, by the real package: saved folders, tables by path, names of the hub."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.data import fingerprint, open_batches, open_source
from deepbregman.data.datasets import find_source, has_labels
from deepbregman.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 6, 3), dtype=np.uint8)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="pip install 'deepbregman[datasets]'")


def make(datasets: Any, part: range) -> Any:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    images = [Image.fromarray(PIXELS[index]) for index in part]
    columns = {"image": images, "label": [index % 2 for index in part]}
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def saved(datasets, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "saved"
    splits = {"train": make(datasets, range(6)), "validation": make(datasets, range(6, 8))}
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return folder


def read(path: str) -> Any:
    source = open_source(path, image_size=8)
    batches = open_batches(source.train.images, torch.device("cpu"), resident="no", num_workers=0)
    (batch,) = batches.iterate(torch.tensor([4, 0, 5]), 3)
    return source, batch.images.permute(0, 2, 3, 1).numpy()


def test_a_saved_dataset_is_recognised_by_its_folder(saved):
    source, pixels = read(str(saved))
    assert (pixels == PIXELS[[4, 0, 5]]).all()
    assert source.classes == ("cat", "dog")
    assert source.train.labels.tolist() == [0, 1] * 3
    assert len(source.test) == 2
    assert has_labels(str(saved))
    again = open_source(str(saved), image_size=8)
    assert fingerprint(again.train.images) == fingerprint(source.train.images)


def test_a_folder_of_tables_by_the_library(datasets, tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    make(datasets, range(6)).to_parquet(str(tmp_path / "tables" / "train-0.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for spec in (f"hf:{tmp_path / 'tables'}", str(tmp_path / "tables")):  # both ways
        source = open_source(spec, image_size=8)
        assert source.classes == ("cat", "dog")
        assert sum(map(len, source.splits.values())) == 6


def test_a_name_that_cannot_be_reached(datasets, monkeypatch):
    def offline(name: str, configuration: str | None) -> None:
        assert (name, configuration) == ("user/birds", "small")
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert find_source("hf:user/birds@small")[0] is None
    with pytest.raises(UserError, match=r"cannot be opened \(ConnectionError: .*save_to_disk"):
        open_source("hf:user/birds@small", image_size=8)


def test_a_dataset_without_images(datasets, tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "words"))
    with pytest.raises(UserError, match="0 columns hold images"):
        open_source(str(tmp_path / "words"), image_size=8)
