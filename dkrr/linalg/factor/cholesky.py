"""Left-looking tile Cholesky: A = L L^T, one task and one file a tile.

    L[j,j] = potrf(A[j,j] - sum_{k<j} L[j,k] L[j,k]^T)
    L[i,j] = (A[i,j] - sum_{k<j} L[i,k] L[j,k]^T) L[j,j]^-T        i > j

A task waits for its left neighbour (i, j-1) and for the diagonal tile (j, j); everything else it reads follows by
transitivity. A[i,j] is needed exactly once, so it is evaluated from the kernel on the spot or read from a stored Gram
matrix. A valid tile is the checkpoint: a factorisation that was interrupted is run again, and tasks whose tile is
valid return at once, after a look at two of its entries. The order of every sum is fixed by the tile indices, so a
resumed factor has the same bytes as an undisturbed one.

Where few tiles meet many workers, and at the end of every factorisation, a long sum may be a task of its own; see
:mod:`dkrr.linalg.factor.schedule`. A factor that extends an earlier one keeps the finished rows of ragged tiles and
computes the others, in strips where there are few; see :mod:`dkrr.linalg.factor.rows`.

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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dkrr.engine.tasks import Executor, Progress, RunSummary
from dkrr.errors import DamagedChunkError, DataError, NotPositiveDefiniteError, StoreMismatchError
from dkrr.linalg.catalogue import TakenOver
from dkrr.linalg.factor.rows import Strips, assemble, choose_strips, compute_strip, num_first_terms
from dkrr.linalg.factor.schedule import (
    PARTIAL,
    TERMS,
    Split,
    cholesky_nodes,
    extension_nodes,
    remove_scratch,
    scratch_location,
    usual_split,
)
from dkrr.linalg.gram import gram_owner
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.passes import made, run_tasks
from dkrr.linalg.repairs import check_finite, wrong_tile
from dkrr.linalg.solution import no_factor
from dkrr.linalg.verify import factor_sample_agrees
from dkrr.store.failpoints import failpoint
from dkrr.store.files import remove_array
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer, gemm_nt, is_finite, leading_minor_pivot, potrf, rounded_pivot, syrk, trsm_right

logger = logging.getLogger("dkrr.linalg")


@dataclass(frozen=True)
class CholeskyTask:
    """Everything a task of the factorisation needs: the operator, the factor it writes to, partial sums and strips."""

    operator: RidgeOperator
    factor: TileMatrix
    sums: TileMatrix | None = None
    split: Split = field(default_factory=Split)
    taken: TakenOver = field(default_factory=TakenOver)
    strips: Strips | None = None

    @property
    def grid(self) -> TileGrid:
        return self.factor.grid

    def remaining_bytes(self) -> int:
        """Bytes of the factor that are still to be written."""
        return len(self.factor.missing()) * (self.factor.array.chunk_bytes + 4)

    def is_extended(self, i: int) -> bool:
        """Whether row block i has finished rows in an earlier factor, or is computed in strips."""
        return self.taken.first(i) > 0 or (self.strips is not None and i in self.strips.first)

    def is_split(self, j: int) -> bool:
        """Whether column j has partial sums."""
        return self.sums is not None and self.split.applies(self.grid, j)


def factor_tile(
    task: CholeskyTask, i: int, j: int, kind: int = 0, strip: int = 0
) -> tuple[bool, dict[str, Any]] | bool:
    """Compute and write L[i, j], its partial sum (1), a strip of it (2) or first terms of one (3), unless it is there.

    A tile that is there was written by an earlier run, or by an attempt whose receipt was lost. Two of its entries are
    compared with A: it may have changed places with another tile, whose checksum is as good.
    """
    if kind:
        is_sum = kind == PARTIAL
        computed = _compute_partial_sum(task, i, j) if is_sum else _compute_strip(task, i, j, strip, kind == TERMS)
        return computed, {"part": 1} if computed else {}
    factor = task.factor
    suspect = factor.is_valid(i, j)
    if suspect:
        if factor_sample_agrees(task.operator, factor, i, j):
            return False
        logger.warning("tile (%d, %d) of %s does not give back the matrix; computing it again", i, j, factor.location)

    def compute() -> Any:
        # a tile that was wrong may be so because the rows that it kept are
        c, info = assemble(task, i, j) if task.is_extended(i) and not suspect else _whole(task, i, j)
        rounded = 0 if info or i != j else rounded_pivot(c, task.operator.diagonal(j), task.operator.alpha, task.grid.n)
        if info or rounded:
            _check_operands(task, i, j)
            raise _not_positive_definite(task, j, info, (rounded, float(c[rounded - 1, rounded - 1]) ** 2))
        return c

    def write(c: Any) -> None:
        if suspect and _is_stored(factor, i, j, c):
            return
        if suspect:
            _forget_sums(task, i)  # first: what comes between must not leave sums of a tile that is gone
        factor.write(i, j, c)

    made("cholesky.tile", compute, write, partial(_not_finite, task, i, j))
    if task.sums is not None and task.is_split(j):
        task.sums.delete(i, j)  # so that only the sums of a few columns exist at once
    return True


def _whole(task: CholeskyTask, i: int, j: int) -> tuple[Any, int]:
    """Tile (i, j) of L, all of its rows together; and potrf's answer, 0 if good."""
    c = _update(task, i, j)
    if i == j:
        return c, potrf(c)
    trsm_right(c, task.factor.read(j, j))
    return c, 0


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
    """Compute and write A[i,j] - sum_{k<j-w} L[i,k] L[j,k]^T unless it, or the tile it is for, is valid."""
    assert task.sums is not None  # noqa: S101  (narrows the type)
    if task.factor.is_valid(i, j) or task.sums.is_valid(i, j):
        return False

    def compute() -> Any:
        c = buffer("accumulator", task.grid.shape(i, j), task.factor.dtype)
        task.operator.tile(i, j, c)
        _subtract(task, i, j, c, range(task.split.first_rest(task.grid, j)))
        return c

    return made("cholesky.sum", compute, partial(task.sums.write, i, j), partial(_not_finite, task, i, j))


