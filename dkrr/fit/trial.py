"""How many iterations a solver will need, and what its arithmetic can hold: the solver itself, on a sample of the rows.

Conjugate gradients with a preconditioner F F^T + alpha I of rank r see the part of K that F leaves, against alpha. So F
is made of r rows of a pool, its true rank, and the solver runs on s other rows. Twice, and both are extrapolated:

    alpha as it is          right where rows are far from each other: what is left is nearly diagonal, whatever n is
    alpha s / n             right where rows are close: the eigenvalues of K grow like n, those of the sample like s

The counts on s / 2 and s rows say how they go on growing. Without a preconditioner the smaller of the two
extrapolations is taken: from samples of 1,000 it was compared with solves of 4,000 rows of real data (matern 3/2 and
rbf, widths 0.5 to 80, alpha 1e-7 to 1e-2) that ended within 200 iterations, and was within a factor of 1.5 in two of
three cases. With one they are the ends of a range (:func:`extrapolate`), far too many where K is close to
the identity, for which there is no use.

A float32 product is off by E with |E| about eps32 |K|: where |E| is not below alpha, K + E + alpha I may be indefinite
and refinement does not contract. |E| is measured on the sample, by the product itself, and grows with n as it does from
s / 2 to s rows, between the root of n (random errors) and n (systematic ones). On the same data float32 products led to
the answer wherever |E| <= 0.4 alpha, and nowhere from 2 alpha on.

The factor of mixed precision is tried with alpha s / n and the shifts that the solver would take.

You need this before anything is known of a matrix but its rows. It is an estimate, given as a range.

Cost: r^2 flops a row of pool, 3 r^2 a row of the sample, s^2 / 2 entries, and for each iteration 4 s (s + 2 r) flops
a rank and target, r the largest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import ceil, log, log2
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, solve_triangular
from scipy.linalg.lapack import dpotrf, spotrf

from dkrr.dataset import Dataset
from dkrr.fit.choices import Iterations
from dkrr.kernels import Kernel
from dkrr.kernels.pairwise import MIN_COLUMNS
from dkrr.linalg.cg_solver import EPS32, FIRST_SHIFT, MAX_SHIFTS, SHIFT_GROWTH
from dkrr.linalg.operators import dots, ratio, read_rows, rows_of
from dkrr.linalg.preconditioner import ShiftedGram, pivot_rows
from dkrr.linalg.products import kernel_product

FloatArray = NDArray[np.float64]

SAMPLE_ROWS = 2000

NUM_TARGETS = 2


MOST_ITERATIONS = 300

# how much longer than on a processor of its own a trial may take
MOST_SLOWDOWN = 4.0

# fewer of them say nothing of how the rate improves
LEAST_ITERATIONS = 10

# a sample is read from at most so many pieces of the data
NUM_PIECES = 64

# rows of the pool for each column of the largest preconditioner that is tried, and flops a second of a trial
POOL_ROWS, POOL_RATE = 3, 2e10

# rows from which |E| is measured, at most
ROUNDING_ROWS = 4096

# how much more iterations may be without a preconditioner: 0.56 of the true number were expected in one of ten cases
PLAIN_MARGIN = 1.4

# steps of the power iteration for |E|, and its columns
POWER_STEPS, POWER_COLUMNS = 4, 4

# float32 products are supported where their error is at most this share of alpha
SUPPORTED = 0.5
# the largest power of n with which iterations grow: the condition does like n^2, where rows come ever closer
LARGEST_POWER = 1.0


@dataclass
class Trial:
    """A sample of the rows of a problem, on which solvers are tried.

    Parameters
    ----------
    kernel
        Resolved.
    rows : (s + p, d), targets : (s, t)
        A random sample in random order, as the kernel sees it, and targets of the first s rows times the roots of the
        weights. Preconditioners are made of the other p rows; of the same ones where there are no others.
    num_rows
        n.
    root_weight : (s + p,) or None
        Of the sampled rows.
    seconds
        About what one question may take; iterations that are not done by then are counted at the rate so far.
    """

    kernel: Kernel
    rows: FloatArray
    targets: FloatArray
    num_rows: int
    root_weight: FloatArray | None = None
    seed: int = 0
    seconds: float = 1.5

    def __post_init__(self) -> None:
        for name in ("_cg", "mixed", "rounding"):  # each is asked once, for many candidates
            setattr(self, name, cache(getattr(self, name)))
        s = len(self.targets)
        self._sizes, self._rhs = (max(1, s // 2), s), np.ascontiguousarray(self.targets[:, :NUM_TARGETS])

    def cg(
        self,
        alpha: Sequence[float],
        ranks: Sequence[int],
        tol: float,
        precision: Literal["float64", "mixed"] = "float64",
    ) -> dict[int, Iterations]:
        """Iterations of the slowest target for each rank (0: no preconditioner), for the smallest alpha.

        Ranks beyond the largest that is tried are given its iterations.
        """
        found = self._cg(min(alpha), tuple(ranks), tol)
        if precision == "float64":
            return found
        more = self.refinements(min(alpha), tol) - 1
        # each of them begins anew: without a preconditioner that costs what conjugate gradients had learnt
        again = {rank: count.high if rank else 2 * count.high for rank, count in found.items()}
        return {rank: Iterations(count.low + more / 2, again[rank] + more) for rank, count in found.items()}

    def refinements(self, alpha: float, tol: float) -> int:
        """True residuals until float32 products lead to ``tol``: each one reduces it by |E| / alpha at best."""
        factor = min(max(self.rounding() / alpha if alpha else 1.0, 1e-3), SUPPORTED)
        return ceil(log(tol) / log(factor))

    @cached_property
    def _system(self) -> FloatArray:
        """S K S of the sample."""
        rows = self.rows[: len(self.targets)]
        root = np.ones(1) if self.root_weight is None else self.root_weight[: len(rows)]
        matrix: FloatArray = self.kernel.block(rows, rows, same=True) * root * root[:, None]
        return matrix

    # --- conjugate gradients ---------------------------------------------------------------------------------------

    def _cg(self, alpha: float, ranks: Sequence[int], tol: float) -> dict[int, Iterations]:
        n, (half, s) = self.num_rows, self._sizes
        affordable = affordable_rank(self.seconds)
        pool = len(self.rows) - s or s
        largest = min(pool, max((rank for rank in ranks if rank <= affordable), default=min(ranks)))
        tried = sorted({min(rank, largest) for rank in ranks})
        factor = self._columns(largest)
        whole = self._counts(slice(0, s), alpha, alpha * s / n, tried, factor, tol)
        # both halves: the counts are small numbers, and one of them alone says little of how they grow
        parts = [slice(0, half), slice(s - half, s)] if half < s else [slice(0, s)]
        halves = [self._counts(part, alpha, alpha * half / n, tried, factor, tol) for part in parts]
        # geometric means
        means = {rank: np.exp(np.log([np.maximum(each[rank], 1.0) for each in halves]).mean(axis=0)) for rank in tried}
        found = {
            rank: extrapolate(tuple(means[rank].tolist()), whole[rank], s, n, preconditioned=rank > 0) for rank in tried
        }
        if 0 in found and n > s:
            # what a preconditioner does not take away is the smallest eigenvalues, which a sample sees least of
            found[0] = replace(found[0], high=ceil(PLAIN_MARGIN * found[0].high))
        for fewer, more in pairwise(tried):  # more pivots leave less; a small sample hardly sees how much
            small, large = found[fewer], found[more]
            found[more] = Iterations(min(small.low, large.low), min(small.high, large.high))
        return {rank: found[min(rank, largest)] for rank in ranks}

    def _counts(
        self, part: slice, alpha: float, scaled: float, ranks: Sequence[int], factor: FloatArray, tol: float
    ) -> dict[int, tuple[float, float]]:
        """Iterations with alpha and with alpha s / n for each rank, all of which are done together.

        Where the flops of the time end before the iterations do, their number comes from the rate so far
        (:func:`_iterate`), which improves as they go on: with the same seconds for each, and so fewer iterations, large
        ranks look worse than they are.
        """
        matrix, rhs = np.ascontiguousarray(self._system[part, part]), np.tile(self._rhs[part], 2 * len(ranks))
        each = rhs.shape[1] // 2
        solves = [_whiten(np.ascontiguousarray(factor[:, part]), value) for value in (alpha, scaled)]
        rank_of = np.tile(np.repeat(ranks, each // len(ranks)), 2)

        def precondition(r: FloatArray, going: NDArray[np.intp]) -> FloatArray:
            z, split = r.copy(), int(np.searchsorted(going, each))
            for white, part in zip(solves, (slice(split), slice(split, None)), strict=True):
                # the first r rows of L^-1 F^T are those of the preconditioner of rank r
                kept = rank_of[going[part]]
                w = white[: kept.max(initial=0)]
                z[:, part] -= w.T @ ((np.arange(len(w))[:, None] < kept) * (w @ r[:, part]))
            return z

        alphas = np.repeat([alpha, scaled], each)
        flops = float(rhs.size * (2 * len(rhs) + 4 * len(factor)))
        counts = _iterate(matrix, alphas, rhs, precondition, tol, self.seconds / 2, flops, rank_of > 0)
        own, small = counts.reshape(2, len(ranks), -1).max(axis=2).tolist()
        return dict(zip(ranks, zip(own, small, strict=True), strict=True))

    def _columns(self, rank: int) -> FloatArray:
        """F^T (r, s) at the rows of the sample, F F^T close to S K S; fewer columns where nothing is left.

        F = S K(X, P) L^-T, L L^T = K(P, P), for pivots P of the pool that randomly pivoted Cholesky picks.
        """
        s = len(self.targets)
        rows = self.rows[s:] if len(self.rows) > s else self.rows
        if not rank:
            return np.zeros((0, s))
        pivots = np.ascontiguousarray(rows[pivot_rows(self.kernel, rows, rank, self.seed)])
        square = self.kernel.block(pivots, pivots, same=True)
        square[np.diag_indices_from(square)] *= 1 + 1e-12
        lower, failed = dpotrf(square, lower=1)
        found = failed - 1 if failed else len(pivots)
        there = self.kernel.block(pivots[:found], np.ascontiguousarray(self.rows[:s]))
        if self.root_weight is not None:
            there *= self.root_weight[:s]
        columns: FloatArray = solve_triangular(lower[:found, :found], there, lower=True, check_finite=False)
        return columns

    # --- float32 ---------------------------------------------------------------------------------------------------

    def rounding(self) -> float:
        """|E| for products with all n rows in float32, E = fl32(S K S) - S K S: what v^T A v / v^T v may lose."""
        m = min(len(self.rows), ROUNDING_ROWS)
        large = self._rounding_of(m)
        # products of few rows are made another way, whose errors say nothing of the products with all of them
        power = growth(self._rounding_of(m // 2), large, 0.5, 1.0) if m // 2 >= MIN_COLUMNS else 1.0
        return float(large * max(1.0, self.num_rows / m) ** power)

    def _rounding_of(self, size: int) -> float:
        """|E| of the first rows, by the power method: a lower bound that four columns bring close."""
        rows = np.ascontiguousarray(self.rows[:size])
        rows -= rows.mean(axis=0) if self.kernel.stationary else 0.0
        root = 1.0 if self.root_weight is None else self.root_weight[:size, None]
        v = np.random.default_rng(self.seed).standard_normal((size, POWER_COLUMNS))
        found = 0.0
        for _ in range(POWER_STEPS):
            v = np.ascontiguousarray(root * (v / np.linalg.norm(v, axis=0)))
            single, double = np.zeros_like(v), np.zeros_like(v)
            kernel_product(self.kernel, rows, rows, v, single, same=True, precision="float32")
            kernel_product(self.kernel, rows, rows, v, double, same=True)
            v = root * (single - double)
            found = float(np.linalg.norm(v, axis=0).max())
            if not found:
                break
        return found

    def mixed(self, alpha: Sequence[float], tol: float) -> Iterations:
        """Iterations around a float32 factor, for the smallest alpha."""
        n, (half, s) = self.num_rows, self._sizes
        small, large = (self._mixed_count(size, min(alpha) * size / n, tol) for size in (half, s))
        # the ridge is small for all n rows already: half of what is left of growth
        return (
            Iterations(large, large)
            if n <= s
            else Iterations.around(large * (n / s) ** (growth(small, large, 0.0, 1.0) / 2))
        )

    def _mixed_count(self, size: int, alpha: float, tol: float) -> float:
        """Iterations around the float32 factor, of a shifted matrix where it breaks down."""
        matrix, rhs = np.ascontiguousarray(self._system[:size, :size]), self._rhs[:size]
        trace, identity = float(np.abs(matrix.diagonal()).sum()) + size * alpha, np.eye(size, dtype=np.float32)
        for shift in (0.0, *(FIRST_SHIFT * EPS32 * trace * SHIFT_GROWTH**number for number in range(MAX_SHIFTS))):
            lower, failed = spotrf(matrix.astype(np.float32) + np.float32(alpha + shift) * identity, lower=1)
            if not failed:
                break
        else:
            return MOST_ITERATIONS

        def apply(r: FloatArray, _: NDArray[np.intp]) -> FloatArray:
            scale = np.abs(r).max(axis=0)
            scale[scale == 0] = 1.0
            z = cho_solve((lower, True), (r / scale).astype(np.float32), check_finite=False)
            return np.asarray(z.astype(np.float64) * scale)

        alphas = np.full(rhs.shape[1], alpha)
        return float(_iterate(matrix, alphas, rhs, apply, tol, self.seconds / 3, 4.0 * rhs.size * size).max())


def _whiten(columns: FloatArray, alpha: float) -> FloatArray:
    """W = L^-1 F^T, L L^T = F^T F + alpha I, from F^T (r, s): alpha (F F^T + alpha I)^-1 = I - W^T W."""
    inner = ShiftedGram(columns @ columns.T)
    white: FloatArray = solve_triangular(inner.factor(max(alpha, inner.floor)), columns, lower=True, check_finite=False)
    return white


def _iterate(
    matrix: FloatArray,
    alpha: FloatArray,
    rhs: FloatArray,
    apply: Callable[[FloatArray, NDArray[np.intp]], FloatArray],
    tol: float,
    seconds: float,
    flops: float,
    improves: NDArray[np.bool_] | bool = True,
) -> NDArray[np.float64]:
    """Iterations of each column, of so many ``flops`` for all; where they are too many or take too long, from the rate.

    Those that are done are left out; ``apply`` is given residuals and the numbers of their columns.

    What ``seconds`` allow is counted in flops, so that it does not depend on who else uses the processor; only where
    they last :data:`MOST_SLOWDOWN` times as long, that ends it.

    With a preconditioner the rate only ``improves``: that of the last half of the iterations is closer to what follows
    than the whole. Without one it may become worse again.
    """
    most = min(MOST_ITERATIONS, max(LEAST_ITERATIONS, int(seconds * POOL_RATE / flops)))
    started, norms, r = time.perf_counter(), np.linalg.norm(rhs, axis=0), rhs.copy()
    counts, going, residuals = np.where(norms > 0, 0.0, 1.0), np.arange(len(norms)), [np.ones(len(norms))]
    p = apply(r, going)
    rz = dots(r, p)
    for iteration in range(1, most + 1):
        q = matrix @ p + alpha[going] * p
        r -= ratio(rz, dots(p, q)) * q
        relative = residuals[-1].copy()
        relative[going] = ratio(np.linalg.norm(r, axis=0), norms[going])
        residuals.append(relative)
        counts[(counts == 0) & (relative <= tol)] = iteration
        if counts.all() or (iteration >= 4 and time.perf_counter() - started > MOST_SLOWDOWN * seconds):
            break
        left = counts[going] == 0
        going, r, p, rz = going[left], r[:, left], p[:, left], rz[left]
        z, before = apply(r, going), rz
        rz = dots(r, z)
        p = z + ratio(rz, before) * p
    last, half = np.maximum(relative, 1e-300), iteration // 2
    found = log(tol) / (np.log(np.minimum(last, 0.9)) / iteration)
    if iteration >= LEAST_ITERATIONS:
        recent = np.log(np.clip(last / np.maximum(residuals[half], 1e-300), 1e-300, 0.999)) / (iteration - half)
        found = np.where(improves, np.minimum(found, iteration + np.log(tol / last) / recent), found)
    return np.where(counts > 0, counts, np.ceil(found))


def sample_trial(dataset: Dataset, kernel: Kernel, seconds: float, *, seed: int = 0) -> Trial:
    """A trial on rows of a data set, from pieces spread evenly over it: as many as can be tried in the time.

    Cost: reads at most 64 chunks.
    """
    size = SAMPLE_ROWS if seconds > 2 else SAMPLE_ROWS // 2 if seconds > 0.2 else SAMPLE_ROWS // 4
    n, step, rng = dataset.num_rows, dataset.X.rows_per_chunk, np.random.default_rng(seed)
    starts = list(range(0, n, step))
    if len(starts) > NUM_PIECES:
        starts = [starts[round(k)] for k in np.linspace(0, len(starts) - 1, NUM_PIECES)]
    numbers = np.concatenate([np.arange(start, min(start + step, n)) for start in starts])
    wanted = size + POOL_ROWS * int(affordable_rank(seconds))
    chosen = rng.choice(numbers, min(wanted, len(numbers)), replace=False)
    size = min(size, max(1, len(chosen) // 2)) if len(chosen) < n or n > size else len(chosen)
    x = rows_of(dataset, kernel).take(chosen)
    targets, weight = read_rows(dataset.targets, chosen[:size]), None
    if dataset.weight is not None:
        weight = np.sqrt(read_rows(dataset.weight, chosen)[:, 0])
        targets = targets * weight[:size, None]
    return Trial(kernel, np.ascontiguousarray(x), targets, n, weight, seed, seconds)


def affordable_rank(seconds: float) -> float:
    """The largest preconditioner that can be tried in half of the time: POOL_ROWS r^3 flops."""
    return float(max(1.0, seconds * POOL_RATE / (2 * POOL_ROWS)) ** (1 / 3))


# --- from a sample to all rows ------------------------------------------------------------------------------------


def growth(small: float, large: float, least: float, most: float) -> float:
    """The power of the number of rows with which something grows that was ``small`` on half of them, within bounds."""
    if not small or not large:
        return most
    return min(most, max(least, log2(large / small)))


def extrapolate(
    half: tuple[float, float], whole: tuple[float, float], s: int, n: int, *, preconditioned: bool
) -> Iterations:
    """From samples of s / 2 and s rows to n; each with the iterations for alpha, and for alpha s / n.

        k(n) = k(s) (n / s)^p,    p = log2(k(s) / k(s / 2))

    What the smaller alpha adds on the same rows, q = log(k' / k) / log(n / s), is growth with n that k' has in it
    already: k'(n) = k'(s) (n / s)^max(0, p' - q). The first is right where rows are far from each other, the second
    where they are close. Without a preconditioner the larger of the two is an overestimate. With one the answer lies
    between them, and both are ends of the range: on 15 fits of real rows (n up to 41,157) the true number was 0.7 to
    1.5 times their geometric mean, where the smaller one alone was nearly always below it; and counts of 2 or 3 on a
    sample, which say nothing of growth, stood for 10 iterations at n = 100,000.
    """
    if n <= s:  # alpha s / n is alpha; rounding decides how many the last digits take
        return Iterations.around(min(whole))
    ratio = n / s
    own = whole[0] * ratio ** growth(half[0], whole[0], 0.0, LARGEST_POWER)
    included = log2(max(whole[1] / whole[0], 1.0)) / log2(ratio)
    scaled = whole[1] * ratio ** max(0.0, growth(half[1], whole[1], 0.0, LARGEST_POWER) - included)
    low = Iterations.around(min(own, scaled))
    return Iterations(low.low, Iterations.around(max(own, scaled)).high) if preconditioned else low
