"""How many iterations are left: from the residuals so far, and, before they tell, from what the plan foresaw.

    log |r_k| is about a - s k    =>    (log |r_k| - log tol) / s  iterations more

s is the median of the slopes between all pairs of the last points (Theil and Sen), so that a residual that jumps when
the true one takes its place does not turn it. Up to the upper end of the plan's range the number stays between its
lower end and twice its upper end.

References
----------
Sen (1968), Estimates of the regression coefficient based on Kendall's tau.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from math import ceil, inf, log

import numpy as np

from dkrr.linalg.settings import Foreseen

__all__ = ["Forecast"]

# fewer points tell nothing, more are of an earlier stage of the iteration
LEAST_POINTS, MOST_POINTS = 5, 40


class Forecast:
    """The iterations and seconds that one call of conjugate gradients still needs.

    Parameters
    ----------
    tol, limit
        Relative residual to reach, and iterations allowed.
    foreseen
        What a plan says; None where there is none.
    clock
        Seconds that never run backwards.
    """

    def __init__(
        self, tol: float, limit: int, foreseen: Foreseen | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tol, self.limit, self.clock = tol, limit, clock
        self.foreseen = foreseen if foreseen is not None and foreseen.high else None
        self._points: deque[tuple[int, float, float]] = deque(maxlen=MOST_POINTS)

    def add(self, iteration: int, relative: float) -> None:
        """The largest relative residual of all columns after an iteration."""
        self._points.append((iteration, log(max(relative, 1e-300)), self.clock()))

    @property
    def has_trend(self) -> bool:
        """Whether the residuals tell anything yet."""
        return len(self._points) >= LEAST_POINTS

    @property
    def iterations_left(self) -> float:
        """By the trend alone; infinite where the residual does not fall."""
        number, level, _ = self._points[-1]
        missing = level - log(self.tol)
        if missing <= 0:
            return 0.0
        # the later half: what went before is another stage
        later = [point for point in self._points if point[0] >= number // 2]
        points = np.array([point[:2] for point in (later if len(later) >= LEAST_POINTS else self._points)])
        first, second = np.triu_indices(len(points), 1)
        slopes = (points[second, 1] - points[first, 1]) / (points[second, 0] - points[first, 0])
        slope = -float(np.median(slopes))
        return missing / slope if slope > 0 else inf

    @property
    def seconds_left(self) -> float:
        """By the trend, and at the pace of the last iterations."""
        (first, _, begun), (last, _, now) = self._points[0], self._points[-1]
        return self.iterations_left * (now - begun) / max(1, last - first)

    @property
    def phase(self) -> str:
        """The phase's name, with what the plan foresees until the residuals tell more."""
        if self.foreseen is None or self.has_trend or round(self.foreseen.low) >= round(self.foreseen.high):
            return "cg"
        return f"cg, {self.foreseen.low:,.0f} to {self.foreseen.high:,.0f} foreseen"

    @property
    def total(self) -> int:
        """Iterations in all, as far as is known; 0 where nothing is."""
        number = self._points[-1][0]
        if self._points[-1][1] <= log(self.tol):
            return number
        found = number + self.iterations_left if self.has_trend else inf
        if self.foreseen is not None and number <= self.foreseen.high:
            found = self.foreseen.high if found == inf else min(max(found, self.foreseen.low), 2 * self.foreseen.high)
        return 0 if found == inf else min(self.limit, max(number, ceil(found)))

    def too_slow(self, iteration: int, other_seconds: Callable[[], float | None] | None) -> bool:
        """Whether another way is done sooner: after twice the iterations foreseen, by the trend so far."""
        if self.foreseen is None or other_seconds is None or iteration <= 2 * self.foreseen.high or not self.has_trend:
            return False
        left = self.seconds_left
        if left == 0:
            return False
        price = other_seconds()
        return price is not None and left > price
