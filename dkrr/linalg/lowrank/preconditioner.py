"""A low-rank preconditioner: P_alpha = F F^T + alpha I with F (n, r) on disk, for S K S + alpha I and every alpha.

    P_alpha^-1 R = (R - F (F^T F + alpha I)^-1 F^T R) / alpha

F comes from randomly pivoted Cholesky, or from columns drawn uniformly (Nystrom: F F^T = K[:,S] K[S,S]^-1 K[S,:]).
F^T F is computed once and serves every alpha. Use it when conjugate gradients without one need hundreds of iterations.

F is stored in float64. In float32 it would be half as large and P just as positive definite (F^T F is that of the
rounded F); on 3,000 rows of protein the iterations were the same. But an application took as long (the cast costs what
the shorter read saves), and matern 3/2 on 3,000 normal rows, rank 300, needed 16 % (alpha = 1e-6 |K|) to 30 % more
iterations (1e-8 |K|).

Where alpha is below r eps |F^T F|, the Cholesky factor of F^T F + alpha I does not exist in float64: P then has that
larger shift in place of alpha, which is logged. The shift is in P alone; the system that is solved has its own alpha.

A chunk of F that is found damaged is computed again. One that passed its checksum and is wrong makes the iterations
more, never the answer wrong: the true residual decides.

Cost
----
Build: n r kernel entries and 2 n r^2 flops. An application: 4 n r c flops and two passes over F. A factor of at most
256 MiB is held in the memory of the calling process and applied there; a larger one is read by tasks, which map it
where the store is a local folder. From other stores their processes keep what a quarter of their memory holds.

References
----------
Diaz, Epperly, Frangella, Tropp, Webber (2023), Robust, randomized preconditioning for kernel ridge regression, arXiv
2304.12465. Epperly, Tropp, Webber (2024), Embrace rejection, arXiv 2410.03969.
"""

from __future__ import annotations

import logging
import uuid
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.session import memory_limit_of
from dkrr.engine.tasks import InProcessExecutor, Node
from dkrr.errors import DamagedChunkError, ParameterError
from dkrr.linalg.lowrank.build import PanelBuild
from dkrr.linalg.lowrank.keys import claim, low_rank_fields, low_rank_location
from dkrr.linalg.lowrank.panels import Panels, row_chunks
from dkrr.linalg.lowrank.ranks import choose_rank
from dkrr.linalg.lowrank.rpcholesky import pivot_rows
from dkrr.linalg.lowrank.tasks import low_rank_task_bytes
from dkrr.linalg.lowrank.woodbury import ApplyTask, ShiftedGram, correct, correct_chunks, project, project_chunks
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.repairs import Repairs
from dkrr.linalg.settings import IterativeSettings
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import is_below, local_root, place, remove_array
from dkrr.store.lease import hold_lock
from dkrr.threads import single_blas_thread
from dkrr.tiles import TileGrid

__all__ = [
    "LowRank",
    "build_low_rank",
    "choose_rank",
    "low_rank_fields",
    "low_rank_location",
    "low_rank_task_bytes",
    "pivot_rows",
]

logger = logging.getLogger("dkrr.linalg")

HELD_BYTES = 256 << 20
TASK_BYTES = 256 << 20
# of the memory of a task on a worker, what may hold chunks of F that were fetched from a store that is no folder
KEEP_FRACTION = 0.25

Floats = NDArray[np.float64]


def keep_bytes(num_bytes: int, memory_limit: int | None) -> int:
    """What a worker may keep of an F of ``num_bytes`` that is fetched, where a task may use ``memory_limit``."""
    return 0 if memory_limit is None else min(num_bytes, int(KEEP_FRACTION * memory_limit))


