"""Detectors around an encoder: what is in them, and what is refused."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepbregman.errors import UserError
from deepbregman.evaluation.detection.detectors import (
    Detector,
    build_detector,
    find_differences,
    load_trunk,
    map_trunk_names,
    require_fitting,
)
from deepbregman.evaluation.options import Architecture, Detect
from deepbregman.method.networks import Encoder, build_encoder

pytestmark = pytest.mark.usefixtures("cheap_weights")
ARCHITECTURES: tuple[Architecture, ...] = ("c4", "fpn")
MEAN, DEVIATION = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def an_encoder(name: str = "resnet18") -> Encoder:
    return copy.deepcopy(draw_encoder(name))


def a_detector(architecture: Architecture, **settings: Any) -> Detector:
    return copy.deepcopy(draw_detector(architecture, **settings))


@functools.cache  # to draw millions of weights takes longest here
def draw_encoder(name: str) -> Encoder:
    torch.manual_seed(0)
    encoder = build_encoder(name, 224, "auto", MEAN, DEVIATION)
    for module in encoder.modules():  # as if trained: no statistic is as it began
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                tensor.data.uniform_(0.5, 1.5)
            module.num_batches_tracked.fill_(7)  # type: ignore[operator]  # a buffer
    return encoder


@functools.cache
def draw_detector(architecture: Architecture, *, mixed: bool = False, **settings: Any) -> Detector:
    torch.manual_seed(9)
    encoder = build_encoder("resnet18", 224, "auto", MEAN, DEVIATION)
    small = {"arms": ("pretrained",), "image_side": (32, 32), "regions": 4, "proposals": 10}
    return build_detector(encoder, architecture, Detect(**small | settings), mixed=mixed)


def a_batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(4)
    images = [torch.rand(3, 64, 80, generator=generator) for _ in range(2)]
    boxes = torch.tensor([[5.0, 6.0, 50.0, 60.0]])
    return images, [{"boxes": boxes, "labels": torch.tensor([3])} for _ in images]


@pytest.mark.parametrize(
    ("name", "architecture", "count"),
    [
        ("resnet18", "c4", 120),
        ("resnet18", "fpn", 120),
        ("resnet50", "c4", 318),
    ],
)
def test_every_tensor_of_the_trunk_is_loaded(name, architecture, count):
    encoder = an_encoder(name)
    state = encoder.trunk.state_dict()
    detector = build_detector(build_encoder(name, 224), architecture, Detect())
    assert find_differences(detector, state)
    assert load_trunk(detector, state, "a run") == len(state) == count
    assert find_differences(detector, state) == []
    assert set(map_trunk_names(detector)) == set(state)


def test_the_c4_detector_computes_the_features_of_the_encoder():
    # In float64: two orders of the same convolutions differ by 1e-4 in float32 on some CPUs.
    encoder, detector = an_encoder().double().eval(), a_detector("c4").double().eval()
    load_trunk(detector, encoder.trunk.state_dict(), "a run")
    pixels = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        normalised = torch.stack([detector.transform.normalize(image) for image in pixels])
        features = detector.roi_heads.box_head.layer4(detector.backbone(normalised))
        torch.testing.assert_close(features.mean(dim=(2, 3)), encoder(pixels))


def test_the_pyramid_gets_the_features_of_the_encoder():
    encoder, detector = an_encoder().double().eval(), a_detector("fpn").double().eval()
    load_trunk(detector, encoder.trunk.state_dict(), "a run")
    pixels = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        normalised = torch.stack([detector.transform.normalize(image) for image in pixels])
        features = detector.backbone.body(normalised)
        torch.testing.assert_close(features["3"].mean(dim=(2, 3)), encoder(pixels))
    strides = [pixels.shape[3] // level.shape[3] for level in features.values()]
    assert strides == [4, 8, 16, 32]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_state_that_does_not_fit_names_the_key(architecture):
    state = dict(an_encoder().trunk.state_dict())
    detector = a_detector(architecture)
    before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
    for key in ("conv1.weight", "layer3.1.bn2.running_var", "layer4.0.bn1.bias"):
        broken = [
            ({name: value for name, value in state.items() if name != key}, f"{key} is missing"),
            ({**state, key: state[key][..., :1, None]}, f"{key} has shape"),
            ({**state, f"{key}.more": state[key]}, f"{key}.more is not expected"),
        ]
        for wrong, says in broken:
            with pytest.raises(UserError) as error:
                load_trunk(detector, wrong, "RUN/last.pt")
            assert says in str(error.value)
            assert "RUN/last.pt" in str(error.value)
    unchanged = detector.state_dict()
    assert all(torch.equal(tensor, unchanged[name]) for name, tensor in before.items())


def test_a_tensor_that_did_not_arrive_is_named(monkeypatch):
    detector, state = a_detector("c4"), an_encoder().trunk.state_dict()
    monkeypatch.setattr(Tensor, "copy_", lambda self, other: self)
    with pytest.raises(UserError, match=r"conv1\.weight did not arrive"):
        load_trunk(detector, state, "a run")


def test_one_changed_value_is_noticed():
    detector, state = a_detector("fpn"), an_encoder().trunk.state_dict()
    load_trunk(detector, state, "a run")
    detector.get_parameter("backbone.body.layer2.0.conv1.weight").data[0, 0, 0, 0] += 1e-6
    assert find_differences(detector, state) == ["layer2.0.conv1.weight"]


def test_encoders_that_do_not_fit_are_told_what_does():
    with pytest.raises(UserError, match=r"thumbnail stem.*encoder\.stem standard"):
        require_fitting(build_encoder("resnet18", 32))
    with pytest.raises(UserError, match=r"is a SmallTrunk of .*: detection takes a ResNet"):
        require_fitting(build_encoder("small", 32))


def test_pixels_are_normalised_as_the_encoder_does():
    transform = a_detector("c4").transform
    assert transform.image_mean == pytest.approx(list(MEAN))
    assert transform.image_std == pytest.approx(list(DEVIATION))


def test_sides_are_those_of_the_protocol():
    transform = build_detector(build_encoder("resnet18", 224), "c4", Detect()).transform
    sides = [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]
    assert transform.min_size == sides
    assert transform.max_size == 1333


def test_the_c4_detector_is_that_of_the_protocol():
    """As in detectron2's configuration Base-RCNN-C4, which MoCo takes."""
    detector = draw_detector("c4", regions=512, proposals=1000)
    (anchors,) = detector.rpn.anchor_generator.cell_anchors
    width, height = (anchors[:, 2:] - anchors[:, :2]).double().unbind(dim=1)
    shapes = [(side, aspect) for aspect in (0.5, 1.0, 2.0) for side in (32, 64, 128, 256, 512)]
    assert (width * height).sqrt().tolist() == pytest.approx([side for side, _ in shapes], rel=0.02)
    assert (height / width).tolist() == pytest.approx([aspect for _, aspect in shapes], rel=0.05)
    rpn, heads = detector.rpn, detector.roi_heads
    assert rpn._pre_nms_top_n == {"training": 12_000, "testing": 6_000}
    assert rpn._post_nms_top_n == {"training": 2_000, "testing": 1_000}
    assert heads.fg_bg_sampler.batch_size_per_image == 512
    assert heads.fg_bg_sampler.positive_fraction == 0.25
    assert heads.box_roi_pool.output_size == (14, 14)
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.05, 0.5, 100)


