"""Detection from a run folder to rows, on a devkit of drawings and on real photographs."""

import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from rich.console import Console
from torch import nn

from deepbregman.commands.evaluate import evaluate
from deepbregman.config import Config, override
from deepbregman.data.voc import Detections
from deepbregman.errors import UserError
from deepbregman.evaluation.detection import protocol
from deepbregman.evaluation.detection.average_precision import METRICS
from deepbregman.evaluation.detection.detectors import (
    PredictedBoxes,
    find_differences,
    map_trunk_names,
    require_fitting,
)
from deepbregman.evaluation.inputs import Evaluation
from deepbregman.evaluation.options import Detect, Options
from deepbregman.method.networks import Encoder
from deepbregman.objectives import OwnParts, build_step
from deepbregman.runs import Record, Run, collect_provenance
from deepbregman.training import checkpoints

pytestmark = pytest.mark.usefixtures("cheap_weights")
SHARED = Path(os.environ.get("DEEPBREGMAN_SHARED", Path(__file__).parents[3] / "shared"))
SAMPLE = SHARED / "data" / "voc_mini"
COLOURS = {"aeroplane": (220, 40, 40), "cat": (40, 200, 60), "person": (50, 70, 230)}
TINY = Detect(
    architectures=("fpn",),
    iterations=1,
    batch_size=2,
    learning_rate=0.005,
    image_side=(32, 32),
    regions=8,
    proposals=10,
    workers=0,
)


def detect(
    run: Run,
    data: Path,
    options: Detect = Detect(),  # noqa: B008  # frozen
    seeds: int = 1,
    seed: int = 0,
    console: Console | None = None,
) -> list[Record]:
    return evaluate(
        run,
        protocols=("detect",),
        data=str(data),
        detect=options,
        seeds=seeds,
        seed=seed,
        console=console,
    )


def make_run(path: Path, own: nn.Module | None = None, **changes: object) -> Run:
    """A run as pretraining leaves it, of a network whose weights were never trained."""
    settings = {"encoder.name": "resnet18", "encoder.stem": "standard", **changes}
    config = override(Config(), settings)
    run = Run.create(path, config, collect_provenance("cpu"))
    torch.manual_seed(1)
    step = build_step(config, (0.45, 0.45, 0.45), (0.2, 0.2, 0.2), own=OwnParts(own))
    checkpoints.save(run.last_checkpoint, {**checkpoints.collect_networks(step), "epoch": 400.0})
    return run


