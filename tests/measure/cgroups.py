"""A hard memory limit on a whole job, page cache included: a control group of its own.

The group is made below the one that this process is in (version 1; version 2 also beside it), so the job stays within
whatever limits hold for the caller. Needs the right to make one: root, or a delegated group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LimitedGroup", "NoControlGroupError", "limited_group"]

MOUNT = Path("/sys/fs/cgroup")


class NoControlGroupError(Exception):
    """No control group with a memory limit can be made here; the message says what was tried."""


@dataclass(frozen=True)
class LimitedGroup:
    """A control group with a memory limit."""

    path: Path
    version: int
    limit_bytes: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command: it enters the group, then becomes the command."""
        return ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"))

    @property
    def peak_bytes(self) -> int:
        """The most memory that was ever charged to the group, page cache included."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")).read_text())

    @property
    def num_kills(self) -> int:
        """Processes of the group that the kernel killed for the limit."""
        text = (self.path / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[LimitedGroup]:
    """A new group with a limit; at the end its processes are killed and it is removed.

    Raises
    ------
    NoControlGroupError
        None can be made here.
    """
    group = _create(limit_bytes)
    try:
        yield group
    finally:
        for _ in range(100):
            for pid in (group.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                group.path.rmdir()
                break
            except OSError:
                time.sleep(0.1)  # the kernel gives the last process' pages back
        else:
            raise RuntimeError(f"{group.path} cannot be removed")


def _create(limit_bytes: int) -> LimitedGroup:
    tried = []
    for parent, version in _parents():
        path = parent / f"dkrr-measure-{uuid.uuid4().hex[:8]}"
        try:
            path.mkdir()
        except OSError as exc:
            tried.append(f"{parent}: {exc.strerror}")
            continue
        try:
            _limit(path, version, limit_bytes)
        except OSError as exc:
            path.rmdir()
            tried.append(f"{parent}: no memory limit can be set ({exc.strerror})")
            continue
        return LimitedGroup(path, version, limit_bytes)
    raise NoControlGroupError("no control group with a memory limit: " + ("; ".join(tried) or "none is mounted"))


def _limit(path: Path, version: int, limit_bytes: int) -> None:
    if version == 1:
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        with_swap = path / "memory.memsw.limit_in_bytes"
        if with_swap.exists():
            with_swap.write_text(str(limit_bytes))
        return
    (path / "memory.max").write_text(str(limit_bytes))
    with contextlib.suppress(FileNotFoundError):  # a kernel without swap
        (path / "memory.swap.max").write_text("0")


def _parents() -> Iterator[tuple[Path, int]]:
    """Groups in which one with a memory limit may be made, and their version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield MOUNT / "memory" / name.lstrip("/"), 1
        elif not controllers:
            own = MOUNT / name.lstrip("/")
            # a group with processes cannot have children with limits, so the new one may have to be a sibling
            for parent in dict.fromkeys((own, own.parent)):
                control = parent / "cgroup.subtree_control"
                if control.exists() and "memory" in control.read_text().split():
                    yield parent, 2