def build_low_rank(
    operator: RidgeOperator,
    workspace: Workspace,
    location: str | None,
    settings: IterativeSettings,
    *,
    rank: int,
    weight_digest: str | None = None,
    source_digest: str = "",
) -> LowRank:
    """Build F, or go on with, or just open, the one that an earlier run left.

    Parameters
    ----------
    operator
        S K S; its alpha does not matter. Columns of a kernel are evaluated, also where Gram tiles are stored; those of
        a given matrix are read.
    location
        Where F is; None for its place below the workspace's store.
    settings
        ``preconditioner`` ("rpcholesky" or "nystrom") and ``seed``.
    rank
        Columns wanted; at most n. Fewer are made when the residual becomes zero before: see ``LowRank.rank``.
    weight_digest, source_digest
        As in :func:`~dkrr.linalg.catalogue.factor_fields`.

    Raises
    ------
    StoreMismatchError
        Another factor is at ``location``.
    DataError
        The kernel is not finite.
    LockedError
        Another process builds it.

    Cost
    ----
    n r kernel entries, 2 n r^2 flops, 8 n r bytes on disk; some 20 rounds of tasks. The driver holds a few n-vectors
    and up to four r x r matrices; of a task see :func:`low_rank_task_bytes`.
    """
    if settings.preconditioner in ("none", "factor") or rank < 1:
        raise ParameterError(
            f"preconditioner {settings.preconditioner!r} of rank {rank}",
            hint='"rpcholesky" or "nystrom" and a positive rank are expected',
        )
    rank = min(rank, operator.grid.n)
    fields = low_rank_fields(
        operator, settings, rank, workspace.blas, weight_digest=weight_digest, source_digest=source_digest
    )
    location = low_rank_location(workspace.store, fields) if location is None else str(location)
    build = PanelBuild(
        operator=operator,
        workspace=workspace,
        panels=Panels(location, row_chunks(operator.grid.n, rank)),
        method=settings.preconditioner,  # type: ignore[arg-type]
        rank=rank,
        seed=settings.seed,
    )
    with hold_lock(location):
        claim(location, fields)
        build.build()
        # no fsync: what a power failure takes is found by its checksum and computed again
        gram = build.gram()
    return LowRank(build, gram)


