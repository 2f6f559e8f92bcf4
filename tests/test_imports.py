"""Imports go one way, and the method knows nothing of the laboratory around it."""

import ast
from pathlib import Path

import deepbregman

ROOT = Path(deepbregman.__file__).parent
ALLOWED = {
    "errors": set(),
    "statistics": set(),
    "rules": {"errors"},
    "config": {"errors", "rules"},
    "files": {"errors"},
    "runs": {"errors", "config", "files"},
    "launching": {"errors"},
    "method": set(),
    "data": {"errors"},
    "training": {"errors", "config", "files", "runs", "launching", "method", "data"},
    "evaluation": {"errors", "statistics", "rules", "config", "runs", "method", "data", "training"},
    "reporting": {"errors", "statistics", "config", "runs"},
    "studies": {
        *("errors", "statistics", "config", "files", "runs", "launching", "method", "data"),
        *("training", "evaluation", "reporting"),
    },
    "benchmarks": {
        *("errors", "config", "runs", "method", "data"),
        *("training", "reporting"),
    },
    "exporting": {"errors", "config", "runs", "method", "data", "training"},
    "cli": {
        *("errors", "config", "runs", "launching", "evaluation"),
        *("studies", "benchmarks", "reporting", "exporting"),
    },
    "__main__": {"cli"},
    "__init__": set(),
}
FORBIDDEN_NAMES = {"utils", "common", "misc", "helpers"}
NO_TORCH = {
    "errors",
    "statistics",
    "rules",
    "config",
    "files",
    "runs",
    "launching",
    "reporting",
    "cli",
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it, as a dotted name."""
    package = ["deepbregman", *path.relative_to(ROOT).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            if module == ["deepbregman"]:
                names |= {f"deepbregman.{alias.name}" for alias in node.names}
            else:
                names.add(".".join(module))
    return names


FILES = sorted(ROOT.rglob("*.py"))


def test_every_file_is_covered() -> None:
    assert len(FILES) > 30
    assert {part_of(path) for path in FILES} == set(ALLOWED)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        for name in imported(path)
        if name.startswith("deepbregman.")
        if name.split(".")[1] not in ALLOWED[part_of(path)] | {part_of(path)}
    ]
    assert wrong == []


def test_the_allowed_edges_have_no_cycle() -> None:
    left = {part: set(edges) for part, edges in ALLOWED.items()}
    while left:
        free = [part for part, edges in left.items() if not edges & set(left)]
        assert free, f"a cycle among {sorted(left)}"
        for part in free:
            del left[part]


def test_what_needs_no_torch_imports_none() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        if part_of(path) in NO_TORCH
        for name in imported(path)
        if name.split(".")[0] in {"torch", "torchvision", "lightning_fabric"}
    ]
    assert wrong == []


def test_no_drawer_for_leftovers() -> None:
    assert not [path for path in FILES if path.stem in FORBIDDEN_NAMES]


def test_files_stay_short() -> None:
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := p.read_text().count("\n")) > 300}
    # config.py is a table: a field and a sentence each.
    assert set(long) <= {"config.py"}
