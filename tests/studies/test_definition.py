"""A study is data, and adding one is adding a short file."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from deepbregman.config import load_recipe, override, recipes
from deepbregman.errors import UserError
from deepbregman.studies import catalogue as package
from deepbregman.studies.catalogue import find_study, load_catalogue
from deepbregman.studies.definition import (
    Arm,
    Search,
    Study,
    StudyOptions,
    build_config,
    check_arms,
    join_changes,
    list_by_value,
    read_changes,
    read_value,
)
from deepbregman.studies.grid import plan_cells
from deepbregman.studies.grid_plan import plan_study, select_usable_arms

ENTRIES = load_catalogue()
GRIDS = {name: entry for name, entry in ENTRIES.items() if isinstance(entry, Study)}


def test_the_paper_s_ablations_are_there():
    wanted = {"kappa", "psi", "augmentations", "sigma-lambda", "subnetwork", "encoder-depth"}
    assert wanted <= set(ENTRIES)
    assert all(entry.title for entry in ENTRIES.values())


def test_a_study_is_a_short_file_that_is_found_by_being_there(tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text(
        "from deepbregman.studies.definition import Study, make_arms\n"
        "STUDY = Study('my-own', 'Mine?', make_arms('objective.temperature', (0.1, 0.2)),\n"
        "              'tau', 'line')\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    assert find_study("my-own").title == "Mine?"


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("recipe", ["paper", "authors", "best", "digits", "paper-imagenet"])
def test_every_arm_is_a_configuration(name, recipe):
    study, base = GRIDS[name], load_recipe(recipe)
    arms = select_usable_arms(study.arms, base)
    if name == "teacher" and base.teacher is None:  # its parts can only be changed where they are
        with pytest.raises(UserError, match=r"teacher|bank"):
            plan_cells(arms, base, (3,), Path("runs"))
        return
    names = [arm.name for arm in study.arms]
    assert len(set(names)) == len(names)
    assert study.reference is None or study.reference in names
    cells = plan_cells(arms, base, (3,), Path("runs"))
    assert [cell.arm for cell in cells] == list(arms)
    assert all(cell.trial.config.seed == 3 for cell in cells)


def test_the_teacher_s_parts_have_sets_and_both_ways_of_centring():
    base = load_recipe("best")
    configs = {arm.name: override(base, arm.changes) for arm in GRIDS["teacher"].arms}
    pair = configs["teacher-view-two-as-a-set"]
    assert (pair.weak_views.num_views, pair.divergence.sets) == (2, "rest")
    for way in ("mean", "sinkhorn"):
        part = configs[f"subnetworks-prototypes-{way}"].divergence
        assert (part.source, part.centring) == ("prototypes", way)
    weights = [configs[f"term-{name}"].divergence.weight for name in ("both", "infonce-instead")]
    assert weights == [1.0, 0.0]


def test_the_number_of_subnetworks_is_varied_in_the_bank_too(tmp_path):
    values = ("256", "1024", "4096", "16384")
    options = StudyOptions(recipe="best", values=values, data="digits", out=tmp_path / "out")
    plan = plan_study(GRIDS["kappa"], options)
    assert [arm.name for arm in plan.chosen] == ["none", *values]
    banks = [override(plan.base, arm.changes).divergence for arm in plan.chosen[1:]]
    assert [(bank.source, str(bank.num_subnetworks)) for bank in banks] == [
        ("bank", value) for value in values
    ]


def test_what_the_paper_printed():
    """The rows of its tables, typed again from the text."""
    kappa = {part.series: part.values for part in GRIDS["kappa"].published}
    numbers = ("5", "20", "50", "100", "200", "500", "1000")
    ours = (85.2, 88.9, 91.0, 92.6, 92.8, 89.2, 85.5)
    deep = (71.9, 77.8, 79.4, 80.0, 77.4, 74.1, 70.8)
    assert kappa["the paper"] == dict(zip(numbers, ours, strict=True))
    assert kappa["Deep Divergence (supervised)"] == dict(zip(numbers, deep, strict=True))
    trained = [str(arm.x) for arm in GRIDS["kappa"].choose_arms(()) if arm.name != "none"]
    assert trained == list(numbers)
    kernels = {arm.x: arm.beyond for arm in GRIDS["psi"].arms if arm.name != "none"}
    paper = dict.fromkeys(("gaussian", "inverse", "sqrt", "linear", "arccot"), False)
    assert kernels == {**paper, "negative": True}
    search = ENTRIES["sigma-lambda"]
    assert isinstance(search, Search)
    assert search.published == {"divergence.sigma": 1.5, "objective.weight": 5.0}


def test_published_values_belong_to_an_arm_or_a_number():
    for study in GRIDS.values():
        places = {str(arm.x) for arm in study.arms} | {*study.recipes}
        numeric = study.arms and all(isinstance(arm.x, int | float) for arm in study.arms)
        for part in study.published:
            assert part.source
            for x in part.values:
                assert numeric or x in places, (study.name, x)


def test_recipes_of_one_value_are_named_once_and_many_are_the_others():
    assert list_by_value({"a": "1", "b": "2"}) == "1 in a, 2 in b"
    assert list_by_value({"a": "1", "b": "2", "c": "1"}) == "1 in a and c, 2 in b"
    many = dict.fromkeys("abcde", "24 px")
    assert list_by_value({**many, "f": "32 px"}) == "32 px in f, 24 px in the others"


def test_arms_that_come_to_the_same_share_a_run():
    study, base = GRIDS["subnetwork"], load_recipe("paper")
    cells = plan_cells(study.arms, base, (0,), Path("runs"))
    shared = [cell.arm.name for cell in cells if cell.trial.name == "recipe-seed0"]
    same = ["norm-output", "activation-linear", "hidden-32", "smoothing-hard", "pairs-views"]
    assert shared == ["recipe", *same, "temperature-1.0"]
    assert len({cell.trial.folder for cell in cells}) == 15


def test_progressive_removal_leaves_out_steps_that_the_recipe_does_not_have():
    study = GRIDS["augmentations"]
    cifar = select_usable_arms(study.arms, load_recipe("paper"))
    steps = [arm.x for arm in cifar if arm.series == "SimCLR"]
    assert steps == ["all", "no greyscale", "no colour", "crop only", "all but crop"]
    imagenet = select_usable_arms(study.arms, load_recipe("paper-imagenet"))
    assert "crop and blur" in [arm.x for arm in imagenet]
    removed = [set(arm.changes["views.without"]) for arm in imagenet if arm.series == "SimCLR"]
    progressive = removed[:-1]
    assert all(before < after for before, after in itertools.pairwise(progressive))


def test_other_values_of_the_one_field():
    study = GRIDS["encoder-depth"].with_values(("small", "resnet18"))
    names = [arm.name for arm in study.arms]
    assert names == ["simclr-small", "simclr-resnet18", "divergence-small", "divergence-resnet18"]
    assert study.arms[0].changes == {"divergence.weight": 0.0, "encoder.name": "small"}
    kappa = GRIDS["kappa"].with_values((3, 7))
    assert [arm.name for arm in kappa.choose_arms(())] == ["none", "3", "7"]
    assert [arm.x for arm in kappa.choose_arms(())] == [0, 3, 7]
    deep = kappa.choose_arms(("deep-max-triplet-7",))[0]
    assert deep.supervised
    assert deep.changes["objective.num_subnetworks"] == 7
    kappa = GRIDS["kappa"].with_values((7, 20, 150))  # of these, 7 is not in the paper
    assert [arm.beyond for arm in kappa.choose_arms(())] == [True, True, False, False]
    assert all(arm.beyond for arm in kappa.arms if arm.supervised)
    twice = GRIDS["kappa"].with_values((5, 20, 5))  # each value is an arm once
    assert [arm.name for arm in twice.choose_arms(())] == ["none", "5", "20"]
    with pytest.raises(UserError, match="subnetwork takes no --values"):
        GRIDS["subnetwork"].with_values((1,))


def test_names_with_slashes_do_not_leave_the_folder():
    arm = Arm("../../x y", {}, "x")
    (cell,) = plan_cells([arm], override(load_recipe("digits"), {}), (0,), Path("runs"))
    assert cell.trial.folder == Path("runs/.._.._x_y-seed0")


def test_what_is_asked_for_now_stands_above_what_a_study_began_with():
    """Then the difference is seen and refused; otherwise the option would be passed over."""
    now, kept = {"optimiser.weight_decay": 0.2}, {"optimiser.weight_decay": 0.1, "seed": 3}
    began = override(load_recipe("digits"), kept)
    for recipe in (None, "digits"):
        config = build_config(recipe, now, began, kept)
        assert (config.optimiser.weight_decay, config.seed) == (0.2, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]), ("lars", "lars"), ('"3"', "3")],
)
def test_values_are_read_as_toml_has_them(text, value):
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


@pytest.mark.parametrize("word", ["training.epochs", "=3", "training.epochs="])
def test_a_change_needs_a_field_and_a_value(word):
    with pytest.raises(UserError, match=r"write it as field=value"):
        read_changes([word])


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"epochs": 3}, "training.epochs=4", "--epochs 3 and --set training.epochs=4 contradict"),
        ({"data": "a.npz"}, "data.source=b.npz", "--data a.npz and --set data.source=b.npz"),
    ],
)
def test_an_option_and_a_field_that_say_otherwise_are_refused(options, changes, words):
    with pytest.raises(UserError, match=words):
        join_changes((changes,), **options)


def test_an_option_and_a_field_may_say_the_same():
    options = {"data": "a.npz", "epochs": 3, "image_size": None}
    both = join_changes(("training.epochs=3", "data.source=a.npz"), **options)
    assert both == join_changes((), **options) == {"training.epochs": 3, "data.source": "a.npz"}


@pytest.mark.parametrize(
    ("recipe", "sides"),
    [("best", [32, 28, 24, 20, 16]), ("paper-imagenet", [224, 196, 168, 140, 112])],
)
def test_views_of_a_study_are_shares_of_the_images(recipe, sides):
    study, base = GRIDS["view-size"], load_recipe(recipe)
    for series in ("SimCLR", "with divergence"):
        arms = [arm for arm in study.arms if arm.series == series]
        assert [override(base, arm.changes).view_size for arm in arms] == sides
    assert all(arm.beyond for arm in study.arms)


@pytest.mark.parametrize("name", ["view-size", "encoder-depth"])
def test_a_recipe_without_the_divergence_has_no_arms_with_it(name):
    base = load_recipe("simclr")
    arms = select_usable_arms(GRIDS[name].with_values(("resnet18",)).arms, base)
    assert [arm.series for arm in arms] == ["SimCLR"]


def test_only_simclr_without_the_divergence_is_called_simclr(tmp_path):
    """A figure of BYOL, alone and with the divergence, named the first one SimCLR."""
    changes = {"data": "digits", "changes": ("divergence.weight=1",), "out": tmp_path / "new"}
    for name, recipe, arm, series in (
        ("kappa", "byol", "none", "alone"),
        ("augmentations", "byol", "alone-all", "alone"),
        ("augmentations", "simclr", "simclr-all", "SimCLR"),
    ):
        first = plan_study(GRIDS[name], StudyOptions(recipe=recipe, **changes)).arms[0]
        assert (first.name, first.series) == (arm, series)
    compared = GRIDS["comparison"].with_recipes({n: load_recipe(n) for n in ("simclr", "byol")})
    assert [arm.series for arm in compared.arms] == ["SimCLR", "alone"]


def test_no_note_says_how_an_interval_is_made():
    """That depends on what runs have kept, so the caption of each table says it."""
    assert not [study.name for study in GRIDS.values() if "interval" in study.note]


@pytest.mark.parametrize("first", sorted(recipes()))
def test_arms_are_their_recipes_whichever_is_the_reference(first):
    # A field that both recipes have with the same value is no difference; another method brings
    # its own default of it.
    configs = {name: replace(load_recipe(name), seed=0) for name in (first, *recipes())}
    bare = Study("bare", "Bare", (), "pairs")
    for name, config in configs.items():
        if name != first and config != configs[first]:
            pair = {first: configs[first], name: config}
            made = bare.with_recipes(pair).arms[1].changes
            assert override(configs[first], made) == config, name


@pytest.mark.parametrize(("name", "field"), [("psi", "kernel"), ("subnetwork", "norm")])
def test_arms_that_would_all_train_the_same_are_refused(name, field):
    chosen = GRIDS[name].choose_arms(())
    check_arms(GRIDS[name], chosen, load_recipe("paper"))
    with pytest.raises(UserError, match=f"varies divergence.{field}, which training does not use"):
        check_arms(GRIDS[name], chosen, load_recipe("best"))


def test_an_arm_with_the_divergence_needs_a_recipe_with_it():
    """It would be trained without the divergence and shown as one with it."""
    study = GRIDS["augmentations"]
    check_arms(study, study.choose_arms(("simclr-*",)), load_recipe("simclr"))
    with pytest.raises(UserError, match=r"arm divergence-all .* divergence.weight is 0 in this"):
        check_arms(study, study.choose_arms(("divergence-all",)), load_recipe("simclr"))


def test_the_arms_of_the_teacher_change_what_is_used():
    check_arms(GRIDS["teacher"], GRIDS["teacher"].arms, load_recipe("best"))
