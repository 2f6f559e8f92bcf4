"""Whole recipes compared: pairs by seed, an equal budget, and the command that a user types."""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.cli import main
from deepbregman.config import Config, fields_of, load_recipe, override, to_toml
from deepbregman.errors import UserError
from deepbregman.evaluation.results import Predictions, pack, unpack
from deepbregman.files import write_json
from deepbregman.reporting.grid_charts import OURS
from deepbregman.reporting.grid_tables import tabulate_study
from deepbregman.statistics import format_signed, interval_over_images
from deepbregman.studies import engine
from deepbregman.studies.catalogue import find_study
from deepbregman.studies.catalogue.comparison import STUDY
from deepbregman.studies.definition import Study, StudyOptions, check_budget, read_changes
from deepbregman.studies.engine import MAIN_METRIC
from deepbregman.studies.grid import open_grid, plan_cells
from deepbregman.studies.grid_plan import find_best_of_study, name_study_folder, plan_study
from deepbregman.studies.results import estimate_interval, write_results

from .conftest import TINY, read


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder.name": "resnet50"}, "encoder.name is 'resnet18' in a, 'resnet50' in b"),
        ({"encoder.stem": "standard"}, "encoder.stem is 'auto' in a, 'standard' in b"),
        ({"data.image_size": 64}, "data.image_size is 32 in a, 64 in b"),
        ({"views.relative_size": 1.0}, "views are of 24 px in a, 32 px in b"),
        ({"data.holdout": 0.1}, "data.holdout is 0.0 in a, 0.1 in b"),
        (
            {"training.epochs": 100},
            "training.epochs x views.num_views is 200 x 2 = 400 in a, 100 x 2 = 200 in b",
        ),
        (
            {"views.num_views": 4},
            "training.epochs x views.num_views is 200 x 2 = 400 in a, 200 x 4 = 800 in b",
        ),
        (
            {"rotation.weight": 0.4, "small_views.num_views": 4},
            "training.epochs x small views is 0 in a, 800 of 16 px in b",
        ),
    ],
)
def test_an_unequal_budget_is_refused_unless_it_is_meant(changes, words):
    base = load_recipe("simclr")
    configs = {"a": base, "b": override(base, changes)}
    with pytest.raises(UserError) as refused:
        check_budget(configs, unequal=False)
    assert f"({words})" in str(refused.value)
    assert "--unequal" in str(refused.value)
    assert check_budget(configs, unequal=True) == [words]


def test_what_may_differ_at_an_equal_budget():
    base = load_recipe("simclr")
    free: list[Mapping[str, Any]] = [
        {"views.num_views": 4, "training.epochs": 100, "training.batch_size": 256},
        {"training.batch_size": 64, "optimiser.learning_rate": 0.01, "views.flip": 0.0},
        {"data.workers": 0, "training.precision": "32-true", "seed": 7},
    ]
    for changes in free:
        assert check_budget({"a": base, "b": override(base, changes)}, unequal=True) == []
    recipes = {name: load_recipe(name) for name in STUDY.recipes}
    assert check_budget(recipes, unequal=True) == []


def test_small_views_count_by_epochs_and_by_their_side():
    base = override(load_recipe("simclr"), {"rotation.weight": 0.4, "small_views.num_views": 4})
    half = {"views.num_views": 4, "training.epochs": 100}
    equal = {**half, "small_views.num_views": 8}
    assert check_budget({"a": base, "b": override(base, equal)}, unequal=False) == []
    fewer = check_budget({"a": base, "b": override(base, half)}, unequal=True)
    assert fewer == ["training.epochs x small views is 800 of 16 px in a, 400 of 16 px in b"]
    larger = override(base, {"small_views.relative_size": 0.75})
    (words,) = check_budget({"a": base, "b": larger}, unequal=True)
    assert words.endswith("800 of 16 px in a, 800 of 24 px in b")


@pytest.mark.parametrize("name", ["data.source", "data.root"])
def test_other_images_are_no_comparison_at_all(name):
    base = load_recipe("simclr")
    with pytest.raises(UserError, match=rf"different images \({name} is '.*--data NAME"):
        check_budget({"a": base, "b": override(base, {name: "elsewhere"})}, unequal=True)


