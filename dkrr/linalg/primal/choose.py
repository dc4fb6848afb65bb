"""Leave-one-out and many alphas in feature space, where a leverage costs D^2 flops and no matrix of n rows.

    h_i = w_i (F_i - m)^T (G + alpha I)^-1 (F_i - m) + w_i / sum(w)      m the weighted mean, with an intercept
    h_i = w_i F_i^T (G + alpha I)^-1 F_i                                 without
    y_i - f^(-i)(x_i) = (y_i - f(x_i)) / (1 - h_i)

With G = Q diag(lam) Q^T once, h_i = w_i sum_j (F_i Q)_j^2 / (lam_j + alpha) for every alpha: the product F_i Q is
shared, so that a grid of alphas costs about as much as one of them.

Cost
----
One pass besides those of a fit: 2 n D^2 flops, and 2 n D (t + 1) for each alpha; the path has an eigendecomposition, 9
D^3 flops. :func:`primal_leave_one_out` returns n numbers a target, :func:`primal_path` none that is n long.

References
----------
Golub, Heath and Wahba, Generalized cross-validation as a method for choosing a good ridge parameter, Technometrics 21
(1979).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from dkrr.dataset import Dataset
from dkrr.dataset.destination import storage_errors
from dkrr.errors import NotPositiveDefiniteError
from dkrr.kernels import Kernel
from dkrr.linalg.inference.leave_one_out import MIN_SHARE, LeaveOneOut, loo_from_leverages
from dkrr.linalg.primal.equations import Equations, normal_equations
from dkrr.linalg.primal.row_pass import Affine
from dkrr.linalg.primal.solver import primal_features, primal_key, solve_primal, target_alphas
from dkrr.linalg.primal.source import ArraySource, RowsSource
from dkrr.linalg.primal.stored import StoredSource
from dkrr.linalg.workspace import Workspace
from dkrr.lock import hold_lock
from dkrr.stores import place, remove_array
from dkrr.threads import single_blas_thread
from dkrr.tiles.blas import trsm_left

__all__ = ["PrimalPath", "array_source", "primal_leave_one_out", "primal_path", "stored_source"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PrimalPath:
    """One regression for each alpha.

    Parameters
    ----------
    alphas : (k,)
    coef : (k, D, t)
    intercept : (k, t), optional
    mean_squared_error : (k, t)
        Of leave-one-out, the weighted mean over rows of positive weight; inf where a row decides its own prediction.
    gcv : (k, t)
    degrees_of_freedom : (k,)
    """

    alphas: FloatVector
    coef: NDArray[np.float64]
    intercept: FloatMatrix | None
    mean_squared_error: FloatMatrix
    gcv: FloatMatrix
    degrees_of_freedom: FloatVector


def array_source(
    x: FloatMatrix, y: FloatMatrix, kernel: Kernel | None, weight: FloatVector | None = None
) -> ArraySource:
    """Rows x (n, d), y (n, t) in memory."""
    return ArraySource(primal_features(kernel, x.shape[1], len(x)), x, y, weight)


@contextmanager
def stored_source(
    dataset: Dataset, kernel: Kernel | None, workspace: Workspace, *, fit_intercept: bool = False
) -> Iterator[StoredSource]:
    """Rows of a data set, for as long as the block runs; what travels lies in the workspace's store.

    Raises
    ------
    LockedError
        Another process fits the same rows on the same store.
    """
    features = primal_features(kernel, dataset.num_features, dataset.num_rows)
    location = place(workspace.store, "solves", primal_key(dataset, features, workspace, fit_intercept) + ".zarr")
    with hold_lock(location), storage_errors(workspace.store), single_blas_thread():
        try:
            yield StoredSource(dataset, features, workspace, location)
        finally:
            remove_array(location)


def primal_leave_one_out(source: RowsSource, alpha: Any, *, fit_intercept: bool = False) -> LeaveOneOut:
    """Leave-one-out of a regression in feature space: fitted, then one pass for each distinct alpha.

    Raises
    ------
    DataError
        A row decides its own prediction.
    NotPositiveDefiniteError, ResidualError
        As :func:`~dkrr.linalg.primal.solver.fit_primal`.
    """
    alphas = target_alphas(alpha, source.num_targets)
    with single_blas_thread():
        result = solve_primal(source, alphas, fit_intercept, None)
        equations, t = result.equations, source.num_targets
        affine = _about_means(equations, result.coef, result.shifted_intercept)
        weight = source.weights()
        scale = np.ones(source.num_rows) if weight is None else weight
        leverages, residuals = np.empty((source.num_rows, t)), np.empty((source.num_rows, t))
        for value in dict.fromkeys(alphas.tolist()):
            targets = alphas == value
            lower = equations.factor(value)
            basis = trsm_left(lower, np.eye(len(lower)), transposed=False).T
            found = source.hat(affine, _of_monomials(equations, basis), np.ones((len(lower), 1)))
            leverages[:, targets] = (scale * (found[:, t] + _constant(equations)))[:, None]
            residuals = found[:, :t]
    root = None if weight is None else np.sqrt(weight)
    return loo_from_leverages(residuals=residuals, leverages=leverages, alpha=alphas, root=root)


def primal_path(source: RowsSource, alphas: Sequence[float], *, fit_intercept: bool = False) -> PrimalPath:
    """Coefficients, leave-one-out error and GCV for every alpha: one pass for the sums, one for the errors.

    Raises
    ------
    NotPositiveDefiniteError
        An alpha is lost beside the eigenvalues, some of which are zero.
    """
    values, t = np.asarray(alphas, dtype=np.float64), source.num_targets
    with single_blas_thread():
        equations = normal_equations(source, fit_intercept)
        lam, q = eigh(equations.gram, driver="evd")
        inverse = _inverse(np.maximum(lam, 0.0), values)
        rotated = q.T @ equations.cross
        coef = np.stack([q @ (inverse[:, k, None] * rotated) for k in range(len(values))])
        columns = np.concatenate(list(coef), axis=1)
        offset = np.tile(equations.y_offset, len(values)) - equations.offset @ columns
        affine = _about_means(equations, columns, offset)
        vector = source.path(affine, _of_monomials(equations, q), inverse, _constant(equations))
    count = len(values) * t
    squares, held_out = vector[:count].reshape(-1, t), vector[count : 2 * count].reshape(-1, t)
    largest, n = vector[2 * count :], equations.num_used
    dof = (np.maximum(lam, 0.0)[:, None] * inverse).sum(axis=0) + float(fit_intercept)
    with np.errstate(divide="ignore", invalid="ignore"):
        gcv = n * squares / np.square(n - dof)[:, None]
    decides = (1 - largest <= MIN_SHARE)[:, None]
    intercepts = np.stack([equations.plain_intercept(c, b) for c, b in zip(coef, offset.reshape(-1, t), strict=True)])
    return PrimalPath(
        alphas=values,
        coef=coef,
        intercept=intercepts if fit_intercept else None,
        mean_squared_error=np.where(decides, np.inf, held_out / equations.weight),
        gcv=gcv,
        degrees_of_freedom=dof,
    )


def _about_means(equations: Equations, coef: FloatMatrix, intercept: FloatVector) -> Affine:
    """The same function, of features minus their means."""
    affine = equations.affine(coef, intercept)
    if not equations.fit_intercept:
        return affine
    shift = equations.monomial_means
    return Affine(shift, affine.y_shift, affine.coef, intercept + equations.offset @ coef)


def _of_monomials(equations: Equations, basis: FloatMatrix) -> FloatMatrix:
    """B such that F B0 = M B, in C order."""
    return np.ascontiguousarray(equations.scale[:, None] * basis)


def _constant(equations: Equations) -> float:
    """The share of the intercept in a leverage of weight 1."""
    return 1.0 / equations.weight if equations.fit_intercept else 0.0


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
