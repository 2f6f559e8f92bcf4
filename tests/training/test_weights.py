"""Where an encoder starts from: equal weights, new heads, and a refusal by name."""

import argparse
import json

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor

from deepbregman.commands.export import export
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import Config, override
from deepbregman.errors import UserError
from deepbregman.method.colours import split_colours
from deepbregman.method.networks import Encoder, build_encoder
from deepbregman.objectives import Step, build_step
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.checkpoints import load_trained_encoder
from deepbregman.training.weights import find_weights

MEAN, DEVIATION = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)


def start(config: Config, weights: object, **changes: object) -> Step:
    """Build what a run begins with."""
    named = {f"encoder.{name}": value for name, value in changes.items()}
    config = override(config, {"encoder.weights": str(weights), **named})
    found = find_weights(config)
    return build_step(config, prepare=None if found is None else found.put_into)


def put(config: Config, encoder: Encoder) -> None:
    """Put the weights that a configuration names into an encoder."""
    found = find_weights(config)
    found.put_into(encoder)


def trunk_of(step: Step) -> dict[str, Tensor]:
    return dict(step.objective.encoder.trunk.state_dict())


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_config) -> tuple[Run, Step]:
    """A run whose networks have another seed than those that start from it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run = Run.create(folder, tiny_config, {})
    step = build_step(override(tiny_config, {"seed": 5}), MEAN, DEVIATION)
    checkpoints.save(run.last_checkpoint, {**checkpoints.collect_networks(step), "epoch": 2.0})
    return run, step


def test_a_run_gives_its_trunk_and_its_pixels_and_no_head(trained, tiny_config):
    run, step = trained
    random = start(tiny_config, "random")
    for origin in (run.path, run.last_checkpoint):
        found = start(tiny_config, origin)
        assert_equal(trunk_of(found), trunk_of(step))
        encoder = found.objective.encoder
        assert encoder.mean.flatten().tolist() == pytest.approx(MEAN)
        assert encoder.deviation.flatten().tolist() == pytest.approx(DEVIATION)
        heads = [
            {n: t for n, t in one.state_dict().items() if ".encoder." not in n and "views" not in n}
            for one in (found, random)
        ]
        assert any("projection" in name for name in heads[0])
        assert_equal(*heads)  # as a run from random weights draws them
    assert not torch.equal(*(next(iter(trunk_of(one).values())) for one in (random, step)))


def test_the_teacher_starts_from_them_too(trained, tiny_config):
    run, step = trained
    changes = {
        **{"teacher": {}, "weak_views": {}, "divergence.source": "bank"},
        **{"divergence.compare": "match", "divergence.smoothing": 0.2},
    }
    found = start(override(tiny_config, changes), run.path)
    state = found.teacher.state_dict()
    for name, tensor in trunk_of(step).items():
        (slow,) = [t for n, t in state.items() if n.endswith(f"trunk.{name}")]
        assert torch.equal(slow, tensor)


def test_an_export(short_config, tmp_path):
    config = override(short_config, {"encoder.name": "resnet18", "data.image_size": 32})
    run = Run.create(tmp_path / "run", config, {})
    step = build_step(override(config, {"seed": 5}), MEAN, DEVIATION)
    checkpoints.save(run.last_checkpoint, {**checkpoints.collect_networks(step), "epoch": 2.0})
    encoder = build_encoder("resnet18", 32)
    for kind, suffix in (("torchvision", "pth"), ("safetensors", "safetensors")):
        path = tmp_path / f"encoder.{suffix}"
        export(run, path, format=kind)
        put(override(config, {"encoder.weights": str(path)}), encoder)
        assert_equal(encoder.trunk.state_dict(), trunk_of(step))
        assert encoder.mean.flatten().tolist() == pytest.approx(MEAN)


@pytest.fixture(scope="module")
def resnet(short_config) -> Config:
    """A configuration whose images are too large for the stem of thumbnails."""
    return override(short_config, {"encoder.name": "resnet18", "data.image_size": 96})


@pytest.fixture(scope="module")
def classifier() -> dict[str, Tensor]:
    """A whole ResNet of torchvision, its classifier included."""
    torch.manual_seed(3)
    return dict(torchvision.models.resnet18().state_dict())


@pytest.mark.parametrize("wrapper", [None, "state_dict", "safetensors"])
def test_a_file_of_another_program_loses_its_classifier(resnet, classifier, tmp_path, wrapper):
    path = tmp_path / "weights.pt"
    if wrapper == "safetensors":
        path = path.with_suffix(".safetensors")
        safetensors.torch.save_file(classifier, path)
    else:
        torch.save(classifier if wrapper is None else {wrapper: classifier, "epoch": 3}, path)
    expected = {name: t for name, t in classifier.items() if not name.startswith("fc.")}
    assert_equal(trunk_of(start(resnet, path)), expected)


def test_an_encoder_inside_another_method_is_found_by_its_names(resnet, classifier, tmp_path):
    path, trunk = tmp_path / "lightning.ckpt", "module.backbone."
    inside = {f"{trunk}{name}": t for name, t in classifier.items()}
    inside["projector.0.weight"] = torch.zeros(2, 2)
    torch.save({"state_dict": inside}, path)
    expected = {name: t for name, t in classifier.items() if not name.startswith("fc.")}
    assert_equal(trunk_of(start(resnet, path)), expected)


def test_one_network_of_a_file_with_several_is_chosen_by_its_name(
    classifier, tmp_path, output, refusal
):
    """As in the checkpoints of DINO, which hold the arguments of their program, too."""
    path = tmp_path / "dino.pth"
    student = {f"module.backbone.{name}": tensor + 1 for name, tensor in classifier.items()}
    teacher = {f"backbone.{name}": tensor for name, tensor in classifier.items()}
    others = {"optimizer": {"state": {0: torch.zeros(1)}}, "args": argparse.Namespace(lr=0.1)}
    torch.save({"student": student, "teacher": teacher, "epoch": 3, **others}, path)

    begin = ("pretrain", "simclr", "--data", "digits", "--encoder.stem", "standard")
    begin += ("--training.epochs", 0, "--run", tmp_path / "run", "--encoder.weights")
    said = refusal(*begin, path)
    assert f"holds 2 encoders: choose one by --encoder.weights {path}:NAME" in said
    assert "NAME is student.module.backbone or teacher.backbone" in said
    assert "holds no techer, but student, teacher" in refusal(*begin, f"{path}:techer")
    assert "holds 2 encoders" in refusal(*begin, f"{path}:backbone")
    assert "nothing is trained: resnet18 keeps the weights" in output(*begin, f"{path}:teacher")
    (record,) = Run.open(tmp_path / "run").metrics()
    assert record == {"epoch": 0, "step": 0}  # nor is anything measured, which takes long
    expected = {name: t for name, t in classifier.items() if not name.startswith("fc.")}
    assert_equal(load_trained_encoder(tmp_path / "run").trunk.state_dict(), expected)
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())["weights"]
    assert record["from"] == f"{path}:teacher"


def test_a_network_is_chosen_by_any_part_of_its_name(resnet, classifier, tmp_path):
    """As in the checkpoints of MoCo."""
    path = tmp_path / "moco.pth"
    query = {f"module.encoder_q.{name}": tensor for name, tensor in classifier.items()}
    key = {f"module.encoder_k.{name}": tensor + 1 for name, tensor in classifier.items()}
    torch.save({"state_dict": {**key, **query}}, path)
    expected = {name: t for name, t in classifier.items() if not name.startswith("fc.")}
    for name in ("encoder_q", "module.encoder_q"):
        assert_equal(trunk_of(start(resnet, f"{path}:{name}")), expected)


def test_a_network_of_brightness_sees_it_as_it_did_in_training(short_config, tmp_path):
    changes = {"objective.name": "cmc", "divergence.weight": 0.0, "views.num_views": 1}
    run = Run.create(tmp_path / "run", override(short_config, {**changes, "seed": 5}), {})
    step = build_step(run.config)
    checkpoints.save(run.last_checkpoint, {**checkpoints.collect_networks(step), "epoch": 2.0})
    export(run, tmp_path / "cmc.safetensors", format="safetensors")
    grey = torch.rand(3, 1, 16, 16).expand(3, 3, 16, 16)
    both = step.objective.encoder.eval()(grey)  # of brightness, then of colours
    alone = start(short_config, f"{tmp_path / 'cmc.safetensors'}:bright").objective.encoder.eval()
    trunk = step.objective.encoder.trunk
    bright, _ = split_colours(grey, trunk.space)
    torch.testing.assert_close(alone(bright), both[:, : both.shape[1] // 2])


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_beside_it_says_how_pixels_were_normalised(
    resnet, classifier, tmp_path, suffix, output
):
    path = tmp_path / f"weights{suffix}"
    save = torch.save if suffix == ".pth" else safetensors.torch.save_file
    save(classifier, path)
    asked = ("pretrain", "simclr", "--data", "digits", "--training.epochs", 0)
    asked += ("--data.image-size", 96)
    asked += ("--encoder.weights", path, "--run")
    out = output(*asked, tmp_path / "without")
    assert f"no {path.name}.json says how its pixels were normalised" in " ".join(out.split())
    path.with_name(f"{path.name}.json").write_text(json.dumps({"mean": MEAN, "std": DEVIATION}))
    out = output(*asked, tmp_path / "with")
    assert "normalised" not in out
    encoder = start(resnet, path).objective.encoder
    assert encoder.mean.flatten().tolist() == pytest.approx(MEAN)
    assert encoder.deviation.flatten().tolist() == pytest.approx(DEVIATION)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_saved_encoder_has_the_normalisation_of_its_pixels(resnet, tmp_path, suffix):
    saved = start(resnet, "random").objective.encoder
    saved.mean.fill_(0.25)
    saved.deviation.fill_(0.125)
    path = tmp_path / f"encoder{suffix}"
    save = torch.save if suffix == ".pth" else safetensors.torch.save_file
    save(saved.state_dict(), path)
    encoder = start(resnet, path).objective.encoder
    assert_equal(encoder.state_dict(), saved.state_dict())
    config = override(resnet, {"encoder.weights": str(path)})
    assert find_weights(config).describe(config) == str(path)  # no note on unknown pixels
    weights = {n: t for n, t in saved.state_dict().items() if n.startswith("trunk.")}
    save(weights, path)
    path.with_name(f"{path.name}.json").write_text(json.dumps({"mean": MEAN, "std": DEVIATION}))
    assert start(resnet, path).objective.encoder.mean.flatten().tolist() == pytest.approx(MEAN)


def test_torchvision_by_name(resnet, classifier, monkeypatch):
    asked = {}

    def fetch(self: object, **options: object) -> dict[str, Tensor]:
        asked.update(options)
        return classifier

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", fetch)
    step = start(resnet, "torchvision:DEFAULT")
    assert torch.equal(trunk_of(step)["layer4.1.conv2.weight"], classifier["layer4.1.conv2.weight"])
    assert step.objective.encoder.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert asked["weights_only"] is True  # nothing in the file is executed
    found = find_weights(override(resnet, {"encoder.weights": "torchvision:DEFAULT"}))
    assert found.record["from"] == "torchvision:resnet18.IMAGENET1K_V1"
    with pytest.raises(UserError, match="torchvision has IMAGENET1K_V1, DEFAULT of resnet18"):
        start(resnet, "torchvision:IMAGENET22K")


def test_a_tag_of_timm_means_its_weights(short_config, monkeypatch):
    timm = pytest.importorskip("timm")
    create, asked = timm.create_model, []

    def pretrained(name: str, pretrained: bool = False, **options: object) -> object:
        asked.append((name, pretrained))
        model = create(name, pretrained=False, **options)
        if pretrained:
            for parameter in model.parameters():
                parameter.data.fill_(0.125)
        return model

    monkeypatch.setattr(timm, "create_model", pretrained)
    config = override(short_config, {"data.image_size": 160, "views.relative_size": 1.0})
    name = "timm:test_resnet.r160_in1k"
    step = start(config, "auto", name=name)
    assert ("test_resnet.r160_in1k", True) in asked
    assert all((p == 0.125).all() for p in step.objective.encoder.trunk.parameters())
    asked.clear()
    for untagged, weights in (("timm:test_resnet", "auto"), (name, "random")):
        step = start(config, weights, name=untagged)
        assert not any(is_pretrained for _, is_pretrained in asked)
    with pytest.raises(UserError, match=r"has no weights of resnet14t\.none"):
        start(config, "timm", name="timm:resnet14t.none")


@pytest.mark.parametrize("weights", ["torchvision:DEFAULT", "timm"])
def test_without_a_network_the_fix_is_named(resnet, weights, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError("Temporary failure in name resolution")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", fail)
    monkeypatch.setattr("deepbregman.training.weights.create_timm", fail)
    name = "resnet18" if weights != "timm" else "timm:test_resnet.r160_in1k"
    if weights == "timm":
        pytest.importorskip("timm")
    with pytest.raises(UserError) as refused:
        start(resnet, weights, name=name)
    for words in ("name resolution", "--encoder.weights FILE", "--encoder.weights random"):
        assert words in str(refused.value)


def test_what_does_not_fit_is_refused_by_name(resnet, classifier, tmp_path):
    path = tmp_path / "weights.pt"
    thumbnail, standard = build_encoder("resnet18", 32), build_encoder("resnet18", 96)

    def refuse(content: object, encoder: Encoder = standard) -> str:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(UserError) as refused:
            put(override(resnet, {"encoder.weights": str(path)}), encoder)
        return str(refused.value)

    words = refuse(classifier, thumbnail)
    assert "conv1.weight has shape (64, 3, 7, 7), expected (64, 3, 3, 3)" in words
    assert "--encoder.stem standard" in words
    wrong = {**classifier, "layer1.0.conv1.weight": torch.zeros(3, 3)}
    assert "layer1.0.conv1.weight has shape (3, 3), expected (64, 64, 3, 3)" in refuse(wrong)
    assert "conv1.weight is missing" in refuse({"backbone.conv1.weight": torch.zeros(1)})
    assert "no dictionary of tensors" in refuse({"conv1.weight": 3})
    words = refuse(torch.nn.Linear(2, 2))
    assert "it holds objects of Python, not tensors alone" in words
    assert "\x1b" not in words
    for content in (b"", b"deepbregman checkpoint 4 sha256 x", b"PK\x03\x04"):
        assert "can be read" in refuse(content).replace("cannot", "can")
    with pytest.raises(UserError, match="no run and no file is there"):
        start(resnet, tmp_path / "nothing")


def test_the_command_starts_from_a_run_and_keeps_where(trained, tmp_path, output):
    run, step = trained
    out = output(
        *("pretrain", run.path / "config.toml", "--encoder.weights", run.path),
        *("--training.epochs", 1, "--training.knn-every", 0, "--run", tmp_path / "new"),
    )
    assert f"the encoder starts from the weights of {run.last_checkpoint}; its heads are new" in out
    record = json.loads((tmp_path / "new" / "provenance.json").read_text())["weights"]
    assert record["from"] == str(run.last_checkpoint)
    assert record["epoch"] == 2.0
    assert record["sha256"] == checkpoints.fingerprint_weights(step.objective.encoder.trunk)


def test_in_python(tiny_config, tmp_path):
    changes = {"encoder.weights": str(tmp_path / "none.pt")}
    with pytest.raises(UserError, match="no run and no file"):
        pretrain(override(tiny_config, changes), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_trunk_of_one_s_own_can_take_them(tiny_config, tmp_path):
    mine = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 6))
    torch.save(torch.nn.Sequential(torch.nn.Flatten(), mine[1]).state_dict(), tmp_path / "w.pt")
    config = override(tiny_config, {"encoder.name": "custom", "data.image_size": 8})
    config = override(config, {"encoder.weights": str(tmp_path / "w.pt")})
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 6))
    put(config, Encoder(own, 6))
    assert torch.equal(own[1].weight, mine[1].weight)
