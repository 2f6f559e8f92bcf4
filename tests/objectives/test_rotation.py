"""How far small views are turned, as a loss term beside a method."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepbregman.config import RotationSettings, from_toml, to_toml
from deepbregman.errors import UserError
from deepbregman.objectives.rotation import RotationTerm
from deepbregman.objectives.step import gather_alone

from .methods import configure, draw_views, name_terms
from .test_methods import build, check_resume, take_step

TURNS: dict[str, Any] = {
    "rotation.weight": 0.4,
    "rotation.hidden": 8,
    "small_views.num_views": 4,
}


class Pixels(nn.Module):
    """An objective whose representation is the image itself."""

    encoder = nn.Flatten()

    def autocast(self) -> Any:
        return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("count", [4, 6])
def test_the_loss_is_a_loop_over_turned_images(count):
    small = draw_views(count, 5, 3)
    term = RotationTerm(RotationSettings(hidden=7), 27).double()
    term.head = nn.Linear(27, 4).double()  # type: ignore[assignment]  # without batch norm
    found = term(Pixels(), small, gather_alone)["rotation"].item()
    weight, bias = (value.detach().numpy() for value in (term.head.weight, term.head.bias))
    expected = []
    for turn in range(count):
        for image in small[turn].numpy():
            scores = weight @ np.rot90(image, turn, axes=(1, 2)).flatten() + bias
            expected.append(math.log(sum(math.exp(s) for s in scores)) - scores[turn % 4])
    assert found == pytest.approx(sum(expected) / len(expected), abs=1e-10)


def test_the_encoder_may_round_and_the_head_sees_every_process():
    class Coarse(Pixels):
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(27, 27))  # type: ignore[assignment]

        def autocast(self) -> Any:
            return torch.autocast("cpu", torch.bfloat16)

    parts: list[torch.Tensor] = []

    def gather(h: torch.Tensor) -> torch.Tensor:
        parts.append(h)
        return torch.cat(parts, dim=1)

    small = draw_views(4, 6, 3).float()
    objective, term = Coarse(), RotationTerm(RotationSettings(hidden=7), 27)
    term(objective, small[:, :2], gather)
    found = term(objective, small[:, 2:], gather)["rotation"]
    assert [(part.dtype, part.shape[1]) for part in parts] == [(torch.bfloat16, n) for n in (2, 4)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, term(objective, small, gather_alone)["rotation"])


def test_its_weighed_loss_joins_the_total_and_reaches_the_encoder():
    step = build(configure("moco-v2", **TURNS))
    outputs = take_step(step)
    terms = name_terms(step, outputs)
    assert terms["rotation"].item() == pytest.approx(math.log(4), abs=1.0)
    assert step.weights["rotation"] == 0.4
    weighed = sum(step.weights[name] * value for name, value in terms.items())
    torch.testing.assert_close(outputs.total.detach(), weighed)
    named = {name for group in step.parameter_groups() for name, _ in group.parameters}
    assert {name for name in named if name.startswith("rotation.head")}
    (gradient,) = torch.autograd.grad(outputs.total, [step.rotation.head[-1].weight])
    assert gradient.abs().max() > 0.0
    assert gradient.shape == (4, 8)  # a score for each quarter, from the hidden layer


def test_other_networks_begin_as_without_it():
    """So that runs can be compared."""
    plain, turned = (build(configure("moco-v2", **changes)) for changes in ({}, TURNS))
    state = turned.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_it_goes_on_to_the_bit(tmp_path):
    config = configure("moco-v2", **TURNS)
    assert from_toml(to_toml(config), "here") == config
    check_resume(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rotation.weight": 0.4}, "with 0 small views: it needs 4 or more"),
        ({"rotation.weight": 0.4, "small_views.num_views": 3}, "with 3 small views: it needs 4"),
        ({"rotation.weight": 0.0, "small_views.num_views": 4}, "rotation.weight is 0"),
        ({"small_views.num_views": 4}, "takes no such views"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        configure("moco-v2", **changes)
