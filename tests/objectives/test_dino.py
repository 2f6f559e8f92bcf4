"""DINO against its formula, and against lightly's loss."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman.objectives import Samples, ViewGroups, gather_alone
from deepbregman.objectives.dino import DINO

from .methods import build_objective, draw_views


def build() -> DINO:
    objective: DINO = build_objective("dino")
    with torch.no_grad():
        for part in (objective.teacher, objective.teacher_prototypes):
            for parameter in part.parameters():
                parameter.add_(0.1 * torch.ones_like(parameter))  # no longer the student
        objective.centre.copy_(torch.linspace(-0.2, 0.3, 7))
    return objective


def score(objective: DINO, main: Tensor, small: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """The scores of the student of every view, and those of the teacher of the main ones."""
    weights = [objective.prototypes.weight, objective.teacher_prototypes.network.weight]
    mine, theirs = (F.normalize(weight, dim=1) for weight in weights)
    z = [*objective.embed(main)[1], *([] if small is None else objective.embed(small)[1])]
    targets = objective.teacher(main.flatten(0, 1)).unflatten(0, main.shape[:2])
    return (
        [F.normalize(each, dim=1) @ mine.T for each in z],
        [F.normalize(each, dim=1) @ theirs.T for each in targets],
    )


@pytest.mark.parametrize("crops", [0, 2])
def test_the_loss_is_the_papers_and_moves_the_centre(crops):
    objective, main = build(), draw_views(2, 4)
    small = draw_views(crops, 4, 4) if crops else None
    centre = objective.centre.clone()
    students, teachers = score(objective, main, small)
    losses = []
    for t, target in enumerate(teachers):
        for s, scores in enumerate(students):
            for i in range(4):
                shares = ((target[i] - centre) / 0.04).exp()
                shares = shares / shares.sum()
                mine = (scores[i] / 0.1).exp()
                mine = mine / mine.sum()
                if s != t:
                    losses.append(-(shares * mine.log()).sum().item())
    found = objective(ViewGroups(main, None, small), gather_alone, Samples())
    expected = sum(losses) / len(losses)
    assert found.terms["distillation"].item() == pytest.approx(expected, rel=1e-6)
    moved = 0.9 * centre + 0.1 * torch.cat(teachers).mean(dim=0)
    torch.testing.assert_close(objective.centre, moved)


def test_it_equals_lightlys_loss():
    losses = pytest.importorskip("lightly.loss")
    objective, main, small = build(), draw_views(2, 6), draw_views(2, 6, 4)
    theirs = losses.DINOLoss(7, teacher_temp=0.04, student_temp=0.1, center_momentum=0.9).double()
    theirs.center.copy_(objective.centre.view(1, 1, -1))
    students, teachers = score(objective, main, small)
    expected = theirs(teachers, students, teacher_temp=0.04)
    found = objective(ViewGroups(main, None, small), gather_alone, Samples()).terms["distillation"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(objective.centre, theirs.center.flatten())


def test_the_teachers_temperature_rises_and_its_prototypes_follow():
    objective = build()
    assert objective.target_temperature.item() == pytest.approx(0.04)
    slow, fast = objective.teacher_prototypes.network.weight, objective.prototypes.weight
    for progress, expected in ((0.25, 0.055), (0.5, 0.07), (0.9, 0.07)):  # over half of training
        before = slow.clone()
        objective.after_step(progress)
        assert objective.target_temperature.item() == pytest.approx(expected)
        kept = objective.momentum
        torch.testing.assert_close(slow, kept * before + (1.0 - kept) * fast)
    assert "target_temperature" in objective.state_dict()
    assert "centre" in objective.state_dict()
