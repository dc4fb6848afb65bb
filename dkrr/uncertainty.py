"""How uncertain a model's predictions are: standard deviations and intervals.

    std(z) = y_std (sigma^2 (var f(z) / sigma^2 + alpha [noise]))^1/2

with the variance of :mod:`dkrr.linalg.inference.variance`, which needs a float64 Cholesky factor (:mod:`dkrr.spread`).
Intervals need the quantiles of leave-one-out residuals that a model keeps (:mod:`dkrr.linalg.inference.calibration`);
those of constant width need no factor at all.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from dkrr.dataset.sources.table import to_floats
from dkrr.errors import DataError, NumericalError, ParameterError
from dkrr.linalg.inference.calibration import IntervalMethod, Quantiles, check_coverage, check_method
from dkrr.linalg.inference.leave_one_out import LeaveOneOut
from dkrr.spread import OTHER_SOLVERS, Spread, Uncertain, alpha_of, variance_spread
from dkrr.threads import single_blas_thread

__all__ = ["WithUncertainty", "half_widths", "interval", "loo_quantiles", "standard_deviation"]

FloatArray = NDArray[np.float64]

BLOCK_ROWS = 4096
TINY = float(np.finfo(np.float64).tiny)
# times targets, which are 1e-140 at least, they may be less than float64 holds
SMALL_COEFFICIENTS = 1e-160
# what estimated residuals may move a quantile by
MAX_OFF = 0.1

logger = logging.getLogger("dkrr.uncertainty")


def standard_deviation(
    model: Uncertain, variance: FloatArray, *, noise: bool = False, sigma2: Any = None
) -> FloatArray:
    """Standard deviations (m,) or (m, t) in the units of y, from var f / sigma^2 (m, t)."""
    # not the root of the product: sigma^2 of small targets is small where the variance of a large kernel is large
    values: FloatArray = np.sqrt(_sigma2(model, sigma2)) * np.sqrt(variance + (alpha_of(model) if noise else 0.0))
    values = values[:, 0] if model.y_is_1d else values
    if model.scaling is None:
        return values
    return values * (model.scaling.y_std[0] if model.y_is_1d else model.scaling.y_std)


def _sigma2(model: Uncertain, given: Any) -> FloatArray:
    if given is None:
        if model.sigma2 is None:
            why = "" if model.solution.converged else ", its fit did not converge"
            raise ParameterError(f"this model does not know sigma2{why}", hint="give sigma2=, or fit again")
        _check_sigma2(model, model.sigma2)
        return model.sigma2
    raw = np.asanyarray(given)
    values = to_floats(raw, "sigma2") if raw.dtype.kind in "iuf" else np.full(1, np.nan)
    if not np.isfinite(values).all() or (values < 0).any() or values.shape not in ((), (model.num_targets,)):
        raise ParameterError(
            f"sigma2 is {given!r}; a number of at least 0 expected, or one for each of {model.num_targets} targets"
        )
    return np.broadcast_to(values, (model.num_targets,))


def _check_sigma2(model: Uncertain, sigma2: FloatArray) -> None:
    """Refuse an estimate y^T dual_coef / n that left the range of float64; 0 is right where the fit leaves nothing.

    Raises
    ------
    NumericalError
        It did: the targets are small where the kernel is large, or the other way round.
    """
    for target in np.flatnonzero(~((sigma2 >= TINY) & (sigma2 < np.inf))):
        starts = range(0, model.num_rows, BLOCK_ROWS)
        blocks = (model.dual_coef.read(start, min(start + BLOCK_ROWS, model.num_rows)) for start in starts)
        largest = max(float(np.abs(block[:, target]).max(initial=0.0)) for block in blocks)
        if not 0 <= sigma2[target] < np.inf or 0 < largest < SMALL_COEFFICIENTS:
            raise NumericalError(
                f"sigma2 of target {target} is y^T dual_coef / n with coefficients of at most {largest:.3g}, which is "
                "beyond float64",
                hint="scale the targets or the rows (standardize = true does both), or give sigma2=",
            )


def half_widths(
    model: Uncertain, coverage: float, method: IntervalMethod, noisy_variance: FloatArray | None
) -> FloatArray:
    """Half widths of prediction intervals in the units of y, (m, t), or (t,) for "jackknife".

    Parameters
    ----------
    noisy_variance
        var f / sigma^2 + alpha (m, t); not needed for "jackknife".

    Raises
    ------
    ParameterError
        The model has no quantiles, or too few rows for this coverage.
    """
    check_method(method)
    check_coverage(coverage)
    if method == "gaussian":
        assert noisy_variance is not None  # noqa: S101  (narrows the type)
        width: FloatArray = ndtri((1 + coverage) / 2) * np.sqrt(_sigma2(model, None)) * np.sqrt(noisy_variance)
    else:
        if model.quantiles is None:
            raise ParameterError(
                f"this model holds no leave-one-out quantiles, which {method!r} intervals rest on",
                hint="predict_interval of the fitted estimator makes them, [evaluate] intervals = 0.9 in a job does",
            )
        width = model.quantiles.half_width(coverage, method)
        if method == "normalised":
            assert noisy_variance is not None  # noqa: S101  (narrows the type)
            width = width * np.sqrt(noisy_variance)
    return width if model.scaling is None else width * model.scaling.y_std


def loo_quantiles(model: Uncertain, found: LeaveOneOut) -> Quantiles:
    """What intervals need of leave-one-out residuals, which are in the units of y.

    Rows of weight 0 do not count. What is no Gaussian process, because its coefficients are not those of the rows, has
    no deviations to divide by.

    Raises
    ------
    ParameterError
        The residuals are estimates, and their standard errors would move the quantiles by more than a tenth.
    """
    if found.standard_error is not None:
        _check_estimates(np.abs(found.residuals), found.standard_error)
    logger.info("intervals from %s leave-one-out residuals", "exact" if found.method == "exact" else "estimated")
    seen = slice(None) if found.seen is None else found.seen
    scale = 1.0 if model.scaling is None else model.scaling.y_std
    if model.provenance.get("solver") in OTHER_SOLVERS:
        return Quantiles.of(found.residuals[seen] / scale, None)
    n, alphas = model.num_rows, alpha_of(model).tolist()
    distinct = list(dict.fromkeys(alphas))
    diagonal = found.inverse_diagonal[:, [distinct.index(alpha) for alpha in alphas]]
    weight = np.ones((n, 1)) if model.sample_weight is None else model.sample_weight.read(0, n)
    return Quantiles.of(found.residuals[seen] / scale, (weight * diagonal)[seen])


def _check_estimates(size: FloatArray, error: FloatArray) -> None:
    """Refuse what moves a quantile, were every residual larger or smaller by its standard error."""
    levels = np.linspace(0.5, 0.95, 10)
    least, most = np.quantile(np.maximum(size - error, 0.0), levels, axis=0), np.quantile(size + error, levels, axis=0)
    middle = np.quantile(size, levels, axis=0)
    off = float(np.max(np.maximum(most - middle, middle - least) / np.where(middle > 0, middle, 1.0)))
    if not off <= MAX_OFF:
        raise ParameterError(
            f"the leave-one-out residuals after cg are estimates, and their quantiles are known to {off:.0%} only; "
            f"intervals need {MAX_OFF:.0%}",
            hint="fit with solver='cholesky', whose residuals are exact; in a job leave_one_out = 'exact' makes a "
            "factor for them",
        )


def interval(
    model: Uncertain, values: FloatArray, coverage: float, method: IntervalMethod, variance: FloatArray | None
) -> tuple[FloatArray, FloatArray]:
    """Lower and upper ends around predictions (m,) or (m, t); ``variance`` is var f / sigma^2 (m, t)."""
    noisy = None if variance is None else variance + alpha_of(model)
    width = half_widths(model, coverage, method, noisy)
    width = width[..., 0] if model.y_is_1d else width
    return values - width, values + width


class WithUncertainty:
    """The methods of a model that say how uncertain its predictions are."""

    @cached_property
    def spread(self: Any) -> Spread:
        """The factors, found or made when they are first asked for; see :func:`variance_spread`."""
        return variance_spread(self)

    def variance(self: Any, X: Any) -> FloatArray:
        """var f(z) / sigma^2 (m, t) for rows X (m, d) as :meth:`predict` takes them, in blocks."""
        X = self.matched(X)
        rows = X if hasattr(X, "shape") else np.asarray(X)
        if len(rows.shape) != 2 or rows.shape[1] != self.num_features:
            raise DataError(
                f"X has shape {tuple(rows.shape)}; (m, {self.num_features}) expected",
                hint="give the features the model was fitted with",
            )
        result = np.empty((rows.shape[0], self.num_targets))
        for start in range(0, rows.shape[0], BLOCK_ROWS):
            block = np.ascontiguousarray(to_floats(rows[start : start + BLOCK_ROWS], "X", start))
            result[start : start + BLOCK_ROWS] = self.spread.variance(self.prepared_rows(block, start))
        return result

    def predict_std(self: Any, X: Any, *, noise: bool = False, sigma2: Any = None) -> FloatArray:
        """Standard deviations (m,) or (m, t) of f at rows X (m, d), in the units of y.

        Parameters
        ----------
        noise
            Those of new observations of weight 1: sigma^2 alpha is added to the variance.
        sigma2
            None: the estimate of the fit, per target. A number fixes it, in the units in which the system was solved;
            1.0 gives the standard deviations of scikit-learn's ``GaussianProcessRegressor(optimizer=None)``.

        Raises
        ------
        ParameterError, StoreError
            See :func:`variance_spread`.

        Cost
        ----
        n^2 flops and n kernel entries a row; the factor is read once every 1,024 rows (fewer beyond n = 32,768). Before
        it is first used, a stored factor is compared with the kernel: n^2 / 2 entries and two readings.
        """
        with single_blas_thread():
            return standard_deviation(self, self.variance(X), noise=noise, sigma2=sigma2)

    def predict_interval(
        self: Any, X: Any, coverage: float = 0.9, method: IntervalMethod = "jackknife"
    ) -> tuple[FloatArray, FloatArray]:
        """Lower and upper ends, (m,) or (m, t), of intervals that shall hold a new y with probability ``coverage``.

        Parameters
        ----------
        method
            "jackknife": of constant width, from leave-one-out residuals; needs no factor. "normalised": from the same
            residuals over their standard deviations, wider where f is uncertain. "gaussian": what the Gaussian process
            says, calibrated on nothing but sigma^2.

        Raises
        ------
        ParameterError
            The model holds no quantiles of leave-one-out residuals, or of too few rows.
        """
        check_method(method)
        with single_blas_thread():
            variance = None if method == "jackknife" else self.variance(X)
            return interval(self, self.predict(X), coverage, method, variance)

    def with_quantiles(self: Any, quantiles: Quantiles) -> Any:
        """The same model with quantiles of leave-one-out residuals; it keeps factors that it has."""
        model = replace(self, quantiles=quantiles)
        model.__dict__.update({name: value for name, value in self.__dict__.items() if name == "spread"})
        return model

    def __getstate__(self) -> dict[str, Any]:
        """A copy finds its factors itself: the one in memory may be large."""
        return {name: value for name, value in self.__dict__.items() if name != "spread"}