def test_an_arm_is_all_in_which_its_recipe_differs():
    configs = {name: load_recipe(name) for name in ("simclr", "best", "paper")}
    seeded = {name: override(config, {"seed": 3}) for name, config in configs.items()}
    assert STUDY.with_recipes({**seeded, "simclr": configs["simclr"]}) == STUDY.with_recipes(
        configs
    )
    study = STUDY.with_recipes(configs)
    assert study.reference == "simclr"
    assert [arm.series for arm in study.arms] == ["SimCLR", "with divergence", "with divergence"]
    for arm in study.arms:
        assert override(configs["simclr"], arm.changes) == configs[arm.name]
        start = fields_of(configs["simclr"])
        for field, value in arm.changes.items():
            assert value is None or value != start.get(field)  # None leaves a section out
    back = STUDY.with_recipes({name: configs[name] for name in ("best", "simclr")}).arms[1]
    assert override(configs["best"], back.changes) == configs["simclr"]
    same = STUDY.with_recipes({"a": configs["best"], "b": configs["paper"], "c": configs["paper"]})
    cells = plan_cells(same.arms, configs["best"], (0,), Path("runs"))
    assert [cell.trial.name for cell in cells] == ["a-seed0", "b-seed0", "b-seed0"]  # trained once


def recipe(path: Path, changes: Mapping[str, Any]) -> str:
    config: Config = override(load_recipe("digits"), {**read_changes(TINY), **changes})
    path.write_text(to_toml(config))
    return str(path)


@pytest.fixture
def two(tmp_path) -> list[str]:
    """A tiny SimCLR and a tiny divergence of twice the views in half the epochs."""
    off = {"divergence.weight": 0.0, "training.epochs": 2}
    both = {"views.num_views": 4, "training.epochs": 1, "training.batch_size": 32}
    return [recipe(tmp_path / "plain.toml", off), recipe(tmp_path / "ours [x].toml", both)]


def test_to_the_end_and_on_by_the_folder_alone(two, few_digits, out, monkeypatch, capsys, refusal):
    words = ["study", "comparison", "--out", str(out)]
    main([*words, "--recipes", *two, "--data", few_digits, "--seeds", "2", "--only", "plain"])
    assert [arm["difference"] for arm in read(out)["arms"]] == [{}]
    for path in two:
        Path(path).unlink()  # the folder knows them
    trained = []
    pretrain = engine.pretrain

    def counted(config: Config, **options: Any) -> Any:
        trained.append((config.views.num_views, config.training.epochs, config.seed))
        return pretrain(config, **options)

    monkeypatch.setattr(engine, "pretrain", counted)
    main([*words, "--only", "*"])
    assert trained == [(4, 1, 0), (4, 1, 1)]
    results = read(out)
    assert (results["study"]["reference"], results["unequal_budget"]) == ("plain", [])
    assert (results["recipe"], results["epochs"]) == ("plain, ours [x]", None)
    plain, ours = results["arms"]
    values = {
        name: [row["metrics"] for row in results["cells"] if row["arm"] == name]
        for name in ("plain", "ours [x]")
    }
    assert set(ours["difference"]) == set(plain["metrics"]) & set(ours["metrics"])
    assert {"linear, cached features", "knn, cosine, k=20"} <= set(ours["difference"])
    for metric, change in ours["difference"].items():
        mine, base = ([row[metric] for row in values[name]] for name in ("ours [x]", "plain"))
        assert change["mean"] == pytest.approx(np.mean(np.subtract(mine, base)), abs=1e-9)
        assert (change["n"], ours["against"]) == (2, "plain")
    assert (plain["difference"], plain["against"]) == ({}, None)
    for arm, cost in ((plain, (2, 2, 8, 128, 4)), (ours, (1, 4, 8, 128, 5))):
        names = ("epochs", "views_per_image", "view_size", "samples_per_step", "steps")
        assert tuple(arm["cost"][name] for name in names) == cost
        assert arm["cost"]["seconds"]["n"] == 2
        assert arm["cost"]["seconds"]["mean"] > 0.0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Difference to plain" in shown
    assert "1 or 2 epochs" in shown
    assert "Cost of training" in shown
    with Image.open(out / "comparison.png") as figure:
        assert len(figure.convert("RGB").getcolors(maxcolors=100_000) or []) > 20
    assert "--recipes is ['simclr', 'best'] here" in refusal(*words, "--recipes", "simclr", "best")


