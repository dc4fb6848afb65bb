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

So rows can be computed in strips, and the first terms of a long sum ahead of the others, as tasks of their own, whose
results wait in a scratch array for the task that writes the tile; see :mod:`dkrr.linalg.direct`.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dkrr.errors import DamagedChunkError, DataError
from dkrr.linalg.gram import TileTask, factor_sample_agrees
from dkrr.linalg.solution import no_factor
from dkrr.store.chunks import ChunkArray, FloatArray
from dkrr.tiles import TileGrid
from dkrr.tiles.blas import buffer, gemm_nt, leading_minor_pivot, potrf, rounded_pivot, syrk, trsm_right
from dkrr.tiles.store import made

logger = logging.getLogger("dkrr.linalg")


# of a shorter sum of a strip the first terms are no task of their own
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
    """

    num_columns: int = 0
    num_last: int = 1

    def applies(self, grid: TileGrid, j: int) -> bool:
        """Whether the sums of column j are split: it is one of the last, and two terms or more come before the rest."""
        return j >= max(self.num_last + 2, grid.num_tiles - self.num_columns)

    def first_rest(self, grid: TileGrid, j: int) -> int:
        """The first term of column j that is left to the task of the tile."""
        return j - self.num_last if self.applies(grid, j) else 0

    def to_dict(self) -> dict[str, int]:
        """Plain data, for the record of a run."""
        return {"num_columns": self.num_columns, "num_last": self.num_last}


def num_first_terms(j: int) -> int:
    """So many terms of the sum of a strip in column j are a task of their own; 0 where there are few."""
    return (j + 1) // 2 if j >= MIN_TERMS else 0


Span = tuple[int, int]
"""First row within a row block, and one past the last."""


@dataclass(frozen=True)
class CholeskyTask(TileTask):
    """Everything a task of the factorisation needs; the matrix is L, and what is taken over are finished rows.

    Parameters
    ----------
    split
        Which sums have first terms that are tasks of their own.
    strips
        The rows of some row blocks that are computed in strips.
    parts
        First terms and strips, if there are any, see :meth:`index`.
    """

    split: Split = field(default_factory=Split)
    strips: Mapping[int, list[Span]] = field(default_factory=dict)
    parts: ChunkArray | None = None

    def spans(self, i: int) -> list[Span]:
        """The rows of row block i that are not finished in an earlier factor, strip by strip."""
        first, rows = self.taken.first(i), self.grid.rows(i)
        return self.strips.get(i) or ([(first, rows)] if first < rows else [])

    def num_first(self, i: int, j: int) -> int:
        """So many terms of the sum of tile (i, j) are a task of their own."""
        if i in self.strips:
            return num_first_terms(j)
        return 0 if self.parts is None or self.taken.first(i) else self.split.first_rest(self.grid, j)

    def index(self, i: int, j: int, s: int, *, strip: bool) -> tuple[int, int]:
        """The chunk of ``parts`` with strip s of tile (i, j), or with the first terms of its sum."""
        most = max(map(len, self.strips.values()), default=1)
        return 2 * (i * most + s) + strip, j

    def read_part(self, i: int, j: int, s: int, shape: tuple[int, ...], *, strip: bool) -> FloatArray | None:
        """A strip, or the first terms of its sum; None where there are none.

        Raises
        ------
        DamagedChunkError
            They are there, and are not what was written.
        """
        index = self.index(i, j, s, strip=strip)
        if self.parts is not None:
            try:
                return self.parts.read(index)[: shape[0], : shape[1]]
            except DamagedChunkError:
                if self.parts.is_valid(index):
                    raise  # else there are none, or a twin of this task has just removed them
        return None

    def forget_parts(self, i: int) -> None:
        """Remove all that row block i went into: one of its tiles was wrong."""
        for row, column in self.grid.lower() if self.parts is not None else ():
            if i in (row, column) and (row in self.strips or self.num_first(row, column)):
                for number in range(2 * len(self.spans(row))):
                    self.parts.delete(self.index(row, column, number // 2, strip=bool(number % 2)))  # type: ignore[union-attr]


def factor_tile(
    task: CholeskyTask, i: int, j: int, s: int | None = None, strip: int = 0
) -> tuple[bool, dict[str, Any]] | bool:
    """Compute and write L[i, j], or the first terms of its strip s, or that strip, unless it is there.

    A tile that is there was written by an earlier run, or by an attempt whose receipt was lost. Two of its entries are
    compared with A: it may have changed places with another tile, whose checksum is as good.
    """
    if s is not None:
        computed = _compute_part(task, i, j, s, strip=bool(strip))
        return computed, {"part": 1} if computed else {}
    factor = task.matrix
    suspect = factor.is_valid(i, j)
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
            task.forget_parts(i)  # first: what comes between must not leave parts of a tile that is gone
        factor.write(i, j, c)

    made("cholesky.tile", compute, write, partial(_not_finite, task, i, j))
    if task.parts is not None and i not in task.strips and task.num_first(i, j):
        task.parts.delete(task.index(i, j, 0, strip=False))  # so that only those of a few columns exist at once
    return True


def _tile(task: CholeskyTask, i: int, j: int, *, alone: bool) -> tuple[FloatArray, int]:
    """Tile (i, j) from its finished rows, its parts, and whatever is left to compute; and potrf's answer, 0 if good.

    A positive answer counts from the first row of the tile. ``alone``: from A and the tiles to its left.
    """
    grid, operator = task.grid, task.operator
    c: FloatArray = buffer("accumulator", grid.shape(i, j), task.matrix.dtype)

    first = 0 if alone else task.taken.first(i)
    kept = task.taken.read(i, j, partial(factor_sample_agrees, operator)) if first else None  # tiles may change places
    rows: list[tuple[int | None, Span]] = [(None, (0, grid.rows(i)))] if alone else list(enumerate(task.spans(i)))
    if kept is not None:
        c[:first, : kept.shape[1]] = kept
    elif first:
        rows.insert(0, (None, (0, first)))
    for s, (start, stop) in rows:
        block = c[start:stop, : stop if i == j else None]
        strip = task.read_part(i, j, s, block.shape, strip=True) if s is not None and i in task.strips else None
        if strip is not None:
            block[...] = strip
            continue
        _update(task, i, j, (start, stop), block, s)
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
    task: CholeskyTask, i: int, j: int, span: Span, c: FloatArray, s: int | None = None, last: int | None = None
) -> FloatArray:
    """c <- A[span, j] - sum_{k<last} L[span, k] L[j, k]^T, k ascending; of a diagonal tile its first columns.

    ``last`` is j where it is not given, and what there is of the sum of strip s is then taken from its first terms.
    """
    factor, (start, stop) = task.matrix, span
    h = task.num_first(i, j) if last is None and s is not None else 0
    begun = task.read_part(i, j, s or 0, c.shape, strip=False) if h else None
    if begun is not None:
        c[...] = begun
        del begun
    else:
        h = 0
        task.operator.tile(i, j, c, start=start, stop=stop)
    for k in range(h, j if last is None else last):
        # at most two tiles are mapped at once, and both are dropped after their product
        right = factor.read(j, k)
        if i != j:
            gemm_nt(c, _left(task, i, k, span, s), right)
        elif i not in task.strips and len(c) == task.grid.rows(i):
            syrk(c, right)
        else:
            gemm_nt(c, right[start:stop], right[:stop])
        del right
    return c


def _left(task: CholeskyTask, i: int, k: int, span: Span, s: int | None) -> FloatArray:
    """Some rows of tile (i, k): its strip, before the tile is there."""
    if s is not None and i in task.strips:
        strip = task.read_part(i, k, s, (span[1] - span[0], task.grid.rows(k)), strip=True)
        if strip is not None:
            return strip
    return task.matrix.read(i, k)[slice(*span)]


def _compute_part(task: CholeskyTask, i: int, j: int, s: int, *, strip: bool) -> bool:
    """Compute and write a strip of tile (i, j), or its sum's first terms, unless it, or what it is for, is there."""
    parts, (start, stop) = task.parts, task.spans(i)[s]
    assert parts is not None  # noqa: S101  (narrows the type)
    made_of_it = {task.index(i, j, s, strip=kind) for kind in (strip, strip or i in task.strips)}
    if task.matrix.is_valid(i, j) or any(parts.is_valid(index) for index in made_of_it):
        return False

    def compute() -> FloatArray:
        c: FloatArray = buffer("accumulator", (stop - start, stop if i == j else task.grid.rows(j)), task.matrix.dtype)
        _update(task, i, j, (start, stop), c, s, None if strip else task.num_first(i, j))
        if strip and i != j:
            trsm_right(c, task.matrix.read(j, j))
        return c

    def write(c: FloatArray) -> None:
        if c.shape != parts.chunks:
            padded = buffer("padded", parts.chunks, parts.numpy_dtype)
            padded.fill(np.nan)
            padded[: c.shape[0], : c.shape[1]] = c
            c = padded
        parts.write(task.index(i, j, s, strip=strip), c)

    return made(
        "cholesky.strip" if i in task.strips else "cholesky.sum", compute, write, partial(_not_finite, task, i, j)
    )


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
        c = _update(task, j, j, (0, grid.rows(j)), buffer("accumulator", grid.shape(j, j), task.matrix.dtype))
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
