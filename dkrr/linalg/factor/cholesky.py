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
from typing import Any

import numpy as np

from dkrr.engine.tasks import Executor, Progress, RunSummary
from dkrr.errors import DamagedChunkError, DataError, NotPositiveDefiniteError, StoreMismatchError
from dkrr.linalg.catalogue import TakenOver
from dkrr.linalg.factor.rows import Strips, assemble, choose_strips, compute_strip, num_first_terms
from dkrr.linalg.factor.schedule import PARTIAL, TERMS, Split, cholesky_nodes, extension_nodes, usual_split
from dkrr.linalg.factor.scratch import remove_scratch, scratch_location
from dkrr.linalg.gram import repair_gram_tile
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.repairs import Repairs, check_finite, wrong_tile
from dkrr.linalg.verify import factor_sample_agrees
from dkrr.store.failpoints import failpoint
from dkrr.store.files import remove_array
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer, gemm_nt, is_finite, leading_minor_pivot, potrf, rounded_pivot, syrk, trsm_right

__all__ = ["CholeskyTask", "Split", "factorise"]

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
    task: CholeskyTask, i: int, j: int, partial: int = 0, strip: int = 0
) -> tuple[bool, dict[str, Any]] | bool:
    """Compute and write L[i, j], its partial sum (1), a strip of it (2) or first terms of one (3), unless it is there.

    A tile that is there was written by an earlier run, or by an attempt whose receipt was lost. Two of its entries are
    compared with A: it may have changed places with another tile, whose checksum is as good.
    """
    if partial:
        is_sum = partial == PARTIAL
        computed = _compute_partial_sum(task, i, j) if is_sum else _compute_strip(task, i, j, strip, partial == TERMS)
        return computed, {"part": 1} if computed else {}
    factor = task.factor
    suspect = factor.is_valid(i, j)
    if suspect:
        if factor_sample_agrees(task.operator, factor, i, j):
            return False
        logger.warning("tile (%d, %d) of %s does not give back the matrix; computing it again", i, j, factor.location)
    failpoint("cholesky.tile.before_read")
    # a tile that was wrong may be so because the rows that it kept are
    c, info = assemble(task, i, j) if task.is_extended(i) and not suspect else _whole(task, i, j)
    rounded = 0 if info or i != j else rounded_pivot(c, task.operator.diagonal(j), task.operator.alpha, task.grid.n)
    if info or rounded:
        _check_operands(task, i, j)
        raise _not_positive_definite(task, j, info, (rounded, float(c[rounded - 1, rounded - 1]) ** 2))
    failpoint("cholesky.tile.after_compute", c)
    if not is_finite(c):
        _check_operands(task, i, j)
        raise _not_finite(task, i, j, c)
    if not (suspect and _is_stored(factor, i, j, c)):
        if suspect:
            _forget_sums(task, i)  # first: what comes between must not leave sums of a tile that is gone
        factor.write(i, j, c)
        failpoint("cholesky.tile.after_write")
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
    c = buffer("accumulator", task.grid.shape(i, j), task.factor.dtype)
    task.operator.tile(i, j, c)
    _subtract(task, i, j, c, range(task.split.first_rest(task.grid, j)))
    failpoint("cholesky.sum.after_compute", c)
    if not is_finite(c):
        _check_operands(task, i, j)
        raise _not_finite(task, i, j, c)
    task.sums.write(i, j, c)
    return True


def _compute_strip(task: CholeskyTask, i: int, j: int, strip: int, terms: bool) -> bool:
    """Compute and write a strip of tile (i, j), or its first terms, unless it, or what it is for, is valid."""
    assert task.strips is not None  # noqa: S101  (narrows the type)
    found = compute_strip(task, i, j, strip, terms=terms)
    if found is None:
        return False
    failpoint("cholesky.strip.after_compute", found)
    if not is_finite(np.tril(found, found.shape[1] - len(found)) if i == j else found):
        _check_operands(task, i, j)
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
    row = grid.span(j).start + order - 1
    eps = float(np.finfo(factor_dtype(task)).eps)
    # rounding is that of the matrix, not of what the update left of it
    scale = float(np.abs(task.operator.diagonal(j)).max())
    suggested = alpha + (10 * max(abs(pivot), grid.n * eps * scale) or eps)
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


def _scratch(factor: TileMatrix, split: Split) -> TileMatrix:
    """Where partial sums are kept: beside the factor, until it is finished.

    Sums that an earlier attempt cut at another term are removed.
    """
    beside = scratch_location(factor, "sums")
    attributes = {"num_last": split.num_last}
    try:
        return TileMatrix.create(beside, factor.grid, dtype=factor.array.dtype, attributes=attributes)
    except StoreMismatchError:
        remove_array(beside)
        return TileMatrix.create(beside, factor.grid, dtype=factor.array.dtype, attributes=attributes)


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
    repairs, gram = Repairs(), operator.gram
    while True:
        try:
            summary = executor.run("factorise", factor_tile, task, nodes, progress)
            remove_scratch(factor)
            # what was done is counted in tiles
            summary.num_computed -= sum(len(key) > 2 for key in summary.values)
            summary.num_tasks = factor.grid.num_lower
            return summary
        except DamagedChunkError as damage:
            if sums is not None and damage.path == sums.location:
                repairs.add(damage)
                sums.delete(*damage.index)
            elif strips is not None and damage.path == strips.array.location:
                repairs.add(damage)
                strips.array.delete(damage.index)
            elif damage.path == factor.location:
                repairs.add(damage)
                _forget_sums(task, damage.index[0])
                factor.delete(*damage.index)
            elif gram is not None and damage.path == gram.location and operator.kernel is not None:
                repairs.add(damage)
                repair_gram_tile(operator, damage.index, executor)
            else:
                raise
