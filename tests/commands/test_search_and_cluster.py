"""Searching and clustering as a user does it: the verbs, what they leave, and their errors."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import normalized_mutual_info_score

from deepbregman import (
    Few,
    cluster,
    draw_first_images,
    duplicates,
    embed,
    evaluate,
    explore,
    label,
    resume,
    search,
)
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import override
from deepbregman.errors import Notice, UserError
from deepbregman.evaluation.clustering import count_clusters
from deepbregman.method.bregman import soft_divergence
from deepbregman.runs import Run
from deepbregman.training import checkpoints


@pytest.fixture
def run(copied_run) -> Run:
    return copied_run


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Reddish and bluish photographs in two folders, of several shapes."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    random = np.random.default_rng(0)
    for channel, name in ((0, "red"), (2, "blue")):
        (folder / name).mkdir(parents=True)
        for index in range(15):
            pixels = random.integers(0, 90, (12 + index % 4, 10, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(folder / name / f"{name}-{index}.png")
    return folder


@pytest.fixture(scope="module")
def flat(photos) -> Path:
    """The same photographs without classes."""
    folder = photos.parent / "flat"
    folder.mkdir()
    for path in photos.rglob("*.png"):
        shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture(scope="module")
def plain(short_config, flat, tmp_path_factory) -> Run:
    """A run without a divergence network, on photographs without classes."""
    changes = {"divergence.weight": 0.0, "training.epochs": 1, "training.batch_size": 8}
    config = override(short_config, {**changes, "data.source": str(flat), "data.image_size": 8})
    return pretrain(config, run=tmp_path_factory.mktemp("runs") / "plain")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: search(run, ["red-1.png"], k="3"), "k is '3': it must be a whole number"),
        (lambda run: search(run, ["red-1.png"], k=True), "k is True"),
        (lambda run: cluster(run, "2"), "clusters is '2': it must be a whole number"),
        (lambda run: cluster(run, 2, seeds=1.5), "seeds is 1.5: it must be a whole number"),
        (lambda run: duplicates(run, threshold="0.9"), "threshold is '0.9': it must be a number"),
        (lambda run: evaluate(run, epochs="3"), "epochs is '3': it must be a whole number, 0"),
        (lambda run: draw_first_images(run, out="a.csv", seed=-1), "seed is -1: it must be a"),
        (lambda run: evaluate(run, semi={"labels": 1}), "must be an object of the class Semi"),
        (lambda run: search(run, [np.zeros((8, 8, 3))]), "the type ndarray: each query is a file"),
        (
            lambda run: label(run, ["red-1.png", "red-2.png"]),
            "labels is of the type list: give a",
        ),
        (lambda run: pretrain("simclr", changes=["seed=1"]), "changes is of the type list: give a"),
        (lambda run: pretrain("simclr", source=[1]), "source is of the type list: it must be a"),
        (lambda run: resume(run, source=[1]), "source is of the type list: it must be a"),
        (lambda run: explore(run, "a.html", data=[1], labels=__file__), "data is of the type list"),
        (lambda run: resume(run, changes="seed=1"), "changes is of the type str: give a"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_in_python(plain, call, words):
    with pytest.raises(UserError, match=words):
        call(plain)


def test_numbers_may_be_those_of_numpy(plain, run):
    found = search(plain, ["red-1.png"], k=np.int64(2))
    assert len(found.answers[0].hits["cosine"]) == 2
    groups = cluster(plain, np.int64(3), seeds=np.int64(1))
    assert len(groups.partitions["features"].sizes) == 3
    assert duplicates(plain, threshold=np.float32(0.5)).threshold == 0.5
    rows = evaluate(run, protocols=["few"], seeds=np.int64(1), few=Few(draws=np.int64(2)))
    json.dumps(rows)  # as files take them


@pytest.fixture
def arrays(run, tmp_path) -> dict[str, torch.Tensor]:
    """The run's features of digits, as `deepbregman embed` writes them."""
    embed(run.path, tmp_path / "features.npz")
    return load_arrays(tmp_path / "features.npz")


def load_arrays(path: Path) -> dict[str, torch.Tensor]:
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


