"""How much memory this process may still take."""

import os
import resource
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the bytes that could be taken without swapping and within this process's limits.

    The least of what Linux could make free, of what a container's limit leaves, and of what
    ``ulimit -v`` leaves; half of the memory where the system says none of that.
    """
    bounds = [*_available(), *_left_in_group(), *_left_in_address_space()]
    return min(bounds) if bounds else _pages(os.sysconf("SC_PHYS_PAGES")) // 2


def _pages(count: int) -> int:
    return count * resource.getpagesize()


def _available() -> list[int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return []


def _left_in_group() -> list[int]:
    """Return what the limit of a container leaves; cached files would make room by themselves."""
    try:
        limit, used = ((_GROUP / f"memory.{x}").read_text().strip() for x in ("max", "current"))
        if limit == "max":
            return []
        counts = dict(x.split() for x in (_GROUP / "memory.stat").read_text().splitlines())
        cached = sum(int(counts.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
        return [max(0, int(limit) - int(used) + cached)]
    except (OSError, ValueError):
        return []


def _left_in_address_space() -> list[int]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        used = _pages(int(Path("/proc/self/statm").read_text().split()[0]))
    except (OSError, ValueError):
        used = 0
    return [max(0, limit - used)]
