"""Hugging Face datasets, by the real package: saved folders, tables by path, names of the hub."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.data import fingerprint, open_batches, open_source
from deepbregman.data.datasets import find_source, has_labels
from deepbregman.data.hugging_face import HuggingFaceStore, index_dataset
from deepbregman.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 6, 3), dtype=np.uint8)
pytestmark = [pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.slow


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


@slow
def test_a_saved_dataset_is_recognised_by_its_folder(saved):
    source, pixels = read(str(saved))
    assert (pixels == PIXELS[[4, 0, 5]]).all()
    assert source.classes == ("cat", "dog")
    assert source.train.labels.tolist() == [0, 1] * 3
    assert len(source.test) == 2
    assert has_labels(str(saved))
    again = open_source(str(saved), image_size=8)
    assert fingerprint(again.train.images) == fingerprint(source.train.images)


@slow
def test_the_hub_s_test_split_without_labels_gives_way_to_validation(datasets, tmp_path):
    """As the hub has ImageNet."""
    hidden = make(datasets, range(6, 8)).map(lambda row: {**row, "label": -1})
    parts = {"train": range(4), "validation": range(4, 6)}
    splits = {name: make(datasets, part) for name, part in parts.items()}
    datasets.DatasetDict({**splits, "test": hidden}).save_to_disk(str(tmp_path / "saved"))
    source = open_source(str(tmp_path / "saved"), image_size=8)
    assert source.test.labels.tolist() == [0, 1]
    assert source.train.labels.tolist() == [0, 1, 0, 1]
    batches = open_batches(source.test.images, torch.device("cpu"), resident="no", num_workers=0)
    (batch,) = batches.iterate(torch.tensor([0, 1]), 2)
    assert (batch.images.permute(0, 2, 3, 1).numpy() == PIXELS[4:6]).all()


@slow
def test_a_folder_of_tables_by_the_library(datasets, tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    make(datasets, range(6)).to_parquet(str(tmp_path / "tables" / "train-0.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for spec in (f"hf:{tmp_path / 'tables'}", str(tmp_path / "tables")):  # both ways
        source = open_source(spec, image_size=8)
        assert source.classes == ("cat", "dog")
        assert sum(map(len, source.splits.values())) == 6


@slow
def test_a_name_that_cannot_be_reached(datasets, monkeypatch):
    def offline(name: str, configuration: str | None) -> None:
        assert (name, configuration) == ("user/birds", "small")
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert find_source("hf:user/birds@small")[0] is None
    with pytest.raises(UserError, match=r"cannot be opened \(ConnectionError: .*save_to_disk"):
        open_source("hf:user/birds@small", image_size=8)


@slow
def test_a_dataset_without_images(datasets, tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "words"))
    with pytest.raises(UserError, match="0 columns hold images"):
        open_source(str(tmp_path / "words"), image_size=8)


# What follows does without the package, which is seldom installed where the fast tests run.


class Picture:
    """Stands for ``datasets.Image``."""

    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


class Rows:
    """Stands for ``datasets.Dataset``: rows of encoded images, each with columns of labels."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self._fingerprint = columns, f"of {columns}"
        self.features: dict[str, Any] = dict.fromkeys(columns)
        self.features |= {name: Picture() for name in columns if "image" in name}

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        assert all(not kind.decode for kind in self.features.values() if kind is not None)
        return {name: values[key] for name, values in self.columns.items()}

    def with_format(self, kind: None) -> "Rows":
        return self

    def select_columns(self, names: list[str]) -> "Rows":
        return Rows(**{name: self.columns[name] for name in names})

    def cast_column(self, name: str, kind: Picture) -> "Rows":
        made = copy.copy(self)
        made.features = {**self.features, name: kind}
        return made


def stand_in(monkeypatch: pytest.MonkeyPatch, found: Any) -> list[tuple[str, str | None]]:
    """Let the package find this; return the list of what it is asked for."""
    asked: list[tuple[str, str | None]] = []

    def load(name: str, configuration: str | None) -> Any:
        asked.append((name, configuration))
        return found

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Image=Picture, load_dataset=load))
    return asked


def pictures(*contents: bytes) -> list[dict[str, Any]]:
    return [{"bytes": content, "path": None} for content in contents]


def test_an_image_is_in_its_row_or_in_a_file(tmp_path):
    (tmp_path / "b.png").write_bytes(b"second")
    rows = [
        {"image": {"bytes": b"first", "path": "gone.png"}},
        {"image": {"bytes": None, "path": str(tmp_path / "b.png")}},
        {"image": {"bytes": None, "path": None}},
        {"image": None},
    ]
    store = HuggingFaceStore(rows, "image", "train")
    assert [store.read(0), store.read(1)] == [b"first", b"second"]
    for index in (2, 3):
        with pytest.raises(ValueError, match="the row has no image"):
            store.read(index)


def test_splits_labels_and_names_of_a_dataset_of_the_hub(monkeypatch):
    splits = {
        "validation": Rows(image=pictures(b"x"), label=[0]),
        "test": Rows(image=pictures(b"c"), label=[1]),
        "train": Rows(target=[0, 0], image=pictures(b"a", b"b"), label=[1, 0]),
    }
    splits["train"].features["label"] = SimpleNamespace(names=["cat", "dog"])
    asked = stand_in(monkeypatch, splits)
    found = index_dataset(Path("hf:user/pets"))
    assert index_dataset(Path("hf:user/pets@small")).name == "user/pets@small"
    assert asked == [("user/pets", None), ("user/pets", "small")]
    assert (found.name, found.classes) == ("user/pets", ("cat", "dog"))
    train, test = found.splits["train"], found.splits["test"]
    assert [train.store.read(0), train.store.read(1), test.store.read(0)] == [b"a", b"b", b"c"]
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0], [1])


def test_one_part_is_to_train_on_and_without_one_there_is_none(monkeypatch):
    stand_in(monkeypatch, Rows(image=pictures(b"a", b"b")))
    found = index_dataset(Path("hf:plain"))
    assert (list(found.splits), found.splits["train"].labels) == (["train"], None)
    other, held = Rows(image=pictures(b"a", b"c")), Rows(image=pictures(b"d"))
    stand_in(monkeypatch, {"train": other, "val": held})
    changed = index_dataset(Path("hf:plain")).splits
    assert changed["test"].store.read(0) == b"d"
    assert changed["train"].store.identity() != found.splits["train"].store.identity()
    stand_in(monkeypatch, {"val": Rows(image=pictures(b"a"))})
    with pytest.raises(UserError, match="has the splits val and no train"):
        index_dataset(Path("hf:plain"))
    stand_in(monkeypatch, Rows(image=pictures(b"a"), image_2=pictures(b"b")))
    with pytest.raises(UserError, match=r"2 columns hold images \(image, image_2\)"):
        index_dataset(Path("hf:plain"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'deepbregman\[datasets\]'"):
        index_dataset(Path("hf:plain"))
