"""The benchmark: fair turns, a complete record, and arms that do what they are named for."""

import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from deepbregman import benchmarking
from deepbregman.benchmarking import (
    BARE,
    DIVERGENCE,
    Effort,
    TimedArm,
    configure,
    prepare_arm,
    time_arms,
)
from deepbregman.commands.bench import bench
from deepbregman.config import load_recipe, override
from deepbregman.errors import UserError
from deepbregman.training.processes import launch

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


class Clock:
    """A clock that only moves when a step says how long it took."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(benchmarking, "time", clock)
    return clock


def test_arms_take_turns_and_the_median_counts(clock):
    calls: list[str] = []
    slow_seconds = iter([0.01, 0.21, 0.01, 0.01, 0.01])  # one slow moment

    def slow() -> None:
        calls.append("a")
        clock.now += next(slow_seconds)

    def quick() -> None:
        calls.append("b")
        clock.now += 0.002

    first, second = time_arms(
        [TimedArm("a", slow, 100), TimedArm("b", quick, 100)], CPU, Effort(0, 5, 1)
    )
    assert calls == ["a", "b"] * 5
    assert first["milliseconds"] == pytest.approx(10)  # the turn of 210 ms does not count
    assert first["views_per_second"] == pytest.approx(10_000)
    assert first["spread"] == pytest.approx(21)
    assert second["views_per_second"] == pytest.approx(50_000)


def test_lead_in_steps_are_taken_but_not_timed(clock):
    piled_up = [0] * 3

    def step() -> None:
        """Free while a queue lasts, then 10 ms."""
        if piled_up:
            piled_up.pop()
        else:
            clock.now += 0.01

    (timing,) = time_arms([TimedArm("a", step, 1, lead_in=3)], CPU, Effort(0, 1, 3))
    assert timing["milliseconds"] == pytest.approx(10)


def test_first_step_includes_building(clock):
    def build() -> benchmarking.Step:
        clock.now += 0.05
        return lambda: None

    assert prepare_arm("a", 1, build, CPU, warmup=1).first_step_seconds == pytest.approx(0.05)


def test_tiny_run_leaves_a_record_a_table_and_a_figure(tmp_path):
    screen = Console(file=io.StringIO(), width=140)
    names = ("SimCLR", "K=100", "views alone")
    record = bench(scale="tiny", only=names, out=tmp_path / "bench", console=screen)
    written = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert written == json.loads(json.dumps(record))
    (group,) = record["groups"]
    assert [arm["name"] for arm in group["arms"]] == [BARE, *names]
    assert all(arm["views_per_second"] > 0 for arm in group["arms"])
    assert {"commit", "versions", "device", "platform"} <= record.keys()
    assert "over bare" in screen.file.getvalue()
    assert "GB" not in screen.file.getvalue()  # a CPU's memory is not measured
    with Image.open(tmp_path / "bench" / "bench.png") as figure:
        assert figure.width > 300


def script(name: str) -> ModuleType:
    """Import a script of the folder ``benchmarks/``, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py")))
