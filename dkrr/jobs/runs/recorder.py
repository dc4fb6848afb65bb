"""What a driver records beside its status: samples of memory and rate, and the map of the tiles.

The thread that works counts flops here, the heartbeat takes the samples; ``samples.json`` is written every 20 s and at
the end, for a page that is read when the run is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.samples import Samples, read_attempts
from dkrr.jobs.runs.status import Status
from dkrr.jobs.runs.tilemap import TileMap

__all__ = ["Reading", "Recorder"]

WRITE_SECONDS = 20.0


class Reading(Protocol):
    """Resident bytes of each worker, and (phase, key) of the tasks that ran; see :mod:`dkrr.engine.activity`."""

    @property
    def memory_bytes(self) -> dict[str, int]: ...

    @property
    def running(self) -> tuple[tuple[str, tuple[int, ...]], ...]: ...


class Recorder:
    """Samples and tiles of one attempt.

    Parameters
    ----------
    epoch, started_at
        Of the attempt.
    """

    def __init__(self, epoch: int, started_at: str) -> None:
        self.tasks = TileMap()
        self.samples = Samples(epoch, started_at)
        self.activity: Callable[[], Reading | None] | None = None
        self._earlier: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._began = self._written = time.monotonic()
        self._flops_seen, self._work = 0.0, 0.0
        self._sampled = (self._began, 0.0)

    def begin(self, directory: RunDirectory) -> None:
        """Find what earlier attempts recorded."""
        self._earlier = [item for item in read_attempts(directory) if item.get("epoch") != self.samples.epoch]

    def count(self, flops_done: float, *, anew: bool = False) -> float:
        """So many flops of the phase are done; with ``anew``, they were done before it began. Those of the phase."""
        with self._lock:
            if not anew:
                self._work += max(0.0, flops_done - self._flops_seen)
            before, self._flops_seen = self._flops_seen, flops_done
            return before

    def sample(self) -> int:
        """Take a sample, and hear which tiles run; the resident bytes of the largest worker, 0 while unknown."""
        found = None if self.activity is None else self.activity()
        memory = {} if found is None else dict(found.memory_bytes)
        now = time.monotonic()
        with self._lock:
            before, work = self._sampled
            rate = (self._work - work) / (now - before) if now > before else 0.0
            self._sampled = now, self._work
            self.samples.add(now - self._began, rate, memory)
        if found is not None:
            self.tasks.running(key for phase, key in found.running if phase == self.tasks.phase)
        return max(memory.values(), default=0)

    def write(self, directory: RunDirectory, status: Status, *, now: bool = False) -> None:
        """Write ``samples.json`` when it is due, or ``now``."""
        if now or time.monotonic() - self._written >= WRITE_SECONDS:
            self._written = time.monotonic()
            self.samples.write(directory, self._earlier, state=status.state, phases=dict(status.phases))