def test_an_unequal_comparison_says_so_everywhere(tmp_path, few_digits, out, output, refused):
    names = [
        recipe(tmp_path / "short.toml", {"training.epochs": 1, "divergence.weight": 0.0}),
        recipe(tmp_path / "long.toml", {"training.epochs": 2, "divergence.weight": 0.0}),
    ]
    words = ["study", "comparison", "--recipes", *names, "--data", few_digits, "--seeds", "1"]
    refused(words, "1 x 2 = 2 in short, 2 x 2 = 4 in long")
    printed = output(*words, "--unequal", "--out", out)
    said = "training.epochs x views.num_views is 1 x 2 = 2 in short, 2 x 2 = 4 in long"
    assert read(out)["unequal_budget"] == [said]
    assert f"unequal budget: {said}" in " ".join(printed.split())
    assert "Unequal budget: training.epochs" in (out / "comparison.svg").read_text()
    main(["study", "comparison", "--out", str(out)])  # it was meant


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["comparison", "--recipe", "best"], "such as --recipes simclr best"),
        (["comparison", "--recipe", "simclr"], "such as --recipes simclr best"),
        (["comparison", "--recipes", "simclr"], "at least 2 to compare"),
        (["comparison", "--recipes", "simclr", "best", "simclr"], "names simclr twice"),
        (["comparison", "--recipes", "simclr", "bset"], "did you mean 'best'"),
        (["comparison", "--recipes", "simclr", "digits"], "different images (data.source is"),
        (["comparison", "--recipes", "simclr", "paper"], "encoder.name is 'resnet18' in simclr"),
        (
            ["comparison", "--recipes", "simclr", "best", "byol", "paper"],
            "encoder.name is 'resnet18' in simclr, best and byol, 'resnet50' in paper",
        ),
        (["comparison", "--values", "3"], "its arms are simclr, best; choose among them"),
        (
            ["comparison", "--only", "bset"],
            "arm 'bset' of study comparison is not one of simclr, best",
        ),
        (["kappa", "--recipes", "simclr", "best"], "kappa varies one recipe and takes no --recip"),
        (["kappa", "--unequal"], "kappa varies one recipe and takes no --unequal"),
        (["sigma-lambda", "--recipes", "simclr", "best"], "a search and takes no --recipes"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(words, message, refused):
    refused(["study", *words], message)


def test_the_reference_of_a_study_that_has_begun_stays(few_digits, out):
    """Its runs and differences would be those of another comparison."""
    open_grid(STUDY, StudyOptions(recipes=("simclr", "best"), data=few_digits, out=out))
    for recipes in (("best", "simclr"), ("simclr", "best", "byol")):
        with pytest.raises(UserError, match=r"--recipes is .* in the folder of this study"):
            plan_study(STUDY, StudyOptions(recipes=recipes, out=out))


def test_options_reach_every_arm(two, few_digits, out):
    settings = StudyOptions(
        recipes=tuple(two),
        data=few_digits,
        changes=("optimiser.weight_decay=0.25",),
        evaluate_on="holdout",
        out=out,
    )
    opened = open_grid(STUDY, settings)
    configs = [cell.trial.config for cell in opened.cells]
    assert {config.optimiser.weight_decay for config in configs} == {0.25}
    assert {config.data.holdout for config in configs} == {0.1}
    assert sorted({config.training.epochs for config in configs}) == [1, 2]
    again = open_grid(STUDY, StudyOptions(out=out))
    assert [cell.trial.config for cell in again.cells] == configs
    recipe(Path(two[1]), {"training.epochs": 3})
    with pytest.raises(
        UserError, match=r"comparison, ours \[x\] was begun with other settings \(.*epochs"
    ):
        open_grid(STUDY, settings)
    name = name_study_folder(STUDY, StudyOptions(data="cifar10"))
    assert name == Path("studies/comparison-simclr-best-cifar10")


def test_seeds_of_recipes_do_not_tell_arms_apart_nor_stop_a_study(two, few_digits, out):
    """A study has seeds of its own."""
    recipe(Path(two[1]), {"seed": 5})
    settings = StudyOptions(recipes=tuple(two), data=few_digits, unequal=True, out=out)
    first, again = open_grid(STUDY, settings), open_grid(STUDY, settings)
    for opened in (first, again):
        assert {cell.trial.config.seed for cell in opened.cells} == {0, 1, 2}
        assert not any("seed" in arm.changes for arm in opened.plan.arms)


@pytest.mark.parametrize("names", [("a_b", "a+b"), ("ours", "Ours")])
def test_two_recipes_that_would_share_a_folder_are_refused(names, few_digits, tmp_path):
    files = [recipe(tmp_path / f"{name}.toml", {"seed": i}) for i, name in enumerate(names)]
    options = StudyOptions(recipes=tuple(map(str, files)), data=few_digits, out=tmp_path / "out")
    with pytest.raises(UserError, match=r"would have one folder, .*-seed0: rename the file"):
        plan_study(STUDY, options)


def test_names_in_other_scripts_have_folders_of_their_own(few_digits, tmp_path):
    files = [recipe(tmp_path / f"{name}.toml", {}) for name in ("猫", "犬")]
    options = StudyOptions(recipes=tuple(map(str, files)), data=few_digits, out=tmp_path / "out")
    assert [arm.folder_name for arm in plan_study(STUDY, options).arms] == ["猫", "犬"]


def test_the_control_and_both_terms_are_endings_of_a_recipe(tmp_path, few_digits):
    """The command of the headline table: equal budgets, and one term that differs."""
    recipes = ("simclr", "best-control", "best", "best-both")
    options = StudyOptions(data=few_digits, out=tmp_path / "out", recipes=recipes)
    plan = plan_study(STUDY, options)
    assert [arm.name for arm in plan.arms] == list(recipes)
    assert plan.definition["unequal_budget"] == []
    assert [arm.series for arm in plan.arms] == ["SimCLR", "control", OURS, OURS]
    best = load_recipe("best")
    for arm, weights in zip(plan.arms[1:], ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0)), strict=True):
        config = override(plan.base, arm.changes)
        assert (config.divergence.weight, config.divergence.info_nce) == weights
        assert (config.teacher, config.weak_views) == (best.teacher, best.weak_views)
    unnamed = dataclasses.replace(options, out=None, data=None)
    expected = "studies/comparison-simclr-best-control-best-best-both-cifar10"
    assert name_study_folder(STUDY, unnamed) == Path(expected)
    with pytest.raises(
        UserError, match=r"paper-control: .*info_nce is 1\.0 with divergence\.source 'learned'"
    ):
        plan_study(STUDY, dataclasses.replace(options, recipes=("simclr", "paper-control")))


