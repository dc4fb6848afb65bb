"""Ridge regression in feature space: D unknowns in the place of n, where the kernel has D < n explicit features.

    minimise  sum_i w_i (y_i - F(x_i).c - b)^2 + alpha |c|^2
    (F^T W F + alpha I) c = F^T W y                     F (n, D),  F(x).F(z) = k(x, z),  W = diag(w)

The minimiser is that of kernel ridge regression with the same kernel and alpha: c = F^T S u of the dual solution u.
Use it for the linear kernel, and for polynomials while C(d + p, p) is small. n is not felt: one pass over the rows
forms the sums, one evaluates the residual, and all that is kept is D x D, in the driver.

With an intercept all sums are about means: F and y are shifted before they are summed, the weighted means follow from
the sums, and where the shift was a bad guess, so that the difference of two sums loses digits, the pass is repeated
around the means that are known then.

F^T W F has the square of the condition of F. The residual of the normal equations is therefore never taken from the
sums: it is F^T W (y - F c - b) - alpha c, row by row, which is also what is reported. As long as the correction that it
implies is more than rounding, it is made and the residual evaluated again, at most twice (corrected seminormal
equations: errors like those of an orthogonal factorisation, unless F is singular to half of the digits).

Cost
----
n D^2 + 4 n D t flops and two readings of the rows; D^3 / 3 flops for each distinct alpha, 16 D^2 bytes in the driver.
At most 10,000 features.

References
----------
Saunders, Gammerman and Vovk, Ridge regression learning algorithm in dual variables, ICML 1998, for both sides.
Bjorck, Stability analysis of the method of seminormal equations for linear least squares problems, Linear Algebra and
its Applications 88/89 (1987).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.dataset.destination import storage_errors
from dkrr.engine.session import memory_limit_of
from dkrr.errors import DamagedChunkError, DataError, ParameterError, PlanRefusedError, ResidualError
from dkrr.kernels import Kernel
from dkrr.kernels.features import FeatureMap, count_features, feature_map
from dkrr.linalg.keys import FORMAT_VERSION, KERNEL_VERSION, key_of
from dkrr.linalg.primal.equations import Equations, normal_equations
from dkrr.linalg.primal.row_pass import sums_bytes, task_memory
from dkrr.linalg.primal.source import ArraySource, RowsSource
from dkrr.linalg.primal.stored import StoredSource
from dkrr.linalg.sizes import BARE_BYTES
from dkrr.linalg.solution import Solution, backward_error_bar
from dkrr.linalg.workspace import Workspace
from dkrr.lock import hold_lock
from dkrr.stores import place, remove_array
from dkrr.threads import single_blas_thread

__all__ = [
    "MAX_FEATURES",
    "PrimalResult",
    "evaluate",
    "fit_primal",
    "fit_primal_arrays",
    "primal_bytes",
    "primal_features",
    "primal_key",
    "solve_primal",
    "target_alphas",
]

logger = logging.getLogger("dkrr.linalg.primal.solver")

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]

MAX_FEATURES = 10_000
MAX_CORRECTIONS = 2
# a correction of less than this share of the coefficients is not worth another pass
NEGLIGIBLE = 1e-11


@dataclass(frozen=True, kw_only=True, eq=False)
class PrimalResult:
    """A regression in feature space, f(x) = F(x) coef + intercept, and how good it is as a solution.

    Parameters
    ----------
    features
        F.
    coef : (D, t)
    intercept : (t,), optional
        None without one.
    shifted_intercept : (t,)
        The same about the shifts of the passes; zero without one.
    solution
        ``relative_residual``: |F^T W (y - F c - b) - alpha c| / |F^T W y|, 2-norms, F and y about their means with an
        intercept; 0 where F^T W y is nothing but rounding. ``backward_error``: the same in the infinity norm, divided
        by |F^T W F + alpha I| |c| + max_j |F_j| |y|, norms weighted; the last term is what F^T W y may be off by when
        y is, in its last digit.
    equations
        The sums, for whatever else can be known from them.
    """

    features: FeatureMap
    coef: FloatMatrix
    intercept: FloatVector | None
    shifted_intercept: FloatVector
    solution: Solution
    equations: Equations


def primal_features(kernel: Kernel | None, num_inputs: int, num_rows: int) -> FeatureMap:
    """The features of a kernel, if they are few enough.

    Raises
    ------
    ParameterError
        The kernel has no finite number of real features, or more than 10,000.
    """
    features = feature_map(kernel, num_inputs)
    count = count_features(kernel, num_inputs) or 0
    if count > MAX_FEATURES:
        raise ParameterError(
            f"{features.kernel.describe()} has {count:,} features of {num_inputs:,} inputs ({num_rows:,} rows); the "
            f"primal solver takes at most {MAX_FEATURES:,}",
            hint="lower the degree, or take another solver",
        )
    return features


def primal_bytes(kernel: Kernel | None, num_inputs: int, num_rows: int, num_targets: int) -> tuple[int, int, int]:
    """Peak memory of a task and of the driver besides their interpreters', and what the sums take on disk."""
    features = primal_features(kernel, num_inputs, num_rows)
    size = features.num_features
    driver = 16 * size * size + 64 * size * num_targets
    return task_memory(features, num_targets, num_targets), driver, sums_bytes(num_rows, features, num_targets)