def draw_scene(folder: Path, name: str, seed: int) -> None:
    """A coloured rectangle on grey noise; the colour is the class."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(90, 150, (64, 64, 3)).astype(np.uint8)
    width, height = generator.integers(28, 44, 2).tolist()
    left, top = int(generator.integers(1, 63 - width)), int(generator.integers(1, 63 - height))
    word = list(COLOURS)[seed % len(COLOURS)]
    colour = COLOURS[word] + generator.integers(-20, 20, (height, width, 3))
    pixels[top : top + height, left : left + width] = colour.clip(0, 255)
    corners = (left + 1, top + 1, left + width, top + height)
    tags = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    inside = "".join(f"<{tag}>{value}</{tag}>" for tag, value in tags)
    note = f"<object><name>{word}</name><bndbox>{inside}</bndbox></object>"
    Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
    (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>{note}</annotation>")


def make_devkit(root: Path, train: list[int], test: list[int]) -> Path:
    """Scenes by their seeds; the same seed in both splits is the same scene."""
    folder = root / "VOCdevkit" / "VOC2007"
    for part in ("ImageSets/Main", "Annotations", "JPEGImages"):
        (folder / part).mkdir(parents=True)
    for split, seeds in (("trainval", train), ("test", test)):
        names = [f"{split}{seed:02d}" for seed in seeds]
        for name, seed in zip(names, seeds, strict=True):
            draw_scene(folder, name, seed)
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names))
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def devkit(tmp_path_factory) -> Path:
    return make_devkit(tmp_path_factory.mktemp("voc"), [0, 1, 2], [3])


def test_rows_files_and_what_is_said(run, devkit, monkeypatch):
    console = Console(record=True, width=200, file=io.StringIO())
    rows = detect(run, data=devkit, options=TINY, console=console)
    said = console.export_text()
    assert "3 images to train on, 1 to test on: VOC2007 trainval, VOC2007 test; without" in said
    assert "fpn-pretrained-seed0: loaded 120 of 120 tensors of the encoder\n" in said
    assert "fpn-random-seed0: loaded 0 of 120 tensors of the encoder (its weights are" in said
    assert "AP50 by class" in said
    arms = ("FPN, pretrained", "FPN, random")
    assert [(row["variant"], row["metric"]) for row in rows] == [
        (variant, metric) for variant in arms for metric in METRICS
    ]
    for row in rows:
        assert row["protocol"] == "detect"
        assert (row["num_train"], row["num_test"], row["n"]) == (3, 1, 1)
        assert (row["epoch"], row["epochs"]) == (400.0, 400)
        assert 0.0 <= row["value"] <= 100.0
        assert row["values"] == [row["value"]]
        assert row["deviation"] is None
        assert row["details"]["proposals"] == TINY.proposals  # what else the numbers depend on
        assert row["details"]["num_loaded"] == (120 if row["variant"] == arms[0] else 0)
    assert run.result()["evaluations"] == rows
    json.dumps(rows)  # as result.json takes them
    folder = run.path / "detection" / "fpn-pretrained-seed0"
    assert sorted(path.name for path in folder.iterdir()) == ["detections.json", "result.json"]
    assert set(json.loads((folder / "detections.json").read_text())) == {"VOC2007/test03"}

    # Asked again, nothing is trained; asked otherwise, nothing is mixed up.
    monkeypatch.setattr(protocol, "fine_tune", lambda *_, **__: pytest.fail("it was trained again"))
    again = detect(run, data=devkit, options=TINY)
    assert [row["value"] for row in again] == [row["value"] for row in rows]
    with pytest.raises(UserError, match=r"result\.json was made with other.*batch_size was 2, is"):
        detect(run, data=devkit, options=replace(TINY, batch_size=3))
    (folder / "result.json").write_text('{"scores": {}')
    with pytest.raises(UserError, match=r"result\.json cannot be used .*restore it or remove"):
        detect(run, data=devkit, options=TINY)


def test_without_the_package_that_scores_nothing_is_trained(devkit, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pycocotools", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"{protocol.__package__}.average_precision")
    monkeypatch.setattr(protocol, "fine_tune", lambda *_, **__: pytest.fail("it was trained"))
    with pytest.raises(ModuleNotFoundError, match="pycocotools"):
        detect(run, data=devkit, options=TINY)


def test_the_arms_differ_in_the_trunk_alone(run, devkit):
    evaluation = Evaluation(run, Options(("detect",), str(devkit), detect=TINY), "cpu")
    (pretrained, loaded), (random, none) = (
        protocol.assemble_detector(evaluation, "fpn", trunk, 0) for trunk in TINY.arms
    )
    assert (loaded, none) == (120, 0)
    trunk = set(map_trunk_names(pretrained).values())
    theirs = random.state_dict()
    for name, tensor in pretrained.state_dict().items():
        if name not in trunk:
            assert torch.equal(tensor, theirs[name]), name
        elif "conv" in name:
            assert not torch.equal(tensor, theirs[name]), name
    state = checkpoints.load(run.last_checkpoint)["objective"]
    saved = state["encoder.trunk.layer1.0.conv1.weight"]
    assert torch.equal(pretrained.get_parameter("backbone.body.layer1.0.conv1.weight"), saved)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ("c5",)}, "each item one of c4, fpn"),
        ({"architectures": ()}, "at least one"),
        ({"arms": ("pretrained", "pretrained")}, "each once"),
        ({"arms": ("pretraind",)}, "each item one of pretrained, random"),
        ({"norm": "frozen"}, "the pretrained arm alone"),
        ({"norm": "group"}, "one of train, frozen"),
        ({"iterations": 0}, "detect.iterations is 0: it must be 1 or more"),
        ({"learning_rate": float("nan")}, "it must be finite"),
        ({"clip_gradient": -1.0}, "it must be 0 or more"),
        ({"image_side": (800, 480)}, "from low to high"),
        ({"image_side": (8, 480)}, "between 32 and 4096"),
        ({"image_side": (480, 1_000_000)}, "between 32 and 4096"),
    ],
)
def test_bad_options_are_refused(changes, says):
    with pytest.raises(UserError) as error:
        Detect(**changes)  # type: ignore[arg-type]  # parametrised
    assert says in str(error.value)


def test_an_encoder_that_does_not_fit_is_refused_first(tmp_path):
    run = make_run(tmp_path / "run", **{"encoder.stem": "thumbnail"})
    with pytest.raises(UserError, match="thumbnail stem"):
        detect(run, data=tmp_path / "nowhere")
    assert not (run.path / "detection").exists()


def test_a_devkit_that_is_not_whole_is_refused_first(run, tmp_path):
    before = sorted(run.path.rglob("*"))
    with pytest.raises(UserError, match="no split of Pascal VOC"):
        detect(run, data=tmp_path)
    assert sorted(run.path.rglob("*")) == before


def test_a_resnet_of_another_package_is_named_with_it():
    timm = pytest.importorskip("timm")
    trunk = timm.create_model("test_resnet", num_classes=0)
    with pytest.raises(UserError, match="a ResNet of timm: detection takes"):
        require_fitting(Encoder(trunk, trunk.num_features))


def test_the_devkit_by_name_lies_in_the_root(devkit, tmp_path):
    run = make_run(tmp_path / "run", **{"data.root": str(devkit)})
    assert len(Evaluation(run, Options(data="voc"), "cpu").voc.train) == 3


def test_a_resnet_of_ones_own_is_taken(devkit, tmp_path):
    """The random arm of a module of the user's own draws its weights anew."""
    own = torchvision.models.resnet18()
    own.fc = nn.Identity()
    run = make_run(tmp_path / "run", own, **{"encoder.name": "custom", "encoder.stem": "auto"})
    options = Options(("detect",), str(devkit), detect=TINY)
    evaluation = Evaluation(run, options, "cpu", encoder=own)
    for trunk, loaded in zip(TINY.arms, (120, 0), strict=True):
        detector, count = protocol.assemble_detector(evaluation, "fpn", trunk, 0)
        assert count == loaded
        assert bool(find_differences(detector, own.state_dict())) == (trunk == "random")


