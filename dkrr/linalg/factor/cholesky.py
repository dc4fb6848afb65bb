"""Left-looking tile Cholesky: A = L L^T, one task and one file a tile.

    L[j,j] = potrf(A[j,j] - sum_{k<j} L[j,k] L[j,k]^T)
    L[i,j] = (A[i,j] - sum_{k<j} L[i,k] L[j,k]^T) L[j,j]^-T        i > j

A task waits for its left neighbour (i, j-1) and for the diagonal tile (j, j); everything else it reads follows by
transitivity. A[i,j] is needed exactly once, so it is evaluated from the kernel on the spot or read from a stored Gram
matrix. A valid tile is the checkpoint: a factorisation that was interrupted is run again, and tasks whose tile is
valid return at once, after a look at two of its entries. The order of every sum is fixed by the tile indices, so a
resumed factor has the same bytes as an undisturbed one.

At the end of the factorisation columns are shorter than the number of workers and every tile waits for a long sum. In
the last few columns the sum over k < j-1 is therefore a task of its own (a "partial sum"), which need not wait for the
diagonal tile; it is kept in a scratch matrix beside the factor. Ten tiles a side on two workers: 93 % busy becomes
98 %.

Cost
----
n^3 / 3 flops; n^3 / (3 b) elements read, n^2 / 2 written; memory of a task: one accumulator and two mapped tiles.

References
----------
Golub and Van Loan, Matrix Computations, 4th ed., section 4.2; Buttari et al., A class of parallel tiled linear algebra
algorithms for multicore architectures, Parallel Computing 35 (2009).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.address import join, name_of, parent_of
from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.errors import DamagedChunkError, DataError, NotPositiveDefiniteError
from dkrr.failpoints import failpoint
from dkrr.linalg.gram import repair_gram_tile
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.repairs import Repairs, check_finite, wrong_tile
from dkrr.linalg.verify import factor_sample_agrees
from dkrr.stores import remove_array
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer, gemm_nt, is_finite, leading_minor_pivot, potrf, syrk, trsm_right

__all__ = ["CholeskyTask", "cholesky_nodes", "factorise"]

logger = logging.getLogger("dkrr.linalg")


@dataclass(frozen=True)
class CholeskyTask:
    """Everything a task of the factorisation needs: the operator, the factor it writes to, and partial sums."""

    operator: RidgeOperator
    factor: TileMatrix
    sums: TileMatrix | None = None
    num_split: int = 0

    @property
    def grid(self) -> TileGrid:
        return self.factor.grid

    def remaining_bytes(self) -> int:
        """Bytes of the factor that are still to be written."""
        return len(self.factor.missing()) * (self.factor.array.chunk_bytes + 4)

    def partial_sum(self, i: int, j: int) -> TileMatrix | None:
        """The matrix that holds the partial sum of tile (i, j), None when there is none."""
        split = self.sums is not None and is_split(self.grid, j, self.num_split)
        return self.sums if split and self.sums is not None and self.sums.is_valid(i, j) else None


def is_split(grid: TileGrid, j: int, num_split: int) -> bool:
    """Whether column j is one of the last ``num_split``, and long enough for a partial sum to be worth a task."""
    return j >= max(3, grid.num_tiles - num_split)


def cholesky_nodes(grid: TileGrid, num_split: int = 0) -> list[Node]:
    """The graph, in the order of its priorities: N (N + 1) / 2 nodes (i, j) with at most two dependencies each.

    The critical path goes (j, j), (j+1, j), (j+1, j+1): of every column the tile below the diagonal comes first and
    the next diagonal tile right behind it, before the rest of the column. In the last ``num_split`` columns a tile
    also waits for its partial sum, the node (i, j, 1), which itself waits for column j - 2.
    """
    b = float(grid.tile_size)

    def rank(key: tuple[int, ...]) -> tuple[float, float]:
        i, j = key[:2]
        if len(key) == 3:
            return j - 1.4, i
        return (j - 1, j + 0.5) if i == j else (j, i)

    def node(key: tuple[int, ...]) -> Node:
        i, j = key[:2]
        update = b**3 if i == j else 2 * b**3
        if len(key) == 3:
            return Node(key, tuple(dict.fromkeys(((i, j - 2), (j, j - 2)))), (j - 1) * update)
        left = ((i, j - 1),) if j else ()
        above = ((j, j),) if i != j else ()
        partial = ((i, j, 1),) if is_split(grid, j, num_split) else ()
        rest = b**3 / 3 if i == j else b**3
        return Node(key, left + above + partial, rest + (1 if partial else j) * update)

    keys: list[tuple[int, ...]] = list(grid.lower())
    keys += [(i, j, 1) for i, j in grid.lower() if is_split(grid, j, num_split)]
    return [node(key) for key in sorted(keys, key=rank)]


def factor_tile(task: CholeskyTask, i: int, j: int, partial: int = 0) -> tuple[bool, dict[str, Any]] | bool:
    """Compute and write L[i, j], or its partial sum, unless it is valid; whether it was computed.

    A tile that is there was written by an earlier run, or by an attempt whose receipt was lost. Two of its entries are
    compared with A: it may have changed places with another tile, whose checksum is as good.
    """
    if partial:
        computed = _compute_partial_sum(task, i, j)
        return computed, {"partial_sum": 1} if computed else {}
    factor = task.factor
    suspect = factor.is_valid(i, j)
    if suspect:
        if factor_sample_agrees(task.operator, factor, i, j):
            return False
        logger.warning("tile (%d, %d) of %s does not give back the matrix; computing it again", i, j, factor.location)
    failpoint("cholesky.tile.before_read")
    c = _update(task, i, j)
    if i == j:
        info = potrf(c)
        if info:
            _check_operands(task, i, j)
            raise _not_positive_definite(task, j, info)
    else:
        trsm_right(c, factor.read(j, j))
    failpoint("cholesky.tile.after_compute", c)
    if not is_finite(c):
        _check_operands(task, i, j)
        raise _not_finite(task, i, j, c)
    if not (suspect and _is_stored(factor, i, j, c)):
        if suspect:
            _forget_sums(task, i)  # first: what comes between must not leave sums of a tile that is gone
        factor.write(i, j, c)
        failpoint("cholesky.tile.after_write")
    return True


def _is_stored(factor: TileMatrix, i: int, j: int, c: Any) -> bool:
    """Whether tile (i, j) is there and holds exactly c: then the sample was wrong, and no valid tile is rewritten."""
    try:
        return bool(np.array_equal(factor.read(i, j), c))
    except DamagedChunkError:
        return False


def _check_operands(task: CholeskyTask, i: int, j: int) -> None:
    """Blame a stored tile for a result that cannot be used, before the matrix is blamed.

    What is not finite was read directly: a task that reads it writes nothing. A wrong number may have come a longer
    way, so tiles are compared with A column by column, and the first that disagrees is the one.

    Raises
    ------
    DamagedChunkError
        A tile that the sum for (i, j) rests on passes its checksum and is not finite, or does not give back the matrix.
    """
    factor = task.factor
    read = [(row, k) for k in range(j) for row in dict.fromkeys((j, i))] + ([(j, j)] if i != j else [])
    check_finite(factor, read)
    for k in range(j + (i != j)):
        for row in dict.fromkeys((*range(k, j + 1), i)):
            if (row, k) != (i, j) and not factor_sample_agrees(task.operator, factor, row, k):
                raise wrong_tile(factor, row, k, "does not give back the matrix")


def _compute_partial_sum(task: CholeskyTask, i: int, j: int) -> bool:
    """Compute and write A[i,j] - sum_{k<j-1} L[i,k] L[j,k]^T unless it, or the tile it is for, is valid."""
    assert task.sums is not None  # noqa: S101  (narrows the type)
    if task.factor.is_valid(i, j) or task.sums.is_valid(i, j):
        return False
    c = buffer("accumulator", task.grid.shape(i, j), task.factor.dtype)
    task.operator.tile(i, j, c)
    _subtract(task, i, j, c, range(j - 1))
    failpoint("cholesky.sum.after_compute", c)
    if not is_finite(c):
        _check_operands(task, i, j)
        raise _not_finite(task, i, j, c)
    task.sums.write(i, j, c)
    return True


def _forget_sums(task: CholeskyTask, i: int) -> None:
    """Remove the partial sums that row block i went into: one of its tiles was wrong."""
    if task.sums is not None:
        for row, column in task.grid.lower():
            if i in (row, column) and is_split(task.grid, column, task.num_split):
                task.sums.delete(row, column)


def _update(task: CholeskyTask, i: int, j: int) -> Any:
    """A[i,j] - sum_{k<j} L[i,k] L[j,k]^T in a reused buffer."""
    c = buffer("accumulator", task.grid.shape(i, j), task.factor.dtype)
    sums = task.partial_sum(i, j)
    if sums is not None:
        c[...] = sums.read(i, j)
    else:
        task.operator.tile(i, j, c)
    _subtract(task, i, j, c, range(j) if sums is None else range(j - 1, j))
    return c


def _subtract(task: CholeskyTask, i: int, j: int, c: Any, columns: range) -> None:
    """c -= sum of L[i,k] L[j,k]^T over the given k, in ascending order."""
    factor = task.factor
    for k in columns:
        # at most two tiles are mapped at once, and both are dropped after their product
        left = factor.read(j, k)
        if i == j:
            syrk(c, left)
        else:
            gemm_nt(c, factor.read(i, k), left)
        del left


def _not_positive_definite(task: CholeskyTask, j: int, info: int) -> NotPositiveDefiniteError:
    """Name the row, the pivot and an alpha that would do. The tile is formed once more: potrf destroyed it."""
    grid, alpha = task.factor.grid, task.operator.alpha
    row = grid.span(j).start + info - 1
    c = _update(task, j, j)
    scale = float(np.max(np.abs(np.diag(c))))
    symmetric = np.tril(c) + np.tril(c, -1).T
    pivot = leading_minor_pivot(symmetric, info)
    eps = float(np.finfo(factor_dtype(task)).eps)
    suggested = alpha + max(10 * abs(pivot), grid.n * eps * scale)
    return NotPositiveDefiniteError(
        f"tile ({j}, {j}) of {task.factor.location} is not positive definite at row {row:,} "
        f"(pivot {pivot:.2g}, alpha {alpha:.3g}, {task.factor.array.dtype})",
        hint=f"raise alpha to at least {suggested:.1g}, or remove duplicated rows; an indefinite kernel has no "
        "Cholesky factor at small alpha",
        row=row,
        pivot=pivot,
        alpha=alpha,
        suggested_alpha=suggested,
    )


def factor_dtype(task: CholeskyTask) -> np.dtype[Any]:
    return task.factor.dtype


def _not_finite(task: CholeskyTask, i: int, j: int, c: Any) -> DataError:
    row, column = np.argwhere(~np.isfinite(c))[0]
    return DataError(
        f"tile ({i}, {j}) of {task.factor.location} is not finite at entry ({row}, {column}), "
        f"kernel {task.operator.kernel}",
        hint="scale the features",
    )


def _scratch(factor: TileMatrix) -> TileMatrix | None:
    """Where partial sums are kept: beside the factor, until it is finished; None where there is no beside."""
    location = factor.array.store
    if not isinstance(location, str):
        return None
    beside = join(parent_of(location), f"{name_of(location).removesuffix('.zarr')}-sums.zarr")
    return TileMatrix.create(beside, factor.grid, dtype=factor.array.dtype)


def factorise(
    operator: RidgeOperator,
    factor: TileMatrix,
    executor: Executor,
    progress: Progress | None = None,
) -> RunSummary:
    """Compute every tile of L that is not valid.

    A tile that a reader finds damaged is deleted and computed again, then everything that still misses; so is a tile of
    the stored Gram matrix of a kernel.

    Raises
    ------
    NotPositiveDefiniteError
        A pivot is not positive; names the global row, the pivot, alpha and a suggested alpha.
    DamagedChunkError
        A tile of a given (precomputed) matrix or a row chunk is damaged.
    StoreError
        A tile is damaged again and again.
    """
    sums = _scratch(factor) if executor.num_threads > 1 else None
    num_split = executor.num_threads + 1 if sums is not None else 0
    task = CholeskyTask(operator, factor, sums, num_split)
    nodes = cholesky_nodes(factor.grid, num_split)
    repairs, gram = Repairs(), operator.gram
    while True:
        try:
            summary = executor.run("factorise", factor_tile, task, nodes, progress)
            if sums is not None:
                remove_array(sums.array.store)
            # what was done is counted in tiles
            summary.num_computed -= sum(len(key) == 3 for key in summary.values)
            summary.num_tasks = factor.grid.num_lower
            return summary
        except DamagedChunkError as damage:
            if sums is not None and damage.path == sums.location:
                repairs.add(damage)
                sums.delete(*damage.index)
            elif damage.path == factor.location:
                repairs.add(damage)
                _forget_sums(task, damage.index[0])
                factor.delete(*damage.index)
            elif gram is not None and damage.path == gram.location and operator.kernel is not None:
                repairs.add(damage)
                repair_gram_tile(operator, damage.index, executor)
            else:
                raise