def fit_primal(
    dataset: Dataset,
    kernel: Kernel | None,
    alpha: Sequence[float],
    workspace: Workspace,
    *,
    fit_intercept: bool = False,
) -> PrimalResult:
    """Fit D coefficients to the n rows of a data set.

    An interrupted fit goes on with the sums it had when the same fit runs again on the same store.

    Parameters
    ----------
    dataset
        Training rows X, targets Y, optional weights, as the kernel shall see them.
    kernel
        linear, or poly of whole degree with coef0 >= 0.
    alpha
        One, or one per target.
    workspace
        Where, and on whom.

    Raises
    ------
    ParameterError
        A kernel without few features; no target; a negative alpha.
    PlanRefusedError
        The workers have too little memory.
    NotPositiveDefiniteError
        F^T W F + alpha I is singular.
    ResidualError
        The backward error exceeds 30 n eps.
    DataError
        The features overflow.
    DamagedChunkError
        A chunk of the rows is missing, damaged, or in the place of another.
    LockedError
        Another process does the same fit on the same store.
    """
    if dataset.y is None:
        raise ParameterError(f"{dataset.path} has no target", hint="name one with target=")
    features = primal_features(kernel, dataset.num_features, dataset.num_rows)
    alphas = target_alphas(alpha, dataset.num_targets)
    needed = BARE_BYTES + task_memory(features, dataset.num_targets, dataset.num_targets)
    limit = memory_limit_of(workspace.executor)
    if limit is not None and needed > limit:
        raise PlanRefusedError(
            f"a task with {features.num_features:,} features takes {needed:,} bytes; a worker has {limit:,}",
            hint="raise memory_limit",
            needed=needed,
            limit=limit,
        )
    location = place(workspace.store, "solves", primal_key(dataset, features, workspace, fit_intercept) + ".zarr")
    with hold_lock(location), storage_errors(workspace.store), single_blas_thread():
        try:
            source = StoredSource(dataset, features, workspace, location)
            result = solve_primal(source, alphas, fit_intercept, workspace)
        except (DamagedChunkError, DataError):
            remove_array(location)
            raise
        remove_array(location)
    return result


def primal_key(dataset: Dataset, features: FeatureMap, workspace: Workspace, fit_intercept: bool) -> str:
    """What decides the sums: no alpha."""
    return key_of(
        {
            "format_version": FORMAT_VERSION,
            "kernel_version": KERNEL_VERSION,
            "kernel": features.kernel.to_dict(),
            "rows": [dataset.digest, dataset.digest_y, dataset.digest_weight],
            "solver": "primal",
            "fit_intercept": fit_intercept,
            "blas": workspace.blas,
        }
    )


def fit_primal_arrays(
    x: FloatMatrix,
    y: FloatMatrix,
    kernel: Kernel | None,
    alpha: Sequence[float] | FloatVector,
    *,
    weight: FloatVector | None = None,
    fit_intercept: bool = False,
) -> PrimalResult:
    """The same for rows x (n, d), y (n, t) in memory, in this process."""
    features = primal_features(kernel, x.shape[1], len(x))
    with single_blas_thread():
        return solve_primal(ArraySource(features, x, y, weight), target_alphas(alpha, y.shape[1]), fit_intercept, None)


