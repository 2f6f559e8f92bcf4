import os
import resource
import sys
from pathlib import Path

import pytest

from deepbregman.data import memory
from deepbregman.data.memory import find_free_memory
from deepbregman.launching import _TORCHRUN


def _group(folder: Path, limit: str, used: int = 0, cached: int = 0) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\nactive_file {cached // 2}\ninactive_file {cached - cached // 2}\n"
    )


@pytest.fixture
def group(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    return tmp_path


def test_what_linux_could_make_free(group):
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) * 1024
    assert 0 < find_free_memory() <= total


def test_limit_of_a_container_less_what_is_used_and_not_cached(group):
    _group(group, "10000", used=7000, cached=5001)
    assert find_free_memory() == 10_000 - 7000 + 5001
    _group(group, "10000", used=12_000)
    assert find_free_memory() == 0


@pytest.mark.parametrize("limit", ["max", "damaged", ""])
def test_container_without_a_limit(group, limit):
    without = find_free_memory()
    _group(group, limit)
    assert find_free_memory() > 0.2 * without  # it changes while others work


@pytest.mark.usefixtures("little_memory")
def test_limit_of_the_address_space(group):
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    assert 100_000_000 < find_free_memory() <= 300_000_000


def test_systems_without_proc_cgroups_and_resource(group, monkeypatch):
    """Windows and macOS."""
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it fails
    monkeypatch.setattr(memory, "_read_available", list)
    assert 1 << 28 < find_free_memory() < 1 << 50
    monkeypatch.delattr(os, "sysconf")
    assert find_free_memory() == 4 << 30


class TestCpus:
    """CPUs of the job: by what the process is bound to, and by a container's quota."""

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path, monkeypatch) -> None:
        """64 CPUs, and no container."""
        monkeypatch.setattr(memory, "_GROUP", tmp_path)
        monkeypatch.setattr(memory.os, "cpu_count", lambda: 64)
        monkeypatch.setattr(memory.os, "sched_getaffinity", lambda _: range(64), raising=False)
        for name in (*_TORCHRUN, "SLURM_CPUS_ON_NODE"):
            monkeypatch.delenv(name, raising=False)

    def test_processes_share_the_machine(self):
        assert [memory.count_cpus(count) for count in (1, 8, 100)] == [64, 8, 1]

    def test_a_launcher_binds_each_to_its_own(self, monkeypatch):
        monkeypatch.setattr(memory.os, "sched_getaffinity", lambda _: range(8), raising=False)
        assert memory.count_cpus(8) == 8  # by srun --cpus-per-task=8
        assert memory.count_cpus(16) == 1  # all of them on the same eight

    def test_torchrun_binds_nobody(self, monkeypatch):
        monkeypatch.setattr(memory.os, "sched_getaffinity", lambda _: range(8), raising=False)
        for name in _TORCHRUN:
            monkeypatch.setenv(name, "0")
        assert memory.count_cpus(4) == 2  # of a job with a part of the machine

    @pytest.mark.parametrize(("told", "expected"), [("16", 4), ("2", 1), ("", 16), ("all", 16)])
    def test_a_job_has_the_cpus_that_slurm_tells(self, monkeypatch, told, expected):
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", told)
        assert memory.count_cpus(4) == expected  # though all CPUs of the machine are allowed

    @pytest.mark.parametrize(
        ("file", "text", "alone", "of_two"),
        [
            ("cpu.max", "400000 100000\n", 4, 2),
            ("cpu.max", "150000 100000\n", 2, 1),
            ("cpu.max", "max 100000\n", 64, 32),
            ("cpu.max", "nonsense", 64, 32),
            ("cpu/cpu.cfs_quota_us", "600000\n", 6, 3),
            ("cpu/cpu.cfs_quota_us", "-1\n", 64, 32),
        ],
    )
    def test_the_quota_of_a_container(self, tmp_path, file, text, alone, of_two):
        (tmp_path / "cpu").mkdir()
        (tmp_path / file).write_text(text)
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        assert (memory.count_cpus(), memory.count_cpus(2)) == (alone, of_two)
