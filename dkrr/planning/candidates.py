"""The nouns of a plan: what is to be solved, what there is, and one way to solve it with its price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dkrr.kernels import Kernel
from dkrr.linalg.factor.schedule import Split
from dkrr.linalg.settings import way_name
from dkrr.planning.iterations import Iterations

__all__ = ["Candidate", "Limits", "Problem"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be solved, as far as its cost goes. ``kernel`` is resolved, None for a given matrix.

    ``primal``: whether who asks can do without tiles and dual coefficients, so that "auto" may become primal.
    """

    num_rows: int
    num_features: int
    num_targets: int
    kernel: Kernel | None
    alpha: tuple[float, ...]
    fit_intercept: bool = False
    primal: bool = False

    @property
    def num_alphas(self) -> int:
        """Distinct values of alpha: so many factors are needed."""
        return len(set(self.alpha))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What there is: tasks at once, memory of a task, memory of this process, disk; None where nothing limits it.

    ``fetches``: the store is no local folder, so that what a task reads is fetched instead of being mapped.
    """

    threads: int
    memory_bytes: int | None
    driver_bytes: int | None = None
    disk_bytes: int | None = None
    fetches: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to solve, and its price. ``infeasible`` says why it cannot be taken, "" when it can.

    ``seconds`` are those of ``iterations.high``; ``seconds_low`` is the total at ``iterations.low``. ``split`` says
    which sums of a factor are split, and ``efficiency`` is the share of the workers' time that a simulation of the
    factor finds busy, 0 where there is none. ``memory_bytes`` is the peak of a worker with one thread,
    ``client_bytes`` that of this process beside its interpreter.
    """

    solver: str
    precision: str
    gram: str
    tile_size: int
    rank: int = 0
    num_centers: int = 0
    iterations: Iterations | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_low: float = 0.0
    memory_bytes: int = 0
    client_bytes: int = 0
    disk_bytes: dict[str, int] = field(default_factory=dict)
    infeasible: str = ""
    split: Split | None = None
    efficiency: float = 0.0

    @property
    def total_seconds(self) -> float:
        """At the upper end of the iterations."""
        return sum(self.seconds.values())

    @property
    def name(self) -> str:
        """``cg mixed, rank 500``."""
        if self.solver == "primal":
            return "primal float64"
        if self.solver == "nystrom":
            return f"nystrom {self.precision}, {self.num_centers:,} centres"
        return way_name(self.solver, self.precision, self.gram, self.rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"name": self.name, "total_seconds": self.total_seconds}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        """Inverse of :meth:`to_dict`; what a later version added is left out."""
        known: dict[str, Any] = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        for name, kind in (("iterations", Iterations), ("split", Split)):
            if known.get(name) is not None:
                known[name] = kind(**known[name])
        return cls(**known)
