import os
import resource
import sys
from pathlib import Path

import pytest

from deepbregman.data import memory
from deepbregman.data.memory import free_memory


def _group(folder: Path, limit: str, used: int = 0, cached: int = 0) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\nactive_file {cached // 2}\ninactive_file {cached - cached // 2}\n"
    )


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    return tmp_path


def test_what_linux_could_make_free(group: Path) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) * 1024
    assert 0 < free_memory() <= total


def test_limit_of_a_container_less_what_is_used_and_not_cached(group: Path) -> None:
    _group(group, "10000", used=7000, cached=5001)
    assert free_memory() == 10_000 - 7000 + 5001
    _group(group, "10000", used=12_000)
    assert free_memory() == 0


@pytest.mark.parametrize("limit", ["max", "damaged", ""])
def test_container_without_a_limit(group: Path, limit: str) -> None:
    without = free_memory()
    _group(group, limit)
    assert free_memory() > 0.2 * without  # it changes while others work


@pytest.mark.usefixtures("little_memory")
def test_limit_of_the_address_space(group: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    assert 100_000_000 < free_memory() <= 300_000_000


def test_systems_without_proc_cgroups_and_resource(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and macOS."""
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it fails
    monkeypatch.setattr(memory, "_available", list)
    assert 1 << 28 < free_memory() < 1 << 50
    monkeypatch.delattr(os, "sysconf")
    assert free_memory() == 4 << 30
