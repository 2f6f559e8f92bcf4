import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepbregman.config import Section
from deepbregman.config.rules import Range, describe, has_type
from deepbregman.errors import UserError

Colour = Literal["red", "green"]


@dataclass(frozen=True)
class Palette(Section):
    """A section of a configuration that is not ours."""

    colour: Colour = "red"
    count: Annotated[int, Range(low=1)] = 1
    share: Annotated[float, Range(0.0, 1.0)] = 0.5
    span: Annotated[tuple[float, float], Range(above=0.0, increasing=True)] = (1.0, 2.0)
    names: tuple[Colour, ...] = ()
    years: tuple[Annotated[int, Range(low=1)], ...] = ()
    pair: tuple[Annotated[int, Range(low=1)], Annotated[float, Range(0.0, 1.0)]] = (1, 1.0)
    on: bool = False
    title: str = ""
    titles: tuple[str, ...] = ()


@given(
    st.floats(-1e6, 1e6),
    st.floats(-1e6, 1e6) | st.just(-math.inf),
    st.floats(-1e6, 1e6) | st.just(math.inf),
    st.floats(-1e6, 1e6) | st.just(-math.inf),
)
def test_range_accepts_exactly_what_lies_in_it(value, low, high, above):
    inside = low <= value and value <= high and value > above
    assert (Range(low, high, above).broken_by(value) is None) == inside


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, (0.1, math.nan), (math.inf, 1.0)])
def test_range_accepts_finite_numbers_only(value):
    assert Range().broken_by(value) == "it must be finite"


@pytest.mark.parametrize(
    ("rule", "value", "words"),
    [
        (Range(low=1), 0, "it must be 1 or more"),
        (Range(0.0, 1.0), 1.5, "it must be between 0 and 1"),
        (Range(0.0, 1.0), (0.5, -0.1), "it must be between 0 and 1"),
        (Range(above=0.0), 0.0, "it must be above 0"),
        (Range(above=0.0, high=1.0), (0.5, 1.5), "it must be above 0 and at most 1"),
        (Range(above=0.0, high=1.0), 0.0, "it must be above 0 and at most 1"),
        (Range(high=1.0), 1.5, "it must be at most 1"),
        (Range(above=0.0, increasing=True), (2.0, 1.0), "it must go from low to high"),
        (Range(above=0.0, increasing=True), (1.0, 1.0), None),
        (Range(above=0.0), (2.0, 1.0), None),
        (Range(low=0.0), (), None),
    ],
)
def test_range_says_which_part_is_broken(rule, value, words):
    assert rule.broken_by(value) == words


@pytest.mark.parametrize("bounds", [{"low": 3.0}, {"high": 5.0}, {"above": 2.0}])
@pytest.mark.parametrize("more", [{}, {"high": 5.0}])
def test_range_speaks_of_the_bounds_it_has(bounds, more):
    rule = Range(**{**bounds, **more})
    words = {rule.broken_by(value) for value in (-1e6, 1e6)} - {None}
    assert len(words) == 1  # the same whichever bound is broken
    numbers = {float(word) for word in str(words.pop()).split() if word[-1].isdigit()}
    assert numbers == {*bounds.values(), *more.values()}


