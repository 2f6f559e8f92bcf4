"""The benchmark: fair turns, a complete record, and arms that do what they are named for."""

import io
import json
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from deepbregman.benchmarks.arms import configuration
from deepbregman.benchmarks.bench import FLOOR, SCALES, bench
from deepbregman.benchmarks.streaming import HEIGHT, WIDTH, write_photographs
from deepbregman.benchmarks.timing import Arm, prepare, time_arms
from deepbregman.errors import UserError
from deepbregman.reporting.speed import speed_table

CPU = torch.device("cpu")


def test_arms_take_turns_and_the_median_counts() -> None:
    calls: list[str] = []
    pauses = iter([0.0, 0.2, 0.0, 0.0, 0.0])  # one slow moment

    def slow() -> None:
        calls.append("a")
        time.sleep(0.01 + next(pauses))

    def quick() -> None:
        calls.append("b")
        time.sleep(0.002)

    first, second = time_arms([Arm("a", slow, 100), Arm("b", quick, 100)], CPU, turns=5, steps=1)
    assert calls == ["a", "b"] * 5
    assert 10 <= first.milliseconds < 100  # the 210 ms turn does not count
    assert first.images_per_second == pytest.approx(100 / (first.milliseconds / 1e3))
    assert first.spread > 5
    assert second.images_per_second > first.images_per_second


def test_lead_in_steps_are_taken_but_not_timed() -> None:
    piled_up = [0.0] * 3

    def step() -> None:
        """Free while a queue lasts, then 10 ms."""
        if piled_up:
            piled_up.pop()
        else:
            time.sleep(0.01)

    (timing,) = time_arms([Arm("a", step, 1, lead_in=3)], CPU, turns=1, steps=3)
    assert timing.milliseconds >= 10


def test_first_step_includes_building() -> None:
    def build() -> object:
        time.sleep(0.05)
        return lambda: None

    arm = prepare("a", 1, build, CPU, warmup=1)
    assert arm.first_step_seconds >= 0.05


def test_tiny_run_leaves_a_record_a_table_and_a_figure(tmp_path: Path) -> None:
    screen = Console(file=io.StringIO(), width=140)
    record = bench(
        scale="tiny",
        only=("SimCLR", "K=100", "views alone", "torchvision views"),
        out=tmp_path / "bench",
        accelerator="cpu",
        console=screen,
    )
    assert json.loads((tmp_path / "bench" / "bench.json").read_text()) == json.loads(
        json.dumps(record)
    )
    group, _ = record["groups"]  # and the streaming group
    names = [arm["name"] for arm in group["arms"]]
    assert names == [FLOOR, "SimCLR", "K=100", "views alone", "torchvision views"]
    assert all(arm["images_per_second"] > 0 for arm in group["arms"])
    assert {"commit", "versions", "device", "platform"} <= record.keys()
    assert "over bare" in screen.file.getvalue()
    with Image.open(tmp_path / "bench" / "bench.png") as figure:
        assert figure.width == 960


def test_streaming_group(tmp_path: Path) -> None:
    from deepbregman.benchmarks.streaming import streaming_group
    from deepbregman.training.processes import launch

    group = streaming_group(launch("cpu"), Console(quiet=True), tiny=True)
    assert [arm["name"] for arm in group["arms"]] == [FLOOR, "K=100, streamed"]
    assert "JPEG" in group["files"]
    assert speed_table(group).row_count == 2


def test_photographs_are_of_realistic_size(tmp_path: Path) -> None:
    mean_bytes = write_photographs(tmp_path, 3)
    assert 60_000 < mean_bytes < 200_000  # ImageNet's are about 110,000
    with Image.open(tmp_path / "000000.jpg") as picture:
        assert picture.size == (WIDTH, HEIGHT)


def test_unknown_scale_is_refused() -> None:
    with pytest.raises(UserError, match="'huge' is not one of"):
        bench(scale="huge")
    assert {"main", "large", "streaming", "full", "cpu", "tiny"} == set(SCALES)


def test_published_speeds_meet_the_targets_they_claim() -> None:
    """The README's speed table is the committed record."""
    root = Path(__file__).parents[1]
    record = json.loads((root / "results" / "bench" / "h200" / "main.json").read_text())
    speeds = {
        (group["encoder"], arm["name"]): arm["images_per_second"]
        for group in record["groups"]
        for arm in group["arms"]
    }
    readme = (root / "README.md").read_text()
    for encoder, name in (("resnet18", "K=100"), ("resnet18", FLOOR), ("resnet50", "K=100")):
        assert f"{speeds[encoder, name]:,.0f}" in readme
    streaming = json.loads((root / "results" / "bench" / "h200" / "streaming.json").read_text())
    (group,) = streaming["groups"]
    bare, streamed = (arm["images_per_second"] for arm in group["arms"])
    assert f"{streamed:,.0f} of its bare {bare:,.0f}" in readme
    assert f"{streamed / bare:.2f}" in readme
    large = json.loads((root / "results" / "bench" / "h200" / "large.json").read_text())
    ratios = [
        group["arms"][-1]["images_per_second"] / group["arms"][0]["images_per_second"]
        for group in large["groups"]
    ]
    assert f"{ratios[0]:.2f} and {ratios[1]:.2f}" in readme


def test_views_are_as_large_as_the_peers() -> None:
    """Whatever the recipe has: the published speeds are of views of 32 px."""
    config = configuration("resnet18", 512, {})
    assert config.view_size == config.data.image_size == 32
