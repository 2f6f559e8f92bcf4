"""SimCLR against its formula, and the deeper head of its second version."""

import math

import pytest
import torch
from torch import nn

from deepbregman.config import load_recipe
from deepbregman.objectives import Samples, ViewGroups, build_step, gather_alone

from .methods import configure, draw_views


def test_the_loss_is_the_papers():
    """The mean over 2N anchors of ``-log exp(s_ij / tau) / sum_{k != i} exp(s_ik / tau)``."""
    objective = build_step(configure("simclr", **{"objective.temperature": 0.3})).double().objective
    outputs = objective(ViewGroups(draw_views(2, 5)), gather_alone, Samples())
    units = [[x / math.hypot(*z) for x in z] for z in outputs.student.flatten(0, 1).tolist()]
    expected = 0.0
    for i, anchor in enumerate(units):
        similar = [math.exp(sum(map(float.__mul__, anchor, z)) / 0.3) for z in units]
        expected -= math.log(similar[(i + 5) % 10] / (sum(similar) - similar[i])) / 10
    assert outputs.terms["contrastive"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "layers"), [("simclr", 2), ("simclr-v2", 3)])
def test_version_2_has_a_deeper_head(name, layers):
    projection = build_step(load_recipe(name)).objective.projection
    assert sum(isinstance(part, nn.Linear) for part in projection) == layers


def test_lightly_has_the_same_loss():
    losses = pytest.importorskip("lightly.loss")
    objective = build_step(configure("simclr", **{"objective.temperature": 0.3})).double().objective
    outputs = objective(ViewGroups(draw_views(2, 5)), gather_alone, Samples())
    expected = losses.NTXentLoss(temperature=0.3)(*outputs.student)
    torch.testing.assert_close(outputs.terms["contrastive"], expected, rtol=1e-6, atol=0.0)
