"""Leave-one-out residuals of a kernel ridge regression, from its solution and the diagonal of an inverse.

    A = S K S + alpha I,  S = diag(sqrt(w)),  D_i = (A^-1)_ii
    y_i - f^(-i)(x_i) = u_i / (s_i D_i)          for w_i > 0, f^(-i) fitted without row i; for w_i = 0: y_i - f(x_i)

    with an intercept:  D_i = (A^-1)_ii - v_i^2 / (s^T v),  v = A^-1 s,  and u the solution with s^T u = 0
    degrees of freedom = sum_i 1 - alpha D_i                                   over rows of positive weight
    GCV = n^2 sum_i w_i (y_i - f(x_i))^2 / sum_i w_i / (n - degrees of freedom)^2           over the same n rows

Nothing is fitted again. You need this to choose alpha and the kernel, and to know an error without a test set. Other
regressions that are linear in y have leverages h_i, the diagonal of their hat matrix, in the place of 1 - alpha D_i:
:func:`loo_from_leverages`.

Cost: O(n t), once there is a diagonal.

References
----------
Golub, Heath and Wahba, Generalized cross-validation as a method for choosing a good ridge parameter, Technometrics 21
(1979); Cawley and Talbot, Fast exact leave-one-out cross-validation of sparse least-squares support vector machines,
Neural Networks 17 (2004), for the intercept.

Prediction intervals from leave-one-out residuals: what of them a model keeps, and what it may promise.

The jackknife interval is f(z) -+ q, q the ceil((n + 1) c)-th smallest of n absolute leave-one-out residuals
|e_i| = |u_i| / (s_i D_i). The normalised one divides each residual by the standard deviation that the Gaussian process
gives it, |e_i| s_i D_i^1/2 = |u_i| / D_i^1/2 (in units of sigma), and multiplies the quantile by that of the new
observation, (var f(z) / sigma^2 + alpha)^1/2: wider where there are few rows.

What holds. The new row's residual comes from the full fit, the others from fits without a row: they are not quite
exchangeable. Coverage is c, about, where leaving one row out hardly moves f(z) (Steinberger and Leeb), which a ridge
alpha > 0 sees to; no bound holds for every fit, and there are unstable ones for which the coverage vanishes (Barber et
al., whose jackknife+ covers at least 2 c - 1 whatever the fit does). :func:`coverage` says what an interval covers on
rows whose targets are known. Nothing of this holds where kernel and alpha were chosen among many to make these very
residuals small, or where rows depend on each other as duplicates and time series do.

Rows of weight 0 are not training rows and do not count. Weighted rows count as one each.

References
----------
Barber, Candes, Ramdas and Tibshirani, Predictive inference with the jackknife+, Annals of Statistics 49 (2021), arXiv
1905.02928; Steinberger and Leeb, Conditional predictive inference for stable algorithms, arXiv 1809.01412; Rasmussen
and Williams, Gaussian Processes for Machine Learning, 2006, section 5.4.2 (leave-one-out predictive variances).

The variance of a prediction, from a Cholesky factor and a forward substitution.

Kernel ridge regression is the mean of a Gaussian process: with f ~ N(0, sigma^2 k), noise of variance
sigma^2 alpha / w_i in target i, S = diag(sqrt(w)) and A = S K S + alpha I = L L^T,

    var f(z) = sigma^2 (k(z, z) - |L^-1 S k(X, z)|^2).

With an intercept b (a flat prior) the border s = S 1 adds what is not known of b,

    + sigma^2 (1 - s^T A^-1 S k(X, z))^2 / (s^T A^-1 s) = (1 - g^T V)^2 / |g|^2,    g = L^-1 s,  V = L^-1 S k(X, z):

g is one more column of the same substitution. A new observation at z of weight 1 has sigma^2 alpha on top. The
functions here leave out sigma^2; :func:`target_scale` is its estimate.

Rows of Z are taken in blocks. A block keeps its V (w, n) in memory and reads every tile of the factor once, so that
w decides between memory and reading: :func:`block_rows`.

Cost of a variance
------------------
n kernel entries and n^2 flops a row of Z; 8 n w bytes.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1 and section 2.7 (the flat prior of
explicit basis functions).
"""

from __future__ import annotations