def test_endings_of_recipe_files(tmp_path, few_digits):
    """Arms are called after the file and its ending: they had all been called after the file."""
    file = tmp_path / "best-171.toml"
    file.write_text(to_toml(override(load_recipe("best"), {"training.epochs": 171})))
    recipes = ("simclr", str(file), f"{file}-control", f"{file}-both")
    options = StudyOptions(data=few_digits, recipes=recipes, unequal=True)
    plan = plan_study(STUDY, options)
    names = ["simclr", "best-171", "best-171-control", "best-171-both"]
    assert [arm.name for arm in plan.arms] == names
    control = override(plan.base, plan.arms[2].changes)
    assert control.training.epochs == 171
    assert (control.divergence.weight, control.divergence.info_nce) == (0.0, 1.0)
    shutil.copy(file, other := tmp_path / "best-171-control.toml")
    twice = dataclasses.replace(options, recipes=(*recipes, str(other)))
    words = f"--recipes {file}-control {other} names best-171-control twice"
    with pytest.raises(UserError, match=re.escape(words)):
        plan_study(STUDY, twice)
    with pytest.raises(UserError, match=re.escape(f"did you mean '{file}'?")):
        plan_study(STUDY, dataclasses.replace(options, recipes=("simclr", str(file)[:-5])))


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("methods", "simclr+divergence"),
        ("methods", "simclr-control"),
        ("learning-rates", "simclr-rate-x3"),
    ],
)
def test_a_file_may_not_have_the_name_of_an_arm_that_the_study_makes(
    name, taken, tmp_path, few_digits
):
    """With settings of another arm, its run would count as a second seed of that arm."""
    file = tmp_path / f"{taken}.toml"
    file.write_text(to_toml(load_recipe("simclr")))
    study = find_study(name)
    assert isinstance(study, Study)
    options = StudyOptions(data=few_digits, recipes=("simclr", str(file)), out=tmp_path / "out")
    with pytest.raises(UserError, match=re.escape(f"two arms with the name {taken}, a recipe's")):
        plan_study(study, options)


