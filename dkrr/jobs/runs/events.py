"""What happened in a run: JSON lines in numbered segments, ``events/000000.jsonl`` and so on.

A segment is written once, whole, and never appended to, for object stores cannot append; numbers have no gaps, so a
reader goes by exact names and needs no listing. An event is an object with ``time`` (UTC, ISO 8601), ``epoch`` (of the
driver), ``kind`` (state, phase, cluster, warning, error, request) and ``message``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from dkrr.jobs.runs.directory import RunDirectory

__all__ = ["EventLog", "Follower", "read_events", "segment_name", "utc_now"]

MAX_EVENTS = 1000


def utc_now() -> str:
    """Date and time in UTC, to the millisecond, as text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def segment_name(number: int) -> str:
    """Name of a segment in the run's directory."""
    return f"events/{number:06d}.jsonl"


class EventLog:
    """Collects events of one driver; :meth:`flush` makes a segment of them. Any thread may add.

    At most 1,000 events are kept between two flushes (a driver that warns in a loop must not fill memory or disk); how
    many were dropped is said.
    """

    def __init__(self, directory: RunDirectory, epoch: int) -> None:
        self.directory, self.epoch = directory, epoch
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        self._num_dropped = 0
        self._next: int | None = None

    def add(self, kind: str, message: str, **facts: Any) -> None:
        """Remember an event."""
        event = {"time": utc_now(), "epoch": self.epoch, "kind": kind, "message": message, **facts}
        with self._lock:
            if len(self._waiting) < MAX_EVENTS:
                self._waiting.append(event)
            else:
                self._num_dropped += 1

    def flush(self) -> None:
        """Write what was added since the last time as a new segment; nothing when nothing was.

        Raises
        ------
        OSError, StoreError
            It cannot be written; the events are kept for the next time.
        """
        with self._lock:
            events, dropped = list(self._waiting), self._num_dropped
        if not events:
            return
        lines = [json.dumps(event, sort_keys=True) for event in events]
        if dropped:
            note = f"{dropped} more events were dropped"
            lines.append(json.dumps({"time": utc_now(), "epoch": self.epoch, "kind": "warning", "message": note}))
        data = "".join(f"{line}\n" for line in lines).encode()
        if self._next is None:
            self._next = first_free(lambda number: self.directory.has(segment_name(number)))
        while not self.directory.create(segment_name(self._next), data):
            self._next += 1
        self._next += 1
        with self._lock:
            del self._waiting[: len(events)]
            self._num_dropped -= dropped


def first_free(exists: Callable[[int], bool]) -> int:
    """The smallest number that does not exist, where those below it all do; asks about 2 log2(number) times."""
    step = 1
    while exists(step - 1):
        step *= 2
    low, high = step // 2, step - 1  # low - 1 exists (or low is 0), high does not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if exists(middle) else (low, middle)
    return low


def read_events(directory: RunDirectory, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every event from segment ``start`` on, with the number of its segment, up to what is there now."""
    number = start
    while (data := directory.read_bytes(segment_name(number))) is not None:
        for line in data.decode(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                event = {"time": "", "kind": "warning", "message": f"unreadable line in {segment_name(number)}"}
            yield number, event
        number += 1


class Follower:
    """Hands out each event of a run once, and each line that its driver printed."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._segment = 0
        self._offset = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Events that were not there the last time."""
        for number, event in read_events(self.directory, self._segment):
            self._segment = number + 1
            yield event

    def log_lines(self) -> Iterator[str]:
        """Whole lines of ``driver.log`` that were not there the last time."""
        data = (self.directory.read_bytes("driver.log") or b"")[self._offset :]
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from whole.decode(errors="replace").splitlines()
