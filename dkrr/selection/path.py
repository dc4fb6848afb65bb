"""Held-out predictions for a grid of alphas in memory, and the alpha that they choose.

    gram  ->  eigendecomposition  ->  for every alpha: predictions of held-out rows  ->  scores  ->  alpha

Cost
----
One eigendecomposition (9 n^3 flops at most), then 2 n^2 (t + 1) flops an alpha for leave-one-out, n f^2 for every alpha
and fold of f rows, and an eigendecomposition more for each split whose training rows are not all the others.
24 n^2 bytes. Or, for leave-one-out with few alphas, 2/3 n^3 flops an alpha and 16 n^2 bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DataError, ParameterError
from dkrr.kernels import Kernel
from dkrr.linalg.factor.dense import DenseFit, FactorRidge, judge_dense
from dkrr.linalg.inference.eigen import EigenRidge, decompose
from dkrr.selection.folds import Fold
from dkrr.selection.scoring import Scoring

__all__ = ["AlphaPath", "Chosen", "choose"]

logger = logging.getLogger("dkrr.selection")

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

# numbers of one batch of alphas: predictions of all rows and targets
BATCH_NUMBERS = 4_000_000


@dataclass(frozen=True)
class Chosen:
    """The best alpha of a grid.

    Parameters
    ----------
    index : (t,)
        Of the best alpha in the grid, for each target.
    scores : (k,) or (t, k)
        Of every alpha.
    values : (n, t, k) or None
        Held-out squared errors (times the weight) where there is no scorer, else predictions; NaN for a row that no
        fold holds out.
    """

    index: NDArray[np.intp]
    scores: Floats
    values: Floats | None

    @property
    def best(self) -> Any:
        """The best score: a number, or (t,)."""
        best = self.scores.max(axis=-1)
        return float(best) if best.ndim == 0 else best


def choose(scores: Floats, num_targets: int, values: Floats | None = None) -> Chosen:
    """The first alpha whose score is the largest."""
    index = np.broadcast_to(np.argmax(scores, axis=-1), (num_targets,))
    return Chosen(np.array(index), scores, values)


@dataclass(frozen=True, kw_only=True, eq=False)
class AlphaPath:
    """Rows in memory, their kernel, and what is held out.

    Parameters
    ----------
    kernel
        Resolved; None when ``x`` (n, n) is the Gram matrix.
    x : (n, d)
        As the kernel shall see them (centred for a stationary one).
    y : (n, t), weight : (n,) or None
    fit_intercept
        Whether f has an unpenalised constant.
    folds
        None means every row by itself.
    method
        "eigen", or "cholesky" for a factor an alpha, which takes less time for few of them and has no folds.
    """

    kernel: Kernel | None
    x: Any
    y: Floats
    weight: Floats | None = None
    fit_intercept: bool = False
    folds: list[Fold] | None = None
    method: Literal["eigen", "cholesky"] = "eigen"

    def __post_init__(self) -> None:
        if self.folds is not None and self.method != "eigen":
            raise ParameterError(f"method {self.method!r} with folds", hint="an eigendecomposition serves them all")

    @property
    def num_rows(self) -> int:
        """n."""
        return len(self.y)

    @cached_property
    def system(self) -> EigenRidge | FactorRidge:
        """Of all rows of positive weight."""
        if self.method == "eigen":
            return self._eigen(self.inside)
        matrix, root = self._matrix(self.inside)
        return FactorRidge(matrix, self.y[self.inside], root, fit_intercept=self.fit_intercept)

    @cached_property
    def inside(self) -> Rows:
        """Rows of positive weight; the others are predicted and are never fitted."""
        return np.arange(self.num_rows) if self.weight is None else np.flatnonzero(self.weight > 0)

    @cached_property
    def _place(self) -> Rows:
        """Of each row among those inside; -1 outside."""
        place = np.full(self.num_rows, -1)
        place[self.inside] = np.arange(len(self.inside))
        return place

    @cached_property
    def _projected(self) -> Floats | None:
        """k(z, X) S Q for all rows z of weight 0; None where there are none."""
        outside = np.flatnonzero(self._place < 0)
        return self.system.project(self._gram(outside, self.inside)) if len(outside) else None

    def _gram(self, rows: Rows, columns: Rows | None = None) -> Floats:
        """k(x[rows], x[columns]), a new array; symmetric, of the same rows, without ``columns``."""
        other = rows if columns is None else columns
        if self.kernel is None:
            return np.array(self.x[np.ix_(rows, other)], dtype=np.float64, order="C")
        block: Floats = self.kernel.block(
            np.ascontiguousarray(self.x[rows]), np.ascontiguousarray(self.x[other]), same=columns is None
        )
        return block

    def _matrix(self, rows: Rows) -> tuple[Floats, Floats | None]:
        """S K S and s of some rows of positive weight."""
        matrix = self._gram(rows)
        root = None if self.weight is None else np.sqrt(self.weight[rows])
        if root is not None:
            matrix *= root[:, None]
            matrix *= root
        return matrix, root

    def _eigen(self, rows: Rows) -> EigenRidge:
        """Every alpha of some rows of positive weight."""
        matrix, root = self._matrix(rows)
        is_psd = self.kernel is not None and self.kernel.positive_semidefinite
        spectrum = decompose(matrix, positive_semidefinite=is_psd)
        return EigenRidge(spectrum, self.y[rows], root, fit_intercept=self.fit_intercept)

    def search(
        self, alphas: Floats, scoring: Scoring, *, store: Literal["errors", "predictions"] | None = None
    ) -> Chosen:
        """Scores of every alpha; ``store`` keeps the held-out squared errors, or the predictions.

        Raises
        ------
        NotPositiveDefiniteError
            For an alpha, K + alpha I is not positive definite.
        DataError
            Nothing is left to train on, or a score is not a finite number.
        """
        self._check_folds()
        k, t = len(alphas), self.y.shape[1]
        shape = (self.num_rows, t, k)
        values = None if store is None else np.full(shape, np.nan)
        sums = np.zeros((t, k) if scoring.per_target else k)
        num_folds = 1 if self.folds is None else len(self.folds)
        for number in range(num_folds):
            for batch, rows, predictions in self._held_out(number, alphas):
                y = self.y[rows]
                weight = None if self.weight is None else self.weight[rows]
                where = f"fold {number}" if self.folds is not None else "the leave-one-out predictions"
                sums[..., batch] += scoring.of(y, predictions, weight, where) / num_folds
                if values is not None:
                    values[rows, :, batch] = predictions if store == "predictions" else self._squares(rows, predictions)
        return choose(sums, t, values)

    def _squares(self, rows: Rows, predictions: Floats) -> Floats:
        """w_i e_i^2 (f, t, k)."""
        squares: Floats = np.square(self.y[rows][:, :, None] - predictions)
        return squares if self.weight is None else squares * self.weight[rows][:, None, None]

    def _check_folds(self) -> None:
        least = 2 if self.folds is None and self.fit_intercept else 1
        if len(self.inside) < max(least, 2):
            raise DataError(
                f"n_samples={len(self.inside)} rows of positive weight; at least 2 expected",
                hint="a row is held out, and others must be left to train on",
            )
        for number, fold in enumerate(self.folds or []):
            inside = self._place[fold.test] >= 0
            if not inside.any():
                raise DataError(f"fold {number} holds out no row of positive weight", hint="change the folds")
            left = len(self.inside) - inside.sum() if fold.train is None else (self._place[fold.train] >= 0).sum()
            if not left:
                raise DataError(f"fold {number} leaves no training row of positive weight", hint="change the folds")

    def _held_out(self, number: int, alphas: Floats) -> Iterator[tuple[slice, Rows, Floats]]:
        """A batch of alphas, the rows of a fold, and their predictions (f, t, batch) by a fit without them."""
        fold = None if self.folds is None else self.folds[number]
        refit = None
        if fold is not None and fold.train is not None:
            train = fold.train[self._place[fold.train] >= 0]
            system = self._eigen(train)
            refit = system, system.project(self._gram(fold.test, train))
        size = max(1, BATCH_NUMBERS // self.y.size)
        for start in range(0, len(alphas), size):
            batch = slice(start, min(start + size, len(alphas)))
            if refit is not None and fold is not None:
                yield batch, fold.test, refit[0].predict(refit[1], alphas[batch])
            elif fold is not None:
                yield batch, fold.test, self._without(fold.test, alphas[batch])
            else:
                yield batch, np.arange(self.num_rows), self._each_without_itself(alphas[batch])

    def _each_without_itself(self, alphas: Floats) -> Floats:
        """Leave-one-out predictions (n, t, k); rows of weight 0 are predicted by the fit of all."""
        predictions = np.empty((*self.y.shape, len(alphas)))
        predictions[self.inside] = self.y[self.inside][:, :, None] - self.system.leave_one_out(alphas)
        if self._projected is not None:
            predictions[self._place < 0] = self.system.predict(self._projected, alphas)
        return predictions

    def _without(self, rows: Rows, alphas: Floats) -> Floats:
        """Predictions (f, t, k) of some rows by the fit of all others."""
        place = self._place[rows]
        inside = place >= 0
        outside = None
        if self._projected is not None and not inside.all():
            order = np.cumsum(self._place < 0) - 1  # of each row outside among those outside
            outside = self._projected[order[rows[~inside]]]
        if not inside.any():
            assert outside is not None  # noqa: S101  (narrows the type)
            return self.system.predict(outside, alphas)
        assert isinstance(self.system, EigenRidge)  # noqa: S101  (narrows the type)
        residual, others = self.system.leave_fold_out(place[inside], alphas, outside)
        predictions = np.empty((len(rows), self.y.shape[1], len(alphas)))
        predictions[inside] = self.y[rows[inside]][:, :, None] - residual
        if others is not None:
            predictions[~inside] = others
        return predictions

    def fit(self, alphas: Floats, started: float) -> DenseFit:
        """The fit of all rows with one alpha for each target, with its true residual.

        Raises
        ------
        ResidualError
            See :func:`dkrr.linalg.factor.dense.judge_dense`.
        """
        what = "Eigendecomposition" if self.method == "eigen" else "Cholesky factors"
        u = np.zeros(self.y.shape)
        u[self.inside], _ = self.system.solve_each(alphas)
        root = None if self.weight is None else np.sqrt(self.weight)
        centring = self.system.centring
        y = self.y if centring is None else centring.apply(self.y)
        rhs = y if root is None else root[:, None] * y
        offset = None if centring is None else centring.offset
        return judge_dense(
            self.kernel, self.x, root, alphas, rhs, u, offset, solver=self.method, precision="float64", started=started,
            message=f"{what} of {len(self.inside):,} rows in memory",
        )  # fmt: skip