import logging
import numbers
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DataError, NumericalError, ParameterError
from dkrr.kernels import Kernel
from dkrr.linalg.operators import FloatMatrix, FloatVector
from dkrr.linalg.products import CHECK_TOLERANCE, ArrayRows, RowSource, predict_block
from dkrr.linalg.triangular import solve_rows
from dkrr.markup import lines_text, named
from dkrr.store.chunks import FloatArray
from dkrr.tiles import TileMatrix

if TYPE_CHECKING:
    from dkrr.linalg.dense import DenseFactor

# 1 - h_i below this is rounding: the fit goes through row i whatever y_i is, and nothing can be said about it
MIN_SHARE = 1e-14


@dataclass(frozen=True, kw_only=True, repr=False)
class LeaveOneOut:
    """What a fit would have said of each of its rows, had it not seen that row.

    Parameters
    ----------
    residuals : (n, t)
        y_i - f^(-i)(x_i). Rows of weight zero were never seen: y_i - f(x_i).
    degrees_of_freedom : (t,)
        The trace of the hat matrix, an intercept included.
    gcv : (t,)
        Generalised cross validation: the weighted mean squared error with the leverages replaced by their mean,
        n^2 / (n - dof)^2 sum_i w_i r_i^2 / sum_i w_i for the residuals r of the fit.
    mean_squared_error : (t,)
        Weighted mean of the squared residuals over the rows of positive weight.
    inverse_diagonal : (n, a)
        D, a column for each distinct alpha in the order in which they come; (1 - h_i) / alpha of regressions other
        than kernel ridge regression.
    seen : (n,), optional
        The rows of positive weight; None if that is all of them.
    """

    residuals: FloatMatrix
    degrees_of_freedom: FloatVector
    gcv: FloatVector
    mean_squared_error: FloatVector
    inverse_diagonal: FloatMatrix
    seen: NDArray[np.bool_] | None = None

    def __repr__(self) -> str:
        n, t = self.residuals.shape
        root, freedom = np.sqrt(self.mean_squared_error), self.degrees_of_freedom
        return lines_text(
            f"LeaveOneOut: {named(n, 'row')}, {named(t, 'target')}",
            f"rmse {', '.join(f'{value:.5g}' for value in root)}",
            f"degrees of freedom {', '.join(f'{value:,.1f}' for value in freedom)}",
        )

    def in_units(self, scale: Any) -> LeaveOneOut:
        """The same for targets that are ``scale`` (one, or one per target) times as large."""
        scale = np.broadcast_to(np.asarray(scale, dtype=np.float64), self.gcv.shape)
        return replace(
            self,
            residuals=self.residuals * scale,
            gcv=self.gcv * scale**2,
            mean_squared_error=self.mean_squared_error * scale**2,
        )

    def summary(self) -> dict[str, Any]:
        """The figures per target as plain data, without what is n long."""
        return {
            "rmse": np.sqrt(self.mean_squared_error).tolist(),
            "mean_squared_error": self.mean_squared_error.tolist(),
            "gcv": self.gcv.tolist(),
            "degrees_of_freedom": self.degrees_of_freedom.tolist(),
        }


def loo_from_diagonal(
    *,
    y: FloatMatrix,
    u: FloatMatrix,
    inverse_diagonal: FloatMatrix,
    alpha: Any,
    root: FloatVector | None = None,
    ones: FloatMatrix | None = None,
    predictions: FloatMatrix | None = None,
) -> LeaveOneOut:
    """Leave-one-out residuals u_i / (s_i D_i).

    Parameters
    ----------
    y, u : (n, t)
        Targets, and the solution of A u = S y, or of the bordered system with an intercept.
    inverse_diagonal : (n, 1) or (n, t)
        The diagonal of A^-1 of each target.
    alpha : float, (1,) or (t,)
    root : (n,), optional
        s, the square roots of the weights.
    ones : (n, 1) or (n, t), optional
        v = A^-1 s, for a fit with an intercept.
    predictions : (k, t), optional
        f(x_i) at the k rows of weight zero, of which u knows nothing; without them their residuals are NaN.

    Raises
    ------
    DataError
        A row of positive weight has D_i = 0: without it there is nothing to fit, or the fit goes through it exactly.
    """
    root = np.ones(len(y)) if root is None else root
    seen = root > 0
    diagonal = inverse_diagonal if ones is None else bordered_diagonal(inverse_diagonal, ones, root)
    if ones is not None and np.count_nonzero(seen) == 1:  # and not what rounding in single precision leaves of it
        diagonal = np.zeros_like(diagonal)
    check_shares(diagonal[seen] / inverse_diagonal[seen], np.flatnonzero(seen))
    residuals = np.full(y.shape, np.nan)
    residuals[seen] = u[seen] / (root[:, None] * diagonal)[seen]
    if predictions is not None:
        residuals[~seen] = y[~seen] - predictions
    alphas = np.broadcast_to(np.asarray(alpha, dtype=np.float64).ravel(), (y.shape[1],))
    # s r = alpha u and n - dof = alpha sum D: alpha, which may be 0, cancels in the generalised cross validation
    return _left_out(residuals, u, diagonal, alphas, alphas, diagonal, root)


