"""The residuals of an iteration, one after the other, kept in bounded space for whoever wants to see them later.

Workspace: where a solve keeps its arrays, who runs its tasks, and what every phase did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.tasks import Executor, Progress, RunSummary
from dkrr.errors import LockedError, StoreError
from dkrr.linalg.factor.schedule import Split
from dkrr.linalg.solution import Foreseen
from dkrr.store.files import delete_key, read_json, remove_array, write_json
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix

MOST_POINTS = 500

MOST_TARGETS = 6

MOST_TRACES = 8


@dataclass
class ResidualTrace:
    """Relative residuals of one call of conjugate gradients.

    Up to six targets have a curve each; of more, the largest, the median and the smallest residual are kept.

    Parameters
    ----------
    name
        What was iterated, with what preconditioner.
    tol
        Relative residual that was aimed at.
    alpha
        The ridges, each of them once.
    """

    name: str
    tol: float
    alpha: list[float]
    iterations: list[int] = field(default_factory=list)
    relative: list[list[float]] = field(default_factory=list)
    num_targets: int = 0
    is_over: bool = False

    def add(self, iteration: int, relative: NDArray[np.float64]) -> None:
        """The residuals (t,) after an iteration."""
        values = np.asarray(relative, dtype=np.float64)
        self.num_targets = len(values)
        if self.num_targets > MOST_TARGETS:
            values = np.array([values.max(), np.median(values), values.min()])
        self.iterations.append(iteration)
        self.relative.append(values.tolist())

    def replace(self, history: Sequence[NDArray[np.float64]]) -> None:
        """The whole history, from before the first iteration on, also of one that was resumed."""
        self.iterations, self.relative = [], []
        for iteration, relative in enumerate(history):
            self.add(iteration, relative)
        self.is_over = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data: at most 500 points, evenly spaced but for the last one."""
        names = [f"target {k}" for k in range(self.num_targets)]
        if self.num_targets > MOST_TARGETS:
            names = ["largest", "median", "smallest"]
        last = len(self.iterations) - 1
        kept = [*range(0, last, -(-last // (MOST_POINTS - 1)) or 1), last] if last >= 0 else []
        return {
            "name": self.name,
            "tol": self.tol,
            "alpha": self.alpha[:MOST_TARGETS],
            "num_targets": self.num_targets,
            "is_over": self.is_over,
            "iterations": [self.iterations[k] for k in kept],
            "curves": names,
            "relative_residual": [self.relative[k] for k in kept],
        }


# Beside the metadata of a matrix: who made it, and may remove it, while nobody else has used it.
MAKER = "maker.json"

# Below a factor, and removed with it: the diagonal of the inverse, see dkrr.linalg.inference.inverse_diagonal.
INVERSE_DIAGONAL = "inverse_diagonal"


def keep_for_others(location: str, maker: str = "") -> None:
    """Have a matrix stay that is going to be used here, and that another ``maker`` would remove when done with it."""
    if (read_json(location, MAKER) or {}).get("maker", maker) != maker:
        with contextlib.suppress(OSError, StoreError), hold_lock(location, wait=True):
            delete_key(location, MAKER)


@dataclass
class Workspace:
    """Where a solve keeps its arrays and who runs its tasks; collects what every phase did.

    ``durable`` makes finished arrays survive a power failure (fsync at the end of a phase). ``split`` says which sums
    of a factor are split; None leaves it to :func:`~dkrr.linalg.factor.schedule.usual_split`. ``reused`` says what was
    there already, see :meth:`record_reuse`; ``traces`` are the residuals of what iterated. ``maker`` names who removes
    matrices at the end, see :meth:`discard`; "" is nobody. ``foreseen`` is what a plan says of the way that is taken,
    ``other_seconds`` asks what the next one would take, and ``given_up`` says which ones were, see
    :mod:`dkrr.fit.fitting`.
    """

    store: Any
    executor: Executor
    progress: Progress | None = None
    blas: str = ""
    durable: bool = False
    split: Split | None = None
    maker: str = ""
    phases: dict[str, RunSummary] = field(default_factory=dict)
    reused: dict[str, Any] = field(default_factory=dict)
    traces: list[ResidualTrace] = field(default_factory=list)
    foreseen: Foreseen | None = None
    other_seconds: Callable[[], float | None] | None = None
    given_up: list[dict[str, Any]] = field(default_factory=list)

    def matrix(self, location: Any, grid: TileGrid, dtype: str, fields: dict[str, Any]) -> TileMatrix:
        """Create a matrix that others may share, or open it; for the holder of its lock."""
        if self.maker and read_json(location, "zarr.json") is None:
            write_json(location, MAKER, {"maker": self.maker})
        elif (read_json(location, MAKER) or {}).get("maker", self.maker) != self.maker:
            delete_key(location, MAKER)
        return TileMatrix.create(location, grid, dtype=dtype, attributes=fields)

    def discard(self, location: str) -> bool:
        """Remove a matrix that was made here, unless another has used it since, or does now; whether it is gone."""
        with contextlib.suppress(LockedError), hold_lock(location):
            if self.maker and (read_json(location, MAKER) or {}).get("maker") == self.maker:
                remove_array(location)
                return True
        return False

    def record(self, phase: str, summary: RunSummary) -> RunSummary:
        """Add the figures of a phase."""
        if phase in self.phases:
            self.phases[phase].merge(summary)
        else:
            self.phases[phase] = summary
        return summary

    def record_reuse(self, name: str, n: int, taken: dict[str, Any], summary: RunSummary, *, power: int) -> None:
        """Note what a matrix of n rows did not cost.

        Parameters
        ----------
        name
            "factor" or "gram".
        taken
            ``rows`` of earlier matrices that are rows of this one, and their ``sources``.
        summary
            What was computed.
        power
            The work of m rows is m^3 / 3 flops of a factor, m^2 / 2 entries of a Gram matrix.

        Notes
        -----
        ``reused[name]`` becomes a dict: ``rows`` of ``of_rows``, ``tiles`` that were not computed, ``work`` and
        ``share`` of it that was saved, ``seconds`` that this took at the rate of what was computed (None where too
        little was), and the beginnings of the keys of ``sources``. Where an earlier matrix of the same system could
        not be continued, ``reused["not_continued"][name]`` says why.
        """
        is_whole = summary.num_computed == 0 and summary.num_tasks > 0
        rows = n if is_whole else int(taken["rows"])
        if not rows:
            if taken.get("reason"):
                self.reused.setdefault("not_continued", {})[name] = taken["reason"]
            return
        share = (rows / n) ** power
        seconds = None
        if not is_whole and summary.num_computed:
            seconds = summary.seconds * share / max(1e-12, 1 - share)
        entry: dict[str, Any] = {
            "rows": rows,
            "of_rows": n,
            "tiles": summary.num_tasks - summary.num_computed,
            "work": float(rows) ** power / power,
            "share": share,
            "seconds": seconds,
            "sources": list(taken["sources"]),
        }
        before = self.reused.get(name)
        if before is not None:  # another alpha
            entry["tiles"] += before["tiles"]
            entry["work"] += before["work"]
            entry["rows"], entry["share"] = min(rows, before["rows"]), min(share, before["share"])
            known = [value for value in (before["seconds"], seconds) if value is not None]
            entry["seconds"] = sum(known) if known else None
            entry["sources"] = list(dict.fromkeys([*before["sources"], *entry["sources"]]))
        self.reused[name] = entry

    def trace(self, name: str, tol: float, alpha: Iterable[float]) -> ResidualTrace:
        """A new trace of residuals; of many, only the first ones are kept."""
        trace = ResidualTrace(name, tol, sorted({float(value) for value in alpha}))
        if len(self.traces) < MOST_TRACES:
            self.traces.append(trace)
        return trace
