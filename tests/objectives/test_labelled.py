"""Methods that learn from labels, as references: against loops from their formulas."""

import math

import pytest
import torch

from deepbregman.errors import UserError
from deepbregman.objectives import Samples, ViewGroups, build_step
from deepbregman.objectives.step import gather_alone
from deepbregman.objectives.supcon import sup_con

from ..conftest import normal
from .methods import configure, draw_views

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])


def test_supcon_is_its_formula():
    z = normal(7, 4)
    units = [[x / math.hypot(*row) for x in row] for row in z.tolist()]
    similar = [[math.exp(sum(map(float.__mul__, u, v)) / 0.3) for v in units] for u in units]
    expected = 0.0
    for i in range(7):
        others = [j for j in range(7) if j != i]
        positives = [j for j in others if LABELS[j] == LABELS[i]]
        total = sum(similar[i][j] for j in others)
        for p in positives:
            expected -= math.log(similar[i][p] / total) / len(positives) / 7
    assert float(sup_con(z, LABELS, 0.3)) == pytest.approx(expected, rel=1e-9)


def test_its_gradient():
    assert torch.autograd.gradcheck(lambda z: sup_con(z, LABELS), (normal(7, 3).requires_grad_(),))


def outputs_of(name: str, **changes: object):
    config = configure(name, **{"objective.weight": 1.0, **changes})
    step = build_step(config, num_images=7, num_classes=4).double()
    outputs = step.objective(ViewGroups(draw_views(2, 7)), gather_alone, Samples(labels=LABELS))
    return step.objective, outputs


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_every_view_is_classified_by_its_own_label(smoothing):
    """A share of the label is spread over all classes."""
    objective, outputs = outputs_of("supervised", **{"objective.label_smoothing": smoothing})
    expected = 0.0
    weight, bias = objective.classifier.weight.tolist(), objective.classifier.bias.tolist()
    for view in outputs.student.tolist():
        for z, label in zip(view, LABELS.tolist(), strict=True):
            active = [max(0.0, x) for x in z]
            scores = [
                sum(map(float.__mul__, row, active)) + b
                for row, b in zip(weight, bias, strict=True)
            ]
            total = sum(math.exp(score) for score in scores)
            logs = [math.log(math.exp(score) / total) for score in scores]
            expected -= ((1.0 - smoothing) * logs[label] + smoothing * sum(logs) / 4) / 14
    assert float(outputs.terms["cross_entropy"].detach()) == pytest.approx(expected, rel=1e-9)


def test_every_view_of_supcon_has_the_label_of_its_image():
    _, outputs = outputs_of("supcon", **{"objective.temperature": 0.3})
    both = torch.cat([*outputs.student.detach()])  # all images in one view, then in the other
    expected = sup_con(both, torch.cat([LABELS, LABELS]), 0.3)
    torch.testing.assert_close(outputs.terms["contrastive"].detach(), expected, rtol=1e-6, atol=0.0)


def diverge(form: str, p: list[float], q: list[float]) -> float:
    """By max, by its smooth form, or by the squared distance of the scores."""
    if form == "max":
        return max(p) - p[q.index(max(q))]
    if form == "moment":
        return math.dist(p, q) ** 2
    total_p, total_q = (sum(math.exp(score) for score in scores) for scores in (p, q))
    slope = sum(math.exp(b) / total_q * (a - b) for a, b in zip(p, q, strict=True))
    return math.log(total_p) - math.log(total_q) - slope


@pytest.mark.parametrize("form", ["max", "smooth", "moment"])
def test_images_of_a_class_are_to_diverge_less(form):
    margin = {"objective.margin": 0.7, "objective.form": form}
    objective, outputs = outputs_of("deep-divergence", **margin)
    assert objective.subnetworks.activation == "relu"
    z = outputs.student.detach().flatten(0, 1)
    scores = objective.subnetworks(z).tolist()
    same, different = [], []
    for i in range(14):
        for j in range(14):
            distance = diverge(form, scores[i], scores[j])
            if i != j and LABELS[i % 7] == LABELS[j % 7]:
                same.append(distance)
            elif i != j:
                different.append(max(0.0, 0.7 - distance) ** 2)
    expected = 0.5 * (sum(same) / len(same) + sum(different) / len(different))
    assert float(outputs.terms["metric"].detach()) == pytest.approx(expected, rel=1e-9)


def test_one_view_has_nothing_to_diverge_from():
    words = r"divergence.weight is 0.5 with views.num_views 1: .* set views.num_views to 2 or more"
    for name in ("supervised", "deep-divergence"):
        alone = configure(name, **{"views.num_views": 1})
        assert alone.views.num_views == 1
        with pytest.raises(UserError, match=words):
            configure(name, **{"views.num_views": 1, "divergence.weight": 0.5})


def test_one_view_is_diagnosed_without_alignment():
    from deepbregman.training.diagnostics import diagnose

    step = build_step(configure("supervised", **{"views.num_views": 1}), num_classes=4)
    images = torch.randint(0, 256, (7, 3, 8, 8), dtype=torch.uint8)
    uniforms = ViewGroups(step.views.main.draw(7, device="cpu"))
    found = diagnose(step, step(images, None, uniforms, Samples(labels=LABELS)))
    assert "alignment" not in found
    assert {"uniformity", "spread", "effective_rank"} <= found.keys()
