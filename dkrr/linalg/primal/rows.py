"""The rows of a pass in feature space: strips of X, Y and weights, from memory or from a data set on disk.

On disk a chunk of X is mapped, its checksum compared, and used where it lies. That a chunk is intact does not say that
it is in its place, so the first whole digest block of each chunk is compared with the digests of the data set where
that is asked for: a chunk is what a store can lose, mix up or bring back, and one block of it says which one it is.
That costs SHA-256 of 1,024 rows a chunk, an eighth of all rows at 50 features.

Cost: X, Y and weights are read once; memory for one chunk of X and what of Y and the weights belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.dataset.dataset import Part
from dkrr.dataset.rows import DIGEST_ROWS, block_digest, decode_floats, prefix_digest
from dkrr.errors import DamagedChunkError, DataError
from dkrr.kernels.features import FeatureMap
from dkrr.linalg.operators import Rows

__all__ = ["DatasetRows", "MemoryRows", "Strip"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]
# what of Y and the weights is read at once
TARGET_BYTES = 64 << 20


class Strip(NamedTuple):
    """A few rows: the number of the first, X (q, d) read-only, Y (q, t), weights (q,) or None."""

    start: int
    x: FloatMatrix
    y: FloatMatrix
    weight: FloatVector | None


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows in memory: x (n, d), y (n, t), weight (n,) or None."""

    x: FloatMatrix
    y: FloatMatrix
    weight: FloatVector | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """n and t."""
        return self.y.shape[0], self.y.shape[1]

    @property
    def multiple(self) -> int:
        """Rows that are gone through together: all of them."""
        return len(self.x)

    def weights(self) -> FloatVector | None:
        """All weights (n,)."""
        return self.weight

    def means(self) -> tuple[FloatVector, FloatVector, FloatVector]:
        """Unweighted means of X, their standard deviations, and means of Y."""
        return self.x.mean(axis=0), self.x.std(axis=0), self.y.mean(axis=0)

    def sample(self, num_rows: int) -> list[Strip]:
        """Strips from everywhere, for a guess of the means; all rows here."""
        return list(self.between(0, len(self.x), -(-len(self.x) // 4)))

    def between(self, start: int, stop: int, num_rows: int, *, placed: bool = False) -> Iterator[Strip]:
        """Strips of at most ``num_rows`` rows that cover rows ``start`` to ``stop`` in order.

        ``placed`` has every chunk looked at, whether it is in its place.
        """
        for first in range(start, stop, num_rows):
            rows = slice(first, min(first + num_rows, stop))
            x = np.ascontiguousarray(self.x[rows], dtype=np.float64)
            yield Strip(first, x, self.y[rows], None if self.weight is None else self.weight[rows])

    def not_finite(self, features: FeatureMap, start: int, stop: int) -> DataError:
        """The error for sums over rows ``start`` to ``stop`` that are not finite."""
        return features.overflow(self.x[start:stop])


@dataclass(frozen=True)
class DatasetRows:
    """The same for the rows of a data set."""

    rows: Rows

    @property
    def shape(self) -> tuple[int, int]:
        dataset = self.rows.open()
        return dataset.num_rows, dataset.num_targets

    @property
    def multiple(self) -> int:
        """Whole chunks of X, and of Y and the weights too unless those would be many."""
        dataset = self.rows.open()
        together = lcm(*(array.rows_per_chunk for array in dataset.parts().values()), DIGEST_ROWS)
        width = 8 * (dataset.num_targets + 1)
        return together if together * width <= TARGET_BYTES else lcm(dataset.X.rows_per_chunk, DIGEST_ROWS)

    def weights(self) -> FloatVector | None:
        weight = self.rows.open().weight
        return None if weight is None else weight.read(0, weight.num_rows)[:, 0]

    def means(self) -> tuple[FloatVector, FloatVector, FloatVector]:
        dataset = self.rows.open()
        # a data set gives a constant column the deviation 1, for those who divide by it
        return dataset.x_mean, decode_floats(dataset.records["X"]["std"]), dataset.y_mean

    def sample(self, num_rows: int) -> list[Strip]:
        """The first strip of each of four chunks."""
        x = self.rows.open().X
        numbers = sorted({x.num_chunks * k // 4 for k in range(4)})
        return [next(self.between(*x.span(number), num_rows)) for number in numbers]

    def between(self, start: int, stop: int, num_rows: int, *, placed: bool = False) -> Iterator[Strip]:
        dataset, step = self.rows.open(), self.multiple
        for first in range(start - start % step, stop, step):
            yield from _strips(dataset, max(first, start), min(first + step, stop), num_rows, placed)

    def not_finite(self, features: FeatureMap, start: int, stop: int) -> DataError:
        """Looks for a row that was never written first: of mapped chunks nobody else does.

        Raises
        ------
        DamagedChunkError
            There is one.
        """
        x = self.rows.open().X
        for first in range(start, stop, x.rows_per_chunk):
            x.read(first, min(first + x.rows_per_chunk, stop))
        return DataError(
            f"the sums over rows {start:,} to {stop - 1:,} are not finite ({features.kernel.describe()})",
            hint="scale the features and the targets",
        )


def _strips(dataset: Dataset, start: int, stop: int, num_rows: int, placed: bool) -> Iterator[Strip]:
    """Strips of rows whose targets and weights are read at once."""
    read: dict[Any, Any] = {name: array.read(start, stop) for name, array in dataset.parts().items() if name != "X"}
    array, size = dataset.X, dataset.X.rows_per_chunk
    for part in read if placed else ():
        _check_places(dataset, part, start, read[part])
    for first in range(start, stop, DIGEST_ROWS) if placed and size % DIGEST_ROWS else ():
        _check_places(dataset, "X", first, array.read(first, min(first + DIGEST_ROWS, stop)))
    for first in range(start - start % size, stop, size):
        chunk: Any = array.array.read((first // size, 0))
        begin, end = max(first, start), min(first + size, stop)
        if placed and size % DIGEST_ROWS == 0:
            _check_places(dataset, "X", begin, chunk[begin - first : end - first])
        for row in range(begin, end, num_rows):
            last = min(row + num_rows, end)
            weight = read["weight"][row - start : last - start, 0] if "weight" in read else None
            yield Strip(row, chunk[row - first : last - first], read["y"][row - start : last - start], weight)
        del chunk  # unmapped before the next one is mapped


def _check_places(dataset: Dataset, part: Part, start: int, rows: FloatMatrix) -> None:
    """Compare rows from ``start`` on, where a digest block begins, with the digests that prove each chunk's place.

    One digest block of each chunk; all of them where a block is longer than a chunk; and the rows left over at the end
    of the array where their chunk has no whole block.
    """
    array, record = dataset.parts()[part], dataset.records[part]
    stop, blocks = start + len(rows), record["block_digests"]
    whole = array.num_rows - array.num_rows % DIGEST_ROWS
    step = array.rows_per_chunk if array.rows_per_chunk % DIGEST_ROWS == 0 else DIGEST_ROWS
    for chunk in range(start - start % step, stop, step):
        first = max(chunk, start)
        last = first + DIGEST_ROWS
        if last <= min(stop, whole):
            number = first // DIGEST_ROWS
            good = number < len(blocks) and block_digest(rows[first - start : last - start]) == blocks[number]
        elif stop == array.num_rows:
            first, last = whole, stop
            good = prefix_digest(blocks, rows[whole - start :]) == record["digest"]
        else:
            continue
        if not good:
            index, reason = (first // array.rows_per_chunk, 0), f"rows {first} to {last - 1} are others"
            raise DamagedChunkError(
                f"chunk {index} of {array.array.location} is damaged ({reason})",
                hint="restore it, or ingest the source again",
                path=array.array.location,
                index=index,
                reason=reason,
            )
