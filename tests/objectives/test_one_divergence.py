"""Methods as settings of the one divergence: equal gradients in float64 (docs/method.md)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman import match_divergence
from deepbregman.config import DivergenceSettings
from deepbregman.method.losses import match_scores
from deepbregman.objectives import Objective, Outputs, Samples, ViewGroups, build_step, gather_alone
from deepbregman.objectives.dino import DINO
from deepbregman.objectives.divergence import DivergenceTerm
from deepbregman.objectives.sce import SCE
from deepbregman.objectives.swav import SwAV

from .methods import configure, draw_views


def match_prototypes(objective: SwAV | DINO, **fields: object) -> DivergenceTerm:
    """The term that matches over the method's own prototypes."""
    settings = DivergenceSettings(
        **{"source": "prototypes", "compare": "match", "num_subnetworks": 7, "smoothing": 0.1},
        **fields,
    )
    term = DivergenceTerm(settings, 6).double()
    term.network = objective.prototypes
    return term


def gradients(objective: Objective, loss: Tensor) -> tuple[Tensor, ...]:
    trained = [objective.prototypes.weight, *objective.projection.parameters()]
    return torch.autograd.grad(loss, trained, retain_graph=True)


def run(objective: Objective, views: ViewGroups[Tensor]) -> Outputs:
    outputs: Outputs = objective(views, gather_alone, Samples())
    return outputs


def test_swav_matches_prototypes_that_sinkhorn_evens_out():
    """The target is the student's own other view: a teacher of momentum 0."""
    objective = build_step(configure("swav", **{"objective.queue": 0})).objective.double()
    assert isinstance(objective, SwAV)
    outputs = run(objective, ViewGroups(draw_views(2, 9)))
    term = match_prototypes(objective, centring="sinkhorn", target_smoothing=0.05)
    term.teacher_network = objective.prototypes
    found = term(outputs.student, outputs.student.detach(), same_views=True).terms["divergence"]
    expected = gradients(objective, outputs.terms["assignment"])
    torch.testing.assert_close(gradients(objective, found), expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found, outputs.terms["assignment"])  # by the entropy of the target
    plain = match_prototypes(objective, target_smoothing=0.05)
    plain.teacher_network = objective.prototypes
    other = plain(outputs.student, outputs.student.detach(), same_views=True).terms["divergence"]
    assert not torch.allclose(gradients(objective, other)[0], expected[0], rtol=0.01)


def test_dino_matches_prototypes_that_are_centred():
    """Equal where the centre is the mean of the batch; DINO's is a running mean of past ones."""
    objective = build_step(configure("dino")).objective.double()
    assert isinstance(objective, DINO)
    with torch.no_grad():
        for part in (objective.teacher, objective.teacher_prototypes):
            for parameter in part.parameters():
                parameter.add_(0.1 * torch.ones_like(parameter))  # no longer the student
    views = draw_views(2, 5)
    term = match_prototypes(objective, centring="mean", target_smoothing=0.04)
    term.teacher_network = objective.teacher_prototypes.network
    targets = objective.teach(views, gather_alone).flatten(0, 1)
    batch = objective.teacher_prototypes(targets).mean(dim=0)
    for centre, is_equal in ((batch, True), (torch.zeros_like(batch), False)):
        objective.centre.copy_(centre)
        outputs = run(objective, ViewGroups(views))
        found = term(outputs.student, outputs.teacher, same_views=True).terms["divergence"]
        pairs = zip(
            gradients(objective, found),
            gradients(objective, outputs.terms["distillation"]),
            strict=True,
        )
        assert all(torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in pairs) == is_equal


def test_sce_matches_a_mixture_of_the_own_key_and_the_relations():
    """Over the own key and the bank; the terms of the table without the tie are another loss."""
    objective = build_step(configure("sce", **{"objective.coefficient": 0.3})).objective.double()
    assert isinstance(objective, SCE)
    generator = torch.Generator().manual_seed(0)
    key = F.normalize(torch.randn(5, 6, dtype=torch.float64, generator=generator), dim=1)
    noise = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    z = (key + 0.3 * noise).requires_grad_()
    bank = F.normalize(objective.bank.weight, dim=1)  # drawn in float32: unit rows to 1e-7 only
    terms = objective.compare(z, key, bank)
    total = sum(weight * terms[name] for name, weight in objective.weights.items())
    units = F.normalize(z, dim=1)
    scores = torch.cat([(units * key).sum(dim=1, keepdim=True), units @ bank.T], dim=1)
    relations = (key @ bank.T / objective.target_temperature).softmax(dim=1)
    mixture = torch.cat([torch.full((5, 1), 0.3, dtype=torch.float64), 0.7 * relations], dim=1)
    found = match_scores(
        scores, mixture.log(), temperature=objective.temperature, target_temperature=1.0
    )
    (expected,) = torch.autograd.grad(total, z, retain_graph=True)
    (gradient,) = torch.autograd.grad(found, z, retain_graph=True)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    untied = 0.3 * terms["contrastive"] + 0.7 * terms["relation"]
    assert not torch.allclose(torch.autograd.grad(untied, z)[0], expected, rtol=0.01)


def test_byol_with_a_bank_matches_the_teachers_other_view():
    match = {"divergence.weight": 1.0, "divergence.source": "bank", "divergence.compare": "match"}
    smooth = {"divergence.smoothing": 0.2, "divergence.target_smoothing": 0.1}
    step = build_step(configure("byol", **match, **smooth)).double()
    outputs = run(step.objective, ViewGroups(draw_views(2, 5)))
    bank = step.divergence.network
    bank.pushed.fill_(len(bank.weight))
    weight = bank.weight.clone()
    found = step.divergence(outputs.student, outputs.teacher, step.objective.teaches_same_views)
    expected = [
        match_divergence(
            outputs.student[a],
            outputs.teacher[1 - a],
            weight,
            temperature=step.divergence.numbers[3],
            target_temperature=step.divergence.numbers[4],
        )
        for a in (0, 1)
    ]
    torch.testing.assert_close(found.terms["divergence"], sum(expected) / 2)
