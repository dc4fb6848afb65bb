"""How uncertain a model's predictions are: standard deviations and intervals, and the factors that they rest on.

    std(z) = y_std (sigma^2 (var f(z) / sigma^2 + alpha [noise]))^1/2

with the variance of :mod:`dkrr.linalg.leave_one_out`, which needs a float64 Cholesky factor for each alpha. One
that the fit left in its store is found again, and compared with the kernel before it is used. Where there is none, at
most 6,000 rows are factorised in memory (8 n^2 bytes, n^3 / 3 flops) when a variance is first asked for.

Intervals need the quantiles of leave-one-out residuals that a model keeps (:mod:`dkrr.linalg.leave_one_out`);
those of constant width need no factor at all.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtri

from dkrr.dataset import Floats, to_floats
from dkrr.errors import NumericalError, ParameterError, StoreError
from dkrr.linalg.catalogue import open_factor
from dkrr.linalg.dense import DenseFactor
from dkrr.linalg.leave_one_out import (
    IntervalMethod,
    LeaveOneOut,
    Quantiles,
    VarianceSystem,
    check_coverage,
    check_method,
)
from dkrr.tiles import TileMatrix

if TYPE_CHECKING:
    from dkrr.models.model import Model


logger = logging.getLogger("dkrr.models.uncertainty")

TINY = float(np.finfo(np.float64).tiny)

# times targets, which are 1e-140 at least, they may be less than float64 holds
SMALL_COEFFICIENTS = 1e-160

# A factor of so many rows takes 288 MB and about two seconds.
MAX_DENSE_ROWS = 6_000

# solvers whose coefficients are not those of the training rows
OTHER_SOLVERS = ("nystrom", "primal")


@dataclass(frozen=True)
class VarianceSystems:
    """The variance systems of a model, one for each distinct alpha, and which one each target has."""

    systems: tuple[VarianceSystem, ...]
    system_of: tuple[int, ...]

    def variance(self, rows: Floats) -> Floats:
        """var f(z) / sigma^2 (m, t) for whitened rows (m, d)."""
        columns = np.stack([system.variance(rows) for system in self.systems], axis=1)
        return columns[:, list(self.system_of)]


def find_variance_systems(model: Model) -> VarianceSystems:
    """Find or make the factors of a model.

    Parameters
    ----------
    model
        Of an exact solver, with a kernel.

    Raises
    ------
    ParameterError
        The model has no variance of this kind: a given matrix, an approximation, or another loss than the square.
    StoreError
        There is no finished float64 factor, and there are more than 6,000 rows.

    Cost
    ----
    For each factor that is found n^2 kernel entries and two readings, see
    :meth:`~dkrr.linalg.leave_one_out.VarianceSystem.misfit`; n^3 / 3 flops and 8 n^2 bytes where one is made (at
    most 6,000 rows).
    """
    kernel, x = model.kernel, model.x_fit
    if "loss" in model.provenance:
        raise ParameterError(
            f"standard deviations are those of the square loss, and this model has the {model.provenance['loss']} loss",
            hint="fit dkrr.KernelRidge",
        )
    solver = model.provenance.get("solver", "cholesky")
    if kernel is None or (x is None and solver not in OTHER_SOLVERS):
        raise ParameterError(
            "a model of a precomputed matrix has no standard deviation: k(z, z) is not known",
            hint="fit with a kernel and rows",
        )
    if x is None or x.num_rows != model.num_rows or solver in OTHER_SOLVERS:
        raise ParameterError(
            f"standard deviations of solver {solver!r} are not available", hint="fit with solver='cholesky'"
        )
    alphas = model.alphas.tolist()
    distinct = list(dict.fromkeys(alphas))
    weight = model.sample_weight
    root = None if weight is None else np.sqrt(weight.read(0, weight.num_rows)[:, 0])

    def system(alpha: float, factor: TileMatrix | DenseFactor) -> VarianceSystem:
        return VarianceSystem(
            factor=factor,
            kernel=kernel,
            x=x,
            alpha=alpha,
            center=model.center,
            root=root,
            intercept=model.intercept is not None,
        )

    def found(alpha: float) -> VarianceSystem:
        """With the stored factor, or one that is made in memory where the rows are few enough."""
        facts, n = model.provenance, model.num_rows
        try:
            fields = dict(
                kernel=kernel.to_dict(),
                center=None if model.center is None else model.center.tolist(),
                n=n,
                alpha=alpha,
                rows_digest=facts.get("rows_digest", ""),
                weight_digest=facts.get("weight_digest"),
            )
            places, store = facts.get("factors", []), facts.get("store")
            return system(alpha, open_factor(fields, places, store, lambda factor: system(alpha, factor).misfit()))
        except (ParameterError, StoreError) as exc:  # a function without a name has no factor in a store
            if n > MAX_DENSE_ROWS:
                raise StoreError(
                    f"a standard deviation needs a float64 Cholesky factor, and this model ({solver}, "
                    f"{facts.get('precision', 'float64')}) has none: {exc.message}",
                    hint="fit with solver='cholesky', precision='float64' and store= (a job: keep = 'factor'); it "
                    f"takes {n**3 / 3:.1e} flops and {4 * n * n:,} bytes",
                ) from exc
            logger.info("making a factor of %d rows in memory (%s)", n, exc.message)
        rows = x.read(0, n)
        rows = rows if model.center is None else rows - model.center
        return system(alpha, DenseFactor.of(kernel, rows, root, alpha))

    return VarianceSystems(tuple(map(found, distinct)), tuple(distinct.index(alpha) for alpha in alphas))


def standard_deviation(model: Model, variance: Floats, *, noise: bool = False, sigma2: Any = None) -> Floats:
    """Standard deviations (m,) or (m, t) in the units of y, from var f / sigma^2 (m, t)."""
    # not the root of the product: sigma^2 of small targets is small where the variance of a large kernel is large
    values: Floats = np.sqrt(_sigma2(model, sigma2)) * np.sqrt(variance + (model.alphas if noise else 0.0))
    values = values[:, 0] if model.y_is_1d else values
    if model.scaling is None:
        return values
    return values * (model.scaling.y_std[0] if model.y_is_1d else model.scaling.y_std)


def _sigma2(model: Model, given: Any) -> Floats:
    if given is None:
        if model.sigma2 is None:
            why = "" if model.solution.converged else ", its fit did not converge"
            raise ParameterError(f"this model does not know sigma2{why}", hint="give sigma2=, or fit again")
        sigma2 = model.sigma2  # an estimate that left the range of float64 is refused; 0 where the fit leaves nothing
        for target in np.flatnonzero(~((sigma2 >= TINY) & (sigma2 < np.inf))):
            largest = float(np.abs(model.dual_coef.read(0, model.num_rows)[:, target]).max(initial=0.0))
            if not 0 <= sigma2[target] < np.inf or 0 < largest < SMALL_COEFFICIENTS:
                raise NumericalError(
                    f"sigma2 of target {target} is y^T dual_coef / n with coefficients of at most {largest:.3g}, which "
                    "is beyond float64",
                    hint="scale the targets or the rows (standardize = true does both), or give sigma2=",
                )
        return sigma2
    raw = np.asanyarray(given)
    values = to_floats(raw, "sigma2") if raw.dtype.kind in "iuf" else np.full(1, np.nan)
    if not np.isfinite(values).all() or (values < 0).any() or values.shape not in ((), (model.num_targets,)):
        raise ParameterError(
            f"sigma2 is {given!r}; a number of at least 0 expected, or one for each of {model.num_targets} targets"
        )
    return np.broadcast_to(values, (model.num_targets,))


def half_widths(model: Model, coverage: float, method: IntervalMethod, noisy_variance: Floats | None) -> Floats:
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
        width: Floats = ndtri((1 + coverage) / 2) * np.sqrt(_sigma2(model, None))
    elif model.quantiles is None:
        raise ParameterError(
            f"this model holds no leave-one-out quantiles, which {method!r} intervals rest on",
            hint="predict_interval of the fitted estimator makes them, [evaluate] intervals = 0.9 in a job does",
        )
    else:
        width = model.quantiles.half_width(coverage, method)
    if noisy_variance is not None and method != "jackknife":
        width = width * np.sqrt(noisy_variance)
    return width if model.scaling is None else width * model.scaling.y_std


def loo_quantiles(model: Model, found: LeaveOneOut) -> Quantiles:
    """What intervals need of leave-one-out residuals, which are in the units of y.

    Rows of weight 0 do not count. What is no Gaussian process, because its coefficients are not those of the rows, has
    no deviations to divide by.
    """
    seen = slice(None) if found.seen is None else found.seen
    scale = 1.0 if model.scaling is None else model.scaling.y_std
    if model.provenance.get("solver") in OTHER_SOLVERS:
        return Quantiles.of(found.residuals[seen] / scale, None)
    n, alphas = model.num_rows, model.alphas.tolist()
    distinct = list(dict.fromkeys(alphas))
    diagonal = found.inverse_diagonal[:, [distinct.index(alpha) for alpha in alphas]]
    weight = np.ones((n, 1)) if model.sample_weight is None else model.sample_weight.read(0, n)
    return Quantiles.of(found.residuals[seen] / scale, (weight * diagonal)[seen])


def interval(
    model: Model, values: Floats, coverage: float, method: IntervalMethod, variance: Floats | None
) -> tuple[Floats, Floats]:
    """Lower and upper ends around predictions (m,) or (m, t); ``variance`` is var f / sigma^2 (m, t)."""
    noisy = None if variance is None else variance + model.alphas
    width = half_widths(model, coverage, method, noisy)
    width = width[..., 0] if model.y_is_1d else width
    return values - width, values + width
