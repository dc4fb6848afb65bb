"""Digest and moments of rows, gathered while they stream past.

Both work on the fixed blocks of 1,024 rows of :mod:`dkrr.dataset.digests`. So the result depends on the rows alone,
bit for bit: not on chunks, not on how a source was cut, not on how many appends it took.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.digests import DIGEST_ROWS, block_digest, prefix_digest
from dkrr.dataset.moments import Moments
from dkrr.dataset.rows import Floats, RowArray

__all__ = ["RowSummary", "decode_floats", "row_moments"]


class RowSummary:
    """Running digest and moments of rows with ``num_columns`` columns; either can be left out."""

    def __init__(self, num_columns: int, *, digests: bool = True, moments: bool = True) -> None:
        self.num_columns = num_columns
        self._has_digests, self._has_moments = digests, moments
        self._num_blocks = 0
        self.block_digests: list[str] = []
        self._moments = Moments.zero(num_columns)
        self._tail = np.empty((DIGEST_ROWS, num_columns))
        self._fill = 0

    @classmethod
    def resume(cls, record: dict[str, Any], tail: Floats) -> RowSummary:
        """Go on after the rows of ``record`` (see :meth:`to_dict`); ``tail`` are those after its last full block."""
        summary = cls(tail.shape[1])
        summary.block_digests = list(record["block_digests"])
        summary._num_blocks = len(summary.block_digests)
        count = summary._num_blocks * DIGEST_ROWS
        mean, norm = decode_floats(record["block_mean"]), decode_floats(record["block_norm"])
        summary._moments = Moments(count, mean, norm)
        summary.add(tail)
        return summary

    @property
    def num_rows(self) -> int:
        return self._num_blocks * DIGEST_ROWS + self._fill

    def add(self, rows: Floats) -> None:
        """Take the next ``rows`` (m, k)."""
        position = 0
        while position < len(rows):
            if self._fill == 0 and len(rows) - position >= DIGEST_ROWS:
                self._add_block(rows[position : position + DIGEST_ROWS])
                position += DIGEST_ROWS
                continue
            taken = min(DIGEST_ROWS - self._fill, len(rows) - position)
            self._tail[self._fill : self._fill + taken] = rows[position : position + taken]
            self._fill += taken
            position += taken
            if self._fill == DIGEST_ROWS:
                self._add_block(self._tail)
                self._fill = 0

    def digest(self) -> str:
        """Digest of all rows so far."""
        return prefix_digest(self.block_digests, self._tail[: self._fill])

    def moments(self) -> Moments:
        """Moments of all rows so far."""
        return self._moments.merge(Moments.of(self._tail[: self._fill])) if self._fill else self._moments

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: what a data set stores of an array, and what :meth:`resume` needs."""
        total = self.moments()
        return {
            "digest": self.digest(),
            "block_digests": list(self.block_digests),
            "mean": _encode_floats(total.mean),
            "std": _encode_floats(total.std),
            "block_mean": _encode_floats(self._moments.mean),
            "block_norm": _encode_floats(self._moments.norm),
        }

    def _add_block(self, rows: Floats) -> None:
        self._num_blocks += 1
        if self._has_digests:
            self.block_digests.append(block_digest(rows))
        if self._has_moments:
            self._moments = self._moments.merge(Moments.of(rows))


def _encode_floats(values: Floats) -> list[float | None]:
    # JSON has no infinity: a moment that overflowed is null
    return [float(v) if np.isfinite(v) else None for v in values]


def decode_floats(values: list[float | None]) -> Floats:
    """Back from JSON; null is NaN."""
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def row_moments(
    array: RowArray, start: int = 0, stop: int | None = None, *, without: NDArray[np.bool_] | None = None
) -> Moments:
    """Moments of rows ``start`` to ``stop`` of an array, but for those that ``without`` (n,) leaves out.

    Cost: reads those rows once; memory for one chunk.
    """
    summary = RowSummary(array.num_columns, digests=False)
    end = array.num_rows if stop is None else stop
    for first, last in array.blocks():
        first, last = max(first, start), min(last, end)
        if first < last:
            rows = array.read(first, last)
            summary.add(rows if without is None else rows[~without[first:last]])
    return summary.moments()
