import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from deepbregman.config import load_recipe, override
from deepbregman.data import ArrayImages, Batch, ResidentBatches, StreamingBatches
from deepbregman.evaluation import features
from deepbregman.evaluation.features import build_crop_and_flip, compute_features
from deepbregman.evaluation.frozen import keep_frozen
from deepbregman.method.networks import Model
from deepbregman.method.views import centre_view
from deepbregman.objectives import build_step

CPU = torch.device("cpu")
SIZE = 8


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


def build(divergence: float = 1.0) -> Model:
    """A small model whose normalisation has statistics that matter."""
    changes = {
        "encoder.projection_hidden": 16,
        "encoder.embedding": 8,
        "divergence.num_subnetworks": 5,
        "divergence.hidden": 4,
        "divergence.weight": divergence,
    }
    torch.manual_seed(0)
    model = build_step(override(load_recipe("digits"), changes)).model
    with torch.no_grad():
        for _ in range(3):
            model(torch.rand(16, 3, SIZE, SIZE))
    return model


def pictures(count: int, side: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# The guard


@pytest.mark.parametrize("training", [True, False])
def test_frozen_is_evaluation_without_gradient_and_undone_after(training):
    module = network().train(training)
    before = copied(module)
    with keep_frozen(module):
        assert not any(part.training for part in module.modules())
        assert not torch.is_grad_enabled()
        inputs = torch.randn(5, 4)
        assert torch.equal(module(inputs), module(inputs))  # no dropout, no batch statistics
    assert torch.is_grad_enabled()
    assert all(part.training == training for part in module.modules())
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
    assert all(parameter.requires_grad for parameter in module.parameters())


def change_parameter(module: nn.Module) -> None:
    module.get_parameter("0.bias")[1] += 1e-3


def replace_parameter(module: nn.Module) -> None:
    module.get_submodule("0").bias = nn.Parameter(torch.full((3,), 9.0))


def change_running_mean(module: nn.Module) -> None:
    module.get_buffer("1.running_mean")[0] += 1.0


def count_a_batch(module: nn.Module) -> None:
    module.get_buffer("1.num_batches_tracked").add_(1)


def leave_in_training_mode(module: nn.Module) -> None:
    module.get_submodule("2").train()


def leave_all_in_training_mode(module: nn.Module) -> None:
    module.train()


def train_and_return(module: nn.Module) -> None:
    module.train()
    module(torch.randn(5, 4))
    module.eval()


@pytest.mark.parametrize(
    ("touch", "words"),
    [
        (change_parameter, r"changed \['0\.bias'\]"),
        (replace_parameter, r"changed \['0\.bias'\]"),
        (change_running_mean, r"changed \['1\.running_mean'\]"),
        (count_a_batch, r"changed \['1\.num_batches_tracked'\]"),
        (leave_in_training_mode, r"in training mode \['2'\], changed \[\]"),
        (leave_all_in_training_mode, r"in training mode \['', '0', '1', '2'\]"),
        (train_and_return, r"'1\.running_mean', '1\.running_var', '1\.num_batches_tracked'"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_frozen_catches(touch, words, training):
    module = network().train(training)
    with (
        pytest.raises(RuntimeError, match=f"frozen network was touched.*{words}"),
        keep_frozen(module),
    ):
        touch(module)
    assert all(part.training == training for part in module.modules())


def test_frozen_lets_an_error_through():
    module = network()
    with pytest.raises(ValueError, match="inside"), keep_frozen(module):
        raise ValueError("inside")
    assert module.training


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_frozen_does_not_accuse_a_network_that_has_diverged(value):
    module = network()
    with torch.no_grad():
        module.get_parameter("0.bias")[0] = value
    with keep_frozen(module):
        pass


@pytest.mark.parametrize(("before", "after"), [(torch.nan, 0.0), (0.0, torch.nan), (0.0, 1e-45)])
def test_frozen_sees_a_change_to_or_from_nan_and_the_least_one(before, after):
    module = network()
    bias = module.get_parameter("0.bias")
    with torch.no_grad():
        bias[0] = before
    with pytest.raises(RuntimeError, match=r"changed \['0\.bias'\]"), keep_frozen(module):
        bias[0] = after


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_gives_each_part_its_own_mode_back(fails):
    module = network()
    module[1].eval()
    with contextlib.suppress(ValueError), keep_frozen(module):
        assert not any(part.training for part in module.modules())
        if fails:
            raise ValueError
    assert module.training
    assert [part.training for part in module] == [True, False, True]


# The features


def direct(model: Model, images: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One image at a time."""
    model.eval()
    h, o = [], []
    with torch.no_grad():
        for index in range(len(images)):
            one = slice(index, index + 1)
            view = centre_view(images[one], None if sizes is None else sizes[one], SIZE)
            outputs = model(view)
            h.append(outputs.representation)
            if outputs.scores is not None:
                o.append(outputs.scores)
    return torch.cat(h), torch.cat(o) if o else None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [ResidentBatches, StreamingBatches])
@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_features_agree_with_a_direct_loop(monkeypatch, padded, kind, batch_size):
    model, pixels = build(), pictures(9, 12)
    sizes = None
    if padded:
        generator = torch.Generator().manual_seed(2)
        sizes = torch.randint(5, 13, (9, 2), generator=generator)
    monkeypatch.setattr(features, "BATCH_SIZE", batch_size)
    found = compute_features(model, kind(ArrayImages(pixels, sizes), CPU), SIZE)
    representation, scores = direct(model, pixels, sizes)
    assert scores is not None
    assert found.representation.shape == (9, model.encoder.num_features)
    assert found.scores.shape == (9, 5)
    assert found.representation.dtype == found.scores.dtype == torch.float32
    torch.testing.assert_close(found.representation, representation, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.scores, scores, rtol=1e-4, atol=1e-5)
    assert len(set(map(tuple, representation.tolist()))) == 9  # so that another order would show


def test_features_without_divergence():
    model, pixels = build(divergence=0.0), pictures(4)
    found = compute_features(model, ResidentBatches(ArrayImages(pixels), CPU), SIZE)
    assert found.scores is None
    torch.testing.assert_close(found.representation, direct(model, pixels, None)[0])


@pytest.mark.parametrize("training", [True, False])
def test_features_leave_the_model_as_it_was(training):
    model = build().train(training)
    before = copied(model)
    found = compute_features(model, ResidentBatches(ArrayImages(pictures(4)), CPU), SIZE)
    assert model.training == training
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert not found.representation.requires_grad


class Meddling:
    """Batches that put the model back in training mode, as a careless monitor might."""

    num_images, skipped, resident = 4, frozenset[int](), True

    def __init__(self, model: Model) -> None:
        self.model = model

    def iterate(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        self.model.train()
        yield Batch(pictures(4)[order], None)


def test_features_of_a_model_that_trains_meanwhile_are_refused():
    model = build()
    with pytest.raises(RuntimeError, match="frozen network was touched"):
        compute_features(model, Meddling(model), SIZE)


# What classifiers are trained on


@pytest.mark.parametrize("flip", [0.0, 0.5])
def test_views_of_a_classifier_are_crops_and_flips_only(flip):
    """Red rises with x and green with y, so that slopes tell the crop; blue is the same all over.

    As large as the images, though views of pretraining are smaller, and in other colours.
    """
    changes = {"data.image_size": 32, "views.crop_area": (0.4, 0.6), "views.flip": flip}
    config = override(load_recipe("simclr"), {**changes, "views.relative_size": 0.75})
    pixels = torch.full((400, 3, 32, 32), 200, dtype=torch.uint8)
    pixels[:, 0], pixels[:, 1] = 8 * torch.arange(32), 8 * torch.arange(32)[:, None]
    views = build_crop_and_flip(config)
    uniforms = views.draw(400, device=CPU, generator=torch.Generator().manual_seed(0))
    (view,) = views(pixels, None, uniforms)
    assert view.shape == (400, 3, 32, 32)
    torch.testing.assert_close(view[:, 2], torch.full_like(view[:, 2], 200 / 255))
    width = 32 * (view[:, 0, 16, 20] - view[:, 0, 16, 11]) * 255 / 8 / 9
    height = 32 * (view[:, 1, 20, 16] - view[:, 1, 11, 16]) * 255 / 8 / 9
    area = (width * height).abs() / 32**2
    assert 0.35 < area.min() < 0.45 < 0.55 < area.max() < 0.65  # sides are whole pixels
    assert height.min() > 0
    assert (width < 0).float().mean() == pytest.approx(flip, abs=0.1)
