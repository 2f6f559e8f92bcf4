"""Health without labels: the formulas, the sample, the verdict, and a run that stops by it."""

import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from deepbregman.cli import main
from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, override
from deepbregman.data import open_source
from deepbregman.objectives import build_views
from deepbregman.runs import Run
from deepbregman.training import checkpoints, health
from deepbregman.training.checkpoints import load_trained_encoder
from deepbregman.training.diagnostics import (
    alpha_req,
    find_nearest,
    lidar,
    neighbour_stability,
    rankme,
)
from deepbregman.training.health import Health, judge, should_stop

from ..conftest import normal


def naive_count(spectrum: list[float]) -> float:
    """exp(-sum p log p) with p = share + 1e-7, as RankMe and LiDAR write it."""
    total = math.fsum(spectrum)
    shares = [value / total + 1e-7 for value in spectrum]
    return math.exp(-math.fsum(p * math.log(p) for p in shares))


def rotation(d: int) -> Tensor:
    return torch.linalg.qr(normal(d, d, seed=9)).Q


# RankMe


def test_rankme_agrees_with_the_definition():
    h = (normal(20, 6) + 2.0) * torch.tensor([5.0, 2.0, 1.0, 1.0, 0.1, 0.01])
    eigenvalues = np.linalg.eigvalsh((h.T @ h).numpy())
    assert float(rankme(h)) == pytest.approx(naive_count(np.sqrt(eigenvalues).tolist()), rel=1e-9)


@given(st.integers(2, 8), st.integers(0, 5), st.floats(0.01, 100.0))
def test_rankme_lies_between_one_and_the_width_and_ignores_scale_and_rotation(d, seed, scale):
    h = normal(12, d, seed=seed)
    value = float(rankme(h))
    assert 1.0 <= value <= d + 1e-4
    assert float(rankme(scale * h @ rotation(d))) == pytest.approx(value, rel=1e-6)


def test_rankme_counts_equal_directions_and_the_mean_as_one():
    assert float(rankme(torch.eye(7, dtype=torch.float64))) == pytest.approx(7.0, rel=1e-4)
    assert float(rankme(torch.ones(9, 7, dtype=torch.float64))) == pytest.approx(1.0, rel=1e-4)
    assert float(rankme(torch.zeros(9, 7))) == pytest.approx(1.0, rel=1e-4)  # a number still


# alpha-ReQ


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.5])
def test_alpha_is_that_of_a_power_law(alpha):
    """Rows whose covariance has exactly the eigenvalues j^-alpha."""
    values = torch.arange(1, 31, dtype=torch.float64) ** (-alpha / 2)
    axes = torch.diag(values) @ rotation(30)
    assert float(alpha_req(torch.cat([axes, -axes]) + 3.0)) == pytest.approx(alpha, abs=1e-9)


def test_alpha_is_the_slope_that_polyfit_finds():
    h = normal(80, 60) * torch.linspace(1, 5, 60, dtype=torch.float64)
    eigenvalues = np.linalg.eigvalsh(np.cov(h.numpy().T))[::-1]
    slope, _ = np.polyfit(np.log(np.arange(5, 51)), np.log(eigenvalues[4:50]), 1)
    assert float(alpha_req(h)) == pytest.approx(-slope, rel=1e-9)


def test_alpha_of_a_point_or_a_plane_is_undefined():
    assert math.isnan(float(alpha_req(torch.ones(20, 8, dtype=torch.float64))))
    for rank in (2, 5):  # the fit begins at the fifth
        assert math.isnan(float(alpha_req(normal(20, rank) @ normal(rank, 8, seed=1))))


# LiDAR


def naive_lidar(views: Tensor) -> float:
    num_views, num_images, d = views.shape
    means = [views[:, i].numpy().mean(axis=0) for i in range(num_images)]
    centre = np.mean(means, axis=0)
    between, within = np.zeros((d, d)), 1e-4 * np.eye(d)
    for i, mean in enumerate(means):
        between += np.outer(mean - centre, mean - centre) / num_images
        for m in range(num_views):
            away = views[m, i].numpy() - mean
            within += np.outer(away, away) / (num_images * num_views)
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    return naive_count(np.clip(np.linalg.eigvalsh(root @ between @ root), 0.0, None).tolist())


@pytest.mark.parametrize(("num_images", "d"), [(12, 5), (4, 9)])
def test_lidar_agrees_with_the_definition(num_images, d):
    centres, scales = normal(1, num_images, d, seed=1), torch.linspace(0.1, 3.0, d)
    views = centres + scales * normal(6, num_images, d)
    assert float(lidar(views)) == pytest.approx(naive_lidar(views), rel=1e-8)


