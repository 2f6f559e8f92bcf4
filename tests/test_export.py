"""Exports, each loaded by the program it is for: same features as the run's encoder."""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman import export, load_encoder
from deepbregman.config import Config, override
from deepbregman.errors import UserError
from deepbregman.exporting import formats
from deepbregman.method.networks import Encoder
from deepbregman.objectives import OwnParts, build_run_encoder, build_step
from deepbregman.runs import Run, collect_provenance
from deepbregman.training import checkpoints
from deepbregman.training.checkpoints import load_trained, select_part
from deepbregman.training.weights import find_weights

pytestmark = pytest.mark.usefixtures("cheap_weights")
MEAN, DEVIATION = (0.41, 0.52, 0.33), (0.21, 0.32, 0.27)
MakeRun = Callable[..., Run]


def scramble(model: nn.Module) -> None:
    """Give every parameter and every running statistic a value that it does not begin with."""
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            nn.init.normal_(part.running_mean, std=0.1)
            nn.init.uniform_(part.running_var, 0.7, 1.5)
            nn.init.uniform_(part.weight, 0.5, 1.2)
            nn.init.normal_(part.bias, std=0.1)


def run_of(folder: Path, config: Config, trunk: nn.Module | None = None) -> Run:
    """Make a run folder whose encoder has been through something, in no time."""
    run = Run.create(folder, config, collect_provenance("cpu"))
    torch.manual_seed(1)
    step = build_step(config, MEAN, DEVIATION, own=OwnParts(trunk))
    scramble(step)
    checkpoints.save(run.last_checkpoint, {**checkpoints.collect_networks(step), "epoch": 2.0})
    return run


def run_of_patches(folder: Path, config: Config, name: str = "small") -> Run:
    """Make the run of an encoder that cuts images of 16 px into patches of 8."""
    cpc = {"objective.name": "cpc", "objective.patch": 0.5, "objective.steps": 1}
    return run_of(folder, override(config, {**cpc, "encoder.name": name, "data.image_size": 16}))


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, short_config) -> MakeRun:
    """Make a run for an encoder; tests that want the same encoder share the run."""
    made: dict[str, Run] = {}

    def make(name: str, size: int = 32, trunk: nn.Module | None = None, **more: Any) -> Run:
        changes = {"encoder.name": name, "data.image_size": size}
        changes |= {f"encoder.{key}": value for key, value in more.items()}
        key = f"{changes} {trunk}"
        if key not in made:
            folder = tmp_path_factory.mktemp("runs") / "run"
            made[key] = run_of(folder, override(short_config, changes), trunk)
        return made[key]

    return make


@pytest.fixture(scope="module")
def original(tmp_path_factory, make_run) -> Path:
    """A folder with an export, to copy from."""
    folder = tmp_path_factory.mktemp("exported")
    export(make_run("resnet18"), folder / "e.pth", format="torchvision")
    return folder


