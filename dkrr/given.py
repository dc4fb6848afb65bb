"""A precomputed Gram matrix: checked and copied into lower tiles, so that it is factored like any other.

The training rows of such a fit are the row numbers; predictions take k(Z, X) directly.
"""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.chunks import place
from dkrr.dataset import Dataset, ingest
from dkrr.errors import DataError
from dkrr.fitting import choose_tile_size
from dkrr.tiles import TileGrid, TileMatrix

__all__ = ["store_given_matrix"]

SYMMETRY_RTOL = 1e-8


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
        Not square, not finite, or not symmetric to 1e-8 of its largest entry; names the entry.
    """
    matrix = _open(K)
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise DataError(f"the precomputed matrix has shape {tuple(matrix.shape)}; a square one expected")
    n = int(matrix.shape[0])
    b = choose_tile_size(n, 1, None) if tile_size == "auto" else int(tile_size)
    grid = TileGrid(n, b)
    numbers = np.arange(n, dtype=np.float64)[:, None]
    dataset = ingest(numbers, place(root, "rows", uuid.uuid4().hex + ".zarr"), y=y, sample_weight=sample_weight)
    tiles = TileMatrix.create(place(root, "grams", f"given-{uuid.uuid4().hex}.zarr"), grid, dtype="float64")
    digest = hashlib.sha256()
    for i, j in grid.lower():
        tile = _block(matrix, grid.span(i), grid.span(j))
        mirror = tile.T if i == j else _block(matrix, grid.span(j), grid.span(i)).T
        _check(tile, mirror, grid, i, j)
        tiles.write(i, j, np.ascontiguousarray(tile))
        digest.update(np.ascontiguousarray(tile).tobytes())
    return dataset, tiles, digest.hexdigest()


def _open(K: Any) -> Any:
    if isinstance(K, str | Path):
        if str(K).endswith(".npy"):
            return np.load(K, mmap_mode="r", allow_pickle=False)
        import zarr

        return zarr.open_array(str(K), mode="r", zarr_format=3)
    return K if hasattr(K, "shape") else np.asarray(K)


def _block(matrix: Any, rows: slice, columns: slice) -> NDArray[np.float64]:
    part = matrix[rows, columns]
    if hasattr(part, "compute"):
        part = part.compute()
    return np.asarray(part, dtype=np.float64)


def _check(tile: NDArray[np.float64], mirror: NDArray[np.float64], grid: TileGrid, i: int, j: int) -> None:
    row, column = grid.span(i).start, grid.span(j).start
    for part in (tile, mirror):
        if not np.isfinite(part).all():
            p, q = np.argwhere(~np.isfinite(part))[0]
            raise DataError(f"the precomputed matrix has {part[p, q]} at row {row + p:,}, column {column + q:,}")
    difference = np.abs(tile - mirror)
    p, q = np.unravel_index(int(np.argmax(difference)), difference.shape)
    if difference[p, q] > SYMMETRY_RTOL * max(1e-300, float(np.abs(tile).max())):
        raise DataError(
            f"the precomputed matrix is not symmetric: entry ({row + p:,}, {column + q:,}) is {tile[p, q]:.6g}, its "
            f"mirror image {mirror[p, q]:.6g}",
            hint="symmetrise it: K = (K + K.T) / 2",
        )
