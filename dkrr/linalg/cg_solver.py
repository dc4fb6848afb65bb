"""The iterative solver: conjugate gradients around products that run on the workers.

The same two verbs as the direct solver: ``prepare`` sees only the matrix and says what the preconditioner is, ``solve``
takes the right-hand sides, with an alpha for each. The preconditioner is made when it is first applied: a start that is
good already is seen by its residual, before anything is built. With a low-rank preconditioner, or none, nothing in the
store is as large as n^2, unless the iterations read a stored Gram matrix; with a float32 factor this is the solver of
mixed precision.

With an intercept conjugate gradients are the same iteration in the plane
s^T u = 0:

    P A P u = P S Y,    P = I - s s^T / s^T s,    b = s^T (S Y - A u) / s^T s

This is the bordered system of :mod:`dkrr.linalg.operators` with b eliminated, and P A P is positive definite in the
plane, its eigenvalues within those of A. The residual of an iterate is P (S Y - A u) = S Y - A u - b s with the best b
for this u: the residual of the bordered system itself. So ``tol``, restarts, checkpoints and warm starts mean what they
mean without an intercept, and no column is solved for besides the targets. (With v = A^-1 s as one more column its
error would enter that of every target, times b.)

The preconditioner M of A becomes that of the bordered system with M in place of A,

    r -> z - b m,   z = M^-1 r,   m = M^-1 s,   b = s^T z / s^T m,

which is exact where M is.

**Mixed precision**: the preconditioner is a factor of the same matrix in float32, which leaves a few iterations.

    P = L L^T = A + shift I    in float32, shift 0 unless that breaks down
    A u = S Y                  by conjugate gradients with P^-1, products and residuals in float64

Half the disk and about half the time of a float64 factor, for the float64 answer: what the true residual says does not
depend on the factor. Where A + alpha I is too ill-conditioned for a float32 factor, a shift is added *to the
preconditioner only*, which costs iterations; that is logged, and stands in the solution's message. A fit that is
continued finds the factor of the shift that it had come to.

**The factor of another alpha, or of the first rows,** that an earlier fit left in the store:

    P = K + alpha' I,     eigenvalues of P^-1 (K + alpha I) between alpha / alpha' and 1 (or 1 and alpha / alpha')

so conjugate gradients take about sqrt(alpha / alpha') / 2 ln(2 / tol) iterations, whatever the kernel: some 15 for
twice the alpha. Rows that the factor does not know are divided by their diagonal entry of A, and the preconditioner is
block diagonal. On 250 normal rows with rbf, matern and laplacian kernels 4 % of new rows left a tenth to nine tenths of
the iterations, 20 % about as many as without a preconditioner, more made it worse than none: extend the factor then.

How many iterations are left is told by the residuals so far, and, before they tell, by what the plan foresaw:

    log |r_k| is about a - s k    =>    (log |r_k| - log tol) / s  iterations more

for the least residual so far, which neither the jumps of conjugate gradients turn nor a true residual that takes the
place of a recursive one; s is its slope over the later half of the iterations. Up to the upper end of the plan's range
the number stays between its lower end and twice its upper end. Near to ``tol`` it is rounding that decides, and the
iteration ends by itself: there it is not given up for another way.

Cost
----
An iteration is one pass over n^2 / 2 kernel entries for all columns and alphas. The driver holds about 8 n t doubles.
In the plane 4 n t flops more a product and an application; M^-1 s once for each distinct alpha, which is kept. An
application of a factor reads it twice, n^2 elements: bound by memory bandwidth for a few columns.

References
----------
Gould, Hribar and Nocedal, On the solution of equality constrained quadratic programming problems arising in
optimization, SIAM J. Sci. Comput. 23 (2001). Higham and Mary, Mixed precision algorithms in numerical linear algebra,
Acta Numerica 31 (2022), section 7; Higham and Pranesh, Exploiting lower precision arithmetic in solving symmetric
positive definite linear systems and least squares problems, SIAM J. Sci. Comput. 43 (2021), for the shift.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import ceil, inf, log
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import (
    ConvergenceError,
    DataError,
    LockedError,
    NotPositiveDefiniteError,
    NumericalError,
    ParameterError,
    StoreError,
)
from dkrr.linalg.catalogue import Ancestor, ancestors, factor_fields, key_of, short_name
from dkrr.linalg.cg import CGState, Checkpoint, Preconditioner, conjugate_gradients
from dkrr.linalg.direct import CholeskyFactor, factor_location
from dkrr.linalg.matmul import OperatorProduct, sampled_row_sums
from dkrr.linalg.operators import (
    MAX_BLOCK_COLUMNS,
    BlockColumns,
    FloatMatrix,
    FloatVector,
    RidgeOperator,
    add_scaled,
    largest,
    norms,
    ratio,
)
from dkrr.linalg.preconditioner import LowRank, choose_rank, low_rank_fields
from dkrr.linalg.solution import Foreseen, IterativeSettings, Solution, is_limit
from dkrr.linalg.triangular import substitute
from dkrr.linalg.workspace import ResidualTrace, Workspace, keep_for_others
from dkrr.store.chunks import ChunkArray, FloatArray
from dkrr.store.files import name_of, place, read_json, remove_array
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileMatrix

logger = logging.getLogger("dkrr.linalg")

# fewer points tell nothing, more are of an earlier stage of the iteration
LEAST_POINTS, MOST_POINTS = 5, 40
NOT_MADE = "none was needed"
# times tol: there rounding may stand between a residual and tol, which three checks tell
NEAR = 1e3
# more new rows than this make a block diagonal preconditioner worse than it is worth
MAX_NEW_ROWS = 0.04
# In parts of eps32 times the trace, which bounds how far rounding moves an eigenvalue. On matern kernels of condition
# 1e9 a tenth was enough for 1,500 and 4,000 rows, and iterations grow with the root of the shift.
FIRST_SHIFT = 0.1
SHIFT_GROWTH = 10.0
MAX_SHIFTS = 4
# Iterations that look for a direction without curvature: duplicated rows and matrices of low rank showed one within 10.
NUM_CURVATURES = 16
# A pivot further below zero than this is no rounding of the matrix, and a shift that mends it is no small one.
NOT_ROUNDING = 10.0
EPS32 = float(np.finfo(np.float32).eps)


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
        """The largest relative residual of all columns after an iteration; the least so far is what counts."""
        least = self._points[-1][1] if self._points else inf
        self._points.append((iteration, min(least, log(max(relative, 1e-300))), self.clock()))

    @property
    def iterations_left(self) -> float | None:
        """By the trend alone; infinite where the residual does not fall, None where there is no trend yet."""
        if len(self._points) < LEAST_POINTS:
            return None
        number, level, _ = self._points[-1]
        # the later half: what went before is another stage
        later = [point for point in self._points if point[0] >= number // 2]
        first, highest, _ = later[0] if len(later) >= LEAST_POINTS else self._points[0]
        missing, slope = max(0.0, level - log(self.tol)), (highest - level) / (number - first)
        return missing / slope if slope > 0 else inf if missing else 0.0

    @property
    def phase(self) -> str:
        """The phase's name, with what the plan foresees until the residuals tell more."""
        plan, has_trend = self.foreseen, self.iterations_left is not None
        if plan is None or has_trend or round(plan.low) >= round(plan.high):
            return "cg"
        return f"cg, {plan.low:,.0f} to {plan.high:,.0f} foreseen"

    @property
    def total(self) -> int:
        """Iterations in all, as far as is known; 0 where nothing is."""
        number, level, _ = self._points[-1]
        left, plan = self.iterations_left, self.foreseen
        if level <= log(self.tol):
            return number
        found = inf if left is None else number + left
        if plan is not None and number <= plan.high:
            found = plan.high if found == inf else min(max(found, plan.low), 2 * plan.high)
        return 0 if found == inf else min(self.limit, max(number, ceil(found)))

    def check(self, iteration: int, relative: FloatVector, other_seconds: Callable[[], float | None] | None) -> None:
        """Give up where another way is done sooner: after twice the iterations foreseen, by the trend so far.

        Raises
        ------
        ConvergenceError
            ``slow``; ``falls``: whether there is an end in sight.
        """
        plan, more = self.foreseen, self.iterations_left
        is_near = self._points[-1][1] <= log(NEAR * self.tol)
        if plan is None or other_seconds is None or iteration <= 2 * plan.high or not more or is_near:
            return
        # at the pace of the last iterations
        (first, _, begun), (last, _, now) = self._points[0], self._points[-1]
        seconds, price = more * (now - begun) / max(1, last - first), other_seconds()
        if price is None or seconds <= price:
            return
        left = f"about {seconds:,.0f} s more" if np.isfinite(seconds) else "no end in sight"
        raise ConvergenceError(
            f"CG: relative residual {relative.max():.2g} after {iteration:,} iterations, at most "
            f"{plan.high:,.0f} were foreseen, {left}",
            relative_residual=relative,
            num_iterations=iteration,
            stagnated=False,
            slow=True,
            falls=bool(np.isfinite(seconds)),
        )