def test_lidar_of_large_representations_of_few_images_is_finite():
    """Rounding then exceeds what is added to the covariance of views."""
    views = 1e8 * torch.randn(8, 10, 128, generator=torch.Generator().manual_seed(0)).double()
    assert 1.0 <= float(lidar(views)) <= 128.0


def test_lidar_ignores_directions_that_only_views_differ_in():
    """Two directions tell images apart; four hold large noise of the views."""
    angles = torch.arange(40, dtype=torch.float64) * 2 * math.pi / 40
    images = torch.stack([angles.cos(), angles.sin()], dim=1)
    views = torch.cat([images.expand(64, -1, -1), torch.zeros(64, 40, 4)], dim=2)
    noise = normal(64, 40, 6) * torch.tensor([0.01, 0.01, 9.0, 9.0, 9.0, 9.0])
    assert float(lidar(views + noise)) == pytest.approx(2.0, abs=0.05)
    assert float(rankme((views + noise)[0])) > 4.0


# Neighbours


@given(st.integers(3, 9), st.integers(0, 5))
def test_neighbours_and_their_stability_agree_with_naive_loops(n, seed):
    before, after = normal(n, 4, seed=seed), normal(n, 4, seed=seed + 100)
    k = 2
    sets = []
    for h in (before, after):
        rows = h.tolist()
        cosine = [
            [
                math.fsum(x * y for x, y in zip(a, b, strict=True))
                / (math.hypot(*a) * math.hypot(*b))
                for b in rows
            ]
            for a in rows
        ]
        order = [
            sorted((-c, j) for j, c in enumerate(row) if j != i) for i, row in enumerate(cosine)
        ]
        sets.append([{j for _, j in row[:k]} for row in order])
    expected = math.fsum(len(a & b) / k for a, b in zip(*sets, strict=True)) / n
    found = [find_nearest(h, k) for h in (before, after)]
    assert [[set(row) for row in part.tolist()] for part in found] == sets
    assert float(neighbour_stability(found[0], found[1])) == pytest.approx(expected)
    assert float(neighbour_stability(found[0], found[0].flip(1))) == 1.0


# The sample


NEW = ("rankme", "alpha_req", "lidar")


def make_sample(config: Config) -> Health:
    images = open_source(config.data.source, image_size=8).train.images
    return Health(images, config, build_views(config.views, 8), torch.device("cpu"))


def test_a_run_measures_what_its_encoder_gives_again(tiny_run, tiny_config):
    """The last record, computed anew from the checkpoint; one in each epoch, and then changes."""
    measured = make_sample(tiny_config).measure(load_trained_encoder(tiny_run))
    rows = tiny_run.metrics()
    assert {name: rows[-1][name] for name in NEW} == pytest.approx(measured, rel=1e-9)
    assert ["neighbour_stability" in row for row in rows] == [False, True, True]
    assert all(row["verdict"] and row["reason"] for row in rows)
    assert tiny_run.result()["pretrain"]["verdict"] == rows[-1]["verdict"]


