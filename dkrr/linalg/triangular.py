"""Forward and back substitution with a tile factor, for many right-hand sides in bounded memory.

    z_i = L[i,i]^-1 (s_i y_i - sum_{k<i} L[i,k] z_k)            forward, i = 0 .. N-1
    u_i = L[i,i]^-T (z_i - sum_{k>i} L[k,i]^T u_k)              backward, i = N-1 .. 0

Right-hand sides are stored in blocks of b rows and at most 256 columns; the chains of different column blocks are
independent. A block that is valid is not computed again.

Cost
----
2 n^2 t flops and one pass over the factor per sweep and column block: bound by memory bandwidth, not by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dkrr.chunks import ChunkArray, FloatArray
from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.errors import DataError
from dkrr.failpoints import failpoint
from dkrr.linalg.repairs import check_finite
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import is_finite, trsm_left

__all__ = ["BlockColumns", "SweepTask", "sweep"]

MAX_BLOCK_COLUMNS = 256


@dataclass(frozen=True)
class BlockColumns:
    """An (n, t) matrix in blocks of b rows (those of a :class:`TileGrid`) and at most 256 columns."""

    array: ChunkArray
    grid: TileGrid

    @classmethod
    def create(cls, store: Any, path: str, grid: TileGrid, num_columns: int, dtype: str) -> BlockColumns:
        """Create the matrix, or open it when it exists with the same parameters."""
        chunks = (grid.tile_size, min(num_columns, MAX_BLOCK_COLUMNS))
        return cls(ChunkArray.create(store, path, shape=(grid.n, num_columns), chunks=chunks, dtype=dtype), grid)

    @property
    def num_columns(self) -> int:
        """t."""
        return self.array.shape[1]

    @property
    def num_panels(self) -> int:
        """Number of column blocks."""
        return self.array.num_chunks[1]

    def columns(self, panel: int) -> slice:
        """Columns of a column block."""
        width = self.array.chunks[1]
        return slice(panel * width, min((panel + 1) * width, self.num_columns))

    def is_valid(self, i: int, panel: int) -> bool:
        return self.array.is_valid((i, panel))

    def read(self, i: int, panel: int) -> FloatArray:
        """Block (i, panel), a copy without padding."""
        columns = self.columns(panel)
        block = self.array.read((i, panel))[: self.grid.rows(i), : columns.stop - columns.start]
        return np.array(block, order="C")

    def write(self, i: int, panel: int, block: FloatArray) -> None:
        padded = np.full(self.array.chunks, np.nan, self.array.numpy_dtype)
        padded[: block.shape[0], : block.shape[1]] = block
        self.array.write((i, panel), padded)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """All (i, panel)."""
        for i in range(self.grid.num_tiles):
            for panel in range(self.num_panels):
                yield i, panel

    def read_rows(self, i: int) -> FloatArray:
        """All columns of row block i (rows, t)."""
        return np.hstack([self.read(i, panel) for panel in range(self.num_panels)])


@dataclass(frozen=True)
class SweepTask:
    """One sweep: which factor, from where to where, in which direction."""

    factor: TileMatrix
    source: BlockColumns
    result: BlockColumns
    direction: Literal["forward", "backward"]

    @property
    def grid(self) -> TileGrid:
        return self.factor.grid


def substitute_block(task: SweepTask, i: int, panel: int) -> bool:
    """Compute block (i, panel) of the result unless it is valid."""
    if task.result.is_valid(i, panel):
        return False
    factor, forward = task.factor, task.direction == "forward"
    failpoint("solve.block.before_read")
    block = task.source.read(i, panel).astype(factor.dtype, copy=False)
    others = range(i) if forward else range(i + 1, task.grid.num_tiles)
    for k in others:
        known = task.result.read(k, panel)
        tile = factor.read(i, k) if forward else factor.read(k, i).T
        block -= tile @ known
        del tile
    block = trsm_left(factor.read(i, i), block, transposed=not forward)
    failpoint("solve.block.after_compute", block)
    if not is_finite(block):
        check_finite(factor, [(i, i), *((i, k) if forward else (k, i) for k in others)])
        raise DataError(
            f"the solution of rows {task.grid.span(i)} is not finite", hint="scale the targets, or raise alpha"
        )
    task.result.write(i, panel, block)
    failpoint("solve.block.after_write")
    return True


def sweep(task: SweepTask, executor: Executor, progress: Progress | None = None) -> RunSummary:
    """Run one substitution; every column block is a chain of N tasks."""
    order = list(range(task.grid.num_tiles))
    if task.direction == "backward":
        order.reverse()
    nodes = []
    for position, i in enumerate(order):
        for panel in range(task.source.num_panels):
            before = ((order[position - 1], panel),) if position else ()
            columns = task.source.columns(panel)
            flops = 2.0 * task.grid.tile_size**2 * (position + 0.5) * (columns.stop - columns.start)
            nodes.append(Node((i, panel), before, flops))
    return executor.run(f"solve {task.direction}", substitute_block, task, nodes, progress)
