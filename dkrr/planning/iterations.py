"""Numbers of iterations as ranges, and what two samples of the rows say about all of them.

    k(n) = k(s) (n / s)^p,    p = log2(k(s) / k(s / 2))

for alpha as it is, and for alpha s / n. What the smaller alpha adds on the same rows, q = log(k' / k) / log(n / s), is
growth with n that k' has in it already: k'(n) = k'(s) (n / s)^max(0, p' - q). The first is right where rows are far
from each other, the second where they are close. Without a preconditioner the larger of the two is an overestimate.
With one the answer lies between them, and both are ends of the range: on 15 fits of real rows (n up to 41,157) the true
number was 0.7 to 1.5 times their geometric mean, where the smaller one alone was nearly always below it; and counts of
2 or 3 on a sample, which say nothing of growth, stood for 10 iterations at n = 100,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

__all__ = ["Iterations", "extrapolate", "growth"]

# the largest power of n with which iterations grow: the condition does like n^2, where rows come ever closer
LARGEST_POWER = 1.0
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

    @classmethod
    def around(cls, best: float) -> Iterations:
        """What is expected where the best estimate is ``best``."""
        return cls(max(1.0, best / MARGIN), float(ceil(max(1.0, best) * MARGIN - 1e-9)))

    def __str__(self) -> str:
        low, high = round(self.low), round(self.high)
        return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def growth(small: float, large: float, least: float, most: float) -> float:
    """The power of the number of rows with which something grows that was ``small`` on half of them, within bounds."""
    if not small or not large:
        return most
    return min(most, max(least, log2(large / small)))


def extrapolate(
    half: tuple[float, float], whole: tuple[float, float], s: int, n: int, *, preconditioned: bool
) -> Iterations:
    """From samples of s / 2 and s rows to n; each with the iterations for alpha, and for alpha s / n."""
    if n <= s:  # alpha s / n is alpha
        return Iterations(min(whole), min(whole))
    ratio = n / s
    own = whole[0] * ratio ** growth(half[0], whole[0], 0.0, LARGEST_POWER)
    included = log2(max(whole[1] / whole[0], 1.0)) / log2(ratio)
    scaled = whole[1] * ratio ** max(0.0, growth(half[1], whole[1], 0.0, LARGEST_POWER) - included)
    low = Iterations.around(min(own, scaled))
    return Iterations(low.low, Iterations.around(max(own, scaled)).high) if preconditioned else low