class Deferred(Preconditioner):
    """A preconditioner that is made when it is first applied: never, where every column is good to begin with.

    Parameters
    ----------
    make
        Makes it.
    inexact
        That of the preconditioner to come.
    normal : (n,), optional
        s, where it shall precondition P A P instead of A.
    """

    def __init__(self, make: Callable[[], Preconditioner], *, inexact: bool, normal: FloatVector | None = None) -> None:
        self.make, self.inexact, self.normal = cache(make), inexact, normal
        self.description = NOT_MADE
        self.columns: dict[float, FloatMatrix] = {}

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        """Z = M^-1 R (n, c); with an intercept Z - m b, in the plane."""
        made = self.make()
        self.description = made.description
        if self.normal is None:
            return made.apply(r, alpha)
        # one alpha is the usual case: its column m serves all
        values = list(dict.fromkeys(alpha.tolist()))
        missing = [value for value in values if value not in self.columns]
        if missing:
            found = made.apply(np.repeat(self.normal[:, None], len(missing), axis=1), np.array(missing))
            self.columns |= {value: np.ascontiguousarray(found[:, [k]]) for k, value in enumerate(missing)}
        z, m = made.apply(r, alpha), self.columns[values[0]]
        if len(values) > 1:
            m = np.hstack([self.columns[value] for value in alpha.tolist()])
        add_scaled(z, -(self.normal @ z) / (self.normal @ m), m)
        # rounding of M^-1 R leaves the plane by more than rounding of Z does
        return project(self.normal, z)