def test_scripts_outside_the_package_find_what_they_import(name, monkeypatch):
    """No type checker looks at them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert script(name).__doc__


@pytest.mark.slow
def test_scripts_outside_the_package_run(tmp_path):
    streaming = script("streaming")
    (group,) = streaming.streaming(tiny=True, out=tmp_path / "streaming")["groups"]
    assert [arm["name"] for arm in group["arms"]] == [
        BARE,
        "K=100, from memory",
        "K=100, files",
        "K=100, shards",
    ]
    assert "JPEG" in group["files"]
    script("peers").peers(scale="tiny", out=tmp_path / "peers")
    (group,) = json.loads((tmp_path / "peers" / "bench.json").read_text())["groups"]
    assert group["arms"][0]["name"] == BARE


def test_some_arms_of_other_libraries_alone(tmp_path):
    """Each arm is compiled, which takes longer than to time it."""
    peers = script("peers").peers
    peers(scale="tiny", only=("SimCLR",), out=tmp_path)
    (group,) = json.loads((tmp_path / "bench.json").read_text())["groups"]
    assert [arm["name"] for arm in group["arms"]] == [BARE, "SimCLR"]
    with pytest.raises(UserError, match="--only 'byol' is not one of bare encoder; SimCLR; "):
        peers(scale="tiny", only=("byol",))


def test_generated_photographs_are_of_realistic_size(tmp_path):
    streaming = script("streaming")
    mean_bytes = streaming.write_photographs(tmp_path, 3)
    assert 60_000 < mean_bytes < 200_000  # ImageNet's are about 110,000
    with Image.open(tmp_path / "000000.jpg") as picture:
        assert picture.size == (streaming.WIDTH, streaming.HEIGHT)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="'huge' is not one of main, large, cpu, tiny"):
        bench(scale="huge")
    with pytest.raises(UserError, match="--only 'K=7' is not one of bare encoder; SimCLR; K=10;"):
        bench(scale="tiny", only=("SimCLR", "K=7"))


def test_published_speeds_meet_the_targets_they_claim():
    """The page of speeds is the committed record."""
    record = json.loads((ROOT / "results" / "bench" / "h200" / "main.json").read_text())
    speeds = {
        (group["encoder"], arm["name"]): arm["images_per_second"]
        for group in record["groups"]
        for arm in group["arms"]
    }
    page = (ROOT / "docs" / "speed.md").read_text()
    assert f"| {speeds['resnet18', BARE]:,.0f} | 1 |" in page
    small = [("resnet18", name) for name in ("K=100", "K=100, smooth", "lightly SimCLR")]
    for encoder, name in (*small, ("resnet50", "K=100")):
        speed = speeds[encoder, name]
        assert f"| {speed:,.0f} | {speed / speeds[encoder, BARE]:.2f} |" in page
    newest = ROOT / "results" / "bench" / "h200" / "streaming-slots.json"
    (group,) = json.loads(newest.read_text())["groups"]
    bare, *others = (arm["views_per_second"] for arm in group["arms"])
    assert len(others) == 3  # from memory, files and shards
    for streamed in others:
        assert f"| {streamed:,.0f} | {streamed / bare:.2f} |" in page
    large = json.loads((ROOT / "results" / "bench" / "h200" / "large.json").read_text())
    ratios = [
        group["arms"][-1]["images_per_second"] / group["arms"][0]["images_per_second"]
        for group in large["groups"]
    ]
    assert f"{ratios[0]:.2f} and {ratios[1]:.2f}" in page
    again = json.loads((ROOT / "results" / "bench" / "h200" / "main-again.json").read_text())
    forms = [
        arm["images_per_second"] / group["arms"][0]["images_per_second"]
        for group in (record["groups"][0], again["groups"][0])
        for arm in group["arms"]
        if arm["name"].startswith("K=")
    ]
    assert len(forms) == 10
    for text in (page, (ROOT / "README.md").read_text()):
        assert f"{min(forms):.2f} to {max(forms):.2f}" in text


def read_record(name: str) -> list[dict[str, Any]]:
    record = json.loads((ROOT / "results" / "bench" / "h200" / f"{name}.json").read_text())
    groups: list[dict[str, Any]] = record["groups"]
    return groups


def test_the_page_names_the_methods_that_are_slow_beside_their_passes():
    """The table itself is written by docs/tables.py."""
    groups = read_record("methods")
    ratios = {group["recipe"]: group["arms"][-1]["over_passes"] for group in groups}
    page = (ROOT / "docs" / "speed.md").read_text()
    fast = [recipe for recipe, ratio in ratios.items() if ratio >= 0.85]
    assert f"{len(fast)} of {len(ratios)} methods have at least 0.85" in page
    slow = ratios.keys() - set(fast)
    for recipe in slow:
        assert ratios[recipe] >= 0.80 or f"`{recipe}` ({ratios[recipe]:.2f})" in page
    with_heads = [*read_record("heads"), *read_record("heads-again")]  # the newer one counts
    heads = {group["recipe"]: group["arms"][-1]["over_networks"] for group in with_heads}
    assert heads.keys() == slow
    for recipe, ratio in heads.items():
        assert ratio >= 0.85
        assert f"`{recipe}` {ratio:.2f}" in page


def test_the_page_has_the_speeds_of_lightly():
    page = (ROOT / "docs" / "speed.md").read_text().partition("## Beside lightly")[2]
    shown = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", page, re.M)
    records = {"SimCLR": "peers", "BYOL": "peers-byol"}
    assert [name for name, *_ in shown] == list(records)
    for name, *cells in shown:
        (group,) = read_record(records[name])
        arms = {arm["name"]: arm for arm in group["arms"]}
        speeds = {arm: found["views_per_second"] for arm, found in arms.items()}
        ours, theirs = speeds[name], speeds[f"lightly {name}"]
        assert ours < speeds[BARE]  # no whole step is faster; with smaller views it was
        assert cells == [f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f}"]
        assert f"{arms[f'lightly {name}']['spread']:.1f} times ({name})" in page
        assert round(arms[name]["spread"], 2) <= 1.02


def test_views_are_as_large_as_those_of_other_libraries():
    """Whatever the recipe has: the published speeds are of views of 32 px."""
    for config in (configure("resnet18", 512), script("peers").configure_byol("resnet18", 512)):
        assert config.view_size == config.data.image_size == 32
        assert config.training.batch_size == 512


def test_the_passes_of_a_method_are_those_of_its_encoders_and_heads(tmp_path):
    """Here SwAV has small views and no teacher; BYOL two views of each, and a predictor."""
    methods = script("methods")
    images, fabric = benchmarking.make_random_images(16, 32), launch("cpu")
    small = {**benchmarking.QUIET, "encoder.name": "small", "training.batch_size": 8}
    small["views.relative_size"] = 1.0
    expected = {
        "swav": [
            *[((16, 3, 32, 32), True, True, False), ((16, 32), True, False, True)],
            *[((32, 3, 16, 16), True, True, False), ((32, 32), True, False, True)],
            ((48, 128), True, False, True),  # its prototypes
        ],
        "byol": [
            *[((16, 3, 32, 32), True, True, False), ((16, 32), True, False, True)],
            ((16, 256), True, False, True),
            *[((16, 3, 32, 32), False, True, False), ((16, 32), False, False, False)],
        ],
    }
    groups = {"swav": {"small_views.num_views": 4, "small_views.relative_size": 0.5}}
    for recipe, shapes in expected.items():
        config = override(load_recipe(recipe), small | groups.get(recipe, {}))
        passes = methods.record_passes(config, images, fabric, tmp_path)
        assert [
            (tuple(one.shape), one.learns, one.is_encoder, one.gives_gradient) for one in passes
        ] == shapes
    weights = [next(one.network.parameters()) for one in passes]
    before = [weight.clone() for weight in weights]
    methods.passes_step(passes, config, fabric)()
    kept = [torch.equal(*pair) for pair in zip(before, weights, strict=True)]
    assert kept == [False, False, False, True, True]  # the teacher's stay


def test_the_divergence_of_the_arms_is_the_papers():
    found, paper = configure("small", 8, DIVERGENCE), load_recipe("paper")
    assert (found.teacher, found.weak_views) == (None, None)
    for name in ("source", "compare", "kernel", "pairs", "smoothing", "hidden", "sets"):
        assert getattr(found.divergence, name) == getattr(paper.divergence, name), name