def target_alphas(alpha: Sequence[float] | FloatVector, num_targets: int) -> FloatVector:
    """An alpha for each target.

    Raises
    ------
    ParameterError
        Another number of them, or a negative one.
    """
    values = np.asarray(alpha, dtype=np.float64).ravel()
    if len(values) not in (1, num_targets):
        raise ParameterError(f"{len(values)} values of alpha for {num_targets} targets; 1 or {num_targets} expected")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ParameterError(f"alpha = {values.min()}", hint="give a number that is at least 0")
    return np.broadcast_to(values, (num_targets,)).copy()


def solve_primal(
    source: RowsSource, alphas: FloatVector, fit_intercept: bool, workspace: Workspace | None
) -> PrimalResult:
    """The fit, wherever the rows are."""
    started = time.perf_counter()
    equations = normal_equations(source, fit_intercept)
    coef = equations.solve(equations.cross, alphas)
    best: tuple[FloatMatrix, FloatVector, FloatVector, FloatVector] | None = None
    corrections = 0
    while True:
        intercept, residual = evaluate(source, equations, coef, alphas)
        relative, backward = _norms(equations, alphas, coef, residual)
        if best is not None and not (backward < 0.5 * best[3]).any():
            break  # rounding has been reached; what was before is no worse
        best = coef, intercept, relative, backward
        correction = equations.solve(residual, alphas)
        needed = np.abs(correction).max(axis=0) > NEGLIGIBLE * np.abs(coef).max(axis=0)
        # what is left over of a target without anything to fit is rounding
        needed &= backward > 0
        if corrections == MAX_CORRECTIONS or not needed.any():
            break
        coef = coef + np.where(needed, correction, 0.0)
        corrections += 1
    coef, intercept, relative, backward = best
    n, size = source.num_rows, source.features.num_features
    bar = backward_error_bar(n, "float64")
    if not backward.max() <= bar:
        raise ResidualError(
            f"backward error {backward.max():.2g} exceeds {bar:.2g} (30 n eps) of {size:,} features",
            hint="raise alpha, scale the features, or lower the degree",
        )
    phases = {} if workspace is None else {name: run.seconds for name, run in workspace.phases.items()}
    solution = Solution(
        solver="primal",
        precision="float64",
        converged=True,
        num_iterations=0,
        relative_residual=relative.tolist(),
        backward_error=backward.tolist(),
        seconds=phases or {"total": time.perf_counter() - started},
        message=f"{size:,} features of {n:,} rows, {corrections} corrections, largest relative residual "
        f"{relative.max():.1e}",
    )
    return PrimalResult(
        features=source.features,
        coef=coef,
        intercept=equations.plain_intercept(coef, intercept) if fit_intercept else None,
        shifted_intercept=intercept,
        solution=solution,
        equations=equations,
    )


def evaluate(
    source: RowsSource, equations: Equations, coef: FloatMatrix, alphas: FloatVector
) -> tuple[FloatVector, FloatMatrix]:
    """The intercept, about the shifts, that belongs to coefficients, and the residual (D, t) of both, from the rows."""
    d, t = coef.shape
    intercept = equations.y_offset - equations.offset @ coef
    sums = source.residual(equations.affine(coef, intercept))
    first, zeroth = equations.scale[:, None] * sums[: d * t].reshape(d, t), sums[d * t : (d + 1) * t]
    if equations.fit_intercept:
        # the intercept that makes 1^T W R vanish, to the last digit
        intercept = intercept + zeroth / equations.weight
        first = first - equations.offset[:, None] * zeroth
    return intercept, first - alphas * coef


def _norms(
    equations: Equations, alphas: FloatVector, coef: FloatMatrix, residual: FloatMatrix
) -> tuple[FloatVector, FloatVector]:
    """Relative residual and backward error of each target."""
    right = np.linalg.norm(equations.cross, axis=0)
    is_zero = right <= equations.cross_rounding
    length = np.linalg.norm(residual, axis=0)
    relative = np.where(is_zero, 0.0, length / np.where(right > 0, right, 1.0))
    bound = (equations.gram_norm + alphas) * np.abs(coef).max(axis=0) + equations.cross_bound
    largest = np.abs(residual).max(axis=0)
    return relative, np.where(largest > 0, largest / np.where(bound > 0, bound, 1.0), 0.0)
