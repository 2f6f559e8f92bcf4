"""Duplicates as a user looks for them."""

import csv
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import deepbregman


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Photographs in two classes: two exact copies of one, a compressed copy of another."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for index in range(12):
            small = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            image = Image.fromarray(small).resize((32, 32), Image.Resampling.BICUBIC)
            image.save(folder / name / f"{name}-{index}.png")
    shutil.copy(folder / "a" / "a-3.png", folder / "b" / "copy.png")
    shutil.copy(folder / "a" / "a-3.png", folder / "a" / "a-3 (1).png")
    with Image.open(folder / "b" / "b-5.png") as image:
        image.save(folder / "b" / "sent.jpg", quality=80)
    return folder


def test_copies_of_photographs(output, short_run, photos, tmp_path):
    out, sheet = tmp_path / "copies.csv", tmp_path / "copies.png"
    said = output(
        *("duplicates", short_run.path, "--data", photos, "--threshold", 0.999),
        *("--out", out, "--sheet", sheet),
    )
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert (rows[0]["image"], rows[0]["copy"]) == ("a/a-3.png", "first")  # not a-3 (1).png
    groups: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        groups.setdefault(row["group"], set()).add((row["image"], row["copy"]))
        assert (photos / row["image"]).stat().st_size == int(row["bytes"])
        assert float(row["cosine"]) >= 0.999
        assert row["class"] == row["image"][0]
    exact = [group for group in groups.values() if len(group) == 3]
    assert {name for name, _ in exact[0]} == {"a/a-3.png", "a/a-3 (1).png", "b/copy.png"}
    assert sorted(kind for _, kind in exact[0]) == ["exact", "exact", "first"]
    sent = [group for group in groups.values() if "b/sent.jpg" in {name for name, _ in group}]
    assert {name for name, _ in sent[0]} == {"b/b-5.png", "b/sent.jpg"}
    assert {kind for _, kind in sent[0]} == {"first", "near"}
    assert "2 exact copies" in said
    for name in ("a/a-3 (1).png", "b/sent.jpg"):
        assert name in said
    with Image.open(sheet) as image:
        assert image.width > 3 * 112
        assert image.height > 2 * 112


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_link_never_comes_before_its_file(output, short_run, photos, tmp_path, through_a_link):
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "b" / "l.png").symlink_to(folder / "a" / "a-7.png")  # the shortest name of all
    if through_a_link:
        (tmp_path / "elsewhere").symlink_to(folder)
        folder = tmp_path / "elsewhere"
    out = tmp_path / "copies.csv"
    output("duplicates", short_run.path, "--data", folder, "--out", out)
    with out.open(newline="") as file:
        kinds = {row["image"]: row["copy"] for row in csv.DictReader(file)}
    assert (kinds["a/a-7.png"], kinds["b/l.png"]) == ("first", "exact")


def test_the_threshold_is_measured(short_run, photos):
    found = deepbregman.duplicates(short_run, data=str(photos))
    assert 0.5 < found.threshold < 1.0
    names = [{copy.name for copy in group} for group in found.groups]
    assert any({"b/b-5.png", "b/sent.jpg"} <= group for group in names)
    again = deepbregman.duplicates(short_run, data=str(photos))
    assert again.threshold == found.threshold


def test_copies_in_both_splits_of_shards(short_run, photos, tmp_path):
    """Each split lies in files of its own, so that no one sequence has the images of both."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for split, names in (("train", ("a-1", "a-3")), ("test", ("a-3", "a-2", "a-1"))):
        with tarfile.open(shards / f"{split}.tar", "w") as file:
            for name in names:
                file.add(photos / "a" / f"{name}.png", f"{name}.png")
    found = deepbregman.duplicates(short_run, data=str(shards), threshold=1.0)
    kinds = {tuple((copy.name, copy.kind) for copy in group) for group in found.groups}
    assert kinds == {
        (("train.tar/a-1.png", "first"), ("test.tar/a-1.png", "exact")),
        (("train.tar/a-3.png", "first"), ("test.tar/a-3.png", "exact")),
    }


def test_no_duplicates_at_all(command, short_run, photos, tmp_path):
    some = tmp_path / "some"
    some.mkdir()
    for index in range(6):
        shutil.copy(photos / "a" / f"a-{index}.png", some)
    out, sheet = tmp_path / "copies.csv", tmp_path / "copies.png"
    code, said, err = command(
        *("duplicates", short_run.path, "--data", some, "--threshold", 1.0),
        *("--out", out, "--sheet", sheet),
    )
    assert code == 0
    assert "0 groups among 6 images" in said
    assert "0 exact copies, 0 near-duplicates" in said
    assert "a lower --threshold finds copies that were changed more" in said
    assert "copies.png is not written" in err
    assert out.read_text() == "group,image,copy,cosine\n"
    assert not sheet.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--threshold", 1.5], "threshold is 1.5"),
        (["--threshold", "nan"], "threshold is nan"),
        (["--threshold", 0.001], "raise --threshold"),
        (["--out", "old.csv"], "old.csv exists"),
        (["--sheet", "sheet.jpg"], "with that ending"),
        (["--data", "nowhere"], "no such folder"),
    ],
)
def test_errors(refused, short_run, words, expected):
    refused("duplicates", short_run, words, expected, "old.csv")
