"""What a model remembers of its solver and of its uncertainty, and the parts that a Nystrom regression gives.

Shared by jobs and the estimator, so that a model says the same wherever it was fitted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dkrr.dataset import Dataset
from dkrr.fitting import FitSettings
from dkrr.kernels import Kernel
from dkrr.linalg.nystrom.result import NystromResult
from dkrr.linalg.predict import ArrayRows, RowSource
from dkrr.linalg.primal.solver import PrimalResult
from dkrr.spread import target_scale

__all__ = ["nystrom_parts", "primal_details", "primal_parts", "solver_details", "uncertainty_parts", "usable_rows"]


def solver_details(settings: FitSettings, nystrom: dict[str, Any] | None = None) -> dict[str, Any]:
    """Solver and its parameters, as far as they decide the answer, for ``Model.provenance``."""
    iterative = settings.iterative
    details: dict[str, Any] = {"solver": "nystrom" if nystrom is not None else settings.solver}
    if nystrom is not None:
        details |= {"is_approximation": True, **nystrom, "seed": iterative.seed}
    elif settings.solver == "cg":
        details |= {"preconditioner": iterative.preconditioner, "rank": iterative.rank, "seed": iterative.seed}
    if settings.fit_intercept:
        details["fit_intercept"] = True
    if nystrom is not None or settings.solver == "cg" or settings.precision == "mixed":
        details["tol"] = iterative.tol
        if iterative.allow_unconverged:
            details["allow_unconverged"] = True
    return details


def usable_rows(dataset: Dataset) -> int:
    """Rows that may be centres: those whose weight is not zero."""
    n = dataset.num_rows
    return n if dataset.weight is None else int(np.count_nonzero(dataset.weight.read(0, n)))


def uncertainty_parts(
    dataset: Dataset, dual_coef: RowSource, *, intercept: bool, converged: bool = True
) -> dict[str, Any]:
    """Weights and sigma^2 of an exact fit, for :class:`dkrr.model.Model`: what standard deviations need.

    sigma^2 = y^T dual_coef / n holds of a solution alone: a fit that did not converge has none.
    """
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    weight = None if dataset.weight is None else ArrayRows(dataset.weight.read(0, dataset.num_rows))
    sigma2 = target_scale(dataset.y, dual_coef, weight, intercept=intercept) if converged else None
    return {"sample_weight": weight, "sigma2": sigma2}


def nystrom_parts(found: NystromResult, kernel: Kernel | None) -> dict[str, Any]:
    """Kernel, centres, coefficients and the centre of the features, for :class:`dkrr.model.Model`."""
    return {
        "kernel": kernel,
        "x_fit": ArrayRows(found.centres),
        "dual_coef": ArrayRows(found.dual_coef),
        "center": found.center,
        "intercept": found.intercept,
    }


def primal_parts(found: PrimalResult) -> dict[str, Any]:
    """Kernel, features, their coefficients and the intercept, for :class:`dkrr.model.Model`."""
    return {
        "kernel": found.features.kernel,
        "x_fit": None,
        "dual_coef": ArrayRows(found.coef),
        "features": found.features,
        "intercept": found.intercept,
    }


def primal_details(found: PrimalResult) -> dict[str, Any]:
    """The same for ``Model.provenance``."""
    details = {"solver": "primal", "num_explicit_features": found.features.num_features}
    return details if found.intercept is None else details | {"fit_intercept": True}