def project(normal: FloatVector, u: FloatMatrix) -> FloatMatrix:
    """P U in place; U itself is returned.

    Raises
    ------
    DataError
        s is zero.
    """
    square = float(normal @ normal)
    if not square:
        raise DataError("all weights are zero", hint="give at least one row a positive weight")
    add_scaled(u, -(normal @ u) / square, normal[:, None])
    return u


class FactorPreconditioner(Preconditioner):
    """P^-1 r = L^-T L^-1 r by two sweeps on the workers.

    A residual is divided by its norm and rounded to the factor's precision, so that nothing overflows or vanishes; the
    result comes back in float64. Checksums of tiles are compared in the first application only, which verifies the
    whole factor once. Rows beyond the factor's are divided by alpha and their entry of ``diagonal``.
    """

    def __init__(
        self,
        factored: CholeskyFactor,
        description: str = "float32 Cholesky factor",
        diagonal: FloatArray | None = None,
    ) -> None:
        self.factored, self.description = factored, description
        self.diagonal = np.empty(0) if diagonal is None else diagonal
        self.inexact, self.is_verified = factored.factor.dtype == np.float32, False

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        """Z (n, c) = P^-1 R; ``alpha`` (c,) counts only in rows beyond the factor's.

        Raises
        ------
        NumericalError
            R is not finite.
        """
        work, factor, scale = self.factored.workspace, self.factored.factor, norms(r)
        if not np.isfinite(scale).all():
            raise NumericalError("a residual is not finite", hint="scale the targets")
        scale[scale == 0] = 1.0
        m, c = factor.grid.n, r.shape[1]
        chunks = factor.grid.tile_size, min(c, MAX_BLOCK_COLUMNS)
        with work.scratch() as scratch:
            source, between, result = (
                # nobody but the tasks of this application reads it, and they know its shape: no metadata on disk
                BlockColumns(ChunkArray(scratch, name, (m, c), chunks, factor.array.dtype, flat=True), factor.grid)
                for name in ("r", "z", "u")
            )
            source.fill((r[:m] / scale).astype(factor.dtype))
            blocks, quiet, verify = (source, between, result), replace(work, progress=None), not self.is_verified
            substitute("precondition", factor, blocks, quiet, self.factored.owner, verify=verify)
            z = np.vstack([result.whole() * scale, r[m:] / (self.diagonal[:, None] + alpha)])
        self.is_verified = True
        return z


