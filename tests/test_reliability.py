"""The matrix of faults names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MATRIX = (ROOT / "docs" / "reliability.md").read_text()


def names_in(path: Path) -> set[str]:
    """Every test of a file, those of classes as ``Class::test``, and the classes themselves."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name}
            found |= {f"{node.name}::{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", MATRIX)
    assert len(named) > 30
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert missing == []


def test_every_promise_names_a_test() -> None:
    lines = MATRIX.split("## Figures")[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and "| promised |" not in line]
    assert len(rows) > 20
    assert [row for row in rows if "`tests/" not in row.split("|")[3]] == []
