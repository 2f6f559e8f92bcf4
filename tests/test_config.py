import copy
import dataclasses
import functools
import inspect
import json
import math
import re
import statistics
import tomllib
from datetime import UTC, date, datetime
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepbregman.commands.pretrain_options import ALIASES
from deepbregman.config import (
    METHODS,
    OPTIONAL,
    Config,
    DivergenceSettings,
    OptimiserSettings,
    Section,
    ViewSettings,
    differing_fields,
    from_dict,
    from_toml,
    load_recipe,
    override,
    recipes,
    to_dict,
    to_toml,
)
from deepbregman.config.methods import SimCLRSettings
from deepbregman.config.rules import Name, Range
from deepbregman.errors import UserError
from deepbregman.studies.definition import load_arm

HINTS = get_type_hints(Config)
SECTIONS: dict[str, type[Any]] = {
    name: hint
    for name, hint in (HINTS | {"objective": SimCLRSettings}).items()
    if isinstance(hint, type) and issubclass(hint, Section)
}
FIELDS = [
    (section, field.name) for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)
]
NAMES = [
    *("auto", "authors", "best", "cifar10-fast", "digits", "paper", "paper-imagenet", "simclr"),
    *("best-imagenet", "cifar10-summit", "simclr-imagenet"),
    *("byol", "dino", "moco-v2", "moco-v2plus", "moco-v3", "nnclr", "ressl", "sce"),
    *("simsiam", "swav"),
    *("amdim", "barlow-twins", "cmc", "cpc", "deep-divergence", "dim", "instdisc", "pirl"),
    *("simclr-v2", "ssl-hsic", "supcon", "supervised", "vicreg", "wmse"),
]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


