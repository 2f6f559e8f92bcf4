"""Exploring as a user does it: the verb, the file that it writes, and its errors."""

import base64
import csv
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

import deepbregman
from deepbregman.evaluation import exploring

pytestmark = pytest.mark.usefixtures("without_umap")


def read(text: str, name: str, kind: str) -> np.ndarray:
    match = re.search(rf'id="{name}">([^<]*)</script>', text)
    return np.frombuffer(base64.b64decode(match[1]), kind)


def test_digits_with_labels_for_a_few(output, short_run, few_digits, tmp_path):
    with np.load(few_digits) as arrays:
        truth = arrays["train_labels"]
    few = tmp_path / "few.csv"
    lines = [f"train:{i},{truth[i]}" for c in range(10) for i in np.flatnonzero(truth == c)[:4]]
    few.write_text("\n".join(["image,label", *lines]))
    words = (short_run.path, "--data", few_digits)
    output("label", *words, "--labels", few, "--out", tmp_path / "all.csv")
    page = tmp_path / "map.html"
    said = output("explore", *words, "--labels", tmp_path / "all.csv", "--out", page, "--seed", 1)
    assert "300 images placed by t-SNE" in said
    text = page.read_text()
    data = json.loads(re.search(r'id="data">([^<]*)</script>', text)[1])  # type: ignore[index]  # found
    assert data["names"] == [f"train:{i}" for i in range(200)] + [f"test:{i}" for i in range(100)]
    titles = [column["title"] for column in data["columns"]]
    own = ["class", "cluster", "winning subnetwork"]
    assert titles == ["predicted label", "confidence", "label next", *own]
    classes = [data["columns"][3]["categories"][i] for i in read(text, "column-3", "<u2")]
    assert classes[:200] == [str(label) for label in truth]
    assert int(read(text, "column-2", "<u2").sum()) == 20  # to label next
    with (tmp_path / "all.csv").open() as file:
        ranks = {row["image"]: row["label next"] for row in csv.DictReader(file)}
    assert [ranks[data["names"][i]] for i in data["queue"]] == list(map(str, range(1, 21)))
    given = [line.split(",") for line in lines]
    assert sorted([f"train:{i}", label] for i, label in data["labels"]) == sorted(given)
    # The nearest by both measures are what a search finds.
    for number, measure in enumerate(("cosine", "divergence")):
        found = read(text, f"indices-{number}", "<i4").reshape(300, 12)
        (answer,) = deepbregman.search(
            short_run, ["test:7"], data=few_digits, k=12, split="all", seed=1
        ).answers
        names = [hit.image.name for hit in answer.hits[measure]]
        assert [data["names"][i] for i in found[207]] == names
        values = read(text, f"values-{number}", "<f4").reshape(300, 12)[207]
        expected = [hit.value for hit in answer.hits[measure]]
        assert values.tolist() == pytest.approx(expected, abs=1e-5)


def test_images_to_label_are_large_and_whole(output, short_run, tmp_path):
    """A thumbnail shows the middle of a photo, which may not tell what it is of."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for index in range(4):
        Image.effect_noise((400, 300), 50).save(photos / f"{index}.png")
    (tmp_path / "few.csv").write_text("image,label\n2.png,\n1.png,\n3.png,cat\n")
    words = (short_run.path, "--data", photos, "--labels", tmp_path / "few.csv")
    output("explore", *words, "--out", tmp_path / "few.html")
    text = (tmp_path / "few.html").read_text()
    data = json.loads(re.search(r'id="data">([^<]*)</script>', text)[1])  # type: ignore[index]  # found
    assert [data["names"][place] for place in data["queue"]] == ["2.png", "1.png"]  # as drawn
    assert sorted(data["large"]) == sorted(data["queue"])
    for place in data["large"]:
        picture = io.BytesIO(read(text, f"large-{place}", "u1").tobytes())
        assert Image.open(picture).size == (320, 240)


def test_a_table_names_images_as_for_label(output, short_run, tmp_path):
    """By the name in the data, by a path, or by the last part of it where that is unique."""
    photos = tmp_path / "photos"
    (photos / "day").mkdir(parents=True)
    for index in range(4):
        Image.effect_noise((10, 10), 50).save(photos / "day" / f"{index}.png")
    lines = f"day/0.png,cat\n1.png,dog\n{photos / 'day' / '2.png'},cat\n3.png,\n"
    (tmp_path / "few.csv").write_text(f"image,label\n{lines}")
    words = ("--data", photos, "--labels", tmp_path / "few.csv", "--out", tmp_path / "few.html")
    output("explore", short_run.path, *words)
    text = (tmp_path / "few.html").read_text()
    data = json.loads(re.search(r'id="data">([^<]*)</script>', text)[1])  # type: ignore[index]  # found
    assert data["labels"] == [[0, "cat"], [1, "dog"], [2, "cat"]]
    assert data["columns"][0]["title"] == "your label"  # nothing has been predicted
    assert data["queue"] == [3]


def test_the_map_is_made_once(copied_run, few_digits, tmp_path, monkeypatch):
    """It takes most of the time, and labels that were given since do not change it."""
    made: list[int] = []
    place = exploring.place_on_map

    def count(representation: Tensor, nearest: exploring.Ranked, method: str, seed: int) -> object:
        made.append(seed)
        return place(representation, nearest, method, seed)

    monkeypatch.setattr(exploring, "place_on_map", count)

    def points(name: str, **options: object) -> list[float]:
        found = deepbregman.explore(
            copied_run, tmp_path / name, data=few_digits, split="test", **options
        )
        assert found.map_method == "t-SNE"
        return read((tmp_path / name).read_text(), "points", "<f4").tolist()

    first = points("a.html")
    assert points("b.html", clusters=3) == first
    assert made == [0]
    points("c.html", seed=1)
    assert made == [0, 1]
    for path in (tmp_path / "run" / "features").glob("*-map-*"):
        path.write_bytes(b"damaged")
    assert points("d.html") == first
    assert made == [0, 1, 0]
    monkeypatch.setattr(exploring, "list_versions", lambda *packages: {packages[-1]: "9.9"})
    points("e.html")
    assert made == [0, 1, 0, 0]  # another scikit-learn may make another map


def test_the_table_for_embedding_atlas(short_run, few_digits, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    out = tmp_path / "map.parquet"
    found = deepbregman.explore(short_run, out, data=few_digits, split="test", format="parquet")
    assert (found.path, found.num_images) == (out, 100)
    table = parquet.read_table(out)
    assert table.num_rows == 100
    needed = {"name", "image", "projection_x", "projection_y", "neighbors", "class", "cluster"}
    assert needed <= set(table.column_names)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--out", "map.htm"], "with that ending"),
        (["--out", "old.html"], "exists"),
        (["--out", "map.html", "--format", "parquet"], "add --format html, or"),
        (["--out", "map.parquet"], "add --format parquet, or"),
        (["--out", "map.html", "--labels", "nowhere.csv"], "no such file"),
        (["--out", "map.html", "--labels", "."], "a folder, and explore needs a CSV file"),
        (["--out", "map.html", "--labels", "old.html"], "image and label among them"),
        (["--out", "map.html", "--clusters", 1], "clusters is 1"),
        (["--out", "map.html", "--clusters", 1798], "clusters is 1798"),
        (["--out", "map.html", "--data", "nowhere"], "no such folder"),
    ],
)
def test_errors(refusal, short_run, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.html").write_text("precious")
    err = refusal("explore", short_run.path, *words)
    assert expected in err
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "precious"
