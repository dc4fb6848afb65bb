"""A low-rank preconditioner: P_alpha = F F^T + alpha I with F (n, r) on disk, for S K S + alpha I and every alpha.

    Z = P_alpha^-1 R = (R - F Y) / alpha,   (F^T F + alpha I) Y = F^T R

F comes from randomly pivoted Cholesky, or from columns drawn uniformly (Nystrom: F F^T = K[:,S] K[S,S]^-1 K[S,:]);
:mod:`dkrr.linalg.panels` makes it. F^T F is computed once and serves every alpha. Use it when conjugate
gradients without one need hundreds of iterations.

Each chunk gives F_c^T R_c; these small matrices are added in the order of the chunks, here or through tasks, so
that where an application runs does not change its result.

F^T F is formed, so that the error of Y is that of a matrix of condition |F|^2 / alpha. What it does to Z is weighed by
(F^T F + alpha I)^-1 on both sides: P^-1 stays positive definite as long as alpha is above r eps |F|^2. Where alpha is
below, the Cholesky factor of F^T F + alpha I does not exist in float64: P then has that larger shift in place of alpha,
which is logged. The shift is in P alone; the system that is solved has its own alpha.

F is stored in float64. In float32 it would be half as large and P just as positive definite (F^T F is that of the
rounded F); on 3,000 rows of protein the iterations were the same. But an application took as long (the cast costs what
the shorter read saves), and matern 3/2 on 3,000 normal rows, rank 300, needed 16 % (alpha = 1e-6 |K|) to 30 % more
iterations (1e-8 |K|).

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
import threading
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.engine.cluster import memory_limit_of
from dkrr.engine.machine import single_blas_thread
from dkrr.errors import NumericalError
from dkrr.linalg.blocks import Floats
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.panels import PanelBuild, Panels
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.workspace import Operand, Operands, Pass, Workspace, is_here
from dkrr.store.chunks import on_release
from dkrr.store.files import local_root, place, remove_array
from dkrr.store.lease import hold_lock
from dkrr.tiles.blas import potrf, trsm_left

logger = logging.getLogger("dkrr.linalg")
# more distinct alphas than this are solved through one spectral decomposition, which costs as much as some 20 factors
MAX_FACTORS = 3


class ShiftedGram:
    """Solves (F^T F + shift I) Y = B for many shifts.

    Parameters
    ----------
    gram : (r, r)
        F^T F.
    """

    def __init__(self, gram: Floats) -> None:
        self.gram = gram
        norm = float(np.abs(gram).sum(axis=1).max(initial=0.0))
        self.floor = len(gram) * float(np.finfo(np.float64).eps) * norm
        self._factors: dict[float, Floats] = {}
        self._spectral: tuple[Floats, Floats] | None = None

    def solve(self, b: Floats, shifts: Floats) -> Floats:
        """Column k of the result is (F^T F + shifts[k] I)^-1 B[:, k], B (r, c).

        Raises
        ------
        NumericalError
            A shift is so far below rounding that there is no Cholesky factor.

        Cost
        ----
        r^3 / 3 flops for each of up to three distinct shifts, about 9 r^3 once for more; then 2 r^2 a column.
        """
        b = np.ascontiguousarray(b)  # the order in memory decides which BLAS routine, and so the last bits
        distinct = sorted(set(shifts.tolist()))
        if self._spectral is None and len(set(self._factors) | set(distinct)) > MAX_FACTORS:
            values, vectors = np.linalg.eigh(self.gram)
            # F^T F is positive semi-definite: what is negative is rounding
            self._spectral = np.maximum(values, 0.0), vectors
            self._factors.clear()
        if self._spectral is not None:
            values, vectors = self._spectral
            return np.ascontiguousarray(vectors @ ((vectors.T @ b) / (values[:, None] + shifts)))
        y = np.empty_like(b)
        for shift in distinct:
            columns = np.flatnonzero(shifts == shift)
            lower = self._factor(shift)
            forward = trsm_left(lower, np.ascontiguousarray(b[:, columns]), transposed=False)
            y[:, columns] = trsm_left(lower, forward, transposed=True)
        return y

    def _factor(self, shift: float) -> Floats:
        lower = self._factors.get(shift)
        if lower is None:
            lower = self.gram.copy()
            lower[np.diag_indices(len(lower))] += shift
            if potrf(lower):
                raise NumericalError(
                    f"F^T F + {shift:.3g} I of a preconditioner of rank {len(lower):,} is not positive definite",
                    hint="raise alpha, or lower the rank of the preconditioner",
                )
            self._factors[shift] = lower
        return lower


HELD_BYTES = 256 << 20
# of the memory of a task on a worker, what may hold chunks of F that were fetched from a store that is no folder
KEEP_FRACTION = 0.25
_kept: dict[tuple[str, int, int], Any] = {}
_lock = threading.Lock()
on_release(_kept.clear)


def keep_bytes(num_bytes: int, memory_limit: int | None) -> int:
    """What a worker may keep of an F of ``num_bytes`` that is fetched, where a task may use ``memory_limit``."""
    return 0 if memory_limit is None else min(num_bytes, int(KEEP_FRACTION * memory_limit))


@dataclass(frozen=True)
class Application:
    """Both passes of one application over the row chunks of F, for the shift of each column.

    Chunks of a local folder are mapped for both: with pages in the cache and one checksum an application, that is as
    fast as a copy in the memory of each worker (1.3 GB on two workers: 0.4 s), which took 6 s to be filled. Others are
    kept in memory up to ``keep_bytes``: fetched once, first come, first kept, in ``cache``, or where tasks run in what
    their process has for that. F does not change under its location, which is the key of everything that decides its
    bytes. Another factor takes its place.
    """

    panels: Panels
    shifts: tuple[float, ...]
    keep_bytes: int = 0
    cache: dict[tuple[str, int, int], Any] | None = None

    def read(self, p: int, c: int, *, again: bool = False) -> Any:
        """Row chunk c of panel p; what is read again in the same application has had its checksum compared."""
        if not self.keep_bytes:
            return self.panels.read(p, c, verify=not again)
        kept, key = _kept if self.cache is None else self.cache, (self.panels.location, p, c)
        block = kept.get(key)
        if block is None:
            block = self.panels.read(p, c)
            with _lock:  # worker threads share what is kept
                for other in [other for other in kept if other[0] != self.panels.location]:
                    del kept[other]
                if key not in kept and sum(item.nbytes for item in kept.values()) + block.nbytes <= self.keep_bytes:
                    kept[key] = block = np.array(block)
        return block

    def vector(self, operands: Operands, c: int) -> Floats:
        """Row chunk c of R."""
        return np.array(operands["r"].read(c)[: self.panels.grid.rows(c)])

    def project(self, operands: Operands, c: int, out: Floats) -> None:
        """(F_c^T R_c)^T (columns, r), panel by panel."""
        panels = self.panels
        transposed = np.ascontiguousarray(self.vector(operands, c).T)  # twice as fast for a few columns
        for p in range(panels.num_panels):
            out[:, panels.first(p) : panels.first(p + 1)] = transposed @ self.read(p, c)

    def correct(self, operands: Operands, c: int, out: Floats) -> None:
        """(R_c - F_c Y) / shifts (rows, columns), panel by panel."""
        panels, y = self.panels, np.array(operands["y"].read())
        z = self.vector(operands, c)
        for p in range(panels.num_panels):
            z -= self.read(p, c, again=True) @ y[panels.first(p) : panels.first(p + 1)]
        np.divide(z, self.shifts, out=out[: len(z)])

    def not_finite(self, _: int) -> NumericalError:
        """The error for a part that is not."""
        return NumericalError("a preconditioned residual is not finite", hint="scale the targets, or raise alpha")


class LowRank:
    """P_alpha = F F^T + alpha I, a preconditioner of conjugate gradients: builds F, or goes on with what is there.

    Parameters
    ----------
    operator
        S K S; its alpha does not matter. Columns of a kernel are evaluated, also where Gram tiles are stored; those of
        a given matrix are read.
    location
        Where F is, and nothing else ever; see :func:`~dkrr.linalg.panels.low_rank_location`.
    settings
        ``preconditioner`` ("rpcholesky" or "nystrom") and ``seed``.
    rank
        Columns wanted; at most n. Fewer are made when the residual becomes zero before.

    Raises
    ------
    DataError
        The kernel is not finite.
    LockedError
        Another process builds it.
    """

    inexact = False

    def __init__(
        self, operator: RidgeOperator, workspace: Workspace, location: str, settings: IterativeSettings, rank: int
    ) -> None:
        self.build = build = PanelBuild(operator, workspace, location, settings, min(rank, operator.grid.n))
        with hold_lock(location):
            build.build()
            # no fsync: what a power failure takes is found by its checksum and computed again
            self._small = ShiftedGram(build.gram())
        self.panels = panels = build.panels
        name = "randomly pivoted Cholesky" if settings.preconditioner == "rpcholesky" else "Nystrom, uniform columns,"
        self.description = f"{name} of rank {panels.rank:,} ({build.trace[-1][1]:.1e} of the trace left)"
        num_bytes = 8 * panels.grid.n * panels.rank
        # a small factor is held, and applied, here
        self._workspace = None if num_bytes <= HELD_BYTES else workspace
        self._cache: dict[tuple[str, int, int], Any] | None = {} if self._workspace is None else None
        self._keep_bytes = num_bytes
        if self._workspace is not None:
            mapped, limit = local_root(location) is not None, memory_limit_of(workspace.executor)
            self._keep_bytes = 0 if mapped else keep_bytes(num_bytes, limit)
        self._is_said = False

    def apply(self, r: Floats, alpha: Floats) -> Floats:
        """Z (n, c) with column k = P_{alpha[k]}^-1 r[:, k], for R (n, c) and alpha (c,); R is not changed.

        Raises
        ------
        StoreError
            A chunk of F is damaged again and again.
        """
        r = np.ascontiguousarray(r, dtype=np.float64)
        floor = self._small.floor or 1.0
        shifts = np.where((alpha >= self._small.floor) & (alpha > 0), alpha, floor)
        if not self._is_said and (shifts != alpha).any():
            self._is_said = True
            text = "alpha %.3g is below rounding in F^T F; the preconditioner (and only it) has %.3g"
            logger.info(text, float(alpha.min()), floor)
        panels, grid, work, t = self.panels, self.panels.grid, self._workspace, r.shape[1]
        if not panels.rank or not t:
            return np.asarray(r / shifts)
        task = Application(panels, tuple(shifts.tolist()), self._keep_bytes, self._cache)
        # a new name for each application: a task that was thought lost never touches the vectors of another one
        scratch = place(self.build.workspace.store, "scratch", f"{uuid.uuid4().hex}.zarr")
        chunks = range(grid.num_tiles)
        vectors = Operand.of(None if is_here(work) else scratch, "r", [r[grid.span(c)] for c in chunks])
        flops = [2.0 * grid.rows(c) * panels.rank * t for c in chunks]
        common: Any = {"workspace": work, "store": scratch, "shared": {"r": vectors}, "quiet": True}
        common["owners"] = self.build.owners
        z = np.empty_like(r)

        def add(c: int, part: Floats) -> None:
            z[grid.span(c)] = part[: grid.rows(c)]

        try:
            with single_blas_thread():
                vectors.write()
                shape = (t, panels.rank)
                total = Pass("apply", task.project, task.not_finite, flops, shape, operands={}, **common).sum()
                y = {"y": [self._small.solve(total.T, shifts)]}
                shape = (grid.tile_size, t)
                Pass("apply", task.correct, task.not_finite, flops, shape, operands=y, **common).consume(add)
        finally:
            if not is_here(work):
                remove_array(scratch)
        return z