def earlier_factor(operator: RidgeOperator, workspace: Workspace) -> FactorPreconditioner:
    """The factor in the workspace's store that comes nearest to a system: most rows first, then the nearest alpha.

    Raises
    ------
    StoreError
        There is none.
    ParameterError
        Of a given matrix: a factor is known by its rows and its kernel.
    """
    n, rows = operator.grid.n, operator.rows
    if operator.kernel is None or rows is None:
        raise ParameterError(
            "preconditioner 'factor' with a precomputed matrix, of which no earlier factor is known",
            hint="take another preconditioner, or solver 'cholesky', which goes on from its own factor",
        )
    found = [
        # all of its rows are rows of the system, and nearly all of the system's rows are there
        item
        for item in ancestors(workspace.store, rows.open(), operator.kernel.to_dict(), kinds=["factors"])
        if item.num_rows == item.fields["n"] >= (1 - MAX_NEW_ROWS) * n
        and (item.fields["weight_digest"] is not None) == operator.weighted
    ]

    def distance(item: Ancestor) -> tuple[int, float]:
        other = float(item.fields["alpha"])
        return -item.num_rows, abs(log(other / operator.alpha)) if other > 0 and operator.alpha > 0 else inf

    for item in sorted(found, key=distance):
        try:
            keep_for_others(item.location, workspace.maker)
            factor = TileMatrix.open(item.location)
        except StoreError:  # it was removed
            continue
        if factor.missing():
            continue
        m, alpha, center = item.num_rows, float(item.fields["alpha"]), item.fields["center"]
        own = rows and replace(rows, center=None if center is None else tuple(center))
        made_of = replace(operator, grid=factor.grid, alpha=alpha, rows=own, gram=None)
        sources = [short_name(item.location)]
        workspace.reused["preconditioner"] = {"rows": m, "of_rows": n, "alpha": alpha, "sources": sources}
        return FactorPreconditioner(
            CholeskyFactor(operator=made_of, factor=factor, workspace=workspace),
            f"{factor.array.dtype} Cholesky factor of {m:,} rows and alpha {alpha:g} of an earlier fit",
            operator.diagonal_from(m) if m < n else None,
        )
    raise StoreError(
        f"{workspace.store} has no whole factor of at least the first {n - int(MAX_NEW_ROWS * n):,} of {n:,} rows",
        hint="fit once with solver cholesky, or leave preconditioner = 'factor' out",
    )