class LowRank:
    """P_alpha = F F^T + alpha I, a :class:`~dkrr.linalg.precondition.Preconditioner`; made by :func:`build_low_rank`.

    Attributes
    ----------
    rank
        Columns of F; less than was asked for when the residual became zero.
    trace
        ``(rank, trace(S K S - F F^T) / trace(S K S))`` before the first and after each panel.
    pivots : (r,)
        Row numbers, in the order in which they were chosen.
    """

    inexact = False

    def __init__(self, build: PanelBuild, gram: Floats) -> None:
        self._build = build
        self.trace = build.trace
        self.pivots = build.index
        self._method = build.method
        self._held: dict[tuple[int, int], Any] | None = {} if self.num_bytes <= HELD_BYTES else None
        self._small = ShiftedGram(gram)
        mapped = self._held is not None or local_root(build.panels.location) is not None
        self._keep_bytes = 0 if mapped else keep_bytes(self.num_bytes, memory_limit_of(build.workspace.executor))
        self._said: set[float] = set()

    @property
    def panels(self) -> Panels:
        """The arrays that hold F."""
        return self._build.panels

    @property
    def grid(self) -> TileGrid:
        """Row chunks."""
        return self.panels.grid

    @property
    def rank(self) -> int:
        return self.panels.rank

    @property
    def num_bytes(self) -> int:
        """Bytes of F."""
        return 8 * self.grid.n * self.rank

    @property
    def description(self) -> str:
        name = "randomly pivoted Cholesky" if self._method == "rpcholesky" else "Nystrom, uniform columns,"
        return f"{name} of rank {self.rank:,} ({self.trace[-1][1]:.1e} of the trace left)"

    def shift(self, alpha: float) -> float:
        """The shift that P has for a ridge: alpha, or r eps |F^T F| where that is larger."""
        if alpha >= self._small.floor and alpha > 0:
            return alpha
        if alpha not in self._said:
            self._said.add(alpha)
            logger.info(
                "alpha %.3g is below rounding in F^T F; the preconditioner (and only it) has %.3g",
                alpha,
                self._small.floor,
            )
        return self._small.floor or 1.0

    def rows(self, c: int) -> Floats:
        """Row chunk c of F (rows, r), a copy; what is found damaged is computed again."""
        empty = np.empty((self.grid.rows(c), 0))
        while True:
            try:
                return np.hstack([empty, *(self._read(p, c) for p in range(self.panels.num_panels))])
            except DamagedChunkError as damage:
                self._build.repair(damage)

    def apply(self, r: Floats, alpha: Floats) -> Floats:
        """Z (n, c) with column k = P_{alpha[k]}^-1 r[:, k], for R (n, c) and alpha (c,); R is not changed.

        Raises
        ------
        StoreError
            A chunk of F is damaged again and again.
        """
        r = np.ascontiguousarray(r, dtype=np.float64)
        shifts = np.array([self.shift(float(value)) for value in alpha])
        if not self.rank or not r.shape[1]:
            return np.asarray(r / shifts)
        here = self._held is not None or isinstance(self._build.workspace.executor, InProcessExecutor)
        repairs = Repairs()
        while True:
            try:
                return self._apply_here(r, shifts) if here else self._apply_in_tasks(r, shifts)
            except DamagedChunkError as damage:
                if is_below(damage.path, self.panels.location):
                    self._build.repair(damage)
                else:
                    repairs.add(damage)  # a vector on its way: the whole application is done again, elsewhere

    def _apply_here(self, r: Floats, shifts: Floats) -> Floats:
        panels, z = self.panels, np.empty_like(r)
        chunks = range(self.grid.num_tiles)
        with single_blas_thread():
            total = np.zeros((r.shape[1], self.rank))
            for c in chunks:
                total += project(panels, self._read, c, r[self.grid.span(c)])
            y = self._small.solve(total.T, shifts)
            for c in chunks:
                span = self.grid.span(c)
                z[span] = correct(panels, self._read, c, r[span], y, shifts)
        return z

    def _apply_in_tasks(self, r: Floats, shifts: Floats) -> Floats:
        work, panels = self._build.workspace, self.panels
        # a new name for each application: a task that was thought lost never touches the vectors of another one
        scratch = place(work.store, "scratch", f"{uuid.uuid4().hex}.zarr")
        task = ApplyTask(panels, scratch, tuple(shifts.tolist()), self._keep_bytes)
        chunks, nodes = range(self.grid.num_tiles), self._nodes(len(shifts))
        try:
            for c in chunks:
                panels.write(task.vectors("r"), c, r[self.grid.span(c)])
            work.record("apply", work.executor.run("apply", project_chunks, task, nodes))
            total = np.zeros((len(shifts), self.rank))
            for c in chunks:
                total += task.projections.read((c, 0))
            with single_blas_thread():
                task.small.write((0, 0), self._small.solve(total.T, shifts))
            work.record("apply", work.executor.run("apply", correct_chunks, task, nodes))
            z = np.empty_like(r)
            for c in chunks:
                z[self.grid.span(c)] = task.vectors("z").read((c, 0))[: self.grid.rows(c)]
        finally:
            remove_array(task.scratch)
        return z

    def _nodes(self, num_columns: int) -> list[Node]:
        """Tasks over consecutive row chunks: one a thread, more when they would read over 256 MiB each."""
        chunks, threads = self.grid.num_tiles, self._build.workspace.executor.num_threads
        count = min(chunks, max(threads, -(-self.num_bytes // TASK_BYTES)))
        bounds = [g * chunks // count for g in range(count + 1)]
        flops = 2.0 * self.grid.n * self.rank * num_columns / count
        return [Node(key, (), flops) for key in pairwise(bounds)]

    def _read(self, p: int, c: int) -> Any:
        """Row chunk c of panel p, from memory where F is held."""
        if self._held is None:
            return self.panels.read(p, c)
        block = self._held.get((p, c))
        if block is None:
            block = self._held[p, c] = np.array(self.panels.read(p, c))
        return block