def values(hint: Any, rule: Range | None = None) -> st.SearchStrategy[Any]:
    """Every valid value of a field, by its annotation."""
    rule = rule or Range()
    if get_origin(hint) is Annotated:
        names = [part for part in hint.__metadata__ if isinstance(part, Name)]
        if names:
            return st.sampled_from([*names[0].known, f"{names[0].prefix}x"])
        rules = [part for part in hint.__metadata__ if isinstance(part, Range)]
        return values(get_args(hint)[0], rules[0] if rules else rule)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is UnionType:
        return st.one_of(values(kind, rule) for kind in get_args(hint))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return st.lists(values(items[0], rule), max_size=3).map(tuple)
        parts = st.tuples(*(values(item, rule) for item in items))
        return parts.map(lambda part: tuple(sorted(part))) if rule.increasing else parts
    if hint is float:
        low, exclusive = (rule.above, True) if rule.above > rule.low else (rule.low, False)
        return st.floats(
            max(low, -1e30),
            min(rule.high, 1e30),
            exclude_min=exclusive,
            allow_nan=False,
            allow_infinity=False,
        )
    if hint is int:
        return st.integers(int(rule.low), int(min(rule.high, 2**62)))
    return {bool: st.booleans(), str: TEXT}[hint]


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A valid configuration, the rules between fields met by repair."""
    tables: dict[str, dict[str, Any]] = {
        section: {
            name: draw(values(hint))
            for name, hint in get_type_hints(cls, include_extras=True).items()
            if get_origin(hint) is not ClassVar
        }
        for section, cls in SECTIONS.items()
    }
    views, optimiser = tables["views"], tables["optimiser"]
    if not tables["encoder"]["name"].startswith("resnet"):
        tables["encoder"]["stem"] = "auto"
    tables["encoder"]["weights"] = f"runs/{tables['encoder']['weights']}"
    views["jitter"] = (*views["jitter"][:3], min(views["jitter"][3], 0.5))
    views["num_views"] = max(views["num_views"], 2)
    for name in ("blur", "solarise"):
        if isinstance(views[name], tuple):
            views["num_views"] = 3
            views[name] = (*views[name], 0.5, 0.0, 1.0)[:3]
    views["relative_size"] = max(views["relative_size"], 4 / tables["data"]["image_size"])
    if optimiser["schedule"] == "step":
        optimiser["milestones"] = optimiser["milestones"] or (7,)
        tables["training"]["epochs"] = max(optimiser["milestones"]) + draw(st.integers(1, 9))
    else:
        optimiser["milestones"] = ()
    divergence = tables["divergence"] | {"source": "learned", "compare": "contrast"}
    tables["divergence"] = divergence | {"info_nce": 0.0, "target_smoothing": 0.0}
    if tables["objective"]["weight"] == 0.0 == tables["divergence"]["weight"]:
        tables["divergence"]["weight"] = 0.5
    parts = {section: SECTIONS[section](**table) for section, table in tables.items()}
    return Config(seed=draw(st.integers(0, 2**32 - 1)), **parts)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)  # beyond floats, too
    | st.floats()
    | TEXT
    | st.sampled_from(["cifar10", "step", "resnet50", "1", "true", "nan", "\udce9"])
    | st.just(date(2020, 1, 1))
    | st.just(datetime(2020, 1, 1, tzinfo=UTC))
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def message(tables: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        from_dict(tables)
    return str(caught.value)


@settings(max_examples=60)
@given(configs())
@example(Config())
def test_toml_round_trip(config):
    read = from_toml(to_toml(config), "test")
    assert read == config
    assert repr(read) == repr(config)  # types and signs of zero too
    assert from_dict(to_dict(config)) == config
    assert override(config, {}) == config


def test_every_field_has_a_sentence_under_it():
    ours = [cls for cls in METHODS.values() if cls.__module__.startswith("deepbregman.")]
    assert len(ours) > 20
    read = functools.cache(inspect.getsource)  # which parses the whole file
    for cls in {*SECTIONS.values(), *ours}:
        bases = [base for base in cls.__mro__ if issubclass(base, Section) and base is not Section]
        for field in dataclasses.fields(cls):
            # A field that is declared again may leave the sentence to its base.
            words = rf'\n    {field.name}: (?:(?!\n    \w).)*?\n    """([^"]*)\."""'
            found = [re.search(words, read(base), re.DOTALL) for base in bases]
            assert any(found), (cls, field.name)


def test_short_options_are_those_of_the_fields():
    found = {
        alias.removeprefix("--").replace("-", "_"): f"{section}.{name}"
        for section, cls in SECTIONS.items()
        for name, hint in get_type_hints(cls, include_extras=True).items()
        for rule in getattr(hint, "__metadata__", ())
        for alias in getattr(rule, "aliases", None) or ()
    }
    assert found == ALIASES


def test_from_dict_leaves_its_argument_alone():
    tables = to_dict(Config())
    before = copy.deepcopy(tables)
    from_dict(tables)
    assert tables == before


def test_what_is_left_out_takes_its_default():
    assert from_dict({}) == Config()
    config = from_dict({"training": {"epochs": 3}})
    assert config == dataclasses.replace(
        Config(), training=dataclasses.replace(Config().training, epochs=3)
    )


def test_parts_have_the_defaults_of_a_run():
    """``Views(32)`` in Python makes the views of a run that sets nothing."""
    from deepbregman import BregmanNetwork, Views, divergence_loss, nt_xent

    for part, section in (
        (Views, ViewSettings),
        (BregmanNetwork, DivergenceSettings),
        (divergence_loss, DivergenceSettings),
        (nt_xent, SimCLRSettings),
    ):
        names = {field.name: field.default for field in dataclasses.fields(section)}
        options = inspect.signature(part).parameters
        # None leaves a step out, which a run says in its own way.
        found = {name: options[name].default for name in names if name in options}
        found = {name: value for name, value in found.items() if value is not None}
        assert found, part
        assert found == {name: names[name] for name in found}, part


# Recipes


def test_the_recipes_are_these():
    assert sorted(recipes()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_complete_and_opens_with_its_command(name):
    text = recipes()[name]
    tables = tomllib.loads(text)
    config = load_recipe(name)
    for section in tables.keys() - {"seed"}:
        fields = dataclasses.fields(getattr(config, section))
        assert list(tables[section]) == [field.name for field in fields]
    assert set(HINTS) - set(OPTIONAL) <= set(tables) <= set(HINTS)
    assert to_dict(config) == tables
    header = text.split("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in header)
    commands = [line for line in header if line.startswith("# Command:")]
    assert len(commands) == 1
    words = commands[0].removeprefix("# Command:").split()
    assert words[:3] == ["deepbregman", "pretrain", name]
    assert len(header) > 1


PAPER = {
    "data.image_size": 32,
    "views.num_views": 2,
    "views.crop_area": (0.2, 1.0),
    "views.crop_aspect": (3 / 4, 4 / 3),
    "views.flip": 0.5,
    "views.jitter": (0.4, 0.4, 0.4, 0.1),
    "views.jitter_probability": 0.8,
    "views.greyscale": 0.2,
    "views.blur": 0.0,
    "views.rotation": 0.0,
    "views.without": (),
    "encoder.projection_hidden": 1024,
    "encoder.projection_norm": True,
    "encoder.embedding": 128,
    "objective.loss": "nt_xent",
    "objective.temperature": 0.1,
    "objective.weight": 5.0,
    "objective.sets": "none",
    "divergence.weight": 1.0,
    "divergence.num_subnetworks": 100,
    "divergence.hidden": 32,
    "divergence.norm": "output",
    "divergence.activation": "none",
    "divergence.dropout": 0.0,
    "divergence.kernel": "gaussian",
    "divergence.sigma": 1.5,
    "divergence.pairs": "views",
    "divergence.temperature": 1.0,  # no tau_div
    "divergence.smoothing": 0.0,
    "divergence.usage_bonus": 0.0,
    "divergence.sets": "none",
    "divergence.warmup_epochs": 0.0,
    "optimiser.name": "adam",
    "optimiser.learning_rate": 0.005,
    "optimiser.betas": (0.5, 0.999),
    "optimiser.weight_decay": 1e-4,
    "optimiser.schedule": "constant",
    "optimiser.milestones": (),
    "training.batch_size": 512,
    "training.epochs": 400,
}
PAPER_IMAGENET = {
    **PAPER,
    "data.image_size": 224,
    "views.crop_area": (0.08, 1.0),
    "views.jitter": (0.8, 0.8, 0.8, 0.2),
    "views.blur": 0.5,
    "views.blur_sigma": (0.1, 2.0),
    "optimiser.learning_rate": 0.003,
    "optimiser.schedule": "step",
    "optimiser.milestones": (120, 240),
    "optimiser.step_factor": 0.1,
    "training.batch_size": 256,
}
AUTHORS = {
    "objective.loss": "nt_xent",
    "objective.temperature": 0.1,
    "objective.weight": 1.0,
    "divergence.weight": 1.0,
    "divergence.norm": "none",
    "divergence.activation": "relu",
    "divergence.dropout": 0.2,
    "divergence.normalise_input": True,
    "divergence.pairs": "all",
    "divergence.temperature": 0.1,
    "divergence.kernel": "gaussian",
    "divergence.sigma": 0.9,
    "divergence.smoothing": 0.0,
    "optimiser.name": "adam",
    "optimiser.learning_rate": 1e-3,
    "optimiser.betas": (0.9, 0.999),
    "optimiser.weight_decay": 1e-6,
    "optimiser.schedule": "cosine",
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("paper", PAPER),
        ("paper-imagenet", PAPER_IMAGENET),
        ("authors", AUTHORS),
    ],
)
def test_recipe_has_the_numbers_of_its_source(name, expected):
    config = load_recipe(name)
    found = {
        key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in expected
    }
    assert found == expected


RESULTS = Path(__file__).parents[1] / "results"
MEASURED = {
    "simclr": "studies/comparison-cifar10/runs/simclr-seed0",
    "best": "studies/comparison-teacher/runs/best-seed0",
    "cifar10-fast": "cifar10-race-50/seed0",
    "cifar10-summit": "cifar10-summit",
}


@pytest.mark.parametrize(
    ("name", "file", "trial", "told"),
    [
        ("simclr", "second", "s-norm-lr1-tau0.2-100", 4),
        ("simclr", "fourth", "s-24px-base", 1),
    ],
)
def test_a_tuned_recipe_is_what_the_searches_kept(name, file, trial, told):
    records = RESULTS / "cifar10-search" / f"{file}-trials.jsonl"
    trials = {line["name"]: line for line in map(json.loads, records.read_text().splitlines())}
    at_length = ("training.epochs", "optimiser.warmup_epochs", "data.holdout")
    changes = {k: v for k, v in trials[trial]["changes"].items() if k not in at_length}
    if "views.image_size" in changes:  # as that version wrote it
        changes["views.relative_size"] = changes.pop("views.image_size") / 32
    recipe = load_recipe(name)
    assert override(recipe, changes) == recipe
    assert len(changes) >= told


@pytest.mark.parametrize("name", MEASURED)
def test_a_recipe_is_what_its_expected_accuracy_was_measured_with(name):
    beside = {  # what does not change the encoder
        "data.source": "cifar10",
        "data.workers": load_recipe(name).data.workers,
        "training.save_seconds": 60.0,
        "training.tensorboard": True,
        "training.knn_every": load_recipe(name).training.knn_every,
    }
    recipe = load_recipe(name)
    measured = override(load_recipe(str(RESULTS / MEASURED[name] / "config.toml")), beside)
    if measured.divergence.weight == 0:  # then these take no part
        parts = ("divergence", "teacher", "weak_views")
        asked = {part: getattr(recipe, part) for part in parts}
        assert recipe.divergence.weight == 0
        measured = dataclasses.replace(measured, **asked)
    assert measured == recipe


def _expected(name: str) -> str:
    header = [line for line in recipes()[name].splitlines() if line.startswith("#")]
    return " ".join(" ".join(header).split("Expected:")[1].replace("#", " ").split())


@pytest.mark.parametrize(
    ("name", "study"),
    [
        ("simclr", "comparison-cifar10"),
        ("simclr", "comparison-cifar10-32px"),
        ("best", "comparison-teacher"),
    ],
)
def test_the_header_of_a_compared_recipe_is_the_record(name, study):
    assert f"(results/studies/{study})" in _expected(name)
    assert all(words in _expected(name) for words in _describe_arms(study)[name])


def _describe_arms(study: str) -> dict[str, tuple[str, str]]:
    """Describe the accuracy and the seeds of each arm of a recorded study, as headers do."""
    arms = json.loads((RESULTS / "studies" / study / "results.json").read_text())["arms"]
    described = {}
    for arm in arms:
        linear, few, many = (
            f"{found['mean']:.2f}" + (f" +- {found['deviation']:.2f}" if found["n"] > 1 else "")
            for metric in ("linear, cached features", "knn, cosine, k=20", "knn, cosine, k=200")
            for found in [arm["metrics"][metric]]
        )
        n = arm["metrics"]["linear, cached features"]["n"]
        described[arm["arm"]] = (
            f"{linear} linear, {few} kNN (k = 20), {many} (k = 200)",
            f"{n} seeds" if n > 1 else "one seed",
        )
    return described


def test_the_headers_of_methods_are_the_records():
    checked = 0
    for arm, (accuracy, seeds) in _describe_arms("methods").items():
        if arm in recipes() and "(results/studies/methods)" in (said := _expected(arm)):
            assert accuracy.rpartition(", ")[0] in said  # k = 200 is in the table of methods
            assert seeds in said
            checked += 1
    assert checked == 21  # simclr has another record
    groups = json.loads((RESULTS / "bench" / "h200" / "methods.json").read_text())["groups"]
    for group in groups:
        (step,) = (arm for arm in group["arms"] if arm["name"] == "step")
        minutes = 200 * (50_000 // group["batch_size"]) * step["milliseconds"] / 60_000
        words = f"{minutes:.1f} minutes of steps on one H200, {step['peak_gigabytes']:.1f} GB"
        assert words in recipes()[group["recipe"]]


def test_the_settings_of_methods_are_those_that_were_measured():
    """Else `deepbregman pretrain vicreg` would not train what the table of methods has."""
    quiet = ("tensorboard", "knn_every", "health_every", "save_seconds")
    apart = {"data.source", "training.epochs", *(f"training.{name}" for name in quiet)}
    trained_once = list((RESULTS / "studies" / "methods" / "runs").glob("*-seed0/config.toml"))
    assert len(trained_once) >= 2 * 22  # and a control of some
    for path in trained_once:
        recipe, divergence, _ = path.parent.name.removesuffix("-seed0").partition("_divergence")
        wanted = load_arm(recipe)
        if divergence:
            wanted = override(wanted, {"divergence.weight": 1.0})
        trained = load_recipe(str(path))
        rate = "optimiser.learning_rate"  # three times 0.05 is not quite 0.15
        assert trained.optimiser.learning_rate == pytest.approx(wanted.optimiser.learning_rate)
        assert differing_fields(wanted, trained).keys() <= {rate, *apart}, path.parent.name


def test_the_header_of_digits_is_the_record():
    table = json.loads((RESULTS / "quickstart" / "result.json").read_text())["quickstart"]
    (row,) = (row for row in table if row["features"] == "pretrained encoder")
    few = f"{row['few_labels']:.1f} +- {row['few_labels_deviation']:.1f} with 5 labels per class"
    assert f"{row['linear']:.1f} linear, {row['knn']:.1f} kNN, {few}" in _expected("digits")


def test_the_header_of_the_race_is_the_record():
    folder = RESULTS / "cifar10-race-50"
    values: dict[str, list[float]] = {}
    for path in folder.glob("seed*/result.json"):
        for row in json.loads(path.read_text())["evaluations"]:
            if row["metric"] == "top1":
                values.setdefault(row["variant"], []).append(row["value"])
    linear, few, many = (
        f"{statistics.mean(values[variant]):.2f} +- {statistics.stdev(values[variant]):.2f}"
        for variant in ("cached features", "cosine, k=20", "cosine, k=200")
    )
    assert f"{linear} linear, {few} kNN (k = 20), {many} (k = 200)" in _expected("cifar10-fast")
    for line in (folder / "wall.csv").read_text().splitlines()[1:]:
        minutes, seconds = divmod(round(float(line.split(",")[1])), 60)
        assert f"{minutes} min {seconds} s" in recipes()["cifar10-fast"]


def test_the_header_of_the_long_run_is_the_record():
    record = json.loads((RESULTS / "cifar10-summit" / "result.json").read_text())
    found = {
        row["variant"]: row["value"] for row in record["evaluations"] if row["metric"] == "top1"
    }
    linear, few, many = (
        f"{found[variant]:.2f}" for variant in ("cached features", "cosine, k=20", "cosine, k=200")
    )
    assert f"{linear} linear, {few} kNN (k = 20), {many} (k = 200)" in _expected("cifar10-summit")
    minutes, seconds = divmod(round(record["pretrain"]["seconds"]), 60)
    assert f"{minutes} min {seconds} s" in recipes()["cifar10-summit"]


def test_every_committed_run_can_be_opened():
    found = list(RESULTS.rglob("config.toml"))
    assert len(found) >= 5
    for path in found:
        load_recipe(str(path))


def test_ours_is_the_baseline_plus_the_divergence():
    ours, baseline = load_recipe("best"), load_recipe("simclr")
    assert override(baseline, {"divergence.weight": ours.divergence.weight}) == ours


def test_the_side_of_a_view_is_the_nearest_whole_number():
    assert ViewSettings(relative_size=0.29).side(100) == 29  # the product is 28.999999999999996
    assert ViewSettings(relative_size=0.7).side(32) == 22


def test_recipe_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('seed = 4\n[data]\nsource = "été"\n', encoding="utf-8")
    assert load_recipe(str(path)) == override(Config(), {"seed": 4, "data.source": "été"})


def test_a_folder_is_no_recipe(tmp_path):
    with pytest.raises(UserError, match=r"is a folder: name a recipe, .* images, add --data "):
        load_recipe(str(tmp_path))
    (tmp_path / "config.toml").write_text("seed = 4\n")
    with pytest.raises(UserError, match=r"for the settings of this run, name '.*config\.toml'"):
        load_recipe(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"seed = ", ("not valid TOML",)),
        (b"seed = 1\nseed = 2", ("not valid TOML",)),
        (b"seed = -1", ("seed is -1", "from 0 to 2^32 - 1")),
        (b"[optimiser]\nmilestones = [0]", ("optimiser.milestones is (0,)", "1 or more")),
        (b"[trainin]\n", ("'trainin'", "did you mean 'training'?")),
        (b"seed = 1 # \xff", ("UTF-8",)),
    ],
)
def test_bad_recipe_file_is_named(tmp_path, content, parts):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_recipe(str(path))
    for part in (str(path), *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["papr", "", "nothing/here.toml", "x\0y"])
def test_unknown_recipe_lists_the_known(name):
    with pytest.raises(UserError) as caught:
        load_recipe(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in NAMES)
    assert ("did you mean 'paper'?" in str(caught.value)) == (name == "papr")


# What is refused


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        ({"optimizer": {}}, ("'optimizer'", "did you mean 'optimiser'?")),
        (
            {"optimiser": {"lerning_rate": 1}},
            ("'optimiser.lerning_rate'", "'optimiser.learning_rate'?"),
        ),
        ({"divergence": {"num_subnetwork": 1}}, ("did you mean 'divergence.num_subnetworks'?",)),
        ({"training": 5}, ("training is 5", "[training]")),
        ({"training": []}, ("training is []", "[training]")),
        ({"encoder": {"name": "resnet5"}}, ("encoder.name is 'resnet5'", "did you mean 'resnet")),
        ({"encoder": {"name": ["small"]}}, ("encoder.name", "'small'")),
        ({"encoder": {"name": "tim:resnet26d"}}, ("or timm:NAME", "mean 'timm:resnet26d'?")),
        ({"encoder": {"name": "convnext_atto"}}, ("did you mean 'timm:convnext_atto'?",)),
        ({"encoder": {"name": "timm:"}}, ("encoder.name is 'timm:'", "or timm:NAME")),
        ({"encoder": {"name": "timm:x", "stem": "standard"}}, ("encoder.stem", "auto")),
        ({"encoder": {"weights": "timm"}}, ("encoder.weights is 'timm'", "timm:resnet18")),
        (
            {"encoder": {"name": "small", "weights": "torchvision:DEFAULT"}},
            ("encoder.weights is 'torchvision:DEFAULT'", "resnet18, resnet34"),
        ),
        ({"encoder": {"name": "custom", "stem": "thumbnail"}}, ("encoder.stem", "auto")),
        ({"encoder": {"name": "small", "stem": "thumbnail"}}, ("encoder.stem", "auto")),
        ({"training": {"epochs": "3"}}, ("training.epochs is '3'", "whole number")),
        ({"training": {"epochs": 3.0}}, ("training.epochs is 3.0", "whole number")),
        ({"training": {"epochs": True}}, ("training.epochs is True", "whole number")),
        ({"training": {"epochs": -1}}, ("training.epochs is -1", "0 or more")),
        ({"training": {"batch_size": 1}}, ("training.batch_size is 1", "2 or more")),
        ({"training": {"tensorboard": 1}}, ("training.tensorboard is 1", "true or false")),
        ({"optimiser": {"learning_rate": 1e39}}, ("learning_rate is 1e+39", "at most 1e+30")),
        ({"optimiser": {"weight_decay": 1e308}}, ("weight_decay is 1e+308", "at most 1e+30")),
        ({"objective": {"temperature": 0}}, ("objective.temperature is 0", "above 0")),
        ({"objective": {"temperature": math.nan}}, ("temperature is nan", "finite")),
        ({"objective": {"weight": math.inf}}, ("objective.weight is inf", "finite")),
        ({"objective": {"weight": -0.1}}, ("objective.weight is -0.1", "0 or more")),
        ({"divergence": {"dropout": 1.0}}, ("divergence.dropout is 1.0", "between 0 and 0.99")),
        ({"views": {"flip": 1.01}}, ("views.flip is 1.01", "between 0 and 1")),
        ({"views": {"solarise": [0.1, 1.2]}}, ("views.solarise is (0.1, 1.2)", "between 0 and 1")),
        ({"views": {"solarise": "often"}}, ("views.solarise is 'often'", "a number or a list")),
        (
            {"views": {"blur": [0.1, 0.2, 0.3]}},
            ("views.blur is [0.1, 0.2, 0.3] with views.num_views 2", "one for each view"),
        ),
        ({"views": {"flip": False}}, ("views.flip is False", "a number")),
        ({"views": {"crop_area": [0.2]}}, ("views.crop_area is (0.2,)", "a list of 2 items")),
        ({"views": {"crop_area": 0.2}}, ("views.crop_area is 0.2", "a list of 2 items")),
        ({"views": {"crop_area": [0.0, 1.0]}}, ("views.crop_area is (0.0, 1.0)", "above 0")),
        ({"views": {"crop_area": [0.5, 0.4]}}, ("views.crop_area", "from low to high")),
        ({"views": {"jitter": [0, 0, 0, 0.6]}}, ("views.jitter", "0.6", "hue", "0.5 or less")),
        ({"views": {"jitter": [0, 0, 0]}}, ("views.jitter is (0, 0, 0)", "a list of 4 items")),
        ({"views": {"without": ["flip", "spin"]}}, ("views.without", "'spin'", "greyscale")),
        ({"views": {"without": "flip"}}, ("views.without is 'flip'", "a list")),
        ({"data": {"source": None}}, ("data.source is None", "text")),
        ({"data": {"image_size": 3}}, ("data.image_size is 3", "between 4 and 4096")),
        ({"data": {"image_size": 1_000_000}}, ("image_size is 1000000", "between 4 and 4096")),
        ({"views": {"relative_size": 1.1}}, ("views.relative_size is 1.1", "at most 1")),
        ({"views": {"relative_size": 0}}, ("views.relative_size is 0", "above 0")),
        (
            {"views": {"relative_size": 0.1}},
            ("views.relative_size is 0.1 and data.image_size 32", "3 pixels", "4 or more; raise"),
        ),
        ({"data": {"source": "caf\udce9"}}, ("data.source is 'caf\\udce9'", "Unicode", "rename")),
        ({"seed": -1}, ("seed is -1", "a whole number from 0 to 2^32 - 1")),
        ({"seed": 2**32}, (f"seed is {2**32}", "a whole number from 0 to 2^32 - 1")),
        ({"seed": 1.0}, ("seed is 1.0", "whole number")),
        ({"seed": True}, ("seed is True", "whole number")),
        ({"seed": {}}, ("seed is {}", "whole number")),
        (
            {"optimiser": {"schedule": "step"}},
            ("optimiser.milestones is []", "optimiser.schedule 'step'"),
        ),
        (
            {"optimiser": {"milestones": [5]}},
            ("optimiser.milestones is [5]", "optimiser.schedule 'constant'"),
        ),
        (
            {
                "optimiser": {"schedule": "step", "milestones": [5, 10, 11]},
                "training": {"epochs": 10},
            },
            ("optimiser.milestones [10, 11] never come", "training.epochs is 10"),
        ),
        (
            {"objective": {"weight": 0}, "divergence": {"weight": 0}},
            ("objective.weight", "divergence.weight", "both 0"),
        ),
        (
            {"objective": {"name": "vicreg", "invariance": 0, "variance": 0, "covariance": 0}},
            ("objective.covariance are all 0", "vicreg would train nothing"),
        ),
        ({"divergence": {"source": "bank"}}, ("source is 'bank'", "add a [teacher] table")),
        ({"divergence": {"source": "prototypes"}}, ("'prototypes'", "add a [teacher] table")),
        ({"divergence": {"compare": "match"}}, ("compare 'match'", "add a [teacher] table")),
    ],
)
def test_refusal_names_the_field_and_the_value(tables, parts):
    for part in parts:
        assert part in message(tables)


