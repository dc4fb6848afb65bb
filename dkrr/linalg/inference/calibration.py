"""Prediction intervals from leave-one-out residuals: what of them a model keeps, and what it may promise.

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
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ParameterError

__all__ = ["IntervalMethod", "Quantiles", "check_coverage", "check_method", "conformal_rank", "coverage"]

FloatArray = NDArray[np.float64]
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
    jackknife: FloatArray
    normalised: FloatArray | None = None

    @classmethod
    def of(cls, residuals: FloatArray, precision: FloatArray | None) -> Self:
        """From leave-one-out residuals (n, t) of rows of positive weight, and w_i D_i = sigma^2 / var e_i, (n, t).

        ``precision`` None leaves out the normalised quantiles: regressions that are no Gaussian process have none.
        """
        size = np.abs(residuals)
        normalised = None if precision is None else _quantiles(size * np.sqrt(precision))
        return cls(num_rows=len(size), jackknife=_quantiles(size), normalised=normalised)

    def half_width(self, coverage: float, method: IntervalMethod) -> FloatArray:
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
        found: FloatArray = quantiles[level]
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


def _quantiles(size: FloatArray) -> FloatArray:
    """The conformal quantile of every level that n values have one for, (levels, t)."""
    n = len(size)
    # conformal_rank of level / NUM_LEVELS, in integers
    ranks = -(-(n + 1) * np.arange(1, NUM_LEVELS) // NUM_LEVELS)
    chosen: FloatArray = np.sort(size, axis=0)[ranks[ranks <= n] - 1]
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
