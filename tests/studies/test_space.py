"""The space of a search: what is written is what is searched, and what cannot be is refused."""

import math
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepbregman.config import Config, load_recipe, override
from deepbregman.errors import UserError
from deepbregman.studies.definition import Search, SearchOptions, StudyOptions
from deepbregman.studies.search_plan import (
    Choice,
    Interval,
    check_search,
    name_search_folder,
    parse_space,
    plan_search,
    search_of_study,
)

BASE = load_recipe("paper")
positive = st.floats(1e-6, 1e6)


@given(low=positive, high=positive, log=st.booleans(), seed=st.integers(0, 99))
def test_an_interval_gives_configurations_between_its_ends(low, high, log, seed):
    words = f"divergence.sigma={low!r}:{high!r}{':log' * log}"
    if low >= high:
        with pytest.raises(UserError, match="from low to high"):
            parse_space([words], BASE)
        return
    (dimension,) = parse_space([words], BASE)
    assert dimension == Interval("divergence.sigma", low, high, log)
    assert parse_space([str(dimension)], BASE) == (dimension,)  # writing is reading backwards
    trial = _study(seed).ask()
    value = dimension.suggest(trial)
    assert isinstance(value, float)
    assert low <= value <= high
    assert override(BASE, {"divergence.sigma": value}).divergence.sigma == value


@given(ends=st.lists(st.integers(1, 10**6), min_size=2, max_size=2, unique=True))
def test_whole_numbers_stay_whole(ends):
    low, high = sorted(ends)
    (dimension,) = parse_space([f"divergence.num_subnetworks={low}:{high}:log"], BASE)
    value = dimension.suggest(_study(0).ask())
    assert type(value) is int
    assert low <= value <= high
    assert str(dimension) == f"divergence.num_subnetworks={low}:{high}:log"


@given(values=st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True))
def test_a_choice_gives_its_values(values):
    words = f"divergence.num_subnetworks={','.join(map(str, values))}"
    (dimension,) = parse_space([words], BASE)
    assert dimension == Choice("divergence.num_subnetworks", tuple(values))
    assert parse_space([str(dimension)], BASE) == (dimension,)
    assert dimension.suggest(_study(1).ask()) in values


@settings(max_examples=20)
@given(text=st.text(max_size=30))
def test_any_text_is_read_or_refused_in_words(text):
    for word in (text, f"divergence.sigma={text}", f"{text}=1:2", f"divergence.kernel={text}"):
        try:
            space = parse_space([word], BASE)
        except UserError:
            continue
        for dimension in space:
            for end in dimension.ends:
                assert isinstance(override(BASE, {dimension.field: end}), Config)


def _study(seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))


@pytest.mark.parametrize(
    ("word", "middle"),
    [("objective.weight=0.01:100:log", 1.0), ("divergence.num_subnetworks=1:10000:log", 100)],
)
def test_logarithmic_intervals_are_drawn_evenly_in_the_logarithm(word, middle):
    (dimension,) = parse_space([word], BASE)
    study = _study(0)
    values = [dimension.suggest(study.ask()) for _ in range(400)]
    below = sum(float(value) < middle for value in values) / len(values)
    assert below == pytest.approx(0.5, abs=0.1)  # 0.01 of them if it were even in the value