def test_a_resumed_run_knows_the_neighbours_from_before(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(health, "LONG", 2)
    run = Run.open(shutil.copytree(tiny_run.path, tmp_path / "run"))
    state = checkpoints.load(run.previous_checkpoint)  # after two measurements
    checkpoints.save(run.last_checkpoint, state)
    last = resume(run.path).metrics()[-1]
    assert last["neighbour_stability"] == tiny_run.metrics()[-1]["neighbour_stability"]
    assert "long_stability" in last


class Shift(torch.nn.Module):
    """An encoder whose output is its pixels, those of an image weighed by random numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = normal(192, 12, seed=seed).float()

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight


def test_stability_is_one_for_the_same_encoder_and_less_for_another(tiny_config):
    sample = make_sample(tiny_config)
    assert "neighbour_stability" not in sample.measure(Shift(0))
    assert sample.measure(Shift(0))["neighbour_stability"] == 1.0
    assert 0.1 < sample.measure(Shift(1))["neighbour_stability"] < 0.9


def test_stability_looks_one_measurement_back(tiny_config):
    sample = make_sample(tiny_config)
    found = [
        sample.measure(Shift(seed)).get("neighbour_stability", 0.0) for seed in (0, 1, 1, 2, 2)
    ]
    assert [value == 1.0 for value in found] == [False, False, True, False, True]


def test_neighbours_of_another_sample_are_not_compared(tiny_config):
    sample = make_sample(tiny_config)
    sample.measure(Shift(0))
    sample.neighbours = [sample.neighbours[0][1:]]  # then an image could not be read
    assert "neighbour_stability" not in sample.measure(Shift(0))


def test_long_stability_looks_three_measurements_back(tiny_config):
    sample = make_sample(tiny_config)
    found = [sample.measure(Shift(seed)).get("long_stability") for seed in (0, 1, 2, 0, 3, 2)]
    assert found[:4] == [None, None, None, 1.0]
    assert found[4] is not None
    assert found[4] < 0.9
    assert found[5] == 1.0


def test_a_sample_of_large_images_is_smaller(tiny_config, monkeypatch):
    monkeypatch.setattr(health, "SAMPLE_BYTES", 20 * 3 * 8 * 8)
    assert make_sample(tiny_config).batches.num_images == 20
    monkeypatch.setattr(health, "SAMPLE_BYTES", 1)
    assert make_sample(tiny_config).batches.num_images == 2  # one has no neighbour


@pytest.mark.parametrize(("num_views", "expected"), [(2, 8), (3, 9)])
def test_the_sample_has_at_least_eight_views(num_views, expected, tiny_config):
    sample = make_sample(override(tiny_config, {"views.num_views": num_views}))
    assert sum(len(uniforms) for uniforms in sample.uniforms) == expected


def test_lidar_compares_the_views_of_each_image(tiny_config):
    sample, encoder = make_sample(tiny_config), Shift(0)
    (batch,) = sample.batches.iterate(torch.arange(sample.uniforms[0].shape[1]), 512)
    views = [
        encoder(view).double()
        for uniforms in sample.uniforms
        for view in sample.views(batch.images, batch.sizes, uniforms)
    ]
    expected = float(lidar(torch.stack(views)))
    assert sample.measure(encoder)["lidar"] == pytest.approx(expected, rel=1e-6)


def test_what_is_not_finite_is_not_recorded(tiny_config):
    sample = make_sample(tiny_config)
    broken = Shift(0)
    broken.weight[0] = math.nan
    assert sample.measure(broken) == {}
    assert sample.neighbours == []

    class Sometimes(Shift):
        def forward(self, images: Tensor) -> Tensor:
            found = super().forward(images)
            self.weight[0] = math.nan  # from the second batch on, which are the views
            return found

    assert sample.measure(Sometimes(0)) == {}
    flat = Shift(0)
    flat.weight[:, 2:] = 0.0  # a plane, whose alpha is undefined
    assert sample.measure(flat).keys() == {"rankme", "lidar"}


# The verdict


def row(epoch: int, **changes: Any) -> dict[str, Any]:
    batch = {"effective_rank": 60.0, "spread": 0.8, "learning_rate": 0.1}
    sample = {"rankme": 50.0, "neighbour_stability": 0.8, "long_stability": 0.6}
    return {"epoch": epoch, "step": 10 * epoch, **batch, **sample, **changes}


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({}, "healthy", "80% of the nearest neighbours are the same as 5 epochs ago, and they"),
        ({"step": 99}, "under-trained", "only 99 steps, too few to learn much"),
        ({"step": 1}, "under-trained", "only 1 step, too few to learn much"),
        ({"step": 100}, "healthy", "80%"),
        ({"step": 99, "spread": 0.01}, "collapsing", "spread 0.010"),
        ({"neighbour_stability": 0.49}, "under-trained", "only 49% of the nearest"),
        ({"long_stability": 0.77}, "saturated", "more epochs bring little: 80%"),
        ({"long_stability": 0.77}, "saturated", "and 77% as 3 measurements ago"),
        ({"long_stability": 0.75}, "healthy", "still drift"),
        ({"neighbour_stability": 0.6, "long_stability": 0.53}, "saturated", "60%"),
        ({"neighbour_stability": 0.96, "long_stability": 0.93}, "healthy", "still drift"),
        ({"neighbour_stability": 1.0, "long_stability": 1.0}, "saturated", "100%"),
        ({"long_stability": 0.8, "learning_rate": 0.099}, "healthy", "learning rate falls"),
        ({"long_stability": 0.8, "learning_rate": 0.2}, "under-trained", "still rises"),
        ({"effective_rank": 19.0}, "collapsing", "fell from 60 to 19.0"),
        ({"effective_rank": 21.0}, "healthy", "80%"),
        ({"spread": 0.01}, "collapsing", "spread 0.010"),
        ({"effective_rank": 1.5, "neighbour_stability": 1.0}, "collapsing", "effective rank 1.5"),
    ],
)
def test_verdict_and_its_reason(changes, verdict, reason):
    found = judge([row(5), row(10, **changes)])
    assert found["verdict"] == verdict
    assert reason in found["reason"]


def test_the_rank_is_compared_with_the_best_of_the_run():
    ranks = (30.0, 60.0, 19.0)  # less than a third of the best, and more than that of the first
    records = [row(epoch, effective_rank=rank) for epoch, rank in enumerate(ranks, start=1)]
    assert judge(records)["verdict"] == "collapsing"
    assert "fell from 60 to 19.0" in judge(records)["reason"]


def test_a_rate_that_has_fallen_settles_everything():
    low = {"long_stability": 0.8, "learning_rate": 0.04}
    assert judge([row(5), row(10, **low), row(15, **low)])["verdict"] == "healthy"
    enough = {"long_stability": 0.8, "learning_rate": 0.05}
    assert judge([row(5), row(10, **enough), row(15, **enough)])["verdict"] == "saturated"


def test_the_highest_rate_may_be_of_an_epoch_without_a_measurement():
    peak = {"epoch": 7, "step": 70, "learning_rate": 0.3}
    enough = {"long_stability": 0.8}
    assert judge([row(5), row(10, **enough)])["verdict"] == "saturated"
    assert judge([row(5), peak, row(10, **enough)])["verdict"] == "healthy"


@pytest.mark.parametrize(
    ("missing", "verdict"),
    [
        (("effective_rank", "spread"), "healthy"),  # the batch of the diagnostics was skipped
        (("neighbour_stability", "long_stability"), "under-trained"),  # of another sample
    ],
)
def test_what_could_not_be_measured_ends_no_run(missing, verdict):
    last = {name: value for name, value in row(10).items() if name not in missing}
    assert judge([row(5), last])["verdict"] == verdict


def test_a_drift_that_was_not_measured_is_not_over():
    """As in the first measurements."""
    short = row(10)
    del short["long_stability"]
    assert judge([row(5), short])["verdict"] == "healthy"


def test_first_measurement_is_too_early_and_an_epoch_without_one_is_not_judged():
    first = row(5)
    del first["neighbour_stability"]
    assert judge([first])["verdict"] == "under-trained"
    assert judge([first, {"epoch": 6, "step": 60, "effective_rank": 60.0}]) == {}


def test_a_run_stops_at_the_second_saturated_judgement_in_a_row():
    def judged(*words: str) -> list[dict[str, Any]]:
        return [{"step": i, **({"verdict": word} if word else {})} for i, word in enumerate(words)]

    assert should_stop(judged("healthy", "saturated", "", "saturated"))
    assert not should_stop(judged("saturated"))
    assert not should_stop(judged("saturated", "healthy", "saturated"))
    assert not should_stop(judged("saturated", "saturated", ""))  # an epoch that was not judged


# A run that stops


@pytest.fixture
def easily_saturated(monkeypatch) -> None:
    """Every second measurement is saturated, so that a run stops after its third."""
    for name in ("UNSETTLED", "HIGH_RATE", "USEFUL_STEPS"):
        monkeypatch.setattr(health, name, 0)
    monkeypatch.setattr(health, "LONG", 1)


STOPPING = {
    "training.epochs": 9,
    "training.stop_when_saturated": True,
    "training.knn_every": 0,
    "optimiser.warmup_epochs": 0.0,
    "optimiser.schedule": "constant",
}


@pytest.mark.usefixtures("easily_saturated")
def test_a_saturated_run_ends_well_and_says_why(tiny_config, tmp_path):
    console = Console(record=True, width=200)
    changes = {**STOPPING, "training.health_every": 2, "training.save_seconds": 1e6}
    run = pretrain(override(tiny_config, changes), run=tmp_path / "run", console=console)
    assert [row["epoch"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]
    result = run.result()["pretrain"]
    assert (result["stopped"], result["verdict"]) == ("after epoch 6: saturated", "saturated")
    said = console.export_text()
    assert "stopped after epoch 6 of 9: more epochs bring little" in said
    assert said.count("health: saturated (more epochs bring little") == 1  # said when it changes
    load_trained_encoder(run)  # it was saved, though no save was due
    again = Console(record=True, width=200)
    resume(run.path, console=again)
    said = again.export_text()
    assert "it continues" not in said
    assert f"`deepbregman pretrain --resume {run.path} --no-stop-when-saturated`" in said


@pytest.mark.usefixtures("easily_saturated")
def test_resuming_a_stopped_run_trains_on_only_if_told_to(tiny_config, tmp_path):
    run = pretrain(override(tiny_config, STOPPING), run=tmp_path / "run")
    (run.path / "result.json").unlink()  # as if it had been killed before it wrote that
    assert len(resume(run.path).metrics()) == 3
    assert run.result()["pretrain"]["stopped"] == "after epoch 3: saturated"
    main(["pretrain", "--resume", str(run.path), "--no-stop-when-saturated"])
    assert len(run.metrics()) == 9
    assert "stopped" not in run.result()["pretrain"]


def test_a_run_may_be_told_to_stop_on_the_command_line(tiny_run, tmp_path):
    shutil.copyfile(tiny_run.path / "config.toml", tmp_path / "tiny.toml")
    words = ["--run", str(tmp_path / "run"), "--stop-when-saturated", "--training.epochs", "1"]
    main(["pretrain", str(tmp_path / "tiny.toml"), *words])
    assert Run.open(tmp_path / "run").config.training.stop_when_saturated
