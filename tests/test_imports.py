"""Imports go one way, and the method knows nothing of the laboratory around it."""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np

import deepbregman

ROOT = Path(deepbregman.__file__).parent
FOUNDATION = {
    *("errors", "statistics", "config", "files", "runs", "launching", "terminal"),
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "statistics": set(),
    "config": {"errors"},
    "files": {"errors"},
    "runs": {"errors", "config", "files"},
    "launching": {"errors"},
    "terminal": {"errors"},
    "method": set(),
    "data": FOUNDATION - {"runs"},
    "objectives": {"errors", "config", "method"},
    "training": FOUNDATION | {"method", "objectives", "data"},
    "evaluation": FOUNDATION | {"method", "objectives", "data", "training"},
    "reporting": FOUNDATION,
    "exporting": FOUNDATION | {"method", "objectives", "data", "training"},
    "commands/parameters": {"errors", "config", "files", "runs", "terminal", "data", "evaluation"},
    "commands/pretrain_options": {"errors", "config", "runs", "terminal", "data"},
    # The main job: studies train their arms by it.
    "commands/job": FOUNDATION
    | {"commands/pretrain_options", "method", "objectives", "data", "training", "evaluation"},
    "commands/pretrain": FOUNDATION
    | {"commands/parameters", "commands/pretrain_options", "commands/job"}
    | {"objectives", "data", "training"},
    "studies": FOUNDATION
    | {"method", "objectives", "data", "training", "evaluation", "reporting", "exporting"}
    | {"commands/pretrain"},
    "benchmarking": FOUNDATION | {"method", "objectives", "data", "training"},
    "commands": FOUNDATION
    | {
        "commands/parameters",
        "commands/pretrain_options",
        "commands/pretrain",
        "method",
        "objectives",
        "data",
        "training",
        "evaluation",
    }
    | {"studies", "benchmarking", "reporting", "exporting"},
    "cli": {"errors", "config", "launching", "terminal", "commands", "commands/parameters"},
    "__main__": {"cli"},
    "__init__": set(),
}
FORBIDDEN_NAMES = {"utils", "common", "misc", "helpers"}
NO_TORCH = FOUNDATION | {"reporting", "cli", "commands/parameters", "commands/pretrain_options"}


def part_of(path: Path) -> str:
    return part_named(path.relative_to(ROOT).with_suffix("").parts)


def part_named(names: Sequence[str]) -> str:
    """The entry of the table that a module belongs to: its own, or that of its folder."""
    return "/".join(names[:2]) if "/".join(names[:2]) in ALLOWED else names[0]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    """Every node that no running program sees."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imported(path: Path, running: bool = False) -> set[str]:
    """Every module a file imports, anywhere in it or when it runs, as a dotted name."""
    package = ["deepbregman", *path.relative_to(ROOT).parts[:-1]]
    tree = parse(path)
    left_out = for_type_checkers(tree) if running else set()
    names = set()
    for node in set(ast.walk(tree)) - left_out:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            if module == ["deepbregman"]:
                modules = (alias.name for alias in node.names if alias.name != "__version__")
                names |= {f"deepbregman.{module}" for module in modules}
            else:
                names.add(".".join(module))
                names |= {".".join([*module, alias.name]) for alias in node.names if running}
    return names


FILES = sorted(ROOT.rglob("*.py"))


def test_every_file_is_covered():
    assert len(FILES) > 30
    assert {part_of(path) for path in FILES} == set(ALLOWED)


def test_imports_go_one_way():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        for name in imported(path)
        if name.startswith("deepbregman.")
        if part_named(name.split(".")[1:]) not in ALLOWED[part_of(path)] | {part_of(path)}
    ]
    assert wrong == []


def test_the_allowed_edges_have_no_cycle():
    left = {part: set(edges) for part, edges in ALLOWED.items()}
    while left:
        free = [part for part, edges in left.items() if not edges & set(left)]
        assert free, f"a cycle among {sorted(left)}"
        for part in free:
            del left[part]


def test_no_circle_of_modules():
    """Imports inside functions count as well: two modules that need each other are one."""
    names = {
        ".".join(["deepbregman", *path.relative_to(ROOT).with_suffix("").parts]): path
        for path in FILES
    }
    edges = {name: imported(path, running=True) & names.keys() for name, path in names.items()}
    TopologicalSorter(edges).prepare()  # raises CycleError


def test_what_needs_no_torch_imports_none():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        if part_of(path) in NO_TORCH
        for name in imported(path)
        if name.split(".")[0] in {"torch", "torchvision", "lightning_fabric"}
    ]
    assert wrong == []


def test_no_drawer_for_leftovers():
    assert not [path for path in FILES if path.stem in FORBIDDEN_NAMES]


def test_every_suppression_names_its_rule_and_its_reason():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"# (type: ignore|noqa)", line)
        and not re.search(r"# (type: ignore\[[\w,-]+\]|noqa: [A-Z]+\d+)  # \S", line)
    ]
    assert wrong == []


def test_verbs_that_do_not_train_do_not_load_the_compiler():
    program = (
        "import sys, torch\n"
        "with_torch = 'torch._dynamo' in sys.modules\n"
        "import deepbregman.evaluation.gallery, deepbregman.evaluation.labelling\n"
        "sys.exit('torch._dynamo' in sys.modules and not with_torch)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_pretraining_loads_no_package_that_it_does_not_need(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", train_images=images)
    words = ["pretrain", "simclr", "--data.source", "images.npz", "--run", "run"]
    words += ["--encoder.name", "small", "--training.batch-size", "8", "--training.epochs", "1"]
    program = (
        "import sys\nfrom deepbregman.cli import main\n"
        f"main({words})\n"
        "unneeded = 'torchmetrics torchvision transformers scipy sklearn pandas altair optuna'\n"
        "print('loaded:', set(unneeded.split()) & set(sys.modules))\n"
        "import torchmetrics, lightning_fabric.utilities.imports as found\n"
        "assert torchmetrics.Metric\n"
        "assert getattr(found, '_TORCHMETRICS_GREATER_EQUAL_1_0_0', True)\n"  # its own name
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "loaded: set()"