@pytest.mark.parametrize("rule", [Range(low=1), Range(0.0, 1.0), Range()])
@pytest.mark.parametrize("value", [10**400, -(10**400), (1, 10**400)])
def test_range_refuses_whole_numbers_beyond_floats(rule, value):
    assert rule.broken_by(value) == "it must be finite"


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int, True),
        (True, int, False),
        (1.0, int, False),
        (1, float, True),
        (1.0, float, True),
        (False, float, False),
        ("1", float, False),
        (None, str, False),
        ("", str, True),
        (0, bool, False),
        (True, bool, True),
        ("red", Colour, True),
        ("Red", Colour, False),
        (["red"], Colour, False),
        ({}, Colour, False),
        ((1, 2.0), tuple[float, float], True),
        ((1.0,), tuple[float, float], False),
        ((1.0, 2.0, 3.0), tuple[float, float], False),
        ((1.0, "2"), tuple[float, float], False),
        ([1.0, 2.0], tuple[float, float], False),
        ((), tuple[int, ...], True),
        ((1, 2, 3), tuple[int, ...], True),
        ((1, True), tuple[int, ...], False),
        ("red", tuple[Colour, ...], False),
        (("red", "blue"), tuple[Colour, ...], False),
        (3, Annotated[int, Range(low=5)], True),  # the type alone; the range is the rule's
    ],
)
def test_matches_is_about_types(value, hint, expected):
    assert has_type(value, hint) is expected


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (Annotated[float, Range(low=0.0)], "a number"),
        (bool, "true or false"),
        (str, "text"),
        (Colour, "one of red, green"),
        (tuple[float, float], "a list of 2 items, each a number"),
        (tuple[Colour, ...], "a list, each item one of red, green"),
    ],
)
def test_described_is_for_people(hint, words):
    assert describe(hint) == words


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"colour": "gren"}, "palette.colour is 'gren': it must be one of red, green; did you"),
        ({"colour": 3}, "palette.colour is 3: it must be one of red, green"),
        ({"count": 0}, "palette.count is 0: it must be 1 or more"),
        ({"count": True}, "palette.count is True: it must be a whole number"),
        ({"share": math.nan}, "palette.share is nan: it must be finite"),
        ({"span": (2.0, 1.0)}, "palette.span is (2.0, 1.0): it must go from low to high"),
        ({"span": (1.0,)}, "palette.span is (1.0,): it must be a list of 2 items"),
        ({"names": ("red", "blue")}, "palette.names is ('red', 'blue'): it must be a list"),
        ({"on": 1}, "palette.on is 1: it must be true or false"),
        ({"title": None}, "palette.title is None: it must be text"),
    ],
)
def test_section_names_the_field_and_the_value(values, words):
    with pytest.raises(UserError) as caught:
        Palette(**values)
    assert str(caught.value).startswith(words)


def test_section_accepts_its_defaults_and_whole_numbers_for_floats():
    assert Palette(share=1, span=(1, 2), names=("red", "red")).share == 1


@pytest.mark.parametrize("values", [{"count": "class int"}, {"names": "ellipsis"}])
def test_section_suggests_choices_only(values):
    with pytest.raises(UserError) as caught:
        Palette(**values)
    assert "did you mean" not in str(caught.value)


def test_section_takes_lists_as_tuples():
    palette = Palette(span=[1.0, 2.0], names=["red"], years=[])
    assert (palette.span, palette.names, palette.years) == ((1.0, 2.0), ("red",), ())
    assert palette == Palette(span=(1.0, 2.0), names=("red",))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"years": (1, 0)}, "palette.years is (1, 0): it must be 1 or more"),
        ({"years": [0]}, "palette.years is (0,): it must be 1 or more"),
        ({"pair": (5, 2.0)}, "palette.pair is (5, 2.0): it must be between 0 and 1"),
        ({"pair": (0, 0.5)}, "palette.pair is (0, 0.5): it must be 1 or more"),
        ({"pair": (2, math.nan)}, "palette.pair is (2, nan): it must be finite"),
    ],
)
def test_section_checks_the_rule_of_each_item(values, words):
    with pytest.raises(UserError) as caught:
        Palette(**values)
    assert str(caught.value) == words


def test_section_accepts_items_within_their_rules():
    palette = Palette(years=(1, 2024), pair=(3, 0.5))
    assert (palette.years, palette.pair) == ((1, 2024), (3, 0.5))


@pytest.mark.parametrize("values", [{"title": "caf\udce9"}, {"titles": ("fine", "\ud800")}])
def test_section_refuses_text_that_cannot_be_written(values):
    """What a shell passes for a name in another encoding is text that no file can hold."""
    with pytest.raises(UserError, match=r"palette\.titles? is .*valid Unicode"):
        Palette(**values)