def test_detections_are_compared_with_the_test_images_and_kept(run, devkit, monkeypatch):
    """A detector that finds every object, and nothing where there is none."""
    told = []

    def find_all(_: object, data: Detections, **__: object) -> list[PredictedBoxes]:
        told.append(data.names)
        return [PredictedBoxes(o.boxes, o.labels, 0.75 + 0.0 * o.labels) for o in data.objects]

    monkeypatch.setattr(protocol, "fine_tune", lambda *_, **__: None)
    monkeypatch.setattr(protocol, "detect_all", find_all)
    rows = detect(run, devkit, replace(TINY, arms=("random",)), seed=6)
    assert {row["metric"]: row["value"] for row in rows} == pytest.approx(
        dict.fromkeys(METRICS, 100.0)
    )
    assert told == [("VOC2007/test03",)]
    folder = run.path / "detection" / "fpn-random-seed6"
    ((name, score, *box),) = json.loads((folder / "detections.json").read_text())["VOC2007/test03"]
    (truth,) = Evaluation(run, Options(data=str(devkit)), "cpu").voc.test.objects
    assert (name, score) == ("aeroplane", 0.75)  # the class of scene 3
    assert box == truth.boxes[0].tolist()


def test_seeds_are_averaged(run, devkit, monkeypatch):
    def judged(evaluation: object, architecture: str, which: str, seed: int) -> dict[str, object]:
        return {
            "scores": dict.fromkeys(METRICS, 10.0 * seed),
            "per_class": {"cat": 10.0 * seed},
            "num_loaded": 120,
            "device": "cpu",
            "finished": "now",
        }

    monkeypatch.setattr(protocol, "score_detector", judged)
    console = Console(record=True, width=200, file=io.StringIO())
    options = replace(TINY, arms=("pretrained",))
    row = detect(run, devkit, options, seeds=3, seed=2, console=console)[1]
    assert row["values"] == [20.0, 30.0, 40.0]
    assert (row["value"], row["deviation"], row["n"]) == (30.0, 10.0, 3)
    assert re.search(r"cat\W+30\.0", console.export_text())


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "iterations"), [("fpn", 60), ("c4", 160)])
def test_a_detector_learns_a_handful_of_scenes_by_heart(tmp_path, architecture, iterations):
    run = make_run(tmp_path / "run")
    devkit = make_devkit(tmp_path / "voc", [0, 1, 2], [0, 1, 2])
    options = replace(
        TINY,
        architectures=(architecture,),
        arms=("random",),
        iterations=iterations,
        batch_size=3,
        learning_rate=0.01,
        image_side=(64, 64),
        clip_gradient=5.0,
        regions=16,
        proposals=30,
    )
    rows = detect(run, data=devkit, options=options)
    values = {row["metric"]: row["value"] for row in rows}
    assert values["AP50"] > 80.0, values


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"the sample of Pascal VOC is not in {SAMPLE}")
@pytest.mark.parametrize("architecture", ["c4", "fpn"])
def test_it_runs_to_the_end_on_real_photographs(run, architecture):
    options = replace(TINY, architectures=(architecture,), iterations=4, image_side=(96, 128))
    rows = detect(run, data=SAMPLE, options=options, seed=5)
    assert len(rows) == 2 * len(METRICS)
    assert {(row["num_train"], row["num_test"]) for row in rows} == {(60, 30)}
