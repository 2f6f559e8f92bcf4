"""The divergence as a term: what it compares, its numbers, its learned sigma, its weight."""

from typing import Any

import pytest
import torch
from torch import nn

from deepbregman.config import DivergenceSettings, load_recipe, override
from deepbregman.method.losses import divergence_loss, info_nce, nt_xent, usage_entropy
from deepbregman.objectives import Outputs, Step, ViewGroups, build_step
from deepbregman.objectives.divergence import DivergenceTerm
from deepbregman.training.optimisers import build_optimiser

from ..conftest import normal
from .methods import name_terms


def term(**settings: Any) -> DivergenceTerm:
    """A term whose subnetworks are the identity: embeddings are scores."""
    found = DivergenceTerm(DivergenceSettings(**settings), 6)
    found.network = nn.Identity()  # type: ignore[assignment]  # in place of the subnetworks
    return found


def test_it_compares_two_views():
    scores = normal(2, 4, 6)
    found = term(sigma=1.5)(scores, None)
    torch.testing.assert_close(found.terms, {"divergence": divergence_loss(*scores, sigma=1.5)})
    assert torch.equal(found.scores, scores)


def test_its_numbers_reach_the_loss():
    scores = normal(2, 4, 6)
    numbers: dict[str, Any] = {"kernel": "arccot", "alpha": 2.0, "pairs": "all", "smoothing": 0.7}
    found = term(**numbers, temperature=0.2)(scores, None).terms["divergence"]
    torch.testing.assert_close(found, divergence_loss(*scores, **numbers, temperature=0.2))


def test_its_settings_reach_the_subnetworks():
    settings: dict[str, Any] = {"norm": "hidden", "activation": "relu", "normalise_input": True}
    network = DivergenceTerm(
        DivergenceSettings(num_subnetworks=7, hidden=3, dropout=0.25, **settings), 5
    ).network
    assert network.weight1.shape == (5, 7, 3)
    assert network.dropout.p == 0.25
    assert {name: getattr(network, name) for name in settings} == settings


@pytest.mark.parametrize(("smoothing", "temperature"), [(0.0, 1.0), (0.3, 0.3)])
def test_the_usage_bonus_assigns_by_the_smoothing(smoothing, temperature):
    scores = normal(2, 4, 6)
    with_bonus = term(usage_bonus=0.5, smoothing=smoothing)
    assert with_bonus.weights["usage"] == -0.5
    expected = usage_entropy(scores.flatten(0, 1), temperature)
    torch.testing.assert_close(with_bonus(scores, None).terms["usage"], expected)


def test_three_views_as_points_average_over_pairs():
    scores = normal(3, 4, 6)
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = sum(divergence_loss(scores[a], scores[b]) for a, b in pairs) / 3
    torch.testing.assert_close(term()(scores, None).terms["divergence"], expected)


def test_four_views_as_two_distributions():
    scores = normal(4, 3, 6)
    expected = divergence_loss(scores[:2].mean(0), scores[2:].mean(0))
    torch.testing.assert_close(term(sets="halves")(scores, None).terms["divergence"], expected)


@pytest.mark.parametrize("num_views", [2, 3, 5])
def test_each_view_against_the_distribution_of_the_rest(num_views):
    scores = normal(num_views, 4, 6)
    expected = torch.zeros(())
    for a in range(num_views):
        rest = torch.stack([scores[b] for b in range(num_views) if b != a]).mean(0)
        expected = expected + divergence_loss(scores[a], rest, smoothing=0.5) / num_views
    found = term(sets="rest", smoothing=0.5)(scores, None).terms["divergence"]
    torch.testing.assert_close(found, expected)


def test_with_a_teacher_views_are_compared_with_its_targets():
    scores, targets = normal(2, 4, 6).requires_grad_(), normal(3, 4, 6, seed=1).requires_grad_()
    found = term(smoothing=0.5)(scores, targets).terms["divergence"]
    pairs = [divergence_loss(s, t, smoothing=0.5) for s in scores for t in targets]
    torch.testing.assert_close(found, torch.stack(pairs).mean())
    found.backward()
    assert scores.grad is not None
    assert targets.grad is None
    as_set = term(smoothing=0.5, sets="rest")(scores, targets).terms["divergence"]
    mean = targets.mean(0)
    expected = torch.stack([divergence_loss(s, mean, smoothing=0.5) for s in scores]).mean()
    torch.testing.assert_close(as_set, expected)


