"""What the explorer shows: neighbours, places on the map, winners, labels of a table, samples."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deepbregman.data import ArrayImages, Split
from deepbregman.errors import Notice, UserError
from deepbregman.evaluation import exploring
from deepbregman.evaluation.clustering import rank_members
from deepbregman.evaluation.exploring import (
    Given,
    Ranked,
    choose_map,
    find_winners,
    place_on_map,
    rank_all,
    read_given,
)
from deepbregman.evaluation.features import Features
from deepbregman.method.bregman import divergence, soft_divergence


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("smoothing", [0.0, 0.7])
def test_the_nearest_are_those_of_a_loop(smoothing, monkeypatch):
    monkeypatch.setattr(exploring, "_QUERIES", 7)
    features = Features(draw(20, 6), draw(20, 5, seed=1))
    unit = torch.nn.functional.normalize(features.representation.double(), dim=1)
    scores = features.scores.double()
    hard = divergence(scores, scores)
    matrices = {
        "cosine": -(unit @ unit.T),
        "divergence": soft_divergence(scores, scores, smoothing) if smoothing else hard,
    }
    for measure, matrix in matrices.items():
        found = rank_all(measure, features, smoothing, 0)
        assert found.indices.shape == (20, 15)
        sign = -1.0 if measure == "cosine" else 1.0
        for place, (indices, values) in enumerate(zip(found.indices, found.values, strict=True)):
            assert place not in indices
            others = sorted(float(matrix[place, j]) for j in range(20) if j != place)[:15]
            assert (sign * values).tolist() == pytest.approx(others, abs=1e-5)
            at = [float(matrix[place, j]) for j in indices.tolist()]
            assert at == pytest.approx(others, abs=1e-5)


def test_a_copy_is_found_and_never_the_image_itself():
    points = draw(6, 4)
    points[3] = points[1]
    found = rank_all("cosine", Features(points, None), 0.0, 0)
    assert found.indices.shape == (6, 5)
    assert found.indices[1, 0] == 3
    assert found.indices[3, 0] == 1


@pytest.mark.parametrize("count", [3, 9, 40])
@pytest.mark.usefixtures("without_umap")
def test_every_image_has_a_place(count):
    points = draw(count, 5)
    points[: count // 2] += 8.0
    nearest = rank_all("cosine", Features(points, None), 0.0, 0)
    method = choose_map(count)
    assert method == ("t-SNE" if count == 40 else "principal components")
    found = place_on_map(points, nearest, method, 0)
    assert found.shape == (count, 2)
    assert np.isfinite(found).all()
    assert found.min() == 0.0
    assert found.max() == pytest.approx(1.0)
    if count == 40:  # the two groups lie apart
        first, second = found[:20].mean(axis=0), found[20:].mean(axis=0)
        assert np.linalg.norm(first - second) > 0.3


def test_images_that_are_all_the_same_have_places_too():
    nearest = Ranked(np.zeros((5, 1), np.int32), np.ones((5, 1), np.float32))
    found = place_on_map(torch.ones(5, 3), nearest, choose_map(5), 0)
    assert found == pytest.approx(np.zeros((5, 2)), abs=1e-6)


@pytest.mark.slow
def test_umap_tells_groups_apart():
    pytest.importorskip("umap", reason="umap-learn is not installed")
    points = draw(120, 8)
    points[:60] += 3.0
    nearest = rank_all("cosine", Features(points, None), 0.0, 0)
    assert choose_map(120) == "UMAP"
    found = place_on_map(points, nearest, "UMAP", 0)
    assert np.linalg.norm(found[:60].mean(axis=0) - found[60:].mean(axis=0)) > 0.3
    again = place_on_map(points, nearest, "UMAP", 0)
    assert np.array_equal(found, again)
    assert torch.get_num_threads() == 1  # as conftest.py has set it; numba raises it


def test_cluster_0_is_the_largest():
    points = torch.eye(3).repeat_interleave(torch.tensor([2, 9, 4]), dim=0)
    assert np.bincount(exploring._cluster(points, 3, 0)).tolist() == [9, 4, 2]


def test_winners_and_what_they_score_highest(monkeypatch):
    scores = draw(50, 6)
    scores[:, 2] += 1.5
    found = find_winners(scores)
    assert found.winner.tolist() == scores.argmax(dim=1).tolist()
    counts = [int((scores.argmax(dim=1) == number).sum()) for number in found.numbers]
    assert list(found.wins) == counts == sorted(counts, reverse=True)
    assert found.numbers[0] == 2
    for place, number in enumerate(found.numbers):
        best = sorted(range(50), key=lambda i: -float(scores[i, number]))[:24]
        assert found.highest[place].tolist() == best
    assert found.scores.shape == (50, 6)
    assert found.scores.min(axis=0).tolist() == [0] * 6
    assert found.scores.max(axis=0).tolist() == [255] * 6
    monkeypatch.setattr(exploring, "MOST_SUBNETWORKS", 2)
    monkeypatch.setattr(exploring, "SCORE_BYTES", 99)
    few = find_winners(scores)
    assert few.numbers == found.numbers[:2]
    assert few.scores is None


def read(path: Path, names: list[str]) -> Given:
    return read_given(path, names, {name: place for place, name in enumerate(names)}.get)


def test_labels_of_a_table(tmp_path):
    path = tmp_path / "all.csv"
    path.write_text("image,label,probability\na.png,cat,0.9\n'=b.png,dog,0.5\n")
    found = read(path, ["=b.png", "a.png", "c.png"])
    no, yes = [False] * 3, [True] * 3  # who looks at predicted labels chooses no image at random
    assert found == (["dog", "cat", None], [0.5, 0.9, 0.0], no, [], yes)
    path.write_text("image,label\na.png,cat\n")
    assert read(path, ["a.png", "b.png"]) == (
        *(["cat", None], None, [True, False], [], [False, True]),
    )
    path.write_text("image,label,probability,given\na.png,cat,1,Yes\nb.png,dog,0.5,no\n")
    assert read(path, ["a.png", "b.png"]).by_user == [True, False]
    assert read(path, ["a.png", "b.png"]).suggested == [False, True]
    path.write_text("image;label;probability;given\na.png;cat;;yes\nb.png;dog;0,5;no\n")
    assert read(path, ["a.png", "b.png"]).probabilities == [1.0, 0.5]  # from a spreadsheet
    path.write_text("image,label,label next\nc.png,,\na.png,cat,\nd.png,cat,10\nb.png,dog,2\n")
    found = read(path, ["a.png", "b.png", "c.png", "d.png", "e.png"])
    assert found.queue == [1, 3, 2]  # the most useful first, then as the table has them
    assert found.by_user == [True, True, False, True, False]
    assert found.suggested == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image,kind\na.png,cat\n", "image and label among them"),
        ("", "image and label among them"),
        ("image,label\nz.png,cat\n", "names no image of the data"),
        ("image,label,probability\na.png,cat,much\n", "of 'a.png' is 'much': it must be a number"),
        ("image,label,probability\na.png,cat,nan\n", "is 'nan': it must be a number from 0 to 1"),
        ("image,label,probability\na.png,cat,\n", "is '': it must be a number from 0 to 1"),
    ],
)
def test_tables_that_say_nothing(tmp_path, text, words):
    path = tmp_path / "all.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read(path, ["a.png"])


def test_of_too_many_images_a_sample_keeps_names_and_labels(monkeypatch):
    monkeypatch.setattr(exploring, "MOST_IMAGES", 30)
    pixels = torch.arange(80, dtype=torch.uint8)[:, None, None, None].expand(80, 3, 2, 2)
    train = Split(ArrayImages(pixels), torch.arange(80))
    test = Split(ArrayImages(pixels[:20]), torch.arange(20), tuple(f"{i}.png" for i in range(20)))
    with pytest.warns(Notice, match="100 images are too many for a page: a sample of 30"):
        found = exploring._sample({"train": train, "test": test}, 0)
    assert {name: len(part) for name, part in found.items()} == {"train": 24, "test": 6}
    with pytest.warns(Notice):  # 23.7 and 6.3 images: none is lost by rounding
        odd = exploring._sample({"train": train.select(torch.arange(75)), "test": test}, 0)
    assert sum(map(len, odd.values())) == 30
    for split, pattern in (("train", "train:{}"), ("test", "{}.png")):
        part = found[split]
        assert part.names == tuple(pattern.format(label) for label in part.labels.tolist())
        assert part.images.pixels[:, 0, 0, 0].tolist() == part.labels.tolist()


@pytest.mark.parametrize("method", ["features", "divergence"])
def test_the_most_typical_are_nearest_to_the_mean(method):
    features = Features(draw(30, 4), draw(30, 5, seed=1))
    members = torch.tensor([2, 3, 5, 7, 11, 13])
    ordered, distances = rank_members(method, features, members, 0.5)
    expected = {}
    for index in members.tolist():
        if method == "divergence":
            group = features.scores[members].double()[None]  # the cluster is a distribution
            value = soft_divergence(features.scores[index][None].double(), group, 0.5)[0, 0]
        else:
            unit = torch.nn.functional.normalize(features.representation.double(), dim=1)
            value = 1 - torch.cosine_similarity(unit[index], unit[members].mean(dim=0), dim=0)
        expected[index] = float(value)
    assert ordered.tolist() == sorted(expected, key=lambda index: expected[index])
    assert distances.tolist() == pytest.approx(sorted(expected.values()), abs=1e-9)
