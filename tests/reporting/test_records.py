"""Runs that differ only by seed are one arm; what differs otherwise is said."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepbregman.errors import UserError
from deepbregman.reporting.comparison import make_card
from deepbregman.reporting.records import (
    RunRecord,
    find_differences,
    find_unequal_budget,
    group_runs,
    list_measures,
    name_datasets,
)
from deepbregman.reporting.tables import (
    Cell,
    mark_best,
    summarise_measure,
    tabulate_evaluations,
    tabulate_provenance,
)
from deepbregman.runs import Record

MakeRun = Callable[..., Path]


def row(value: float, **changes: object) -> Record:
    known = {"protocol": "linear", "variant": "cached features", "data": "digits"}
    sizes = {"num_train": 1297, "num_test": 500, "epoch": 3, "epochs": 3}
    return {**known, "metric": "top1", "value": value, **sizes, **changes}


def test_a_run_from_the_weights_of_another_is_no_equal(make_run):
    """It has been trained for as long as both."""
    paths = [make_run("first"), make_run("longer", {"encoder.weights": "runs/first"})]
    arms = group_runs([RunRecord.read(path) for path in paths])
    assert find_unequal_budget(find_differences(arms)) == ["encoder.weights"]


def test_what_makes_a_comparison_unfair_is_named(make_run):
    unfair = {"data.image_size": 16, "encoder.name": "resnet18", "views.num_views": 4}
    unfair |= {"training.epochs": 7, "training.batch_size": 64}
    paths = [make_run("first"), make_run("other", {**unfair, "divergence.weight": 0.0})]
    arms = group_runs([RunRecord.read(path) for path in paths])
    assert set(find_unequal_budget(find_differences(arms))) == unfair.keys()


def test_arms_are_runs_that_differ_only_by_seed(make_run):
    paths = [
        make_run("ours-seed0"),
        make_run("plain", {"divergence.weight": 0.0}),
        make_run("ours-seed1", {"seed": 1}),
        make_run("other", {"training.epochs": 7, "seed": 1}),
    ]
    arms = group_runs([RunRecord.read(path) for path in paths])
    assert [(arm.name, [run.name for run in arm.runs]) for arm in arms] == [
        ("ours", ["ours-seed0", "ours-seed1"]),
        ("plain", ["plain"]),
        ("other", ["other"]),
    ]
    found = find_differences(arms)
    assert list(found.items()) == [
        ("divergence.weight", ("1", "0", "1")),
        ("training.epochs", ("100", "100", "7")),
    ]
    assert find_unequal_budget(found) == ["training.epochs"]
    assert [arm.method for arm in arms][1] == "SimCLR: no divergence term"


@pytest.mark.parametrize(
    ("names", "arm"),
    [
        (("run-s0", "run-s1"), "run"),
        (("views-0", "views-1"), "views"),
        (("a.seed1", "a.seed10"), "a.seed1 and 1 more"),  # too little is left to be a name
        (("kappa_5_seed_1", "kappa_5_seed_2"), "kappa_5"),
        (("x", "y"), "x and 1 more"),
    ],
)
def test_an_arm_is_named_by_what_its_runs_share(make_run, names, arm):
    paths = [make_run(name, {"seed": seed}) for seed, name in enumerate(names)]
    assert [part.name for part in group_runs(map(RunRecord.read, paths))] == [arm]


def test_runs_of_one_name_are_told_apart(make_run):
    paths = [make_run("a/run"), make_run("b/run", {"seed": 1}), make_run("c")]
    names = [run.name for arm in group_runs(map(RunRecord.read, paths)) for run in arm.runs]
    assert names == ["a/run", "b/run", "c"]


def test_states(make_run):
    metrics = [{"epoch": 1, "total": 3.0}, {"epoch": 2, "total": 2.0}]
    done = {"pretrain": {"seconds": 1.5}}
    states = [
        RunRecord.read(path).state
        for path in (
            make_run("new"),
            make_run("begun", metrics=metrics),
            make_run("done", metrics=metrics, result=done),
            make_run("judged", metrics=metrics, result={**done, "evaluations": [row(1.0)]}),
            make_run("lost", metrics=metrics, result={"study": {"state": "diverged"}}),
        )
    ]
    assert states == [
        "unfinished: epoch 0 of 100",
        "unfinished: epoch 2 of 100",
        "not evaluated",
        "finished",
        "diverged after epoch 2",
    ]


def test_a_damaged_evaluation_is_named(make_run):
    broken = {"evaluations": [{"protocol": "knn", "value": 3.0}]}
    with pytest.raises(UserError, match=r"result\.json cannot be used \(an evaluation lacks"):
        RunRecord.read(make_run("a", result=broken))
    with pytest.raises(UserError, match="without a usable metric or value"):
        RunRecord.read(make_run("b", result={"evaluations": [row(float("nan"))]}))


def test_a_summary_is_over_runs_and_says_how_many(make_run):
    paths = [
        make_run("a-seed0", result={"evaluations": [row(90.0)]}),
        make_run("a-seed1", {"seed": 1}, result={"evaluations": [row(92.0)]}),
        make_run("a-seed2", {"seed": 2}),
    ]
    (arm,) = group_runs(map(RunRecord.read, paths))
    (measure,) = list_measures([arm])
    cell = summarise_measure(arm, measure)
    assert cell.summary == {"mean": 91.0, "deviation": pytest.approx(2**0.5), "n": 2}
    assert cell.of_runs == 3
    assert "a-seed1: 92.00" in cell.note


def test_every_run_has_its_own_seed_and_changed_code_is_told(make_run):
    paths = [make_run("ours-seed3", {"seed": 3}), make_run("ours-seed8", {"seed": 8})]
    for path, commit in zip(paths, ("0123456789abcdef", "0123456789abcdef-dirty"), strict=True):
        (path / "provenance.json").write_text(json.dumps({"commit": commit}))
    table = tabulate_provenance(group_runs(map(RunRecord.read, paths)), "")
    found = [
        dict(zip(table.columns, (cell.text for cell in r.cells), strict=True)) for r in table.rows
    ]
    assert [(r["arm"], r["seed"], r["commit"]) for r in found] == [
        ("ours", "3", "0123456789"),
        ("ours", "8", "0123456789-dirty"),
    ]


def test_references_are_means_over_all_runs(make_run):
    paths = [
        make_run("a", result={"evaluations": [row(90.0, chance=10.0, raw_pixels=40.0)]}),
        make_run("b", {"seed": 1}, result={"evaluations": [row(92.0, chance=10.0)]}),
        make_run("c", {"seed": 2}, result={"evaluations": [row(92.0, raw_pixels=43.0)]}),
    ]
    groups = group_runs(map(RunRecord.read, paths))
    (table,) = tabulate_evaluations(groups)
    below = {r.name: r.cells[0].text for r in table.rows[1:]}
    assert below == {"most frequent class": "10.00", "raw pixels": "41.50"}


def test_one_run_has_the_deviation_of_its_evaluations(make_run):
    path = make_run("a", result={"evaluations": [row(90.0, deviation=0.4, n=5)]})
    (arm,) = group_runs([RunRecord.read(path)])
    cell = summarise_measure(arm, list_measures([arm])[0])
    assert cell.summary == {"mean": 90.0, "deviation": 0.4, "n": 5}
    assert cell.over == "repetitions of the evaluation of one run"


@pytest.mark.parametrize(
    ("metric", "is_best"),
    [(name, True) for name in ("top1", "balanced", "mAP", "AP50-07", "NMI", "AUROC")]
    + [("loss", False)],
)
def test_more_is_better_of_the_metrics_that_are_known(make_run, metric, is_best):
    paths = [
        make_run(
            f"{arm}-seed{seed}",
            {"seed": seed, "divergence.weight": weight},
            result={"evaluations": [row(value + 0.1 * seed, metric=metric)]},
        )
        for arm, weight, value in (("a", 0.0, 90.0), ("b", 1.0, 95.0))
        for seed in range(3)
    ]
    (table,) = tabulate_evaluations(group_runs(map(RunRecord.read, paths)))
    assert [r.cells[0].is_best for r in table.rows if r.place is not None] == [False, is_best]


def test_what_was_judged_on_other_images_is_not_pooled(make_run):
    paths = [
        make_run("a-seed0", result={"evaluations": [row(90.0)]}),
        make_run("a-seed1", {"seed": 1}, result={"evaluations": [row(92.0, num_test=10)]}),
    ]
    arms = group_runs(map(RunRecord.read, paths))
    assert [summarise_measure(arms[0], measure).summary for measure in list_measures(arms)] == [
        {"mean": 90.0, "deviation": None, "n": 1},
        {"mean": 92.0, "deviation": None, "n": 1},
    ]
    (table,) = tabulate_evaluations(arms)
    assert table.columns == (
        "linear: cached features [1,297 / 500]",
        "linear: cached features [1,297 / 10]",
    )


def test_an_early_encoder_is_noted(make_run):
    path = make_run("a", result={"evaluations": [row(90.0, epoch=2)]})
    arms = group_runs([RunRecord.read(path)])
    assert "saved at epoch 2 of 3" in summarise_measure(arms[0], list_measures(arms)[0]).note


cells = st.lists(
    st.tuples(st.floats(0.0, 100.0), st.none() | st.floats(0.0, 5.0), st.integers(1, 4)),
    min_size=1,
    max_size=5,
)


@given(cells)
def test_best_only_where_the_difference_exceeds_the_deviations(drawn):
    made = [Cell({"mean": m, "deviation": d, "n": n}) for m, d, n in drawn]
    marked = mark_best(made, [n for _, _, n in drawn])
    for index, cell in enumerate(marked):
        mean, deviation, n = drawn[index]
        others = [other for place, other in enumerate(drawn) if place != index]
        expected = (
            bool(others)
            and deviation is not None
            and n > 2
            and all(d is not None and m_n > 2 and mean - m > deviation + d for m, d, m_n in others)
        )
        assert cell.is_best is expected


@pytest.mark.parametrize(("lead", "is_best"), [(0.79, False), (0.81, True)])
def test_the_lead_is_held_against_both_deviations_together(lead, is_best):
    made = [
        Cell({"mean": 90.0 + lead, "deviation": 0.5, "n": 3}),
        Cell({"mean": 90.0, "deviation": 0.3, "n": 3}),
    ]
    assert [cell.is_best for cell in mark_best(made, [3, 3])] == [is_best, False]
    for num_seeds in ([2, 3], [3, 2]):  # two seeds of either are too few
        assert not any(cell.is_best for cell in mark_best(made, num_seeds))


def test_published_figures_stand_apart_and_are_never_best(make_run):
    paths = []
    for arm, weight, values in (
        ("ours", 1.0, (94.0, 94.1, 94.2)),
        ("plain", 0.0, (90.0, 90.1, 90.2)),
    ):
        for seed, value in enumerate(values):
            changes = {"divergence.weight": weight, "divergence.num_subnetworks": 100}
            result = {"evaluations": [row(value, data="cifar10")]}
            paths.append(make_run(f"{arm}-seed{seed}", {**changes, "seed": seed}, result=result))
    (table,) = tabulate_evaluations(group_runs(map(RunRecord.read, paths)))
    names = [(line.name, line.is_published, line.cells[0].latex) for line in table.rows]
    assert names == [
        ("ours", False, r"$\mathbf{94.10} \pm 0.10$"),
        ("plain", False, r"$90.10 \pm 0.10$"),
        ("SimCLR", True, "91.8"),
        ("the paper's method", True, "93.2"),
        ("the paper's method, κ = 100", True, "92.6"),
    ]
    assert [line.cells[0].is_best for line in table.rows] == [True] + 4 * [False]
    assert "table:lineareval:smalldatasets" in table.rows[2].note
    assert "not an arm" in table.caption


def test_three_runs_of_one_seed_are_not_three_seeds(make_run):
    """Copies of a run hardly deviate, so that an arm of them would seem clearly best."""
    paths = []
    for arm, weight, value in (("ours", 1.0, 94.0), ("plain", 0.0, 90.0)):
        for copy in range(3):
            changes, result = {"divergence.weight": weight}, {"evaluations": [row(value + copy)]}
            paths.append(make_run(f"{arm}-{copy}", changes, result=result))
    arms = group_runs(map(RunRecord.read, paths))
    (table,) = tabulate_evaluations(arms)
    assert [line.note for line in table.rows] == 2 * ["n = 3, of 1 seed"]
    assert not any(line.cells[0].is_best for line in table.rows)
    *_, warning = make_card(arms[0], name_datasets(arms)).warnings
    assert "the deviation is not over independent seeds" in warning


def test_two_seeds_of_three_are_too_few_to_be_best_and_the_caption_counts_them(make_run):
    paths = []
    for arm, weight, value in (("ours", 1.0, 94.0), ("plain", 0.0, 90.0)):
        for seed in range(3):
            measured = {"evaluations": [row(value + 0.1 * seed)]} if seed < 2 else {}
            changes = {"divergence.weight": weight, "seed": seed}
            paths.append(make_run(f"{arm}-{seed}", changes, result=measured))
    (table,) = tabulate_evaluations(group_runs(map(RunRecord.read, paths)))
    assert [line.cells[0].summary["n"] for line in table.rows] == [2, 2]
    assert not any(line.cells[0].is_best for line in table.rows)
    assert table.caption.startswith("Per cent; mean ± sample deviation over seeds, n = 2")


def test_evaluations_of_other_lengths_are_not_pooled(make_run):
    """Fine-tuning for 1 epoch and for 30 are two quantities."""
    paths = []
    for seed, epochs in enumerate((1, 30)):
        measured = row(50.0 + epochs, protocol="semi", variant="10 % labels, from encoder")
        result = {"evaluations": [{**measured, "details": {"epochs": epochs}}]}
        paths.append(make_run(f"seed{seed}", {"seed": seed}, result=result))
    (table,) = tabulate_evaluations(group_runs(map(RunRecord.read, paths)))
    assert [name.rpartition(", ")[2] for name in table.columns] == ["1 epoch", "30 epochs"]
    assert [cell.summary["mean"] for cell in table.rows[0].cells] == [51.0, 80.0]


def test_images_of_another_kind_from_two_folders_of_one_name_are_not_pooled(make_run):
    paths = []
    for seed, folder in enumerate(("a/test", "b/test")):
        measured = row(50.0 + seed, protocol="ood", variant="test: cosine", metric="AUROC")
        result = {"evaluations": [{**measured, "details": {"against": folder}}]}
        paths.append(make_run(f"seed{seed}", {"seed": seed}, result=result))
    (table,) = tabulate_evaluations(group_runs(map(RunRecord.read, paths)))
    assert [name.rpartition("] ")[2] for name in table.columns] == [
        "against a/test",
        "against b/test",
    ]
    assert [cell.summary["mean"] for cell in table.rows[0].cells] == [50.0, 51.0]


def test_the_card_of_an_arm_has_what_was_measured_last_and_why_it_stopped(make_run):
    metrics = [
        {"epoch": 1, "knn": 90.0, "verdict": "under-trained", "reason": "measured once"},
        {"epoch": 2, "knn": 81.5, "verdict": "saturated", "reason": "more epochs bring little"},
        {"epoch": 3},
    ]
    stopped = {"pretrain": {"seconds": 1.0, "stopped": "after epoch 3: saturated"}}
    (arm,) = group_runs([RunRecord.read(make_run("a", metrics=metrics, result=stopped))])
    facts = dict(make_card(arm, name_datasets([arm])).facts)
    assert facts["health"] == "saturated (more epochs bring little)"
    assert facts["stopped"] == "after epoch 3: saturated"
    assert facts["kNN monitor, last"] == "81.50 %"
    (plain,) = group_runs([RunRecord.read(make_run("b", metrics=[{"epoch": 1}]))])
    assert not {"health", "stopped"} & dict(make_card(plain, name_datasets([plain])).facts).keys()


def test_the_headline_of_a_card_is_of_the_run_s_own_images(make_run):
    """Those of a transfer come first where it was measured first."""
    found = {"evaluations": [row(50.0, data="other"), row(90.0)]}
    (arm,) = group_runs([RunRecord.read(make_run("a", result=found))])
    card = make_card(arm, name_datasets([arm]))
    assert card.headline.summary["mean"] == 90.0
    assert card.test_set == "500 test images of digits"