@pytest.mark.parametrize("name", list(SECTIONS))
@pytest.mark.parametrize("value", [None, 5, {}, {"epochs": 3}, Config()])
def test_section_of_the_wrong_type_is_named(name, value):
    with pytest.raises(UserError, match=rf"^{name} is .*: it must be a \w+Settings$"):
        Config(**{name: value})


def test_a_short_trial_of_a_recipe_need_not_change_its_warm_up():
    changes = {"optimiser.warmup_epochs": 5.0, "training.epochs": 2}
    assert override(Config(), changes).optimiser.warmup_epochs == 5.0


def test_lists_and_tuples_make_the_same_configuration():
    lists = OptimiserSettings(schedule="step", milestones=[1, 2], betas=[0.5, 0.9])
    tuples = OptimiserSettings(schedule="step", milestones=(1, 2), betas=(0.5, 0.9))
    assert lists == tuples
    assert hash(lists) == hash(tuples)


def test_whole_numbers_are_floats_where_a_field_is_one():
    views = ViewSettings(flip=1, blur=[0, 1], jitter=[0, 0, 0, 0], num_views=2)
    assert [type(views.flip), type(views.num_views)] == [float, int]
    assert {type(number) for number in (*views.blur, *views.jitter)} == {float}
    assert type(ViewSettings(solarise=1).solarise) is float


