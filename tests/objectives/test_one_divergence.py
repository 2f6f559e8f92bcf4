"""Methods as settings of the one divergence: equal gradients in float64 (docs/method.md).

Each is loaded from its recipe, of which only the sizes are changed.
"""

import re
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from deepbregman import match_divergence
from deepbregman.config import Config, DivergenceSettings, load_recipe, override
from deepbregman.method.bregman import bregman, divergence, squared_euclidean
from deepbregman.method.losses import match_scores
from deepbregman.method.networks import BregmanNetwork
from deepbregman.objectives import (
    Objective,
    Outputs,
    Samples,
    Step,
    ViewGroups,
    build_step,
    gather_alone,
)
from deepbregman.objectives.dino import DINO
from deepbregman.objectives.divergence import DivergenceTerm
from deepbregman.objectives.sce import SCE
from deepbregman.objectives.swav import SwAV
from deepbregman.objectives.teacher import Bank

from .methods import TINY, draw_views

PAGE = Path(__file__).parents[2] / "docs" / "method.md"
SIZES = {"prototypes": 7, "queue": 40, "predictor_hidden": 8}


def load_small(name: str, **changes: object) -> Config:
    recipe = load_recipe(name)
    small = {f"objective.{k}": v for k, v in SIZES.items() if getattr(recipe.objective, k, 0)}
    small |= {"data.image_size": 8, "encoder.name": "small", "optimiser.warmup_epochs": 0.0}
    return override(recipe, {**TINY, **small, **changes})


def test_the_page_names_the_recipes_of_these_tests():
    table = PAGE.read_text().split("## One divergence, many methods")[1]
    named = set(re.findall(r"\| `([^`]+)` \|$", table, flags=re.M))
    source = Path(__file__).read_text()
    for words in named:
        assert f'load_small("{words.split()[0]}"' in source, words
    assert named >= {"paper", "best", "ressl", "sce", "dino", "swav", "byol --divergence.weight 1"}


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
    objective = build_step(load_small("swav")).objective.double()
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
    objective = build_step(load_small("dino")).objective.double()
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
    objective = build_step(load_small("sce")).objective.double()
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
    mixture = torch.cat([torch.full((5, 1), 0.5, dtype=torch.float64), 0.5 * relations], dim=1)
    found = match_scores(
        scores, mixture.log(), temperature=objective.temperature, target_temperature=1.0
    )
    (expected,) = torch.autograd.grad(total, z, retain_graph=True)
    (gradient,) = torch.autograd.grad(found, z, retain_graph=True)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    untied = 0.5 * terms["contrastive"] + 0.5 * terms["relation"]
    assert not torch.allclose(torch.autograd.grad(untied, z)[0], expected, rtol=0.01)


def match_both(step: Step, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The matched divergence over the step's bank, at the temperatures of the page."""
    weight = step.divergence.network.weight.clone()
    losses = [
        match_divergence(*pair, weight, temperature=0.2, target_temperature=0.1) for pair in pairs
    ]
    return torch.stack(losses).mean()


def fill_bank(step: Step) -> None:
    bank = step.divergence.network
    assert isinstance(bank, Bank)
    bank.pushed.fill_(len(bank.weight))


def test_byol_with_a_bank_matches_the_teachers_other_view():
    step = build_step(load_small("byol", **{"divergence.weight": 1.0})).double()
    fill_bank(step)
    outputs = run(step.objective, ViewGroups(draw_views(2, 5)))
    expected = match_both(step, [(outputs.student[a], outputs.teacher[1 - a]) for a in (0, 1)])
    found = step.divergence(outputs.student, outputs.teacher, step.objective.teaches_same_views)
    torch.testing.assert_close(found.terms["divergence"], expected, rtol=1e-6, atol=0.0)
    assert "prediction" in step.weights  # BYOL's own loss stays beside it


def test_best_matches_the_teachers_weak_view():
    step = build_step(load_small("best")).double()
    fill_bank(step)
    student, (target,) = torch.randn(2, 5, 6).double(), torch.randn(1, 5, 6).double()
    expected = match_both(step, [(view, target) for view in student])
    found = step.divergence(student, target[None]).terms["divergence"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert step.views.weak is not None
    assert step.weights == {"contrastive": 1.0, "divergence": 1.0}


def test_ressl_matches_the_weak_view_and_nothing_else():
    objective = build_step(load_small("ressl")).objective.double()
    bank = objective.bank.weight.clone()
    outputs = run(objective, ViewGroups(draw_views(1, 5), draw_views(1, 5, 8)))
    expected = match_divergence(
        outputs.student[0], outputs.teacher[0], bank, temperature=0.1, target_temperature=0.04
    )
    torch.testing.assert_close(outputs.terms, {"relation": expected}, rtol=1e-6, atol=0.0)
    assert objective.weights == {"relation": 1.0}


def test_moco_matches_the_own_key_among_the_bank():
    objective = build_step(load_small("moco-v2")).objective.double()
    bank = F.normalize(objective.queue.weight.clone(), dim=1)
    outputs = run(objective, ViewGroups(draw_views(2, 5)))
    z, keys = F.normalize(outputs.student[0], dim=1), F.normalize(outputs.teacher[0], dim=1)
    scores = torch.cat([(z * keys).sum(dim=1, keepdim=True), z @ bank.T], dim=1)
    one_hot = torch.zeros_like(scores)
    one_hot[:, 0] = 1e4
    temperature = load_recipe("moco-v2").objective.temperature
    expected = match_scores(scores, one_hot, temperature=temperature, target_temperature=1.0)
    assert len(outputs.student) == 1  # one way round, as published
    torch.testing.assert_close(outputs.terms["contrastive"], expected, rtol=1e-6, atol=0.0)


def test_byol_has_the_generator_of_the_squared_distance():
    objective = build_step(load_small("byol")).objective.double()
    outputs = run(objective, ViewGroups(draw_views(2, 5)))
    p, q = F.normalize(outputs.student, dim=2), F.normalize(outputs.teacher, dim=2)
    halves = bregman(squared_euclidean, p, q.flip(0))  # (2, N)
    torch.testing.assert_close(outputs.terms["prediction"], 2.0 * halves.mean())


def test_the_paper_contrasts_the_hard_divergence_of_learned_subnetworks():
    step = build_step(load_small("paper"))
    o1, o2 = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    similar = torch.exp(-divergence(o1, o2) / (2 * 1.5**2))
    expected = F.cross_entropy(similar, torch.arange(4))
    assert isinstance(step.divergence.network, BregmanNetwork)
    step.divergence.network = torch.nn.Identity()
    found = step.divergence(torch.stack([o1, o2]), None).terms["divergence"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert step.teacher is None
    assert step.weights == {"contrastive": 5.0, "divergence": 1.0}