def loo_from_leverages(
    *, residuals: FloatMatrix, share: FloatMatrix, alpha: Any, root: FloatVector | None = None
) -> LeaveOneOut:
    """Leave-one-out residuals r_i / (1 - h_i) of any regression that is linear in y and shrinks by a quadratic penalty.

    Parameters
    ----------
    residuals : (n, t)
        Of the training rows, y_i - f(x_i), also where the weight is zero.
    share : (n, 1) or (n, t)
        1 - h_i, positive; h_i is the diagonal of the hat matrix of the weighted rows, 0 where the weight is zero.
    alpha, root
        As in :func:`loo_from_diagonal`.
    """
    root = np.ones(len(residuals)) if root is None else root
    alphas = np.broadcast_to(np.asarray(alpha, dtype=np.float64).ravel(), (residuals.shape[1],))
    with np.errstate(divide="ignore"):
        diagonal = share / alphas
    return _left_out(residuals / share, root[:, None] * residuals, share, 1.0, alphas, diagonal, root)


def _left_out(
    residuals: FloatMatrix,
    weighted: FloatMatrix,
    share: FloatMatrix,
    unit: FloatVector | float,
    alphas: FloatVector,
    diagonal: FloatMatrix,
    root: FloatVector,
) -> LeaveOneOut:
    """The facts, from s r and 1 - h, both in ``unit``."""
    seen, first = root > 0, {value: column for column, value in reversed(list(enumerate(alphas.tolist())))}
    total = np.broadcast_to(share, residuals.shape)[seen].sum(axis=0)
    # of tiny weights and tiny targets products are no numbers, their means are
    size = np.ldexp(1.0, np.frexp(root.max(initial=0.0))[1])
    weight = np.square(root[seen] / size)
    columns = [first[value] for value in dict.fromkeys(alphas.tolist())]
    return LeaveOneOut(
        residuals=residuals,
        degrees_of_freedom=len(weight) - unit * total,
        gcv=len(weight) * np.square(weighted[seen] / size / total).sum(axis=0) / weight.mean(),
        mean_squared_error=np.asarray(weight @ np.square(residuals[seen]) / weight.sum()),
        inverse_diagonal=np.ascontiguousarray(np.broadcast_to(diagonal, residuals.shape)[:, columns]),
        seen=seen,
    )


def bordered_diagonal(inverse_diagonal: FloatMatrix, ones: FloatMatrix, root: FloatVector) -> FloatMatrix:
    """(M^-1)_ii = (A^-1)_ii - v_i^2 / (s^T v) of M = [[A, s], [s^T, 0]], v = A^-1 s; column by column."""
    return np.asarray(inverse_diagonal - ones * (ones / (root @ ones)))  # v^2 may be no number where v and s^T v are


def unscaled(dual_coef: FloatMatrix, root: FloatVector | None) -> FloatMatrix:
    """u = S^-1 dual_coef (n, t), 0 where the weight is 0."""
    if root is None:
        return dual_coef
    scale = root[:, None]
    return np.divide(dual_coef, scale, out=np.zeros_like(dual_coef), where=scale > 0)


def check_shares(share: FloatMatrix, rows: NDArray[np.int64]) -> None:
    """Refuse rows (k,) whose share (k, c), D_i of what it is without an intercept, or 1 - h_i, is rounding alone.

    Raises
    ------
    DataError
        Names the row.
    """
    if not len(share):
        raise DataError("every row has weight zero", hint="leave-one-out needs rows that were fitted")
    least = np.min(share, axis=1)
    worst = int(np.argmin(least))
    if not least[worst] > MIN_SHARE:
        raise DataError(
            f"row {rows[worst]:,} decides its own prediction (1 - leverage is {least[worst]:.1g}): without it nothing "
            "is known there",
            hint="raise alpha; a fit with an intercept needs two rows of positive weight",
            row=int(rows[worst]),
        )


