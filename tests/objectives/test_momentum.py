"""Methods with a teacher: what it follows, and that nothing flows back through it."""

import math

import pytest
import torch
from torch import Tensor

from deepbregman.config.methods import MomentumSettings
from deepbregman.objectives import Outputs, Samples, ViewGroups, gather_alone
from deepbregman.objectives.momentum import MomentumObjective

from .methods import METHODS, build_objective, configure, draw_views

NAMES = tuple(
    name for name in METHODS if issubclass(type(configure(name).objective), MomentumSettings)
)


def draw_groups(name: str) -> ViewGroups[Tensor]:
    if name in ("ressl", "sce"):
        return ViewGroups(draw_views(1, 4), draw_views(2, 4))
    return ViewGroups(draw_views(2, 4))


def compute(objective: MomentumObjective, groups: ViewGroups[Tensor]) -> Outputs:
    generator = torch.Generator().manual_seed(0)
    random = objective.draw(4, device=torch.device("cpu"), generator=generator)
    outputs: Outputs = objective(groups, gather_alone, Samples(random=random))
    return outputs


@pytest.mark.parametrize("name", NAMES)
def test_the_teacher_starts_as_the_student_and_follows_it(name):
    changes = {"objective.momentum": 0.9, "objective.final_momentum": 0.97}
    objective = build_objective(name, **changes)
    students = [*objective.encoder.parameters(), *objective.projection.parameters()]
    teachers = list(objective.teacher.parameters())
    assert all(map(torch.equal, teachers, students))
    with torch.no_grad():
        for parameter in students:
            parameter.add_(torch.ones_like(parameter))
    for progress in (0.25, 0.5, 1.0):
        before = [parameter.clone() for parameter in teachers]
        objective.after_step(progress)
        kept = 0.97 - 0.07 * (math.cos(math.pi * progress) + 1.0) / 2.0
        for slow, old, fast in zip(teachers, before, students, strict=True):
            torch.testing.assert_close(slow, kept * old + (1.0 - kept) * fast)


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_reaches_the_teacher_and_all_else_gets_some(name):
    objective = build_objective(name)
    outputs = compute(objective, draw_groups(name))
    assert not outputs.teacher.requires_grad
    sum(weight * outputs.terms[key] for key, weight in objective.weights.items()).backward()
    for key, parameter in objective.named_parameters():
        assert (parameter.grad is None) == key.startswith("teacher"), key
        assert parameter.requires_grad == (not key.startswith("teacher")), key


@pytest.mark.parametrize("name", NAMES)
def test_its_teacher_is_part_of_its_state_and_not_of_what_is_trained(name):
    objective = build_objective(name)
    teachers = {id(parameter) for parameter in objective.teacher.parameters()}
    trained = [p for group in objective.parameter_groups() for _, p in group.parameters]
    assert teachers.isdisjoint(id(p) for p in trained if p.requires_grad)
    assert any(key.startswith("teacher.network.0.") for key in objective.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_it_says_whether_its_targets_are_of_the_students_views(name):
    objective, groups = build_objective(name), draw_groups(name)  # the teacher is still the student
    z = objective.embed(groups.main)[1]
    targets = compute(objective, groups).teacher
    same = len(targets) == len(z) and torch.allclose(targets, z)
    assert objective.teaches_same_views == same