def test_every_method_stands_alone_with_the_divergence_and_with_its_control(tmp_path, few_digits):
    study = find_study("methods")
    assert isinstance(study, Study)
    options = StudyOptions(data=few_digits, out=tmp_path / "methods", epochs=1)
    plan = plan_study(study, options)
    forms = {
        "": ("alone", 0.0, 0.0),
        "+divergence": ("with divergence", 1.0, 0.0),
        "-control": ("control", 0.0, 1.0),
    }
    assert [arm.name for arm in plan.arms] == [
        f"{r}{form}" for r in study.recipes for form in forms
    ]
    assert len(plan.arms) == 3 * 22
    for arm in plan.arms:
        config = override(plan.base, arm.changes)
        found = (arm.series, config.divergence.weight, config.divergence.info_nce)
        assert found == forms[arm.name.removeprefix(str(arm.x))]
        assert config.training.epochs == 1
        divergence = config.divergence
        assert (divergence.source, divergence.compare) == ("bank", "match"), arm.name
        assert (config.teacher is not None) != config.objective.has_teacher, arm.name
    assert plan.definition["unequal_budget"]
    # A recipe that has the divergence is no arm without it, and none with another one.
    options = dataclasses.replace(options, out=tmp_path / "two", recipes=("byol", "best"))
    arms = plan_study(study, options).arms
    assert [arm.name for arm in arms] == ["byol", "byol+divergence", "byol-control", "best"]


@pytest.mark.parametrize(
    ("name", "arms"),
    [
        ("learning-rates", ["byol", "byol-rate-x0.3", "byol-rate-x3"]),
        ("methods", ["byol", "byol+divergence", "byol-control"]),
    ],
)
def test_one_recipe_is_enough_where_it_has_several_arms(name, arms, tmp_path, few_digits):
    study = find_study(name)
    assert isinstance(study, Study)
    options = StudyOptions(data=few_digits, out=tmp_path / "one", epochs=1, recipes=("byol",))
    assert [arm.name for arm in plan_study(study, options).arms] == arms


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [
        ({1.0: [70, 72, 74], 0.3: [60, 61, 62], 3.0: [75, 77, 79]}, 3.0),
        ({1.0: [70, 72, 74], 0.3: [60, 61, 62], 3.0: [90, 91, None]}, 1.0),
        ({1.0: [70, 72, 74], 0.3: [60], 3.0: [None, None, None]}, 1.0),
        ({1.0: [70, 72, 74], 0.3: [60, 61, 62], 3.0: [90, 91]}, "byol-rate-x3 has .* 2 of 3 seeds"),
        ({1.0: [70], 0.3: [60], 3.0: [50]}, "byol has .* only 1 of 3 seeds"),
        ({1.0: [70, 72, None], 3.0: [90, None]}, None),  # a seed diverged at every rate
    ],
)
def test_a_rate_is_best_only_with_all_its_seeds(accuracies, best, tmp_path, few_digits):
    """A rate that diverges with one seed does not win by the others, nor one with fewer seeds."""
    rates = find_study("learning-rates")
    assert isinstance(rates, Study)
    asked = StudyOptions(data=few_digits, out=tmp_path / "rates", recipes=("byol",), seeds=3)
    plan = plan_study(rates, asked)
    asked.out.mkdir()
    write_json(asked.out / "study.json", {**plan.definition, "provenance": {}})
    rows = []
    for factor, values in accuracies.items():
        (arm,) = [arm for arm in plan.arms if arm.series == f"rate x {factor:g}"]
        for seed, value in enumerate(values):
            where = {"arm": arm.name, "series": arm.series, "x": arm.x, "seed": seed, "run": ""}
            diverged = {"state": "diverged", "metrics": {}}
            done = {"state": "done", "metrics": {MAIN_METRIC: value}}
            rows.append(where | (diverged if value is None else done))
    write_results(asked.out, plan.definition, rows, {})
    if isinstance(best, str):
        with pytest.raises(UserError, match=best):
            find_best_of_study(asked.out, "byol")
    else:
        found = find_best_of_study(asked.out, "byol")
        if best is None:
            assert found is None
            return
        assert found is not None
        rate = load_recipe("byol").optimiser.learning_rate
        assert found.optimiser.learning_rate == pytest.approx(best * rate)


