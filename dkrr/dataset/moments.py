"""Means and standard deviations of columns in one pass.

Blocks of rows are merged by the pairwise update of Chan, Golub and LeVeque. For a block of m rows with mean b after
n rows with mean a, and delta = b - a,

    mean = a + delta m / (n + m),        M = hypot(M, M_block, |delta| sqrt(n m / (n + m))),

where M^2 is the sum of squared deviations. M itself is kept, not its square, so columns of any scale neither overflow
nor vanish; a column is constant exactly when M is 0, which the rounding of a mean never disturbs.

Cost: about six passes over a block that is in cache.

References
----------
Chan, Golub, LeVeque (1983), "Algorithms for computing the sample variance", The American Statistician 37.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dkrr.dataset.rows import Floats

__all__ = ["Moments"]

NARROW = 32
SAFE = (1e-280, 1e280)  # sums of squares in here have lost nothing to underflow and not overflowed


@dataclass(frozen=True)
class Moments:
    """Count, mean and deviation norm M of the columns of some rows.

    Parameters
    ----------
    count
        Number of rows.
    mean : (k,)
    norm : (k,)
        Square root of the sum of squared deviations from the mean.
    """

    count: int
    mean: Floats
    norm: Floats

    @classmethod
    def zero(cls, num_columns: int) -> Moments:
        """Moments of no rows."""
        return cls(0, np.zeros(num_columns), np.zeros(num_columns))

    @classmethod
    def of(cls, rows: Floats) -> Moments:
        """Moments of ``rows`` (m, k), m >= 1."""
        count = len(rows)
        # one column a row; a sum along short rows of memory costs several times one along long rows
        columns = np.ascontiguousarray(rows.T) if rows.shape[1] <= NARROW else rows.T
        constant = (columns == columns[:, :1]).all(axis=1)
        # columns beyond 1e150 may overflow here; what comes out is inf or NaN and refused by whoever scales with it
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            mean = columns.sum(axis=1) / count
            deviations = columns - mean[:, None]
            correction = deviations.sum(axis=1) / count
            mean += correction
            squares = np.einsum("ji,ji->j", deviations, deviations) - count * correction * correction
            unsafe = ~constant & ~((squares > SAFE[0]) & (squares < SAFE[1]))
            norm = np.sqrt(np.where(unsafe, 0.0, np.maximum(squares, 0.0)))
            if unsafe.any():
                deviations = columns[unsafe] - mean[unsafe, None]
                largest = np.abs(deviations).max(axis=1)
                norm[unsafe] = largest * np.sqrt(((deviations / largest[:, None]) ** 2).sum(axis=1))
        mean[constant] = rows[0, constant]
        norm[constant] = 0.0
        return cls(count, mean, norm)

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of rows together."""
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        count = self.count + other.count
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            delta = other.mean - self.mean
            mean = self.mean + delta * (other.count / count)
            between = np.abs(delta) * np.sqrt(self.count * (other.count / count))
            norm = np.hypot(np.hypot(self.norm, other.norm), between)
        return Moments(count, mean, norm)

    @property
    def std(self) -> Floats:
        """Population standard deviation, (k,); exactly 0 for a constant column."""
        return np.asarray(self.norm / np.sqrt(max(1, self.count)), dtype=np.float64)
