"""Arithmetic on tall matrices whose columns are vectors of their own, in blocks of rows.

No temporary array is as long as the columns, and every sum has one order.

BlockColumns: a tall matrix of vectors in the store, in blocks of a tile's rows and at most 256 columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.store.chunks import ChunkArray, FloatArray
from dkrr.tiles import TileGrid

BLOCK_ROWS = 4096

FloatMatrix = NDArray[np.float64]

FloatVector = NDArray[np.float64]

Indices = NDArray[np.int64]
Floats = FloatMatrix


def row_blocks(n: int, most: int = BLOCK_ROWS) -> Iterator[slice]:
    """0 .. n in slices of at most so many."""
    for start in range(0, n, most):
        yield slice(start, min(start + most, n))


def dots(a: FloatMatrix, b: FloatMatrix) -> FloatVector:
    """a_k^T b_k for every column k, (t,)."""
    total = np.zeros(a.shape[1])
    for rows in row_blocks(len(a)):
        total += np.einsum("ij,ij->j", a[rows], b[rows])
    return total


def norms(a: FloatMatrix) -> FloatVector:
    """|a_k| for every column k, (t,)."""
    return np.sqrt(dots(a, a))


def largest(a: FloatMatrix) -> FloatVector:
    """max |a_ik| for every column k, (t,)."""
    found: FloatVector = np.maximum(a.max(axis=0), -a.min(axis=0))
    return found


def ratio(a: FloatVector, b: FloatVector) -> FloatVector:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def add_scaled(y: FloatMatrix, c: FloatVector, x: FloatMatrix, columns: Indices | None = None) -> None:
    """y_k += c_k x_k in place, for all columns of y or those that are named."""
    for rows in row_blocks(len(y)):
        if columns is None or len(columns) == y.shape[1]:
            y[rows] += c * x[rows]
        else:
            y[rows, columns] += c * x[rows]


def take(a: FloatMatrix, columns: Indices) -> FloatMatrix:
    """The named columns in C order; ``a`` itself when those are all."""
    return a if len(columns) == a.shape[1] else np.take(a, columns, axis=1)


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

    def fill(self, values: FloatArray) -> BlockColumns:
        """Write all blocks from a matrix (n, t) in memory; the matrix of blocks itself."""
        for i, panel in self.blocks():
            self.write(i, panel, values[self.grid.span(i), self.columns(panel)])
        return self

    def whole(self, panel: int | None = None) -> FloatMatrix:
        """All rows of one column block, or of all of them, in float64."""
        parts = [self.columns(part) for part in (range(self.num_panels) if panel is None else (panel,))]
        first, found = parts[0].start, np.empty((self.grid.n, parts[-1].stop - parts[0].start))
        for i in range(self.grid.num_tiles):
            for columns in parts:
                block = self.read(i, columns.start // self.array.chunks[1])
                found[self.grid.span(i), columns.start - first : columns.stop - first] = block
        return found

    def read_rows(self, i: int) -> FloatArray:
        """All columns of row block i (rows, t)."""
        return np.hstack([self.read(i, panel) for panel in range(self.num_panels)])
