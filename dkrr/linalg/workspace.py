"""Workspace: where a solve keeps its arrays, who runs its tasks, and what every phase did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dkrr.engine.tasks import Executor, Progress, RunSummary
from dkrr.linalg.factor.schedule import Split

__all__ = ["Workspace"]


@dataclass
class Workspace:
    """Where a solve keeps its arrays and who runs its tasks; collects what every phase did.

    ``durable`` makes finished arrays survive a power failure (fsync at the end of a phase). ``split`` says which sums
    of a factor are split; None leaves it to :func:`~dkrr.linalg.factor.schedule.usual_split`.
    """

    store: Any
    executor: Executor
    progress: Progress | None = None
    blas: str = ""
    durable: bool = False
    split: Split | None = None
    phases: dict[str, RunSummary] = field(default_factory=dict)

    def record(self, phase: str, summary: RunSummary) -> RunSummary:
        """Add the figures of a phase."""
        if phase in self.phases:
            self.phases[phase].merge(summary)
        else:
            self.phases[phase] = summary
        return summary
