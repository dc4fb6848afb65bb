"""The Gram matrix K = k(X, X) as lower tiles in a store, and as a lazy symmetric dask array.

You need a stored Gram matrix when its entries are dear (d above about 100, callables, precomputed input) or when
several factorisations share it. Otherwise the factorisation evaluates tiles on the spot.

Cost
----
n^2 / 2 kernel entries, n (n + b) / 2 elements written; memory of a task: one tile.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dkrr.dataset import Dataset, ingest, open_dataset
from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.errors import DataError, StoreError
from dkrr.kernels import Kernel, make_kernel
from dkrr.linalg.catalogue import TakenOver, gram_fields, key_of
from dkrr.linalg.operators import RidgeOperator, Rows
from dkrr.linalg.passes import Owners, made, run_with_repairs
from dkrr.linalg.verify import gram_samples_agree
from dkrr.linalg.workspace import keep_for_others
from dkrr.store.chunks import FloatArray
from dkrr.store.files import check_place, full_disk, place
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer

if TYPE_CHECKING:
    import dask.array as da


logger = logging.getLogger("dkrr.linalg")


def rows_of(dataset: Dataset, kernel: Kernel | None, center: tuple[float, ...] | None = None) -> Rows:
    """Reference to the rows of a data set; a translation-invariant kernel is centred at its own point, unless told."""
    own = None if kernel is None else kernel.center(dataset.x_mean, dataset.x_std)
    if own is not None and center is None:
        center = tuple(own.tolist())
    return Rows.of(dataset, None if own is None else center)


@dataclass(frozen=True)
class GramTask:
    """The operator whose kernel is evaluated, the matrix that is written, and what earlier ones have of it."""

    operator: RidgeOperator
    gram: TileMatrix
    taken: TakenOver = field(default_factory=TakenOver)

    @property
    def grid(self) -> TileGrid:
        return self.gram.grid

    def remaining_bytes(self) -> int:
        """Bytes that are still to be written."""
        return len(self.gram.missing()) * (self.gram.array.chunk_bytes + 4)


def gram_tile(task: GramTask, i: int, j: int) -> bool:
    """Compute and write tile (i, j) of K unless it is valid; whether it was computed."""
    operator, gram = task.operator, task.gram
    if gram.is_valid(i, j):
        if gram_samples_agree(operator, gram, i, j):
            return False
        logger.warning(
            "tile (%d, %d) of %s holds other entries than its rows give; computing it again", i, j, gram.location
        )

    def compute() -> FloatArray:
        kept = task.taken.read(i, j)
        tile: FloatArray = buffer("accumulator", task.grid.shape(i, j), gram.dtype)
        first = 0 if kept is None else len(kept)
        if first < len(tile):
            operator.gram_tile(i, j, tile[first:], start=first)
        if kept is not None:
            tile[:first, : kept.shape[1]] = kept
            if i == j:
                tile[:first, first:] = tile[first:, :first].T
        return tile

    error = DataError(f"tile ({i}, {j}) of the Gram matrix is not finite", hint="scale the features")
    return made("gram.tile", compute, partial(gram.write, i, j), lambda _: error)


def build_gram(
    operator: RidgeOperator,
    gram: TileMatrix,
    executor: Executor,
    progress: Progress | None = None,
    *,
    taken: TakenOver | None = None,
) -> RunSummary:
    """Compute every tile of K that is not valid; a tile found damaged is computed again.

    ``taken`` is what earlier matrices of the lineage have of its ragged tiles.
    """
    task = GramTask(operator, gram, taken or TakenOver())
    rows, b = operator.rows, float(gram.grid.tile_size)
    flops = 2.0 * b * b * (1 if rows is None else rows.open().num_features)
    nodes = [Node(key, (), flops) for key in gram.grid.lower()]
    owners: Owners = {} if operator.kernel is None else {gram.location: gram.array.delete}
    return run_with_repairs(executor, "gram", gram_tile, task, nodes, progress, owners=owners)


def gram_owner(operator: RidgeOperator, executor: Executor) -> Owners:
    """Computes a tile of the operator's stored Gram matrix again; that of a given matrix nobody can."""
    gram = operator.gram
    if gram is None or operator.kernel is None:
        return {}

    def again(index: tuple[int, ...]) -> None:
        gram.array.delete(index)
        executor.run("gram", gram_tile, GramTask(operator, gram), [Node(index)])

    return {gram.location: again}


def gram_matrix(X: Any, kernel: Any = "rbf", *, store: Any, tile_size: int = 1024, **parameters: Any) -> da.Array:
    """K = k(X, X) as a lazy, symmetric dask array (n, n); tiles are computed and stored by the tasks that need them.

    Parameters
    ----------
    X : array-like, path or Dataset (n, d)
        Training rows; anything :func:`dkrr.ingest` takes.
    kernel
        Kernel or its name; ``gamma``, ``degree``, ``coef0`` and ``kernel_params`` as keywords.
    store
        Folder or URL for rows and tiles.
    tile_size
        Tile edge b, also the chunk size of the result.

    Returns
    -------
    dask.array.Array (n, n), float64. A block above the diagonal is the transpose of its mirror image, so each stored
    tile is computed once (twice at most, when two tasks need it at the same moment; both write the same bytes).

    Cost
    ----
    Nothing until computed; then d b^2 flops and 8 b^2 bytes a tile. Of a tile that is stored six entries are evaluated:
    where they differ, because a kernel function was changed or a file was, the tile is computed again.
    """
    import dask.array as da

    check_place("store", store)
    TileGrid(1, tile_size)  # refused before anything is written
    wanted = make_kernel(kernel, **parameters)
    dataset = X if isinstance(X, Dataset) else _ingest_rows(X, store)
    resolved = wanted.resolve(dataset.num_features)
    grid = TileGrid(dataset.num_rows, tile_size)
    operator = RidgeOperator(grid=grid, alpha=0.0, kernel=resolved, rows=rows_of(dataset, resolved))
    fields = gram_fields(operator, "float64")
    location = place(store, "grams", key_of(fields) + ".zarr")
    with full_disk(store):
        keep_for_others(location)
        gram = TileMatrix.create(location, grid, dtype="float64", attributes=fields)
    chunks = tuple(grid.rows(i) for i in range(grid.num_tiles))
    lazy: da.Array = da.map_blocks(
        gram_block, GramTask(operator, gram), dtype=np.float64, chunks=(chunks, chunks), meta=np.empty((0, 0))
    )
    return lazy


def _ingest_rows(X: Any, store: Any) -> Dataset:
    if isinstance(X, str | Path):
        with contextlib.suppress(StoreError):
            return open_dataset(X)
    # the name carries no meaning: keys are made of the digest, and equal rows share their tiles
    return ingest(X, place(store, "rows", uuid.uuid4().hex + ".zarr"))


def gram_block(task: GramTask, block_id: tuple[int, int] | None = None) -> FloatArray:
    """Block (i, j) of the symmetric K: the stored tile or its transpose, computed unless it is there and agrees."""
    i, j = block_id or (0, 0)
    row, column = max(i, j), min(i, j)
    with full_disk(task.gram.location):
        gram_tile(task, row, column)
    tile = task.gram.read(row, column)
    return np.array(tile if i >= j else tile.T, order="C")
