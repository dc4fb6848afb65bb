"""One problem with a loss, its columns of the Gram matrix, and the certificate of an answer.

    P(a, b) = 1/2 a^T K a + sum_i C_i loss(y_i, (K a)_i + b)                        C_i = w_i / (2 alpha)
    D(a)    = -1/2 a^T K a - sum_i C_i loss*(y_i, -a_i / C_i)                       1^T a = 0 with an intercept

P is half of the objective over alpha; D <= P for every a and b (weak duality), with equality at the answer: the gap
between the two bounds how far P is from its minimum, whoever found a and b. At the answer -a_i / C_i is a subgradient
of the loss at f_i + b for every row (the conditions of Karush, Kuhn and Tucker); rows with a_i = 0 could be left out.

With an intercept D(a) is a bound for 1^T a = 0 alone: P(a, b) - D(a) + b 1^T a is what is never negative, and the fit
without an intercept has D(a) = P(a, 0), above the minimum over b. Where 1^T a is more than rounding the bound is D at
a + v, the nearest point of :meth:`LossProblem.feasible`, with (a + v)^T K (a + v) <= a^T K a + 2 v^T K a +
(sum_i |v_i| k(x_i, x_i)^1/2)^2 instead of a product with K: a bound for every a, and as good as D(a + v) where v is
small.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from dkrr.errors import NotPositiveDefiniteError
from dkrr.kernels import Kernel
from dkrr.linalg.loss import Loss
from dkrr.linalg.products import kernel_block, kernel_product
from dkrr.store.chunks import buffer

__all__ = ["Certificate", "GramColumns", "LossProblem", "Minimiser", "certify", "root_of"]

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
# Rows of the blocks for which one piece of memory is used again and again.
MAX_BLOCK = 6_000
MIN_ENTRIES_OF_A_THREAD = 1_000_000
# of |a|_1: how large 1^T a may be by the rounding of sums
EPS = float(np.finfo(np.float64).eps)
SUM_ROUNDING = 8 * EPS


class GramColumns:
    """Columns of K, made of rows when they are needed and never kept; or of a given matrix.

    Parameters
    ----------
    kernel
        Resolved; None where ``rows`` is K itself.
    rows : (n, d) float64
        Centred if the kernel is stationary.
    num_threads
        Threads that share a product.
    """

    def __init__(self, kernel: Kernel | None, rows: Matrix, num_threads: int = 1) -> None:
        self.kernel, self.rows, self.num_threads = kernel, rows, num_threads

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def diagonal(self) -> Vector:
        """k(x_i, x_i) (n,)."""
        return self.rows.diagonal() if self.kernel is None else self.kernel.diag(self.rows)

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """As many threads, which keep their memory from one product or block to the next."""
        return ThreadPoolExecutor(self.num_threads)

    def part(self, index: NDArray[np.intp]) -> GramColumns:
        """Those of some rows alone: of K[index, index]."""
        rows = self.rows[np.ix_(index, index)] if self.kernel is None else np.ascontiguousarray(self.rows[index])
        return GramColumns(self.kernel, rows, self.num_threads)

    def block(self, index: NDArray[np.intp], *, reuse: bool = False) -> Matrix:
        """K[index, index] (k, k); with ``reuse`` in memory that this thread's next one overwrites."""
        k = len(index)
        if self.kernel is None:
            return self.rows[np.ix_(index, index)]
        chosen = np.ascontiguousarray(self.rows[index])
        # one may be larger than the one before: pages are mapped when they are first used, and stay
        out = buffer("block", (max(MAX_BLOCK, k) ** 2,), np.float64)[: k * k] if reuse else np.empty(k * k)
        return kernel_block(self.kernel, chosen, chosen, out.reshape(k, k), same=True)

    def product(self, values: Matrix, some: NDArray[np.intp] | None = None) -> Matrix:
        """K values, (n,) or (n, t), of the columns where any of the values is not zero; of ``some`` rows alone."""
        index = np.flatnonzero(values if values.ndim == 1 else values.any(axis=1))
        if self.kernel is None and some is None and 4 * len(index) > len(values):  # without a copy of these columns
            return np.asarray(self.rows @ values)
        left = self.rows if some is None else self.rows[some]
        if self.kernel is None:
            return np.asarray(left[:, index] @ values[index])
        kernel, chosen = self.kernel, np.ascontiguousarray(self.rows[index])
        factors = values[index].reshape(len(index), values[:1].size)
        out = np.zeros((len(left), factors.shape[1]))

        def part(start: int, stop: int) -> None:
            rows, none = left[start:stop], np.empty((stop - start, 0))
            if len(chosen) < len(rows):  # the long side is the one that compiled code takes in vectors
                kernel_product(kernel, chosen, rows, none, none[: len(chosen)], u=factors, out_t=out[start:stop])
            else:
                kernel_product(kernel, rows, chosen, factors, out[start:stop])

        threads = max(1, min(self.num_threads, len(left) * len(index) // MIN_ENTRIES_OF_A_THREAD))
        ends = np.linspace(0, len(left), threads + 1).astype(int).tolist()
        if len(index):
            list((map if threads == 1 else self.pool.map)(part, ends[:-1], ends[1:]))
        return out.reshape(len(left), *values.shape[1:])


@dataclass(frozen=True)
class LossProblem:
    """One target: ``C`` (n,) are w_i / (2 alpha), 0 for rows that do not count; labels are -1 and +1."""

    columns: GramColumns
    y: Vector
    C: Vector
    loss: Loss
    fit_intercept: bool = True

    @cached_property
    def domain(self) -> tuple[Vector, Vector]:
        """The ends of the domain of the conjugate, for each row."""
        return self.loss.domain(self.y)

    @cached_property
    def bounds(self) -> tuple[Vector, Vector]:
        """The ends of what a_i may be: -C_i times the domain of the conjugate."""
        low, high = self.domain
        with np.errstate(invalid="ignore"):
            return np.where(self.C > 0, -self.C * high, 0.0), np.where(self.C > 0, -self.C * low, 0.0)

    def slopes(self, a: Vector) -> Vector:
        """-a_i / C_i, which are subgradients of the loss at the answer; 0 where C_i is. At a bound: the end itself."""
        s = np.divide(-a, self.C, out=np.zeros_like(a), where=self.C > 0)
        (low, high), (least, most) = self.domain, self.bounds
        s = np.where((a >= least) & (a <= most), np.clip(s, low, high), s)
        s[a == most] = low[a == most]
        s[a == least] = high[a == least]
        s[self.C <= 0] = 0.0
        return s

    @cached_property
    def rounding(self) -> float:
        """What of an objective is rounding alone: eps times the smaller one of two of f = 0 and b = 0.

        Its own, were all rows the least heavy; and y^T y / max k_ii, what |f|^2 is at least near the targets: neither a
        heavy row nor a large C makes more of it.
        """
        if not self.C.any():
            return 0.0
        losses = float(self.loss.value(self.y, np.zeros_like(self.y)).sum())
        largest = float(self.columns.diagonal.max())
        least = float(self.C[self.C > 0].min()) * losses
        return EPS * (min(least, float(self.y @ self.y) / largest) if largest > 0 else least)

    def feasible(self, a: Vector) -> Vector:
        """a moved to where D(a) is finite: into its bounds, and to 1^T a = 0 with an intercept.

        What is 0 or at a bound stays there, as long as the sum is small; otherwise the larger side gives way.
        """
        low, high = self.bounds
        a = np.clip(a, low, high)
        total = float(a.sum()) if self.fit_intercept else 0.0
        room = np.minimum(np.minimum(a - low, high - a), np.abs(a))
        if abs(total) > room.sum():
            room = np.where(a * total > 0, np.abs(a), 0.0)
        return a - room * (total / room.sum()) if total else a

    def allowed(self, slopes: Vector) -> tuple[Vector, Vector]:
        """The ends of the predictions at which coefficients with these :meth:`slopes` would be right."""
        low, high = self.loss.predictions(self.y, slopes)
        return np.where(self.C > 0, low, -np.inf), np.where(self.C > 0, high, np.inf)


@dataclass(frozen=True)
class Certificate:
    """What is known of an answer, from K in float64.

    Parameters
    ----------
    primal, dual
        P(a, b), and D at the nearest point with 1^T a = 0: bounds of the minimum from both sides. P is that of
        predictions which are moved towards where their coefficients are right, by no more than their rounding.
    gap
        (P - D) / P; 0 where both are rounding alone, as of a fit without errors.
    kkt
        How far the prediction of a row is, at most, from those at which its coefficient at that point would be right,
        where that changes the objective at all: in units of the predictions.
    num_support
        Rows with a_i != 0.
    """

    primal: float
    dual: float
    gap: float
    kkt: float
    num_support: int


def root_of(function: Callable[[float], float], start: float, step: float) -> float:
    """Where an increasing function is 0, looked for from ``start``; where it is nowhere, the last point looked at."""
    value = function(start)
    direction, end = -float(np.sign(value)), start
    for _ in range(60 if value else 0):
        start, end = end, end + direction * step
        if function(end) * direction >= 0:
            return float(brentq(function, start, end, xtol=1e-300, rtol=4 * EPS, disp=False))
        step *= 2.0
    return end


def certify(problem: LossProblem, a: Vector, b: float, f: Vector | None = None) -> Certificate:
    """Both objectives at (a, b); ``f`` = K a where it is known, evaluated otherwise (n times support entries)."""
    f = problem.columns.product(a) if f is None else f
    norm, slopes = 0.5 * float(a @ f), problem.slopes(a)
    length = float(np.abs(a) @ np.sqrt(np.maximum(problem.columns.diagonal, 0.0)))
    # f itself is rounding where it is (nearly) 0: of sums whose terms are at most |a_j| (k_ii k_jj)^1/2
    lost = problem.rounding + 1e-10 * float(np.abs(a) @ np.abs(f)) + len(a) * EPS * length**2
    if norm < -lost:
        raise NotPositiveDefiniteError(
            f"a^T K a is {2 * norm:.3g} for the coefficients a of a fit: the Gram matrix has negative eigenvalues, "
            "so that the objective has no minimum that could be certified",
            hint="take a kernel that is positive semi-definite",
        )
    primal = norm
    if problem.fit_intercept and abs(float(a.sum())) > SUM_ROUNDING * float(np.abs(a).sum()):
        point = problem.feasible(a)
        move = point - a
        moved = float(np.abs(move) @ np.sqrt(np.maximum(problem.columns.diagonal, 0.0)))
        norm, slopes = norm + float(move @ f) + 0.5 * moved**2, problem.slopes(point)
    dual = -norm - float(problem.C @ problem.loss.conjugate(problem.y, slopes))
    low, high = problem.allowed(slopes)
    u = f + b
    kkt = float(np.maximum(np.maximum(low - u, u - high), 0.0).max())
    # a heavy row makes much of its rounding: predictions and targets are known to ``rounded``, and no better
    rounded = 4 * EPS * (np.abs(problem.y) + np.abs(u))
    right = u + np.clip(np.clip(u, low, high) - u, -rounded, rounded)
    primal += float(problem.C @ problem.loss.value(problem.y, right))
    is_zero = max(abs(primal), primal - dual) <= problem.rounding
    gap = 0.0 if is_zero else (primal - dual) / primal
    return Certificate(primal, dual, gap, kkt, int(np.count_nonzero(a)))


@dataclass(frozen=True)
class Minimiser:
    """An answer: coefficients (n,), the intercept, K a (n,) in float64, its certificate, and how it was reached.

    ``history`` has (iteration, gap, kkt) of some iterations, the last one among them.
    """

    a: Vector
    b: float
    f: Vector
    certificate: Certificate
    num_iterations: int
    history: list[tuple[int, float, float]]