def test_booleans_and_words_and_spaces_between():
    words = ["divergence.learn_sigma=true,false", "divergence.kernel=gaussian, inverse"]
    space = parse_space(words, BASE)
    assert [dimension.ends for dimension in space] == [(True, False), ("gaussian", "inverse")]
    assert str(space[0]) == "divergence.learn_sigma=true,false"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the space is empty"),
        (["divergence.sigma"], r"write field=LOW:HIGH"),
        (["divergence.sgima=1:2"], r"no such field; did you mean 'divergence\.sigma'"),
        (["sigma=1:2"], r"there is no such field; did you mean 'divergence\.sigma'\?"),
        (["divergense.sigma=1:2"], r"did you mean 'divergence\.sigma'"),
        (["divergence.sigma=1:2", "divergence.sigma=3:4"], "twice"),
        (["divergence.sigma=1:2:ln"], r"write LOW:HIGH, or LOW:HIGH:log"),
        (["divergence.sigma=1:2:log:3"], r"write LOW:HIGH, or LOW:HIGH:log"),
        (["divergence.sigma=a:2"], "the ends must be numbers"),
        (["divergence.sigma=2:1"], "from low to high"),
        (["divergence.sigma=1:inf"], "finite"),
        (["divergence.sigma=nan:1"], "finite"),
        (["divergence.usage_bonus=0:1:log"], "needs a LOW above 0"),
        (["divergence.sigma=0:1"], r"reaches divergence\.sigma=0\.0, where .*above 0"),
        (["divergence.num_subnetworks=0.5:9"], "whole numbers"),
        (["divergence.num_subnetworks=0:9"], "1 or more"),
        (["divergence.kernel=gaussian,gauss"], "did you mean 'gaussian'"),
        (["divergence.kernel=gaussian"], "at least two values"),
        (["divergence.kernel=gaussian,gaussian"], "each once"),
        (["divergence.kernel=gaussian,inverse,gaussian"], "each once"),
        (["seed=0:99"], "keeps to one seed"),
        (["training.knn_every=1:9"], "training does not depend on it"),
        (["data.holdout=0.1:0.5"], "one set of images"),
        (["views.crop_area=0.1:0.5"], "is a list, and only single values"),
        (["objective.weight=0:1", "divergence.weight=0:1"], "are both 0"),
        (
            [
                *("objective.weight=0:1", "divergence.weight=0:1", "divergence.sigma=0.1:1"),
                *("divergence.dropout=0.1:0.5", "divergence.kernel=gaussian,inverse"),
            ],
            "are both 0",
        ),
        (["divergence.kernel=[1],[2]"], "must be a number, text or true"),
    ],
)
def test_errors_name_the_field_and_the_rule(words, message):
    with pytest.raises(UserError, match=message):
        parse_space(words, BASE)


def test_many_dimensions_are_checked_one_by_one():
    names = ("norm", "activation", "kernel", "pairs")
    choices = ("output,hidden,none", "none,relu", "gaussian,inverse,sqrt,linear", "views,all")
    words = [f"divergence.{n}={c}" for n, c in zip(names, choices, strict=True)]
    words += [f"divergence.hidden={','.join(map(str, range(1, 40)))}", "divergence.dropout=0:2"]
    assert math.prod((3, 2, 4, 2, 39, 2)) > 1024
    with pytest.raises(UserError, match=r"reaches divergence\.dropout=2\.0, where"):
        parse_space(words, BASE)


def test_a_chance_of_all_views_can_be_searched():
    (dimension,) = parse_space(["views.solarise=0.0:0.5"], load_recipe("digits"))
    assert dimension == Interval("views.solarise", 0.0, 0.5)


def test_what_training_does_not_use_is_not_searched():
    best = load_recipe("best")
    for name in ("divergence.sigma", "divergence.temperature"):
        with pytest.raises(UserError, match=f"{name}, which .* divergence.compare is 'match'"):
            parse_space([f"{name}=0.1:5:log"], best)
    with pytest.raises(UserError, match=r"divergence.hidden, which .* divergence.source is 'bank'"):
        parse_space(["divergence.hidden=8:64"], best)
    both = ["divergence.sigma=0.1:5:log", "divergence.compare=match,contrast"]
    with pytest.raises(UserError, match=r"divergence.sigma, .* divergence.kernel is 'negative'"):
        parse_space(both, best)
    assert len(parse_space([*both, "divergence.kernel=negative,gaussian"], best)) == 3
    with pytest.raises(UserError, match=r"optimiser.momentum, which .* optimiser.name is 'adam'"):
        parse_space(["optimiser.momentum=0.8:0.95"], load_recipe("paper"))
    either = ["optimiser.momentum=0.8:0.95", "optimiser.name=adam,sgd"]
    assert len(parse_space(either, load_recipe("paper"))) == 2
    control = override(best, {"divergence.info_nce": 1.0})
    assert parse_space(["divergence.temperature=0.1:0.5"], control)
    simclr, weight = load_recipe("simclr"), "divergence.weight=1,0"  # the recipe has 0
    assert len(parse_space([weight, "divergence.smoothing=0.1:0.5"], simclr)) == 2
    with pytest.raises(
        UserError, match=r"divergence.sigma, which .* divergence.compare is 'match'"
    ):
        parse_space([weight, "divergence.sigma=1:2"], simclr)