def some_images(size: int = 32, count: int = 3) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def features_of(module: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        features: Tensor = module.eval()(images)
    return features


def assert_same(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest feature; and features that could tell a wrong encoder."""
    scale = expected.abs().max().item()
    assert expected.std(dim=0).max() > 1e-3 * scale  # images differ
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, scale))


def normalised(images: Tensor, sidecar: Path) -> Tensor:
    record = json.loads(sidecar.read_text())
    mean, deviation = (torch.tensor(record[key]).view(3, 1, 1) for key in ("mean", "std"))
    return (images - mean) / deviation


DEAD = torch.tensor([1e-39, -1e-33]).view(2, 1, 1, 1)
"""Weights of two channels that nothing uses, after a long training."""


def _load_from_a_file(run: Run) -> Encoder:
    path = run.path / "encoder.safetensors"
    export(run, path, format="safetensors")
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    assert not any(((t != 0) & (t.abs() < 1e-30)).any() for t in state.values())
    next(t for t in state.values() if t.dim() == 4 and len(t) > 3)[:2] = DEAD
    safetensors.torch.save_file(state, path, metadata)  # as another program may write them
    return load_encoder(path)


def _start_from(run: Run) -> Encoder:
    encoder = build_run_encoder(run.config)
    found = find_weights(override(run.config, {"encoder.weights": str(run.path)}))
    assert found is not None
    found.put_into(encoder)
    return encoder.eval()


@pytest.mark.parametrize(
    "read",
    [load_encoder, lambda run: load_trained(run).model.encoder, _load_from_a_file, _start_from],
    ids=["encoder", "evaluation", "file", "start"],
)
def test_weights_of_dead_channels_are_read_as_zeros(tmp_path, short_config, read):
    """With subnormal numbers a CPU computes many times as slowly."""
    run = run_of(tmp_path / "run", short_config)
    saved = checkpoints.load(run.last_checkpoint)
    weights = select_part(saved["objective"], "encoder.")
    next(t for t in weights.values() if t.dim() == 4 and len(t) > 3)[:2] = DEAD
    checkpoints.save(run.last_checkpoint, saved)

    as_saved = build_run_encoder(run.config)
    as_saved.load_state_dict(weights)
    encoder = read(run)
    state = encoder.state_dict()
    for name, tensor in weights.items():
        expected = torch.where(tensor.abs() < 1e-30, 0.0, tensor) if tensor.dim() == 4 else tensor
        assert torch.equal(state[name], expected), name
    assert sum(((tensor != 0) & (tensor.abs() < 1e-30)).sum() for tensor in state.values()) == 0
    images = some_images(8)
    assert_same(features_of(encoder, images), features_of(as_saved, images))


def as_printed(usage: str) -> nn.Module:
    """Run the lines that an export prints and return the model they load."""
    names: dict[str, Any] = {}
    exec(usage, names)
    model: nn.Module = names["model"]
    return model


RESNETS = [
    ("resnet18", {}, "torchvision"),
    ("resnet18", {"stem": "standard", "normalise_pixels": False}, "timm"),
    pytest.param("resnet18", {}, "timm", marks=pytest.mark.slow),
    pytest.param("resnet18", {"stem": "standard"}, "torchvision", marks=pytest.mark.slow),
    pytest.param("resnet18", {"normalise_pixels": False}, "timm", marks=pytest.mark.slow),
    pytest.param("resnet34", {}, "torchvision", marks=pytest.mark.slow),
    pytest.param("resnet50", {"stem": "standard"}, "timm", marks=pytest.mark.slow),
    pytest.param("resnet101", {}, "torchvision", marks=pytest.mark.slow),
]


class TestStateDicts:
    @pytest.mark.parametrize(("name", "more", "format"), RESNETS)
    def test_resnets(self, make_run, tmp_path, name, more, format):
        if format == "timm":
            pytest.importorskip("timm")
        run, out = make_run(name, **more), tmp_path / "encoder.pth"
        written = export(run, out, format=format)
        assert written.files == (out, tmp_path / "encoder.pth.json")
        images = some_images()
        expected = features_of(load_encoder(run.path), images)
        model = as_printed(written.usage)
        assert type(model).__module__.split(".")[0] == format
        assert_same(features_of(model, normalised(images, written.files[1])), expected)
        again = load_encoder(out)
        assert not again.training
        assert torch.equal(features_of(again, images), expected)

    def test_torchvisions_network_misses_its_classifier_and_nothing_else(self, make_run, tmp_path):
        import torchvision

        out = tmp_path / "encoder.pth"
        export(make_run("resnet18", stem="standard"), out, format="torchvision")
        model = torchvision.models.resnet18(weights=None)
        found = model.load_state_dict(torch.load(out, weights_only=True), strict=False)
        assert found.missing_keys == ["fc.weight", "fc.bias"]
        assert found.unexpected_keys == []

    @pytest.mark.parametrize("name", ["test_vit", "test_convnext", "mobilenetv3_small_050"])
    def test_timms_own(self, make_run, tmp_path, name):
        timm = pytest.importorskip("timm")
        run, out = make_run(f"timm:{name}"), tmp_path / "encoder.pth"
        written = export(run, out, format="timm")
        images = some_images()
        expected = features_of(load_encoder(run.path), images)
        settings = json.loads(written.files[1].read_text())["timm"]
        model = timm.create_model(
            settings["architecture"], num_classes=0, checkpoint_path=out, **settings["model_args"]
        )
        pixels = normalised(images, written.files[1])
        for loaded in (model, as_printed(written.usage)):
            assert_same(features_of(loaded, pixels), expected)
        assert settings["num_features"] == expected.shape[1]
        assert settings["pretrained_cfg"]["input_size"] == [3, 32, 32]
        assert settings["pretrained_cfg"]["mean"] == pytest.approx(MEAN)
        assert settings["pretrained_cfg"]["std"] == pytest.approx(DEVIATION)
        assert torch.equal(features_of(load_encoder(out), images), expected)

    def test_the_record_says_what_the_weights_are(self, make_run, tmp_path):
        export(make_run("resnet18"), tmp_path / "e.pth", format="torchvision")
        record = json.loads((tmp_path / "e.pth.json").read_text())
        assert record["mean"] == pytest.approx(MEAN)
        assert record["std"] == pytest.approx(DEVIATION)
        expected = {
            "format": "torchvision",
            "version": 1,
            "architecture": "resnet18",
            "stem": "thumbnail",
            "num_features": 512,
            "image_size": 32,
            "epoch": 2.0,
        }
        assert {key: record[key] for key in expected} == expected
        assert record["provenance"]["versions"]["torch"] == importlib.metadata.version("torch")


class TestSafetensors:
    @pytest.mark.parametrize("name", ["small", "timm:test_vit"])
    def test_it_needs_no_run(self, make_run, tmp_path, name):
        run = Run(tmp_path / "run")
        shutil.copytree(make_run(name).path, run.path)
        out = tmp_path / "encoder.safetensors"
        written = export(run, out, format="safetensors")
        images = some_images()
        expected = features_of(load_encoder(run.path), images)
        shutil.rmtree(run.path)
        assert written.files == (out,)
        names: dict[str, Any] = {"images": images}
        exec(written.usage, names)
        assert_same(names["features"].detach(), expected)
        encoder = load_encoder(out)
        assert not encoder.training
        assert torch.equal(features_of(encoder, images), expected)
        bytes_ = (images * 255).round().to(torch.uint8)
        assert_same(features_of(encoder, bytes_), features_of(encoder, bytes_ / 255.0))

    def test_an_encoder_of_ones_own(self, make_run, tmp_path):
        def own() -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )

        run, out = make_run("custom", trunk=own()), tmp_path / "own.safetensors"
        with pytest.raises(UserError, match="give it in Python"):
            export(run, out, format="safetensors")
        export(run, out, format="safetensors", encoder=own())
        images = some_images()
        expected = features_of(load_encoder(run.path, encoder=own()), images)
        assert torch.equal(features_of(load_encoder(out, encoder=own()), images), expected)
        with pytest.raises(UserError, match="give it in Python"):
            load_encoder(out)
        with pytest.raises(UserError, match="this run's encoder is custom"):
            export(run, tmp_path / "own.pth", format="torchvision", encoder=own())


class TestOnnx:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        for name in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(name)

    @pytest.mark.parametrize(
        "name",
        [
            "small",
            pytest.param("timm:test_vit", marks=pytest.mark.slow),
            pytest.param("resnet18", marks=pytest.mark.slow),
        ],
    )
    def test_any_number_of_images(self, make_run, tmp_path, name):
        import onnxruntime

        run, out = make_run(name), tmp_path / "exported" / "encoder.onnx"
        out.parent.mkdir()
        written = export(run, out, format="onnx")
        assert [path.name for path in out.parent.iterdir()] == ["encoder.onnx"]  # all is inside
        assert "largest difference" in written.usage
        session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
        encoder = load_encoder(run.path)
        for count in (1, 2, 7):
            images = some_images(count=count)
            (found,) = session.run(None, {"images": images.numpy()})
            expected = features_of(encoder, images)
            scale = max(1.0, expected.abs().max().item())
            torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5 * scale)
        record = json.loads(session.get_modelmeta().custom_metadata_map["deepbregman"])
        assert record["architecture"] == name

    def test_an_encoder_that_cuts_patches(self, short_config, tmp_path):
        import onnxruntime

        run, out = run_of_patches(tmp_path / "run", short_config), tmp_path / "e.onnx"
        export(run, out, format="onnx")
        session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
        encoder = load_encoder(run.path)
        for count in (1, 3):
            images = some_images(16, count=count)
            (found,) = session.run(None, {"images": images.numpy()})
            expected = features_of(encoder, images)
            torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)
        whole = encoder.trunk(encoder.normalise(images))
        assert (whole - expected).abs().max() > 1e-3  # the graph must cut to pass

    def test_a_graph_with_other_features_is_not_written(self, make_run, tmp_path, monkeypatch):
        exported = formats._trace_onnx

        def altered(encoder: Encoder, size: int) -> bytes:
            with torch.no_grad():
                encoder.mean.add_(0.01)
                graph = exported(encoder, size)
                encoder.mean.sub_(0.01)
            return graph

        monkeypatch.setattr(formats, "_trace_onnx", altered)
        with pytest.raises(UserError, match="features of 1 images differ from the encoder's by"):
            export(make_run("small"), tmp_path / "e.onnx", format="onnx")
        assert not list(tmp_path.glob("*e.onnx*"))

    def test_a_module_that_cannot_be_traced_is_refused(self, make_run, tmp_path):
        class Undecided(nn.Module):
            def forward(self, images: Tensor) -> Tensor:
                return images.mean(dim=(2, 3)) * (2 if images.sum().item() > 0.123 else 1)

        run = make_run("custom", trunk=Undecided())
        with pytest.raises(UserError, match="cannot hold this encoder: torch's exporter fails"):
            export(run, tmp_path / "e.onnx", format="onnx", encoder=Undecided())
        assert not list(tmp_path.glob("*e.onnx*"))

    def test_a_loop_over_the_images_is_refused(self, make_run, tmp_path, capfd):
        class OneByOne(nn.Module):
            def forward(self, images: Tensor) -> Tensor:
                return torch.stack([image.mean(dim=(1, 2)) for image in images])

        run = make_run("custom", trunk=OneByOne())
        with pytest.raises(UserError, match=r"cannot hold this encoder: .* loop over the images"):
            export(run, tmp_path / "e.onnx", format="onnx", encoder=OneByOne())
        assert not list(tmp_path.glob("*e.onnx*"))
        assert capfd.readouterr() == ("", "")  # nor what torch says about its inside


def r50_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of detectron2's ResNet-50 backbone, written out from its documented layout."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, out: int, into: int, side: int) -> None:
        shapes[f"{name}.weight"] = (out, into, side, side)
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.norm.{part}"] = (out,)

    convolution("stem.conv1", 64, 3, 7)
    into = 64
    for stage, (blocks, middle) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=2):
        for block in range(blocks):
            name = f"res{stage}.{block}"
            if block == 0:
                convolution(f"{name}.shortcut", 4 * middle, into, 1)
            convolution(f"{name}.conv1", middle, into, 1)
            convolution(f"{name}.conv2", middle, middle, 3)
            convolution(f"{name}.conv3", 4 * middle, middle, 1)
            into = 4 * middle
    return shapes


def detectron2_features(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """The backbone as detectron2 builds it with STRIDE_IN_1X1 False and frozen statistics."""

    def convolution(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        norm = {part: state[f"{name}.norm.{part}"] for part in ("weight", "bias")}
        scale = norm["weight"] / (state[f"{name}.norm.running_var"] + 1e-5).sqrt()
        shift = norm["bias"] - state[f"{name}.norm.running_mean"] * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)

    x = F.max_pool2d(convolution("stem.conv1", images, 2).relu(), 3, stride=2, padding=1)
    for stage, blocks in ((2, 3), (3, 4), (4, 6), (5, 3)):
        for block in range(blocks):
            name, stride = f"res{stage}.{block}", 2 if stage > 2 and block == 0 else 1
            y = convolution(f"{name}.conv1", x).relu()
            y = convolution(f"{name}.conv3", convolution(f"{name}.conv2", y, stride).relu())
            x = (y + (convolution(f"{name}.shortcut", x, stride) if block == 0 else x)).relu()
    return x.mean(dim=(2, 3))


class TestDetectron2:
    @pytest.mark.slow
    def test_names_and_shapes_and_features(self, make_run, tmp_path):
        run, out = make_run("resnet50", size=65), tmp_path / "r50.pth"
        written = export(run, out, format="detectron2")
        content = torch.load(out, weights_only=True)  # tensors and plain values, nothing else
        assert {k: v for k, v in content.items() if k != "model"} == {
            "__author__": "deepbregman",
            "matching_heuristics": True,
        }
        state = content["model"]
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == r50_shapes()
        settings = json.loads(written.files[1].read_text())["detectron2"]
        assert settings["INPUT.FORMAT"] == "RGB"
        assert settings["MODEL.RESNETS.DEPTH"] == 50
        assert settings["MODEL.RESNETS.STRIDE_IN_1X1"] is False
        mean, deviation = (
            torch.tensor(settings[f"MODEL.PIXEL_{key}"]).view(3, 1, 1) for key in ("MEAN", "STD")
        )
        images = some_images(65)
        expected = features_of(load_encoder(run.path), images)
        assert_same(detectron2_features(state, (images * 255 - mean) / deviation), expected)
        for words in ('cfg.MODEL.WEIGHTS = "', "cfg.INPUT.FORMAT = 'RGB'", "STRIDE_IN_1X1 = False"):
            assert words in written.usage

    def test_what_does_not_fit(self, make_run, tmp_path):
        run = make_run("resnet18", stem="standard")
        with pytest.raises(UserError, match=r"is resnet18: export it as torchvision, timm, safe"):
            export(run, tmp_path / "e.pth", format="detectron2")
        assert not list(tmp_path.glob("*e.pth*"))

    def test_the_thumbnail_stem_does_not_fit(self, short_config):
        config = override(short_config, {"encoder.name": "resnet50"})
        encoder = build_step(config).objective.encoder
        with pytest.raises(UserError, match=r"thumbnail stem.* --encoder.stem standard"):
            formats.to_detectron2(formats.TrainedEncoder(encoder, config, {}))

    def test_only_detectron2_reads_it(self, tmp_path):
        (tmp_path / "e.pth").touch()
        (tmp_path / "e.pth.json").write_text('{"format": "detectron2"}')
        with pytest.raises(UserError, match="layout of detectron2, which only that program reads"):
            load_encoder(tmp_path / "e.pth")


class TestLoading:
    @pytest.fixture
    def exported(self, original, tmp_path) -> Path:
        for name in ("e.pth", "e.pth.json"):
            shutil.copy(original / name, tmp_path)
        return tmp_path / "e.pth"

    def test_without_the_record(self, exported):
        Path(f"{exported}.json").unlink()
        with pytest.raises(UserError, match=r"e\.pth\.json does not exist: .* put back"):
            load_encoder(exported)

    def test_another_version(self, exported):
        sidecar = Path(f"{exported}.json")
        sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "version": 2}))
        with pytest.raises(UserError, match="export version 2, this version reads 1"):
            load_encoder(exported)

    def test_weights_of_another_encoder(self, exported):
        torch.save({"conv1.weight": torch.zeros(1)}, exported)
        with pytest.raises(UserError, match=r"e\.pth does not fit"):
            load_encoder(exported)

    def test_other_files(self, tmp_path):
        import safetensors.torch

        (tmp_path / "e.onnx").touch()
        with pytest.raises(UserError, match=r"neither .safetensors nor .pth"):
            load_encoder(tmp_path / "e.onnx")
        (tmp_path / "e.safetensors").write_bytes(b"nothing")
        with pytest.raises(UserError, match="not a safetensors file"):
            load_encoder(tmp_path / "e.safetensors")
        safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "f.safetensors")
        with pytest.raises(UserError, match="not written by `deepbregman export`"):
            load_encoder(tmp_path / "f.safetensors")


def test_pixels_of_another_scale_are_refused(make_run):
    encoder = load_encoder(make_run("small").path)
    pixels = (255.0 * some_images()).to(torch.uint8)
    assert torch.equal(encoder(pixels.float() / 255.0), encoder(pixels))
    for wrong in (pixels.float(), (pixels.float() / 255.0 - 0.5) / 0.2):
        with pytest.raises(ValueError, match=r"give uint8 in 0..255, or floating point in"):
            encoder(wrong)
    with pytest.raises(TypeError, match=r"of the type str: give a tensor \(N, 3, H, W\)"):
        encoder("photo.png")


class TestCommand:
    def test_it_prints_what_to_do(self, make_run, tmp_path, output):
        run, out = make_run("resnet18"), tmp_path / "e.pth"
        printed = output("export", run.path, "--format", "torchvision", "--out", out)
        assert f"wrote {out} (" in printed
        assert f"wrote {out}.json (" in printed
        for words in ("model.conv1 = torch.nn.Conv2d(3, 64, 3", "model.maxpool", "0.41, 0.52"):
            assert words in printed
        model = as_printed(printed[printed.index("import torch") :])
        assert features_of(model, some_images()).shape == (3, 512)

    def test_outputs_that_cannot_be(self, make_run, tmp_path, refusal):
        run, out = make_run("small"), tmp_path / "e.pth"
        wrong = refusal("export", run.path, "--format", "torchscript", "--out", out)
        assert "torchscript" in wrong
        assert "torchvision" in wrong
        wrong = refusal("export", run.path, "--format", "onnx", "--out", out)
        assert "it is to be a .onnx file" in wrong
        wrong = refusal("export", run.path, "--format", "timm", "--out", tmp_path / "no" / "e.pth")
        assert "does not exist; make it first" in wrong
        wrong = refusal("export", run.path, "--format", "torchvision", "--out", out)
        assert "this run's encoder is small: export it as safetensors or onnx" in wrong
        wrong = refusal("export", run.path, "--format", "timm", "--out", out)
        assert "export it as safetensors or onnx" in wrong
        wrong = refusal("export", tmp_path, "--format", "timm", "--out", out)
        assert "is not a run folder" in wrong
        assert not list(tmp_path.iterdir())

    def test_an_encoder_of_patches(self, short_config, tmp_path, refusal):
        """Its weights alone, in another program, would see whole images."""
        run = run_of_patches(tmp_path / "run", short_config, "resnet18")
        for name in ("torchvision", "timm"):
            wrong = refusal("export", run.path, "--format", name, "--out", tmp_path / "e.pth")
            assert "of cpc, cuts them into patches of 8 px: export it as safetensors" in wrong
        expected = features_of(load_encoder(run.path), some_images(16))
        export(run, tmp_path / "e.safetensors", format="safetensors")
        found = features_of(load_encoder(tmp_path / "e.safetensors"), some_images(16))
        assert torch.equal(found, expected)

    def test_an_encoder_of_two_networks(self, short_config, tmp_path, refusal):
        changes = {"objective.name": "cmc", "encoder.name": "resnet18", "training.epochs": 0}
        off = {"divergence.weight": 0.0, "views.num_views": 1}
        run = run_of(tmp_path / "run", override(short_config, {**changes, **off}))
        for name in ("torchvision", "timm"):
            wrong = refusal("export", run.path, "--format", name, "--out", tmp_path / "e.pth")
            assert "of cmc, has one for brightness and one for colours: export it as saf" in wrong

    @pytest.mark.parametrize("name", ["e.pth", "e.pth.json"])
    def test_a_file_that_exists_is_kept(self, tmp_path, refusal, name):
        (tmp_path / name).write_text("mine")
        # There is no run either: the output is looked at first.
        words = refusal("export", tmp_path / "run", "--format", "timm", "--out", tmp_path / "e.pth")
        assert f"{name} exists: name another file" in words
        assert (tmp_path / name).read_text() == "mine"

    def test_without_the_extra(self, tmp_path, refusal, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        words = refusal("export", tmp_path, "--format", "onnx", "--out", tmp_path / "e.onnx")
        assert "needs onnxruntime" in words
        assert "pip install 'deepbregman[onnx]'" in words

    def test_half_of_it_is_never_left(self, make_run, tmp_path, monkeypatch):
        from deepbregman.commands import export as module

        def full(path: Path) -> None:
            raise OSError(28, "No space left on device", str(path))

        run = make_run("resnet18")
        monkeypatch.setattr(module, "create_file", full)
        with pytest.raises(OSError, match="No space"):
            export(run, tmp_path / "e.pth", format="torchvision")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("format", ["torchvision", "safetensors"])
    def test_of_two_at_a_time_one_succeeds(self, make_run, tmp_path, monkeypatch, format):
        name = "resnet18" if format == "torchvision" else "small"
        run, make = make_run(name), formats.MAKERS[format]
        out = tmp_path / ("e.pth" if format == "torchvision" else "e.safetensors")
        first: list[dict[str, bytes]] = []

        def make_slowly(source: formats.TrainedEncoder) -> formats.Content:
            """Be overtaken by another export."""
            monkeypatch.setitem(formats.MAKERS, format, make)
            export(run, out, format=format)
            first.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
            return make(source)._replace(data=b"of the second")

        monkeypatch.setitem(formats.MAKERS, format, make_slowly)
        with pytest.raises(UserError, match="another process has written it"):
            export(run, out, format=format)
        assert [{path.name: path.read_bytes() for path in tmp_path.iterdir()}] == first

    def test_an_unknown_format_in_python(self, tmp_path):
        with pytest.raises(UserError, match=r"'onxx' is not one of .*; did you mean 'onnx'"):
            export(tmp_path / "run", tmp_path / "e.onnx", format="onxx")
