"""A precomputed Gram matrix: checked and copied into lower tiles, so that it is factored like any other.

The training rows of such a fit are the row numbers; predictions take k(Z, X) directly.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Floats, ingest
from dkrr.dataset.sources import open_table
from dkrr.dataset.table import check_shape, to_floats
from dkrr.errors import DataError
from dkrr.linalg.sizes import choose_tile_size
from dkrr.stores import place, remove_array, zarr_store
from dkrr.tiles import TileGrid, TileMatrix

__all__ = ["check_given", "given_rows", "store_given_matrix"]

SYMMETRY_RTOL = 1e-8
CHECK_ROWS = 1024


def store_given_matrix(
    K: Any, y: Any, sample_weight: Any, root: Any, tile_size: Any = "auto"
) -> tuple[Dataset, TileMatrix, str]:
    """Copy K (n, n) into tiles below ``root``; return targets and weights as a data set, the tiles, their digest.

    Parameters
    ----------
    K
        NumPy array, dask array, Zarr array or its path, path to .npy; read a tile at a time.

    Raises
    ------
    DataError
        Not square, not finite, or not symmetric to 1e-8 of its largest entry; names the entry. Nothing is left.
    """
    n = given_rows(K)
    matrix = _opened(K)
    b = choose_tile_size(n, 1, None) if tile_size == "auto" else int(tile_size)
    grid = TileGrid(n, b)
    numbers = np.arange(n, dtype=np.float64)[:, None]
    dataset = ingest(numbers, place(root, "rows", uuid.uuid4().hex + ".zarr"), y=y, sample_weight=sample_weight)
    location = place(root, "grams", f"given-{uuid.uuid4().hex}.zarr")
    digest = hashlib.sha256()
    try:
        tiles = TileMatrix.create(location, grid, dtype="float64")
        for i, j, tile in _checked_tiles(matrix, grid):
            tiles.write(i, j, tile)
            digest.update(tile.data)
    except BaseException:
        remove_array(location)
        remove_array(dataset.path)
        raise
    return dataset, tiles, digest.hexdigest()


def check_given(K: Floats) -> None:
    """Refuse a matrix in memory that is not square, not finite or not symmetric.

    Raises
    ------
    DataError
        Names the first such entry.
    """
    for _ in _checked_tiles(K, TileGrid(given_rows(K), CHECK_ROWS)):
        pass


def given_rows(K: Any) -> int:
    """n of a matrix (n, n) in any form; reads no entries.

    Raises
    ------
    DataError
        It is not square, or not a matrix of numbers.
    """
    if isinstance(K, str | Path) or type(K).__module__.startswith(("dask.", "zarr.")):
        table = open_table(K)
        shape: tuple[Any, ...] = (table.num_rows, len(table.names))
    else:
        shape = check_shape(np.shape(K), "the precomputed matrix")
    if shape[0] != shape[1]:
        raise DataError(f"the precomputed matrix has shape {shape}; a square one expected", hint="give k(X, X)")
    return int(shape[0])


def _opened(K: Any) -> Any:
    """Something that slices like an array."""
    if isinstance(K, str | Path):
        if str(K).endswith(".npy"):
            return np.load(K, mmap_mode="r", allow_pickle=False)
        import zarr

        return zarr.open_array(zarr_store(str(K)), mode="r", zarr_format=3)
    return K if hasattr(K, "shape") else np.asarray(K)


def _checked_tiles(matrix: Any, grid: TileGrid) -> Iterator[tuple[int, int, Floats]]:
    """(i, j, tile) of the lower triangle, each compared with its mirror image."""
    # the largest entry of a positive semi-definite matrix is on its diagonal
    scale = max(float(np.abs(np.diag(_block(matrix, grid, i, i))).max()) for i in range(grid.num_tiles))
    for i, j in grid.lower():
        tile = _block(matrix, grid, i, j)
        mirror = tile.T if i == j else _block(matrix, grid, j, i).T
        difference = np.abs(tile - mirror)
        if i == j:
            difference = np.tril(difference)  # of the two entries the lower one is named
        p, q = np.unravel_index(int(np.argmax(difference)), difference.shape)
        if difference[p, q] > SYMMETRY_RTOL * max(scale, float(np.abs(tile).max())):
            row, column = grid.span(i).start + p, grid.span(j).start + q
            raise DataError(
                f"the precomputed matrix is not symmetric: entry ({row:,}, {column:,}) is {tile[p, q]:.6g}, its "
                f"mirror image {mirror[p, q]:.6g}",
                hint="symmetrise it: K = (K + K.T) / 2",
                row=int(row),
                column=int(column),
            )
        yield i, j, np.ascontiguousarray(tile)


def _block(matrix: Any, grid: TileGrid, i: int, j: int) -> Floats:
    rows, columns = grid.span(i), grid.span(j)
    part = matrix[rows, columns]
    if hasattr(part, "compute"):
        part = part.compute()
    block = to_floats(np.asarray(part), "the precomputed matrix", rows.start)
    if not np.isfinite(block).all():
        p, q = np.argwhere(~np.isfinite(block))[0]
        row, column = int(rows.start + p), int(columns.start + q)
        raise DataError(
            f"the precomputed matrix has {block[p, q]} at row {row:,}, column {column:,}",
            hint="all entries are needed",
            row=row,
            column=column,
        )
    return block