def test_options_of_a_search_reach_its_plan():
    words = ("training.batch_size=16,64,32", "divergence.sigma=0.1:5:log")
    plan = plan_search("digits", SearchOptions(space=words, prune=False), None)
    assert plan.definition["prune"] is False
    assert (plan.definition["trials"], plan.definition["sampler"]) == (40, "gp")
    assert plan.largest_batch.training.batch_size == 64
    assert plan.base.data.holdout == 0.1
    paper = plan_search("paper", SearchOptions(space=("divergence.sigma=0.1:5:log",)), None)
    assert paper.recipe.data.holdout == 0.0
    assert paper.base.data.holdout == 0.1  # no trial trains on what it is evaluated on
    kept = SearchOptions(space=words, changes=("data.holdout=0.25",))
    assert plan_search("digits", kept, None).base.data.holdout == 0.25
    words = ("training.accumulate=2:6", *words)
    largest = plan_search("digits", SearchOptions(space=words), None).largest_batch
    assert (largest.training.accumulate, largest.training.batch_size) == (6, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "knn"}, "objective is 'linear' there, 'knn' here"),
        ({"sampler": "tpe"}, "sampler is 'gp' there, 'tpe' here"),
        ({"prune": False}, "prune is True there, False here"),
        ({"space": ("divergence.sigma=0.1:6:log",)}, "space is .* there, .* here"),
        ({"epochs": 3}, "training.epochs is 2 there, 3 here"),
        ({"changes": ("seed=3",)}, "seed is 7 there, 3 here"),
    ],
)
def test_trials_of_one_search_can_be_compared(changes, words):
    """An accuracy of kNN among those of linear classifiers would be the best or the worst."""
    space = ("divergence.sigma=0.1:5:log",)
    asked = SearchOptions(space=space, epochs=2, changes=("seed=7",))
    began = plan_search("digits", asked, None).definition
    for recipe in (None, "digits"):
        with pytest.raises(UserError, match=words):
            plan_search(recipe, SearchOptions(**changes), began)
    more = plan_search(None, SearchOptions(trials=50, space=space), began)
    assert more.definition == {**began, "trials": 50}
    assert (more.recipe.seed, more.recipe.training.epochs) == (7, 2)


def test_a_search_without_a_folder_is_named_after_its_recipe(tmp_path):
    asked = SearchOptions()
    assert name_search_folder("configs/mine.toml", asked) == Path("studies/tune-mine")
    assert name_search_folder(None, asked) == Path("studies/tune-search")
    assert name_search_folder("mine", SearchOptions(out=tmp_path)) == tmp_path


def test_options_of_a_study_reach_its_search(tmp_path):
    entry = Search("s", "S?", ("divergence.sigma=0.1:5:log",), trials=12, recipe="paper")
    given = {"data": "digits", "epochs": 3, "changes": ("seed=7",), "out": tmp_path}
    recipe, options = search_of_study(entry, StudyOptions(**given, accelerator="cpu"))
    expected = SearchOptions(space=entry.space, trials=12, **given, accelerator="cpu")
    assert (recipe, options) == ("paper", expected)
    recipe, options = search_of_study(entry, StudyOptions(recipe="best", trials=5, out=tmp_path))
    assert (recipe, options.trials) == ("best", 5)
    _, none = search_of_study(entry, StudyOptions(trials=0, out=tmp_path))
    with pytest.raises(UserError, match="--trials 0: there must be at least 1"):
        check_search("paper", none)
    (tmp_path / "search.db").touch()  # it has begun, and knows its recipe and its trials
    recipe, options = search_of_study(entry, StudyOptions(out=tmp_path))
    assert (recipe, options.trials) == (None, None)
    for option, name in (
        *(({"seeds": 1}, "seeds"), ({"seeds": 3}, "seeds"), ({"values": ("1",)}, "values")),
        *(({"evaluate_on": "holdout"}, "evaluate-on"), ({"rates": (tmp_path,)}, "rates")),
        ({"train": False}, "no-train"),
    ):
        with pytest.raises(UserError, match=f"study s is a search and takes no --{name};"):
            search_of_study(entry, StudyOptions(out=tmp_path, **option))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    options = SearchOptions(space=("divergence.sigma=0.1:5:log",), data="digits", out=tmp_path)
    (tmp_path / "locks").mkdir()  # another worker begins the search now
    check_search("digits", options)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="exists and holds no search: choose another folder"):
        check_search("digits", options)
    with pytest.raises(UserError, match=r"thesis\.tex"):
        check_search("digits", replace(options, out=tmp_path / "thesis.tex"))


@pytest.mark.parametrize("is_begun", [False, True])
def test_images_that_are_not_there_are_refused_at_once(is_begun, tmp_path):
    space = ("divergence.sigma=0.1:5:log",)
    asked = SearchOptions(space=space, data=str(tmp_path / "none.npz"), out=tmp_path / "out")
    if is_begun:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "search.db").touch()
    with pytest.raises(UserError, match=r"none\.npz"):
        check_search("digits", asked)
    check_search("digits", replace(asked, data="digits"))