def _compute_strip(task: CholeskyTask, i: int, j: int, strip: int, terms: bool) -> bool:
    """Compute and write a strip of tile (i, j), or its first terms, unless it, or what it is for, is valid."""
    assert task.strips is not None  # noqa: S101  (narrows the type)
    found = compute_strip(task, i, j, strip, terms=terms)
    if found is None:
        return False
    failpoint("cholesky.strip.after_compute", found)
    if not is_finite(np.tril(found, found.shape[1] - len(found)) if i == j else found):
        raise _not_finite(task, i, j, found)
    task.strips.write(i, j, strip, found, terms=terms)
    return True


def _forget_sums(task: CholeskyTask, i: int) -> None:
    """Remove the partial sums and the strips that row block i went into: one of its tiles was wrong."""
    if task.strips is not None:
        for row, column in task.grid.lower():
            if row in task.strips.first and i in (row, column):
                task.strips.forget(row, column)
    if task.sums is not None:
        for row, column in task.grid.lower():
            if i in (row, column) and task.is_split(column):
                task.sums.delete(row, column)


def _update(task: CholeskyTask, i: int, j: int) -> Any:
    """A[i,j] - sum_{k<j} L[i,k] L[j,k]^T in a reused buffer."""
    c = buffer("accumulator", task.grid.shape(i, j), task.factor.dtype)
    first = task.split.first_rest(task.grid, j) if _read_sum(task, i, j, c) else 0
    if not first:
        task.operator.tile(i, j, c)
    _subtract(task, i, j, c, range(first, j))
    return c


def _read_sum(task: CholeskyTask, i: int, j: int, c: Any) -> bool:
    """Copy the partial sum of tile (i, j) to c, if there is one; a twin of this task may remove it at any moment."""
    if task.sums is None or not task.is_split(j):
        return False
    try:
        c[...] = task.sums.read(i, j)
    except DamagedChunkError:
        if task.sums.is_valid(i, j):
            raise
        return False
    return True


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


