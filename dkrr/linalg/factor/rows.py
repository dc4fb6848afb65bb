"""Some rows of a tile of L: those that an extension adds, and those of them that one worker takes.

Rows s <= p < e of an off-diagonal tile need the same rows of the tiles to their left and nothing of each other:

    L[s:e, j] = (A[s:e, j] - sum_{k<j} L[s:e, k] L[j, k]^T) L[j, j]^-T

Of a diagonal tile whose first r rows are finished, with the new rows P = A[r:, :] - sum_k L[r:, k] L[i, k]^T:

    L21 = P1 L11^-T,     L22 = potrf(P2 - L21 L21^T)

So the new rows of a row block are cut into *strips*, one for every two workers, which go through all columns side by
side; without them an append that is shorter than a tile would be one chain of tasks, and one worker's. Each strip of a
tile is made in two tasks, so that two workers share it: the first h = (j + 1) // 2 *terms* of the sum, which need the
columns before h only and are made ahead of the chain, and the rest of it. The order of the sum is the same, and so are
the bytes. Strips and their first terms are kept in a scratch array beside the factor until one task joins the strips
with the finished rows and writes the tile.

One strip for every worker instead would send every finished tile to all of them: read, checked and packed for gemm for
half of the rows each. Measured with two workers, 30,000 rows: 300 more at 23 GF/s a worker, 3,000 more at 31, where the
fit itself has 41.

Cost
----
As the whole tile, in proportion to the rows; a strip and its first terms are written and read back once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dkrr.errors import DamagedChunkError, StoreMismatchError
from dkrr.linalg.catalogue import TakenOver
from dkrr.linalg.factor.schedule import scratch_location
from dkrr.linalg.verify import factor_sample_agrees
from dkrr.store.chunks import CRC_BYTES, ChunkArray, FloatArray
from dkrr.store.files import remove_array
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer, gemm_nt, potrf, syrk, trsm_right

if TYPE_CHECKING:
    from dkrr.linalg.factor.cholesky import CholeskyTask


# narrower products run well below the rate of gemm
MIN_STRIP_ROWS = 32
# workers that share a strip, one the first terms of its sums and one the rest
SHARED_BY = 2
# of a shorter sum the first terms are no task of their own
MIN_TERMS = 4
# with so many row blocks for each worker there is work for everybody without strips
MANY_BLOCKS = 4


@dataclass(frozen=True)
class Strips:
    """Which row blocks are computed in strips.

    Parameters
    ----------
    array
        Strip s of tile (i, j) is chunk (2 i most + s, j), the first terms of its sum are chunk ((2 i + 1) most + s, j).
    first
        For each such row block the first row that is not finished.
    num_rows
        For each the rows of a strip.
    most
        Strips of a row block, at most.
    """

    array: ChunkArray
    first: dict[int, int]
    num_rows: dict[int, int]
    most: int

    def spans(self, i: int, rows: int) -> list[tuple[int, int]]:
        """First row of every strip of a row block of ``rows`` rows, and one past its last."""
        starts = range(self.first[i], rows, self.num_rows[i])
        return [(start, min(start + self.num_rows[i], rows)) for start in starts]

    def index(self, i: int, j: int, s: int, *, terms: bool = False) -> tuple[int, int]:
        """Where strip s of tile (i, j), or the first terms of its sum, are kept."""
        return (2 * i + terms) * self.most + s, j

    def write(self, i: int, j: int, s: int, rows: FloatArray, *, terms: bool = False) -> None:
        """Keep a strip, or the first terms; what it has not is NaN."""
        padded = buffer("strip", self.array.chunks, self.array.numpy_dtype)
        padded.fill(np.nan)
        padded[: rows.shape[0], : rows.shape[1]] = rows
        self.array.write(self.index(i, j, s, terms=terms), padded)

    def read(self, i: int, j: int, s: int, *, terms: bool = False) -> FloatArray:
        """A strip, or the first terms, as it is kept, read-only."""
        return self.array.read(self.index(i, j, s, terms=terms))

    def forget(self, i: int, j: int) -> None:
        """Remove what is kept of tile (i, j)."""
        for s in range(self.most):
            for terms in (False, True):
                self.array.delete(self.index(i, j, s, terms=terms))


def choose_strips(factor: TileMatrix, taken: TakenOver, num_threads: int) -> Strips | None:
    """Strips for the row blocks that an extension adds to, where there are few; None where one chain each is enough."""
    grid, beside = factor.grid, scratch_location(factor, "strips")
    blocks = range(taken.num_rows // grid.tile_size, grid.num_tiles)
    first = {i: taken.first(i) for i in blocks if taken.first(i) < grid.rows(i)}
    num_rows = _rows_of_strips(grid, first, num_threads)
    if not taken.num_rows or not num_rows:
        return None
    most, rows = _most_strips(num_threads), max(num_rows.values())
    shape = (2 * grid.num_tiles * most * rows, grid.num_tiles * grid.tile_size)
    chunks = (rows, grid.tile_size)
    attributes = {"strips": [[i, first[i], size] for i, size in num_rows.items()], "most": most}

    def create() -> ChunkArray:
        return ChunkArray.create(
            beside, "", shape=shape, chunks=chunks, dtype=factor.array.dtype, attributes=attributes
        )

    try:
        array = create()
    except StoreMismatchError:  # of an attempt with other workers, or other finished rows
        remove_array(beside)
        array = create()
    return Strips(array, first, num_rows, most)


def strips_bytes(grid: TileGrid, num_finished: int, num_threads: int, itemsize: int) -> int:
    """Disk for strips and first terms, at most, where the first ``num_finished`` rows are there; freed at the end."""
    b = grid.tile_size
    first = {i: max(0, num_finished - i * b) for i in range(num_finished // b, grid.num_tiles)}
    num_rows = _rows_of_strips(grid, first, num_threads)
    if not num_finished or not num_rows:
        return 0
    num_strips = sum(-(-(grid.rows(i) - first[i]) // rows) * (i + 1) for i, rows in num_rows.items())
    return 2 * num_strips * (max(num_rows.values()) * b * itemsize + CRC_BYTES)


def _most_strips(num_threads: int) -> int:
    """Strips of a row block, at most."""
    return -(-num_threads // SHARED_BY)


def _rows_of_strips(grid: TileGrid, first: Mapping[int, int], num_threads: int) -> dict[int, int]:
    """Rows of a strip of each row block whose first unfinished row is given; none where one chain each is enough."""
    if num_threads < 2 or len(first) >= MANY_BLOCKS * num_threads:
        return {}
    most = _most_strips(num_threads)
    return {i: max(MIN_STRIP_ROWS, -(-(grid.rows(i) - start) // most)) for i, start in first.items()}


def num_first_terms(j: int) -> int:
    """h: so many terms of the sums of column j are a task of their own; 0 where there are few."""
    return (j + 1) // 2 if j >= MIN_TERMS else 0


def compute_strip(task: CholeskyTask, i: int, j: int, s: int, *, terms: bool = False) -> FloatArray | None:
    """Strip s of tile (i, j), or the first terms of its sum; None when it, or what it is for, is there.

    Of a diagonal tile it is P without the terms of its own columns.
    """
    strips = task.strips
    assert strips is not None  # noqa: S101  (narrows the type)
    is_there = task.factor.is_valid(i, j) or strips.array.is_valid(strips.index(i, j, s))
    if is_there or (terms and strips.array.is_valid(strips.index(i, j, s, terms=True))):
        return None
    start, stop = strips.spans(i, task.grid.rows(i))[s]
    c: FloatArray = buffer("accumulator", (stop - start, stop if i == j else task.grid.rows(j)), task.factor.dtype)
    if terms:
        _update_rows(task, i, j, start, stop, c, strip=s, last=num_first_terms(j))
        return c
    _update_rows(task, i, j, start, stop, c, strip=s, first=_copy_terms(task, i, j, s, c))
    if i != j:
        trsm_right(c, task.factor.read(j, j))
    return c


def _copy_terms(task: CholeskyTask, i: int, j: int, s: int, c: FloatArray) -> int:
    """Copy the first terms of a sum to c, if they are there, and say how many they are."""
    strips, count = task.strips, num_first_terms(j)
    assert strips is not None  # noqa: S101  (narrows the type)
    if not count or not strips.array.is_valid(strips.index(i, j, s, terms=True)):
        return 0
    c[...] = strips.read(i, j, s, terms=True)[: c.shape[0], : c.shape[1]]
    return count


def assemble(task: CholeskyTask, i: int, j: int) -> tuple[FloatArray, int]:
    """Tile (i, j) from its finished rows, its strips, and whatever is left to compute; and potrf's answer, 0 if good.

    A positive answer counts from the first row of the tile.
    """
    grid, taken = task.grid, task.taken
    c = buffer("accumulator", grid.shape(i, j), task.factor.dtype)
    rows, first = grid.rows(i), taken.first(i)
    kept = _kept(task, i, j) if first else None
    if i != j:
        lower = None if _all_there(task, i, j, kept) else task.factor.read(j, j)
        for start, stop, s in _parts(task, i, first):
            if s is None and start < first and kept is not None:
                c[start:stop] = kept
            elif s is None or not _copy_strip(task, i, j, s, c[start:stop]):
                _update_rows(task, i, j, start, stop, c[start:stop])
                trsm_right(c[start:stop], task.factor.read(j, j) if lower is None else lower)
        return c, 0
    if first:
        if kept is not None:
            c[:first, :first] = kept
        else:
            _update_rows(task, i, i, 0, first, c[:first, :first])
            info = potrf(c[:first, :first])
            if info:
                return c, info
        c[:first, first:] = 0
    for start, stop, s in _parts(task, i, first):
        if start >= first and (s is None or not _copy_strip(task, i, i, s, c[start:stop, :stop])):
            _update_rows(task, i, i, start, stop, c[start:stop, :stop])
    if first < rows:
        if first:
            trsm_right(c[first:, :first], c[:first, :first])
            syrk(c[first:, first:], c[first:, :first])
        info = potrf(c[first:, first:])
        return c, first + info if info else 0
    return c, 0


def _kept(task: CholeskyTask, i: int, j: int) -> FloatArray | None:
    """The finished rows of tile (i, j), unless they do not give back the matrix: two tiles may have changed places."""

    def agrees(matrix: TileMatrix, num_rows: int) -> bool:
        try:
            return factor_sample_agrees(task.operator, matrix, i, j, num_rows)
        except DamagedChunkError:
            return False

    return task.taken.read(i, j, agrees)


def _all_there(task: CholeskyTask, i: int, j: int, kept: FloatArray | None) -> bool:
    """Whether nothing is left to compute of an off-diagonal tile."""
    strips = task.strips
    if strips is None or i not in strips.first or (kept is None and task.taken.first(i)):
        return False
    count = len(strips.spans(i, task.grid.rows(i)))
    return all(strips.array.is_valid(strips.index(i, j, s)) for s in range(count))


def _parts(task: CholeskyTask, i: int, first: int) -> list[tuple[int, int, int | None]]:
    """The rows of row block i in pieces: (first row, one past the last, number of the strip or None)."""
    rows = task.grid.rows(i)
    parts: list[tuple[int, int, int | None]] = [(0, first, None)] if first else []
    if task.strips is not None and i in task.strips.first:
        parts += [(start, stop, s) for s, (start, stop) in enumerate(task.strips.spans(i, rows))]
    elif first < rows:
        parts.append((first, rows, None))
    return parts


def _copy_strip(task: CholeskyTask, i: int, j: int, s: int, out: FloatArray) -> bool:
    """Copy a strip that is there."""
    assert task.strips is not None  # noqa: S101  (narrows the type)
    if not task.strips.array.is_valid(task.strips.index(i, j, s)):
        return False
    strip = task.strips.read(i, j, s)
    out[...] = strip[: out.shape[0], : out.shape[1]]
    return True


def _update_rows(
    task: CholeskyTask,
    i: int,
    j: int,
    start: int,
    stop: int,
    c: FloatArray,
    strip: int | None = None,
    first: int = 0,
    last: int | None = None,
) -> None:
    """c <- A[start:stop, j] - sum_{k<last} L[start:stop, k] L[j, k]^T; of a diagonal tile its first ``stop`` columns.

    ``last`` is j where it is not given. Of a sum that was begun, c holds the terms before ``first``.
    """
    factor = task.factor
    if not first:
        task.operator.tile(i, j, c, start=start, stop=stop)
    for k in range(first, j if last is None else last):
        # at most two tiles are mapped at once, and both are dropped after their product
        right = factor.read(j, k)
        if i == j:
            gemm_nt(c, right[start:stop], right[:stop])
        else:
            gemm_nt(c, _left(task, i, k, start, stop, strip), right)
        del right


def _left(task: CholeskyTask, i: int, k: int, start: int, stop: int, strip: int | None) -> Any:
    """Rows ``start`` to ``stop`` of tile (i, k): its strip, before the tile is there."""
    if strip is not None and task.strips is not None:
        try:
            return task.strips.read(i, k, strip)[: stop - start, : task.grid.rows(k)]
        except DamagedChunkError:
            if not task.factor.is_valid(i, k):
                raise
    return task.factor.read(i, k)[start:stop]
