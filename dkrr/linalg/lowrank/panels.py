"""Panels: a low-rank factor F (n, r) on disk, in panels of columns and chunks of rows.

    F[:, p] = (S K S[:, S_p] - sum_{q<p} F[:, q] F[S_p, q]^T) L_p^-T,   L_p L_p^T = (S K S - F F^T)[S_p, S_p]

Below one location, all of them raw checksummed chunks:

    pivots-0007     panel 7's pivots S_p: row number, root of the weight, features, rows of F up to and with L_p
    panel-0007      F[:, p] in row chunks
    diagonal-0007   diag(S K S - F F^T) before panel 7, in row chunks (0000 is the diagonal of S K S)
    gram            F^T F

A task makes one row chunk of one panel, and from it the next diagonal. Row chunks are cut by n and r alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.store.chunks import ChunkArray
from dkrr.tiles import TileGrid

__all__ = ["Panels", "Pivots", "row_chunks"]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

CHUNK_BYTES = 128 << 20
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 256, 16_384
NUM_CHUNKS = 8
MAX_GROUPS = 16


def row_chunks(n: int, rank: int) -> TileGrid:
    """Row chunks of F: n / 8 rows in 256 .. 16,384, and at most 128 MiB of all its columns."""
    rows = max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS, -(-n // NUM_CHUNKS), CHUNK_BYTES // (8 * rank)))
    return TileGrid(n, min(-(-rows // MIN_CHUNK_ROWS) * MIN_CHUNK_ROWS, MAX_CHUNK_ROWS))


@dataclass(frozen=True)
class Pivots:
    """The pivots of a panel, and all that a task needs of them.

    Parameters
    ----------
    index : (k,)
        Row numbers.
    root : (k,)
        Square roots of their weights.
    x : (k, d)
        Their features, centred; (k, 0) for a given matrix.
    lower : (k, first + k)
        Their rows of F; the last k columns are L_p.
    """

    index: Indices
    root: Floats
    x: Floats
    lower: Floats

    def __len__(self) -> int:
        return len(self.index)

    def to_block(self) -> Floats:
        """One (k, 2 + d + first + k) block."""
        return np.hstack([self.index[:, None].astype(np.float64), self.root[:, None], self.x, self.lower])

    @classmethod
    def from_block(cls, block: Any, num_features: int) -> Pivots:
        """Inverse of :meth:`to_block`."""
        block, end = np.array(block), 2 + num_features
        x, lower = np.ascontiguousarray(block[:, 2:end]), np.ascontiguousarray(block[:, end:])
        return cls(block[:, 0].astype(np.int64), block[:, 1].copy(), x, lower)


@dataclass(frozen=True)
class Panels:
    """Where the arrays are; ``widths`` are those of the panels that exist or are being made."""

    location: str
    grid: TileGrid
    widths: tuple[int, ...] = ()

    @property
    def num_panels(self) -> int:
        return len(self.widths)

    @property
    def rank(self) -> int:
        """Columns of all panels."""
        return sum(self.widths)

    def first(self, p: int) -> int:
        """First column of panel p."""
        return sum(self.widths[:p])

    def with_panel(self, width: int) -> Panels:
        """One panel more."""
        return replace(self, widths=(*self.widths, width))

    def panel(self, p: int) -> ChunkArray:
        return self._array(f"panel-{p:04d}", self.widths[p])

    def diagonal(self, p: int) -> ChunkArray:
        """The residual diagonal (n, 1) before panel p."""
        return self._array(f"diagonal-{p:04d}", 1)

    def _array(self, path: str, width: int) -> ChunkArray:
        return ChunkArray(self.location, path, (self.grid.n, width), (self.grid.tile_size, width), "float64")

    def read(self, p: int, c: int, *, verify: bool = True) -> Any:
        """Row chunk c of panel p (rows, k), read-only and mapped: drop it soon."""
        return self.panel(p).read((c, 0), verify=verify)[: self.grid.rows(c)]

    def is_valid(self, p: int, c: int) -> bool:
        """Whether row chunk c of panel p and its diagonal are there."""
        return self.panel(p).is_valid((c, 0)) and self.diagonal(p + 1).is_valid((c, 0))

    def write(self, array: ChunkArray, c: int, block: Any) -> None:
        """Write a row chunk; what is beyond the last row is NaN."""
        if len(block) < array.chunks[0]:
            padded = np.full(array.chunks, np.nan)
            padded[: len(block)] = block
            block = padded
        array.write((c, 0), block)

    def gram(self) -> ChunkArray:
        """F^T F (r, r), one chunk."""
        return ChunkArray(self.location, "gram", (self.rank,) * 2, (self.rank,) * 2, "float64")

    def gram_parts(self) -> ChunkArray:
        """F^T F over groups of row chunks, below one another."""
        shape = (self.num_groups * self.rank, self.rank)
        return ChunkArray(self.location, "gram-parts", shape, (self.rank,) * 2, "float64")

    @property
    def num_groups(self) -> int:
        """Tasks of F^T F: one a row chunk, at most 16."""
        return min(MAX_GROUPS, self.grid.num_tiles)

    def group(self, g: int) -> range:
        """Row chunks of group g."""
        chunks = self.grid.num_tiles
        return range(g * chunks // self.num_groups, (g + 1) * chunks // self.num_groups)
