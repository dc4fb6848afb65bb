"""Memory of this machine in bytes, as far as the control groups of this process allow it to be used."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["free_memory_bytes", "peak_rss_bytes", "total_memory_bytes"]

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def total_memory_bytes() -> int:
    """Installed memory, or the smallest memory limit of the control groups around this process."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroups())])


def free_memory_bytes() -> int:
    """Memory that can be had without swapping: available on the machine and left under every control group limit.

    Page cache counts as free, for the kernel gives it up.
    """
    return max(0, min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _cgroups())]))


def peak_rss_bytes() -> int:
    """Largest resident memory that this process ever had.

    ``VmHWM`` where there is one: ``ru_maxrss`` of a child starts with the peak of the process that started it.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and use (without inactive page cache) of every control group around this process that has a limit."""
    for folder, limit_name, use_name, cache_name in _folders():
        try:
            limit = int((folder / limit_name).read_text())
            used = int((folder / use_name).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # no limit here ("max"), or a folder that is not visible from inside a container
        yield limit, max(0, used - int(statistics.get(cache_name, 0)))


def _folders() -> Iterator[tuple[Path, str, str, str]]:
    """Folders of the control groups from this process' own up to the root; version 2, then version 1."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUP / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, *names
            if folder == root:
                break
