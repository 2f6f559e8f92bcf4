"""Maps of features: the same images for every run, and numbers that scikit-learn confirms."""

import json

import numpy as np
import pytest
from sklearn.metrics import silhouette_score

from deepbregman.cli import main
from deepbregman.commands.embed import embed
from deepbregman.commands.export import export


def test_a_run_and_its_exported_encoder_side_by_side(tmp_path, short_run):
    other, out = tmp_path / "other.safetensors", tmp_path / "maps"
    export(short_run.path, format="safetensors", out=other)
    runs = [str(short_run.path), str(other), str(short_run.path)]  # one of them twice
    main(["study", "tsne", "--runs", *runs, "--images", "100", "--seeds", "1", "--out", str(out)])
    results = json.loads((out / "results.json").read_text())
    rows = {(row["arm"], row["metric"]): row["mean"] for row in results["rows"]}
    assert results["settings"]["images"] == 100
    for metric in ("silhouette", "kNN, k=20, %", "k-means NMI", "k-means ARI"):
        assert rows[short_run.path.name, metric] == pytest.approx(rows["other", metric])
    arrays = np.load(out / "coordinates.npz", allow_pickle=False)
    assert arrays["runs"].tolist() == [short_run.path.name, "other"]
    assert arrays["map_0"].shape == (1, 100, 2)
    assert np.bincount(arrays["labels"]).min() >= 9  # stratified
    assert (out / "tsne.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "tsne.svg").is_file()


@pytest.mark.slow
def test_the_silhouette_is_of_the_features(tmp_path, short_run):
    out = tmp_path / "maps"
    command = ["study", "tsne", "--runs", str(short_run.path), "--images", "10000"]
    main([*command, "--seeds", "1", "--out", str(out)])
    rows = {row["metric"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
    embed(short_run.path, tmp_path / "features.npz")
    arrays = np.load(tmp_path / "features.npz")
    reference = silhouette_score(arrays["test_features"], arrays["test_labels"], metric="cosine")
    assert rows["silhouette"]["mean"] == pytest.approx(reference, abs=1e-5)
    by_class = [rows[f"silhouette of class {digit}"]["mean"] for digit in range(10)]
    weights = np.bincount(arrays["test_labels"])
    assert np.average(by_class, weights=weights) == pytest.approx(reference, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--runs", "nowhere"], "is not a run folder"),
        (["--runs", __file__], "neither .safetensors nor .pth"),
        (["--runs", "RUN", "--images", "3"], "2 of each class"),
        (["--runs", "RUN", "--data", "nothing"], "no such folder"),
    ],
)
def test_bad_options_are_refused(options, words, short_run, refused):
    given = [short_run.path if option == "RUN" else option for option in options]
    refused(["study", "tsne", *given], words)
