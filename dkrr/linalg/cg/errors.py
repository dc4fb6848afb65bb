"""What conjugate gradients say when they cannot go on: which column, at which iteration, with which number, and why."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ConvergenceError, NotPositiveDefiniteError, PreconditionerError
from dkrr.linalg.cg.state import CGState

__all__ = ["indefinite_matrix", "indefinite_preconditioner", "not_converged", "too_slow"]

FLOAT64 = ', or set precision = "float64"'


def indefinite_matrix(
    state: CGState, target: int, *, curvature: float, square: float, floor: float, alpha: float, in_float32: bool
) -> NotPositiveDefiniteError:
    """p^T A p <= ``floor`` p^T p, or not a number. The quotient is a bound on how much alpha lacks at least.

    ``precision`` is that of the products: of those in float32 the matrix may be another one.
    """
    precision = "float32" if in_float32 else "float64"
    number = state.iteration + 1
    where = f"at iteration {number:,} of target {target}"
    if not np.isfinite(curvature):
        return NotPositiveDefiniteError(
            f"CG: p^T A p = {curvature:.3g} {where}: the matrix or the direction has entries that are not finite",
            hint="scale the features and the targets",
            iteration=number,
            target=target,
            curvature=curvature,
            alpha=alpha,
            precision=precision,
        )
    least = alpha + max(-curvature / square, 10 * floor)
    rounding = "0" if curvature <= 0 else f"{floor * square:.3g}, its rounding,"
    hint = f"raise alpha to more than {least:.1e}, or use a positive semi-definite kernel"
    return NotPositiveDefiniteError(
        f"CG: p^T A p = {curvature:.3g} <= {rounding} {where}: the matrix is not positive definite "
        f"{'in float32 products ' if in_float32 else ''}(alpha {alpha:.3g})",
        hint=hint + FLOAT64 * in_float32,
        iteration=number,
        target=target,
        curvature=curvature,
        alpha=alpha,
        suggested_alpha=least,
        precision=precision,
    )


def indefinite_preconditioner(
    state: CGState, rz: NDArray[np.float64], targets: NDArray[np.int64], description: str
) -> PreconditionerError:
    """r^T z <= 0, or not a number, for one of the targets."""
    worst = int(np.argmin(np.where(np.isnan(rz), -np.inf, rz)))
    return PreconditionerError(
        f"CG: r^T z = {rz[worst]:.3g} at iteration {state.iteration:,} of target {targets[worst]}: "
        f"the preconditioner ({description}) is not positive definite",
        hint="raise alpha, lower its rank, or use another preconditioner",
        iteration=state.iteration,
        target=int(targets[worst]),
    )


def not_converged(state: CGState, tol: float, description: str, *, approximate: bool) -> ConvergenceError:
    """The error for the worst column, with the history."""
    missing = np.flatnonzero(~state.converged)
    worst = int(missing[np.argmax(state.relative[missing])])
    residual = float(state.relative[worst])
    stagnated = len(state.live) == 0
    count = f"{len(missing)} of {len(state.converged)} targets"
    if stagnated:
        message = (
            f"CG: the true relative residual of target {worst} stays at {residual:.2g} after "
            f"{state.iteration:,} iterations and restarts; tol = {tol:.2g} is out of reach ({count})"
        )
        hint = f"set tol to at least {2 * residual:.1e}, or raise alpha" + FLOAT64 * approximate
    else:
        message = (
            f"CG did not converge in {state.iteration:,} iterations: the relative residual of target {worst} is "
            f"{residual:.2g}, tol = {tol:.2g} ({count}; preconditioner: {description})"
        )
        hint = (
            "raise max_iter (the fit goes on), the rank of the preconditioner, tol or alpha, or set allow_unconverged"
        )
    return ConvergenceError(
        message,
        hint=hint,
        history=list(state.history),
        relative_residual=state.relative.copy(),
        converged=state.converged.copy(),
        num_iterations=state.iteration,
        stagnated=stagnated,
    )


def too_slow(relative: NDArray[np.float64], iteration: int, foreseen: float, seconds_left: float) -> ConvergenceError:
    """After more iterations than were foreseen, when another way would be done sooner.

    ``falls``: whether there is an end in sight.
    """
    left = f"about {seconds_left:,.0f} s more" if np.isfinite(seconds_left) else "no end in sight"
    return ConvergenceError(
        f"CG: relative residual {relative.max():.2g} after {iteration:,} iterations, at most {foreseen:,.0f} were "
        f"foreseen, {left}",
        relative_residual=relative,
        num_iterations=iteration,
        stagnated=False,
        slow=True,
        falls=bool(np.isfinite(seconds_left)),
    )
