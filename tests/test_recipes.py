"""Every recipe trains on a few digits, and its first lines have the numbers of the records."""

import json
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import load_recipe, override, recipes

from .objectives import methods


# Those of the methods are trained by objectives/test_methods.py.
@pytest.mark.parametrize("name", [name for name in recipes() if name not in methods.METHODS])
def test_recipe_trains(name, few_digits, tmp_path):
    small = {
        "data.source": few_digits,
        "data.image_size": 8,
        "encoder.name": "small",
        "encoder.projection_hidden": 32,
        "divergence.hidden": 8,
        "training.batch_size": 40,
        "training.epochs": 3,
        "training.knn_every": 0,
        "training.health_every": 0,
        "training.tensorboard": False,
        "optimiser.milestones": [],
        "optimiser.schedule": "constant",
        "optimiser.warmup_epochs": 0,
        "optimiser.learning_rate": 5e-3,  # theirs are for other networks and batches
    }
    recipe = load_recipe(name)
    if recipe.optimiser.name == "lars":  # a thousandth of each weight's norm, times the rate
        small["optimiser.learning_rate"] = 5.0
    if recipe.divergence.num_subnetworks > 4096:
        small["divergence.num_subnetworks"] = 4096  # too many to be full here
    config = override(recipe, small)
    run = pretrain(config, run=tmp_path / "run", console=Console(quiet=True))
    first, *_, last = run.metrics()
    assert last["total"] < first["total"]
    assert ("active_subnetworks" in last) == (config.divergence.weight > 0)


RESULTS = Path(__file__).parents[1] / "results"
LINEAR, KNN = "linear, cached features", "knn, cosine, k=20"


def read_head(name: str) -> str:
    """Return the comment that a recipe begins with, as one line."""
    lines = (RESULTS.parent / f"src/deepbregman/recipes/{name}.toml").read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def read_arms(study: str) -> dict[str, dict[str, str]]:
    """Return the metrics of each arm of a recorded study, as the first lines write them."""
    arms = json.loads((RESULTS / "studies" / study / "results.json").read_text())["arms"]
    return {
        arm["arm"]: {
            name: f"{found['mean']:.2f}"
            + (f" +- {found['deviation']:.2f}" if found["n"] > 1 else "")
            for name, found in arm["metrics"].items()
        }
        | {"seeds": f"{n} seeds" if (n := arm["metrics"][LINEAR]["n"]) > 1 else "one seed"}
        for arm in arms
        if arm["metrics"]
    }


def test_the_first_lines_have_the_cost_of_the_record():
    groups = json.loads((RESULTS / "bench/h200/methods.json").read_text())["groups"]
    assert len(groups) == 22
    for group in groups:
        (step,) = (arm for arm in group["arms"] if arm["name"] == "step")
        minutes = 200 * (50_000 // group["batch_size"]) * step["milliseconds"] / 60_000
        words = f"{minutes:.1f} minutes of steps on one H200, {step['peak_gigabytes']:.1f} GB"
        assert words in read_head(group["recipe"]), group["recipe"]


def test_the_first_lines_have_the_accuracy_of_the_record():
    checked = 0
    for arm, found in read_arms("methods").items():
        if arm in recipes() and "results/studies/methods)" in (head := read_head(arm)):
            assert f"{found[LINEAR]} linear, {found[KNN]} kNN (k = 20)" in head, arm
            assert found["seeds"] in head, arm
            checked += 1
    assert checked == 21
    for study, arm in (("comparison-cifar10", "simclr"), ("comparison-teacher", "best")):
        found = read_arms(study)[arm]
        assert f"{found[LINEAR]} linear, {found[KNN]} kNN (k = 20)" in read_head(arm)
    rows = [
        json.loads((RESULTS / f"cifar10-race-50/seed{seed}/result.json").read_text())["evaluations"]
        for seed in range(3)
    ]
    for variant, words in (("cached features", "linear"), ("cosine, k=20", "kNN (k = 20)")):
        values = [
            row["value"]
            for seed in rows
            for row in seed
            if (row["variant"], row["metric"]) == (variant, "top1")
        ]
        said = f"{statistics.mean(values):.2f} +- {statistics.stdev(values):.2f} {words}"
        assert said in read_head("cifar10-fast")
    table = json.loads((RESULTS / "quickstart/result.json").read_text())["quickstart"]
    (row,) = (row for row in table if row["features"] == "pretrained encoder")
    few = f"{row['few_labels']:.1f} +- {row['few_labels_deviation']:.1f} with 5 labels per class"
    assert f"{row['linear']:.1f} linear, {row['knn']:.1f} kNN, {few}" in read_head("digits")
