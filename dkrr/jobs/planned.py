"""The noun of a plan: what a job needs, what is there, and what "auto" became, as it is shown and recorded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dkrr.errors import PlanRefusedError

__all__ = ["Plan"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Everything that "auto" became, what it needs, and what is there.

    Sizes are in bytes: ``task_bytes`` is the peak of a worker, ``client_bytes`` that of this process. Times are in
    seconds: ``estimated_seconds`` at the upper end of ``iterations``,
    ``estimated_low_seconds`` the total at the lower end. ``choice`` is what was asked for, ``candidates`` what else was
    possible, ``reasons`` a sentence for each of "solver", "precision", "rank" (of cg) and "tile_size" (of a factor).
    ``split`` are the sums of the factor that are split, see :class:`~dkrr.linalg.factor.schedule.Split`;
    ``expected_efficiency`` is the share of the workers' time that a simulation of the factorisation finds busy, 0 where
    there is no factor. ``reused`` is what earlier fits in the store save: "factor" (rows, tiles, flops, seconds),
    "scaling" and "center", and empty where all is computed. ``loss`` is another one than the square: "loss", "C", and
    "quantile" or "epsilon" where the job has it.
    """

    num_rows: int
    num_test_rows: int
    num_features: int
    num_targets: int
    kernel: dict[str, Any]
    alpha: list[float]
    solver: str
    precision: str
    gram: str
    tile_size: int
    num_tiles_per_side: int
    num_tasks: int
    flops: float
    workers: int
    threads_per_worker: int
    memory_limit_bytes: int | None
    task_bytes: int
    disk_bytes: dict[str, int]
    disk_present_bytes: int
    disk_free_bytes: int | None
    estimated_seconds: dict[str, float]
    calibration: dict[str, float]
    client_bytes: int = 0
    split: dict[str, int] | None = None
    expected_efficiency: float = 0.0
    rank: int = 0
    iterations: list[float] | None = None
    estimated_low_seconds: float = 0.0
    choice: dict[str, Any] = field(default_factory=dict)
    nystrom: dict[str, Any] | None = None
    loss: dict[str, Any] | None = None
    candidates: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)
    reused: dict[str, Any] = field(default_factory=dict)

    @property
    def disk_needed_bytes(self) -> int:
        """Bytes still to be written."""
        return max(0, sum(self.disk_bytes.values()) - self.disk_present_bytes)

    @property
    def total_seconds(self) -> float:
        """Estimated wall time."""
        return sum(self.estimated_seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {
            "disk_needed_bytes": self.disk_needed_bytes,
            "total_seconds": self.total_seconds,
        }

    def check(self) -> None:
        """Raise :class:`~dkrr.errors.PlanRefusedError` when the job cannot fit."""
        if self.refusal:
            raise PlanRefusedError(self.refusal, hint=self.hint)

    def __repr__(self) -> str:
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        Console(width=100, file=text).print(self.table())
        return text.getvalue()

    def table(self) -> Any:
        """The plan as a rich table."""
        from dkrr.jobs.tables import facts_table, plan_facts

        return facts_table("plan", plan_facts(self))

    def __rich__(self) -> Any:
        return self.table()

    def _repr_html_(self) -> str:
        """For notebooks."""
        from dkrr.jobs.tables import plan_facts
        from dkrr.markup import facts_html

        return facts_html("plan", plan_facts(self))