def test_rotations_alone_can_be_predicted():
    off = {"objective.weight": 0.0, "divergence.weight": 0.0}
    on = {"rotation.weight": 1.0, "small_views.num_views": 4}
    assert override(Config(), {**off, **on}).rotation is not None


def test_what_is_left_out_of_the_views_needs_no_settings():
    def unused(**views: Any) -> set[str]:
        config = override(load_recipe("simclr"), {f"views.{k}": v for k, v in views.items()})
        return {n.removeprefix("views.") for n in config.unused_fields if n.startswith("views.")}

    known = unused(blur=0.5)
    assert unused(blur=0.5, without=["jitter", "crop"]) - known == {
        *("jitter", "jitter_probability", "crop_area", "crop_aspect")
    }
    assert unused(blur=0.5, without=["blur", "flip"]) - known == {"blur", "blur_sigma", "flip"}


@pytest.mark.parametrize(
    ("recipe", "changes", "unused"),
    [
        ("simclr", {"divergence.weight": 1.0, "objective.weight": 0.0}, "objective.temperature"),
        ("swav", {"objective.queue": 0}, "objective.queue_from"),
        ("best", {"divergence.weight": 0.0, "divergence.info_nce": 1.0}, "divergence.smoothing"),
    ],
)
def test_what_a_method_does_not_use_is_told(recipe, changes, unused):
    base = load_recipe(recipe)
    full = override(base, {"objective.queue": 3840} if recipe == "swav" else {})
    assert unused not in full.unused_fields
    assert unused in override(base, changes).unused_fields


