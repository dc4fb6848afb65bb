"""The diagonal of A^-1 = (S K S + alpha I)^-1 estimated by conjugate gradients, with standard errors and no factor.

    D_i ~ mean over q of  z_qi (A^-1 z_q)_i - c_i (z_qi (P^-1 z_q)_i - (P^-1)_ii),     z_q random signs, q = 1 .. m

A sample is A^-1_ii plus noise of variance sum_{j != i} (A^-1)_ij^2. The preconditioner P = F F^T + alpha I makes much
the same noise, and its own diagonal is known, so c_i times its noise is taken away; c_i in 0 .. 1 is the regression of
one on the other over the probes, by row: where P is far from A (a small alpha) it would add noise with c = 1. Any
solver that has P can do this; without a preconditioner c = 0.

For an intercept v = A^-1 s rides along as one column more, and the diagonal is that of the bordered inverse,
D_i - v_i^2 / (s^T v), which adds no noise.

Bounds
------
For a positive semi-definite kernel 1 / A_ii <= D_i <= 1 / alpha, and D_i <= (P^-1)_ii where F F^T <= S K S, as the
factors here are. With an intercept, from e_i and its projection onto s^T x = 0,

    (1 - s_i^2 / |s|^2)^2 / (sqrt(A_ii) + s_i / |s|^2 sum_j s_j sqrt(A_jj))^2 <= D_i <= (1 - s_i^2 / |s|^2) / alpha

Estimates outside are moved onto them and counted. Standard errors are those of the estimate before it was moved, and
contain the error A^-1 r that the iteration left in x = A^-1 z. With rho = |r| / |z|, its root mean square over the rows
is at most rho / alpha; at a row of which A^-1 is short it is about rho |x_i|, as r is not much less random than z, and
ten times that is believed, if it is less.

Cost
----
m columns of conjugate gradients to a relative residual of 1e-6; 2 n r^2 flops for the diagonal of P^-1, in the calling
process, which holds 3 n m doubles. Relative standard errors are about sqrt(h / ((1 - h) m)) for a leverage h without
a preconditioner.

References
----------
Bekas, Kokiopoulou and Saad (2007), as in :mod:`dkrr.linalg.inference.probes`; Meyer, Musco, Musco and Woodruff,
Hutch++: Optimal stochastic trace estimation, SOSA 2021, for a low-rank matrix as control variate; Wenger, Pleiss,
Hennig, Cunningham and Gardner, Preconditioning for scalable Gaussian process hyperparameter optimization, ICML 2022,
for the preconditioner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import check_whole
from dkrr.linalg.cg.column_solves import Column, ColumnSolves
from dkrr.linalg.cg.factor_precondition import diagonal_entries
from dkrr.linalg.cg.solver import PreparedCG
from dkrr.linalg.columns import row_blocks
from dkrr.linalg.inference.probes import rademacher
from dkrr.linalg.lowrank.preconditioner import LowRank

__all__ = [
    "MIN_PROBES",
    "PROBE_TOL",
    "StochasticDiagonal",
    "probe_columns",
    "right_hand_side",
    "stochastic_from_columns",
    "stochastic_inverse_diagonal",
]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]

# Its error in D_i is about 1e-6 / (1 - h_i): far below what any number of probes leaves.
PROBE_TOL = 1e-6
MIN_PROBES = 4
# what the error of an iteration may exceed its usual size by
RESIDUAL_FACTOR = 10.0


@dataclass(frozen=True, kw_only=True)
class StochasticDiagonal:
    """An estimate of the diagonal of A^-1, or with an intercept of that of the bordered inverse, for one alpha.

    Parameters
    ----------
    inverse_diagonal : (n,)
        D, within its bounds; 1 / alpha, exactly, in rows of weight zero.
    standard_error : (n,)
        Of D before it was moved onto its bounds.
    unbounded : (n,)
        D before that.
    lower : (n,)
        The bound from below.
    deviations : (n, m)
        The samples of D less their mean, for standard errors of what is computed from all rows.
    trace, trace_se
        Sum of D over the rows of positive weight, and its standard error.
    num_projected
        Rows that were moved, by more than the iteration's error.
    ones : (n,) or None
        v = A^-1 s, of an intercept.
    solver_error : (n,)
        What the iteration's residual may have left in D.
    alpha
    num_iterations
        Of conjugate gradients, of all blocks of columns together.
    """

    inverse_diagonal: FloatVector
    standard_error: FloatVector
    unbounded: FloatVector
    lower: FloatVector
    deviations: FloatMatrix
    trace: float
    trace_se: float
    num_projected: int
    ones: FloatVector | None
    solver_error: FloatVector
    alpha: float
    num_iterations: int = 0

    @property
    def num_probes(self) -> int:
        """m."""
        return int(self.deviations.shape[1])


def probe_columns(alpha: float, num_probes: int, *, with_ones: bool) -> list[Column]:
    """The columns of one alpha.

    Raises
    ------
    ParameterError
        Fewer than four probes have no standard error to speak of.
    """
    check_whole("num_probes", num_probes, MIN_PROBES, hint="32 is the default")
    ones = [Column(alpha, "ones")] if with_ones else []
    return ones + [Column(alpha, "probe", q) for q in range(num_probes)]


def right_hand_side(column: Column, n: int, seed: int, root: FloatVector | None) -> FloatVector:
    """z of a probe, or s; the same probes for every alpha."""
    if column.kind == "probe":
        return rademacher(n, column.index, seed)
    return np.ones(n) if root is None else root.astype(np.float64)


def stochastic_inverse_diagonal(
    prepared: PreparedCG,
    store: Any,
    alpha: float,
    *,
    num_probes: int = 32,
    seed: int = 0,
    with_ones: bool = False,
    tol: float = PROBE_TOL,
) -> StochasticDiagonal:
    """Estimate diag(A^-1) of a prepared system.

    Parameters
    ----------
    prepared
        Operator and preconditioner, :meth:`dkrr.linalg.cg.solver.CGSolver.prepare`.
    store
        Folder or URL where the columns are kept while they are solved, so that an interrupted estimate goes on. What
        it left is found by its content, whatever else is there.
    num_probes, seed
        m; everything random comes from the seed, a probe's number and a row's.
    with_ones
        Whether there is an intercept.
    tol
        Relative residual of the columns.

    Raises
    ------
    ParameterError
        Too few probes.
    NotPositiveDefiniteError, PreconditionerError, ConvergenceError
        See :func:`dkrr.linalg.cg.iteration.conjugate_gradients`.
    """
    columns = probe_columns(alpha, num_probes, with_ones=with_ones)
    n, root = prepared.operator.grid.n, prepared.operator.root_weights()
    solves = ColumnSolves(
        prepared, store, columns, lambda column: right_hand_side(column, n, seed, root), tol=tol
    )  # fmt: skip
    solves.run()
    return stochastic_from_columns(solves, columns, seed=seed)


def stochastic_from_columns(solves: ColumnSolves, columns: Sequence[Column], *, seed: int) -> StochasticDiagonal:
    """The estimate from the columns of one alpha that were solved, :func:`probe_columns`."""
    operator, preconditioner, alpha = solves.prepared.operator, solves.prepared.preconditioner, columns[0].alpha
    n, root = operator.grid.n, operator.root_weights()
    probes = [column for column in columns if column.kind == "probe"]
    samples = solves.take(probes)
    noise, upper = np.zeros((0, 0)), np.full(n, 1.0 / alpha if alpha > 0 else np.inf)
    signs = np.column_stack([right_hand_side(column, n, seed, root) for column in probes])
    if isinstance(preconditioner, LowRank):
        known = preconditioner.inverse_diagonal(alpha)
        noise = preconditioner.apply(signs, np.full(len(probes), alpha))
        noise *= signs
        noise -= known[:, None]
        if preconditioner.shift(alpha) == alpha:
            upper = np.minimum(upper, known)
    samples *= signs
    del signs
    size = RESIDUAL_FACTOR * np.sqrt(np.einsum("ij,ij->i", samples, samples) / len(probes))
    residual = float(np.sqrt(np.mean(np.square(solves.relative_residual(probes)))))
    solver_error = residual * (np.minimum(size, 1.0 / alpha) if alpha > 0 else size)
    mean, standard_error = _regress(samples, noise)
    samples -= mean[:, None]
    system = diagonal_entries(operator) + alpha
    unseen = np.zeros(n, np.bool_) if root is None else root == 0
    mean[unseen], samples[unseen] = 1.0 / system[unseen], 0.0
    standard_error[unseen], solver_error[unseen] = 0.0, 0.0
    lower, ones = 1.0 / system, None
    if columns[0].kind == "ones":
        ones = solves.take(columns[:1])[:, 0]
        normal = np.ones(n) if root is None else root
        border = ones * (ones / (normal @ ones))
        mean -= border
        lower, upper = _bordered_bounds(lower - border, upper - border, system, normal, alpha)
    return _bounded(
        mean, standard_error, samples, lower, upper, ones=ones, alpha=alpha, solver_error=solver_error, seen=~unseen,
        num_iterations=solves.num_iterations,
    )  # fmt: skip


def _regress(samples: FloatMatrix, noise: FloatMatrix) -> tuple[FloatVector, FloatVector]:
    """Take c_i times the noise from the samples, in place; their means (n,) and standard errors (n,)."""
    n, m = samples.shape
    mean, error = np.empty(n), np.empty(n)
    for rows in row_blocks(n):
        part = samples[rows]
        used = np.zeros(len(part))
        if noise.size:
            known = noise[rows]
            centred = known - known.mean(axis=1, keepdims=True)
            covariance = np.einsum("ij,ij->i", part, centred)
            variance = np.einsum("ij,ij->i", centred, centred)
            factor = np.clip(np.divide(covariance, variance, out=np.zeros_like(used), where=variance > 0), 0.0, 1.0)
            part -= factor[:, None] * known
            used += (factor > 0) & (factor < 1)  # a coefficient that was fitted is a degree of freedom less
        mean[rows] = part.mean(axis=1)
        squares = np.square(part - mean[rows][:, None]).sum(axis=1)
        error[rows] = np.sqrt(squares / (m * (m - 1 - used)))
    return mean, error


def _bordered_bounds(
    lower: FloatVector, upper: FloatVector, system: FloatVector, normal: FloatVector, alpha: float
) -> tuple[FloatVector, FloatVector]:
    """The bounds of the bordered diagonal; ``lower`` and ``upper`` are the plain ones less v^2 / (s^T v)."""
    square = float(normal @ normal)
    share = 1.0 - normal**2 / square
    roots = np.sqrt(system)
    own = np.square(share / (roots + normal / square * float(normal @ roots)))
    return np.maximum(lower, own), np.minimum(upper, share / alpha if alpha > 0 else np.inf)


def _bounded(
    mean: FloatVector,
    error: FloatVector,
    deviations: FloatMatrix,
    lower: FloatVector,
    upper: FloatVector,
    *,
    ones: FloatVector | None,
    alpha: float,
    solver_error: FloatVector,
    seen: NDArray[np.bool_],
    num_iterations: int,
) -> StochasticDiagonal:
    upper = np.maximum(lower, upper)
    inside = np.clip(mean, lower, upper)
    moved = np.abs(inside - mean) > solver_error + 1e-8 * inside
    m = deviations.shape[1]
    sums = deviations[seen].sum(axis=0)
    trace = float(np.clip(mean[seen].sum(), lower[seen].sum(), upper[seen].sum()))
    return StochasticDiagonal(
        inverse_diagonal=inside,
        standard_error=np.hypot(error, solver_error),
        unbounded=mean,
        lower=lower,
        deviations=deviations,
        trace=trace,
        trace_se=float(np.hypot(np.sqrt(np.square(sums).sum() / (m * (m - 1))), solver_error[seen].sum())),
        num_projected=int(moved.sum()),
        ones=ones,
        solver_error=solver_error,
        alpha=alpha,
        num_iterations=num_iterations,
    )
