"""Leave-one-out and many alphas in feature space, where a leverage costs D^2 flops and no matrix of n rows.

    h_i = w_i (F_i - m)^T (G + alpha I)^-1 (F_i - m) + w_i / sum(w)      m the weighted mean, with an intercept
    h_i = w_i F_i^T (G + alpha I)^-1 F_i                                 without
    y_i - f^(-i)(x_i) = (y_i - f(x_i)) / (1 - h_i)

With G = Q diag(lam) Q^T once, h_i = w_i sum_j (F_i Q)_j^2 / (lam_j + alpha) for every alpha: the product F_i Q is
shared, so that a grid of alphas costs about as much as one of them.

Cost
----
One pass besides those of a fit: 2 n D^2 flops, and 2 n D (t + 1) for each alpha; the path has an eigendecomposition, 9
D^3 flops. :func:`primal_leave_one_out` returns n numbers a target, :func:`leave_one_out_errors` one an alpha.

References
----------
Golub, Heath and Wahba, Generalized cross-validation as a method for choosing a good ridge parameter, Technometrics 21
(1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from dkrr.errors import NotPositiveDefiniteError
from dkrr.linalg.inference.leave_one_out import MIN_SHARE, LeaveOneOut, loo_from_leverages
from dkrr.linalg.primal.passes import Affine, FeatureRows
from dkrr.linalg.primal.solver import Equations, normal_equations, solve_primal
from dkrr.linalg.targets import target_alphas
from dkrr.threads import single_blas_thread
from dkrr.tiles.blas import trsm_left

__all__ = ["leave_one_out_errors", "primal_leave_one_out"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


def primal_leave_one_out(source: FeatureRows, alpha: Any, *, fit_intercept: bool = False) -> LeaveOneOut:
    """Leave-one-out of a regression in feature space: fitted, then one pass for each distinct alpha.

    Raises
    ------
    DataError
        A row decides its own prediction.
    NotPositiveDefiniteError, ResidualError
        As :func:`~dkrr.linalg.primal.solver.fit_primal`.
    """
    n, t = source.rows.shape
    alphas, weight = target_alphas(alpha, t), source.rows.weights()
    with single_blas_thread():
        result = solve_primal(source, alphas, fit_intercept)
        equations = result.equations
        scale = np.ones(n) if weight is None else weight
        leverages, residuals = np.empty((n, t)), np.empty((n, t))
        for value in dict.fromkeys(alphas.tolist()):
            targets = alphas == value
            lower = equations.factor(value)
            basis = trsm_left(lower, np.eye(len(lower)), transposed=False).T
            affine, basis, constant = _about_means(equations, result.coef, result.shifted_intercept, basis)
            found = source.hat(affine, basis, np.ones((len(lower), 1)))
            leverages[:, targets] = (scale * (found[:, t] + constant))[:, None]
            residuals = found[:, :t]
    root = None if weight is None else np.sqrt(weight)
    return loo_from_leverages(residuals=residuals, leverages=leverages, alpha=alphas, root=root)


def leave_one_out_errors(source: FeatureRows, alphas: Sequence[float], *, fit_intercept: bool = False) -> FloatMatrix:
    """Mean squared errors of leave-one-out (k, t) for every alpha: one pass for the sums, one for the errors.

    Weighted means over the rows of positive weight; inf where a row decides its own prediction.

    Raises
    ------
    NotPositiveDefiniteError
        An alpha is lost beside the eigenvalues, some of which are zero.
    """
    with single_blas_thread():
        equations = normal_equations(source, fit_intercept)
        lam, q = eigh(equations.gram, driver="evd")
        inverse = _inverse(np.maximum(lam, 0.0), np.asarray(alphas, dtype=np.float64))
        rotated = q.T @ equations.cross
        columns = np.concatenate([q @ (inverse[:, k, None] * rotated) for k in range(len(alphas))], axis=1)
        offset = np.tile(equations.y_offset, len(alphas)) - equations.offset @ columns
        affine, basis, constant = _about_means(equations, columns, offset, q)
        squares, largest = source.path(affine, basis, inverse, constant)
    decides = (1 - largest <= MIN_SHARE)[:, None]
    return np.where(decides, np.inf, squares.reshape(len(alphas), -1) / equations.weight)


def _about_means(
    equations: Equations, coef: FloatMatrix, intercept: FloatVector, basis: FloatMatrix
) -> tuple[Affine, FloatMatrix, float]:
    """The same function of features minus their means, and what makes leverages of them.

    B such that F B0 = M B, in C order, and the share of the intercept in a leverage of weight 1.
    """
    affine, basis = equations.affine(coef, intercept), np.ascontiguousarray(equations.scale[:, None] * basis)
    if not equations.fit_intercept:
        return affine, basis, 0.0
    means = equations.offset / equations.scale + (0.0 if equations.shift is None else equations.shift)
    shifted = Affine(means, affine.y_shift, affine.coef, intercept + equations.offset @ coef)
    return shifted, basis, 1.0 / equations.weight


def _inverse(lam: FloatVector, alphas: FloatVector) -> FloatMatrix:
    """(lam + alpha)^-1 (D, k)."""
    rounding = len(lam) * float(np.finfo(np.float64).eps) * float(lam[-1])
    bad = np.flatnonzero(lam[0] + alphas <= rounding)
    if len(bad):
        alpha = float(alphas[bad[0]])
        raise NotPositiveDefiniteError(
            f"F^T W F + alpha I of {len(lam):,} features is not positive definite: its smallest eigenvalue is "
            f"{lam[0]:.2g} (largest {lam[-1]:.2g}) with alpha {alpha:.3g}",
            hint=f"leave out every alpha below {10 * rounding:.1g}, or features that others determine",
            row=None,
            pivot=float(lam[0] + alpha),
            alpha=alpha,
            suggested_alpha=10 * rounding,
        )
    return np.asarray(1.0 / (lam[:, None] + alphas))
