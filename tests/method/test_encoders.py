"""Encoders beyond the ResNets: architectures of timm by name, and any module's width measured."""

import sys
from typing import get_type_hints

import pytest
import torch
from torch import Tensor, nn

from deepbregman.config import EncoderSettings
from deepbregman.config.rules import Name
from deepbregman.method.networks import TRUNKS, build_encoder, create_timm, measure_width

timm = pytest.importorskip("timm")


def test_the_configuration_knows_the_trunks_that_exist():
    hint = get_type_hints(EncoderSettings, include_extras=True)["name"]
    (rule,) = [part for part in hint.__metadata__ if isinstance(part, Name)]
    assert set(rule.known) == {*TRUNKS, "custom"}


class TestTimm:
    @pytest.mark.parametrize(
        ("name", "image_size", "width"),
        [  # the width of the pooled output, from each architecture's publication or by its head
            ("resnet26d", 32, 2048),
            ("convnext_atto", 32, 320),
            ("vit_tiny_patch16_224", 32, 192),
            ("vit_tiny_patch16_224", 64, 192),
            ("mobilenetv3_small_050", 32, 1024),  # timm's num_features is 288
            ("efficientnet_lite0", 32, 1280),
            ("swin_tiny_patch4_window7_224", 32, 768),
        ],
    )
    def test_families(self, name, image_size, width):
        encoder = build_encoder(f"timm:{name}", image_size)
        assert encoder.num_features == width
        assert encoder.training
        assert all(part.training for part in encoder.modules())
        images = torch.rand(2, 3, image_size, image_size)
        features = encoder.to(memory_format=torch.channels_last).eval()(images)
        assert features.shape == (2, width)
        assert features.isfinite().all()

    def test_features_are_timms_of_normalised_pixels(self):
        encoder = build_encoder("timm:test_vit", 32, mean=(0.1, 0.2, 0.3), deviation=(0.5,) * 3)
        theirs = timm.create_model("test_vit", num_classes=0, img_size=32).eval()
        theirs.load_state_dict(encoder.trunk.state_dict())
        images = torch.rand(3, 3, 32, 32)
        normalised = (images - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / 0.5
        torch.testing.assert_close(encoder.eval()(images), theirs(normalised))

    def test_the_trunk_learns(self):
        encoder = build_encoder("timm:test_convnext", 32)
        encoder(torch.rand(4, 3, 32, 32)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in encoder.parameters())

    def test_initial_weights_are_drawn_from_the_seed(self):
        states = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            states.append(build_encoder("timm:test_vit", 32).trunk.patch_embed.proj.weight)
        assert torch.equal(states[0], states[1])
        assert not torch.equal(states[0], states[2])

    def test_nothing_is_downloaded(self, monkeypatch):
        seen: list[bool] = []
        original = timm.create_model

        def create(*words: object, pretrained: bool, **options: object) -> nn.Module:
            seen.append(pretrained)
            return original(*words, pretrained=pretrained, **options)

        monkeypatch.setattr(timm, "create_model", create)
        build_encoder("timm:test_vit", 32)
        build_encoder("timm:test_resnet", 32)
        assert seen
        assert not any(seen)

    def test_options_that_were_needed_are_returned(self):
        assert create_timm("test_vit", 32)[1] == {"img_size": 32}
        assert create_timm("test_resnet", 32)[1] == {}

    @pytest.mark.parametrize(
        ("name", "image_size", "words"),
        [
            ("vit_tiny_patch16_242", 32, "did you mean vit_tiny_patch16_"),
            ("hf-hub:timm/resnet18", 32, "has no architecture 'hf-hub:timm/resnet18'"),
            ("zzz", 32, "has no architecture 'zzz'$"),
            ("vit_tiny_patch16_224", 40, r"patches of 16 px would not cover.* made for 224 px"),
            ("inception_v3", 32, r"cannot take images of 32 px .* made for 299 px"),
            ("crossvit_tiny_240", 64, r"cannot take images of 64 px .* made for 240 px"),
            ("xcit_nano_12_p16_224", 40, r"cannot take images of 40 px .* made for 224 px"),
        ],
    )
    def test_names_and_sizes_that_do_not_fit(self, name, image_size, words):
        with pytest.raises(ValueError, match=words):
            build_encoder(f"timm:{name}", image_size)

    def test_it_has_no_stem_to_choose(self):
        with pytest.raises(ValueError, match="stem 'thumbnail' is for ResNets"):
            build_encoder("timm:test_resnet", 32, stem="thumbnail")

    def test_without_timm(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(ImportError, match=r"pip install 'deepbregman\[timm\]'"):
            build_encoder("timm:test_resnet", 32)


class Made(nn.Module):
    """Makes of images whatever it is told to."""

    def __init__(self, made: object) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.made = made

    def forward(self, images: Tensor) -> object:
        self.norm(images)
        return self.made


class TestMeasuredWidth:
    def test_it_is_the_outputs(self):
        assert measure_width(nn.Sequential(nn.Flatten(), nn.Linear(48, 7)), 4) == 7

    def test_looking_changes_nothing(self):
        trunk = Made(torch.zeros(2, 5))
        before = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
        assert measure_width(trunk, 8) == 5
        assert trunk.training
        assert all(torch.equal(before[name], t) for name, t in trunk.state_dict().items())
        assert measure_width(trunk.eval(), 8) == 5
        assert not trunk.training

    @pytest.mark.parametrize(
        ("made", "words"),
        [
            (torch.zeros(2, 5, 1, 1), r"of shape \(2, 5, 1, 1\) of images of shape \(2, 3, 8, 8\)"),
            (torch.zeros(2), r"of shape \(2,\)"),
            (torch.zeros(1, 5), r"of shape \(1, 5\)"),
            (torch.zeros(2, 0), r"of shape \(2, 0\)"),
            (torch.zeros(2, 5, dtype=torch.int64), "torch.int64 of shape"),
            ((torch.zeros(2, 5),), "returns a tuple"),
        ],
    )
    def test_other_outputs_are_refused(self, made, words):
        with pytest.raises(ValueError, match=words):
            measure_width(Made(made), 8)

    def test_a_module_that_fails_says_why(self):
        trunk = nn.Sequential(nn.Flatten(), nn.Linear(10, 7))
        with pytest.raises(ValueError, match=r"fails on images of shape \(2, 3, 4, 4\): .*mat1"):
            measure_width(trunk.train(), 4)
        assert trunk.training