IntervalMethod = Literal["jackknife", "normalised", "gaussian"]

# A model keeps the quantiles of every coverage 0.001 .. 0.999, 16 KB a target as text, however many rows it was fitted
# to; a coverage between two of them is rounded up.
NUM_LEVELS = 1000


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantiles:
    """Conformal quantiles of absolute leave-one-out residuals, in the units in which the system was solved.

    Parameters
    ----------
    num_rows
        n, the rows of positive weight.
    jackknife : (levels, t)
        Of |e_i|, level k for coverage (k + 1) / 1,000; as many levels as n rows have quantiles for.
    normalised : (levels, t), optional
        Of |e_i| / (standard deviation of e_i / sigma).
    """

    num_rows: int
    jackknife: FloatMatrix
    normalised: FloatMatrix | None = None

    @classmethod
    def of(cls, residuals: FloatMatrix, precision: FloatMatrix | None) -> Self:
        """From leave-one-out residuals (n, t) of rows of positive weight, and w_i D_i = sigma^2 / var e_i, (n, t).

        ``precision`` None leaves out the normalised quantiles: regressions that are no Gaussian process have none.
        """
        size = np.abs(residuals)
        normalised = None if precision is None else _quantiles(size * np.sqrt(precision))
        return cls(num_rows=len(size), jackknife=_quantiles(size), normalised=normalised)

    def half_width(self, coverage: float, method: IntervalMethod) -> FloatMatrix:
        """Half the width of the interval (t,); for "normalised" in units of (var f(z) / sigma^2 + alpha)^1/2.

        Raises
        ------
        ParameterError
            Too few rows for this coverage; no normalised quantiles.
        """
        check_coverage(coverage)
        quantiles = self.jackknife if method == "jackknife" else self.normalised
        if quantiles is None:
            raise ParameterError("this model has no normalised residuals", hint="method='jackknife'")
        level = _level(coverage)
        if not self.knows(coverage):
            raise ParameterError(
                f"a coverage of {coverage:g} from {self.num_rows:,} leave-one-out residuals",
                hint=f"at most {most_coverage(self.num_rows):g} for {self.num_rows:,} rows; or method='gaussian'",
            )
        return np.asarray(quantiles[level])

    def knows(self, coverage: float) -> bool:
        """Whether there are rows enough for this coverage."""
        return _level(coverage) < len(self.jackknife)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "num_rows": self.num_rows,
            "jackknife": self.jackknife.tolist(),
            "normalised": None if self.normalised is None else self.normalised.tolist(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        given = values["normalised"]
        jackknife = np.asarray(values["jackknife"], dtype=np.float64)
        normalised = None if given is None else np.asarray(given, dtype=np.float64)
        if jackknife.ndim != 2 or (normalised is not None and jackknife.shape != normalised.shape):
            raise ValueError(f"quantiles of shape {jackknife.shape}, and others")
        return cls(num_rows=int(values["num_rows"]), jackknife=jackknife, normalised=normalised)


def _level(coverage: float) -> int:
    # in floating point 0.07 * 1000 is a little more than 70
    return max(ceil(round(coverage * NUM_LEVELS, 6)), 1) - 1


def most_coverage(num_rows: int) -> float:
    """The largest coverage that the leave-one-out residuals of n rows say something about: 0.999 at most."""
    return min(NUM_LEVELS - 1, NUM_LEVELS * num_rows // (num_rows + 1)) / NUM_LEVELS


def _quantiles(size: FloatMatrix) -> FloatMatrix:
    """The conformal quantile of every level that n values have one for, (levels, t)."""
    n = len(size)
    # ceil((n + 1) level / NUM_LEVELS), in integers: which of n sorted residuals is the quantile
    ranks = -(-(n + 1) * np.arange(1, NUM_LEVELS) // NUM_LEVELS)
    return np.asarray(np.sort(size, axis=0)[ranks[ranks <= n] - 1])


def check_coverage(coverage: Any) -> None:
    """Refuse what is not between 0 and 1.

    Raises
    ------
    ParameterError
    """
    if not isinstance(coverage, numbers.Real) or not 0 < float(coverage) < 1:
        raise ParameterError(f"coverage is {coverage!r}; between 0 and 1 expected", hint="0.9 means 90 %")


def check_method(method: str) -> None:
    """Refuse an unknown kind of interval.

    Raises
    ------
    ParameterError
    """
    if method not in get_args(IntervalMethod):
        raise ParameterError(f"method is {method!r}; one of {', '.join(get_args(IntervalMethod))} expected")


def coverage(lower: Any, upper: Any, y: Any) -> Any:
    """The share of y that lies in [lower, upper]: a number for (m,), an array (t,) for (m, t)."""
    inside = (np.asarray(lower) <= np.asarray(y)) & (np.asarray(y) <= np.asarray(upper))
    share = inside.mean(axis=0)
    return float(share) if np.ndim(share) == 0 else share


logger = logging.getLogger("dkrr.linalg")


MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 32, 1024
BLOCK_BYTES = 256 * 2**20
PASS_ROWS = 65_536
# how many units of n eps cond(L) k(z, z) rounding may be blamed for, as in LAPACK's tests
ROUNDING_FACTOR = 30.0
# of alpha: an error E of A changes no variance by more than |E| / alpha of k(z, z)
HARMLESS_ERROR = 1e-6


def block_rows(n: int, memory_bytes: int | None = None) -> int:
    """w, the rows of Z that are taken together: 32 to 1,024, as 8 n w bytes fit in 256 MiB or in ``memory_bytes``."""
    budget = BLOCK_BYTES if memory_bytes is None else min(BLOCK_BYTES, memory_bytes)
    return int(min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, budget // (8 * n))))


@dataclass(frozen=True, kw_only=True)
class VarianceSystem:
    """Everything that the variance of f rests on, for one alpha.

    Parameters
    ----------
    factor
        L of A = S K S + alpha I, float64.
    kernel, x, center
        Resolved kernel, training rows (n, d), and what is subtracted from rows before the kernel sees them.
    alpha
    root : (n,), optional
        Square roots of the weights.
    intercept
        Whether f has an intercept.
    """

    factor: TileMatrix | DenseFactor
    kernel: Kernel
    x: RowSource
    alpha: float
    center: FloatVector | None = None
    root: FloatVector | None = None
    intercept: bool = False

    def variance(self, z: NDArray[np.float64]) -> FloatVector:
        """var f(z) / sigma^2 (m,) for rows z (m, d) in memory, not centred.

        What rounding makes negative becomes 0; how many rows that are is logged.

        Raises
        ------
        NumericalError
            A variance is more negative than rounding explains.
        """
        m, step = len(z), block_rows(self.factor.grid.n)
        result = np.empty(m)
        for start in range(0, m, step):
            result[start : start + step] = self._block(np.ascontiguousarray(z[start : start + step]))
        return result

    def misfit(self) -> str:
        """Why the factor is not that of A, "" when it is: A v is compared with L (L^T v) for random signs v.

        A is evaluated from the kernel and the rows, so that it shows whatever became of a stored tile, and a kernel
        function that was another when the factor was made. The entries of A - L L^T are at most
        (100 n^1/2 eps + 1e-11) (A_pp A_qq)^1/2, see :mod:`dkrr.linalg.gram`; signs add up their squares.

        Cost
        ----
        n^2 kernel entries and 4 n^2 flops; every tile is read twice.
        """
        grid = self.factor.grid
        n, spans = grid.n, [grid.span(i) for i in range(grid.num_tiles)]
        v = np.random.default_rng(0).choice((-1.0, 1.0), size=(n, 1))
        root = np.ones((n, 1)) if self.root is None else self.root[:, None]
        found, product, diagonal, scaled = np.zeros((n, 1)), np.empty((n, 1)), np.empty((n, 1)), ArrayRows(root * v)
        for j, columns in enumerate(spans):
            half = sum(self.factor.read(i, j).T @ v[spans[i]] for i in range(j, len(spans)))
            for i in range(j, len(spans)):
                found[spans[i]] += self.factor.read(i, j) @ half
            rows = self.x.read(columns.start, columns.stop)
            diagonal[columns] = np.abs(self.kernel.diag(self._rows(columns)))[:, None]
            product[columns] = predict_block(self.kernel, rows, self.x, scaled, self.center)
        error = np.abs(root * product + self.alpha * v - found)
        scale = np.sqrt(diagonal * root**2 + self.alpha)
        rounding = (100 * np.sqrt(n) * np.finfo(np.float64).eps + CHECK_TOLERANCE) * scale * np.linalg.norm(scale)
        allowed = rounding + HARMLESS_ERROR * self.alpha
        if (error <= allowed).all():
            return ""
        worst = int(np.argmax(np.where(error <= allowed, -1.0, error)))
        return (
            f"does not give back the matrix at row {worst:,} (off by {error[worst, 0]:.1e}, {allowed[worst, 0]:.1e} "
            "allowed): a tile is not its own, or the kernel function was another when it was made"
        )

    def _rows(self, span: slice) -> NDArray[np.float64]:
        """Training rows as the kernel sees them."""
        x = self.x.read(span.start, span.stop)
        return x if self.center is None else x - self.center

    def _block(self, z: NDArray[np.float64]) -> FloatVector:
        """Of rows that fit into memory together, from V^T = (L^-1 S [k(X, z), 1])^T (m or m + 1, n)."""
        z, grid = z if self.center is None else z - self.center, self.factor.grid
        half = np.empty((len(z) + self.intercept, grid.n))

        def fill(i: int, block: FloatArray) -> None:
            self.kernel.block(z, self._rows(grid.span(i)), block[: len(z)])
            if self.intercept:
                block[-1] = 1.0
            if self.root is not None:
                block *= self.root[grid.span(i)]

        solve_rows(self.factor, half, fill)
        own, rows, border = self.kernel.diag(z), half[: len(z)], half[-1]
        values: FloatVector = own - np.einsum("ij,ij->i", rows, rows)
        if self.intercept:
            values += np.square(1.0 - rows @ border) / (border @ border)
        return self._clipped(values, own)

    def _clipped(self, values: FloatVector, own: FloatVector) -> FloatVector:
        if not np.isfinite(values).all():
            raise DataError("a variance is not finite", hint="scale the features")
        negative = values < 0
        if not negative.any():
            return values
        # 30 n eps cond(L) k(z, z), cond(L) <= ((n k s^2 + alpha) / alpha)^1/2
        n, eps, largest = self.factor.grid.n, float(np.finfo(np.float64).eps), float(np.max(np.abs(own)))
        norm = n * largest * (1.0 if self.root is None else float(np.max(self.root)) ** 2)
        condition = np.sqrt((norm + self.alpha) / max(self.alpha, eps * norm))
        limit = float(ROUNDING_FACTOR * n * eps * condition * largest)
        worst = int(np.argmin(values))
        if values[worst] < -limit:
            raise NumericalError(
                f"the variance of a prediction is {values[worst]:.2g} (k(z, z) = {own[worst]:.3g}), which rounding "
                f"({limit:.1g}) does not explain",
                hint="an indefinite kernel has no variance; else check the store with `dkrr info --verify`",
            )
        logger.info("%d variances of at least %.1g set to 0 (rounding: %.1g)", negative.sum(), values[worst], limit)
        return np.maximum(values, 0.0)


def target_scale(y: RowSource, dual_coef: RowSource, weight: RowSource | None, *, intercept: bool) -> FloatVector:
    """sigma^2 (t,) = y^T S A^-1 S y / n: the maximum of the Gaussian process' likelihood, A given.

    y^T S A^-1 S y is y^T dual_coef, so no factor is needed. n counts the rows of positive weight; the others tell
    nothing. With an intercept, which is integrated out, it is y^T dual_coef / (n - 1) (restricted likelihood).

    Parameters
    ----------
    y, dual_coef : RowSource (n, t)
    weight : RowSource (n, 1), optional

    References
    ----------
    Rasmussen and Williams, 2006, section 5.4.1; Mardia and Marshall, Biometrika 71 (1984).
    """
    spans = [(start, min(start + PASS_ROWS, y.num_rows)) for start in range(0, y.num_rows, PASS_ROWS)]
    shift, total = np.zeros(y.num_columns), np.zeros(y.num_columns)
    share = np.ones(y.num_rows) if weight is None else weight.read(0, weight.num_rows)[:, 0]
    n, share = int(np.count_nonzero(share)), share / share.max()
    share /= share.sum()
    if intercept:  # it makes dual_coef orthogonal to constants: a large mean would only be rounded
        shift = sum((share[slice(*span)] @ y.read(*span) for span in spans), shift)
    for span in spans:
        total += np.einsum("it,it->t", y.read(*span) - shift, dual_coef.read(*span))
    return np.maximum(total, 0.0) / max(1, n - intercept)
