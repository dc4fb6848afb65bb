"""The Gram matrix K = k(X, X) as lower tiles in a store, and as a lazy symmetric dask array.

You need a stored Gram matrix when its entries are dear (d above about 100, callables, precomputed input) or when
several factorisations share it. Otherwise the factorisation evaluates tiles on the spot.

Cost
----
n^2 / 2 kernel entries, n (n + b) / 2 elements written; memory of a task: one tile.

Tiles that pass their checksum and are nevertheless wrong, and everything else that can be wrong with an array.

A checksum proves that a tile is what was once written, not that it was written there: two valid tiles that changed
places, or an entry that changed in memory before the checksum was taken, pass it. Here a few entries are compared with
what they must be:

    K_pq = k(x_p, x_q)                         Gram matrix
    A_pq = sum_{r <= q} L_pr L_qr              factor, p >= q

Samples are taken when an interrupted run is continued, of tiles that are there already, and by ``dkrr info --verify``.
They find every exchange of whole tiles, unless the tiles are equal to rounding; what changed in a single entry is found
by the true residual (:mod:`dkrr.linalg.matmul`) instead.

Cost of a sample
----------------
Gram: one tile read, five kernel entries. Factor: 4 (j + 1) row slices of b entries, four kernel rows.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dkrr.dataset import Dataset, ingest, open_dataset
from dkrr.engine.tasks import Node, RunSummary
from dkrr.errors import DamagedChunkError, DataError, StoreError
from dkrr.kernels import make_kernel
from dkrr.linalg.catalogue import TakenOver, gram_fields, key_of
from dkrr.linalg.operators import RidgeOperator, rows_of
from dkrr.linalg.workspace import DIGEST, INVERSE_DIAGONAL, MAKER, Owners, Workspace, keep_for_others
from dkrr.store.chunks import ChunkArray, FloatArray, buffer
from dkrr.store.files import check_place, list_keys, local_root, place, read_json, storage_errors
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.store import made

if TYPE_CHECKING:
    import dask.array as da


logger = logging.getLogger("dkrr.linalg")

NUM_GRAM_SAMPLES = 4
GRAM_RTOL = 1e-6
NUM_FACTOR_SAMPLES = 2
# An entry evaluated alone and the same entry evaluated within a block differ by the rounding of |a|^2 + |b|^2 - 2ab.
KERNEL_RTOL = 1e-9


def gram_samples_agree(operator: RidgeOperator, gram: TileMatrix, i: int, j: int) -> bool:
    """Whether a few entries of tile (i, j) of K are those that the rows give: four places and the extreme entries.

    The extremes matter for short-ranged kernels, most of whose entries are zero in whatever tile. Without a kernel (a
    precomputed matrix) there is nothing to compare with, and the answer is True.

    Raises
    ------
    DamagedChunkError
        The tile is missing or fails its checksum.
    """
    if operator.kernel is None or operator.rows is None:
        return True
    rows, columns = operator.grid.shape(i, j)
    tile = gram.read(i, j)
    draws = np.random.default_rng((i, j))
    places = [(int(draws.integers(rows)), int(draws.integers(columns))) for _ in range(NUM_GRAM_SAMPLES)]
    places += [divmod(int(position), columns) for position in (tile.argmax(), tile.argmin())]
    first, second = operator.grid.span(i).start, operator.grid.span(j).start
    for p, q in places:
        entry, scale = kernel_entry(operator, first + p, second + q)
        # "not <=": a NaN agrees with nothing
        if not abs(entry - float(tile[p, q])) <= GRAM_RTOL * scale:
            return False
    return True


def factor_sample_agrees(
    operator: RidgeOperator, factor: TileMatrix, i: int, j: int, num_rows: int | None = None
) -> bool:
    """Whether A_pq = sum_{r <= q} L_pr L_qr holds at two places (p, q) of tile (i, j), or of its first ``num_rows``.

    Only rows p and q of tiles (i, 0..j) and (j, 0..j) are read, without their checksums: a byte that changed may be
    found here or by the next reader. The places depend on (i, j) alone. A wrong tile (i, k) also makes tiles (i, j),
    j > k, disagree; a continued factorisation meets and repairs (i, k) first.

    The bar: componentwise |A - L L^T|_pq <= gamma_n sqrt(A_pp A_qq) (Cauchy-Schwarz on the rows of L), where gamma_n
    is n eps at worst and grows like sqrt(n) eps in practice, since rounding errors cancel. One hundred times
    the latter is far above anything seen, and stays below 1 % in float32 for n up to 700,000.

    Raises
    ------
    DamagedChunkError
        A tile is missing or too short.

    References
    ----------
    Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 10.3; Higham and Mary, A new approach to
    probabilistic rounding error analysis, SIAM J. Sci. Comput. 41 (2019).
    """
    return all(error <= bar for error, bar in _factor_errors(operator, factor, i, j, num_rows))


def _factor_errors(
    operator: RidgeOperator, factor: TileMatrix, i: int, j: int, num_rows: int | None = None
) -> Iterator[tuple[float, float]]:
    """|A_pq - (L L^T)_pq| and its bar at each place sampled; infinity for what is not a number."""
    grid, draws = factor.grid, np.random.default_rng((i, j))
    eps = float(np.finfo(factor.dtype).eps)
    first, second, rows = grid.span(i).start, grid.span(j).start, num_rows or grid.rows(i)
    for _ in range(NUM_FACTOR_SAMPLES):
        # on or below the diagonal, and so far to the right that half of the tile's row counts
        p = int(draws.integers(rows // 2, rows) if i == j else draws.integers(rows))
        last = p + 1 if i == j else grid.rows(j)
        q = int(draws.integers(last // 2, last))
        left = read_rows(factor, [(i, k, p) for k in range(j + 1)])
        right = left if (i, p) == (j, q) else read_rows(factor, [(j, k, q) for k in range(j + 1)])
        left[-1], right[-1] = left[-1][: q + 1], right[-1][: q + 1]  # right of the diagonal there is nothing
        found = float(np.dot(np.concatenate(left, dtype=np.float64), np.concatenate(right, dtype=np.float64)))
        entry, scale = operator_entry(operator, first + p, second + q)
        error = abs(entry - found)
        yield (error if np.isfinite(error) else np.inf), (100 * np.sqrt(grid.n) * eps + KERNEL_RTOL) * scale


def kernel_entry(operator: RidgeOperator, p: int, q: int) -> tuple[float, float]:
    """k(x_p, x_q) of two rows, and the scale max(|k_pq|, sqrt(k_pp k_qq)) that its error is measured by."""
    if operator.kernel is None or operator.rows is None:
        gram, b = operator.gram, operator.grid.tile_size
        assert gram is not None  # noqa: S101  (an operator has a kernel or a matrix)
        places = [(p, q), (p, p), (q, q)]
        rows = read_rows(gram, [(row // b, column // b, row % b) for row, column in places])
        entry, *own = (float(part[column % b]) for part, (_, column) in zip(rows, places, strict=True))
    else:
        x, z = operator.rows.read(p, p + 1), operator.rows.read(q, q + 1)
        own = [float(operator.kernel.diag(row)[0]) for row in (x, z)]
        entry = own[0] if p == q else float(operator.kernel.block(x, z).flat[0])
    return entry, max(abs(entry), abs(own[0] * own[1]) ** 0.5)


def operator_entry(operator: RidgeOperator, p: int, q: int) -> tuple[float, float]:
    """A_pq, and the scale sqrt(A_pp A_qq) that its error is measured by; p and q are rows of the whole matrix."""
    entry, scale = kernel_entry(operator, p, q)
    left, right = operator.root_of(p, p + 1), operator.root_of(q, q + 1)
    root = 1.0 if left is None or right is None else float(left[0] * right[0])
    return root * entry + (operator.alpha if p == q else 0.0), root * scale + operator.alpha


def read_rows(matrix: TileMatrix, wanted: Sequence[tuple[int, int, int]]) -> list[FloatArray]:
    """Row p of tile (i, k) for every (i, k, p), without a checksum: of an object only its bytes are fetched."""
    from dkrr.store.objects import read_range

    array, length, rows = matrix.array, matrix.grid.tile_size * matrix.dtype.itemsize, []
    is_local = local_root(array.store) is not None
    for i, k, p in wanted:
        part = None if is_local else read_range(array.store, array.chunk_key((i, k)), p * length, length)
        # reading all of an object names what is wrong with it
        row = (
            np.array(array.read((i, k), verify=not is_local)[p]) if part is None else np.frombuffer(part, matrix.dtype)
        )
        rows.append(row)
    return rows


def verify_tiles(matrix: TileMatrix, operator: RidgeOperator | None = None, *, is_factor: bool) -> list[str]:
    """Problems of a Gram matrix or a factor, a sentence each: checksums and finiteness of lower tiles, unknown keys.

    With kernel and rows at hand, entries of K or of L L^T are compared, too. Of tiles of a factor that stand to the
    right of a wrong tile, in its row block or against it, none are: they would disagree whether they are right or not.
    Of the diagonal of the inverse, which may lie below a factor, the chunks that are there are read; the others are
    computed when they are needed.
    """
    below = None
    if is_factor and read_json(matrix.array.store, f"{INVERSE_DIAGONAL}/zarr.json") is not None:
        below = ChunkArray.open(matrix.array.store, INVERSE_DIAGONAL)

    def compare(i: int, j: int) -> str:
        if operator is None or (is_factor and wrong & {i, j}):
            return ""
        if not is_factor:
            agrees = gram_samples_agree(operator, matrix, i, j)
            return "" if agrees else "passes its checksum and holds other entries than its rows give"
        error, bar = max(_factor_errors(operator, matrix, i, j), key=lambda pair: pair[0] / max(pair[1], 1e-300))
        if error <= bar:
            return ""
        return f"passes its checksum and is wrong (L L^T differs from A by {error:.1e}, {bar:.1e} allowed)"

    problems, wrong = [], set[int]()
    known = {matrix.array.chunk_key(tile) for tile in matrix.grid.lower()} | {"zarr.json", MAKER}
    for i, j in matrix.grid.lower():
        try:
            tile = matrix.read(i, j)
            # the Gram matrix is mirrored on read and the factor is 0 there: above the diagonal nothing counts
            finite = np.isfinite(tile if i != j else np.tril(tile))
            problem = compare(i, j)
            if not finite.all():
                row, column = np.argwhere(~finite)[0] + (matrix.grid.span(i).start, matrix.grid.span(j).start)
                problem = f"holds a value that is not finite, at row {row:,}, column {column:,}"
        except DamagedChunkError as exc:
            problem = f"is damaged ({exc.reason})"
        if problem:
            wrong.add(i)
            problems.append(f"tile ({i}, {j}) {problem}")
    for index in np.ndindex(*below.num_chunks) if below is not None else ():
        known |= {below.chunk_key(index), f"{below.path}/zarr.json", f"{below.path}/{DIGEST}"}  # type: ignore[union-attr]
        try:
            below.read(index)  # type: ignore[union-attr]
        except DamagedChunkError as exc:
            if exc.reason != "missing":
                problems.append(f"chunk {index} of {INVERSE_DIAGONAL} is damaged ({exc.reason})")
    if below is not None and (written := read_json(below.location, DIGEST)) is not None:
        with contextlib.suppress(DamagedChunkError):
            if written != {"sha256": below.digest()}:
                problems.append(f"chunks of {INVERSE_DIAGONAL} were exchanged")
    for key in list_keys(matrix.location):
        if key not in known:
            what = "left by an interrupted write" if key.endswith(".partial") else "of unknown origin"
            problems.append(f"{key} is {what}")
    return problems


@dataclass(frozen=True)
class TileTask:
    """The operator, the matrix that is made of it tile by tile, and what earlier ones have of its ragged tiles."""

    operator: RidgeOperator
    matrix: TileMatrix
    taken: TakenOver = field(default_factory=TakenOver)

    @property
    def grid(self) -> TileGrid:
        return self.matrix.grid

    def remaining_bytes(self) -> int:
        """Bytes that are still to be written."""
        return len(self.matrix.missing()) * (self.matrix.array.chunk_bytes + 4)


def gram_tile(task: TileTask, i: int, j: int) -> bool:
    """Compute and write tile (i, j) of K unless it is valid; whether it was computed."""
    operator, gram = task.operator, task.matrix
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
    operator: RidgeOperator, gram: TileMatrix, workspace: Workspace, taken: TakenOver | None = None
) -> RunSummary:
    """Compute every tile of K that is not valid; a tile found damaged is computed again.

    ``taken`` is what earlier matrices of the lineage have of its ragged tiles.
    """
    task = TileTask(operator, gram, taken or TakenOver())
    rows, b = operator.rows, float(gram.grid.tile_size)
    flops = 2.0 * b * b * (1 if rows is None else rows.open().num_features)
    nodes = [Node(key, (), flops) for key in gram.grid.lower()]
    owners: Owners = {} if operator.kernel is None else {gram.location: gram.array.delete}
    return workspace.run("gram", gram_tile, task, nodes, owners)


def gram_owner(operator: RidgeOperator, workspace: Workspace) -> Owners:
    """Computes a tile of the operator's stored Gram matrix again; that of a given matrix nobody can."""
    gram = operator.gram
    if gram is None or operator.kernel is None:
        return {}

    def again(index: tuple[int, ...]) -> None:
        gram.array.delete(index)
        workspace.executor.run("gram", gram_tile, TileTask(operator, gram), [Node(index)])

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
    dataset.check_still_there()
    resolved = wanted.resolve(dataset.num_features)
    grid = TileGrid(dataset.num_rows, tile_size)
    operator = RidgeOperator(grid=grid, alpha=0.0, kernel=resolved, rows=rows_of(dataset, resolved))
    fields = gram_fields(operator, "float64")
    location = place(store, "grams", key_of(fields) + ".zarr")
    with storage_errors(store, only_full=True):
        keep_for_others(location)
        gram = TileMatrix.create(location, grid, dtype="float64", attributes=fields)
    chunks = tuple(grid.rows(i) for i in range(grid.num_tiles))
    lazy: da.Array = da.map_blocks(
        gram_block, TileTask(operator, gram), dtype=np.float64, chunks=(chunks, chunks), meta=np.empty((0, 0))
    )
    return lazy


def _ingest_rows(X: Any, store: Any) -> Dataset:
    if isinstance(X, str | Path):
        with contextlib.suppress(StoreError):
            return open_dataset(X)
    # the name carries no meaning: keys are made of the digest, and equal rows share their tiles
    return ingest(X, place(store, "rows", uuid.uuid4().hex + ".zarr"))


def gram_block(task: TileTask, block_id: tuple[int, int] | None = None) -> FloatArray:
    """Block (i, j) of the symmetric K: the stored tile or its transpose, computed unless it is there and agrees."""
    i, j = block_id or (0, 0)
    row, column = max(i, j), min(i, j)
    if task.operator.rows is not None:  # they may have been replaced since another block was computed
        task.operator.rows.open().check_still_there()
    with storage_errors(task.matrix.location, only_full=True):
        gram_tile(task, row, column)
    tile = task.matrix.read(row, column)
    return np.array(tile if i >= j else tile.T, order="C")
