"""Hundreds of wrong configurations and command lines: a valid one, or one paragraph and exit 2."""

import contextlib
import dataclasses
import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deepbregman.cli import main
from deepbregman.commands import data
from deepbregman.config import (
    Config,
    Section,
    from_dict,
    from_toml,
    load_recipe,
    override,
    to_dict,
    to_toml,
)
from deepbregman.errors import UserError
from deepbregman.runs import Run

SECTIONS: dict[str, type[Any]] = {
    name: kind
    for name, hint in get_type_hints(Config).items()
    for kind in reversed(get_args(hint) or (hint,))  # of several the first stays
    if isinstance(kind, type) and issubclass(kind, Section)
}
FIELDS = ["seed"] + [
    f"{section}.{field.name}"
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
]
DIGITS = load_recipe("digits")
NAUGHTY = [
    *("", " ", "\t", "\n", "\r\n", "\x00", "\x1b[2J", "\x7f", "\ufeff", "\u202e", "\u2028"),
    *("'", '"', "\\", "`id`", "$(id)", "../../x", "/etc/passwd", "~root", "~nobody-of-that-name"),
    *("[bold]", "[/]", "%s%n", "{0}", "{{x}}", "\udce9", "\U0001f600", "e\u0301", "日本"),
    *("nan", "inf", "-inf", "1e999", "-1", "0x10", "1_000", "10", "0.5", "true", "None", "null"),
    *("9" * 400, "x" * 3000),
]


def said(error: UserError) -> str:
    """Check that an error is one paragraph of bearable length, and return it."""
    words = str(error)
    assert words
    assert "\n\n" not in words
    assert len(words.splitlines()) <= 2
    assert len(words) < 2000
    return words


@contextlib.contextmanager
def nothing_but_user_errors() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        said(error)


# TOML

raw_values = st.sampled_from(
    [
        *("1", "-1", "0", "0.5", "true", "false", "nan", "-nan", "inf", "+inf", "1e400", "-0.0"),
        *("9223372036854775808", "9" * 300, "9" * 5000, "0x" + "f" * 6000, "0b" + "1" * 90),
        *('""', '"cifar10"', "'step'", '"resnet50"', '"""\na\n\nb"""', '"\\u0000"', '"\\ud800"'),
        *('"\\U0001F600"', '"\x1b[2J"', '"a\tb"', '"\x00"', '"open', "'open", '"""open'),
        *("[]", "[1, 2]", "[0.2, 1.0]", '["crop"]', "[[], [[]]]", "[1, 'a', {}]", "[1,,2]", "[1"),
        *("{}", "{ a = 1 }", "{ a.b.c = {} }", "{ a = 1, a = 2 }", "{ a = ", "{ source = 'x' }"),
        *("1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "25:61:61", "1979-99-99"),
        *("[" * 300 + "]" * 300, "[" * 5000, "{a=" * 300 + "1" + "}" * 300, "{a=" * 5000),
        *("", "=", "# comment", "x", "None", "__import__('os')", "!!python/object:os.system"),
    ]
) | st.text(max_size=12)
toml_keys = (
    st.sampled_from(FIELDS)
    | st.sampled_from([field.partition(".")[2] for field in FIELDS[1:]])
    | st.sampled_from(
        [*SECTIONS, "data.source.deep", "'quoted key'", '"\\u0000"', "a." * 200 + "b", "__class__"]
    )
    | st.text(max_size=6)
)
toml_lines = (
    st.tuples(toml_keys, raw_values).map(" = ".join)
    | st.sampled_from([f"[{name}]" for name in SECTIONS])
    | st.sampled_from([f"[[{name}]]" for name in SECTIONS])
    | st.sampled_from(["[data", "[data.source]", "[]", "[a.b.c]", "\ufeff", "\x00", "# x", "\r"])
)
documents = st.builds(
    lambda start, lines, end: start + end.join(lines),
    st.sampled_from(["", "", "", "\ufeff", "\x00", "\n"]),
    st.lists(toml_lines, max_size=6),
    st.sampled_from(["\n", "\n", "\r\n", "\r"]),
)


@settings(max_examples=300)
@given(documents)
@example("[data]\nsource = 'a'\nsource = 'b'")
@example("[data]\n[data]")
@example("[divergence]\nkernel = 0x" + "f" * 6000)
@example("seed = 0x" + "f" * 6000)
@example("seed = " + "1" * 5000)
@example("seed = " + "[" * 5000)
@example("seed = " + "{a = " * 5000)
@example("[data]\n'a\\nb' = 1")
@example('[data]\n"a\\n\\nb" = 1')
def test_any_document(text):
    try:
        config = from_toml(text, "the origin")
    except UserError as error:
        assert said(error).startswith("the origin")  # noqa: PT017  # both outcomes are right
    else:
        assert from_toml(to_toml(config), "itself") == config


# Tables, as a Python program would give them


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63, 2**64, -1, 0, 1, 2, 5])
    | st.floats()
    | st.sampled_from(NAUGHTY)
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.builds(object)
    | st.builds(nested, st.sampled_from([3, 50]))
    | st.sampled_from([{1, 2}, 1j, int, os.system])
)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
names = st.sampled_from([field.rpartition(".")[2] for field in FIELDS]) | st.sampled_from(NAUGHTY)


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(["seed", *SECTIONS]) | st.sampled_from(NAUGHTY),
        junk | st.dictionaries(names, junk, max_size=3),
        max_size=4,
    )
)
def test_any_tables(tables):
    with nothing_but_user_errors():
        config = from_dict(tables)
        assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    "monster", [10**5000, [[10**5000]], nested(20_000)], ids=["digits", "list", "deep"]
)
@pytest.mark.parametrize(
    "field",
    [
        "seed",
        "data",
        "data.source",
        "data.resident",
        "views.crop_area",
        "views.without",
        "optimiser.milestones",
        "optimiser.name",
        "training.epochs",
        "objective.weight",
        "encoder.name",
    ],
)
def test_values_that_python_itself_cannot_write(field, monster):
    """Too much for hypothesis, which would have to write them as well."""
    section, _, name = field.partition(".")
    with pytest.raises(UserError) as caught:
        from_dict({section: {name: monster} if name else monster})
    assert field in said(caught.value)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.sampled_from(NAUGHTY), junk, max_size=3))