def _not_positive_definite(
    task: CholeskyTask, j: int, info: int, rounded: tuple[int, float]
) -> NotPositiveDefiniteError:
    """Name the row, the pivot and an alpha that would do; the order and the pivot are ``rounded`` if potrf went on.

    Where it stopped, the tile is formed once more: potrf destroyed it.
    """
    grid, alpha = task.factor.grid, task.operator.alpha
    order, pivot = rounded
    if info:
        c = _update(task, j, j)
        order, pivot = leading_minor_pivot(np.tril(c) + np.tril(c, -1).T, info)
    row, largest = grid.span(j).start + order - 1, float(np.abs(task.operator.diagonal(j)).max())
    where = f"tile ({j}, {j}) of {task.factor.location}"
    return no_factor(where, row, pivot, alpha, task.factor.dtype, grid.n, largest)


def _not_finite(task: CholeskyTask, i: int, j: int, c: Any) -> DataError:
    """The error for a tile, unless a stored one that it rests on is to blame."""
    _check_operands(task, i, j)
    row, column = np.argwhere(~np.isfinite(c))[0]
    return DataError(
        f"tile ({i}, {j}) of {task.factor.location} is not finite at entry ({row}, {column}), "
        f"kernel {task.operator.kernel}",
        hint="scale the features",
    )


def _scratch(factor: TileMatrix, split: Split) -> TileMatrix:
    """Where partial sums are kept: beside the factor, until it is finished.

    Sums that an earlier attempt cut at another term are removed.
    """
    beside, dtype = scratch_location(factor, "sums"), factor.array.dtype
    make = partial(TileMatrix.create, beside, factor.grid, dtype=dtype, attributes={"num_last": split.num_last})
    try:
        return make()
    except StoreMismatchError:
        remove_array(beside)
        return make()


def factorise(
    operator: RidgeOperator,
    factor: TileMatrix,
    executor: Executor,
    progress: Progress | None = None,
    *,
    split: Split | None = None,
    taken: TakenOver | None = None,
) -> RunSummary:
    """Compute every tile of L that is not valid.

    A tile that a reader finds damaged is deleted and computed again, then everything that still misses; so is a tile of
    the stored Gram matrix of a kernel.

    Parameters
    ----------
    split
        Which sums are split. No byte of the factor depends on it; None takes what is usual for the executor's threads.
    taken
        What earlier factors have of its ragged tiles.

    Raises
    ------
    NotPositiveDefiniteError
        A pivot is not positive; names the global row, the pivot, alpha and a suggested alpha.
    DamagedChunkError
        A tile of a given (precomputed) matrix or a row chunk is damaged.
    StoreError
        A tile is damaged again and again.
    """
    grid = factor.grid
    split = usual_split(grid.num_tiles, executor.num_threads) if split is None else split
    sums = _scratch(factor, split) if split.applies(grid, grid.num_tiles - 1) else None
    split = split if sums is not None else Split()
    taken = taken or TakenOver()
    strips = choose_strips(factor, taken, executor.num_threads)
    task = CholeskyTask(operator, factor, sums, split, taken, strips)
    nodes = cholesky_nodes(grid, split)
    if taken.num_rows:
        spans = {i: strips.spans(i, grid.rows(i)) for i in strips.first} if strips is not None else {}
        first = {i: taken.first(i) for i in range(grid.num_tiles)}
        nodes = extension_nodes(grid, nodes, taken.num_rows // grid.tile_size, first, spans, num_first_terms)
    owners: dict[str, Any] = {factor.location: partial(_again, task), **gram_owner(operator, executor)}
    if sums is not None:
        owners[sums.location] = sums.array.delete
    if strips is not None:
        owners[strips.array.location] = strips.array.delete
    summary = run_tasks(executor, "factorise", factor_tile, task, nodes, progress, owners=owners)
    remove_scratch(factor)
    # what was done is counted in tiles
    summary.num_computed -= sum(len(key) > 2 for key in summary.values)
    summary.num_tasks = factor.grid.num_lower
    return summary


def _again(task: CholeskyTask, index: tuple[int, ...]) -> None:
    """Remove a tile, and what was made with it."""
    _forget_sums(task, index[0])
    task.factor.array.delete(index)
