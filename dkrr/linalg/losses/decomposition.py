"""Minimise over boxes of coefficients by decomposition: hinge, epsilon-insensitive and pinball losses.

The dual of a piecewise quadratic loss is a quadratic programme with bounds, and one equation with an intercept:

    minimise    1/2 a^T (K + D) a - y^T a + epsilon |a|_1        low <= a <= high,   1^T a = 0,      D = curvature / C

A working set of the rows that violate the conditions most is solved exactly while the others wait: by steps along pairs
of coefficients (sequential minimal optimisation), which find out who is at a bound, and by Newton steps in those that
are free, which a small step size of pairs would take for ever to get right. Then the gradient of all rows takes the
change in, by columns of K that are evaluated for it and forgotten. Half of the next working set is new; of the old one
those stay that are free.

Several columns of targets (classes, quantiles, values of C) go together: each has its own working set, and all share
the entries of K that any of them asks for.

Compared with one pair at a time over cached columns: a working set of 1,024 is decided in its own block of K, so that a
column is evaluated a few times and not kept, whatever n is; n = 20,000 with 9,900 support vectors takes 1.1 n^2
entries in all, about one product with K.

Cost
----
k n entries of K for each round of k coefficients that changed (k <= 1,024) and, at the end, n times the number of
support vectors for the certificate; k^2 numbers of memory, a few vectors of n, and the rows.

References
----------
Osuna, Freund and Girosi, An improved training algorithm for support vector machines, NNSP 1997; Platt, Fast training of
support vector machines using sequential minimal optimization, 1998; Fan, Chen and Lin, Working set selection using
second order information, JMLR 6, 2005; Wen et al., ThunderSVM, JMLR 19, 2018.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from dkrr.linalg.losses.loss import PiecewiseQuadratic
from dkrr.linalg.losses.problem import Certificate, LossProblem, Matrix, Minimiser, Vector, certify, intercept_of

__all__ = ["decompose"]

# Rows of a working set: at least twice as many as are free, up to MAX_FREE of them (288 MB for their block of K). With
# fewer places than free coefficients they would take turns: n = 20,000, C = 10, 912 rounds of 1,024, 46 of 2,048.
WORKING_SET = 1024
MAX_FREE = 6_000
MAX_ROUNDS = 10_000
# Of the violation of all rows, what a working set is solved to, and never below the rounding of its gradient.
INNER_SHARE = 0.1
ROUNDING = 1e-14
# Steps along pairs, for each row of a working set, before those that are free are solved together.
STEPS_PER_ROW = 20
MAX_NEWTON_STEPS = 50
# Rounds in a row in which the dual objective, which no round can lower, grew by rounding alone.
MAX_STALLED = 3
PROGRESS = 1e-14


@njit(cache=True, nogil=True)
def _descend(Q, a, g, low, high, epsilon, in_pairs, tol, most):  # type: ignore[no-untyped-def]
    """Steps along the best pair (or coordinate) until none gains: a and its smooth gradient g are changed in place.

    Returns the number of steps.
    """
    k, steps = len(a), 0
    diagonal = np.array([Q[r, r] for r in range(k)])
    while steps < most:
        # the coordinate that gains most by growing, or, alone, by any move
        best, i = -np.inf, -1
        for r in range(k):
            if a[r] < high[r]:
                gain = -(g[r] + (epsilon if a[r] >= 0 else -epsilon))
                if gain > best:
                    best, i = gain, r
        sign, j = 1.0, -1
        if in_pairs:
            if i < 0:
                break
            found, least = 0.0, np.inf
            for r in range(k):
                if a[r] > low[r]:
                    other = -(g[r] + (epsilon if a[r] > 0 else -epsilon))
                    least = min(least, other)
                    if other < best:
                        curvature = max(diagonal[i] + diagonal[r] - 2 * Q[i, r], 1e-12)
                        gain = (best - other) ** 2 / curvature
                        if gain > found:
                            found, j = gain, r
            if best - least <= tol or j < 0:
                break
            slope = -(best + (g[j] + (epsilon if a[j] > 0 else -epsilon)))
            curvature = max(diagonal[i] + diagonal[j] - 2 * Q[i, j], 1e-12)
            room = min(high[i] - a[i], a[j] - low[j])
        else:
            for r in range(k):
                if a[r] > low[r]:
                    gain = g[r] + (epsilon if a[r] > 0 else -epsilon)
                    if gain > best:
                        best, i, sign = gain, r, -1.0
            if i < 0 or best <= tol:
                break
            slope, curvature = -best, max(diagonal[i], 1e-12)
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
        if sign > 0:
            a[i] = high[i] if t >= high[i] - a[i] else (0.0 if t == -a[i] else a[i] + t)
        else:
            a[i] = low[i] if t >= a[i] - low[i] else (0.0 if t == a[i] else a[i] - t)
        change = a[i] - before
        if in_pairs:
            before = a[j]
            a[j] = low[j] if t >= a[j] - low[j] else (0.0 if t == a[j] else a[j] - t)
            other = a[j] - before
            for r in range(k):
                g[r] += change * Q[i, r] + other * Q[j, r]
        else:
            for r in range(k):
                g[r] += change * Q[i, r]
        steps += 1
    return steps


def _settle(Q: Any, a: Vector, g: Vector, low: Vector, high: Vector, epsilon: float, in_pairs: bool) -> None:
    """Newton steps in the free coefficients until a whole one fits into the bounds; in place."""
    for _ in range(MAX_NEWTON_STEPS):
        free = np.flatnonzero((a > low) & (a < high) & ((a != 0) | (epsilon == 0)))
        if len(free) == 0:
            return
        block = Q[np.ix_(free, free)]
        block[np.diag_indices(len(free))] += 1e-13 * np.trace(block) / len(free)
        slope = g[free] + epsilon * np.sign(a[free])
        try:
            factor = cho_factor(block, lower=True, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            return  # rows that are the same, to rounding: pairs go on
        step = -cho_solve(factor, slope)
        if in_pairs:
            ones = cho_solve(factor, np.ones(len(free)))
            step -= ones * (step.sum() / ones.sum())
            step -= step.mean()  # what rounding left, of a block that is nearly singular
        drop, curvature = -float(slope @ step), float(step @ (Q[np.ix_(free, free)] @ step))
        if not drop > 0:
            return
        whole = drop / curvature if curvature > 0 else np.inf
        ends = np.where(step > 0, high[free], low[free])
        if epsilon > 0:
            ends = np.where(np.sign(step) * a[free] < 0, 0.0, ends)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(step != 0, (ends - a[free]) / step, np.inf)
        share = min(whole, float(room.min()))
        if not np.isfinite(share):
            return
        moved = np.where(room <= share, ends, a[free] + share * step)
        change = np.clip(moved, low[free], high[free]) - a[free]
        a[free] += change
        g += Q[:, free] @ change
        if share == whole:
            return


NOTHING_YET = Certificate(primal=np.inf, dual=-np.inf, gap=1.0, kkt=np.inf, num_support=0)


@dataclass(eq=False)
class _Programme:
    """The quadratic programme, its point ``a`` and its smooth gradient ``g`` = (K + D) a - y.

    ``rows`` is its working set, ``stalled`` the number of rounds in which the dual objective did not grow, ``is_exact``
    whether ``g`` has no rounding of changes yet, ``best`` the least gap of those times.
    ``next`` is the same problem with a larger C, which waits for this one.
    """

    problem: LossProblem
    a: Vector
    g: Vector
    low: Vector
    high: Vector
    epsilon: float
    diagonal: Vector
    rows: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    is_exact: bool = True
    best: float = np.inf
    dual: float = -np.inf
    stalled: int = 0
    b: float = 0.0
    history: list[tuple[int, float, float]] = field(default_factory=list)
    found: Certificate = NOTHING_YET
    next: _Programme | None = None

    @classmethod
    def of(cls, problem: LossProblem, start: Vector | None) -> _Programme:
        loss = problem.loss
        if not isinstance(loss, PiecewiseQuadratic):
            raise TypeError(f"{loss.name} has no quadratic dual")
        low, high = problem.bounds()
        a = np.zeros(len(problem.y)) if start is None else problem.feasible(start)
        diagonal = np.divide(loss.curvature, problem.C, out=np.zeros_like(problem.C), where=problem.C > 0)
        return cls(problem, a, -problem.y, low, high, loss.epsilon, diagonal)

    def start_next(self, number: int) -> _Programme:
        """The same problem with a larger C begins here: those at a bound are at the new one, and most of them stay."""
        other, self.next = self.next, None
        assert other is not None  # noqa: S101  (narrows the type)
        ratio = float(other.problem.C.max() / self.problem.C.max())
        other.a = other.problem.feasible(ratio * self.a)
        other.g = ratio * self.f + other.diagonal * other.a - other.problem.y
        other.is_exact = False
        other.judge(number)
        return other

    @property
    def f(self) -> Vector:
        """K a, as it follows from the gradient."""
        return self.g + self.problem.y - self.diagonal * self.a

    @property
    def is_free(self) -> NDArray[np.bool_]:
        """Which coefficients are neither at a bound nor at the kink of |a|."""
        return np.asarray((self.a > self.low) & (self.a < self.high) & ((self.a != 0) | (self.epsilon == 0)))

    def slopes(self) -> tuple[Vector, Vector]:
        """What each coefficient gains by growing (-inf: it cannot), and minus what it gains by shrinking (inf)."""
        a, g = self.a, self.g
        up = np.where(a < self.high, -g - np.where(a >= 0, self.epsilon, -self.epsilon), -np.inf)
        down = np.where(a > self.low, -g - np.where(a > 0, self.epsilon, -self.epsilon), np.inf)
        return up, down

    def judge(self, number: int) -> None:
        """The certificate by the gradient as it is."""
        f = self.f
        self.b = intercept_of(self.problem, self.a, f)
        self.found = certify(self.problem, self.a, self.b, f)
        known = self.history[:-1] if self.history and self.history[-1][0] == number else self.history
        self.history = [*known, (number, self.found.gap, self.found.kkt)]
        self.stalled = 0 if self.found.dual > self.dual + PROGRESS * abs(self.found.dual) else self.stalled + 1
        self.dual = max(self.dual, self.found.dual)

    def is_due(self, tol: float) -> bool:
        """Whether it seems to be at its end."""
        return self.found.gap <= tol or self.stalled > MAX_STALLED + 1

    def has_ended(self, tol: float) -> bool:
        """Whether it is, by an exact gradient: near enough, or no nearer than the last time, for rounding."""
        if self.found.gap <= tol or self.found.gap > 0.5 * self.best:
            return True
        self.best, self.stalled = self.found.gap, 0
        return False

    def improve(self) -> Vector:
        """Choose a working set and solve for it; what its coefficients changed by, which ``g`` has to learn from K."""
        up, down = self.slopes()
        in_pairs = self.problem.fit_intercept
        violation = float(up.max() - down.min()) if in_pairs else float(max(up.max(), -down.min()))
        rows = self.rows = self._next_rows(up, down)
        Q = self.problem.columns.block(rows)
        Q[np.diag_indices(len(rows))] += self.diagonal[rows]
        before, g = self.a[rows], self.g[rows].copy()
        a, low, high = before.copy(), self.low[rows], self.high[rows]
        tol = max(INNER_SHARE * violation, ROUNDING * float(np.abs(g).max()))
        most = STEPS_PER_ROW * len(rows)
        while _descend(Q, a, g, low, high, self.epsilon, in_pairs, tol, most) == most:
            unsettled = a.copy()
            _settle(Q, a, g, low, high, self.epsilon, in_pairs)
            if np.array_equal(unsettled, a):
                break
        change = a - before
        self.a[rows] = a
        self.g[rows] += self.diagonal[rows] * change
        self.is_exact = self.is_exact and not change.any()
        return change

    def _next_rows(self, up: Vector, down: Vector) -> NDArray[np.intp]:
        """The worst of both sides, and of the last working set those that are free, as far as there is room."""
        num_free = int(np.count_nonzero(self.is_free))
        size = max(WORKING_SET, min(2 * num_free, MAX_FREE))
        if len(up) <= size:
            return np.arange(len(up))
        half = max(size // 8, min(size // 4, (size - num_free) // 2))
        if self.problem.fit_intercept:
            worst = np.r_[np.argpartition(-up, half)[:half], np.argpartition(down, half)[:half]]
        else:
            worst = np.argpartition(-np.maximum(up, -down), 2 * half)[: 2 * half]
        fresh = np.unique(worst)
        kept = np.setdiff1d(self.rows, fresh, assume_unique=True)
        kept = kept[np.argsort(~self.is_free[kept], kind="stable")][: size - len(fresh)]
        return np.sort(np.r_[fresh, kept])


def decompose(
    problems: Sequence[LossProblem],
    *,
    tol: float = 1e-6,
    max_iter: int | None = None,
    start: Matrix | None = None,
    progress: Callable[[int, float, Callable[[], Matrix]], None] | None = None,
) -> list[Minimiser]:
    """The minimisers of problems whose losses are :class:`~dkrr.linalg.losses.loss.PiecewiseQuadratic`.

    Parameters
    ----------
    problems
        t of them, with the same columns of K.
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
    if start is not None:
        _renew(programmes)
    going = list(programmes) if start is not None else _first_of_chains(programmes)
    due, number = list[_Programme](), 0
    while True:
        for each in going:
            each.judge(number)
        if progress is not None:
            gap = max(each.found.gap for each in programmes)
            progress(number, gap, lambda: np.column_stack([each.a for each in programmes]))
        is_over = number == most
        ending = [each for each in going if is_over or each.is_due(tol)]
        going = [each for each in going if each not in ending]
        while ending:
            due += ending
            started = [each.start_next(number) for each in ending if each.next is not None]
            ending, going = (started, going) if is_over else ([], going + started)
        if not going:  # what is due is judged by products without the rounding of all changes, taken at once
            _renew([each for each in due if not each.is_exact])
            for each in due:
                each.judge(number)
            going, due = [] if is_over else [each for each in due if not each.has_ended(tol)], []
        if not going:
            break
        changes = [each.improve() for each in going]
        rows = np.unique(np.concatenate([each.rows for each in going]))
        values = np.zeros((len(rows), len(going)))
        for j, (each, change) in enumerate(zip(going, changes, strict=True)):
            values[np.searchsorted(rows, each.rows), j] = change
        moved = values.any(axis=1)
        total = np.zeros((len(columns), len(going)))
        columns.add(rows[moved], values[moved], total)
        for j, each in enumerate(going):
            each.g += total[:, j]
        number += 1
    return [Minimiser(each.a, each.b, each.f, each.found, each.history[-1][0], each.history) for each in programmes]


def _first_of_chains(programmes: list[_Programme]) -> list[_Programme]:
    """Those that begin at once; others, which differ from one of them by a larger C alone, wait for the one before.

    Ten values of C from 0.1 to 10 take 9 rounds each after the first one's 75 (n = 20,000); all at once, 92 rounds of
    ten working sets.
    """
    groups: dict[Any, list[_Programme]] = {}
    for each in sorted(programmes, key=lambda one: float(one.problem.C.max())):
        groups.setdefault((each.problem.loss, each.problem.y.tobytes()), []).append(each)
    first = []
    for group in groups.values():
        first.append(group[0])
        for before, each in itertools.pairwise(group):
            small, large = before.problem.C, each.problem.C
            if small.max() < large.max() and np.allclose(
                small / small.max(), large / large.max(), rtol=1e-12, atol=0.0
            ):
                before.next = each
            else:
                first.append(each)
    return first


def _renew(programmes: Sequence[_Programme]) -> None:
    """The gradients anew, by one product."""
    if programmes:
        product = programmes[0].problem.columns.product(np.column_stack([each.a for each in programmes]))
        for j, each in enumerate(programmes):
            each.g = product[:, j] + each.diagonal * each.a - each.problem.y
            each.is_exact = True