def test_both_rates_of_muon_are_tried_and_taken(tmp_path, few_digits):
    """Its convolutions, most of the network, have a rate of their own."""
    rates, methods = find_study("learning-rates"), find_study("methods")
    assert isinstance(rates, Study)
    assert isinstance(methods, Study)
    folder, recipe = tmp_path / "rates", "cifar10-fast"
    own = load_recipe(recipe).optimiser
    assert own.name == "muon"
    options = StudyOptions(data=few_digits, out=folder, epochs=1, recipes=(recipe,))
    plan = plan_study(rates, options)
    found = {arm.name: override(plan.base, arm.changes).optimiser for arm in plan.arms}
    fast = found[f"{recipe}-rate-x3"]
    assert fast.learning_rate == pytest.approx(3 * own.learning_rate)
    assert fast.convolution_rate == pytest.approx(3 * own.convolution_rate)

    rows = [
        {
            **{"arm": arm.name, "series": arm.series, "x": arm.x, "seed": 0, "run": arm.name},
            **{"state": "complete", "metrics": {MAIN_METRIC: found[arm.name].convolution_rate}},
        }
        for arm in plan.arms
    ]
    folder.mkdir()
    write_json(folder / "study.json", {**plan.definition, "provenance": {}})
    write_results(folder, plan.definition, rows, {})
    options = dataclasses.replace(options, out=tmp_path / "methods", rates=(folder,))
    chosen = plan_study(methods, options)
    assert override(chosen.base, chosen.arms[0].changes).optimiser.rates == fast.rates


