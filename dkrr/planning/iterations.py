"""Numbers of iterations as ranges, and what two samples of the rows say about all of them.

    k(n) = k(s) (n / s)^p,    p = log2(k(s) / k(s / 2)),

falls for smooth kernels (p < 0: few directions matter, whatever n is) and rises for rough ones (more rows have closer
neighbours). Only counts of iterations that ended tell how k grows. Where a sample was given up before, or took a tenth
as many iterations as it has rows (conjugate gradients end after at most s), k is taken to grow as fast as it ever does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_POWER", "PLAIN_POWER", "Count", "Iterations", "extrapolate"]

# how fast iterations may grow with n: as the root of the largest eigenvalue without a preconditioner, slowly with one
PLAIN_POWER, LARGEST_POWER = 0.6, 0.25
MARGIN = 1.1


@dataclass(frozen=True)
class Iterations:
    """A number of iterations, as a range."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean."""
        return float((self.low * self.high) ** 0.5)

    def __str__(self) -> str:
        low, high = round(self.low), round(self.high)
        return f"{low:,}" if low == high else f"{low:,}-{high:,}"


@dataclass(frozen=True)
class Count:
    """Iterations on a sample, and whether they tell anything about more rows."""

    iterations: float
    tells_growth: bool

    @classmethod
    def of(cls, counts: NDArray[np.float64], ended: NDArray[np.bool_], num_rows: int) -> Count:
        """The slowest target's, of a sample of ``num_rows``."""
        most = float(counts.max())
        return cls(most, bool(ended.all()) and most < num_rows / 10)


def extrapolate(first: Count, second: Count, s: int, n: int, largest: float) -> Iterations:
    """From samples of s / 2 and s rows to n; ``largest``: the power of n with which iterations grow at most."""
    small, large = first.iterations, second.iterations
    if n <= s:
        return Iterations(large, large)
    power = min(largest, max(-1.0, log2(max(large, 1.0) / max(small, 1.0))))
    if not (first.tells_growth and second.tells_growth):
        power = largest
    far = max(1.0, large * (n / s) ** power)
    # beyond some factor both samples are far away: trust the slope half
    if n > 8 * s:
        far = max(1.0, large * 8**power * (n / (8 * s)) ** (power / 2))
    middle = far if power > 0 else (far * large) ** 0.5
    low, high = min(far, middle), max(far, middle)
    # nobody stops within an iteration: two on a sample were three on all rows more often than not
    return Iterations(max(1.0, low / MARGIN), float(ceil(high * MARGIN - 1e-9)))
