"""The time and memory that a search has: what trials will take at the rate so far, and how many there is time for.

The time that counts is that which trials took when they ran. One that is read back after an interruption counts as
much again, so that the search continues as it would have without the interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapreplace

from dkrr.selection.trials import Trial, trial_bytes, trial_flops

__all__ = ["Budget"]


@dataclass(kw_only=True)
class Budget:
    """Seconds on ``num_threads`` threads, bytes for a task (None: no limit), and notes on what was left out."""

    total_seconds: float
    num_threads: int
    memory_bytes: int | None = None
    spent_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    _rates: dict[str, float] = field(default_factory=dict)
    _made: dict[str, float] = field(default_factory=dict)  # evaluations made, as a share of those allowed

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self.total_seconds - self.spent_seconds)

    def spend(self, trials: Sequence[Trial], seconds: Sequence[float], evaluated: Sequence[int]) -> None:
        """Count trials that ran beside each other, and learn their rate."""
        work = sum(
            trial_flops(replace(trial, num_evaluations=count)) for trial, count in zip(trials, evaluated, strict=True)
        )
        self.spent_seconds += _wall_seconds(seconds, self.num_threads)
        self._rates[trials[0].kind] = sum(seconds) / work
        self._made[trials[0].kind] = work / sum(trial_flops(trial) for trial in trials)

    def seconds_for(self, trials: Sequence[Trial]) -> float:
        """About how long trials take, if they make as large a share of their evaluations as the last of their kind.

        Rather too much than too little: the rate is that of fewer rows, which are slower for each flop.
        """
        rate = self._rates.get(trials[0].kind, self._rates["search"]) * self._made.get(trials[0].kind, 1.0)
        return _wall_seconds([rate * trial_flops(trial) for trial in trials], self.num_threads)

    def allows(self, trials: Sequence[Trial], share: float = 1.0) -> bool:
        """Whether trials fit into a share of the time that is left, and into memory."""
        if self.memory_bytes is not None and max(trial_bytes(trial) for trial in trials) > self.memory_bytes:
            return False
        return self.seconds_for(trials) <= share * self.left

    def affordable(self, trials: list[Trial], share: float, *, least: int = 0, group: int = 1) -> list[Trial]:
        """As many of the first trials as :meth:`allows` lets pass, and at least so many; notes what is left out.

        ``group``: so many trials belong together, all of them or none.
        """
        count = len(trials)
        while count > least and not self.allows(trials[:count], share):
            count -= group
        if count < len(trials):
            self.notes.append(
                f"{trials[0].stage}: {count} of {len(trials)} trials; all would take {self.seconds_for(trials):.0f} s, "
                f"{self.left:.0f} s are left"
            )
        return trials[:count]


def _wall_seconds(seconds: Sequence[float], num_threads: int) -> float:
    """When the last of some tasks ends that begin in this order, each on the thread that is free first."""
    ends = [0.0] * min(num_threads, len(seconds))
    for taken in seconds:
        heapreplace(ends, ends[0] + taken)
    return max(ends, default=0.0)