def make_float32_factor(
    operator: RidgeOperator, workspace: Workspace, settings: IterativeSettings, **digests: Any
) -> FactorPreconditioner:
    """A float32 factor of A, continuing one with the same key where it was left.

    Where it breaks down, A + shift I is factorised, the shift ten times as large each time, and sixteen iterations look
    for a direction along which float64 would break down, too. ``digests`` are those of
    :func:`~dkrr.linalg.catalogue.factor_fields`.

    Raises
    ------
    NotPositiveDefiniteError
        Four shifts were not enough, or a pivot is further below zero than rounding explains; or A is not positive
        definite beyond the rounding of float64.
    """
    n, places = operator.grid.n, _places(operator, workspace, **digests)
    # an interrupted fit goes on with the shift that it had come to
    begun = [number for number, (_, place) in enumerate(places) if read_json(place, "zarr.json") is not None]
    text, why, row = f"float32 Cholesky factor of {n:,} rows in {operator.grid.num_lower:,} tiles", "", None
    for shift, location in places[max(begun, default=0) :]:
        shifted = operator.with_alpha(operator.alpha + shift)
        try:
            factored = CholeskyFactor.prepare(shifted, workspace, precision="float32", **digests)
            factored.make_durable()
            break
        except NotPositiveDefiniteError as exc:
            trace = _trace(operator)
            if trace <= 0:
                raise  # in every precision
            # A may be definite all the same: errors of the factor of a nearly singular one grow from column to column
            if location == places[-1][1] or -float(exc.pivot) > NOT_ROUNDING * EPS32 * trace:
                matrix, too = (f"A + {shift:.2g} I", ", too") if shift else ("A", "")
                raise NotPositiveDefiniteError(
                    f"a float32 factor of {matrix} breaks down{too} ({exc.message})",
                    hint=exc.hint,
                    **exc.details | {"precision": "float32"},
                ) from exc
            why, row = why or f" at row {exc.row:,} (pivot {exc.pivot:.2g})", int(exc.row) if row is None else row
            where = f"row {exc.row:,} (pivot {exc.pivot:.2g}, alpha {shifted.alpha:.3g})"
            logger.warning(
                "the float32 factor of %s rows breaks down at %s: preconditioning with a factor of A + shift I",
                f"{n:,}",
                where,
            )
            with contextlib.suppress(LockedError), hold_lock(location):  # who is at it finds the same
                remove_array(location)
    text += f", of A + {shift:.2g} I because float32 broke down{why}" if shift else ""
    made = FactorPreconditioner(factored, text)
    if shift:
        _check_curvature(operator, made, settings, row)
    return made


def float32_location(operator: RidgeOperator, workspace: Workspace, **digests: Any) -> str | None:
    """Where the whole factor of :func:`make_float32_factor` is; None where there is none."""
    for _, location in _places(operator, workspace, **digests):
        if read_json(location, "zarr.json") is not None and not TileMatrix.open(location).missing():
            return location
    return None


def _trace(operator: RidgeOperator) -> float:
    return float(operator.diagonal_from(0).sum()) + operator.grid.n * operator.alpha


def _places(operator: RidgeOperator, workspace: Workspace, **digests: Any) -> list[tuple[float, str]]:
    """Every shift that may be tried, and where its factor is."""
    fields = factor_fields(operator, "float32", blas=workspace.blas, **{"weight_digest": None, **digests})
    unit = EPS32 * _trace(operator)
    shifts = [0.0, *(FIRST_SHIFT * SHIFT_GROWTH**number * unit for number in range(MAX_SHIFTS))]
    return [(shift, factor_location(workspace.store, fields | {"alpha": operator.alpha + shift})) for shift in shifts]


