"""A module of the user's own as encoder: trained, resumed, judged, embedded and loaded again."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deepbregman import (
    cluster,
    draw_first_images,
    embed,
    evaluate,
    load_encoder,
    pretrain,
    resume,
    search,
)
from deepbregman.cli import main
from deepbregman.config import override
from deepbregman.errors import UserError
from deepbregman.evaluation.options import Semi
from deepbregman.objectives import build_untrained_encoder
from deepbregman.runs import Run
from deepbregman.training import loop
from deepbregman.training.checkpoints import load_trained


def own(seed: int = 3, width: int = 24) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def computed(module: nn.Module) -> nn.Module:
    """Hold a tensor that was computed from a parameter, as torch's old weight_norm did."""
    module.computed = 2.0 * module[0].weight
    return module


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, short_config) -> Run:
    """A run that began with the weights of ``own()``."""
    module = own()
    before = state_of(module)
    folder = tmp_path_factory.mktemp("own") / "run"
    run = pretrain(short_config, run=folder, encoder=module)
    assert same(state_of(module), before)  # the user's module is not the one that is trained
    return run


def test_the_run_says_that_the_encoder_is_the_users(trained):
    assert trained.config.encoder.name == "custom"
    assert "custom" in (trained.path / "config.toml").read_text()


def test_the_trained_weights_go_into_a_copy(trained):
    fresh = own(seed=9)
    before = state_of(fresh)
    encoder = load_encoder(trained.path, encoder=fresh)
    assert same(state_of(fresh), before)
    assert encoder.num_features == 24
    assert not same(state_of(encoder.trunk), before)
    assert not same(state_of(encoder.trunk), state_of(own()))
    images = torch.rand(3, 3, 16, 16)
    normalised = (images - encoder.mean) / encoder.deviation
    torch.testing.assert_close(encoder(images), encoder.trunk(normalised))


def test_training_begins_with_its_weights(tmp_path, short_config, monkeypatch):
    seen: list[dict[str, Tensor]] = []

    def fit(self: loop.Pretraining, *_: object) -> Run:
        seen.append(state_of(self.step_module.objective.encoder.trunk))
        return self.run

    monkeypatch.setattr(loop.Pretraining, "fit", fit)
    pretrain(short_config, run=tmp_path / "run", encoder=own())
    assert same(seen[0], state_of(own()))


def test_resuming_is_to_the_bit(trained, tmp_path, short_config, monkeypatch):
    """Stop after the first of two epochs; the second begins with a module of other weights."""
    every = override(short_config, {"training.save_seconds": 0.0})
    keep = loop.Pretraining._write_epoch

    def keep_and_stop(self: loop.Pretraining, record: dict[str, object], *rest: Any) -> None:
        keep(self, record, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Pretraining, "_write_epoch", keep_and_stop)
    with pytest.raises(KeyboardInterrupt):
        pretrain(every, run=tmp_path / "run", encoder=own())
    monkeypatch.undo()
    with pytest.raises(UserError, match="give it in Python"):
        resume(tmp_path / "run")
    resumed = resume(tmp_path / "run", encoder=own(seed=9))
    states = [state_of(load_encoder(run.path, encoder=own(seed=5))) for run in (resumed, trained)]
    assert same(*states)


def test_it_is_judged_and_embeds(trained, tmp_path):
    rows = evaluate(trained, protocols=["knn"], encoder=own(seed=9))
    assert rows[0]["value"] > 50.0  # of ten digits
    shapes = embed(trained.path, tmp_path / "x.npz", encoder=own(seed=9))
    draw_first_images(trained, out=tmp_path / "first.csv", encoder=own(seed=9))
    assert shapes["test_features"][1] == 24
    with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays:
        assert np.isfinite(arrays["test_features"]).all()


def test_its_untrained_twin_draws_its_weights_anew(trained):
    model, config, *_ = load_trained(trained, encoder=own(seed=9))
    before, pixels = state_of(model.encoder), ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    first, again, other = (
        build_untrained_encoder(model.encoder, config, *pixels, seed) for seed in (0, 0, 1)
    )
    assert same(state_of(model.encoder), before)
    assert same(state_of(first), state_of(again))
    assert not torch.equal(first.trunk[0].weight, other.trunk[0].weight)
    assert not torch.equal(first.trunk[0].weight, model.encoder.trunk[0].weight)
    # Batch normalisation forgets what it has learned and seen, too.
    assert same(state_of(first.trunk[1]), state_of(nn.BatchNorm2d(24)))
    torch.testing.assert_close(first.mean.flatten(), torch.tensor(pixels[0]))