def test_methods_take_the_rates_that_were_best(tmp_path, few_digits):
    """The rate that won on held-out images reaches both arms of its recipe, and stays."""
    rates, study = find_study("learning-rates"), find_study("methods")
    assert isinstance(rates, Study)
    assert isinstance(study, Study)
    folder, recipes = tmp_path / "rates", ("simclr", "byol", "wmse")
    options = StudyOptions(data=few_digits, out=folder, epochs=1, recipes=recipes)
    plan = plan_study(rates, options)
    assert plan.definition["evaluate_on"] == "holdout"
    assert plan.definition["seeds"] == 1
    found = {arm.name: override(plan.base, arm.changes) for arm in plan.arms}
    # Else the images to evaluate on would be among those that are trained on.
    assert load_recipe("byol").data.holdout == 0.0
    assert {config.data.holdout for config in found.values()} == {0.1}
    own = {name: load_recipe(name).optimiser.learning_rate for name in recipes}
    assert own["byol"] != own["simclr"]
    assert found["byol"].optimiser.learning_rate == own["byol"]
    assert found["byol-rate-x3"].optimiser.learning_rate == pytest.approx(3 * own["byol"])
    assert found["simclr-rate-x0.3"].optimiser.learning_rate == pytest.approx(0.3 * own["simclr"])
    assert found["byol-rate-x3"].objective.name == "byol"

    folder.mkdir()
    write_json(folder / "study.json", {**plan.definition, "provenance": {}})
    accuracy = {"simclr": 80.0, "simclr-rate-x0.3": 81.0, "simclr-rate-x3": 79.0}
    accuracy |= {"byol": 70.0, "byol-rate-x0.3": 69.0, "byol-rate-x3": 75.0}
    accuracy |= {"wmse": 70.0, "wmse-rate-x0.3": 69.0, "wmse-rate-x3": 68.0}
    rows = [
        {
            **{"arm": arm.name, "series": arm.series, "x": arm.x, "seed": 0, "run": arm.name},
            **{"state": "complete", "metrics": {MAIN_METRIC: accuracy[arm.name]}},
        }
        for arm in plan.arms
    ]
    write_results(folder, plan.definition, rows, {})
    # The best rate of byol is the largest: a begun study may get a larger one.
    wider = plan_study(rates, StudyOptions(out=folder, values=("10",), only=("byol-rate-x10",)))
    (arm,) = wider.chosen
    rate = override(wider.base, arm.changes).optimiser.learning_rate
    assert rate == pytest.approx(10 * own["byol"])
    assert [arm.name for arm in wider.arms][: len(plan.arms)] == [arm.name for arm in plan.arms]
    write_json(folder / "study.json", {**wider.definition, "provenance": {}})
    assert plan_study(rates, StudyOptions(out=folder)).arms == wider.arms
    for factor in ("0", "fast", "true"):
        with pytest.raises(UserError, match="must be a number above 0"):
            plan_study(rates, StudyOptions(out=folder, values=(factor,)))

    out = tmp_path / "methods"
    options = StudyOptions(data=few_digits, out=out, epochs=1, recipes=recipes, rates=(folder,))
    opened = open_grid(study, options)
    chosen = {cell.arm.name: cell.trial.config.optimiser.learning_rate for cell in opened.cells}
    assert chosen["simclr"] == chosen["simclr+divergence"] == pytest.approx(0.3 * own["simclr"])
    assert chosen["byol"] == chosen["byol+divergence"] == pytest.approx(3 * own["byol"])
    again = open_grid(study, StudyOptions(out=out))
    assert [cell.trial.config for cell in again.cells] == [c.trial.config for c in opened.cells]

    # A recipe that changed is tried again in another folder, which comes first.
    later = tmp_path / "later"
    later.mkdir()
    plan = plan_study(rates, dataclasses.replace(options, out=later, rates=()))
    write_json(later / "study.json", {**plan.definition, "provenance": {}})
    write_results(later, plan.definition, [row for row in rows if row["arm"] == "byol"], {})
    options = dataclasses.replace(options, out=tmp_path / "both", rates=(later, folder))
    both = plan_study(study, options)
    chosen = {arm.name: override(both.base, arm.changes) for arm in both.arms}
    assert chosen["byol"].optimiser.learning_rate == own["byol"]
    assert chosen["simclr"].optimiser.learning_rate == pytest.approx(0.3 * own["simclr"])

    # A rate that was chosen for another optimiser or batch is not taken; the next folder has one.
    fields = ("optimiser.weight_decay=0.01", "training.batch_size=128", "training.accumulate=2")
    for changes in zip(fields, strict=True):
        other = tmp_path / changes[0]
        other.mkdir()
        begun = dataclasses.replace(options, out=other, rates=(), changes=changes)
        plan = plan_study(rates, begun)
        write_json(other / "study.json", {**plan.definition, "provenance": {}})
        byol_alone = [row for row in rows if row["arm"] == "byol"]
        write_results(other, plan.definition, byol_alone, {})
        options = dataclasses.replace(options, rates=(other, folder))
        found = plan_study(study, options)
        chosen = {arm.name: override(found.base, arm.changes) for arm in found.arms}
        assert chosen["byol"].optimiser.learning_rate == pytest.approx(3 * own["byol"])
        with pytest.raises(UserError, match="to the end with its settings of today") as caught:
            plan_study(study, dataclasses.replace(options, out=tmp_path / "c", changes=changes))
        assert changes[0].partition("=")[0] in str(caught.value)
    options = dataclasses.replace(options, rates=(later, folder))

    # Of 4 images byol alone has 2 right, with the divergence 3: the same two and one more. Its
    # control has all right.
    labels = torch.tensor([0, 1, 2, 3])
    found = {"byol": [0, 1, 0, 0], "byol+divergence": [0, 1, 2, 0], "byol-control": [0, 1, 2, 3]}
    accuracies = {"alone": 50.0, "with divergence": 75.0, "control": 100.0}
    rows = [
        {
            **{"arm": arm.name, "series": arm.series, "x": arm.x, "seed": 0, "run": arm.name},
            **{"state": "done", "metrics": {MAIN_METRIC: accuracies[arm.series]}},
        }
        for arm in opened.plan.study.arms
        if arm.name != "simclr-control"
    ]

    def find(arm: str, seed: int, metric: str) -> Predictions | None:
        if arm not in found:
            return None
        predicted = torch.tensor(found[arm])
        return Predictions(unpack(pack(labels)), [unpack(pack(predicted))], ())

    costs = {"byol": {"learning_rate": 0.25, "encoder": "resnet18"}}
    results = write_results(out, opened.plan.definition, rows, costs, find)
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert arms["byol"]["against"] is None
    assert arms["byol+divergence"]["against"] == "byol"
    difference = arms["byol+divergence"]["difference"][MAIN_METRIC]
    assert difference["mean"] == 25.0
    assert difference["interval"] is None  # one seed
    images = interval_over_images([[0.0, 0.0, 100.0, 0.0]])
    assert difference["over_images"] == pytest.approx(images)
    assert arms["simclr+divergence"]["difference"][MAIN_METRIC]["over_images"] is None
    lines = (out / "tables.md").read_text().splitlines()
    bounds = ", ".join(map(format_signed, images))
    assert f"| byol | 0.25 | 50.00 | 75.00 | +25.00 [{bounds}] | — | — | — |" in lines
    assert "| simclr |  | 50.00 | 75.00 | +25.00 | — | — | — |" in lines
    below = ", ".join(map(format_signed, interval_over_images([[0.0, 0.0, 0.0, -100.0]])))
    above = ", ".join(map(format_signed, interval_over_images([[0.0, 0.0, 100.0, 100.0]])))
    (row,) = [line for line in lines if line.startswith("| byol | 100.00 | +")]
    assert row == f"| byol | 100.00 | +50.00 [{above}] | -25.00 [{below}] | — | — | — |"
    assert not any(line.startswith("| simclr | 100") for line in lines)  # its control has no run

    more = dataclasses.replace(options, out=tmp_path / "a", recipes=("vicreg", "byol"))
    with pytest.raises(UserError, match="recipe vicreg has no rate there at which all"):
        plan_study(study, more)
    with pytest.raises(UserError, match="with --only the study still holds every recipe"):
        plan_study(study, dataclasses.replace(more, only=("byol",)))
    with pytest.raises(UserError, match="give the folder of a finished study"):
        plan_study(study, dataclasses.replace(options, out=tmp_path / "a", rates=(tmp_path,)))
    write_results(folder, {**plan.definition, "evaluate_on": "test"}, rows, {})
    with pytest.raises(UserError, match="compared on test images"):
        plan_study(study, dataclasses.replace(options, out=tmp_path / "a"))


