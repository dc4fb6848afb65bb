"""Memory of the workers, and the rate, over the time of a run: ``samples.json``, bounded however long it takes.

A sample is taken with each heartbeat. When 240 are there, neighbours become one (the larger of two sizes, the mean of
two rates) and every later one stands for twice the time. Up to 12 workers have a curve each; of more, the largest, the
median and the smallest are kept. The last eight attempts have an entry each, of some 30 kB at most. The document is
written every 20 s and at the end, for a page that is read when the run is over.

Nothing here imports more than the standard library.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.status import Status

__all__ = ["NAME", "Recorder", "Samples", "read_attempts"]

NAME = "samples.json"
MOST_SAMPLES = 240
WRITE_SECONDS = 20.0
MOST_WORKERS = 12
MOST_ATTEMPTS = 8
DRIVER = "driver"
ENVELOPE = ("largest", "median", "smallest")


class Samples:
    """The samples of one attempt.

    Parameters
    ----------
    epoch, started_at
        Of the attempt.
    """

    def __init__(self, epoch: int, started_at: str) -> None:
        self.epoch, self.started_at = epoch, started_at
        self.seconds: list[float] = []
        self.rates: list[float] = []
        self.memory: dict[str, list[int | None]] = {}
        self.num_workers = 0
        self._every, self._waiting = 1, 0
        self._workers: set[str] = set()

    def add(self, seconds: float, flops_per_second: float, memory_bytes: dict[str, int]) -> None:
        """Take a sample: seconds since the attempt began, the rate since the last sample, resident bytes by worker."""
        columns = self._columns(memory_bytes) | {DRIVER: resident_bytes()}
        self._waiting += 1
        if self._waiting > 1 and self.seconds:
            self._combine(len(self.seconds) - 1, seconds, flops_per_second, columns)
        else:
            for name in columns.keys() - self.memory.keys():
                self.memory[name] = [None] * len(self.seconds)
            self.seconds.append(round(seconds, 2))
            self.rates.append(flops_per_second)
            for name, values in self.memory.items():
                values.append(columns.get(name))
        if self._waiting >= self._every:
            self._waiting = 0
        if len(self.seconds) >= MOST_SAMPLES and not self._waiting:
            self._halve()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "epoch": self.epoch,
            "started_at": self.started_at,
            "num_workers": self.num_workers,
            "seconds": self.seconds,
            "flops_per_second": [round(rate) for rate in self.rates],
            "memory_bytes": self.memory,
        }

    def write(self, directory: RunDirectory, earlier: list[dict[str, Any]], **facts: Any) -> None:
        """Replace ``samples.json`` by the attempts before this one and this one, with more facts about it."""
        directory.write(NAME, {"attempts": [*earlier[1 - MOST_ATTEMPTS :], self.to_dict() | facts]})

    def _columns(self, memory_bytes: dict[str, int]) -> dict[str, int]:
        """What is kept of the workers: each one, or three figures where there are or were many."""
        self.num_workers = max(self.num_workers, len(memory_bytes))
        if len(self._workers) <= MOST_WORKERS:
            self._workers |= memory_bytes.keys()
        if len(self._workers) <= MOST_WORKERS:
            return dict(memory_bytes)
        for name in [name for name in self.memory if name not in (DRIVER, *ENVELOPE)]:
            self._into_envelope(self.memory.pop(name))
        sizes = sorted(memory_bytes.values())
        if not sizes:
            return {}
        return dict(zip(ENVELOPE, (sizes[-1], int(statistics.median(sizes)), sizes[0]), strict=True))

    def _into_envelope(self, values: list[int | None]) -> None:
        """A curve that is given up still counts for the largest."""
        largest = self.memory.setdefault(ENVELOPE[0], [None] * len(values))
        for k, value in enumerate(values):
            largest[k] = _larger(largest[k], value)

    def _combine(self, k: int, seconds: float, rate: float, columns: dict[str, int]) -> None:
        """Put a sample to the last one, which stands for several."""
        count = self._waiting
        self.seconds[k] = round(seconds, 2)
        self.rates[k] += (rate - self.rates[k]) / count
        for name in columns.keys() - self.memory.keys():
            self.memory[name] = [None] * len(self.seconds)
        for name, value in columns.items():
            self.memory[name][k] = _larger(self.memory[name][k], value)

    def _halve(self) -> None:
        self.seconds = self.seconds[1::2]
        self.rates = [(a + b) / 2 for a, b in zip(self.rates[::2], self.rates[1::2], strict=True)]
        for name, values in self.memory.items():
            self.memory[name] = [_larger(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        self._every *= 2


def _larger(a: int | None, b: int | None) -> int | None:
    known = [value for value in (a, b) if value is not None]
    return max(known) if known else None


def resident_bytes() -> int:
    """Resident memory of this process now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def read_attempts(directory: RunDirectory) -> list[dict[str, Any]]:
    """The attempts in ``samples.json``, oldest first; none where there is no such document."""
    found = (directory.read(NAME) or {}).get("attempts")
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


class Recorder:
    """Takes and writes the samples of one attempt; ``memory()`` says the resident bytes of each worker.

    The thread that works counts flops here, the heartbeat takes the samples.

    Parameters
    ----------
    epoch, started_at
        Of the attempt.
    """

    def __init__(self, epoch: int, started_at: str) -> None:
        self.samples = Samples(epoch, started_at)
        self.memory: Callable[[], dict[str, int]] | None = None
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
        """Take a sample; the resident bytes of the largest worker, 0 while unknown."""
        memory = {} if self.memory is None else self.memory()
        now = time.monotonic()
        with self._lock:
            before, work = self._sampled
            rate = (self._work - work) / (now - before) if now > before else 0.0
            self._sampled = now, self._work
            self.samples.add(now - self._began, rate, memory)
        return max(memory.values(), default=0)

    def write(self, directory: RunDirectory, status: Status, *, now: bool = False) -> None:
        """Write ``samples.json`` when it is due, or ``now``."""
        if now or time.monotonic() - self._written >= WRITE_SECONDS:
            self._written = time.monotonic()
            self.samples.write(directory, self._earlier, state=status.state, phases=dict(status.phases))