@pytest.mark.parametrize("sets", ["none", "rest"])
def test_a_view_is_not_compared_with_the_target_of_itself(sets):
    scores, targets = normal(3, 4, 6), normal(3, 4, 6, seed=1)
    found = term(smoothing=0.5, sets=sets)(scores, targets, same_views=True).terms["divergence"]
    losses = []
    for a in range(3):
        others = [targets[b] for b in range(3) if b != a]
        if sets == "rest":
            others = [torch.stack(others).mean(0)]
        losses += [divergence_loss(scores[a], other, smoothing=0.5) for other in others]
    torch.testing.assert_close(found, torch.stack(losses).mean())


@pytest.mark.parametrize(("same_views", "pairs"), [(False, 4), (True, 2)])
def test_infonce_compares_the_same_pairs_at_the_temperature(same_views, pairs):
    settings = DivergenceSettings(
        weight=0.0, info_nce=1.0, source="bank", num_subnetworks=8, temperature=0.3, smoothing=0.2
    )
    beside = DivergenceTerm(settings, 6)
    beside.network.push(normal(8, 6, seed=2))
    bank, student, teacher = beside.network.weight.clone(), normal(2, 4, 6), normal(2, 4, 6, seed=1)
    losses = [
        info_nce(student[a], teacher[b], bank, temperature=0.3)
        for a in range(2)
        for b in range(2)
        if not same_views or a != b
    ]
    assert len(losses) == pairs
    found = beside(student, teacher, same_views).terms["info_nce"]
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_a_match_without_smoothing_is_equation_6():
    scores, targets = normal(1, 4, 6), normal(1, 4, 6, seed=1)
    found = term(compare="match", smoothing=0.0)(scores, targets).terms["divergence"]
    pairs = zip(scores[0].tolist(), targets[0].tolist(), strict=True)
    expected = [max(p) - p[q.index(max(q))] for p, q in pairs]
    assert found.item() == pytest.approx(sum(expected) / 4)


def test_a_single_view_has_no_divergence_to_itself():
    """It would be 0, and look as if all positives agreed."""
    names = {"divergence_positives", "divergence_negatives"}
    assert names <= term().diagnose(normal(2, 4, 6)).keys()
    assert term().diagnose(normal(1, 4, 6)).keys() == {"active_subnetworks", "usage_entropy"}


class TestLearnedSigma:
    def test_it_starts_at_its_value_gets_gradient_and_is_logged(self):
        scores = normal(2, 4, 6)
        fixed, learned = term(sigma=0.8), term(sigma=0.8, learn_sigma=True)
        found = learned(scores, None).terms["divergence"]
        torch.testing.assert_close(found, fixed(scores, None).terms["divergence"])
        found.backward()
        assert learned.log_sigma.grad.abs() > 0
        assert learned.sigma == pytest.approx(0.8)
        assert learned.metrics()["sigma"].item() == pytest.approx(0.8)
        assert fixed.metrics() == {}

    @pytest.mark.parametrize(
        "settings",
        [
            {"kernel": "inverse"},
            {"kernel": "negative"},
            {"compare": "match"},
            {"weight": 0.0, "info_nce": 1.0, "source": "bank"},
        ],
    )
    def test_a_loss_without_sigma_learns_none(self, settings):
        """Several processes would wait for its gradient."""
        assert term(learn_sigma=True, **settings).log_sigma is None

    def test_a_run_logs_it(self):
        step = tiny_step(**{"divergence.learn_sigma": True, "divergence.sigma": 0.8})
        assert {name: value.item() for name, value in step.metrics().items()} == {
            "sigma": pytest.approx(0.8)
        }

    def test_weight_decay_leaves_it_alone(self):
        config = override(
            load_recipe("paper"),
            {"divergence.learn_sigma": True, "encoder.name": "small", "optimiser.decay_all": True},
        )
        step = build_step(config)
        groups = build_optimiser(
            config.optimiser, step.parameter_groups(), torch.device("cpu")
        ).param_groups
        decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        assert decays.pop(id(step.divergence.log_sigma)) == 0.0
        assert set(decays.values()) == {config.optimiser.weight_decay}
        assert len(decays) == len([p for p in step.parameters() if p.requires_grad]) - 1