def test_it_is_finetuned_beside_an_untrained_one(trained, few_digits):
    """With dropout, which is drawn from the seed."""
    found = []
    for state in (1, 2):
        module = nn.Sequential(*own(seed=9), nn.Dropout(0.5))
        torch.manual_seed(state)
        rows = evaluate(
            trained,
            protocols=["semi"],
            data=few_digits,
            epochs=1,
            semi=Semi(labels=(0.5,)),
            encoder=module,
        )
        found.append({row["variant"].split(", ")[1]: row["value"] for row in rows})
    assert found[0].keys() == {"from encoder", "from projection layer 1", "supervised"}
    assert found[0] == found[1]


class Scaled(nn.Module):
    """A module with a weight of its own and no way to draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = own()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, images: Tensor) -> Tensor:
        scaled: Tensor = self.scale * self.inner(images)
        return scaled


def test_what_cannot_be_drawn_anew_is_found_before_training(tmp_path, short_config, few_digits):
    once = override(short_config, {"training.epochs": 1})
    run = pretrain(once, run=tmp_path / "run", encoder=Scaled())
    with pytest.raises(UserError, match=r"in itself \(Scaled\) .* method reset_parameters"):
        evaluate(run, protocols=["knn", "supervised"], data=few_digits, encoder=Scaled())
    assert not run.result().get("evaluations")


def test_it_searches_and_clusters(trained, few_digits):
    told: dict[str, Any] = {"data": few_digits, "encoder": own(seed=9)}
    (answer,) = search(trained, ["test:0"], k=2, by=["cosine"], **told).answers
    assert len(answer.hits["cosine"]) == 2
    assert len(cluster(trained, 3, by=["features"], seeds=1, **told).names) == 300


@pytest.mark.parametrize(
    "use",
    [
        load_encoder,
        evaluate,
        lambda path: embed(path, path.parent / "never.npz"),
    ],
)
def test_without_the_module_it_cannot_be_used(trained, use):
    with pytest.raises(UserError, match=r"'custom': .* give it in Python, as `encoder=`"):
        use(trained.path)
    assert not (trained.path.parent / "never.npz").exists()


def test_a_module_of_another_structure_is_refused(trained):
    with pytest.raises(UserError, match=r"does not fit .* shape \(24.* encoder and method if they"):
        load_encoder(trained.path, encoder=own(width=8))


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min])
def test_a_mask_of_infinite_numbers_is_no_divergence(short_config, tmp_path, fill):
    module = own()
    mask = torch.full((4, 4), fill).triu(1)
    for place in (0, 2):  # as all layers of a transformer share one
        module[place].register_buffer("mask", mask)
    run = pretrain(short_config, run=tmp_path / "run", encoder=module)
    assert len(run.metrics()) == short_config.training.epochs


def test_a_module_for_a_run_of_a_named_encoder_is_refused(short_run):
    with pytest.raises(UserError, match=r"an encoder was given, but encoder.name is 'small'"):
        load_encoder(short_run.path, encoder=own())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), r"of shape \(2, 4, 16, 16\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(5, 5)), "fails on images of shape"),
        (own().half(), "its weights are torch.float16, and must be torch.float32"),
        (own().double(), "its weights are torch.float64, and must be torch.float32"),
        (computed(own()), "it cannot be copied: Only Tensors created explicitly by the user"),
    ],
)
def test_modules_that_are_no_encoders_are_refused_before_the_images_are_read(
    tmp_path, short_config, module, words
):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "broken.png").write_bytes(b"reading this would fail")
    source = {"data.source": str(tmp_path / "images"), "data.image_size": 16}
    config = override(short_config, source)
    with pytest.raises(UserError, match=f"the encoder given cannot be used: .*{words}"):
        pretrain(config, run=tmp_path / "run", encoder=module)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("custom", "give it in Python, as `encoder=` to the function"),
        ("timm:vit_tiny_patch16_242", "did you mean vit_tiny_patch16_224"),
        ("timm:inception_v3", "it was made for 299 px"),
        ("resnet19", "did you mean 'resnet1"),
        ("tim:test_vit", "did you mean 'timm:test_vit'?"),
    ],
)
def test_names_that_the_command_line_refuses(tmp_path, refusal, name, words):
    pytest.importorskip("timm")
    run = tmp_path / "run"
    assert words in refusal("pretrain", "digits", "--encoder.name", name, "--run", run)
    assert not (tmp_path / "run").exists()


def test_an_architecture_of_timm_trains_from_the_command_line(tmp_path, capsys):
    pytest.importorskip("timm")
    size = ("--data.image-size", "16", "--training.epochs", "1", "--training.batch-size", "256")
    words = ("pretrain", "digits", "--encoder.name", "timm:test_vit", *size)
    main([*words, "--run", str(tmp_path / "run")])
    assert "pretraining timm:test_vit" in capsys.readouterr().out
    assert load_encoder(tmp_path / "run").num_features == 64
