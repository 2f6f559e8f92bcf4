"""Fine-tuning: order, augmentation, schedule, and stopping without a trace."""

import multiprocessing
import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from deepbregman.data.slots import START_METHOD
from deepbregman.data.voc import Detections, Objects
from deepbregman.errors import UserError
from deepbregman.evaluation.detection.detectors import Detector, build_detector
from deepbregman.evaluation.detection.training import (
    Photographs,
    build_optimiser,
    detect_all,
    fine_tune,
    flip_batch,
    learning_rate,
    load_batches,
    make_targets,
    order_batches,
    settle_norms,
)
from deepbregman.evaluation.options import Detect
from deepbregman.method.networks import build_encoder
from deepbregman.training.faults import Interrupted

CPU = torch.device("cpu")
MOCO = Detect()
TINY = Detect(iterations=2, batch_size=2, learning_rate=0.005, workers=0, save_seconds=1e9)
SEED = 3


@pytest.fixture
def data(tmp_path) -> Detections:
    """Three photographs of noise, of different sizes, with one bright object each."""
    generator = np.random.default_rng(0)
    paths, objects = [], []
    for index, (height, width) in enumerate([(48, 64), (64, 48), (56, 56)]):
        pixels = generator.integers(0, 120, (height, width, 3), dtype=np.uint8)
        pixels[8:40, 6:36] += 120
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray(pixels).save(paths[-1])
        box = torch.tensor([[6.0, 8.0, 36.0, 40.0]])
        objects.append(Objects(box, torch.tensor([index]), torch.tensor([index == 2])))
    names = ("a", "b", "c")
    return Detections(tuple(paths), names, tuple(objects))


def a_detector() -> Detector:
    torch.manual_seed(5)
    encoder = build_encoder("resnet18", 224)
    return build_detector(encoder, "fpn", Detect(image_side=(32, 48), regions=8, proposals=10))


def test_the_learning_rate_is_the_protocol_s():
    assert learning_rate(MOCO, 0) < 0.001
    assert learning_rate(MOCO, 50) == pytest.approx(0.02 * 51 / 101)
    for iteration in (100, 17_999):
        assert learning_rate(MOCO, iteration) == pytest.approx(0.02)
    for iteration in (18_000, 21_999):
        assert learning_rate(MOCO, iteration) == pytest.approx(0.002)
    for iteration in (22_000, 23_999):
        assert learning_rate(MOCO, iteration) == pytest.approx(0.0002)


def test_a_short_training_warms_up_for_a_tenth_of_it():
    short = replace(MOCO, iterations=100)
    assert learning_rate(short, 9) < learning_rate(short, 10) == pytest.approx(0.02)


