"""Ridge regression in feature space: D unknowns in the place of n, where the kernel has D < n explicit features.

    minimise  sum_i w_i (y_i - F(x_i).c - b)^2 + alpha |c|^2
    (F^T W F + alpha I) c = F^T W y                     F (n, D),  F(x).F(z) = k(x, z),  W = diag(w)

The minimiser is that of kernel ridge regression with the same kernel and alpha: c = F^T S u of the dual solution u.
Use it for the linear kernel, and for polynomials while C(d + p, p) is small. n is not felt: one pass over the rows
forms the sums, one evaluates the residual, and all that is kept is D x D, in the driver.

With an intercept all sums are about means: y less its weighted mean, F less the features of the mean row. The weighted
means of F follow from the sums, and where the shift was a bad guess, so that the difference of two sums loses digits,
the pass is repeated around the means that are known then.

F^T W F has the square of the condition of F. The residual of the normal equations is therefore never taken from the
sums: it is F^T W (y - F c - b) - alpha c, row by row, which is also what is reported. As long as the correction that it
implies is more than rounding, it is made and the residual evaluated again, at most twice (corrected seminormal
equations: errors like those of an orthogonal factorisation, unless F is singular to half of the digits).

There is one Cholesky factor of the D x D equations for each distinct alpha, or one eigendecomposition for all of them.
Where no more rows than features are asked for by name, c = F^T u comes from the Gram matrix of the rows: a small alpha
is all that the equations have in the other directions.

Cost
----
n D^2 + 4 n D t flops and two readings of the rows; D^3 / 3 flops for each distinct alpha, 16 D^2 bytes in the driver.
With n <= D rows n^2 D + n^3 / 3 flops for each alpha in place of D^3 / 3, and 16 n (n + D) bytes more.
At most 10,000 features.

References
----------
Saunders, Gammerman and Vovk, Ridge regression learning algorithm in dual variables, ICML 1998, for both sides.
Bjorck, Stability analysis of the method of seminormal equations for linear least squares problems, Linear Algebra and
its Applications 88/89 (1987).

Leave-one-out and many alphas in feature space, where a leverage costs D^2 flops and no matrix of n rows.

    h_i = w_i (F_i - m)^T (G + alpha I)^-1 (F_i - m) + w_i / sum(w)      m the weighted mean, with an intercept
    h_i = w_i F_i^T (G + alpha I)^-1 F_i                                 without
    y_i - f^(-i)(x_i) = (y_i - f(x_i)) / (1 - h_i)

Of a row with 1 - h_i < 1e-6, or 1e4 eps times the inflation of the features if that is more, which alone decides a
direction, the difference has lost its digits. About D rows can be such. With f, m and G of the other rows, of these k
rows F (k, D) and their residuals r about f:

    M = I + W^1/2 ((F - m) (G + alpha I)^-1 (F - m)^T + 1 / sum(w)) W^1/2          the last term with an intercept
    1 - h_i = (M^-1)_ii,    w_i^1/2 (y_i - f^(-i)(x_i)) = (M^-1 W^1/2 r)_i / (M^-1)_ii

which is the leave-one-out of a Gaussian process that has seen the others: nothing is a difference. Up to 16 rows are
such rows one by one, k = 1, and of more those whose M_ii (M^-1)_ii is above 1e4.

With G = Q diag(lam) Q^T once, h_i = w_i sum_j (F_i Q)_j^2 / (lam_j + alpha) for every alpha: the product F_i Q is
shared, so that a grid of alphas costs about as much as one of them. lam_j is off by eps max(lam): an alpha of a
condition above 5e9, or for which a row has fewer digits than above, is fitted by itself.

Cost
----
One pass besides those of a fit: 2 n D^2 flops, and 2 n D (t + 1) for each alpha; the path has an eigendecomposition, 9
D^3 flops. k rows that decide a direction cost as much as a fit, and 2 D^2 k + k^3 flops, for each alpha.
:func:`primal_leave_one_out` returns n numbers a target, :func:`leave_one_out_errors` one an alpha.

References
----------
Golub, Heath and Wahba, Generalized cross-validation as a method for choosing a good ridge parameter, Technometrics 21
(1979).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.linalg import LinAlgError
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, eigh

from dkrr.dataset import Dataset
from dkrr.engine.machine import single_blas_thread
from dkrr.errors import DataError, NotPositiveDefiniteError, ParameterError
from dkrr.kernels import Kernel
from dkrr.kernels.features import FeatureMap, count_features, feature_map
from dkrr.linalg.catalogue import FORMAT_VERSION, KERNEL_VERSION, key_of
from dkrr.linalg.dense import dense_leave_one_out, fit_dense
from dkrr.linalg.leave_one_out import LeaveOneOut, check_shares, loo_from_leverages
from dkrr.linalg.operators import FloatMatrix, FloatVector, offset_of, ratio, row_blocks, rows_of, target_alphas
from dkrr.linalg.primal_passes import (
    MAX_STRIP_ROWS,
    DatasetRows,
    FeatureRows,
    MemoryRows,
    panels,
    row_ranges,
    task_memory,
)
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import BARE_BYTES, Workspace, check_task_memory, resumable_folder
from dkrr.tiles.blas import leading_minor_pivot, potrf, trsm_left

logger = logging.getLogger("dkrr.linalg.primal")


MAX_FEATURES = 10_000

MAX_CORRECTIONS = 2

# a correction of less than this share of the coefficients is not worth another pass
NEGLIGIBLE = 1e-11

EPS = float(np.finfo(np.float64).eps)

# 1 - h_i is off by eps times what the features inflate each other
FEW_DIGITS, MANY_DIGITS, LOST_DIGITS = 1e-6, 1e-2, 1e4 * EPS

# pivots are sums over rows, of features about their means: beyond it the others may not decide the coefficients
MOST_INFLATION = 1e11

# so many rows are left out one by one; of more together those are whose errors the others change by so much
FEW_ROWS, DEPENDS = 16, 1e4

# a variance that is the difference of sums this many times as large has lost too much
LOST = 1e4

BLOCK_ROWS = 256


@dataclass(eq=False, kw_only=True)
class Equations:
    """(G + alpha I) c = g, and the rows that they are sums over.

    Parameters
    ----------
    source
        The rows, features and targets about the shifts of their passes.
    gram : (D, D)
        G, both triangles.
    cross : (D, t)
        g.
    offset : (D,)
        Weighted means of the features about the shifts; zero without an intercept.
    y_norm : (t,)
        Weighted norm of y, about its mean with an intercept.
    weight
        Sum of the weights.
    """

    source: FeatureRows
    gram: FloatMatrix
    cross: FloatMatrix
    offset: FloatVector
    y_norm: FloatVector
    weight: float
    _factor: tuple[float, FloatMatrix] | None = None

    @classmethod
    def of(cls, source: FeatureRows, fit_intercept: bool) -> Equations:
        """One pass over the rows, or two where the first shift was a bad guess.

        Raises
        ------
        DataError
            Every weight is zero; the sums are not finite.
        """
        if fit_intercept:
            source = source.about(source.features.typical(*source.rows.moments()), source.rows.centring())
        gram, cross, squares = source.sums()
        weight = float(squares[-1])
        if not weight > 0:
            raise DataError("every row has weight zero", hint="give some rows a positive weight")
        means = cross[:, -1] / weight
        if fit_intercept:
            variance = gram.diagonal() - weight * np.square(means)
            if (variance * LOST < gram.diagonal()).any():
                logger.info("means are known now: the sums are formed again about them")
                source = source.about(means + (0.0 if source.shift is None else source.shift), source.centring)
                gram, cross, squares = source.sums()
                means = cross[:, -1] / weight
            for block in row_blocks(len(means), BLOCK_ROWS):
                gram[block] -= weight * means[block, None] * means
        return cls(
            source=source,
            gram=gram,
            cross=np.ascontiguousarray(cross[:, :-1]),  # the weighted sums of centred targets are zero
            offset=means if fit_intercept else np.zeros_like(means),
            y_norm=np.sqrt(squares[:-1]),
            weight=weight,
        )

    @property
    def fit_intercept(self) -> bool:
        return self.source.centring is not None

    @property
    def _means(self) -> FloatVector:
        """Of the features (D,); without an intercept what they are taken about."""
        return self.offset + (0.0 if self.source.shift is None else self.source.shift)

    def factor(self, alpha: float) -> FloatMatrix:
        """L with L L^T = G + alpha I; the last one is kept.

        Raises
        ------
        NotPositiveDefiniteError
            There is none, or rounding alone makes one.
        """
        if self._factor is None or self._factor[0] != alpha:
            self._factor = None  # one copy at a time
            system = self._system(alpha)
            info = potrf(system)
            pivots = np.square(system.diagonal())
            # rounding alone decides whether such a pivot is positive
            lost = np.flatnonzero(pivots <= len(system) * EPS * (self.gram.diagonal() + alpha)).tolist()
            if info or lost:
                order, pivot = (
                    leading_minor_pivot(self._system(alpha), info) if info else (lost[0] + 1, pivots[lost[0]])
                )
                size, spread = len(system), EPS * float(self.gram.diagonal().max())
                suggested = alpha + (10 * max(abs(float(pivot)), size * spread) or EPS)
                raise NotPositiveDefiniteError(
                    f"F^T W F + alpha I of {size:,} features is not positive definite at feature {order - 1:,} "
                    f"(pivot {pivot:.2g}, alpha {alpha:.3g}): it depends on those before it",
                    hint=f"raise alpha to at least {suggested:.1g}, or leave out features that others determine",
                    row=order - 1,
                    pivot=float(pivot),
                    alpha=alpha,
                    suggested_alpha=suggested,
                )
            self._factor = alpha, system
        return self._factor[1]

    def inflation(self, alpha: float) -> float:
        """max_j a_jj / l_jj^2 of A = G + alpha I: variance inflation factors of features beside those before them."""
        return float(((self.gram.diagonal() + alpha) / np.square(self.factor(alpha).diagonal())).max())

    def _system(self, alpha: float) -> FloatMatrix:
        system = self.gram.copy()
        system[np.diag_indices_from(system)] += alpha
        return system

    def solve(self, right: FloatMatrix, alphas: FloatVector) -> FloatMatrix:
        """(G + alpha I)^-1 right (D, t), with an alpha for each column."""
        found = np.empty(right.shape)
        for alpha in dict.fromkeys(alphas.tolist()):
            columns = alphas == alpha
            z = trsm_left(self.factor(alpha), np.ascontiguousarray(right[:, columns]), transposed=False)
            found[:, columns] = trsm_left(self.factor(alpha), z, transposed=True)
        return found

    def residual(self, coef: FloatMatrix, alphas: FloatVector) -> tuple[FloatVector, FloatMatrix]:
        """The intercept, about the shifts, of coefficients, and the residual (D, t) of both, from the rows."""
        intercept = -self.offset @ coef
        sums = self.source.residual(coef, intercept)
        first, zeroth = sums[:-1], sums[-1]
        if self.fit_intercept:
            # the intercept that makes 1^T W R vanish, to the last digit
            intercept = intercept + zeroth / self.weight
            first = first - self.offset[:, None] * zeroth
        return intercept, first - alphas * coef

    def norms(self, coef: FloatMatrix, residual: FloatMatrix, alphas: FloatVector) -> tuple[FloatVector, FloatVector]:
        """Relative residual and backward error of each target."""
        diagonal, right = np.maximum(self.gram.diagonal(), 0.0), np.linalg.norm(self.cross, axis=0)
        # a |g| or residual that may be nothing but the rounding of features about their means, of y and of sums
        y_size = np.hypot(self.y_norm, np.sqrt(self.weight) * offset_of(self.source.centring))
        spread, mean = diagonal.sum(), self.weight * np.square(self._means).sum() * self.fit_intercept
        rounding = 10 * EPS * (np.sqrt(spread + mean) * self.y_norm + np.sqrt(spread) * y_size)
        largest = np.abs(residual).max(axis=0)
        is_zero = right <= rounding
        relative = ratio(np.linalg.norm(residual, axis=0), np.where(is_zero, 0.0, right))
        # max_j |F_j| |y| bounds |g| by Cauchy and Schwarz
        gram_norm = max(
            float(np.abs(self.gram[rows]).sum(axis=1).max()) for rows in row_blocks(len(diagonal), BLOCK_ROWS)
        )
        bound = (gram_norm + alphas) * np.abs(coef).max(axis=0) + np.sqrt(diagonal.max()) * self.y_norm
        return relative, ratio(np.where(is_zero & (largest <= rounding), 0.0, largest), bound)

    def leverages(
        self, coef: FloatMatrix, intercept: FloatVector, basis: FloatMatrix
    ) -> tuple[FeatureRows, FloatVector, FloatMatrix, float]:
        """The rows about their means, the intercept of ``coef`` there, B in C order, and the intercept's own leverage.

        That is what every row of weight 1 has besides |(F_i - m) B|^2.
        """
        source = self.source.about(self._means if self.fit_intercept else None, self.source.centring)
        constant = 1.0 / self.weight if self.fit_intercept else 0.0
        return source, intercept + self.offset @ coef, np.ascontiguousarray(basis), constant


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
    size, edge = features.num_features, panels(features).tile_size
    driver = 16 * size * size + 64 * size * num_targets
    driver += 16 * num_rows * (size + num_rows) if num_rows <= size else 0
    # about: ranges are of whole chunks, which are not known here
    count = len(row_ranges(num_rows, features, MAX_STRIP_ROWS)) * panels(features).num_lower
    sums = 8 * count * (edge + num_targets + 1) * (edge + 1)
    return task_memory(features, num_inputs, num_targets, num_targets), driver, sums


@contextmanager
def stored_source(
    dataset: Dataset, kernel: Kernel | None, workspace: Workspace, *, fit_intercept: bool = False, keep: bool = False
) -> Iterator[FeatureRows]:
    """Rows of a data set, for as long as the block runs; what travels lies in the workspace's store.

    With ``keep`` a block that is interrupted leaves its sums to the next one.

    Raises
    ------
    LockedError
        Another process fits the same rows on the same store.
    """
    features = primal_features(kernel, dataset.num_features, dataset.num_rows)
    decides_the_sums = {  # no alpha
        "format_version": FORMAT_VERSION,
        "kernel_version": KERNEL_VERSION,
        "kernel": features.kernel.to_dict(),
        "rows": [dataset.digest, dataset.digest_y, dataset.digest_weight],
        "solver": "primal",
        "fit_intercept": fit_intercept,
        "blas": workspace.blas,
    }
    with resumable_folder(workspace, key_of(decides_the_sums), keep=keep) as location:
        yield FeatureRows(features, DatasetRows(rows_of(dataset, features.kernel)), workspace, location)


def array_source(
    x: FloatMatrix, y: FloatMatrix, kernel: Kernel | None, weight: FloatVector | None = None
) -> FeatureRows:
    """Rows x (n, d), y (n, t) in memory."""
    return FeatureRows(primal_features(kernel, x.shape[1], len(x)), MemoryRows(x, y, weight))


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
    features = primal_features(kernel, dataset.num_features, dataset.num_rows)
    alphas, t = target_alphas(alpha, dataset.num_targets), dataset.num_targets
    needed = BARE_BYTES + task_memory(features, features.num_inputs, t, t)
    check_task_memory(workspace, f"{features.num_features:,} features", needed, "raise memory_limit")
    with stored_source(dataset, kernel, workspace, fit_intercept=fit_intercept, keep=True) as source:
        return solve_primal(source, alphas, fit_intercept)


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
    source = array_source(x, y, kernel, weight)
    with single_blas_thread():
        return solve_primal(source, target_alphas(alpha, y.shape[1]), fit_intercept)


def solve_primal(source: FeatureRows, alphas: FloatVector, fit_intercept: bool) -> PrimalResult:
    """The fit, wherever the rows are."""
    started = time.perf_counter()
    equations = Equations.of(source, fit_intercept)
    if (few := _few_rows(source, fit_intercept)) is None:
        coef, most, how = equations.solve(equations.cross, alphas), MAX_CORRECTIONS, "{} corrections"
    else:  # each direction that the rows do not have is an eigenvector of F^T W F + alpha I: rounding, over alpha
        gram, features, rows = few
        fit = fit_dense(None, gram, rows.y, alphas, rows.weight, "float64", fit_intercept=fit_intercept)
        coef, most, how = features.T @ fit.dual_coef, 0, "by their Gram matrix"
    best: tuple[FloatMatrix, FloatVector, FloatVector, FloatVector] | None = None
    corrections = 0
    while True:
        intercept, residual = equations.residual(coef, alphas)
        relative, backward = equations.norms(coef, residual, alphas)
        is_rounding = best is not None and not (backward < 0.5 * best[3]).any()
        # of two that are as good, the later one is nearer in directions that the rows do not have, where alpha is alone
        if best is None or not is_rounding or (backward <= 2 * best[3]).all():
            best = coef, intercept, relative, backward
        if is_rounding or corrections == most:
            break
        correction = equations.solve(residual, alphas)
        needed = np.abs(correction).max(axis=0) > NEGLIGIBLE * np.abs(coef).max(axis=0)
        # what is left over of a target without anything to fit is rounding
        needed &= backward > 0
        if not needed.any():
            break
        coef = coef + np.where(needed, correction, 0.0)
        corrections += 1
    coef, intercept, relative, backward = best
    n, size = source.rows.shape[0], source.features.num_features
    phases = {} if source.workspace is None else {name: run.seconds for name, run in source.workspace.phases.items()}
    solution = Solution.direct(
        n, relative.tolist(), backward.tolist(), solver="primal", precision="float64",
        seconds=phases or {"total": time.perf_counter() - started},
        message=f"{size:,} features of {n:,} rows, {how.format(corrections)}",
        hint="raise alpha, scale the features, or lower the degree",
    )  # fmt: skip
    constant, shift = intercept + offset_of(equations.source.centring), equations.source.shift
    if shift is not None:
        constant -= shift @ coef
    return PrimalResult(
        features=cast(FeatureMap, source.features),
        coef=coef,
        intercept=constant if fit_intercept else None,
        shifted_intercept=intercept,
        solution=solution,
        equations=equations,
    )


def primal_leave_one_out(source: FeatureRows, alpha: Any, *, fit_intercept: bool = False) -> LeaveOneOut:
    """Leave-one-out of a regression in feature space: fitted, then one pass for each distinct alpha.

    Raises
    ------
    DataError
        A row decides its own prediction.
    NotPositiveDefiniteError, ResidualError
        As :func:`~dkrr.linalg.primal.fit_primal`.
    """
    alphas = target_alphas(alpha, source.rows.shape[1])
    with single_blas_thread():
        if (few := _few_rows(source, fit_intercept)) is not None:
            return left_out_of_few(few[0], few[2], alphas, fit_intercept)
        result = solve_primal(source, alphas, fit_intercept)
        return left_out(result.equations, result.coef, result.shifted_intercept, alphas)


def left_out_of_few(gram: FloatMatrix, rows: MemoryRows, alphas: FloatVector, fit_intercept: bool) -> LeaveOneOut:
    """The same of no more rows than features, by the Gram matrix of the rows (n, n) and with its condition.

    That of the features has eigenvalues of alpha alone, and 1 - h_i would be what rounding leaves of a difference.
    """
    fit = fit_dense(None, gram, rows.y, alphas, rows.weight, "float64", fit_intercept=fit_intercept)
    values = gram @ fit.dual_coef + (0.0 if fit.intercept is None else fit.intercept)
    return dense_leave_one_out(
        None, gram, rows.y, alphas, rows.weight, fit.dual_coef, lambda unseen: values[unseen],
        fit_intercept=fit_intercept,
    )  # fmt: skip


def _few_rows(source: FeatureRows, fit_intercept: bool) -> tuple[FloatMatrix, FloatMatrix, MemoryRows] | None:
    """Of no more rows than features their Gram matrix (n, n), their features (n, D), and the rows; None of others.

    With an intercept the features are about their mean, which costs no digits then.
    """
    if source.rows.shape[0] > source.features.num_features:
        return None
    rows = source.rows.whole()
    features = np.array(cast(FeatureMap, source.features).design(rows.x), order="C")
    if fit_intercept:
        features -= np.average(features, axis=0, weights=rows.weight)
    gram = features @ features.T
    if fit_intercept:
        gram += gram.diagonal().mean()  # changes nothing, for the coefficients have the sum 0; but 1 is an eigenvector
    return gram, features, rows


def left_out(equations: Equations, coef: FloatMatrix, intercept: FloatVector, alphas: FloatVector) -> LeaveOneOut:
    """Leave-one-out of coefficients that solve the equations, their intercept about the shifts."""
    (n, t), weight = equations.source.rows.shape, equations.source.rows.weights()
    scale = np.ones(n) if weight is None else weight
    share, residuals, root, few = np.empty((n, t)), np.empty((n, t)), np.sqrt(scale), FEW_DIGITS
    for alpha in dict.fromkeys(alphas.tolist()):
        lower, few = equations.factor(alpha), max(few, LOST_DIGITS * equations.inflation(alpha))
        basis = trsm_left(lower, np.eye(len(lower)), transposed=False).T
        source, shifted, basis, constant = equations.leverages(coef, intercept, basis)
        found = source.hat(coef, shifted, basis, np.ones((len(lower), 1)))
        share[:, alphas == alpha] = 1.0 - scale[:, None] * (found[:, t:] + constant)
        residuals = found[:, :t]
    alone = np.flatnonzero((share < min(few, MANY_DIGITS)).any(axis=1))
    if len(alone) > FEW_ROWS:  # in two parts, for they may be all
        parts, alone = (alone[::2], alone[1::2]), alone[:0]
        for rows in parts:
            share[rows], residuals[rows], inflation = _beside_others(equations, rows, root[rows], alphas)
            alone = np.append(alone, rows[inflation > DEPENDS])
    for i in alone:
        share[i], residuals[i], _ = _beside_others(equations, np.array([i]), root[[i]], alphas)
    return loo_from_leverages(residuals=residuals, share=share, alpha=alphas, root=root)


def _beside_others(
    equations: Equations, rows: NDArray[np.int64], root: FloatVector, alphas: FloatVector
) -> tuple[FloatMatrix, FloatMatrix, FloatVector]:
    """1 - h_i and y_i - f(x_i), both (k, t), and M_ii (M^-1)_ii, (k,), of k rows by a fit of the others."""
    try:
        others = solve_primal(equations.source.without(rows.tolist()), alphas, equations.fit_intercept)
    except (DataError, NotPositiveDefiniteError):  # no row is left, or those do not decide the coefficients
        check_shares(np.zeros((1, 1)), rows)
    coef, system = others.coef, others.equations
    source, intercept, _, constant = system.leverages(coef, others.shifted_intercept, np.empty((0, 0)))
    features, error = np.split(root[:, None] * source.picked(rows.tolist(), coef, intercept), [len(coef)], axis=1)
    share, inflation = np.empty(error.shape), np.ones(len(rows))
    for alpha in dict.fromkeys(alphas.tolist()):
        columns = alphas == alpha
        if system.inflation(alpha) > MOST_INFLATION:
            check_shares(np.zeros((1, 1)), rows)
        z = trsm_left(system.factor(alpha), features.T, transposed=False)
        m = np.eye(len(rows)) + z.T @ z + constant * root[:, None] * root
        size = 1 / np.sqrt(m.diagonal())  # its diagonal may go from 1 to 1e30
        try:
            inverse = cho_solve(cho_factor(size[:, None] * m * size), np.eye(len(rows)))
        except LinAlgError:  # never of one row
            return share, error, np.full(len(rows), np.inf)
        inflation = np.maximum(inflation, inverse.diagonal())
        inverse *= size[:, None] * size
        share[:, columns], error[:, columns] = inverse.diagonal()[:, None], inverse @ error[:, columns]
    return share, error / root[:, None], inflation


def leave_one_out_errors(source: FeatureRows, alphas: Sequence[float], *, fit_intercept: bool = False) -> FloatMatrix:
    """Mean squared errors of leave-one-out (k, t) for every alpha: one pass for the sums, one for the errors.

    Weighted means over the rows of positive weight; inf where a row decides its own prediction.

    Raises
    ------
    NotPositiveDefiniteError
        An alpha is lost beside the eigenvalues, some of which are zero.
    """
    if source.rows.shape[0] <= source.features.num_features:
        return np.array([_mean_squared_error(source, alpha, fit_intercept) for alpha in alphas])
    with single_blas_thread():
        equations = Equations.of(source, fit_intercept)
        equations.factor(float(min(alphas)))  # raises where there is none
        lam, q = eigh(equations.gram, driver="evd")
        few = np.maximum(FEW_DIGITS, LOST_DIGITS * lam[-1] / (max(lam[0], 0.0) + np.asarray(alphas)))
        inverse = 1.0 / (np.maximum(lam, 0.0)[:, None] + np.asarray(alphas, dtype=np.float64))
        rotated = q.T @ equations.cross
        columns = np.concatenate([q @ (inverse[:, k, None] * rotated) for k in range(len(alphas))], axis=1)
        about, intercept, basis, constant = equations.leverages(columns, -equations.offset @ columns, q)
        squares, largest = about.path(columns, intercept, basis, inverse, constant)
    errors = squares.reshape(len(alphas), -1) / equations.weight
    for k in np.flatnonzero((few > MANY_DIGITS) | (1 - largest < few)).tolist():
        errors[k] = _mean_squared_error(source, alphas[k], fit_intercept)
    return errors


def _mean_squared_error(source: FeatureRows, alpha: float, fit_intercept: bool) -> FloatVector:
    try:
        return primal_leave_one_out(source, alpha, fit_intercept=fit_intercept).mean_squared_error
    except DataError:  # a row decides its own prediction
        return np.full(source.rows.shape[1], np.inf)
