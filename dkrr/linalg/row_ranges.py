"""Ranges of rows for tasks that go over a data set once, a function of n and of the width alone.

So the sums over rows are the same bits on any number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROW_MULTIPLE", "RowRanges"]

# 64 tasks keep 16 workers busy; fewer where they would be shorter than about 0.1 s
MAX_TASKS = 64
MIN_TASK_ENTRIES = 5e7
ROW_MULTIPLE = 256


@dataclass(frozen=True)
class RowRanges:
    """n rows in ranges of ``size``, the last one smaller."""

    n: int
    size: int

    @classmethod
    def of(cls, n: int, m: int) -> RowRanges:
        """At most 64 ranges, of at least 5e7 kernel entries each; a function of n and m only."""
        rows = max(n / MAX_TASKS, MIN_TASK_ENTRIES / m)
        return cls(n, -int(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)

    def __len__(self) -> int:
        return -(-self.n // self.size)

    def span(self, i: int) -> tuple[int, int]:
        """First row of range i, and one past its last."""
        return i * self.size, min((i + 1) * self.size, self.n)
