"""Applying (F F^T + alpha I)^-1 by Woodbury's formula: the small system, and the passes over the row chunks of F.

    Z = (R - F Y) / alpha,   (F^T F + alpha I) Y = F^T R

Each chunk gives F_c^T R_c; these small matrices are added in the order of the chunks, here or through tasks, so
that where an application runs does not change its result.

F^T F is formed, so that the error of Y is that of a matrix of condition |F|^2 / alpha. What it does to Z is weighed by
(F^T F + alpha I)^-1 on both sides: P^-1 stays positive definite as long as alpha is above r eps |F|^2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import NumericalError
from dkrr.linalg.lowrank.panels import Panels
from dkrr.store.chunks import ChunkArray, on_release
from dkrr.tiles import TileGrid
from dkrr.tiles.blas import potrf, trsm_left

__all__ = [
    "ApplyTask",
    "KeptPanels",
    "ShiftedGram",
    "correct",
    "correct_chunks",
    "kept_panels",
    "project",
    "project_chunks",
]

# more distinct alphas than this are solved through one spectral decomposition, which costs as much as some 20 factors
MAX_FACTORS = 3

Floats = NDArray[np.float64]
ReadPanel = Callable[[int, int], Any]


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
        if self._spectral is not None or len(set(self._factors) | set(distinct)) > MAX_FACTORS:
            if self._spectral is None:
                values, vectors = np.linalg.eigh(self.gram)
                # F^T F is positive semi-definite: what is negative is rounding
                self._spectral = np.maximum(values, 0.0), vectors
                self._factors.clear()
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


class KeptPanels:
    """Chunks of F in this process's memory, fetched once; first come, first kept, up to a limit.

    For stores that are not folders, where every reading is a transfer. F does not change under its location, which is
    the key of everything that decides its bytes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._blocks: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()

    def read(self, panels: Panels, p: int, c: int) -> Any:
        """Row chunk c of panel p."""
        block = self._blocks.get((p, c))
        if block is None:
            block = panels.read(p, c)
            with self._lock:  # worker threads share what is kept
                if (p, c) not in self._blocks and self.num_bytes + block.nbytes <= self.limit_bytes:
                    self.num_bytes += block.nbytes
                    self._blocks[p, c] = block = np.array(block)
        return block


@lru_cache(maxsize=1)
def kept_panels(location: str, limit_bytes: int) -> KeptPanels:
    """What this process keeps of the factor at ``location``; another factor takes its place."""
    return KeptPanels(limit_bytes)


on_release(kept_panels.cache_clear)


def project(panels: Panels, read: ReadPanel, c: int, r: Floats) -> Floats:
    """(F_c^T R_c)^T (columns, r), panel by panel."""
    result = np.empty((r.shape[1], panels.rank))
    transposed = np.ascontiguousarray(r.T)  # F^T R in this order is twice as fast for a few columns
    for p in range(panels.num_panels):
        result[:, panels.first(p) : panels.first(p + 1)] = transposed @ read(p, c)
    return result


def correct(panels: Panels, read: ReadPanel, c: int, r: Floats, y: Floats, shifts: Floats) -> Floats:
    """(R_c - F_c Y) / shifts (rows, columns), panel by panel."""
    z = r.copy()
    for p in range(panels.num_panels):
        z -= read(p, c) @ y[panels.first(p) : panels.first(p + 1)]
    z /= shifts
    return z


@dataclass(frozen=True)
class ApplyTask:
    """One application: F, where its vectors are, the shift of each column, and what a worker may keep of F.

    Chunks of a local folder are mapped for both passes: with pages in the cache and one checksum an application, that
    is as fast as a copy in the memory of each worker (1.3 GB on two workers: 0.4 s), which took 6 s to be filled.
    """

    panels: Panels
    scratch: str
    shifts: tuple[float, ...]
    keep_bytes: int = 0

    @property
    def grid(self) -> TileGrid:
        return self.panels.grid

    def read_panel(self, p: int, c: int) -> Any:
        """Row chunk c of panel p, kept in memory if there is room."""
        if not self.keep_bytes:
            return self.panels.read(p, c)
        return kept_panels(self.panels.location, self.keep_bytes).read(self.panels, p, c)

    def read_again(self, p: int, c: int) -> Any:
        """The same for the second pass of an application, whose first one compared the checksum."""
        return self.read_panel(p, c) if self.keep_bytes else self.panels.read(p, c, verify=False)

    def read_rows(self, c: int) -> Floats:
        """Row chunk c of R."""
        return np.array(self.vectors("r").read((c, 0))[: self.grid.rows(c)], dtype=np.float64)

    def vectors(self, name: str) -> ChunkArray:
        """R or Z (n, columns) in row chunks."""
        columns = len(self.shifts)
        return ChunkArray(self.scratch, name, (self.grid.n, columns), (self.grid.tile_size, columns), "float64")

    @property
    def projections(self) -> ChunkArray:
        """(F_c^T R_c)^T of every chunk, below one another."""
        shape = (len(self.shifts), self.panels.rank)
        whole = (self.grid.num_tiles * shape[0], shape[1])
        return ChunkArray(self.scratch, "projections", whole, shape, "float64")

    @property
    def small(self) -> ChunkArray:
        """Y (r, columns)."""
        shape = (self.panels.rank, len(self.shifts))
        return ChunkArray(self.scratch, "small", shape, shape, "float64")


def project_chunks(task: ApplyTask, first: int, last: int) -> bool:
    """Write (F_c^T R_c)^T of the row chunks ``first`` to ``last - 1`` that are not there."""
    missing = [c for c in range(first, last) if not task.projections.is_valid((c, 0))]
    for c in missing:
        task.projections.write((c, 0), project(task.panels, task.read_panel, c, task.read_rows(c)))
    return bool(missing)


def correct_chunks(task: ApplyTask, first: int, last: int) -> bool:
    """Write the row chunks ``first`` to ``last - 1`` of Z that are not there."""
    z = task.vectors("z")
    missing = [c for c in range(first, last) if not z.is_valid((c, 0))]
    y = np.array(task.small.read((0, 0)), dtype=np.float64)
    for c in missing:
        block = correct(task.panels, task.read_again, c, task.read_rows(c), y, np.array(task.shifts))
        task.panels.write(z, c, block)
    return bool(missing)