@pytest.mark.parametrize("later", [[0, 1, 2], [3, 2, 1, 0]])
def test_seeds_with_other_test_images_have_no_interval_over_images(later):
    """Such as runs of another machine, whose file of the same name has other images."""
    first, second = (
        Predictions(np.array(labels), [np.array(labels)], ()) for labels in ([0, 1, 2, 3], later)
    )
    assert estimate_interval([(first, first), (first, first)]) == [0.0, 0.0]
    assert estimate_interval([(first, first), (second, second)]) is None
    assert estimate_interval([(first, second)]) is None


def test_an_image_counts_by_the_mean_over_several_classifiers():
    """Such as those of other draws of labels: here the first is right and the second is not."""
    labels = np.array([0, 1])
    twice = Predictions(labels, [np.array([0, 1]), np.array([1, 0])], ())
    wrong = Predictions(labels, [np.array([1, 0])] * 2, ())
    assert estimate_interval([(twice, wrong)]) == [50.0, 50.0]


def test_recorded_runs_are_arms_of_a_comparison_of_today(tmp_path):
    """As docs/studies.md says, so that nobody trains them again."""
    records = Path(__file__).parents[2] / "results" / "studies" / "comparison-teacher" / "runs"
    names = ["simclr", "best-control", "best", "best-both"]
    for name in names:
        shutil.copytree(records / f"{name}-seed0", tmp_path / "both" / "runs" / f"{name}-seed0")
    options = StudyOptions(
        recipes=tuple(names),
        data="cifar10.npz",
        out=tmp_path / "both",
        train=False,
    )
    results = open_grid(STUDY, options).save()
    assert [cell["arm"] for cell in results["cells"]] == names


def test_the_table_of_costs_names_weak_and_small_views_where_an_arm_has_them(tmp_path):
    records = Path(__file__).parents[2] / "results" / "studies" / "comparison-teacher" / "runs"
    shutil.copytree(records, tmp_path / "study" / "runs")
    options = StudyOptions(
        recipes=("simclr", "best"), data="cifar10.npz", out=tmp_path / "study", train=False
    )
    results = open_grid(STUDY, options).save()
    *_, costs = tabulate_study(results, "")
    names = ["epochs", "views per image", "pixels of a side", "weak views", "samples per step"]
    assert costs.columns == (*names, "steps", "seconds")
    shown = {row.name: [cell.text for cell in row.cells[:4]] for row in costs.rows}
    assert shown == {"simclr": ["200", "2", "24", "0"], "best": ["200", "2", "24", "1"]}
    file = records.parents[1] / "summit-arms" / "results.json"
    *_, costs = tabulate_study(json.loads(file.read_text()), "")
    places = [costs.columns.index(name) for name in ("weak views", "small views")]
    turned = next(row for row in costs.rows if row.name == "rotation")
    assert [turned.cells[place].text for place in places] == ["1", "4"]