def tiny_step(**changes: Any) -> Step:
    small = {"encoder.projection_hidden": 8, "encoder.embedding": 6, "divergence.hidden": 4}
    return build_step(override(load_recipe("digits"), {**small, **changes}))


def test_the_total_is_equation_9_and_the_weight_can_rise():
    step = tiny_step(
        **{"objective.weight": 5, "divergence.weight": 3, "divergence.warmup_epochs": 2}
    )
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    uniforms = ViewGroups(step.views.main.draw(4, device="cpu"))
    for epoch, weight in ((0, 1.5), (1, 3.0), (2, 3.0)):
        step.follow_schedule(epoch, 1)
        outputs = step(images, None, uniforms)
        terms = name_terms(step, outputs)
        torch.testing.assert_close(
            outputs.total.detach(), 5.0 * terms["contrastive"] + weight * terms["divergence"]
        )
        expected = nt_xent(*outputs.student, temperature=step.objective.temperature)
        torch.testing.assert_close(terms["contrastive"], expected)


def test_losses_are_logged_by_their_names_in_whatever_order_they_come():
    step = tiny_step(**{"objective.name": "vicreg", "divergence.weight": 3.0})
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    uniforms = ViewGroups(step.views.main.draw(4, device="cpu"))
    expected = name_terms(step, step(images, None, uniforms))
    assert len(set(expected.values())) == 4
    forward = step.objective.forward

    def turn_round(*inputs: Any) -> Outputs:
        outputs = forward(*inputs)
        return outputs._replace(terms=dict(reversed(outputs.terms.items())))

    step.objective.forward = turn_round
    outputs = step(images, None, uniforms)
    torch.testing.assert_close(name_terms(step, outputs), expected)
    total = sum(step.weights[name] * value for name, value in expected.items())
    torch.testing.assert_close(outputs.total.detach(), total)


def test_without_weight_there_is_no_divergence():
    step = tiny_step(**{"divergence.weight": 0.0})
    assert step.divergence is None
    assert list(step.weights) == ["contrastive"]


@pytest.mark.parametrize(
    ("settings", "remedies"),
    [
        ({"norm": "none"}, "divergence.norm output, divergence.smoothing above 0 or a divergence."),
        ({}, "divergence.smoothing above 0 or a divergence.usage_bonus"),  # output is the default
        ({"smoothing": 0.2, "usage_bonus": 0.1}, "a larger divergence.usage_bonus"),
        ({"source": "prototypes"}, "divergence.centring sinkhorn or a divergence.usage_bonus"),
        ({"source": "prototypes", "centring": "sinkhorn"}, "a divergence.usage_bonus"),
    ],
)
def test_too_few_subnetworks_are_told_with_remedies_that_are_not_in_use_yet(settings, remedies):
    (told,) = term(**settings).warn({"active_subnetworks": 6.0}, 512)
    assert told.startswith(f"only 6 of 100 subnetworks are in use; try {remedies}")
    assert term(**settings).warn({"active_subnetworks": 60.0}, 512) == []


def test_diagnosed_divergences_are_those_of_the_first_view_to_the_second():
    """Eq. 6 by a loop; the other way round they differ."""
    term = DivergenceTerm(DivergenceSettings(num_subnetworks=3), 4)
    scores = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    own, others = [], []
    for i, p in enumerate(scores[0].tolist()):
        for j, q in enumerate(scores[1].tolist()):
            (own if i == j else others).append(max(p) - p[q.index(max(q))])
    found = term.diagnose(scores)
    assert found["divergence_positives"].item() == pytest.approx(sum(own) / 5, rel=1e-5)
    assert found["divergence_negatives"].item() == pytest.approx(sum(others) / 20, rel=1e-5)


def test_targets_are_as_smooth_as_the_scores_unless_set():
    settings = DivergenceSettings(smoothing=0.3)
    assert DivergenceTerm(settings, 4).numbers.target_smoothing.item() == pytest.approx(0.3)
