"""Left-looking tile Cholesky: A = L L^T, one task and one file a tile.

    L[j,j] = potrf(A[j,j] - sum_{k<j} L[j,k] L[j,k]^T)
    L[i,j] = (A[i,j] - sum_{k<j} L[i,k] L[j,k]^T) L[j,j]^-T        i > j

A task waits for its left neighbour (i, j-1) and for the diagonal tile (j, j); everything else it reads follows by
transitivity. A[i,j] is needed exactly once, so it is evaluated from the kernel on the spot or read from a stored Gram
matrix. A valid tile is the checkpoint: a factorisation that was interrupted is run again, and tasks whose tile is
valid return at once, after a look at two of its entries. The order of every sum is fixed by the tile indices, so a
resumed factor has the same bytes as an undisturbed one.

A factor that extends an earlier one keeps the finished rows of ragged tiles and computes the others. Rows s <= p < e of
an off-diagonal tile need the same rows of the tiles to their left and nothing of each other:

    L[s:e, j] = (A[s:e, j] - sum_{k<j} L[s:e, k] L[j, k]^T) L[j, j]^-T

Of a diagonal tile whose first r rows are finished, with the new rows P = A[r:, :] - sum_k L[r:, k] L[i, k]^T:

    L21 = P1 L11^-T,     L22 = potrf(P2 - L21 L21^T)

The first terms of a long sum may be computed ahead of the others, as a task of their own, whose result waits in a
scratch matrix for the task that writes the tile; see :mod:`dkrr.linalg.direct`.

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
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dkrr.errors import DamagedChunkError, DataError
from dkrr.linalg.gram import TileTask, factor_sample_agrees
from dkrr.linalg.solution import no_factor
from dkrr.store.chunks import FloatArray
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer, gemm_nt, leading_minor_pivot, potrf, rounded_pivot, syrk, trsm_right
from dkrr.tiles.store import made

logger = logging.getLogger("dkrr.linalg")


# of a shorter sum of an extension the first terms are no task of their own
MIN_TERMS = 4


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which sums are split, and where.

    Parameters
    ----------
    num_columns
        The last so many columns are split; 0 for none.
    num_last
        w, the terms that are left to the task of the tile.
    new_from
        The first row block that an extension has to complete, of these half of the terms are made ahead; 0 for none.
    """

    num_columns: int = 0
    num_last: int = 1
    new_from: int = 0

    def num_first(self, grid: TileGrid, i: int, j: int) -> int:
        """So many terms of the sum of tile (i, j) are a task of their own."""
        if self.new_from:
            return (j + 1) // 2 if i >= self.new_from and j >= MIN_TERMS else 0
        return j - self.num_last if j >= max(self.num_last + 2, grid.num_tiles - self.num_columns) else 0

    def to_dict(self) -> dict[str, int]:
        """Plain data, for the record of a run."""
        return asdict(self)


@dataclass(frozen=True)
class CholeskyTask(TileTask):
    """Everything a task of the factorisation needs; the matrix is L, and what is taken over are finished rows.

    Parameters
    ----------
    split
        Which sums have first terms that are tasks of their own.
    sums
        These first terms, if there are any.
    """

    split: Split = field(default_factory=Split)
    sums: TileMatrix | None = None

    def read_sum(self, i: int, j: int) -> FloatArray | None:
        """The first terms of the sum of tile (i, j); None where there are none.

        Raises
        ------
        DamagedChunkError
            They are there, and are not what was written.
        """
        if self.sums is not None and self.split.num_first(self.grid, i, j):
            try:
                return self.sums.read(i, j)
            except DamagedChunkError:
                if self.sums.is_valid(i, j):
                    raise  # else there are none, or a twin of this task has just removed them
        return None

    def forget_sums(self, i: int) -> None:
        """Remove all that row block i went into: one of its tiles was wrong."""
        for tile in self.grid.lower() if self.sums is not None else ():
            if i in tile:
                self.sums.delete(*tile)  # type: ignore[union-attr]


def factor_tile(task: CholeskyTask, i: int, j: int, part: int | None = None) -> tuple[bool, dict[str, Any]] | bool:
    """Compute and write L[i, j], or the first terms of its sum, unless it is there.

    A tile that is there was written by an earlier run, or by an attempt whose receipt was lost. Two of its entries are
    compared with A: it may have changed places with another tile, whose checksum is as good.
    """
    factor, sums = task.matrix, task.sums
    suspect = factor.is_valid(i, j)
    if part is not None and sums is not None:
        if suspect or sums.is_valid(i, j):
            return False
        compute_sum, write_sum = partial(_first_terms, task, i, j), partial(sums.write, i, j)
        return made("cholesky.sum", compute_sum, write_sum, partial(_not_finite, task, i, j)), {"part": 1}
    if suspect:
        if factor_sample_agrees(task.operator, factor, i, j):
            return False
        logger.warning("tile (%d, %d) of %s does not give back the matrix; computing it again", i, j, factor.location)

    def compute() -> Any:
        # a tile that was wrong may be so because the rows that it kept are
        c, info = _tile(task, i, j, alone=suspect)
        rounded = 0 if info or i != j else rounded_pivot(c, task.operator.diagonal(j), task.operator.alpha, task.grid.n)
        if info or rounded:
            _check_operands(task, i, j)
            _raise_not_positive_definite(task, j, info, rounded, c)
        return c

    def write(c: Any) -> None:
        if suspect:
            task.forget_sums(i)  # first: what comes between must not leave parts of a tile that is gone
        factor.write(i, j, c)

    made("cholesky.tile", compute, write, partial(_not_finite, task, i, j))
    if sums is not None:
        sums.delete(i, j)  # so that only those of a few columns exist at once
    return True


