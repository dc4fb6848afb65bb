"""TileGrid: which rows a tile covers. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dkrr.errors import ParameterError, check_whole

# One LAPACK call indexes with 32 bits: 46,340^2 entries overflow; 16,384 leaves room for workspaces.
MAX_TILE_SIZE = 16_384


@dataclass(frozen=True)
class TileGrid:
    """Partition of n rows into N = ceil(n / b) row blocks, and of the lower triangle into N (N + 1) / 2 tiles.

    Parameters
    ----------
    n
        Number of rows, at least 1.
    tile_size
        Tile edge b, 1 to 16,384; the last row block has n - (N - 1) b rows.
    """

    n: int
    tile_size: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ParameterError(f"n is {self.n}; at least one row expected")
        check_whole("tile_size", self.tile_size, 1, MAX_TILE_SIZE, hint="larger tiles overflow 32-bit LAPACK indices")

    @property
    def num_tiles(self) -> int:
        """N, the number of tiles a side."""
        return -(-self.n // self.tile_size)

    def span(self, i: int) -> slice:
        """Rows of row block i."""
        if not 0 <= i < self.num_tiles:
            raise IndexError(f"row block {i} of {self.num_tiles}")
        return slice(i * self.tile_size, min((i + 1) * self.tile_size, self.n))

    def rows(self, i: int) -> int:
        """Number of rows of row block i."""
        span = self.span(i)
        return int(span.stop - span.start)

    def shape(self, i: int, j: int) -> tuple[int, int]:
        """Shape of tile (i, j) without its padding."""
        return self.rows(i), self.rows(j)

    def lower(self) -> Iterator[tuple[int, int]]:
        """The lower tiles (i, j), i >= j, column by column: an order in which every tile follows its dependencies."""
        for j in range(self.num_tiles):
            for i in range(j, self.num_tiles):
                yield i, j

    @property
    def num_lower(self) -> int:
        """N (N + 1) / 2."""
        return self.num_tiles * (self.num_tiles + 1) // 2
