"""Follow a run: each event once, and each line that its driver printed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import read_events

__all__ = ["Follower"]


class Follower:
    """Remembers how far it has read."""

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
