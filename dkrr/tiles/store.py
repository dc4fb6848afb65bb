"""Tiles: which rows one covers, and the lower ones of an n x n matrix in one Zarr array, a tile a chunk.

A tile is written once, whole and atomically; a valid tile is the only record that it was computed. A ragged tile is
stored full size with NaN in the rows and columns that do not exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.errors import DamagedChunkError, DkrrError, ParameterError, StoreError, check_whole
from dkrr.store.chunks import ChunkArray, FloatArray, buffer
from dkrr.tiles.blas import is_finite

# A strip stays in a core's second-level cache; half and twice the size measured slower for one to ten vectors.
STRIP_BYTES = 256 << 10


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


@dataclass(frozen=True)
class TileMatrix:
    """Lower tiles of an n x n matrix.

    Parameters
    ----------
    array
        The (n, n) array with chunks (b, b).
    grid
        Its partition.
    """

    array: ChunkArray
    grid: TileGrid

    @classmethod
    def create(cls, store: Any, grid: TileGrid, *, dtype: str, attributes: dict[str, Any] | None = None) -> TileMatrix:
        """Create the matrix, or open it when it exists with the same parameters.

        Raises
        ------
        StoreMismatchError
            It exists with another shape, tile size, dtype or other attributes.
        """
        array = ChunkArray.create(
            store, "", shape=(grid.n, grid.n), chunks=(grid.tile_size,) * 2, dtype=dtype, attributes=attributes
        )
        return cls(array, grid)

    @classmethod
    def open(cls, store: Any) -> TileMatrix:
        """Open an existing matrix."""
        array = ChunkArray.open(store)
        if len(array.shape) != 2 or array.shape[0] != array.shape[1] or array.chunks[0] != array.chunks[1]:
            raise StoreError(f"{array.location} has shape {array.shape} and chunks {array.chunks}; squares expected")
        return cls(array, TileGrid(array.shape[0], array.chunks[0]))

    @property
    def location(self) -> str:
        return self.array.location

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.numpy_dtype

    @property
    def num_bytes(self) -> int:
        """Bytes on disk when every lower tile exists."""
        return self.grid.num_lower * (self.array.chunk_bytes + 4)

    def is_valid(self, i: int, j: int) -> bool:
        """Whether tile (i, j) exists with the right size."""
        return self.array.is_valid((i, j))

    def read(self, i: int, j: int, *, verify: bool = True) -> FloatArray:
        """Tile (i, j), i >= j, without its padding, read-only; the checksum is verified unless told otherwise.

        Drop the result soon: on a local file system it is a mapping of the file.
        """
        rows, columns = self.grid.shape(i, j)
        return self.array.read((i, j), verify=verify)[:rows, :columns]

    def read_strips(self, i: int, j: int, *, verify: bool = True) -> Iterator[tuple[int, FloatArray]]:
        """Tile (i, j) in strips of about 256 KiB, (first row, strip), without its padding.

        For products with a few vectors: a strip is still in the cache when it is multiplied, right behind its
        checksum, which is compared after the last strip. What was made of the strips is void when this raises.

        Raises
        ------
        DamagedChunkError
            The tile is missing or has a wrong size, at once; its checksum does not match, at the end.
        """
        rows, columns = self.grid.shape(i, j)
        num_rows = max(1, STRIP_BYTES // (self.grid.tile_size * self.dtype.itemsize))
        for start, strip in self.array.read_strips((i, j), num_rows, verify=verify):
            if start < rows:
                yield start, strip[: rows - start, :columns]

    def write(self, i: int, j: int, tile: FloatArray) -> None:
        """Write tile (i, j), given without padding, in one atomic step."""
        rows, columns = self.grid.shape(i, j)
        if tile.shape != (rows, columns):
            raise ValueError(f"tile of shape {tile.shape}, {(rows, columns)} expected")
        b = self.grid.tile_size
        if (rows, columns) != (b, b) or not tile.flags.c_contiguous:
            padded = buffer("padded", (b, b), self.dtype)
            padded[:rows, :columns] = tile
            padded[rows:] = np.nan
            padded[:, columns:] = np.nan
            tile = padded
        self.array.write((i, j), tile)

    def missing(self) -> list[tuple[int, int]]:
        """Lower tiles that are not valid, as a listing of the array shows them."""
        valid = self.array.valid_keys()
        return [(i, j) for i, j in self.grid.lower() if self.array.chunk_key((i, j)) not in valid]

    def wrong(self, i: int, j: int, reason: str) -> DamagedChunkError:
        """The error for a tile that passes its checksum and is nevertheless wrong; whoever can computes it again."""
        return DamagedChunkError(
            f"tile ({i}, {j}) of {self.location} is damaged ({reason})",
            hint="delete it and start the job again",
            path=self.location,
            index=(i, j),
            reason=reason,
        )

    def check_finite(self, keys: Iterable[tuple[int, int]]) -> None:
        """Look for the tile that made a result NaN: it was finite when it was written, and memory may fail after that.

        Raises
        ------
        DamagedChunkError
            One of the tiles is not finite.
        """
        for i, j in keys:
            if not is_finite(self.read(i, j)):
                raise self.wrong(i, j, "holds a value that is not finite")


def made(
    site: str, compute: Callable[[], Any], write: Callable[[Any], object], explain: Callable[[Any], DkrrError]
) -> bool:
    """Compute something, prove that it is finite, and write it; True.

    ``explain`` gives the error for what is not finite, or raises that of a chunk that made it so.
    """
    found = compute()
    sys.audit("dkrr.compute", site, found)  # of no use but to those who listen: tests spoil it
    if not is_finite(found):
        raise explain(found)
    write(found)
    return True
