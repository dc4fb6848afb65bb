"""What the variance of a model's predictions rests on: one system for each alpha, its factor found or made.

A factor that the fit left in its store is found again, and compared with the kernel before it is used. Where there is
none, at most 6,000 rows are factorised in memory (8 n^2 bytes, n^3 / 3 flops) when a variance is first asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Scaling
from dkrr.errors import ParameterError, StoreError
from dkrr.kernels import Kernel
from dkrr.linalg.factor.stored import WantedFactor, open_factor
from dkrr.linalg.inference.calibration import Quantiles
from dkrr.linalg.inference.variance import DenseFactor, LowerTiles, VarianceSystem, maximum_likelihood_scale
from dkrr.linalg.predict import RowSource
from dkrr.linalg.solution import Solution
from dkrr.stores import is_url
from dkrr.tiles import TileMatrix

__all__ = [
    "OTHER_SOLVERS",
    "Spread",
    "Uncertain",
    "alpha_of",
    "has_spread",
    "recorded_factors",
    "target_scale",
    "variance_spread",
]

logger = logging.getLogger("dkrr.uncertainty")

FloatArray = NDArray[np.float64]

# A factor of so many rows takes 288 MB and about two seconds.
MAX_DENSE_ROWS = 6_000
# solvers whose coefficients are not those of the training rows
OTHER_SOLVERS = ("nystrom", "primal")


class Uncertain(Protocol):
    """What is needed of a model.

    ``sample_weight`` (n, 1) or None, ``sigma2`` (t,) or None for a fit that has no estimate of it, ``quantiles`` None
    until leave-one-out residuals were computed; ``prepared_rows`` gives finite rows as the kernel saw them.
    """

    @property
    def kernel(self) -> Kernel | None: ...
    @property
    def x_fit(self) -> RowSource | None: ...
    @property
    def dual_coef(self) -> RowSource: ...
    @property
    def sample_weight(self) -> RowSource | None: ...
    @property
    def solution(self) -> Solution: ...
    @property
    def center(self) -> FloatArray | None: ...
    @property
    def scaling(self) -> Scaling | None: ...
    @property
    def intercept(self) -> FloatArray | None: ...
    @property
    def sigma2(self) -> FloatArray | None: ...
    @property
    def quantiles(self) -> Quantiles | None: ...
    @property
    def provenance(self) -> dict[str, Any]: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def num_features(self) -> int: ...
    @property
    def y_is_1d(self) -> bool: ...
    def prepared_rows(self, block: FloatArray, first_row: int = 0) -> FloatArray: ...
    def predict(self, X: Any) -> Any: ...


@dataclass(frozen=True)
class Spread:
    """The variance systems of a model, one for each distinct alpha, and which one each target has."""

    systems: tuple[VarianceSystem, ...]
    system_of: tuple[int, ...]

    def variance(self, rows: FloatArray) -> FloatArray:
        """var f(z) / sigma^2 (m, t) for whitened rows (m, d)."""
        columns = np.stack([system.variance(rows) for system in self.systems], axis=1)
        return columns[:, list(self.system_of)]


def alpha_of(model: Uncertain) -> FloatArray:
    """The ridge of each target (t,)."""
    return np.broadcast_to(np.asarray(model.provenance["alpha"], dtype=np.float64), (model.num_targets,))


def target_scale(y: RowSource, dual_coef: RowSource, weight: RowSource | None, *, intercept: bool) -> FloatArray:
    """sigma^2 (t,) of a fit, see :func:`~dkrr.linalg.inference.variance.maximum_likelihood_scale`."""
    num = y.num_rows if weight is None else int(np.count_nonzero(weight.read(0, weight.num_rows)))
    return maximum_likelihood_scale(y, dual_coef, num, intercept=intercept)


def recorded_factors(store: Any, locations: list[str]) -> dict[str, Any]:
    """A store and the factors in it as a model remembers them: absolute, wherever it will be opened."""
    if not all(isinstance(item, str | os.PathLike) for item in (store, *locations)):
        return {}
    absolute = [str(item) if is_url(item) else str(Path(item).absolute()) for item in (store, *locations)]
    return {"store": absolute[0], "factors": absolute[1:]}


def variance_spread(model: Uncertain, store: Any = None) -> Spread:
    """Find or make the factors of a model.

    Parameters
    ----------
    model
        Of an exact solver, with a kernel.
    store
        Where its factors are now, if they were moved.

    Raises
    ------
    ParameterError
        The model has no variance of this kind: a given matrix, an approximation, or another loss than the square.
    StoreError
        There is no finished float64 factor, and there are more than 6,000 rows.

    Cost
    ----
    For each factor that is found n^2 / 2 kernel entries and two readings, see
    :meth:`~dkrr.linalg.inference.variance.VarianceSystem.misfit`; n^3 / 3 flops and 8 n^2 bytes where one is made (at
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
    alphas = alpha_of(model).tolist()
    distinct = list(dict.fromkeys(alphas))
    weight = model.sample_weight
    root = None if weight is None else np.sqrt(weight.read(0, weight.num_rows)[:, 0])

    def system(alpha: float, factor: LowerTiles) -> VarianceSystem:
        return VarianceSystem(
            factor=factor,
            kernel=kernel,
            x=x,
            alpha=alpha,
            center=model.center,
            root=root,
            intercept=model.intercept is not None,
        )

    factors = _find_factors(model, distinct, store, lambda alpha, factor: system(alpha, factor).misfit())
    if factors is None:
        rows = x.read(0, model.num_rows)
        rows = rows if model.center is None else rows - model.center
        factors = [DenseFactor.of(kernel, rows, root, alpha) for alpha in distinct]
    systems = [system(alpha, factor) for alpha, factor in zip(distinct, factors, strict=True)]
    return Spread(tuple(systems), tuple(distinct.index(alpha) for alpha in alphas))


def has_spread(model: Any) -> bool:
    """Whether a model's factors are there, or can be made in passing."""
    try:
        return model.spread is not None
    except StoreError:
        return False


def _find_factors(
    model: Uncertain, alphas: list[float], store: Any, misfit: Callable[[float, TileMatrix], str]
) -> list[Any] | None:
    """The stored factors, None where factors are made in memory instead.

    Raises
    ------
    StoreError
        There is none, and too many rows to make one in passing.
    """
    facts, n = model.provenance, model.num_rows
    assert model.kernel is not None  # noqa: S101  (narrows the type)
    try:
        return [
            open_factor(
                WantedFactor(
                    kernel=model.kernel.to_dict(),
                    center=None if model.center is None else model.center.tolist(),
                    n=n,
                    alpha=alpha,
                    rows_digest=facts.get("rows_digest", ""),
                    weight_digest=facts.get("weight_digest"),
                ),
                facts.get("factors", []) if store is None else [],
                facts.get("store") if store is None else str(store),
                partial(misfit, alpha),
            )
            for alpha in alphas
        ]
    except (ParameterError, StoreError) as exc:  # a function without a name has no factor in a store
        if n > MAX_DENSE_ROWS:
            solver = f"{facts.get('solver', 'cholesky')}, {facts.get('precision', 'float64')}"
            raise StoreError(
                f"a standard deviation needs a float64 Cholesky factor, and this model ({solver}) has none: "
                f"{exc.message}",
                hint="fit with solver='cholesky', precision='float64' and store= (a job: keep = 'factor'); it takes "
                f"{n**3 / 3:.1e} flops and {4 * n * n:,} bytes",
            ) from exc
        logger.info("making a factor of %d rows in memory (%s)", n, exc.message)
        return None