@example({".source": 1})
@example({"data": {}})
def test_any_changes(changes):
    with nothing_but_user_errors():
        assert isinstance(override(DIGITS, changes), Config)


# Command lines

options = [f"--{field.replace('_', '-')}" for field in FIELDS]
words = (
    st.sampled_from(options)
    | st.sampled_from([option[: len(option) // 2] for option in options])
    | st.sampled_from(NAUGHTY).filter(lambda word: "\0" not in word)
    | st.text(st.characters(exclude_characters="\0"), max_size=6)
    | st.tuples(st.sampled_from(options), st.sampled_from(["", "1", "x", "=", "0.1 1"])).map(
        "=".join
    )
    | st.sampled_from(
        [
            *("--", "-", "---", "-x", "--help", "-h", "--version", "--resume", "--resume=x"),
            *("--run", "--run=", "--accelerator", "cpu", "cuda", "--out", "a.npz", "--format"),
            *("onnx", "--protocol", "knn", "--k", "--clusters", "--seeds", "--by", "--query"),
            *("test:0", "test:" + "9" * 5000, "@file", "--no-download", "--cache", "--root", "."),
            *("--skip-unreadable", "--no-data.skip-unreadable", "digits", "paper", "list", "check"),
        ]
    )
)


pairs = st.lists(
    st.tuples(st.sampled_from(options), st.sampled_from(["1", "0.5", "x", "auto", "nan", "True"])),
    max_size=3,
).map(lambda taken: [word for pair in taken for word in pair])
lines = st.lists(words, max_size=5) | pairs


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory) -> Iterator[Path]:
    """An empty current folder, and nothing that trains, writes or downloads."""
    folder = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(data.SUBCOMMANDS, "prepare", _no_preparation)
        yield folder


@functools.wraps(data.prepare)
def _no_preparation(*arguments: Any, **options: Any) -> dict[str, Any]:
    return {"images": {}, "num_classes": None, "num_replaced": 0}


def called(arguments: list[str]) -> int:
    """Run the command line; return its exit code once what it said is found to be right."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as stop:
            code = stop.code
    for stream in (out, err):
        stream.flush()
    printed = [stream.buffer.getvalue().decode() for stream in (out, err)]
    assert code in (0, 2, None)
    assert "Traceback" not in "".join(printed)
    if printed[1].startswith("error: "):  # ours; tyro repeats the user's own words as they are
        assert "\x1b" not in printed[1]
    if code == 2:
        assert printed[1].strip()
    return code or 0


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["digits"] * 6 + ["paper", "x"]) | words, lines)
@example("digits", [])
@example("digits", ["--data", "\udce9"])
@example("digits", ["--data", "a", "--data", "b"])
@example("digits", ["--training.epochs", "9" * 5000])
@example("digits", ["--views.crop-area", "1"])
@example("--resume", ["x" * 3000])
@example(".", [])
@example("x" * 3000, [])
def test_any_words_after_pretrain(empty_folder, first, rest):
    given_: list[Any] = []

    def stub(config: Config, folder: Path, *rest: Any) -> Run:
        given_.append(config)
        return Run(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepbregman.commands.job.train_run", stub)
        patch.setattr("deepbregman.commands.pretrain.suggest_next", lambda run: ["evaluate"])
        code = called(["pretrain", first, *rest])
    assert all(isinstance(config, Config) for config in given_)
    assert not (given_ and code)
    assert not any(empty_folder.iterdir())


VERBS = ["evaluate", "embed", "export", "search", "cluster", "data", "recipes", "data check"]


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([*VERBS, "data prepare"]).map(str.split)
    | st.tuples(st.sampled_from(VERBS), st.sampled_from(["run", "."])).map(list)
    | words.map(lambda word: [word]),
    lines,
)
@example(["search"], [".", "--query", "test:" + "9" * 5000])
@example(["embed"], ["\udce9", "--out", "\udce9.npz"])
@example(["data", "check"], ["~nobody-of-that-name"])
@example(["data", "prepare"], ["digits", "--cache", "~nobody-of-that-name.npz"])
@example(["x" * 3000], [])
def test_any_words_after_any_verb(empty_folder, verb, rest):
    called([*verb, *rest])
    assert not any(empty_folder.iterdir())
