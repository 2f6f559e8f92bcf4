"""Figures that commands draw once: every point is there, and every picture is a picture."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepbregman.reporting import figures
from deepbregman.reporting.figures import FeatureMap, PlaneMap

RESULTS = Path(__file__).parents[2] / "results"
LINES = (RESULTS / "quickstart/metrics.jsonl").read_text().splitlines()
RANDOM = np.random.default_rng(0)


def check_picture(path: Path, *, least_colours: int = 20) -> None:
    with Image.open(path) as image:
        assert image.width > 600
        assert len(image.getcolors(maxcolors=1_000_000) or []) > least_colours


def test_the_quickstart_s_figure(tmp_path):
    labels = RANDOM.integers(0, 10, 60)
    maps = [FeatureMap(name, RANDOM.normal(size=(60, 2))) for name in ("before", "after")]
    metrics = [json.loads(line) for line in LINES]
    names = [str(index) for index in range(10)]
    figures.save_quickstart_figure(tmp_path / "a.png", metrics, maps, labels, names)
    check_picture(tmp_path / "a.png")


def test_maps_hold_every_point(tmp_path):
    labels = np.array([0, 0, 1, 1, 1])
    one = FeatureMap("run", RANDOM.normal(size=(5, 2)), ("silhouette 0.5",))
    spec = figures.draw_feature_map(one, labels, ["cat", "<dog>"]).spec
    points, names = spec["layer"][0]["data"]["values"], spec["layer"][1]["data"]["values"]
    assert [point["class"] for point in points] == ["cat", "cat", "<dog>", "<dog>", "<dog>"]
    assert [point["x"] for point in points] == pytest.approx(one.points[:, 0], rel=1e-4)
    assert names[1]["x"] == pytest.approx(np.median(one.points[2:, 0]), rel=1e-4)
    figures.save_map_figure([tmp_path / "a.svg"], [one], labels, ["cat", "<dog>"])
    text = (tmp_path / "a.svg").read_text()
    assert "silhouette 0.5" in text
    assert "role-legend-label" in text


def test_the_plane_is_coloured_by_height_and_zero_is_grey():
    x = np.linspace(-2.0, 2.0, 41)
    heights = np.maximum(0.0, x[None] ** 2 + x[:, None] ** 2 - 1.0)
    pixels = figures._colour_heights(heights, top=heights.max())
    assert pixels[20, 20].tolist() == [0xC9, 0xC9, 0xC9]  # inside the circle
    assert pixels[0, 0].tolist() == [0xFD, 0xE7, 0x25]  # the corner is the highest
    regions = figures._colour_regions(np.array([[3, 3], [7, 3]]))
    assert (regions[0, 0] == regions[1, 1]).all()
    assert (regions[0, 0] != regions[1, 0]).any()


def test_the_planes_and_the_rings(tmp_path):
    x = np.linspace(-2.0, 2.0, 20)
    maps = [
        PlaneMap("D(x, x0)\nsquared", x[None] ** 2 + x[:, None] ** 2),
        PlaneMap("regions", np.sign(x)[None] * np.ones((20, 1)), is_partition=True),
    ]
    points, labels = RANDOM.normal(size=(12, 2)), np.arange(12) % 3
    paths = [tmp_path / "plane.png", tmp_path / "plane.svg"]
    figures.save_plane_figure(paths, maps, x=x, y=x, points=points, labels=labels, chosen=4)
    check_picture(paths[0])
    rows = [
        {"arm": "learned", "mean": 0.9, "deviation": 0.02, "n": 3, "is_baseline": False},
        {"arm": "k-means", "mean": -0.1, "deviation": None, "n": 3, "is_baseline": True},
    ]
    figures.save_ring_figure(
        [tmp_path / "rings.svg"],
        points=RANDOM.normal(size=(12, 5, 2)),
        labels=labels,
        clusters={"learned": labels, "k-means": labels[::-1]},
        rows=rows,
    )
    text = (tmp_path / "rings.svg").read_text()
    assert "0.900 ± 0.020" in text
    assert "-0.100<" in text  # one value has no deviation
    assert "± 0.000" not in text
    assert "Clusters by learned" in text


def test_speeds_are_shares_of_the_bare_encoder(tmp_path):
    record = json.loads((RESULTS / "bench/h200/main.json").read_text())
    figures.save_speed_figure(tmp_path / "speed.svg", record)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "speed.svg").read_text())
    assert {"0.97  (92,060 / s)", "0.2", "1.0"} <= set(words)
    assert "views alone" not in words  # they train nothing, at 50 times the speed
