"""What a model remembers of its solver and of its uncertainty, and the parts that a solver or a loss gives it.

Shared by jobs and the estimators, so that a model says the same wherever it was fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.errors import DataError
from dkrr.fitting import FitSettings
from dkrr.kernels import Kernel
from dkrr.linalg.losses.fit import LossFit
from dkrr.linalg.losses.loss import Loss
from dkrr.linalg.nystrom.solver import NystromResult
from dkrr.linalg.predict import ArrayRows, RowSource
from dkrr.linalg.primal.solver import PrimalResult
from dkrr.linalg.solution import Solution
from dkrr.uncertainty import target_scale

__all__ = [
    "label_targets",
    "loss_details",
    "loss_parts",
    "loss_solver",
    "nystrom_parts",
    "primal_details",
    "primal_parts",
    "solver_details",
    "uncertainty_parts",
    "usable_rows",
]

Floats = NDArray[np.float64]


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


def label_targets(codes: NDArray[np.intp], weight: Floats, classes: Sequence[Any]) -> Floats:
    """Targets -1 and +1 of losses for labels: (n, 1), +1 for the second of two classes; (n, k), one against the rest.

    Parameters
    ----------
    codes : (n,)
        The place of the label of each row among the ``classes``.
    weight : (n,)

    Raises
    ------
    DataError
        A class has no row, or none with a weight above 0.
    """
    count = np.bincount(codes, minlength=len(classes))
    total = np.bincount(codes, weights=weight, minlength=len(classes))
    if not total.all():
        place = int(np.argmin(total))
        if not count[place]:
            raise DataError(f"class {classes[place]!r} has no training row", hint="leave out the rows that have it")
        raise DataError(
            f"the weights of class {classes[place]!r} are all zero",
            hint="give at least one of its rows a positive weight",
        )
    of_class = np.arange(len(classes)) if len(classes) > 2 else np.array([1])
    return np.where(codes[:, None] == of_class, 1.0, -1.0)


def loss_solver(loss: Loss) -> str:
    """Which solver a loss has: "newton" where it is smooth, "decomposition" where it has corners."""
    return "newton" if loss.is_smooth else "decomposition"


def loss_parts(
    found: LossFit,
    loss: Loss,
    kernel: Kernel | None,
    X: Floats,
    *,
    fit_intercept: bool,
    support: NDArray[np.intp] | None = None,
) -> dict[str, Any]:
    """Kernel, support vectors, their coefficients and the solution, for :class:`dkrr.model.Model`.

    Parameters
    ----------
    loss
        Of the first column; all have the same one but for its parameter.
    X : (n, d)
        Rows as they were given, not centred; not used without a kernel, where all coefficients are kept.
    support
        Rows with a coefficient other than 0, in the order in which the model shall have them; as in ``X`` by default.
    """
    coefficients = found.dual_coef
    support = np.flatnonzero(coefficients.any(axis=1)) if support is None else support
    solution = Solution(
        solver=loss_solver(loss),
        precision="float64",
        converged=found.converged,
        num_iterations=found.num_iterations,
        relative_residual=[],
        backward_error=[],
        certificates=found.certificates,
        seconds={"solve": found.seconds},
        message=f"{loss.name} loss: {len(support):,} of {len(coefficients):,} rows are support vectors",
    )
    return {
        "kernel": kernel,
        "x_fit": None if kernel is None else ArrayRows(X[support]),
        "dual_coef": ArrayRows(coefficients if kernel is None else coefficients[support]),
        "center": found.center,
        "intercept": found.intercept if fit_intercept else None,
        "solution": solution,
    }


def loss_details(loss: Loss, C: float, alpha: float, **parameters: Any) -> dict[str, Any]:
    """Loss, its ``parameters`` (epsilon, quantile), C = 1 / (2 alpha) and alpha, for ``Model.provenance``."""
    given = {name: np.asarray(value, dtype=np.float64).tolist() for name, value in parameters.items()}
    return {"alpha": [alpha], "C": C, "loss": loss.name, "solver": loss_solver(loss), **given}
