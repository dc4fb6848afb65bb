"""The rows of a pass in feature space: strips of X, Y and weights, from a data set on disk or from memory.

A chunk of X is mapped, its checksum compared, and used where it lies. That a chunk is intact does not say that it is in
its place, so the first whole digest block of each chunk is compared with the digests of the data set where ``placed``
is asked for: a chunk is what a store can lose, mix up or bring back, and one block of it says which one it is. That
costs SHA-256 of 1,024 rows a chunk, an eighth of all rows at 50 features.

Cost: X, Y and weights are read once; memory for one chunk of X and what of Y and the weights belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.chunks import FloatArray
from dkrr.dataset import Dataset, RowArray
from dkrr.dataset.dataset import Part
from dkrr.dataset.digests import DIGEST_ROWS, block_digest, prefix_digest
from dkrr.errors import DamagedChunkError
from dkrr.linalg.operators import Rows

__all__ = ["ArrayStrips", "StoredStrips", "Strip", "Strips", "chunk_rows", "find_unwritten"]

FloatMatrix = NDArray[np.float64]
# what of Y and the weights is read at once
TARGET_BYTES = 64 << 20


class Strip(NamedTuple):
    """A few rows: the number of the first, X (q, d) read-only, Y (q, t), weights (q,) or None."""

    start: int
    x: FloatMatrix
    y: FloatMatrix
    weight: NDArray[np.float64] | None


class Strips(Protocol):
    """Rows that can be gone through."""

    def between(self, start: int, stop: int, num_rows: int) -> Iterator[Strip]:
        """Strips of at most ``num_rows`` rows that cover rows ``start`` to ``stop`` in order."""
        ...


@dataclass(frozen=True)
class ArrayStrips:
    """Rows in memory: x (n, d), y (n, t), weight (n,) or None."""

    x: FloatMatrix
    y: FloatMatrix
    weight: NDArray[np.float64] | None

    def between(self, start: int, stop: int, num_rows: int) -> Iterator[Strip]:
        for first in range(start, stop, num_rows):
            rows = slice(first, min(first + num_rows, stop))
            yield Strip(
                first,
                np.ascontiguousarray(self.x[rows], dtype=np.float64),
                self.y[rows],
                None if self.weight is None else self.weight[rows],
            )


@dataclass(frozen=True)
class StoredStrips:
    """Rows of a data set.

    Parameters
    ----------
    rows
        Which one.
    placed
        Whether to look that every chunk is in its place.
    """

    rows: Rows
    placed: bool = False

    def between(self, start: int, stop: int, num_rows: int) -> Iterator[Strip]:
        dataset = self.rows.open()
        step = chunk_rows(dataset)
        for first in range(start - start % step, stop, step):
            span = max(first, start), min(first + step, stop)
            y = self._values(dataset, "y", *span)
            weight = self._values(dataset, "weight", *span)
            yield from self._strips(dataset, span, num_rows, y, weight)

    def _values(self, dataset: Dataset, part: Part, start: int, stop: int) -> FloatMatrix | None:
        array = dataset.parts().get(part)
        if array is None:
            return None
        values = array.read(start, stop)
        if self.placed:
            for first, last in _proofs(array, start, stop):
                _check_place(dataset, part, first, values[first - start : last - start])
        return values

    def _strips(
        self, dataset: Dataset, span: tuple[int, int], num_rows: int, y: FloatMatrix | None, weight: FloatMatrix | None
    ) -> Iterator[Strip]:
        start, stop = span
        array, size = dataset.X, dataset.X.rows_per_chunk
        for number in range(start // size, -(-stop // size)):
            first = number * size
            chunk: FloatArray = array.array.read((number, 0))
            begin, end = max(first, start), min(first + size, stop)
            if self.placed and size % DIGEST_ROWS == 0:
                for a, b in _proofs(array, begin, end):
                    _check_place(dataset, "X", a, chunk[a - first : b - first])
            for row in range(begin, end, num_rows):
                last = min(row + num_rows, end)
                rows = slice(row - start, last - start)
                yield Strip(
                    row,
                    chunk[row - first : last - first],  # type: ignore[arg-type]
                    np.empty((last - row, 0)) if y is None else y[rows],
                    None if weight is None else weight[rows, 0],
                )
            del chunk  # unmapped before the next one is mapped
        if self.placed and size % DIGEST_ROWS:
            for a, b in _proofs(array, start, stop):
                _check_place(dataset, "X", a, array.read(a, b))


def chunk_rows(dataset: Dataset) -> int:
    """Rows that are read together: whole chunks of X, and of Y and the weights too unless those would be many."""
    sizes = [array.rows_per_chunk for array in dataset.parts().values()]
    together = lcm(*sizes, DIGEST_ROWS)
    width = 8 * (dataset.num_targets + 1)
    return together if together * width <= TARGET_BYTES else lcm(dataset.X.rows_per_chunk, DIGEST_ROWS)


def _proofs(array: RowArray, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Rows (first, last), within a range that begins with a digest block, whose digests prove each chunk's place.

    One digest block of each chunk; all of them where a block is longer than a chunk; and the rows left over at the end
    of the array where their chunk has no whole block.
    """
    whole = array.num_rows - array.num_rows % DIGEST_ROWS
    step = array.rows_per_chunk if array.rows_per_chunk % DIGEST_ROWS == 0 else DIGEST_ROWS
    for chunk in range(start - start % step, stop, step):
        first = max(chunk, start)
        if first + DIGEST_ROWS <= min(stop, whole):
            yield first, first + DIGEST_ROWS
        elif stop == array.num_rows:
            yield whole, stop


def _check_place(dataset: Dataset, part: Part, first: int, rows: FloatArray) -> None:
    """Compare a digest block, or the rows left over at the end, with the digests of the data set."""
    record = dataset.records[part]
    blocks, number = record["block_digests"], first // DIGEST_ROWS
    if len(rows) == DIGEST_ROWS:
        good = number < len(blocks) and block_digest(rows) == blocks[number]  # type: ignore[arg-type]
    else:
        good = prefix_digest(blocks, rows) == record["digest"]  # type: ignore[arg-type]
    if not good:
        array = dataset.parts()[part]
        index, reason = (first // array.rows_per_chunk, 0), f"rows {first} to {first + len(rows) - 1} are others"
        raise DamagedChunkError(
            f"chunk {index} of {array.array.location} is damaged ({reason})",
            hint="restore it, or ingest the source again",
            path=array.array.location,
            index=index,
            reason=reason,
        )


def find_unwritten(rows: Rows, start: int, stop: int) -> None:
    """Look for the row that was never written, when sums over mapped chunks are not finite.

    Raises
    ------
    DamagedChunkError
        There is one.
    """
    x = rows.open().X
    for first in range(start, stop, x.rows_per_chunk):
        x.read(first, min(first + x.rows_per_chunk, stop))
