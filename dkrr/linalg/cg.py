"""Preconditioned conjugate gradients for many right-hand sides and many alphas that share every product.

    (K_s + alpha_k I) x_k = b_k,    K_s = S K S,    k = 1 .. t

Use it where a factor is too large or too slow. Each column has scalars, an alpha and a tolerance of its own; what the
columns share is the pass over the kernel. A column whose recursive residual reached its aim is frozen, and no longer
multiplied; then its *true* residual b - A x is evaluated, and only that one decides. A column that fails goes on from
its true residual. With an approximate product (float32) the same restarts are iterative refinement.

Everything here is deterministic and in the memory of the calling process; products and preconditioners are handed in.
What an interrupted call goes on from is one file, which is replaced at once: a checksum tells damage, and what passes
it and is wrong shows in the true residual, which decides what of a state is used.

Cost
----
One product an iteration, one every 50 iterations and one at the end for the true residuals; about 8 n t doubles. A
checkpoint writes 3 n t doubles.

References
----------
Hestenes and Stiefel (1952), Methods of conjugate gradients. Van der Vorst and Ye (2000), Residual replacement
strategies for Krylov subspace iterative methods.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.tasks import run_task
from dkrr.errors import ConvergenceError, DataError, NotPositiveDefiniteError, NumericalError, PreconditionerError
from dkrr.linalg.operators import (
    FloatMatrix,
    FloatVector,
    Indices,
    add_scaled,
    dots,
    largest,
    norms,
    ratio,
    row_blocks,
    take,
)
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.workspace import retried
from dkrr.store.files import delete_key, read_key, write_key

logger = logging.getLogger("dkrr.linalg.cg")

CHECK_EVERY = 50

# an approximate product drifts: the true residual is due when a column fell this far since the last one
RELIABLE_DROP = 1e-3

# a recursive residual further than this from the true one says nothing about the next direction
MAX_DEVIATION = 0.1

# a column has reached what floating point allows when so many contradictions in a row did not halve its true residual
MAX_STALLS = 3

# of |A| p^T p: p^T A p below it is rounding, and A has no float64 Cholesky factor, either
ROUNDING = 4 * float(np.finfo(np.float64).eps)


Multiply = Callable[[FloatMatrix], FloatMatrix]
Flags = NDArray[np.bool_]


class Preconditioner:
    """P_alpha^-1 for any alpha, applied to many columns at once; this one is none.

    ``inexact`` says that rounding in an application is far above that of float64, so that it is not quite symmetric:
    directions are then made conjugate to the last one by its product instead of by r^T z. ``description`` are a few
    words for messages and records, e.g. "randomly pivoted Cholesky of rank 1,000".
    """

    description, inexact = "none", False

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        """Z (n, c) with column k = P_{alpha[k]}^-1 r[:, k], for R (n, c) and alpha (c,); R is not changed."""
        return r.copy()


@dataclass
class CGState:
    """What was found so far, and all that the next iteration depends on.

    Parameters
    ----------
    x, r, p : (n, t)
        Solutions, residuals and directions; r and p of finished columns are what they last were.
    relative_residual, largest_residual : (t,)
        |b_k - A_k x_k| / |b_k|, 0 for a zero right-hand side, and max |b_k - A_k x_k|: true ones at the end.
    converged : (t,) bool
        Whether the relative residual is at most ``tol``, or was told to be the limit of floating point.
    iterations : (t,) int
        Iterations that a column took part in; ``num_iterations`` are those of the block.
    live, frozen : (t,) bool
        Columns that are not finished, and those of them that wait for their true residual.
    rz, aim, reference, failed : (t,)
        r^T z; the recursive residual to freeze at; the last true residual; the least true residual that contradicted
        a recursive one.
    stalls : (t,) int
        Contradictions in a row that did not halve it.
    history
        Relative residuals (t,) before the first iteration and after each one; recursive, where no true one is known.
    """

    x: FloatMatrix
    r: FloatMatrix
    p: FloatMatrix
    relative_residual: FloatVector
    largest_residual: FloatVector
    converged: Flags
    iterations: Indices
    live: Flags
    frozen: Flags
    rz: FloatVector
    aim: FloatVector
    reference: FloatVector
    failed: FloatVector
    stalls: Indices
    num_iterations: int = 0
    history: list[FloatVector] = field(default_factory=list)

    @property
    def active(self) -> Indices:
        """Numbers of the columns that iterate."""
        return np.flatnonzero(self.live & ~self.frozen)


class Checkpoint:
    """The last state of one system in a store, in one file.

    Parameters
    ----------
    location
        Folder or URL for it alone.
    fingerprint
        Key of all that decides the iterates; a state of another system is removed.
    every_seconds
        When a state is due.
    durable
        fsync before a state counts.
    """

    def __init__(self, location: Any, fingerprint: str, *, every_seconds: float = 60.0, durable: bool = False) -> None:
        self.location, self.fingerprint, self.durable = location, fingerprint, durable
        self.every_seconds, self._last = every_seconds, time.monotonic()

    def is_due(self, iteration: int) -> bool:
        """Whether a state shall be saved after this iteration."""
        return time.monotonic() - self._last >= self.every_seconds

    def save(self, state: CGState) -> None:
        """Write over the one before.

        Raises
        ------
        StorageFullError, StoreError
            Three attempts failed; the one before is whole.
        """
        file = io.BytesIO()
        np.savez(file, fingerprint=np.array(self.fingerprint), **vars(state))

        def write(_: CGState) -> bool:
            write_key(self.location, "state.npz", file.getbuffer(), durable=self.durable)
            return True

        run_task(write, state, ())
        self._last = time.monotonic()

    def load(self) -> CGState | None:
        """The state with this fingerprint, whole; anything else is removed, with a line in the log."""
        data = retried(lambda: read_key(self.location, "state.npz"))
        if data is None:
            return None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                values: dict[str, Any] = {name: file[name] for name in file.files}
            if str(values.pop("fingerprint")) != self.fingerprint:
                raise ValueError("it belongs to another system")
            values |= {"num_iterations": int(values["num_iterations"]), "history": list(values["history"])}
            state = CGState(**values)
        except (BadZipFile, EOFError, LookupError, NotImplementedError, TypeError, ValueError) as exc:
            logger.warning("the checkpoint %s is removed: %s", self.location, exc)
            delete_key(self.location, "state.npz")
            return None
        logger.info("going on from the checkpoint %s of iteration %d", self.location, state.num_iterations)
        return state


# --- what is said when it cannot go on ------------------------------------------------------------------------------

FLOAT64 = ', or set precision = "float64"'


def not_converged(state: CGState, tol: float, description: str, *, approximate: bool) -> ConvergenceError:
    """The error for the worst column, with the history."""
    missing = np.flatnonzero(~state.converged)
    worst = int(missing[np.argmax(state.relative_residual[missing])])
    residual, stagnated = float(state.relative_residual[worst]), not state.live.any()
    count = f"{len(missing)} of {len(state.converged)} targets"
    if stagnated:
        message = (
            f"CG: the true relative residual of target {worst} stays at {residual:.2g} after "
            f"{state.num_iterations:,} iterations and restarts; tol = {tol:.2g} is out of reach ({count})"
        )
        hint = f"set tol to at least {2 * residual:.1e}, or raise alpha" + FLOAT64 * approximate
    else:
        message = (
            f"CG did not converge in {state.num_iterations:,} iterations: the relative residual of target {worst} is "
            f"{residual:.2g}, tol = {tol:.2g} ({count}; preconditioner: {description})"
        )
        hint = (
            "raise max_iter (the fit goes on), the rank of the preconditioner, tol or alpha, or set allow_unconverged"
        )
    return ConvergenceError(
        message,
        hint=hint,
        history=list(state.history),
        relative_residual=state.relative_residual.copy(),
        converged=state.converged.copy(),
        num_iterations=state.num_iterations,
        stagnated=stagnated,
    )


# --- the iteration --------------------------------------------------------------------------------------------------


def conjugate_gradients(
    multiply: Multiply,
    rhs: FloatMatrix,
    alpha: FloatVector,
    precondition: Preconditioner,
    settings: IterativeSettings,
    *,
    start: FloatMatrix | None = None,
    norm: Callable[[], float] | None = None,
    true_multiply: Multiply | None = None,
    checkpoint: Checkpoint | None = None,
    on_iteration: Callable[[int, FloatVector], None] | None = None,
    is_limit: Callable[[CGState], NDArray[np.bool_]] | None = None,
) -> CGState:
    """Solve (K_s + alpha_k I) x_k = b_k for all columns at once.

    Parameters
    ----------
    multiply
        P (n, c) -> K_s P (n, c), without alpha, a new array; called with the active columns only.
    rhs : (n, t)
        B. Not changed.
    alpha : (t,)
        One ridge a column.
    precondition
        Symmetric positive definite.
    settings
        ``tol``, ``max_iter``, ``allow_unconverged``.
    start : (n, t), optional
        Where to begin; costs one product. It is scaled to the minimum of the energy, so it is never worse than zero.
    norm
        |K_s|, or 0 while it is not known, by which p^T A p that is nothing but rounding is told; None where the product
        is not a float64 one.
    true_multiply
        The float64 product, where ``multiply`` is an approximation.
    checkpoint
        Keeps states. After loading one, the true residual decides what of it is used.
    on_iteration
        Called with the iteration and the relative residuals (t,).
    is_limit
        Which columns (t,) are as good as floating point allows; where no restart halves a residual any more they count
        as converged.

    Raises
    ------
    NotPositiveDefiniteError
        p^T A p <= 0 for a direction p, or no more than its rounding.
    DataError
        The norm of a right-hand side is not finite.
    PreconditionerError
        r^T z <= 0: the preconditioner is not positive definite.
    ConvergenceError
        A column did not reach ``tol``, unless ``settings.allow_unconverged``.
    """
    alpha = np.broadcast_to(np.asarray(alpha, np.float64), (rhs.shape[1],))
    system = _System(multiply, rhs, alpha, precondition, settings, norm, true_multiply)
    state = None if checkpoint is None else checkpoint.load()
    state = system.begin(start) if state is None else system.confirmed(state)
    if state.live.any() and state.num_iterations >= settings.iterations:  # another limit than before
        system.check(state)
    try:
        while state.live.any() and state.num_iterations < settings.iterations:
            system.iterate(state)
            is_last = state.num_iterations >= settings.iterations
            if is_last or system.check_is_due(state):
                system.check(state)
            state.history.append(state.relative_residual.copy())
            if on_iteration is not None:
                on_iteration(state.num_iterations, state.relative_residual.copy())
            system.renew_directions(state)
            if checkpoint is not None and (is_last or not state.live.any() or checkpoint.is_due(state.num_iterations)):
                checkpoint.save(state)
        if is_limit is not None and not state.live.any():
            state.converged |= is_limit(state)
        if not state.converged.all() and not settings.allow_unconverged:
            raise not_converged(state, settings.tol, precondition.description, approximate=true_multiply is not None)
    except NumericalError as exc:
        if state.relative_residual.max(initial=0.0) < 1:  # better than nothing to begin another iteration with
            exc.iterate = state.x  # type: ignore[attr-defined]
        raise
    return state


class _System:
    """The matrix, the right-hand sides and the rules; every method moves a state on."""

    def __init__(
        self,
        multiply: Multiply,
        rhs: FloatMatrix,
        alpha: FloatVector,
        precondition: Preconditioner,
        settings: IterativeSettings,
        norm: Callable[[], float] | None,
        true_multiply: Multiply | None,
    ) -> None:
        self.multiply, self.rhs, self.alpha, self.precondition = multiply, rhs, alpha, precondition
        self.settings, self.norm, self.true_multiply = settings, norm, true_multiply
        with np.errstate(over="ignore"):
            self.norms = norms(rhs)
        lost = ~np.isfinite(self.norms) | ((self.norms == 0) & rhs.any(axis=0))
        if lost.any():
            target = int(np.argmax(lost))
            raise DataError(
                f"CG: the norm of target {target} is {self.norms[target]:.3g}, which cannot be computed with",
                hint="scale the targets",
            )
        self.in_float32 = true_multiply is not None and norm is None
        # A P (n, c) and p^T A p (c,) of the last iteration, for the targets (c,) that took part in it
        self.last: tuple[Indices, FloatMatrix, FloatVector] | None = None

    def begin(self, start: FloatMatrix | None) -> CGState:
        """The state before the first iteration, with directions."""
        t = len(self.norms)
        state = CGState(
            x=np.zeros(self.rhs.shape) if start is None else np.array(start, dtype=np.float64, order="C"),
            r=np.array(self.rhs, dtype=np.float64, order="C"),
            p=np.zeros(self.rhs.shape),
            relative_residual=(self.norms > 0).astype(np.float64),
            largest_residual=np.zeros(t),
            converged=self.norms == 0,
            iterations=np.zeros(t, np.int64),
            live=self.norms > 0,
            frozen=np.zeros(t, np.bool_),
            rz=np.full(t, np.inf),
            aim=np.full(t, self.settings.tol * (1.0 if self.true_multiply is None else 0.5)),
            reference=np.ones(t),
            failed=np.full(t, np.inf),
            stalls=np.zeros(t, np.int64),
        )
        if start is not None:
            self._scale_start(state)
        state.history.append(state.relative_residual.copy())
        self.renew_directions(state)
        return state

    def _scale_start(self, state: CGState) -> None:
        """x <- c x with c = x^T b / x^T A x, the minimum of the energy along x; A x is known from the residual."""
        state.x[:, self.norms == 0] = 0.0
        product = self._product(state.x, self.alpha, exact=True)
        curvature, slope = dots(state.x, product), dots(state.x, self.rhs)
        factor = np.divide(slope, curvature, out=np.zeros_like(slope), where=(curvature > 0) & (slope > 0))
        add_scaled(state.r, -np.ones_like(factor), product)
        done = norms(state.r) <= self.settings.tol * self.norms
        factor[done] = 1.0
        for rows in row_blocks(len(state.x)):
            state.x[rows] *= factor
            # from b, and not from b - A x: where x belongs to larger targets that keeps no digit of b
            state.r[rows] = self.rhs[rows] - factor * product[rows]
        state.relative_residual, state.largest_residual = ratio(norms(state.r), self.norms), largest(state.r)
        state.reference, state.converged, state.live = state.relative_residual.copy(), done, ~done

    def confirmed(self, state: CGState) -> CGState:
        """A state that was read back; where its true residual denies it, one that begins with its x."""
        state.x[:, self.norms == 0] = 0.0
        residual = self.rhs - self._product(state.x, self.alpha, exact=True)
        size, deviation = norms(residual), norms(residual - state.r)
        good = ratio(size, self.norms) <= self.settings.tol
        if np.where(state.live, good | (deviation <= MAX_DEVIATION * size), good >= state.converged).all():
            return state
        logger.warning("the state of iteration %d does not hold: going on from its x", state.num_iterations)
        fresh = self.begin(state.x)
        fresh.num_iterations, fresh.iterations, fresh.history = state.num_iterations, state.iterations, state.history
        return fresh

    # --- one iteration -------------------------------------------------------------------------------------------

    def iterate(self, state: CGState) -> None:
        """A step along the direction of every active column; a column that claims convergence is frozen."""
        active = state.active
        p = take(state.p, active)
        product = self._product(p, self.alpha[active], exact=False)
        curvature, square = dots(p, product), dots(p, p)
        sys.audit("dkrr.compute", "cg.float32.curvature" if self.in_float32 else "cg.float64.curvature", curvature)
        floor = ROUNDING * (self.norm() + self.alpha[active]) if self.norm is not None else np.zeros_like(curvature)
        missing = np.where(np.isnan(curvature), -np.inf, curvature - floor * square)
        if not (missing > 0).all():
            k = int(np.argmin(missing))
            figures = float(curvature[k]), float(square[k]), float(floor[k])
            raise self._indefinite(state.num_iterations + 1, int(active[k]), *figures)
        slope = state.rz[active]
        if self.precondition.inexact:
            slope, self.last = dots(p, take(state.r, active)), (active, product, curvature)
        step = slope / curvature
        add_scaled(state.x, step, p, active)
        add_scaled(state.r, -step, product, active)
        state.num_iterations += 1
        state.iterations[active] += 1
        state.relative_residual[active] = ratio(norms(take(state.r, active)), self.norms[active])
        state.frozen |= state.live & (state.relative_residual <= state.aim)

    def _indefinite(
        self, number: int, target: int, curvature: float, square: float, floor: float
    ) -> NotPositiveDefiniteError:
        """p^T A p <= ``floor`` p^T p, or not a number. The quotient is a bound on how much alpha lacks at least.

        ``precision`` is that of the products: of those in float32 the matrix may be another one.
        """
        where, alpha = f"at iteration {number:,} of target {target}", float(self.alpha[target])
        precision = "float32" if self.in_float32 else "float64"
        facts: dict[str, Any] = {"iteration": number, "target": target, "curvature": curvature, "precision": precision}
        if not np.isfinite(curvature) or not square:
            what = "has entries that are not finite" if square else "is too small to be squared"
            return NotPositiveDefiniteError(
                f"CG: p^T A p = {curvature:.3g} {where}: {'the matrix or ' * bool(square)}the direction {what}",
                hint="scale the features and the targets",
                alpha=alpha,
                **facts,
            )
        least = alpha + max(-curvature / square, 10 * floor)
        rounding = "0" if curvature <= 0 else f"{floor * square:.3g}, its rounding,"
        return NotPositiveDefiniteError(
            f"CG: p^T A p = {curvature:.3g} <= {rounding} {where}: the matrix is not positive definite "
            f"{'in float32 products ' if self.in_float32 else ''}(alpha {alpha:.3g})",
            hint=f"raise alpha to more than {least:.1e}, or use a positive semi-definite kernel"
            + FLOAT64 * self.in_float32,
            alpha=alpha,
            suggested_alpha=least,
            **facts,
        )

    def renew_directions(self, state: CGState) -> None:
        """p <- M^-1 r + (r^T z / previous r^T z) p, for active columns; a restart has an infinite previous one.

        Where M^-1 is inexact, the factor is max(0, -z^T A p / p^T A p) for columns that took part and go on: conjugate
        to p by its product.
        """
        active = state.active
        if not len(active):
            return
        r = take(state.r, active)
        z = self.precondition.apply(r, self.alpha[active])
        rz = dots(r, z)
        sys.audit("dkrr.compute", "cg.preconditioned", rz)
        if not (rz > 0).all():
            worst = int(np.argmin(np.where(np.isnan(rz), -np.inf, rz)))
            raise PreconditionerError(
                f"CG: r^T z = {rz[worst]:.3g} at iteration {state.num_iterations:,} of target {active[worst]}: "
                f"the preconditioner ({self.precondition.description}) is not positive definite",
                hint="raise alpha, lower its rank, or use another preconditioner",
                iteration=state.num_iterations,
                target=int(active[worst]),
            )
        beta = rz / state.rz[active]
        if self.last is not None:
            before, product, curvature = self.last
            columns = np.flatnonzero(np.isin(active, before) & (beta != 0))
            where = np.searchsorted(before, active[columns])
            found = -dots(take(z, columns), take(product, where)) / curvature[where]
            beta[columns] = np.maximum(found, 0.0)
        chosen = slice(None) if len(active) == state.p.shape[1] else active
        for rows in row_blocks(len(z)):
            state.p[rows, chosen] = beta * state.p[rows, chosen] + z[rows]
        state.rz[active] = rz

    # --- the true residual ---------------------------------------------------------------------------------------

    def check_is_due(self, state: CGState) -> bool:
        """Whether every column waits for it, it is time, or an approximate product may have drifted."""
        has_fallen = state.relative_residual < RELIABLE_DROP * state.reference
        drifted = self.true_multiply is not None and has_fallen[state.active].any()
        return not len(state.active) or state.num_iterations % CHECK_EVERY == 0 or bool(drifted)

    def check(self, state: CGState) -> None:
        """Put true residuals in place of recursive ones; finish the columns that hold, or that can get no further."""
        live = np.flatnonzero(state.live)
        residual = self._product(take(state.x, live), self.alpha[live], exact=True)
        for rows in row_blocks(len(residual)):
            np.subtract(self.rhs[rows][:, live], residual[rows], out=residual[rows])
        deviation, size = norms(take(state.r, live) - residual), norms(residual)
        state.r[:, live] = residual
        relative = ratio(size, self.norms[live])
        good, deviates = relative <= self.settings.tol, deviation > MAX_DEVIATION * size
        claimed = state.frozen[live] & ~good
        # a factor as preconditioner leaves few iterations: without progress from check to check it is none
        again = claimed | (deviates & ~good) | (self.precondition.inexact & ~good)
        helped = relative <= 0.5 * state.failed[live]
        state.stalls[live[again]] = np.where(helped, 0, state.stalls[live] + 1)[again]
        state.failed[live[again]] = np.minimum(relative, state.failed[live])[again]
        state.aim[live[claimed]] *= 0.5
        state.rz[live[deviates]] = np.inf
        state.relative_residual[live] = state.reference[live] = relative
        state.largest_residual[live] = largest(residual)
        state.converged[live] = good
        state.live[live] = ~good & (state.stalls[live] < MAX_STALLS)
        state.frozen[:] = False

    def _product(self, v: FloatMatrix, alpha: FloatVector, *, exact: bool) -> FloatMatrix:
        """(K_s + alpha_k I) v_k, a new array."""
        multiply = self.multiply if self.true_multiply is None or not exact else self.true_multiply
        product = multiply(v)
        add_scaled(product, alpha, v)
        return product
