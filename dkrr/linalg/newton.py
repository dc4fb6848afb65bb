"""Newton's method for the smooth losses: each step is a weighted ridge system of the rows with a second derivative.

With u = K a + b 1, g = -C loss'(u), D = diag(C loss''(u)), S = D^1/2, the step from (a, b) to (a + d, b + h) is

    d = g - a - D (K d + h 1),    1^T (a + d) = 0 with an intercept
    d = e + S w,    (S K S + I) w = S^-1 (g - a - e) - S (K e + h 1)    on I, the rows with D_i > 0

for any e that is g - a outside I. Here e is g - a where D_i is tiny, too, and 0 elsewhere: so nothing is divided by a
tiny number (the logistic loss far on the right side), and nothing large cancels (large C). Outside I the coefficient
becomes g_i: of the squared hinge only support vectors remain. For losses of quadratic pieces D is constant on I, so a
step that crosses no kink is the last one, and the number of steps is finite.

Where a whole step does not lower P, the minimiser along it is taken: with K d a trial costs O(n). After each step a and
g are both candidates for the answer, moved into the domain of D(a): at the end that changes nothing but rounding.

Systems of up to ``MAX_DENSE`` rows have a Cholesky factor. Larger ones are solved to one per cent by conjugate
gradients; their preconditioner is S F F^T S + I, with F F^T ~ K of a few columns of K, the same for all steps.

References
----------
Chapelle, Training a support vector machine in the primal, Neural Computation 19, 2007. Keerthi and DeCoste, A modified
finite Newton method for fast solution of large scale linear SVMs, JMLR 6, 2005 (the line search, and the finite end).
Frangella, Tropp and Udell, Randomized Nystrom preconditioning, SIAM J. Matrix Anal. Appl. 44, 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from dkrr.errors import NotPositiveDefiniteError
from dkrr.linalg.cg import CGState, Preconditioner, conjugate_gradients
from dkrr.linalg.loss import PiecewiseQuadratic, make_loss
from dkrr.linalg.loss_problem import GramColumns, LossProblem, Matrix, Minimiser, Vector, certify, root_of
from dkrr.linalg.operators import dots, norms, ratio, weighted
from dkrr.linalg.preconditioner import ShiftedGram, pivot_rows
from dkrr.linalg.solution import IterativeSettings
from dkrr.tiles.blas import potrf, trsm_right

__all__ = ["newton"]

# rows of a system with a factor: 288 MB for K, and as much again for the factor
MAX_DENSE = 6_000
MAX_ITER = 200
# steps in a row that neither halve the gap nor lower P: floating point allows no more
MAX_STALLS = 3
# of C times the mean of K_ii: beyond it, the answer of a STAGE times smaller C, to this gap, is the start
MAX_STIFFNESS, STAGE, STAGE_TOL = 100.0, 100.0, 0.3
# of the solution of a system by conjugate gradients, relative, in its norm; with 0.1 there are more steps, and more
# products where C is large. The gap falls by its square in a step.
ACCURACY = 0.01
# of the preconditioner
MAX_RANK, MAX_BYTES = 500, 256 << 20
# D_i below this part of the largest one is tiny
TINY = 1e-6
EPS = float(np.finfo(np.float64).eps)

Index = NDArray[np.intp]


def newton(
    problem: LossProblem,
    *,
    tol: float = 1e-6,
    max_iter: int | None = None,
    start: Vector | None = None,
    progress: Callable[[int, float, Callable[[], Vector]], None] | None = None,
) -> Minimiser:
    """Minimise P(a, b) for a smooth loss until the gap of an answer is at most ``tol``.

    Parameters
    ----------
    problem
        With a smooth loss. K may be singular, and C of any size.
    tol
        On (P - D) / P. Where rounding keeps the gap above it, the best answer that was found is returned.
    max_iter
        Steps, those for the smaller C that a large one begins with among them; None means 200.
    start : (n,), optional
        Coefficients to begin with; 0 without them.
    progress
        Called with the number of steps and the smallest gap.

    Returns
    -------
    Minimiser
        Its certificate says whether ``tol`` was reached.

    Raises
    ------
    NotPositiveDefiniteError
        S K S + I is not: K has negative eigenvalues.

    Cost
    ----
    A step: |I|^3 / 3 flops and three products with K, which is evaluated once; 16 n^2 bytes. With more rows: as many
    products with K_II as the conjugate gradients have iterations, three with K, and the 8 n rank bytes of F.
    """
    columns, n = problem.columns, len(problem.y)
    if columns.kernel is not None and n <= MAX_DENSE:
        problem = replace(problem, columns=GramColumns(None, columns.block(np.arange(n))))
    start = None if start is None else problem.feasible(start)
    return _minimise(problem, _Systems(problem), tol, MAX_ITER if max_iter is None else max_iter, start, progress)


def _minimise(
    problem: LossProblem,
    systems: _Systems,
    tol: float,
    limit: int,
    a: Vector | None,
    progress: Callable[[int, float, Callable[[], Vector]], None] | None,
) -> Minimiser:
    """:func:`newton`, for a large C from the answer of a smaller one: each step would cross few kinks otherwise."""
    done = 0
    has_kinks = isinstance(problem.loss, PiecewiseQuadratic) and problem.loss != make_loss("square")
    if a is None and has_kinks and problem.C.max() * systems.scale > MAX_STIFFNESS:
        easier = replace(problem, C=problem.C / STAGE)
        stage = _minimise(easier, systems, STAGE_TOL, limit, None, None)
        a, done = stage.a, stage.num_iterations
    a = np.zeros(len(problem.y)) if a is None else a
    f = problem.columns.product(a)
    b = _best_intercept(problem, f, 0.0)
    best, stalls = _answer(problem, a, f, b), 0
    history = [(done, best.certificate.gap, best.certificate.kkt)]
    while best.certificate.gap > tol and done < limit and stalls < MAX_STALLS:
        gap, primal = max(best.certificate.gap, EPS), _primal(problem, a, f, b)
        a, f, b = _step(problem, systems, a, f, b)
        best = min(best, _answer(problem, a, f, b), key=_gap)
        is_better = max(best.certificate.gap, EPS) < 0.5 * gap or _primal(problem, a, f, b) < primal * (1 - 100 * EPS)
        stalls = 0 if is_better else stalls + 1
        done += 1
        history.append((done, best.certificate.gap, best.certificate.kkt))
        if progress is not None:
            progress(done, best.certificate.gap, lambda a=best.a: a)  # type: ignore[misc]
    return replace(best, num_iterations=done, history=history)


def _primal(problem: LossProblem, a: Vector, f: Vector, b: float) -> float:
    return 0.5 * float(a @ f) + float(problem.C @ problem.loss.value(problem.y, f + b))


# --- one step ----------------------------------------------------------------------------------------------------


def _step(problem: LossProblem, systems: _Systems, a: Vector, f: Vector, b: float) -> tuple[Vector, Vector, float]:
    """a, K a and b after a step."""
    u = f + b
    g = -problem.C * problem.loss.derivative(problem.y, u)
    d = problem.C * problem.loss.second(problem.y, u)
    is_large = d > TINY * d.max()
    base = np.where(is_large, a, g)  # a + e
    inside = np.flatnonzero(d)
    root = np.sqrt(d[inside])
    full, shift = base.copy(), 0.0
    if len(inside):
        right = np.where(is_large, g - a, 0.0)[inside] / root - root * problem.columns.product(base - a)[inside]
        columns = [right, root] if problem.fit_intercept else [right]
        solved = systems.solve(inside, root, np.stack(columns, axis=1))
        w = solved[:, 0]
        if problem.fit_intercept and root @ solved[:, 1] > 0:
            shift = float((base.sum() + root @ w) / (root @ solved[:, 1]))
            w = w - shift * solved[:, 1]
        full[inside] += root * w
    whole = problem.columns.product(full)
    t = _minimum_along(problem, a, f, u, full - a, whole - f, whole - f + shift)
    if t != 1.0:
        full, whole = a + t * (full - a), f + t * (whole - f)
    return full, whole, b + t * shift


def _minimum_along(
    problem: LossProblem, a: Vector, f: Vector, u: Vector, a_step: Vector, f_step: Vector, u_step: Vector
) -> float:
    """A t in (0, 1] at which P at a + t a_step, u + t u_step is lower: 1 where that is so, otherwise the minimiser.

    Beyond 1 P may be lower still, but what K does not see of a would grow without bound.
    """
    linear, square = float(a @ f_step), float(a_step @ f_step)
    weighted = problem.C * u_step

    def slope(t: float) -> float:
        return linear + t * square + float(weighted @ problem.loss.derivative(problem.y, u + t * u_step))

    def value(t: float) -> float:
        return t * linear + 0.5 * t * t * square + float(problem.C @ problem.loss.value(problem.y, u + t * u_step))

    first = slope(0.0)
    if value(1.0) - value(0.0) <= 1e-4 * first or first >= 0 or slope(1.0) <= 0:
        return 1.0
    return root_of(slope, 0.0, 1.0)


def _best_intercept(problem: LossProblem, f: Vector, b: float) -> float:
    """The minimiser of P over b; 0.0 without an intercept."""
    if not problem.fit_intercept:
        return 0.0
    step = float(np.ptp(problem.y)) or 1.0
    return root_of(lambda b: float(problem.C @ problem.loss.derivative(problem.y, f + b)), b, step)


# --- answers -----------------------------------------------------------------------------------------------------


def _gap(one: Minimiser) -> float:
    return one.certificate.gap


def _answer(problem: LossProblem, a: Vector, f: Vector, b: float) -> Minimiser:
    """The better one of g at the best b, and a with g_i for every a_i that is not within its bounds."""
    g = -problem.C * problem.loss.derivative(problem.y, f + _best_intercept(problem, f, b))
    low, high = problem.bounds
    inside = np.where((a > low) & (a < high), a, g)
    candidates = np.stack([problem.feasible(inside), problem.feasible(g)], axis=1)
    products = problem.columns.product(candidates)
    found = []
    for one, product in zip(candidates.T.copy(), products.T.copy(), strict=True):
        intercept = _best_intercept(problem, product, b)
        found.append(Minimiser(one, intercept, product, certify(problem, one, intercept, product), 0, []))
    return min(found, key=_gap)


# --- linear systems ----------------------------------------------------------------------------------------------


class _Systems:
    """Solves (S K_II S + I) w = r for the I and S of any step."""

    def __init__(self, problem: LossProblem) -> None:
        self.columns = problem.columns
        self.scale = float(self.columns.diagonal.mean())

    def solve(self, inside: Index, root: Vector, right: Matrix) -> Matrix:
        """w (|I|, t) for r (|I|, t) and the diagonal of S (|I|,)."""
        if len(inside) > MAX_DENSE:
            return self._iterate(inside, root, right)
        system = weighted(self.columns.block(inside), root)
        system[np.diag_indices_from(system)] += 1.0
        try:  # it is symmetric: the transpose is what LAPACK overwrites without a copy
            factor = cho_factor(system.T, lower=True, overwrite_a=True, check_finite=False)
        except LinAlgError as exc:
            raise _indefinite(root) from exc
        return np.asarray(cho_solve(factor, right, check_finite=False))

    def _iterate(self, inside: Index, root: Vector, right: Matrix) -> Matrix:
        columns = self.columns
        part = None if columns.kernel is None else columns.part(inside)  # of a given matrix it would be a copy

        def multiply(p: Matrix) -> Matrix:
            if part is not None:
                return root[:, None] * part.product(root[:, None] * p)
            whole = np.zeros((len(columns.rows), p.shape[1]))
            whole[inside] = root[:, None] * p
            return root[:, None] * columns.product(whole)[inside]

        precondition = _LowRank(root[:, None] * self._panel[inside]) if self._panel.shape[1] else Preconditioner()
        found: CGState | None = None
        aim = np.full(right.shape[1], ACCURACY)
        while found is None or (found.converged.all() and (found.relative_residual > aim).any()):
            settings = IterativeSettings(tol=float(aim[aim > 0].min(initial=ACCURACY)), allow_unconverged=True)
            begin, ones = None if found is None else found.x, np.ones(right.shape[1])
            try:
                found = conjugate_gradients(multiply, right, ones, precondition, settings, start=begin)
            except NotPositiveDefiniteError as exc:
                raise _indefinite(root) from exc
            # |w* - w|_A <= |r - A w| as A >= I, and it is |w*|_A = (w*^T r)^1/2 that the accuracy is relative to
            aim = ACCURACY * ratio(np.sqrt(np.maximum(dots(found.x, right), 0.0)), norms(right))
        return found.x

    @cached_property
    def _panel(self) -> Matrix:
        """F (n, r) with F F^T ~ K; r is 0 where K is 0, or not positive semi-definite."""
        kernel, rows = self.columns.kernel, self.columns.rows
        rank = min(MAX_RANK, len(rows), max(1, MAX_BYTES // (8 * len(rows))))
        if kernel is None:
            pivots = np.random.default_rng(0).choice(len(rows), rank, replace=False)
            panel = np.ascontiguousarray(rows[:, pivots])
        else:
            pivots = pivot_rows(kernel, rows, rank, seed=0)
            panel = kernel.block(rows, np.ascontiguousarray(rows[pivots]))
        square = panel[pivots].copy()
        # nearly singular: a shift makes F F^T a little smaller than it could be, and always positive semi-definite
        square[np.diag_indices_from(square)] += 1e-12 * max(1e-300, float(square.trace()))
        if potrf(square):
            return np.zeros((len(rows), 0))
        trsm_right(panel, square)
        return panel


def _indefinite(root: Vector) -> NotPositiveDefiniteError:
    return NotPositiveDefiniteError(
        f"S K S + I of {len(root):,} rows is not positive definite (S^2 = C loss'', up to {root.max() ** 2:.2g})",
        hint="use a positive semi-definite kernel, or lower C (raise alpha)",
    )


class _LowRank(Preconditioner):
    """F F^T + I as the preconditioner of conjugate gradients, F (k, r)."""

    def __init__(self, panel: Matrix) -> None:
        self.panel, self.small = panel, ShiftedGram(panel.T @ panel)
        self.description = f"columns of K, of rank {panel.shape[1]:,}"

    def apply(self, r: Matrix, alpha: Vector) -> Matrix:
        """(F F^T + shift I)^-1 R by Woodbury's formula; the shift is alpha = 1 unless that is lost in F^T F."""
        shift = np.maximum(alpha, self.small.floor)
        return np.asarray((r - self.panel @ self.small.solve(self.panel.T @ r, shift)) / shift)