def test_a_teacher_that_is_off_ties_no_run_to_its_length():
    rising = {"teacher.schedule": "cosine", "optimiser.schedule": "constant"}
    config = override(load_recipe("best"), rising)
    assert config.depends_on_length
    assert not override(config, {"divergence.weight": 0.0}).depends_on_length


def test_a_method_of_ones_own_keeps_its_weak_views_without_a_divergence():
    """Its recipe has a [teacher], which is not used then; the views are the method's, too."""
    changes = {"divergence.weight": 0.0}
    assert "weak_views" not in override(load_recipe("best"), changes).view_groups
    own = override(load_recipe("best"), {**changes, "objective.name": "custom"})
    assert "weak_views" in own.view_groups
    assert "weak_views.flip" not in own.unused_fields
    assert "teacher.momentum" in own.unused_fields


@settings(max_examples=150)
@given(st.sampled_from(FIELDS), JUNK)
@example(("views", "without"), [[]])
@example(("views", "crop_area"), [{}, {}])
@example(("encoder", "name"), {"a": []})
def test_junk_in_one_field_is_blamed_on_it(place, value):
    section, field = place
    try:
        config = from_dict({section: {field: value}})
    except UserError as error:
        assert f"{section}.{field}" in str(error)  # noqa: PT017  # both outcomes are right
    else:
        assert isinstance(config, Config)


