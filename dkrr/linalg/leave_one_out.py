"""Leave-one-out residuals of a kernel ridge regression, from its solution and the diagonal of an inverse.

    A = S K S + alpha I,  S = diag(sqrt(w)),  D_i = (A^-1)_ii
    y_i - f^(-i)(x_i) = u_i / (s_i D_i)          for w_i > 0, f^(-i) fitted without row i; for w_i = 0: y_i - f(x_i)

    with an intercept:  D_i = (A^-1)_ii - v_i^2 / (s^T v),  v = A^-1 s,  and u the solution with s^T u = 0
    degrees of freedom = sum_i 1 - alpha D_i                                   over rows of positive weight
    GCV = n sum_i w_i (y_i - f(x_i))^2 / (n - degrees of freedom)^2            over the same n rows

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
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DataError, ParameterError
from dkrr.linalg.blocks import FloatMatrix, FloatVector
from dkrr.markup import lines_text, named

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
    _check_shares(diagonal[seen] / inverse_diagonal[seen], np.flatnonzero(seen))
    residuals = np.full(y.shape, np.nan)
    residuals[seen] = u[seen] / (root[:, None] * diagonal)[seen]
    if predictions is not None:
        residuals[~seen] = y[~seen] - predictions
    alphas = np.broadcast_to(np.asarray(alpha, dtype=np.float64).ravel(), (y.shape[1],))
    # s r = alpha u and n - dof = alpha sum D: alpha, which may be 0, cancels in the generalised cross validation
    return _left_out(residuals, u, diagonal, alphas, alphas, diagonal, root)


def loo_from_leverages(
    *, residuals: FloatMatrix, leverages: FloatMatrix, alpha: Any, root: FloatVector | None = None
) -> LeaveOneOut:
    """Leave-one-out residuals r_i / (1 - h_i) of any regression that is linear in y and shrinks by a quadratic penalty.

    Parameters
    ----------
    residuals : (n, t)
        Of the training rows, y_i - f(x_i), also where the weight is zero.
    leverages : (n, 1) or (n, t)
        h_i, the diagonal of the hat matrix of the weighted rows; 0 where the weight is zero.
    alpha, root
        As in :func:`loo_from_diagonal`.

    Raises
    ------
    DataError
        A row has h_i = 1.
    """
    root = np.ones(len(residuals)) if root is None else root
    seen = root > 0
    share = np.where(seen[:, None], 1 - leverages, 1.0)
    _check_shares(share[seen], np.flatnonzero(seen))
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
    total, weight = np.broadcast_to(share, residuals.shape)[seen].sum(axis=0), np.square(root[seen])
    columns = [first[value] for value in dict.fromkeys(alphas.tolist())]
    return LeaveOneOut(
        residuals=residuals,
        degrees_of_freedom=len(weight) - unit * total,
        gcv=len(weight) * np.square(weighted[seen] / total).sum(axis=0) / weight.mean(),
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


def _check_shares(share: FloatMatrix, rows: NDArray[np.int64]) -> None:
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
                hint=f"at most {len(self.jackknife) / NUM_LEVELS:g} for so few rows; or method='gaussian'",
            )
        found: FloatMatrix = quantiles[level]
        return found

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
    return ceil(round(coverage * NUM_LEVELS, 6)) - 1


def conformal_rank(n: int, coverage: float) -> int:
    """ceil((n + 1) coverage): which of n sorted residuals is the quantile; more than n when there is none."""
    return ceil(round((n + 1) * coverage, 6))


def _quantiles(size: FloatMatrix) -> FloatMatrix:
    """The conformal quantile of every level that n values have one for, (levels, t)."""
    n = len(size)
    # conformal_rank of level / NUM_LEVELS, in integers
    ranks = -(-(n + 1) * np.arange(1, NUM_LEVELS) // NUM_LEVELS)
    chosen: FloatMatrix = np.sort(size, axis=0)[ranks[ranks <= n] - 1]
    return chosen


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
