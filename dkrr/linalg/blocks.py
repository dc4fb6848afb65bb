"""BlockColumns: a tall matrix of vectors in the store, in blocks of a tile's rows and at most 256 columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.store.chunks import ChunkArray, FloatArray
from dkrr.tiles import TileGrid

__all__ = ["MAX_BLOCK_COLUMNS", "BlockColumns"]

MAX_BLOCK_COLUMNS = 256


@dataclass(frozen=True)
class BlockColumns:
    """An (n, t) matrix in blocks of b rows (those of a :class:`TileGrid`) and at most 256 columns.

    Matrices of the same shape that follow one another may share an array as its generations; blocks have names of
    their own in each.
    """

    array: ChunkArray
    grid: TileGrid
    generation: int = 0

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

    def index(self, i: int, panel: int) -> tuple[int, int]:
        """Of the chunk that holds block (i, panel)."""
        return i, self.generation * self.num_panels + panel

    def is_valid(self, i: int, panel: int) -> bool:
        return self.array.is_valid(self.index(i, panel))

    def read(self, i: int, panel: int) -> FloatArray:
        """Block (i, panel), a copy without padding."""
        columns = self.columns(panel)
        block = self.array.read(self.index(i, panel))[: self.grid.rows(i), : columns.stop - columns.start]
        return np.array(block, order="C")

    def write(self, i: int, panel: int, block: FloatArray) -> None:
        padded = np.full(self.array.chunks, np.nan, self.array.numpy_dtype)
        padded[: block.shape[0], : block.shape[1]] = block
        self.array.write(self.index(i, panel), padded)

    def delete(self) -> None:
        """Remove all blocks of this generation."""
        for i, panel in self.blocks():
            self.array.delete(self.index(i, panel))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """All (i, panel)."""
        for i in range(self.grid.num_tiles):
            for panel in range(self.num_panels):
                yield i, panel

    def read_rows(self, i: int) -> FloatArray:
        """All columns of row block i (rows, t)."""
        return np.hstack([self.read(i, panel) for panel in range(self.num_panels)])
