"""Every promise of docs/reliability.md and SECURITY.md names a test that exists."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGES = {name: (TESTS.parent / name).read_text() for name in ("docs/reliability.md", "SECURITY.md")}
TEST = r"`([\w/]+\.py)::([\w:]+)`( \*)?"


@functools.cache
def find_tests(path: str) -> dict[str, bool]:
    """Whether each test of a file is slow; those of classes as ``Class::test``, and the classes."""
    source = (TESTS / path).read_text()
    all_slow = "\npytestmark = pytest.mark.slow\n" in source
    found = {}

    def add(node: ast.stmt, prefix: str = "") -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            found[prefix + node.name] = all_slow or "pytest.mark.slow" in marks
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                add(inner, f"{node.name}::")

    for node in ast.parse(source).body:
        add(node)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page):
    named = re.findall(TEST, PAGES[page])
    assert len(named) > 20
    assert [f"{path}::{name}" for path, name, _ in named if name not in find_tests(path)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_promise_names_a_test(page):
    lines = PAGES[page].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.endswith("| Test |")]
    assert len(rows) > 15
    assert [row for row in rows if not re.search(TEST, row.split("|")[-2])] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_star_is_where_the_test_is_slow(page):
    for path, name, star in re.findall(TEST, PAGES[page]):
        assert find_tests(path)[name] == bool(star), name