class TestSearch:
    def test_two_queries_by_both_measures(self, output, run, tmp_path, arrays):
        sheet = tmp_path / "sheet.png"
        words = ("--query", "test:17", "test:3", "--split", "train")
        out = output("search", run.path, *words, "--out", sheet)
        smoothing = run.config.divergence.smoothing
        assert smoothing > 0.0
        found = search(run, ["test:17"], split="train").answers[0]
        query = torch.nn.functional.normalize(arrays["test_features"][17].double(), dim=0)
        bank = torch.nn.functional.normalize(arrays["train_features"].double(), dim=1)
        scores = arrays["test_scores"][17:18].double(), arrays["train_scores"].double()
        expected = {
            "cosine": (bank @ query).sort(descending=True),
            "divergence": soft_divergence(*scores, smoothing)[0].sort(),
        }
        for measure, (values, indices) in expected.items():
            hits = found.hits[measure]
            assert [hit.image.name for hit in hits] == [f"train:{i}" for i in indices[:10]]
            assert [hit.value for hit in hits] == pytest.approx(values[:10].tolist(), abs=1e-5)
            kinds = [str(label) for label in arrays["train_labels"][indices[:10]].tolist()]
            assert [hit.image.class_name for hit in hits] == kinds
            for hit in hits:
                assert hit.image.name in out
        assert found.query.class_name == str(int(arrays["test_labels"][17]))
        assert found.query.pixels.shape == (8, 8, 3)
        with Image.open(sheet) as image:
            assert image.width > 10 * 112
            assert image.height > 4 * 112  # two queries by two measures
        assert "evaluations" not in run.result()

    def test_all_images_are_searched(self, run, arrays):
        """Nobody who looks for a photo thinks of splits."""
        found = search(run, ["test:17"], k=20, by=["cosine"]).answers[0]
        query = torch.nn.functional.normalize(arrays["test_features"][17].double(), dim=0)
        expected = []
        for split in ("train", "test"):
            bank = torch.nn.functional.normalize(arrays[f"{split}_features"].double(), dim=1)
            cosines = enumerate((bank @ query).tolist())
            expected += [(value, f"{split}:{index}") for index, value in cosines]
        names = [name for _, name in sorted(expected, reverse=True) if name != "test:17"]
        shown = [hit.image.name for hit in found.hits["cosine"]]
        assert shown == names[:20]
        assert {name.partition(":")[0] for name in shown} == {"train", "test"}

    def test_an_image_is_not_found_for_itself(self, plain, flat):
        place = sorted(path.name for path in flat.iterdir()).index("red-3.png")
        for query in ("red-3.png", flat / "red-3.png", f"train:{place}"):
            (answer,) = search(plain, [query], k=29).answers
            names = [hit.image.name for hit in answer.hits["cosine"]]
            assert answer.query.name == "red-3.png"
            assert sorted([*names, "red-3.png"]) == sorted(p.name for p in flat.iterdir())
            assert answer.query.class_name is None
        assert names[0].startswith("red")

    def test_a_file_from_elsewhere_looks_as_it_would_in_the_data(self, plain, flat, tmp_path):
        shutil.copy(flat / "blue-7.png", tmp_path / "mine.png")
        (answer,) = search(plain, [tmp_path / "mine.png"], k=2).answers
        best = answer.hits["cosine"][0]
        assert best.image.name == "blue-7.png"
        assert best.value == pytest.approx(1.0, abs=1e-6)
        assert np.array_equal(best.image.pixels, answer.query.pixels)
        assert answer.query.pixels.shape == (15, 10, 3)

    def test_splits_names_and_classes_of_a_folder(self, run, photos):
        source = str(photos)
        (everything,) = search(run, ["test:0"], data=source, k=29, split="all").answers
        names = {hit.image.name for hit in everything.hits["divergence"]}
        assert len(names | {everything.query.name}) == 30
        (again,) = search(run, [everything.query.name], data=source, split="test", k=5).answers
        held = {hit.image.name for hit in again.hits["cosine"]}
        assert len(held) == 5
        (third,) = search(run, ["train:0"], data=source, split="train", k=23).answers
        assert not held & {hit.image.name for hit in third.hits["cosine"]}
        for hit in everything.hits["cosine"]:
            assert hit.image.name.startswith(f"{hit.image.class_name}/")

    def test_a_search_lists_a_folder_once(self, output, run, photos, tmp_path, monkeypatch):
        """A listing of 50,000 images takes half a second."""
        copied = shutil.copytree(photos, tmp_path / "photos")  # there is no index of it yet
        queries = (copied / "red" / "red-1.png", "red/red-2.png")
        words = ("search", run.path, "--data", copied, "--query", *queries)
        listed, scandir = [], os.scandir
        monkeypatch.setattr(os, "scandir", lambda at: [listed.append(Path(at)), scandir(at)][1])
        first = output(*words)
        assert listed.count(copied / "red") == 1
        assert "\nred/red-1.png " in f"\n{first}"
        assert "(red)" not in first  # the name tells the class
        again = output(*words)
        assert again == first
        assert listed.count(copied / "red") == 2

    def test_an_index_is_made_again_when_a_table_has_other_labels(
        self, output, run, photos, tmp_path
    ):
        copied = Path(shutil.copytree(photos / "red", tmp_path / "photos"))
        names = sorted(path.name for path in copied.iterdir())
        table = copied / "labels.csv"
        words = ("search", run.path, "--data", table, "--query", names[0], "-k", 1)
        for kind in ("dark", "bright"):
            lines = [f"{name},{kind if place < 13 else 'grey'}" for place, name in enumerate(names)]
            table.write_text("\n".join(["image,label", *lines]))
            assert f"({kind})" in output(*words)

    def test_the_last_part_of_a_name_is_enough(self, output, refusal, run, photos, tmp_path):
        """As in a table of labels; but not if two images have it."""
        copied = shutil.copytree(photos, tmp_path / "photos")
        words = ("search", run.path, "--data", copied, "--query")
        expected = output(*words, "red/red-1.png")
        for query in ("red-1.png", "red-1"):
            assert output(*words, query) == expected
        shutil.copy(copied / "red" / "red-2.png", copied / "blue" / "red-1.png")
        err = refusal(*words, "red-1.png")
        assert "2 images of" in err
        assert "have this name ('blue/red-1.png', 'red/red-1.png'); give one of these names" in err

    def test_unreadable_images_can_be_skipped(self, command, refusal, plain, flat, tmp_path):
        shutil.copytree(flat, tmp_path / "some")
        (tmp_path / "some" / "broken.png").write_bytes(b"no image")
        words = ("search", plain.path, "--data", tmp_path / "some", "--query", "red-1.png")
        err = refusal(*words)
        assert "broken.png" in err
        code, out, err = command(*words, "--skip-unreadable", "-k", 29)
        left_out = "left out 1 unreadable image (broken.png)"
        assert (code, err) == (0, f"note: {left_out} of {tmp_path / 'some'}\n")
        assert "broken.png" not in out

    def test_nothing_stands_in_for_an_image_that_cannot_be_decoded(
        self, command, plain, flat, tmp_path, monkeypatch
    ):
        """In a set too large to decode on opening, where a header passes for an image."""
        monkeypatch.setattr("deepbregman.data.listings.FULL_DECODE_LIMIT", 0)
        some = tmp_path / "some"
        shutil.copytree(flat, some)
        (some / "damaged.png").write_bytes((some / "red-1.png").read_bytes()[:60])
        words = ("--data", some, "--skip-unreadable")
        out = tmp_path / "features.npz"
        said = f"note: left out 1 unreadable image (damaged.png) of {some}\n"
        code, _, err = command("embed", plain.path, *words, "--out", out)
        assert (code, err) == (0, said)
        code, _, err = command("cluster", plain.path, *words, "--clusters", 2)
        assert (code, err) == (0, said)
        with np.load(out) as arrays:
            names = {name for key in arrays if key.endswith("_names") for name in arrays[key]}
            assert len(names) == 30
            assert "damaged.png" not in names
        with pytest.warns(Notice, match=r"left out 1 unreadable image \(damaged.png\) of") as told:
            found = search(plain, ["red-1.png"], data=str(some), k=29, skip_unreadable=True)
        assert "damaged.png" not in {hit.image.name for hit in found.answers[0].hits["cosine"]}
        with pytest.warns(Notice, match=r"left out 1 unreadable image \(damaged.png\) of") as again:
            embed(plain, tmp_path / "again.npz", data=str(some), skip_unreadable=True)
        assert [warning.filename for warning in (*told, *again)] == [__file__, __file__]

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["--query", "red-1.png", "-k", 30], "k is 30: there are 29 images to search"),
            (["--query", "red-1.png", "-k", 0], "k is 0"),
            (["--query", "nothing.png"], "neither an image file nor an image"),
            (["--query", "train:30"], "has 30 images"),
            (["--query", "test:0"], "has 0 images"),
            (["--query", "red-1.png", "--split", "test"], "no test split"),
            (["--query", "red-1.png", "--by", "divergence"], "no divergence network"),
            (["--query", "red-1.png", "--out", "sheet.jpg"], "with that ending"),
            (["--query", "red-1.png", "--out", "old.png"], "exists"),
            (["--query", "red-1.png", "--out", "nowhere/sheet.png"], "does not exist"),
            (["--query", "old.png"], "cannot be read"),
            (["--query", "red-1.png", "--data", "nowhere"], "no such folder"),
            ([], "give --query FILE"),
        ],
    )
    def test_errors(self, refused, plain, words, expected):
        refused("search", plain, words, expected, "old.png")

    def test_networks_that_diverged_are_named(self, refusal, run):
        state = checkpoints.load(run.last_checkpoint)
        name = next(name for name in state["objective"] if name.startswith("encoder"))
        state["objective"][name] = torch.full_like(state["objective"][name], torch.nan)
        checkpoints.save(run.last_checkpoint, state)
        err = refusal("search", run.path, "--query", "test:0")
        assert "not finite" in err


