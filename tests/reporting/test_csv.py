"""CSV files of every command: read back as they were, and nothing in them runs in a spreadsheet."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepbregman.files import format_csv, write_csv


def read_back(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize(
    "name",
    ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\n=1", " =1+1", "-", "＝1+1"],  # noqa: RUF001  # wide on purpose
)
def test_no_text_is_a_formula(name):
    assert read_back(format_csv([{"class": name, name: 1}])) == [
        ["class", f"'{name}"],
        [f"'{name}", "1"],
    ]


@pytest.mark.parametrize("value", ["-1.5", "+2", "-1e-05", "-inf", -3.25, -7, "cat-dog", "a=b", ""])
def test_numbers_and_plain_words_stay_as_they_are(value):
    assert read_back(format_csv([{"x": value, "y": 0}]))[1] == [str(value), "0"]


@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=4))
def test_only_an_apostrophe_is_ever_added(words):
    row = {f"c{index}": word for index, word in enumerate(words)}
    for word, found in zip(words, read_back(format_csv([row | {"end": 1}]))[1], strict=False):
        word = word.replace("\r", "\n")  # which would end a line
        assert found in (word, f"'{word}")
        assert not found.lstrip().startswith(("=", "@"))


def test_rows_need_not_have_the_same_columns(tmp_path):
    write_csv(tmp_path / "a.csv", [{"a": 1, "b": None}, {"c": "x,\ny", "a": "\udcff"}])
    assert (tmp_path / "a.csv").read_bytes() == b'a,b,c\n1,,\n\xff,,"x,\ny"\n'