def _check_curvature(
    operator: RidgeOperator, made: FactorPreconditioner, settings: IterativeSettings, row: int | None
) -> None:
    """Whether a float64 factor would exist where float32 breaks down: a few iterations for random signs.

    P^-1 with P = A + shift I makes the directions along which A has no curvature the largest ones.

    Raises
    ------
    NotPositiveDefiniteError
        A has none beyond the rounding of float64.
    """
    workspace, n = made.factored.workspace, operator.grid.n
    # independent random signs; sign i does not depend on n
    words = np.random.Philox(key=np.array([0, 0], dtype=np.uint64)).random_raw(-(-n // 64))
    bits = np.unpackbits(np.asarray(words, dtype="<u8").view(np.uint8), bitorder="little")
    signs: FloatMatrix = 2.0 * bits[:n, None].astype(np.float64) - 1.0
    few = replace(settings, max_iter=NUM_CURVATURES, allow_unconverged=True)
    try:
        with workspace.scratch() as scratch:
            product = OperatorProduct(operator, workspace, scratch, phase="precondition", quiet=True)
            conjugate_gradients(product.exact, signs, np.array([operator.alpha]), made, few, norm=product.norm)
    except NotPositiveDefiniteError as exc:
        raise NotPositiveDefiniteError(
            "the float32 factor breaks down, and beyond rounding A is singular in float64, too (random signs in the "
            f"place of a target: {exc.message})",
            hint=exc.hint,
            **exc.details | {"row": row},
        ) from exc


class CGSolver:
    """A matrix with its preconditioner: solves for any number of right-hand sides and alphas at once.

    The preconditioner is made when it is first needed, continuing one where it was left.

    Parameters
    ----------
    operator
        Its alpha is the smallest that will be solved for; an automatic rank goes by it and by ``num_columns``.
    settings
        Tolerance, limit, preconditioner.
    precision
        "float64", or "mixed": kernel entries of an iteration in float32, true residuals in float64; the same answer by
        the residual.
    float32_factor
        The preconditioner is a float32 factor of the same matrix, whatever the settings say: what "cholesky" is in
        mixed precision.
    accept_limit
        Whether an iterate that gets no further above ``tol`` counts as converged where its backward error is that of a
        factor's answer, see :func:`~dkrr.linalg.solution.is_limit`; else it is a ConvergenceError.
    store
        Where a low-rank preconditioner is kept; None means the workspace's store, where fits of the same rows share it.
    ready
        Called before a stored Gram matrix of the operator is read.
    """

    def __init__(
        self,
        operator: RidgeOperator,
        workspace: Workspace,
        settings: IterativeSettings,
        *,
        precision: Literal["float64", "mixed"] = "float64",
        float32_factor: bool = False,
        accept_limit: bool = False,
        weight_digest: str | None = None,
        source_digest: str = "",
        store: Any = None,
        num_columns: int = 1,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        self.operator, self.workspace, self.settings, self.ready = operator, workspace, settings, ready
        self.precision, self.float32_factor = precision, float32_factor
        self.accept_limit = accept_limit or float32_factor
        n, kind = operator.grid.n, settings.preconditioner
        rank: int | Literal["auto"] = settings.rank if settings.is_low_rank else 1
        if rank == "auto":
            columns = {"num_columns": num_columns, "num_workers": workspace.executor.num_threads}
            rank = choose_rank(n, operator.num_features, operator.alpha, tol=settings.tol, **columns)
        digests: dict[str, Any] = {"weight_digest": weight_digest, "source_digest": source_digest}
        # what decides the preconditioner, what makes it, and whether it will be inexact
        self.fields, self.inexact = low_rank_fields(operator, settings, rank, workspace.blas, **digests), False
        make: Callable[[], Preconditioner] = Preconditioner
        if float32_factor:
            # of a shift nothing is known before the factor is made; later no other one is found
            shared = operator, "float32", weight_digest, workspace.blas, source_digest
            self.fields, self.inexact = factor_fields(*shared) | {"mixed": None}, True

            def make() -> Preconditioner:
                ready()
                return make_float32_factor(operator, workspace, settings, **digests)

        elif kind == "factor":
            found = earlier_factor(operator, workspace)
            self.fields |= {"factor": name_of(found.factored.factor.location)}
            self.inexact, make = found.inexact, lambda: found
        elif kind != "none":
            location = place(store or workspace.store, "preconditioners", key_of(self.fields) + ".zarr")
            make = partial(LowRank, operator, workspace, location, settings, rank)
        self.make = cache(make)

    def solve(
        self,
        rhs: BlockColumns,
        alpha: FloatVector | float | None = None,
        start: FloatMatrix | None = None,
        *,
        in_plane: bool = False,
        targets: Sequence[int] = (),
    ) -> tuple[BlockColumns, Solution]:
        """Solve (S K S + alpha_k I) u_k = rhs_k for all columns.

        A column whose true residual no restart halves any more has reached the limit of float64. Where that may be
        accepted, and :func:`~dkrr.linalg.solution.is_limit` says so, the message says so, too.

        Parameters
        ----------
        rhs : BlockColumns (n, t)
            S Y. The state of an interrupted solve, and u, are kept beside it.
        alpha : (t,), optional
            One ridge a column, if not that of the operator for all.
        start : (n, t), optional
            A guess of u. An interrupted solve goes on from its own state instead.
        in_plane
            Solve for an intercept b as well: A u + b s = S Y with s^T u = 0.
        targets
            Their numbers, where these are some of them.

        Returns
        -------
        u : BlockColumns (n, t)
        solution : Solution

        Raises
        ------
        NotPositiveDefiniteError, PreconditionerError, ConvergenceError
            See :func:`dkrr.linalg.cg.conjugate_gradients`.
        """
        work, store, operator = self.workspace, rhs.array.store, self.operator
        values, normal = rhs.whole(), operator.normal() if in_plane else None
        alpha = np.broadcast_to(np.asarray(operator.alpha if alpha is None else alpha, np.float64), (rhs.num_columns,))
        if normal is not None:
            project(normal, values)
            start = None if start is None else project(normal, np.array(start, dtype=np.float64))
        fingerprint = self.fields | {
            "alpha": alpha.tolist(),
            "tol": self.settings.tol,
            "precision": self.precision,
            "gram": "on_the_fly" if operator.gram is None else "stored",
            "rhs": hashlib.sha256(np.ascontiguousarray(values).data.cast("B")).hexdigest(),
            "in_plane": in_plane,
            "blas": None,
        }
        checkpoint = Checkpoint(place(store, "state"), key_of(fingerprint), durable=work.durable)
        trace = work.trace("conjugate gradients", self.settings.tol, alpha, targets)
        mixed = self.precision == "mixed"
        stored = operator.gram is not None and operator.kernel is not None
        is_approximate = mixed or stored
        phase = "residual" if is_approximate else "multiply"
        exact = OperatorProduct(operator, work, store, phase=phase, quiet=True)
        precision: Literal["float64", "float32"] = "float32" if mixed else "float64"
        approximate = OperatorProduct(operator, work, store, precision=precision, use_gram=stored, quiet=True)
        if is_approximate and operator.kernel is not None:
            # a column of sums in every true residual would be a tenth of it; four times as much with signed entries
            exact.row_sums = sampled_row_sums(operator)

        def multiply(product: Callable[[FloatMatrix], FloatMatrix], v: FloatMatrix) -> FloatMatrix:
            if product is approximate:
                self.ready()  # its tiles are there when it is first called
            return product(v) if normal is None else project(normal, product(v))

        def make() -> Preconditioner:
            made = self.make()
            trace.name = f"conjugate gradients, {made.description}"
            return made

        def backward(state: CGState) -> FloatVector:
            """|R| / (|A| |u| + |S Y|) in the infinity norm; |A| is that of some rows where products are approximate."""
            size = (exact.norm() + alpha) * largest(state.x) + largest(values)
            return ratio(state.largest_residual, size)

        def judged(state: CGState) -> NDArray[np.bool_]:
            return is_limit(len(values), state.relative_residual, backward(state))

        true = partial(multiply, partial(exact.exact, always=is_approximate and operator.kernel is None))
        preconditioner = Deferred(make, inexact=self.inexact, normal=normal)
        try:
            state = conjugate_gradients(
                partial(multiply, approximate) if is_approximate else true,
                values,
                alpha,
                preconditioner,
                self.settings,
                start=start,
                norm=None if mixed else exact.norm,
                true_multiply=true if is_approximate else None,
                checkpoint=checkpoint,
                on_iteration=self._report(rhs.num_columns, trace),
                is_limit=judged if self.accept_limit else None,
            )
        except ConvergenceError as exc:
            if not (self.float32_factor and exc.stagnated):
                raise
            raise ConvergenceError(
                f"{exc.message}: float32 is no preconditioner at this condition",
                hint='set precision = "float64", whose factor needs no iterations, or raise alpha',
                **exc.details,
            ) from exc
        trace.replace(state.history)
        u = BlockColumns.create(store, "u", rhs.grid, rhs.num_columns, "float64").fill(state.x)
        if start is not None:
            work.reused.setdefault("start", {})["relative_residual"] = float(state.history[0].max())
        num_products = exact.num_products + approximate.num_products
        return u, self._solution(state, backward(state), num_products, preconditioner)

    def _report(self, num_columns: int, trace: ResidualTrace) -> Callable[[int, FloatVector], None]:
        """Residuals for the trace, progress in iterations, and the end of an iteration that another way outruns."""
        settings, work = self.settings, self.workspace
        flops = 2.0 * self.operator.grid.n**2 * num_columns
        forecast = Forecast(settings.tol, settings.iterations, work.foreseen)

        def report(iteration: int, relative: FloatVector) -> None:
            trace.add(iteration, relative)
            forecast.add(iteration, float(relative.max()))
            forecast.check(iteration, relative, work.other_seconds)
            if work.progress is not None:
                total = forecast.total
                work.progress(forecast.phase, iteration, total, iteration * flops, total * flops)

        return report

    def _solution(self, state: CGState, backward: FloatVector, num_products: int, preconditioner: Deferred) -> Solution:
        relative, tol, t = state.relative_residual, self.settings.tol, len(backward)
        converged, begun = bool(state.converged.all()), float(state.history[0].max())
        made = preconditioner.description
        if made == NOT_MADE and state.num_iterations:
            made = "that of an earlier attempt"
        message = (
            f"conjugate gradients, {state.num_iterations:,} iterations and {num_products:,} products, "
            f"preconditioner: {made}, largest relative residual {relative.max():.1e}"
        )
        if 0 < begun < 1:
            message += f", from earlier coefficients whose residual was {begun:.1e}"
        if converged and begun and not state.num_iterations and preconditioner.description == NOT_MADE:
            message = (
                f"conjugate gradients, {num_products:,} product: the start already has residual {begun:.1e}; "
                "nothing was built"
            )
        above = state.converged & (relative > tol)
        if above.any():
            message += (
                f": above {tol:.1e} in {above.sum()} of {t} targets and the limit of float64, backward error "
                f"{backward[above].max():.1e}"
            )
        if not converged:
            missing = int((~state.converged).sum())
            message += f"; NOT CONVERGED to {tol:.1e} in {missing} of {t} targets, which was allowed"
        return Solution(
            solver="cholesky" if self.float32_factor else "cg",
            precision="mixed" if self.float32_factor else self.precision,
            converged=converged,
            num_iterations=state.num_iterations,
            relative_residual=relative.tolist(),
            backward_error=backward.tolist(),
            seconds={phase: summary.seconds for phase, summary in self.workspace.phases.items()},
            message=message,
        )
