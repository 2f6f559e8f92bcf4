"""The teacher, the bank and the matched divergence, against loops and closed forms."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from deepbregman import Bank, Config, Teacher, match_divergence, soft_divergence
from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import load_recipe, override
from deepbregman.errors import UserError
from deepbregman.method.bregman import balance_scores, divergence, paired_divergence
from deepbregman.method.losses import info_nce, match_scores
from deepbregman.objectives import Step, StepOutputs, ViewGroups, build_step
from deepbregman.objectives.teacher import Prototypes, list_weights, momentum_at
from deepbregman.training import checkpoints
from deepbregman.training.faults import Interrupted

from .methods import name_terms

SEEDS = st.integers(0, 2**31)
WARM = st.floats(0.05, 2.0)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


@given(SEEDS, WARM, WARM)
def test_match_is_cross_entropy_minus_entropy(seed, student, teacher):
    """ReSSL's cross-entropy of relations minus the target's entropy, by a loop."""
    z, target, bank = draw(seed, 3, 4), draw(seed + 1, 3, 4), draw(seed + 2, 5, 4)

    def cosine(a: Tensor, b: Tensor) -> float:
        a, b = a.tolist(), b.tolist()
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.hypot(*a) / math.hypot(*b)

    total = 0.0
    for i in range(3):
        p = softmax([cosine(z[i], row) / student for row in bank])
        q = softmax([cosine(target[i], row) / teacher for row in bank])
        cross = -sum(b * math.log(a) for a, b in zip(p, q, strict=True))
        entropy = -sum(b * math.log(b) for b in q if b > 0.0)
        total += cross - entropy
    found = match_divergence(z, target, bank, temperature=student, target_temperature=teacher)
    assert found.item() == pytest.approx(total / 3, abs=1e-9)


@given(SEEDS, WARM)
def test_match_is_the_diagonal_of_the_smooth_divergence(seed, temperature):
    z, target, weight = draw(seed, 4, 6), draw(seed + 1, 4, 6), F.normalize(draw(seed + 2, 7, 6))
    p, q = F.normalize(z) @ weight.T, F.normalize(target) @ weight.T
    expected = soft_divergence(p, q, temperature).diagonal().mean() / temperature
    found = match_divergence(
        z, target, weight, temperature=temperature, target_temperature=temperature
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for smoothing in (0.0, temperature):
        matrix = divergence(p, q) if smoothing == 0.0 else soft_divergence(p, q, smoothing)
        own = paired_divergence(p, q, smoothing)
        torch.testing.assert_close(own, matrix.diagonal(), rtol=1e-9, atol=1e-12)


@given(SEEDS, WARM)
def test_with_one_hot_targets_it_is_infonce(seed, temperature):
    """A very sharp target at one functional leaves the cross-entropy of that functional."""
    keys, z = F.normalize(draw(seed, 5, 8)), draw(seed + 1, 5, 8)
    scores = F.normalize(z) @ keys.T
    one_hot = 1e4 * torch.eye(5, dtype=torch.float64)
    found = match_scores(scores, one_hot, temperature=temperature, target_temperature=1.0)
    expected = F.cross_entropy(scores / temperature, torch.arange(5))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    again = info_nce(z, keys, temperature=temperature)
    torch.testing.assert_close(found, again, rtol=1e-9, atol=1e-12)


def test_infonce_by_a_loop():
    z, target, negatives = draw(0, 3, 4), draw(1, 3, 4), draw(2, 6, 4)
    rows = F.normalize(torch.cat([target, negatives]))
    total = 0.0
    for i in range(3):
        weights = softmax([float(F.normalize(z)[i] @ row) / 0.3 for row in rows])
        total -= math.log(weights[i])
    assert info_nce(z, target, negatives, temperature=0.3).item() == pytest.approx(total / 3)


def test_gradient_is_the_difference_of_assignments():
    p, q = draw(0, 4, 9).requires_grad_(), draw(1, 4, 9).requires_grad_()
    match_scores(p, q, temperature=0.5, target_temperature=0.2).backward()
    expected = (F.softmax(p / 0.5, dim=1) - F.softmax(q / 0.2, dim=1)) / 0.5 / 4
    torch.testing.assert_close(p.grad, expected.detach())
    assert q.grad is None


def test_gradcheck_and_no_gradient_to_target_or_bank():
    z, target, bank = (draw(i, 3, 4).requires_grad_() for i in range(3))
    assert torch.autograd.gradcheck(lambda x: match_divergence(x, target, bank), (z,))
    match_divergence(z, target, bank).backward()
    assert z.grad is not None
    assert target.grad is None
    assert bank.grad is None


def test_hard_match_moves_only_two_scores_of_a_row():
    p = torch.tensor([[3.0, 1.0, 2.0], [5.0, 0.0, 0.0]], requires_grad=True)
    q = torch.tensor([[0.0, 1.0, 0.0], [9.0, 0.0, 0.0]])
    loss = match_scores(p, q, temperature=0)
    loss.backward()
    assert loss.item() == pytest.approx((3.0 - 1.0 + 0.0) / 2)
    assert p.grad.tolist() == [[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]


def test_several_weak_views_are_a_distribution():
    p, q = draw(0, 4, 9), draw(1, 4, 3, 9)
    expected = match_scores(p, q.mean(dim=1), temperature=0.3)
    torch.testing.assert_close(match_scores(p, q, temperature=0.3), expected)


def test_momentum_after_n_steps_in_closed_form():
    student = nn.Linear(3, 2).double()
    teacher = Teacher(student, momentum=0.9)
    first = student.weight.detach().clone()
    with torch.no_grad():
        student.weight += 1.0
    for _ in range(7):
        teacher.update(student)
    expected = 0.9**7 * first + (1 - 0.9**7) * student.weight.detach()
    torch.testing.assert_close(teacher.network.weight, expected)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    images = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    assert not teacher(images).requires_grad
    teacher.update(student, momentum=0.0)
    assert torch.equal(teacher.network.weight, student.weight)


def test_a_weight_that_two_layers_share_moves_once():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    student = nn.Sequential(first, nn.Sequential(nn.ReLU(), second))
    teacher = Teacher(student, momentum=0.5)
    before = first.weight.detach().clone()
    with torch.no_grad():
        first.weight += 1.0
    teacher.update(student)
    torch.testing.assert_close(teacher.network[1][1].weight, before + 0.5)


def test_a_part_that_was_wrapped_since_keeps_its_place():
    """As ``DistributedDataParallel`` wraps an encoder; here all weights have the same shape."""
    encoder, head = nn.Linear(2, 2), nn.Linear(2, 2)
    teacher = Teacher(nn.Sequential(encoder, head), momentum=0.0)
    with torch.no_grad():
        encoder.weight.fill_(1.0)
        head.weight.fill_(2.0)
    teacher.update(nn.Sequential(nn.Sequential(encoder), head))
    assert torch.equal(teacher.network[0].weight, encoder.weight)
    assert torch.equal(teacher.network[1].weight, head.weight)


def test_weights_are_listed_as_torch_lists_parameters():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    network = nn.Sequential(inner, nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2), inner)
    network.register_module("none", None)
    found, expected = list_weights(network), list(network.parameters())
    assert list(map(id, found)) == list(map(id, expected))
    assert len(found) == 6


def test_momentum_rises_to_one():
    assert momentum_at(0.9, "constant", 0.5) == 0.9
    assert momentum_at(0.9, "cosine", 0.0) == pytest.approx(0.9)
    assert momentum_at(0.9, "cosine", 0.5) == pytest.approx(0.95)
    assert momentum_at(0.9, "cosine", 1.0) == 1.0


@given(st.integers(1, 9), st.lists(st.integers(1, 12), max_size=6))
def test_bank_holds_the_last_rows(size, pushes):
    bank, everything = Bank(size, 2), torch.empty(0, 2)
    for number, count in enumerate(pushes):
        rows = draw(number, count, 2).float()
        bank.push(rows)
        everything = torch.cat([everything, F.normalize(rows)])
    total = len(everything)
    assert bool(bank.is_full) == (total >= size)
    for place in range(max(0, total - size), total):
        torch.testing.assert_close(bank.weight[place % size], everything[place])
    torch.testing.assert_close(bank.weight.norm(dim=1), torch.ones(size))


def test_push_before_backward_does_not_disturb_the_gradient():
    bank, z = Bank(6, 4), torch.randn(3, 4, requires_grad=True)
    scores = bank(z)
    bank.push(torch.randn(5, 4))
    scores.sum().backward()
    assert z.grad is not None


def test_balanced_scores_use_all_functionals_alike():
    scores = draw(0, 40, 5)
    assigned = F.softmax(balance_scores(scores, 0.5, iterations=50) / 0.5, dim=1)
    torch.testing.assert_close(assigned.sum(dim=0), torch.full((5,), 8.0, dtype=torch.float64))
    matrix = (scores / 0.5).exp()  # as the algorithm is usually written
    for _ in range(3):
        matrix = matrix / matrix.sum(dim=0)
        matrix = matrix / matrix.sum(dim=1, keepdim=True)
    found = F.softmax(balance_scores(scores, 0.5) / 0.5, dim=1)
    torch.testing.assert_close(found, matrix)


def test_prototypes_are_cosines():
    prototypes, z = Prototypes(5, 4), torch.randn(3, 4)
    expected = F.cosine_similarity(z[:, None], prototypes.weight[None], dim=2)
    torch.testing.assert_close(prototypes(z), expected)
    # Longer ones would turn more slowly: the scores do not depend on the length.
    torch.testing.assert_close(prototypes.weight.norm(dim=1), torch.ones(5))


BEST = {
    "teacher.momentum": 0.9,
    "weak_views.num_views": 2,
    "divergence.source": "bank",
    "divergence.compare": "match",
    "divergence.num_subnetworks": 96,
    "divergence.smoothing": 0.2,
    "divergence.target_smoothing": 0.1,
    "divergence.info_nce": 0.5,
    "training.batch_size": 16,
    "training.epochs": 1,
    "optimiser.warmup_epochs": 0.5,
    "training.knn_every": 1,
    "training.save_seconds": 0.0,
    "training.tensorboard": False,
    "encoder.projection_hidden": 12,
    "encoder.embedding": 6,
    "optimiser.name": "muon",
}


def configure(**changes: Any) -> Config:
    return override(load_recipe("digits"), {**BEST, **changes})


def take_step(step: Step, seed: int = 0) -> StepOutputs:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8, generator=generator)
    uniforms = ViewGroups(
        *(
            None if group is None else group.draw(16, device="cpu", generator=generator)
            for group in step.views
        )
    )
    outputs: StepOutputs = step(images, None, uniforms)
    return outputs


def test_terms_are_those_of_the_formulas_once_the_bank_is_full():
    step = build_step(configure())
    for seed in range(3):  # 2 targets for each of 16 images: 32, 64, 96
        outputs = take_step(step, seed)
        terms = name_terms(step, outputs)
        assert terms["divergence"] == terms["info_nce"] == 0.0
    bank = step.divergence.network
    assert isinstance(bank, Bank)
    assert bank.is_full
    weight = bank.weight.clone()
    outputs = take_step(step, 3)
    terms = name_terms(step, outputs)
    pairs = [(z, target) for z in outputs.student for target in outputs.teacher]
    matched = [
        match_divergence(*pair, weight, temperature=0.2, target_temperature=0.1) for pair in pairs
    ]
    torch.testing.assert_close(terms["divergence"], torch.stack(matched).mean())
    temperature = step.divergence.settings.temperature
    contrasted = [info_nce(*pair, weight, temperature=temperature) for pair in pairs]
    torch.testing.assert_close(terms["info_nce"], torch.stack(contrasted).mean())
    newest = F.normalize(outputs.teacher.flatten(0, 1), dim=1)
    torch.testing.assert_close(bank.weight[:32], newest)


def test_the_bank_takes_embeddings_in_training_only():
    step = build_step(configure())
    for trains, pushed in ((True, 32), (False, 32), (True, 64)):
        step.train(trains)
        outputs = take_step(step)
        assert int(step.divergence.network.pushed) == pushed
        assert not outputs.scores.requires_grad  # it would keep the memory of the whole step


@pytest.mark.parametrize(("schedule", "moved"), [("constant", 0.1), ("cosine", 0.05)])
def test_the_teacher_gets_no_gradient_and_follows(schedule, moved):
    step = build_step(configure(**{"teacher.schedule": schedule}))
    take_step(step).total.backward()
    assert all(parameter.grad is None for parameter in step.teacher.parameters())
    optimised = {id(p) for group in step.parameter_groups() for _, p in group.parameters}
    assert not optimised & {id(parameter) for parameter in step.teacher.parameters()}
    before = step.teacher.network[1][0].weight.clone()
    with torch.no_grad():
        step.objective.projection[0].weight += 1.0
    step.after_step(0.5)
    torch.testing.assert_close(step.teacher.network[1][0].weight, before + moved)


def test_prototypes_have_a_teacher_of_their_own():
    step = build_step(
        configure(**{"divergence.source": "prototypes", "divergence.info_nce": 0.0,
                     "divergence.centring": "mean"})
    )  # fmt: skip
    term = step.divergence
    take_step(step).total.backward()
    assert term.network.weight.grad.abs().sum() > 0
    assert term.teacher_network.weight.grad is None
    before = term.teacher_network.weight.clone()
    with torch.no_grad():
        term.network.weight += 1.0
    step.after_step(0.5)
    torch.testing.assert_close(term.teacher_network.weight, before + 0.1)


@pytest.mark.parametrize("centring", ["mean", "sinkhorn"])
def test_centring_evens_out_what_the_teacher_prefers(centring):
    changes = {"divergence.source": "prototypes", "divergence.info_nce": 0.0}
    term = build_step(configure(**changes, **{"divergence.centring": centring})).divergence
    targets = draw(0, 1, 400, 6).float() + torch.tensor([3.0, 0, 0, 0, 0, 0])  # all lean one way
    scores = term._score_targets(targets)[0]
    plain = F.softmax(term.teacher_network(targets[0]) / 0.1, dim=1).mean(dim=0)
    even = F.softmax(scores / 0.1, dim=1).mean(dim=0)
    assert torch.special.entr(even).sum() > torch.special.entr(plain).sum() + 0.1


class PlainViews(nn.Module):
    def __init__(self, num_views: int) -> None:
        super().__init__()
        self.num_views = num_views

    def draw(self, num_images: int, *, device: str, generator: torch.Generator) -> Tensor:
        return torch.rand(self.num_views, num_images, 1, device=device, generator=generator)

    def forward(self, images: Tensor, sizes: None, uniforms: Tensor) -> Tensor:
        return images / 255.0 * uniforms[..., None, None]


def test_the_step_is_compiled_once():
    """While the bank fills and is full, and while momentum and weights move."""
    config = configure(
        **{"teacher.schedule": "cosine", "divergence.warmup_epochs": 2.0},
        **{"divergence.num_subnetworks": 48, "weak_views.num_views": 1, "divergence.info_nce": 0.0},
    )
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, compiled = build_step(config), build_step(config)
    for step in (plain, compiled):  # those of the library take long to trace
        step.views = ViewGroups(PlainViews(2), PlainViews(1))
    compiled.compile(backend="eager", fullgraph=True)
    filled, momenta = [], []
    for number in range(6):
        totals = []
        for step in (plain, compiled):
            step.follow_schedule(number, steps_per_epoch=2)
            step.zero_grad()
            totals.append(take_step(step, number).total)
            totals[-1].backward()
            with torch.no_grad():
                for weight in step.objective.parameters():
                    weight -= 0.01 * weight.grad
            step.after_step(number / 6)
        torch.testing.assert_close(totals[1], totals[0])
        filled.append(bool(compiled.divergence.network.is_full))
        momenta.append(momentum_at(0.9, "cosine", number / 6))
    assert filled == [False, False, True, True, True, True]
    assert len(set(momenta)) == 6
    assert counters["stats"]["unique_graphs"] == 1


class NoReading(TorchDispatchMode):
    """Refuses what makes the host wait for the value of a tensor, on any device."""

    READING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.READING, f"{func} waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("source", ["learned", "bank", "prototypes"])
def test_no_value_is_read_in_a_step(source):
    """While the bank fills and is full; test_loop_gpu.py asks CUDA itself."""
    changes = {} if source == "bank" else {"divergence.info_nce": 0.0}
    step = build_step(configure(**changes, **{"divergence.source": source}))
    step.views = ViewGroups(PlainViews(2), PlainViews(2))
    with pytest.raises(AssertionError, match="waits"), NoReading():
        step.divergence.numbers[0].item()
    for number in range(5):
        with NoReading():
            step.follow_schedule(number, steps_per_epoch=2)
            take_step(step, number).total.backward()
            step.after_step(number / 5)


def test_without_the_divergence_nobody_asks_the_teacher():
    step = build_step(configure(**{"divergence.weight": 0.0, "divergence.info_nce": 0.0}))
    assert step.teacher is None
    assert step.views.weak is None


def test_the_control_is_infonce_without_the_divergence():
    step = build_step(configure(**{"divergence.weight": 0.0}))
    step.follow_schedule(0, 10)
    assert step.weights == {"contrastive": 1.0, "info_nce": 0.5}
    assert len(take_step(step).losses) == 3  # the total, and those two


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": None, "weak_views": None}, r"need the targets of a teacher, which the method"),
        ({"weak_views": None}, r"\[teacher\] is given without \[weak_views\]"),
        ({"divergence.source": "learned"}, r"divergence.info_nce is 0.5 .* set divergence.source"),
        ({"objective.name": "byol"}, r"of its own: leave .* changes=\{\"teacher\": None\}"),
        ({"teacher.momentum": 1.5}, r"teacher.momentum is 1.5: it must be between 0 and 1"),
    ],
)
def test_settings_that_contradict_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        configure(**changes)


def test_a_run_with_a_half_filled_bank_resumes_to_the_bit(tmp_path, few_digits, stop_after):
    config = configure(**{"data.source": few_digits, "divergence.num_subnetworks": 128})
    complete = pretrain(config, run=tmp_path / "complete")
    with stop_after(2), pytest.raises(Interrupted):
        pretrain(config, run=tmp_path / "run")
    run = resume(tmp_path / "run")
    found, expected = (checkpoints.load(each.last_checkpoint) for each in (run, complete))
    for part in checkpoints.NETWORKS:
        assert found[part].keys() == expected[part].keys()
        assert bool(expected[part]) == (part != "rotation")
        assert all(torch.equal(found[part][k], expected[part][k]) for k in expected[part])
    assert run.metrics()[-1]["knn"] == complete.metrics()[-1]["knn"]
    assert run.metrics()[-1]["divergence"] > 0.0


def test_a_bank_that_is_not_full_is_not_complained_of():
    step = build_step(configure())
    record = {"active_subnetworks": 1.0}
    assert step.divergence.warn(record, 96) == []
    step.divergence.network.push(draw(0, 96, 6).float())
    assert "only 1 of 96 subnetworks" in step.divergence.warn(record, 96)[0]