# Overrides


def test_override_by_dotted_names():
    config = override(
        load_recipe("digits"),
        {
            "seed": 3,
            "training.epochs": 7,
            "views.crop_area": (0.3, 0.9),
            "optimiser.betas": [0.1, 0.2],
            "optimiser.schedule": "step",  # these two are valid only together
            "optimiser.milestones": [2, 4],
        },
    )
    assert (config.seed, config.training.epochs) == (3, 7)
    assert config.views.crop_area == (0.3, 0.9)
    assert config.optimiser.betas == (0.1, 0.2)
    assert config.optimiser.milestones == (2, 4)
    assert config.encoder == load_recipe("digits").encoder


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"training.epoch": 1}, ("'training.epoch'", "did you mean 'training.epochs'?")),
        ({"trainin.epochs": 1}, ("'trainin.epochs'", "did you mean 'training.epochs'?")),
        ({"epochs": 1}, ("'epochs'", "did you mean 'training.epochs'?")),
        ({"queue": 1}, ("'queue'", "did you mean 'objective.queue'?")),
        ({"temperature": 1}, ("'temperature'", "'divergence.temperature' or 'objective.tempera")),
        ({"nonsense": 1}, ("'nonsense'", "it must be seed or a field of data, views, weak_views")),
        ({"sed": 1}, ("'sed'", "did you mean 'seed'?")),
        ({"seed.x": 1}, ("'seed.x'",)),
        ({"training.epochs.x": 1}, ("'training.epochs.x'", "did you mean 'training.epochs'?")),
        ({"training": 1}, ("training is 1", "[training]")),
        ({"data": "x", "data.root": "y"}, ("data is 'x'", "[data]")),
        ({"weak_views": None, "weak_views.num_views": 2}, ("weak_views is None", "[weak_views]")),
        ({"data.": 1}, ("'data.'",)),
        ({".": 1}, ("'.'",)),
        ({"": 1}, ("''",)),
        ({"training.epochs": -1}, ("training.epochs is -1",)),
    ],
)
def test_override_refuses(changes, parts):
    with pytest.raises(UserError) as caught:
        override(Config(), changes)
    for part in parts:
        assert part in str(caught.value)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViewSettings().flip = 0.1
    with pytest.raises(UserError):
        dataclasses.replace(ViewSettings(), flip=2.0)