class TestCluster:
    def test_digits_by_both_methods(self, output, run, tmp_path):
        table = tmp_path / "clusters.csv"
        out = output("cluster", run.path, "--split", "test", "--seeds", 2, "--out", table)
        for method in ("features", "divergence"):
            sheet = tmp_path / f"clusters-{method}.png"
            assert f"sheet: {sheet}" in out
            with Image.open(sheet) as image:
                assert image.width > 10 * 112  # ten images of each cluster
                assert image.height > 5 * 112
        lines = list(csv.DictReader(table.read_text().splitlines()))
        assert [line["image"] for line in lines] == [f"test:{index}" for index in range(500)]
        labels = [int(line["class"]) for line in lines]
        rows = cluster(run, split="test", seeds=2).rows  # the same again
        variants = {
            "k-means, cosine features, test split": "features",
            "Bregman, learned divergence, test split": "divergence",
        }
        assert {(row["variant"], row["metric"]) for row in rows} == {
            (variant, metric) for variant in variants for metric in ("NMI", "ARI", "purity")
        }
        for row in rows:
            assert (row["n"], len(row["values"])) == (2, 2)
            assert row["details"] == {"split": "test", "clusters": 10}
            assert row["value"] == pytest.approx(np.mean(row["values"]))
            assert row["deviation"] == pytest.approx(np.std(row["values"], ddof=1))
            assert (row["num_train"], row["num_test"]) == (0, 500)
            assert f"{row['value']:.2f} ± {row['deviation']:.2f}" in out
            if row["metric"] == "NMI":  # what was written is one of the seeds
                found = [int(line[variants[row["variant"]]]) for line in lines]
                agreement = 100.0 * normalized_mutual_info_score(labels, found)
                assert min(abs(value - agreement) for value in row["values"]) < 1e-9
                assert row["value"] > 25.0  # far from chance, which is about 4

    def test_without_labels_a_cluster_has_several_images(self, output, plain):
        """Nine clusters of nine images would tell nothing."""
        out = output("cluster", plain.path, "--seeds", 1)
        assert "5 clusters of 30 images" in out
        assert "--out clusters.csv writes the cluster of each image" in out
        part = cluster(plain, seeds=1, by=["features"]).partitions["features"]
        assert list(part.sizes) == sorted(part.sizes, reverse=True)  # cluster 0 is the largest
        assert torch.bincount(part.assignment, minlength=5).tolist() == list(part.sizes)
        assert [count_clusters(None, 0, images) for images in (2, 9, 143, 144, 10**6)] == [
            *(2, 3, 11, 12, 12)
        ]
        with pytest.raises(UserError, match="one image, and clusters need 2"):
            count_clusters(None, 0, 1)  # "from 2 to 1" would help nobody

    def test_without_labels(self, output, plain, tmp_path):
        before = (plain.path / "result.json").read_bytes()
        table = tmp_path / "c.csv"
        out = output("cluster", plain.path, "--clusters", 2, "--out", table)
        assert "distance within" in out
        assert "15 15" in out
        assert "--out" not in out
        assert "NMI" not in out
        assert (plain.path / "result.json").read_bytes() == before
        lines = csv.DictReader(table.read_text().splitlines())
        groups = {(line["image"].split("-")[0], line["features"]) for line in lines}
        assert len(groups) == 2  # red and blue
        assert table.read_text().splitlines()[0] == "image,features"

    def test_the_seed_of_the_lowest_objective_is_kept(self, run, arrays):
        """Each image's cost, measured here from its cluster's own mean."""
        found = cluster(run, 7, split="test", seeds=4)
        features = torch.nn.functional.normalize(arrays["test_features"].double(), dim=1)
        scores, smoothing = arrays["test_scores"].double(), run.config.divergence.smoothing
        for name, part in found.partitions.items():
            cost = 0.0
            for index in range(7):
                members = part.assignment == index
                assert int(members.sum()) == part.sizes[index]
                if name == "features":
                    centred = features[members] - features[members].mean(dim=0)
                    cost += centred.square().sum().item()
                else:
                    mean = scores[members].mean(dim=0, keepdim=True)
                    cost += soft_divergence(scores[members], mean, smoothing).sum().item()
            assert cost / 500 == pytest.approx(min(part.objectives), rel=1e-4)
        assert len(set(found.partitions["features"].objectives)) > 1  # so there was a choice

    def test_more_clusters_than_winners_is_said(self, output, run):
        path = run.path / "config.toml"
        smoothing = f"smoothing = {run.config.divergence.smoothing}"
        assert smoothing in path.read_text()
        path.write_text(path.read_text().replace(smoothing, "smoothing = 0.0"))
        out = output(
            *("cluster", run.path, "--clusters", 12, "--by", "divergence"),
            *("--split", "test", "--seeds", 1),
        )
        assert "of 12 clusters are empty" in out
        assert "± " not in out

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["--clusters", 31], "clusters is 31: it must be a whole number from 2 to"),
            (
                ["--clusters", 1],
                "from 2 to 30, the number of images",
            ),
            (["--clusters", 2, "--seeds", 0], "seeds is 0"),
            (["--clusters", 2, "--by", "divergence"], "no divergence network"),
            (["--clusters", 2, "--split", "test"], "no test split"),
            (["--clusters", 2, "--out", "old.csv"], "exists"),
            (["--clusters", 2, "--out", "c.txt"], "with that ending"),
        ],
    )
    def test_errors(self, refused, plain, words, expected):
        refused("cluster", plain, words, expected, "old.csv")

    def test_names_from_python_are_checked(self, plain):
        with pytest.raises(UserError, match="did you mean 'features'"):
            cluster(plain, 2, by=["feature"])
        with pytest.raises(UserError, match="'valid' is not one of"):
            search(plain, ["train:0"], split="valid")

    def test_a_text_is_no_list_of_letters(self, plain):
        with pytest.raises(UserError, match=r"by is 'features': give a list, as \['features'\]"):
            cluster(plain, 2, by="features")
        with pytest.raises(UserError, match=r"queries is 'train:0': give a list, as \['train:0'\]"):
            search(plain, "train:0")
        with pytest.raises(UserError, match=r"protocols is 'knn': give a list, as \['knn'\]"):
            evaluate(plain, protocols="knn")