def _tile(task: CholeskyTask, i: int, j: int, *, alone: bool) -> tuple[FloatArray, int]:
    """Tile (i, j) from its finished rows, the first terms of its sum, and what is left to compute; and potrf's answer.

    That is 0 if it is good, else counts from the first row of the tile. ``alone``: from A and the tiles to its left.
    """
    c: FloatArray = buffer("accumulator", task.grid.shape(i, j), task.matrix.dtype)
    first = 0 if alone else task.taken.first(i)
    # tiles may change places
    kept = task.taken.read(i, j, partial(factor_sample_agrees, task.operator)) if first else None
    if kept is not None:
        c[:first, : kept.shape[1]] = kept
    for start, stop in ((0, first), (first, len(c))):
        if start == stop or (not start and kept is not None):
            continue
        block = c[start:stop, : stop if i == j else None]
        _update(task, i, j, start, block, 0 if alone or start < first else None)
        if i != j:
            trsm_right(block, task.matrix.read(j, j))
    if i == j:
        c[:first, first:] = 0
        for start, stop in ((0, first), (first, len(c))):
            if start == stop or (not start and kept is not None):
                continue
            if start:
                trsm_right(c[start:, :start], c[:start, :start])
                syrk(c[start:, start:], c[start:, :start])
            info = potrf(c[start:stop, start:stop])
            if info:
                return c, start + info
    return c, 0


def _update(
    task: CholeskyTask, i: int, j: int, start: int, c: FloatArray, begin: int | None = 0, last: int | None = None
) -> None:
    """c <- A[s, j] - sum_{k<last} L[s, k] L[j, k]^T for the rows s of tile (i, j) from ``start`` on, k ascending.

    Of a diagonal tile its first columns. ``last`` is j where it is not given. With ``begin`` None what there is of the
    sum is taken from its first terms.
    """
    factor, rows = task.matrix, slice(start, start + len(c))
    begun = task.read_sum(i, j) if begin is None else None
    if begun is None:
        begin = 0
        task.operator.tile(i, j, c, start=start, stop=rows.stop)
    else:
        begin = task.split.num_first(task.grid, i, j)
        c[...] = begun[rows, : c.shape[1]]
        del begun
    for k in range(begin, j if last is None else last):
        # at most two tiles are mapped at once, and both are dropped after their product
        right = factor.read(j, k)
        if i != j:
            gemm_nt(c, factor.read(i, k)[rows], right)
        elif len(c) == task.grid.rows(i):
            syrk(c, right)
        else:
            gemm_nt(c, right[rows], right[: c.shape[1]])
        del right


def _first_terms(task: CholeskyTask, i: int, j: int) -> FloatArray:
    """The first terms of the sum of tile (i, j), in the rows that are not finished in an earlier factor."""
    c: FloatArray = buffer("accumulator", task.grid.shape(i, j), task.matrix.dtype)
    first = task.taken.first(i)
    c[:first] = 0
    _update(task, i, j, first, c[first:], last=task.split.num_first(task.grid, i, j))
    return c


def _check_operands(task: CholeskyTask, i: int, j: int) -> None:
    """Blame a stored tile for a result that cannot be used, before the matrix is blamed.

    What is not finite was read directly: a task that reads it writes nothing. A wrong number may have come a longer
    way, so tiles are compared with A column by column, and the first that disagrees is the one.

    Raises
    ------
    DamagedChunkError
        A tile that the sum for (i, j) rests on passes its checksum and is not finite, or does not give back the matrix.
    """
    factor = task.matrix
    read = [(row, k) for k in range(j) for row in dict.fromkeys((j, i))] + ([(j, j)] if i != j else [])
    factor.check_finite(read)
    for k in range(j + (i != j)):
        for row in dict.fromkeys((*range(k, j + 1), i)):
            if (row, k) != (i, j) and not factor_sample_agrees(task.operator, factor, row, k):
                raise factor.wrong(row, k, "does not give back the matrix")


def _raise_not_positive_definite(task: CholeskyTask, j: int, info: int, rounded: int, c: FloatArray) -> None:
    """Name the row, the pivot and an alpha that would do; the order is ``info`` where potrf stopped, else ``rounded``.

    Where it stopped, the tile is formed once more: potrf destroyed it.
    """
    grid, alpha = task.matrix.grid, task.operator.alpha
    if info:
        c = buffer("accumulator", grid.shape(j, j), task.matrix.dtype)
        _update(task, j, j, 0, c)
        order, pivot = leading_minor_pivot(np.tril(c) + np.tril(c, -1).T, info)
    else:
        order, pivot = rounded, float(c[rounded - 1, rounded - 1]) ** 2
    row, largest = grid.span(j).start + order - 1, float(np.abs(task.operator.diagonal(j)).max())
    where = f"tile ({j}, {j}) of {task.matrix.location}"
    raise no_factor(where, row, pivot, alpha, task.matrix.dtype, grid.n, largest)


def _not_finite(task: CholeskyTask, i: int, j: int, c: Any) -> DataError:
    """The error for a tile, unless a stored one that it rests on is to blame."""
    _check_operands(task, i, j)
    row, column = np.argwhere(~np.isfinite(c))[0]
    return DataError(
        f"tile ({i}, {j}) of {task.matrix.location} is not finite at entry ({row}, {column}), "
        f"kernel {task.operator.kernel}",
        hint="scale the features",
    )