@pytest.mark.parametrize(
    ("architecture", "norm"),
    [
        ("c4", "train"),
        ("fpn", "frozen"),
        pytest.param("c4", "frozen", marks=pytest.mark.slow),
        pytest.param("fpn", "train", marks=pytest.mark.slow),
    ],
)
def test_norms_are_trained_or_frozen(architecture, norm):
    encoder = an_encoder()
    detector = a_detector(architecture, norm=norm)
    load_trunk(detector, encoder.trunk.state_dict(), "a run")
    detector.train()
    optimiser = torch.optim.SGD((p for p in detector.parameters() if p.requires_grad), lr=0.01)
    torch.stack(list(detector(*a_batch()).values())).sum().backward()
    optimiser.step()
    changed = set(find_differences(detector, encoder.trunk.state_dict()))
    norms = {
        name
        for name in encoder.trunk.state_dict()
        if ".bn" in name or name.startswith("bn1") or "downsample.1" in name
    }
    assert len(norms) == 100  # 20 norms of 5 tensors
    assert changed & norms == (norms if norm == "train" else set())
    assert "layer4.1.conv2.weight" in changed
    if architecture == "c4":  # the added norm has nothing to keep
        assert detector.roi_heads.box_head.norm.num_batches_tracked == 1


@pytest.mark.filterwarnings("ignore:mkldnn_:UserWarning")  # on CPUs without bfloat16
@pytest.mark.parametrize("architecture", ["fpn", pytest.param("c4", marks=pytest.mark.slow)])
def test_bfloat16_ends_before_the_boxes(architecture):
    exact, mixed = (  # no copies: what is wrapped in autocast would be the original's
        draw_detector(architecture, mixed=mixed, proposals=2).eval() for mixed in (False, True)
    )
    batch = a_batch()[0][:1]
    images, _ = exact.transform(batch)
    with torch.no_grad():
        levels = [detector.backbone(images.tensors) for detector in (exact, mixed)]
    ours, theirs = (x if isinstance(x, dict) else {"0": x} for x in levels)
    for name in ours:
        assert theirs[name].dtype == torch.float32
        assert not torch.equal(ours[name], theirs[name])  # it was in bfloat16
        assert (ours[name] - theirs[name]).abs().mean() < 0.05 * ours[name].abs().mean()
    anchors = [
        detector.rpn.anchor_generator(images, list(features.values()))
        for detector, features in ((exact, ours), (mixed, theirs))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*anchors, strict=True))
    with torch.no_grad():
        outputs = mixed(batch)
    assert outputs[0]["boxes"].dtype == torch.float32