def test_every_epoch_visits_every_image_once():
    flat = [index for batch in order_batches(7, 3, 1, 0, 14) for index in batch]
    epochs = [flat[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert order_batches(7, 3, 1, 5, 14) == order_batches(7, 3, 1, 0, 14)[5:]
    assert order_batches(7, 3, 2, 0, 14) != order_batches(7, 3, 1, 0, 14)
    assert [len(batch) for batch in order_batches(2, 5, 1, 0, 3)] == [5, 5, 5]


@pytest.mark.parametrize("workers", [0, 2])
def test_photographs_come_as_they_are(data, workers):
    batches = list(load_batches(data, [[2, 0], [1]], CPU, workers))
    for batch, indices in zip(batches, [[2, 0], [1]], strict=True):
        for image, objects, index in zip(batch.images, batch.objects, indices, strict=True):
            with Image.open(data.paths[index]) as file:
                stored = np.asarray(file).transpose(2, 0, 1) / 255.0
            torch.testing.assert_close(image, torch.from_numpy(stored).float())
            assert objects.labels.tolist() == [index]


def test_workers_start_alike_in_every_python(data):
    """From 3.14 on Python would import a user's script anew in each of them, and run it again."""
    usual, others = multiprocessing.get_start_method(), set(multiprocessing.active_children())
    multiprocessing.set_start_method("spawn", force=True)
    try:
        batches = load_batches(data, [[0], [1]], CPU, 1)
        next(batches)
        (worker,) = set(multiprocessing.active_children()) - others
    finally:
        multiprocessing.set_start_method(usual, force=True)
    assert isinstance(worker, multiprocessing.get_context(START_METHOD).Process)


def test_no_more_workers_than_processors(data, monkeypatch, recwarn):
    """Torch warns of more, twice for each detector."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    list(load_batches(data, [[0]], CPU, workers=4))
    assert [str(one.message) for one in recwarn if "worker" in str(one.message)] == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_went_bad_is_named(data, workers):
    data.paths[1].write_bytes(b"gone")
    with pytest.raises(UserError, match=r"1\.png cannot be read .*restore"):
        list(load_batches(data, [[0], [1]], CPU, workers))


def test_a_mirrored_box_holds_the_mirrored_pixels(data):
    (batch,) = load_batches(data, [[0, 1, 2] * 8], CPU, 0)
    mirrored = flip_batch(batch, seed=0, iteration=3)
    turned = 0
    for image, objects, before, old in zip(*mirrored, *batch, strict=True):
        left, top, right, bottom = objects.boxes[0].int().tolist()
        inside = image[:, top:bottom, left:right]
        x0, y0, x1, y1 = old.boxes[0].int().tolist()
        assert torch.equal(inside.sort(dim=2)[0], before[:, y0:y1, x0:x1].sort(dim=2)[0])
        assert float(inside.min()) >= 120 / 255
        turned += not torch.equal(image, before)
    assert 4 <= turned <= 20  # of 24
    again = flip_batch(batch, seed=0, iteration=3)
    assert all(torch.equal(a, b) for a, b in zip(again.images, mirrored.images, strict=True))


def test_difficult_objects_are_trained_on_too():
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 5.0, 5.0]])
    objects = Objects(boxes, torch.tensor([0, 19]), torch.tensor([True, False]))
    batch = Photographs([torch.zeros(3, 8, 8)], [objects])
    assert make_targets(batch)[0]["labels"].tolist() == [1, 20]


def test_norms_are_not_decayed():
    detector = a_detector()
    decayed, kept = build_optimiser(detector).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (1e-4, 0.0)
    assert len(kept["params"]) == 40  # 20 norms, a weight and a bias each
    assert len(decayed["params"]) + 40 == len(list(detector.parameters()))


class OneWeight(nn.Module):
    """In place of a detector: two losses of one weight, and what was seen."""

    frozen_norms = ()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.seen: list[tuple[list[Tensor], list[dict[str, Tensor]]]] = []

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if targets is None:
            assert not self.training
            assert not torch.is_grad_enabled()
            boxes, scores = torch.tensor([[1.0, 2, 3, 4]]).repeat(2, 1), torch.tensor([0.9, 0.8])
            return [{"boxes": boxes, "labels": torch.tensor([1, 20]), "scores": scores}]
        assert self.training
        self.seen.append((images, targets))
        left = torch.stack([target["boxes"][0, 0] for target in targets]).mean()
        first = (self.weight * images[0].mean() - left / 10).square().sum()
        return {"first": first, "second": 0.1 * self.weight.square().sum()}


@pytest.mark.parametrize("largest", [0.0, 0.05])
def test_a_training_is_torchs_sgd_on_flipped_photographs(data, tmp_path, largest):
    """Momentum 0.9, decay 1e-4, the sum of the losses, the norm of its gradient bounded."""
    options = replace(TINY, iterations=12, clip_gradient=largest)
    detector: Any = OneWeight()
    told: list[float] = []
    fine_tune(
        detector,
        data,
        options,
        SEED,
        device=CPU,
        checkpoint=tmp_path / "last.pt",
        settings={},
        report=lambda _, loss: told.append(loss),
    )
    assert len(detector.seen) == 12 + 12  # and once more for the statistics of norms
    expected: Any = OneWeight()
    optimiser = torch.optim.SGD(expected.parameters(), 1.0, momentum=0.9, weight_decay=1e-4)
    turned = 0
    for iteration, (images, targets) in enumerate(detector.seen[:12]):
        optimiser.param_groups[0]["lr"] = learning_rate(options, iteration)
        loss = sum(expected(images, targets).values())
        assert told[iteration] == pytest.approx(loss.item())
        optimiser.zero_grad()
        loss.backward()
        if largest:
            expected.weight.grad.clamp_(-largest, largest)
        optimiser.step()
        for image, target in zip(images, targets, strict=True):
            width, left = image.shape[2], float(target["boxes"][0, 0])
            assert left in (6.0, width - 36.0)
            turned += left != 6.0
    torch.testing.assert_close(detector.weight, expected.weight)
    assert 4 <= turned <= 20  # of 24


def test_detections_have_our_numbers_of_classes(data):
    """Those of torchvision count the background as class 0."""
    detector: Any = OneWeight().train()
    done: list[int] = []
    found = detect_all(detector, data, device=CPU, workers=0, report=done.append)
    assert [one.labels.tolist() for one in found] == [[0, 19]] * 3
    assert done == [1, 2, 3]


@pytest.mark.slow
def test_a_stopped_training_goes_on_to_the_bit(data, tmp_path):
    def train(detector: Detector, name: str, stop_at: int | None, settings: object = 1) -> None:
        def report(iterations: int, loss: float) -> None:
            seen.append((iterations, loss))
            if iterations == stop_at:
                signal.raise_signal(signal.SIGTERM)

        fine_tune(
            detector,
            data,
            TINY,
            SEED,
            device=CPU,
            checkpoint=tmp_path / name,
            settings={"what": settings},
            report=report,
        )

    seen: list[tuple[int, float]] = []
    straight = a_detector()
    state = torch.get_rng_state()
    train(straight, "straight.pt", None)
    assert torch.equal(torch.get_rng_state(), state)  # the global state is left as it was
    losses, seen = seen, []
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM.*the same command continues it"):
        train(a_detector(), "stopped.pt", 1)
    with pytest.raises(UserError, match="what was 1, is 2"):
        train(a_detector(), "stopped.pt", None, settings=2)
    torch.manual_seed(77)  # another process has another state
    resumed = a_detector()
    train(resumed, "stopped.pt", None)
    assert seen == losses
    expected = straight.state_dict()
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_loss_that_is_no_number_stops_the_training(data, tmp_path):
    detector = a_detector()
    detector.rpn.head.cls_logits.bias.data.fill_(float("nan"))
    with pytest.raises(UserError, match="loss is nan at iteration 1: the detector has diverged"):
        fine_tune(
            detector,
            data,
            TINY,
            SEED,
            device=CPU,
            checkpoint=tmp_path / "last.pt",
            settings={},
            report=lambda iterations, loss: None,
        )
    assert not (tmp_path / "last.pt").exists()


def test_settled_norms_hold_the_average_over_batches(data):
    detector = a_detector()
    means: list[torch.Tensor] = []
    norm = detector.backbone.body.bn1
    norm.register_forward_pre_hook(lambda _, inputs: means.append(inputs[0].mean(dim=(0, 2, 3))))
    norm.running_mean.fill_(5.0)
    settle_norms(detector, data, TINY, SEED, CPU)
    assert len(means) == TINY.iterations
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(dim=0))
