"""The memory and the CPUs that this process may use."""

import math
import os
from pathlib import Path

from deepbregman.launching import under_torchrun

_GROUP = Path("/sys/fs/cgroup")
_UNKNOWN = 4 << 30  # assumed where the system does not tell


def find_free_memory() -> int:
    """Return the bytes that this process can take without swapping and within its limits.

    The least of what Linux can make free, what a container's limit leaves, and what ``ulimit -v``
    leaves. Where the system tells none of them: half of the physical memory, or 4 GiB.
    """
    bounds = [*_read_available(), *_read_group_memory(), *_read_address_space()]
    if bounds:
        return min(bounds)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return _UNKNOWN


def count_cpus(local_processes: int = 1) -> int:
    """Return how many CPUs each of the job's processes on this machine has for itself, at least 1.

    srun binds each process to CPUs of its own; otherwise all share them. The CPUs that SLURM gives
    to a job and the limit of a container count as well: they are for all processes together.
    """
    everything = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everything
    is_bound = not under_torchrun() and allowed * local_processes <= everything
    mine = allowed if is_bound else allowed // local_processes
    told = os.environ.get("SLURM_CPUS_ON_NODE", "")
    shared = [int(told)] if told.isdecimal() else []
    shared += [math.ceil(cpus) for cpus in _read_group_cpus()]
    return max(1, min([mine, *(cpus // local_processes for cpus in shared)]))


def _read_group_cpus() -> list[float]:
    """Return the number of CPUs that a container may use, if its time is limited."""
    try:
        quota, period = (_GROUP / "cpu.max").read_text().split()  # cgroups version 2
        return [] if quota == "max" else [int(quota) / int(period)]
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        quota, period = (
            (_GROUP / "cpu" / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period")
        )
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError, ZeroDivisionError):
        return []


def _read_available() -> list[int]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return []


def _read_group_memory() -> list[int]:
    """Return what the limit of a container leaves; the system drops cached files by itself."""
    try:
        limit, used = ((_GROUP / f"memory.{x}").read_text().strip() for x in ("max", "current"))
        if limit == "max":
            return []
        counts = dict(x.split() for x in (_GROUP / "memory.stat").read_text().splitlines())
        cached = sum(int(counts.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
        return [max(0, int(limit) - int(used) + cached)]
    except (OSError, ValueError):
        return []


def _read_address_space() -> list[int]:
    try:
        import resource
    except ImportError:  # Windows
        return []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError):
        pages = 0
    return [max(0, limit - pages * resource.getpagesize())]
