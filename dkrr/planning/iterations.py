"""Numbers of iterations as ranges, and what two samples of the rows say about all of them.

    k(n) = k(s) (n / s)^p,    p = log2(k(s) / k(s / 2))

The largest eigenvalue that is left for an iteration grows like n at most, and iterations like its root: p is between 0
and 1/2. Where alpha was scaled by s / n that growth is in the counts already, and what is left of it is halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

__all__ = ["MARGIN", "SCALED_POWER", "Iterations", "extrapolate", "growth"]

# the largest powers of n with which iterations grow: with alpha as it is, and with alpha s / n
OWN_POWER, SCALED_POWER = 0.5, 0.5
MARGIN = 1.25


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


def growth(small: float, large: float, least: float, most: float) -> float:
    """The power of the number of rows with which something grows that was ``small`` on half of them, within bounds."""
    if not small or not large:
        return most
    return min(most, max(least, log2(large / small)))


def extrapolate(half: tuple[float, float], whole: tuple[float, float], s: int, n: int) -> Iterations:
    """From samples of s / 2 and s rows to n; each with the iterations for alpha, and for alpha s / n."""
    if n <= s:  # alpha s / n is alpha
        return Iterations(min(whole), min(whole))
    own = whole[0] * (n / s) ** growth(half[0], whole[0], 0.0, OWN_POWER)
    scaled = whole[1] * (n / s) ** (SCALED_POWER * growth(half[1], whole[1], 0.0, 1.0))
    best = max(1.0, min(own, scaled))
    return Iterations(max(1.0, best / MARGIN), float(ceil(best * MARGIN - 1e-9)))
