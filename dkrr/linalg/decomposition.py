"""Minimise over boxes of coefficients by decomposition: hinge, epsilon-insensitive and pinball losses.

The dual of a piecewise linear loss is a quadratic programme with bounds, and one equation with an intercept:

    minimise    1/2 a^T K a - y^T a + epsilon |a|_1        low <= a <= high,   1^T a = 0

A working set of the rows that violate the conditions most is solved exactly while the others wait: by steps along pairs
of coefficients (sequential minimal optimisation), which find out who is at a bound, and by Newton steps in those that
are free, which a small step size of pairs would take for ever to get right. Then the gradient of all rows takes the
change in, by columns of K that are evaluated for it and forgotten. Half of the next working set is new; of the old one
those stay that are free. Rows far inside their conditions (shrinking: Joachims 1999) are left out of later rounds, and
judged at the end by a product of all.

Where K is nearly singular the free coefficients of a working set would trade places for ever. A little more on the
diagonal of its block makes a round a proximal point step: any damping leads to the same answer, a large one in more
rounds, a small one in longer ones, so that it is adapted. On 200 rows of a sine without noise (quantile 0.5, rbf, gamma
10) alpha = 1e-2 takes 0.9 s in place of 24 s, and 1e-3 0.2 s in place of minutes; 1,500 rows with a linear kernel and
C = 1e6 6 s in place of 50 s; others take as long as without.

The answer for a quarter of the rows (and for that, one for a quarter of these) says where to begin: the sign of the
residuals of its predictions puts most coefficients at the bound where they stay. From zeros a working set brings a
thousand of them there in a round: n = 20,000, C = 1, 63 rounds; from a sample 11, with as many entries of K in all.

Several columns of targets (classes, quantiles) go together: each has its own working set, and all share the entries of
K that any of them asks for. A value of C begins with the coefficients and predictions of the one before, scaled, as
soon as that is near its answer: for n = 20,000 ten values from 0.1 to 10 take 25 rounds instead of 63 one after the
other, each of 5 to 7 of its own, and share a third of the entries. (Coefficients that are extrapolated to the next C
are no better, and far worse where C is large: violations of 21 instead of 1.3.) Two threads take different values: one
the largest C, which the next one waits for, one the others two by two.

Compared with one pair at a time over cached columns: a working set is decided in its own block of K, so that a column
is evaluated a few times and not kept, whatever n is; n = 20,000 with 9,600 support vectors takes 2 n^2 entries in all,
the sample's and the certificate among them.

Cost
----
k n entries of K for each round of k coefficients that changed (k <= 6,000) and, after the start and at the end, n times
the number of support vectors; m^3 / 3 flops for a factor of the m that are free, about one for each value of C. A few
vectors of n, the rows, and 8 k^2 bytes for each working set, 8 m^2 for the factor: of as many as there are threads
(and one factor more for several values of C). Ten values of C as above take 3 times the time of C = 1 alone.

References
----------
Rockafellar, Monotone operators and the proximal point algorithm, 1976; Osuna, Freund and Girosi, An improved training
algorithm for support vector machines, NNSP 1997; Platt, Fast training of support vector machines using sequential
minimal optimization, 1998; Joachims, Making large-scale SVM learning practical, 1999; Fan, Chen and Lin, Working set
selection using second order information, JMLR 6, 2005; Wen et al., ThunderSVM, JMLR 19, 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition, Lock
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dkrr.linalg.loss import PiecewiseQuadratic
from dkrr.linalg.loss_problem import (
    Certificate,
    GramColumns,
    LossProblem,
    Matrix,
    Minimiser,
    Vector,
    certify,
    root_of,
)
from dkrr.tiles.blas import potrf, trsm_left

__all__ = ["decompose"]

Solve = Callable[[Any, Matrix], Matrix | None]  # of rows of a working set and right-hand sides

# Rows of a working set: PLACES times as many as are free, up to MAX_FREE of them (288 MB for their block of K). With
# fewer places than free coefficients they would take turns: n = 20,000, C = 10, 912 rounds of 1,024, 46 of 2,048.
WORKING_SET = 1_536
MAX_FREE = 6_000
PLACES = 3
# A row is in it for its violation if that is more than this share of the largest one; besides them and the free ones
# there is room for SPARE of both: with three places for each free one whatever their violations, blocks and steps in
# them took half of the time of a large C.
VIOLATING, SPARE = 0.01, 0.25
MAX_ROUNDS = 10_000
# Of the violation of all rows, what a working set is solved to, and never below the rounding of its gradient.
INNER_SHARE = 0.06
ROUNDING = 1e-14
# Steps along pairs, for each row of a working set, before those that are free are solved together.
STEPS_PER_ROW = 20
# Newton steps in a row, and, within one, times that some stop at a bound.
MAX_NEWTON_STEPS, MAX_STOPS = 5, 5
# Times that both follow each other in a working set: beyond, each undoes what rounding was to the other, and the round
# ends, so that all rows are looked at, with more damping.
MAX_TURNS = 50
# Of the mean k_ii: what is added to the diagonal of a block, and between which bounds. Less of it, where a round of few
# turns leaves more than SLOW of the gap.
DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-9, 1e-13, 1e-5
FEW_TURNS, SLOW = 3, 0.3
# A Newton step ends a working set if at most this share of its free coefficients was not free before: while they come
# and go it would be lost, and afterwards it takes the place of one round for each factor INNER_SHARE.
STABLE = 0.1
# A factor is used for other rows as long as not more than 1 of so many differ.
UPDATED = 6
# Rows that are looked at together in compiled loops.
LANES = 128
# Rounds in a row in which the dual objective, which no round can lower, grew by rounding alone.
MAX_STALLED = 3
PROGRESS = 1e-14


# The next value of C begins with an answer of this gap: with a better one it takes no fewer rounds (1e-4 to 2e-2), but
# waits longer. With a worse one (5e-2) there are more of both.
START_GAP = 2e-2
# Values of C that a thread takes together: more share more entries, but the last ones end later.
TOGETHER = 2
# Rows whose conditions hold by more than so many times the largest violation are left out until the gap is small, as
# are then nine of ten: n = 20,000, C = 1 makes a quarter fewer entries, ten values 15 % fewer. (With 3 the same, with 2
# some answers need another round.) Of fewer rows than MIN_ROWS none are.
FAR_INSIDE, MIN_ROWS = 5.0, 3_000
# Rounds with rows left out before all are looked at again.
MAX_PARTIAL = 30
# The answer for 1 of so many rows, if they are at least MIN_SAMPLE, says where to begin; to what gap it is solved.
SAMPLE, MIN_SAMPLE, SAMPLE_TOL = 4, 1_000, 1e-3


@njit(cache=True, nogil=True, error_model="numpy")
def _extremes(g, rising, falling, lows, highs):  # type: ignore[no-untyped-def]
    """The rows of the least slope g + rising and of the largest slope g + falling, and these slopes.

    In lanes, as in _partner, so that the loops are vector instructions, which those with one running extreme are not.
    """
    k, lanes = len(g), len(lows)
    lows[:] = np.inf
    highs[:] = -np.inf
    for start in range(0, k, lanes):
        part, up, down = g[start : start + lanes], rising[start : start + lanes], falling[start : start + lanes]
        for lane in range(len(part)):
            slope = part[lane] + up[lane]
            lows[lane] = slope if slope < lows[lane] else lows[lane]
            slope = part[lane] + down[lane]
            highs[lane] = slope if slope > highs[lane] else highs[lane]
    i, j = np.argmin(lows), np.argmax(highs)
    least, most = lows[i], highs[j]
    while i + lanes < k and g[i] + rising[i] != least:
        i += lanes
    while j + lanes < k and g[j] + falling[j] != most:
        j += lanes
    return i, least, j, most


@njit(cache=True, nogil=True, error_model="numpy")
def _partner(g, falling, diagonal, row, own, least, gains):  # type: ignore[no-untyped-def]
    """The row that gains most by shrinking as much as the one of slope ``least`` grows; -1 where none gains."""
    k, lanes = len(g), len(gains)
    gains[:] = 0.0
    for start in range(0, k, lanes):
        end = start + lanes
        part, down, others, entries = g[start:end], falling[start:end], diagonal[start:end], row[start:end]
        for lane in range(len(part)):
            slope = part[lane] + down[lane] - least
            slope = slope if slope > 0.0 else 0.0
            curvature = own + others[lane] - 2.0 * entries[lane]
            curvature = curvature if curvature > 1e-12 else 1e-12
            gain = slope * slope / curvature
            gains[lane] = gain if gain > gains[lane] else gains[lane]
    found, j = 0.0, -1
    for r in range(np.argmax(gains), k, lanes):
        slope = max(g[r] + falling[r] - least, 0.0)
        gain = slope * slope / max(own + diagonal[r] - 2.0 * row[r], 1e-12)
        if gain > found:
            found, j = gain, r
    return j


@njit(cache=True, nogil=True, error_model="numpy")
def _moved(value, step, low, high):  # type: ignore[no-untyped-def]
    """value + step, and exactly the bound or the kink that it reaches."""
    if step >= high - value:
        return high
    if -step >= value - low:
        return low
    return 0.0 if step == -value else value + step


@njit(cache=True, nogil=True, error_model="numpy")
def _descend(Q, a, g, low, high, epsilon, in_pairs, tol, most):  # type: ignore[no-untyped-def]
    """Steps along the best pair (or coordinate) until none gains: a and its smooth gradient g are changed in place.

    Returns the number of steps.
    """
    k = len(a)
    diagonal, rising, falling = np.empty(k), np.empty(k), np.empty(k)
    lows, highs = np.empty(LANES), np.empty(LANES)
    for r in range(k):
        diagonal[r] = Q[r, r]
        rising[r] = np.inf if a[r] >= high[r] else (epsilon if a[r] >= 0 else -epsilon)
        falling[r] = -np.inf if a[r] <= low[r] else (epsilon if a[r] > 0 else -epsilon)
    for step in range(most):
        i, least, j, largest = _extremes(g, rising, falling, lows, highs)
        sign = 1.0
        if in_pairs:
            if not largest - least > tol:
                return step
            j = _partner(g, falling, diagonal, Q[i], diagonal[i], least, lows)
            if j < 0:
                return step
            slope = least - (g[j] + falling[j])
            curvature = max(diagonal[i] + diagonal[j] - 2 * Q[i, j], 1e-12)
            room = min(high[i] - a[i], a[j] - low[j])
        else:
            if not max(-least, largest) > tol:
                return step
            if largest > -least:
                i, sign = j, -1.0
            slope, curvature = -max(-least, largest), max(diagonal[i], 1e-12)
            room = high[i] - a[i] if sign > 0 else a[i] - low[i]
        # along the step the slope grows by 2 epsilon where a coefficient changes its sign
        kink_i = -sign * a[i] if epsilon > 0 and sign * a[i] < 0 else np.inf
        kink_j = a[j] if in_pairs and epsilon > 0 and a[j] > 0 else np.inf
        t = 0.0
        while True:
            stop = min(min(kink_i, kink_j), room)
            if t - slope / curvature <= stop or stop == room:
                t = min(t - slope / curvature, room)
                break
            slope += curvature * (stop - t) + 2 * epsilon
            if kink_i == stop and kink_j == stop:
                slope += 2 * epsilon
            kink_i = np.inf if kink_i == stop else kink_i
            kink_j = np.inf if kink_j == stop else kink_j
            t = stop
            if slope >= 0:
                break
        before = a[i]
        a[i] = _moved(a[i], sign * t, low[i], high[i])
        change, row = a[i] - before, Q[i]
        if in_pairs:
            before = a[j]
            a[j] = _moved(a[j], -t, low[j], high[j])
            other, row_j = a[j] - before, Q[j]
            for r in range(k):
                g[r] += change * row[r] + other * row_j[r]
        else:
            j = i
            for r in range(k):
                g[r] += change * row[r]
        for r in (i, j):
            rising[r] = np.inf if a[r] >= high[r] else (epsilon if a[r] >= 0 else -epsilon)
            falling[r] = -np.inf if a[r] <= low[r] else (epsilon if a[r] > 0 else -epsilon)
    return most


def _settle(
    Q: Matrix, solve: Solve, a: Vector, g: Vector, low: Vector, high: Vector, epsilon: float, in_pairs: bool
) -> bool:
    """Newton steps in the free coefficients until a whole one fits into the bounds, in place; whether there was any.

    Where one does not fit there are two others, and what gains more is taken: the step as far as the first bound; or
    with all that would leave their bounds stopped there, and the step of the rest that is then theirs, until it fits.
    """
    for number in range(MAX_NEWTON_STEPS):
        free = np.flatnonzero((a > low) & (a < high) & ((a != 0) | (epsilon == 0)))
        bottom, top = (np.where(a > 0, 0.0, low), np.where(a < 0, 0.0, high)) if epsilon > 0 else (low, high)
        least, most, slope = bottom - a, top - a, g + epsilon * np.sign(a)
        step = _newton_step(solve, free, slope[free], 0.0, in_pairs)
        if step is None:
            return number > 0  # rows that are the same, to rounding: pairs go on
        ends = np.where(step > 0, most[free], least[free])
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(step != 0, ends / step, np.inf)
        share, tried = min(1.0, float(room.min())), [np.zeros(len(a))]
        tried[0][free] = np.where(room <= share, ends, share * step)
        if share < 1:
            stopped = _stopped_step(Q, solve, free, step, slope, least, most, in_pairs)
            tried += [] if stopped is None else [stopped]
        products = [Q @ change for change in tried]
        values = [float(slope @ one + 0.5 * (one @ product)) for one, product in zip(tried, products, strict=True)]
        best = int(np.argmin(values))
        if not values[best] < 0:
            return number > 0
        change = tried[best]
        a[:] = np.where(change >= most, top, np.where(change <= least, bottom, a + change))
        g += products[best]
        if share == 1 or best == 1:
            return True
    return True


def _stopped_step(
    Q: Matrix, solve: Solve, free: Any, step: Vector, slope: Vector, least: Vector, most: Vector, in_pairs: bool
) -> Vector | None:
    """A change that is at its end wherever a Newton step was beyond it, and minimal in the others, or None."""
    change, inside = np.zeros(len(slope)), free
    for _ in range(MAX_STOPS):
        change[inside] = np.clip(step, least[inside], most[inside])
        fits = (step > least[inside]) & (step < most[inside])
        if fits.all():
            return change
        inside = inside[fits]
        change[inside] = 0.0
        found = _newton_step(solve, inside, (slope + Q @ change)[inside], float(change.sum()), in_pairs)
        if found is None:
            return None
        step = found
    return None


def _newton_step(solve: Solve, rows: Any, slope: Vector, total: float, in_pairs: bool) -> Vector | None:
    """The minimiser of slope^T d + d^T Q d / 2 for the changes d of some rows, in pairs of those with sum -total.

    None where the block of these rows has no factor, or there is no row.
    """
    found = solve(rows, np.column_stack((-slope, np.ones(len(rows))))) if len(rows) else None
    if found is None:
        return None
    step = np.asarray(found[:, 0])
    if in_pairs:
        step = step - found[:, 1] * ((step.sum() + total) / found[:, 1].sum())
        step -= (step.sum() + total) / len(rows)  # what rounding left, of a block that is nearly singular
    return step


class _Factor:
    """Solves systems with blocks of one matrix by the Cholesky factor of one of them.

    The rows that are free hardly change from one step to the next. With the factor A = L L^T of a block whose rows are
    ``rows``, a block without some of them (E, columns of the identity) and with others beside them (B, C) is solved by

        A x + B p + E m = r        B^T x + C p = q        E^T x = 0

    for x, p and the residuals m of the rows that are left out, whose own r is arbitrary: a small system of the
    columns of B and E, which takes k n^2 flops for k of them instead of n^3 / 3.
    """

    def __init__(self) -> None:
        self.rows, self.shift, self.damping = np.empty(0, dtype=np.intp), 0.0, 0.0
        self.memory, self.L = np.empty(0), np.empty((0, 0))
        self._forget()

    def _forget(self) -> None:
        # L^-1 (B, E) of systems before; for each column its row, or -1 - it for E; rows whose entries all of B have
        self.W, self.names = np.empty((len(self.rows), 0)), np.empty(0, dtype=np.intp)
        self.is_known = np.ones(len(self.rows), dtype=bool)

    def solve(self, Q: Matrix, ids: NDArray[np.intp], damping: float, block: Any, right: Matrix) -> Matrix | None:
        """x of Q[block, block] x = right, or None where that has no factor; ``ids`` are the rows of Q in the matrix.

        Q has ``damping`` times the mean k_ii on its diagonal: another one is a matrix of its own.
        """
        wanted = ids[block]
        left_out = np.flatnonzero(~np.isin(self.rows, wanted, assume_unique=True))
        is_new = ~np.isin(wanted, self.rows, assume_unique=True)
        if damping == self.damping and UPDATED * (len(left_out) + np.count_nonzero(is_new)) <= len(self.rows):
            return self._updated(Q, ids, np.asarray(block), left_out, is_new, right)
        self.rows, n = np.empty(0, dtype=np.intp), len(block)
        if self.memory.size < n * n:  # pages are mapped when they are first used, and stay
            self.memory = np.empty(max(MAX_FREE, n) ** 2)
        self.L = self.memory[: n * n].reshape(n, n)
        for start in range(0, n, LANES):
            some = slice(start, start + LANES)
            np.take(Q[block[some]], block, axis=1, out=self.L[some], mode="clip")
        self.shift = 1e-13 * float(np.trace(self.L)) / n
        self.L[np.diag_indices(n)] += self.shift
        if potrf(self.L):
            return None
        self.rows, self.damping = wanted, damping
        self._forget()
        x: Matrix = trsm_left(self.L, trsm_left(self.L, right, transposed=False, few=True), transposed=True, few=True)
        return x

    def _updated(
        self, Q: Matrix, ids: NDArray[np.intp], block: NDArray[np.intp], left_out: Any, is_new: Any, right: Matrix
    ) -> Matrix | None:
        places, new, t = np.searchsorted(self.rows, ids[block[~is_new]]), block[is_new], right.shape[1]
        p, n = len(new), len(self.rows)
        if self.W.shape[1] > n or not self.is_known[places].all():
            self._forget()
        names = np.r_[ids[new], -1 - self.rows[left_out]]
        is_missing = np.isin(names, self.names, assume_unique=True, invert=True)
        added, outside = new[is_missing[:p]], left_out[is_missing[p:]]
        both = np.zeros((n, t + len(added) + len(outside)))
        both[places, :t] = right[~is_new]
        at = np.minimum(np.searchsorted(ids, self.rows), len(ids) - 1)
        is_here = ids[at] == self.rows
        both[is_here, t : t + len(added)] = Q[np.ix_(at[is_here], added)]
        both[outside, t + len(added) + np.arange(len(outside))] = 1.0
        both = trsm_left(self.L, both, transposed=False, few=True)
        if len(added):
            self.is_known &= is_here
        self.W, self.names = np.column_stack((self.W, both[:, t:])), np.r_[self.names, names[is_missing]]
        order = np.argsort(self.names)
        y, W = both[:, :t], self.W[:, order[np.searchsorted(self.names, names, sorter=order)]]
        small, rest = -(W.T @ W), -(W.T @ y)
        small[:p, :p] += Q[np.ix_(new, new)] + self.shift * np.eye(p)
        rest[:p] += right[is_new]
        try:
            found = np.linalg.solve(small, rest)
        except np.linalg.LinAlgError:
            return None
        x = np.empty_like(right)
        x[~is_new] = trsm_left(self.L, y - W @ found, transposed=True, few=True)[places]
        x[is_new] = found[:p]
        return x if np.isfinite(x).all() else None


class _Factors:
    """As many factors as there are threads; each system takes the one that differs least from it."""

    def __init__(self, number: int) -> None:
        self.free, self.lock = [_Factor() for _ in range(number)], Lock()

    def solve(self, Q: Matrix, ids: NDArray[np.intp], damping: float, block: Any, right: Matrix) -> Matrix | None:
        """x of Q[block, block] x = right, or None where that has no factor; ``ids`` are the rows of Q in the matrix.

        Q has ``damping`` times the mean k_ii on its diagonal: another one is a matrix of its own.
        """
        with self.lock:
            shared = [np.isin(each.rows, ids[block]).mean() if len(each.rows) else 0.0 for each in self.free]
            factor = self.free.pop(int(np.argmax(np.array(shared) > 1 - 1 / UPDATED)))
        try:
            return factor.solve(Q, ids, damping, block, right)
        finally:
            self.free.append(factor)


NOTHING_YET = Certificate(primal=np.inf, dual=-np.inf, gap=1.0, kkt=np.inf, num_support=0)


@dataclass(eq=False)
class _Programme:
    """The quadratic programme, its point ``a`` and its smooth gradient ``g`` = K a - y.

    ``rows`` is its working set, ``number`` counts the rounds, those of the programmes before it too, ``stalled`` those
    in a row in which the dual objective did not grow; ``is_exact`` says whether ``g`` has no rounding of changes yet,
    ``best`` is the least gap of those times. Only slopes that it looks at learn of changes; ``num_partial`` are the
    rounds with others, which ``can_leave_out`` allows. ``turns`` and ``last_gap`` are those of the round before.
    ``next`` is the same problem with a larger C, which waits for this one.
    """

    problem: LossProblem
    a: Vector
    g: Vector
    rows: NDArray[np.intp]
    is_looked_at: NDArray[np.bool_]
    is_exact: bool = True
    best: float = np.inf
    dual: float = -np.inf
    stalled: int = 0
    b: float = 0.0
    number: int = 0
    num_partial: int = 0
    can_leave_out: bool = True
    damping: float = DAMPING
    turns: int = 0
    last_gap: float = np.inf
    history: list[tuple[int, float, float]] = field(default_factory=list)
    found: Certificate = NOTHING_YET
    next: _Programme | None = None

    @classmethod
    def of(cls, problem: LossProblem, start: Vector | None) -> _Programme:
        n = len(problem.y)
        a = np.zeros(n) if start is None else problem.feasible(start)
        return cls(problem, a, -problem.y, np.empty(0, dtype=np.intp), np.ones(n, dtype=np.bool_))

    @property
    def epsilon(self) -> float:
        """What a coefficient costs by its magnitude."""
        return float(getattr(self.problem.loss, "epsilon", 0.0))

    def begin_after(self, before: _Programme) -> _Programme:
        """Begin where the same problem with another C ended: coefficients and predictions grow as C does.

        Those at a bound are at the new one, and most of them stay.
        """
        ratio = self.problem.C.max() / before.problem.C.max()
        self.a = self.problem.feasible(ratio * before.a)
        self.g = ratio * before.f - self.problem.y
        self.is_exact, self.rows, self.number = False, before.rows, before.number
        self.judge()
        return self

    @property
    def f(self) -> Vector:
        """K a, as it follows from the gradient."""
        return self.g + self.problem.y

    @property
    def is_free(self) -> NDArray[np.bool_]:
        """Which coefficients are neither at a bound nor at the kink of |a|."""
        low, high = self.problem.bounds
        return np.asarray((self.a > low) & (self.a < high) & ((self.a != 0) | (self.epsilon == 0)))

    def slopes(self) -> tuple[Vector, Vector]:
        """What each coefficient gains by growing (-inf: it cannot), and minus what it gains by shrinking (inf)."""
        a, g, epsilon, (low, high) = self.a, self.g, self.epsilon, self.problem.bounds
        up = np.where(a < high, -g - np.where(a >= 0, epsilon, -epsilon), -np.inf)
        down = np.where(a > low, -g - np.where(a > 0, epsilon, -epsilon), np.inf)
        up[~self.is_looked_at], down[~self.is_looked_at] = -np.inf, np.inf
        return up, down

    def judge(self) -> None:
        """What the gradient as it is says of the gap; of the intercept, that most of the free rows agree on it.

        Those were solved for together. An intercept amid all rows would be off by half of the violation of the few
        that were not, at each of the free rows: in half of the problems that takes another round.
        """
        problem, f, a = self.problem, self.f, self.a
        up, down = self.slopes()
        free, ends = up[self.is_free], np.array([up.max(), down.min()])
        agreed = free if len(free) else ends[np.isfinite(ends)]
        self.b = float(np.median(agreed)) if problem.fit_intercept and len(agreed) else 0.0
        if float(a @ f) < 0 and not self.is_looked_at.all():  # predictions that are this old say nothing
            self.num_partial = MAX_PARTIAL + 1
        else:
            self.found = certify(problem, a, self.b, f)
        known = [one for one in self.history if one[0] != self.number]
        self.history = [*known, (self.number, self.found.gap, self.found.kkt)]
        if self.is_looked_at.all():  # rows that are left out change the gap by nothing, but the dual objective
            self.stalled = 0 if self.found.dual > self.dual + PROGRESS * abs(self.found.dual) else self.stalled + 1
            self.dual = max(self.dual, self.found.dual)

    def has_ended(self, tol: float) -> bool:
        """Whether it is, by an exact gradient: near enough, or no nearer than the last time, for rounding."""
        if self.num_partial and self.found.gap > tol:  # rows that were left out are not where they should be
            self.num_partial, self.can_leave_out, self.stalled = 0, False, 0
            return False
        if self.found.gap <= tol or self.found.gap > 0.5 * self.best:
            return True
        self.best, self.stalled = self.found.gap, 0
        return False

    def damp(self) -> None:
        """More of :attr:`damping` where a working set was not finished, less where that was easy and led nowhere."""
        if self.turns == MAX_TURNS:
            self.damping = min(10 * self.damping, MOST_DAMPING)
        elif self.turns <= FEW_TURNS and self.found.gap > SLOW * self.last_gap:
            self.damping = max(self.damping / 10, LEAST_DAMPING)

    def improve(self, factors: _Factors) -> None:
        """Choose a working set and solve for it: ``g`` has to learn from K what its coefficients changed by."""
        up, down = self.slopes()
        in_pairs = self.problem.fit_intercept
        violation = float(up.max() - down.min()) if in_pairs else float(max(up.max(), -down.min()))
        if self.next is None and self.can_leave_out and len(up) >= MIN_ROWS:
            self.is_looked_at = np.minimum(self.b - up, down - self.b) <= FAR_INSIDE * self.found.kkt
            self.num_partial += not self.is_looked_at.all()
        rows = self.rows = self._next_rows(up, down)
        self.damp()
        Q = self.problem.columns.block(rows, reuse=True)
        solve = partial(factors.solve, Q, rows, self.damping)
        before, g = self.a[rows], self.g[rows].copy()
        a, (low, high) = before.copy(), (end[rows] for end in self.problem.bounds)
        tol = max(INNER_SHARE * violation, ROUNDING * float(np.abs(g).max()))
        most = STEPS_PER_ROW * len(rows)
        Q[np.diag_indices_from(Q)] += self.damping * float(self.problem.columns.diagonal.mean())
        for self.turns in range(1, MAX_TURNS + 1):
            if _descend(Q, a, g, low, high, self.epsilon, in_pairs, tol, most) < most:
                is_free = (a > low) & (a < high)
                changed = np.count_nonzero(is_free != ((before > low) & (before < high)))
                if changed <= STABLE * np.count_nonzero(is_free):
                    _settle(Q, solve, a, g, low, high, self.epsilon, in_pairs)
                break
            if not _settle(Q, solve, a, g, low, high, self.epsilon, in_pairs):
                break
        self.last_gap = self.found.gap
        self.a[rows] = a
        self.is_exact = self.is_exact and np.array_equal(a, before)
        self.number += 1

    def _next_rows(self, up: Vector, down: Vector) -> NDArray[np.intp]:
        """The worst of both sides, and of the last working set those that are free first, as far as there is room.

        The sides meet at 0, with an intercept at the median of the free rows, which are all at the answer's -b.
        """
        free = self.is_free
        num_free = int(np.count_nonzero(free))
        size = max(WORKING_SET, min(PLACES * num_free, MAX_FREE))
        if len(up) <= size:
            return np.arange(len(up))
        half = max(size // 8, min(size // 4, (size - num_free) // 2))
        rising, falling = np.argpartition(-up, half)[:half], np.argpartition(down, half)[:half]
        least, largest = down[falling].min(), up[rising].max()
        middle = 0.0
        if self.problem.fit_intercept:
            partners = self.rows[free[self.rows]]  # of rows on one side; free ones that are not kept are none
            middle = np.median(up[partners]) if len(partners) else 0.5 * (least + largest)
            middle = min(max(middle, least), largest)
        enough = VIOLATING * (largest - least)
        fresh = np.union1d(rising[up[rising] > middle + enough], falling[down[falling] < middle - enough])
        needed = num_free + np.count_nonzero(~free[fresh])
        size = max(WORKING_SET, min(size, int((1 + SPARE) * needed)))
        kept = np.setdiff1d(self.rows, fresh, assume_unique=True)
        kept = kept[self.is_looked_at[kept]]
        kept = kept[np.argsort(~free[kept], kind="stable")][: size - len(fresh)]
        return np.sort(np.r_[fresh, kept])


def decompose(
    problems: Sequence[LossProblem],
    *,
    tol: float = 1e-6,
    max_iter: int | None = None,
    start: Matrix | None = None,
    progress: Callable[[int, float, Callable[[], Matrix]], None] | None = None,
) -> list[Minimiser]:
    """The minimisers of problems whose losses are :class:`~dkrr.linalg.loss.PiecewiseQuadratic`.

    Parameters
    ----------
    problems
        t of them, with the same columns of K; where loss and targets are the same, C differs by a factor.
    tol
        On the duality gap (P - D) / P of each.
    max_iter
        Rounds; None means 10,000.
    start : (n, t), optional
        Coefficients to begin with, moved into the bounds.
    progress
        Called with the round, the largest gap, and a function of no arguments for the coefficients (n, t) so far.

    Returns
    -------
    list of Minimiser
        With the gaps that were reached: above ``tol`` after ``max_iter`` rounds, or where rounding allows no better.
    """
    columns, most = problems[0].columns, MAX_ROUNDS if max_iter is None else max_iter
    programmes = [_Programme.of(problem, None if start is None else start[:, j]) for j, problem in enumerate(problems)]
    going = programmes if start is not None else _first_of_chains(programmes)
    if start is not None or _begin_with_a_sample(going, columns):
        _renew(going, columns)
    # one chain: a thread for each round, not for each product
    workers = columns.num_threads if len(going) == 1 < len(programmes) else 1

    def tell() -> None:
        if progress is not None:
            number, gap = max(each.number for each in programmes), max(each.found.gap for each in programmes)
            progress(number, gap, lambda: np.column_stack([each.a for each in programmes]))

    while going:
        due = _rounds(going, columns, workers, tol, most, tell)
        # judged by products without the rounding of all changes, taken at once
        _renew([each for each in due if not each.is_exact], columns)
        for each in due:
            each.is_looked_at[:] = True
            each.judge()
        going = [each for each in due if each.number < most and not each.has_ended(tol)]
    return [Minimiser(each.a, each.b, each.f, each.found, each.number, each.history) for each in programmes]


def _rounds(
    begun: list[_Programme], columns: GramColumns, workers: int, tol: float, most: int, tell: Callable[[], None]
) -> list[_Programme]:
    """Improve programmes, and those that wait for them, until each is due or has had ``most`` rounds.

    One worker takes all together. Of several the first one takes the largest C that has begun, as others wait for it
    and it takes longest; the rest go together, so that they share entries of K.
    """
    going, due, failed, ready = list[_Programme](), list[_Programme](), list[BaseException](), Condition()
    teams: list[list[_Programme]] = [[] for _ in range(workers)]
    factors = _Factors(workers + 1 if workers > 1 else columns.num_threads)
    own = columns if workers == 1 else GramColumns(columns.kernel, columns.rows)

    def sort(judged: list[_Programme]) -> None:
        tell()
        for each in judged:
            is_at_end = each.number >= most or each.found.gap <= tol
            is_at_end = is_at_end or each.stalled > MAX_STALLED + 1 or each.num_partial > MAX_PARTIAL
            (due if is_at_end else going).append(each)
            if each.next is not None and (is_at_end or each.found.gap <= START_GAP):
                started, each.next = each.next.begin_after(each), None
                sort([started])

    def chosen(worker: int) -> list[_Programme]:
        waiting = sorted(going, key=lambda each: float(each.problem.C.max()))
        if workers == 1:
            return waiting
        rest = waiting if teams[0] else waiting[:-1]
        return rest[: min(TOGETHER, -(-len(rest) // (workers - 1)))] if worker else waiting[-1:]

    def work(worker: int) -> None:
        while True:
            with ready:
                ready.wait_for(lambda: failed or chosen(worker) or not (going or any(teams)))
                team = teams[worker] = chosen(worker)
                if failed or not team:
                    return
                going[:] = [each for each in going if each not in team]
                ready.notify_all()
            try:
                _improve(team, own, factors)
                with ready:
                    if not failed:
                        sort(team)
            except BaseException as error:
                failed.append(error)
            with ready:
                teams[worker] = []
                ready.notify_all()

    for each in begun:
        each.judge()
    sort(begun)
    with ThreadPoolExecutor(workers) as pool:  # one worker is this thread, whose memory is there already
        list((map if workers == 1 else pool.map)(work, range(workers)))
    if failed:
        raise failed[0]
    return due


def _improve(team: list[_Programme], columns: GramColumns, factors: _Factors) -> None:
    """A round of each, with entries of K that are shared by those that need them."""
    of_each = map if columns.num_threads == 1 or len(team) == 1 else columns.pool.map
    before = np.column_stack([each.a for each in team])
    list(of_each(partial(_Programme.improve, factors=factors), team))
    changes = np.column_stack([each.a for each in team]) - before
    # the slopes that any of them looks at: those of the first, then those that only the others need, and so on
    order = sorted(range(len(team)), key=lambda j: int(team[j].is_looked_at.sum()))
    is_done = np.zeros(len(changes), dtype=np.bool_)
    for k in range(len(order)):
        rest, rows = order[k:], np.flatnonzero(team[order[k]].is_looked_at & ~is_done)
        is_done[rows] = True
        product = columns.product(changes[:, rest], rows) if len(rows) else np.empty((0, len(rest)))
        for j, member in enumerate(rest):
            team[member].g[rows] += product[:, j]
    list(of_each(_Programme.judge, team))


def _begin_with_a_sample(programmes: Sequence[_Programme], columns: GramColumns) -> bool:
    """The coefficients that follow from the answers for a part of the rows, with a larger C; False where n is small.

    Most rows are at the bound that the predictions of that answer say. As many are free as it has free rows.
    """
    n = len(columns)
    m = n // SAMPLE
    if m < MIN_SAMPLE:
        return False
    rows = np.sort(np.random.default_rng(0).permutation(n)[:m])
    part = columns.part(rows)
    problems = [
        replace(each.problem, columns=part, y=each.problem.y[rows], C=each.problem.C[rows] * (n / m))
        for each in programmes
    ]
    found, a = decompose(problems, tol=SAMPLE_TOL), np.zeros((n, len(problems)))
    a[rows] = np.column_stack([answer.a for answer in found])
    f = columns.product(a)
    for j, (each, problem, answer) in enumerate(zip(programmes, problems, found, strict=True)):
        num_free = int(np.count_nonzero(_Programme.of(problem, answer.a).is_free))
        each.a = each.problem.feasible(_placed(each.problem, f[:, j], answer.b, num_free))
    return True


def _placed(problem: LossProblem, f: Vector, b: float, num_free: int) -> Vector:
    """-C loss'(f + b) for a loss that is quadratic near its kinks, as near as ``num_free`` rows are."""
    loss, y = problem.loss, problem.y
    assert isinstance(loss, PiecewiseQuadratic)  # noqa: S101  (narrows the type)
    low, high = problem.domain

    def soft(b: float) -> Vector:
        r = f + b - y
        return np.asarray(np.sign(r) * np.maximum(np.abs(r) - loss.epsilon, 0.0))

    with np.errstate(divide="ignore", invalid="ignore"):
        widths = np.fmax(soft(b) / low, soft(b) / high)
    width = float(np.partition(widths, num_free)[num_free])
    if problem.fit_intercept:
        b = root_of(lambda b: float(problem.C @ loss.slope(y, f + b - y, width)), b, float(np.ptp(y)) or 1.0)
    return np.asarray(-problem.C * loss.slope(y, f + b - y, width))


def _first_of_chains(programmes: list[_Programme]) -> list[_Programme]:
    """Those that begin at once; others, which differ from one of them in C alone, wait for the one before."""
    first, last = list[_Programme](), dict[Any, _Programme]()
    for each in sorted(programmes, key=lambda one: float(one.problem.C.max())):
        group = (each.problem.loss, each.problem.y.tobytes())
        if group in last:
            last[group].next = each
        else:
            first.append(each)
        last[group] = each
    return first


def _renew(programmes: Sequence[_Programme], columns: GramColumns) -> None:
    """The gradients anew, by one product."""
    if programmes:
        product = columns.product(np.column_stack([each.a for each in programmes]))
        for j, each in enumerate(programmes):
            each.g = product[:, j] - each.problem.y
            each.is_exact = True
