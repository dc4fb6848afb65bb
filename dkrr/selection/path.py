"""Held-out predictions for a grid of alphas, their scores, and the alpha that they choose.

    gram  ->  eigendecomposition  ->  for every alpha: predictions of held-out rows  ->  scores  ->  alpha

Rows in memory are held out one by one or by folds (:class:`AlphaPath`); in feature space two passes over the rows serve
all alphas (:func:`primal_search`). A fold whose training rows are all the others is answered from the fit of all rows;
any other split (time-ordered ones train on the past alone) needs a fit of its own.

Scores are those of scikit-learn's RidgeCV. Leave-one-out predictions are scored all together: without ``scoring`` by
-mean(w_i e_i^2) over all rows, else by the scorer. Folds are scored one by one, by R^2 unless told otherwise, and their
scores averaged, as GridSearchCV does. A scorer that takes sample weights is given them.

Cost
----
One eigendecomposition (9 n^3 flops at most), then 2 n^2 (t + 1) flops an alpha for leave-one-out, n f^2 for every alpha
and fold of f rows, and an eigendecomposition more for each split whose training rows are not all the others.
24 n^2 bytes. Or, for leave-one-out with few alphas, 2/3 n^3 flops an alpha and 16 n^2 bytes.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import check_scoring
from sklearn.model_selection import LeaveOneGroupOut, check_cv

from dkrr.dataset import Floats
from dkrr.errors import DataError, ParameterError
from dkrr.kernels import Kernel
from dkrr.linalg.dense import DenseFit, EigenRidge, FactorRidge, judge_dense
from dkrr.linalg.primal import leave_one_out_errors, primal_leave_one_out
from dkrr.linalg.primal_passes import FeatureRows

Rows = NDArray[np.intp]
logger = logging.getLogger("dkrr.selection")

# numbers of one batch of alphas: predictions of all rows and targets
BATCH_NUMBERS = 4_000_000


@dataclass(frozen=True, eq=False)
class Fold:
    """Rows ``test`` (f,), predicted by a fit of ``train``; None means all the others."""

    test: Rows
    train: Rows | None = None


def make_folds(cv: Any, X: Any, y: Any) -> list[Fold]:
    """The folds that ``cv`` means for n rows.

    Parameters
    ----------
    cv
        A number of folds of consecutive rows; a scikit-learn splitter; an iterable of (train, test) row numbers; or an
        array (n,) of labels: the rows of one label are one fold.

    Raises
    ------
    ParameterError
        It is none of these.
    DataError
        A fold is empty, or names rows that do not exist; a label is missing.
    """
    how = "give a number of folds, a splitter, (train, test) pairs, or a label for each row"
    if isinstance(cv, bool | str) or (isinstance(cv, numbers.Number) and not isinstance(cv, numbers.Integral)):
        raise ParameterError(f"cv is {cv!r}", hint=how)
    has_labels = hasattr(cv, "shape") and hasattr(cv, "dtype") and np.ndim(cv) == 1
    try:
        if has_labels and np.ma.is_masked(cv):
            raise ValueError("some are masked")
        splits = list(LeaveOneGroupOut().split(X, y, cv) if has_labels else check_cv(cv).split(X, y))
    except (ValueError, TypeError) as error:
        said = str(error).partition("\n")[0]
        if has_labels:
            hint = "give the fold of every row, and two folds at least"
            raise DataError(f"cv has labels that cannot be used: {said}", hint=hint) from error
        raise ParameterError(
            f"cv is {cv!r}: {said}", hint=f"{how}; a splitter by groups is given as list(splitter.split(X, y, groups))"
        ) from error
    if not splits:
        raise DataError("cv has no folds", hint="give at least one pair (train, test)")
    folds = []
    for number, split in enumerate(splits):
        train, test = (_rows(rows, number, len(X)) for rows in split)
        is_whole = (np.bincount(np.concatenate((train, test)), minlength=len(X)) == 1).all()
        folds.append(Fold(test, None if is_whole else train))
    return folds


def _rows(values: Any, number: int, n: int) -> Rows:
    """Row numbers, from a mask too."""
    if np.ma.is_masked(values):
        raise DataError(f"fold {number} of cv has masked values", hint="give row numbers alone")
    rows = np.asarray(values)
    if rows.dtype == bool and rows.shape == (n,):
        rows = np.flatnonzero(rows)
    if not rows.size:
        raise DataError(f"fold {number} has no training or no test rows", hint="every fold needs rows on both sides")
    if rows.dtype.kind not in "iu" or rows.ndim != 1 or rows.min() < 0 or rows.max() >= n:
        raise DataError(
            f"fold {number} of cv is {rows.dtype} of shape {rows.shape}, from {rows.min()} to {rows.max()}",
            hint=f"give row numbers from 0 to {n - 1:,}",
        )
    return rows.astype(np.intp)


class _Given(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor whose rows are their own predictions: what a scorer is called with."""

    def fit(self, X: Any, y: Any = None) -> _Given:
        return self

    def predict(self, X: Any) -> Any:
        return X

    def __sklearn_is_fitted__(self) -> bool:
        return True


def checked_scorer(scoring: Any) -> Any:
    """The scorer of scikit-learn that ``scoring``, a name or a function (estimator, X, y), means; None for None.

    Raises
    ------
    ParameterError
        It is none of these.
    """
    try:
        return None if scoring is None else check_scoring(_Given(), scoring=scoring)
    except (ValueError, TypeError) as exc:
        raise ParameterError(
            f"scoring is {scoring!r}; the name of a scorer, a function (estimator, X, y) or None expected",
            hint="sklearn.metrics.get_scorer_names() lists the names",
        ) from exc


@dataclass(kw_only=True, eq=False)
class AlphaSearch:
    """Scores of a grid of alphas, as held-out predictions come, and the best alpha of each target.

    Parameters
    ----------
    y : (n, t), weight : (n,) or None
    num_alphas
        k.
    scoring
        See :func:`checked_scorer`; None means the negative mean squared error.
    per_target
        A score, and an alpha, for each target.
    stored
        What :attr:`values` keeps.

    Attributes
    ----------
    scores : (k,) or (t, k)
        Of every alpha; -inf of one that nothing was added for.
    values : (n, t, k) or None
        Held-out squared errors times the weight, or predictions; NaN for a row that no fold holds out.
    """

    y: Floats
    weight: Floats | None
    num_alphas: int
    scoring: Any = None
    per_target: bool = False
    stored: Literal["errors", "predictions"] | None = None
    scores: Floats = field(init=False)
    values: Floats | None = field(init=False)

    def __post_init__(self) -> None:
        (n, t), k = self.y.shape, self.num_alphas
        self.per_target, self.scoring = self.per_target and t > 1, checked_scorer(self.scoring)
        self.scores = np.full((t, k) if self.per_target else (k,), -np.inf)
        self.values = None if self.stored is None else np.full((n, t, k), np.nan)

    @property
    def index(self) -> Rows:
        """The first alpha whose score is the largest, for each target (t,)."""
        return np.broadcast_to(np.argmax(self.scores, axis=-1), self.y.shape[1:])

    def add(
        self, batch: slice, predictions: Floats, rows: Any = slice(None), where: str = "", share: float = 1
    ) -> None:
        """Count predictions (f, t, b) of the held-out ``rows`` for a batch of alphas as a ``share`` of their scores.

        Raises
        ------
        DataError
            A score is not a finite number.
        """
        y, weight = self.y[rows], None if self.weight is None else self.weight[rows]
        errors = np.square(y[:, :, None] - predictions)
        errors = errors if weight is None else errors * weight[:, None, None]
        if self.scoring is None:
            scores = -errors.mean(axis=0 if self.per_target else (0, 1))
        elif self.per_target:
            scores = np.stack(
                [self._called(*pair, weight) for pair in zip(y.T, predictions.swapaxes(0, 1), strict=True)]
            )
        else:
            one = 0 if y.shape[1] == 1 else slice(None)
            scores = self._called(y[:, one], predictions[:, one], weight)
        if not np.isfinite(scores).all():
            raise DataError(
                f"the score of {where or 'the leave-one-out predictions'} is {scores[~np.isfinite(scores)].ravel()[0]}",
                hint="R^2 needs at least two rows in a fold; another scoring, or larger folds, may do",
            )
        before = self.scores[..., batch]
        self.scores[..., batch] = np.where(np.isneginf(before), 0.0, before) + scores * share
        if self.values is not None:
            self.values[rows, :, batch] = predictions if self.stored == "predictions" else errors

    def _called(self, y: Floats, predictions: Floats, weight: Floats | None) -> Floats:
        """The scorer for predictions (m, k) or (m, t, k)."""
        parameters = signature(getattr(self.scoring, "_score_func", self.scoring)).parameters.values()
        takes_weights = any(item.name == "sample_weight" or item.kind is item.VAR_KEYWORD for item in parameters)
        options = {"sample_weight": weight} if weight is not None and takes_weights else {}
        columns = np.moveaxis(predictions, -1, 0)
        return np.array([float(self.scoring(_Given(), column, y, **options)) for column in columns])


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

    @cached_property
    def system(self) -> EigenRidge | FactorRidge:
        """Of all rows of positive weight."""
        if self.method == "eigen":
            return self._eigen(self.inside)
        root = None if self.weight is None else np.sqrt(self.weight[self.inside])
        gram, y = self._gram(self.inside), self.y[self.inside]
        return FactorRidge(None, gram, y, root, fit_intercept=self.fit_intercept)

    @cached_property
    def inside(self) -> Rows:
        """Rows of positive weight; the others are predicted and are never fitted."""
        return np.arange(len(self.y)) if self.weight is None else np.flatnonzero(self.weight > 0)

    @cached_property
    def _place(self) -> Rows:
        """Of each row among those inside; -1 outside."""
        place = np.full(len(self.y), -1)
        place[self.inside] = np.arange(len(self.inside))
        return place

    @cached_property
    def _outside(self) -> Floats | None:
        """k(z, X) for all rows z of weight 0; None where there are none."""
        outside = np.flatnonzero(self._place < 0)
        return self._gram(outside, self.inside) if len(outside) else None

    def _gram(self, rows: Rows, columns: Rows | None = None) -> Floats:
        """k(x[rows], x[columns]), a new array; symmetric, of the same rows, without ``columns``."""
        other = rows if columns is None else columns
        if self.kernel is None:
            return np.array(self.x[np.ix_(rows, other)], dtype=np.float64, order="C")
        block: Floats = self.kernel.block(
            np.ascontiguousarray(self.x[rows]), np.ascontiguousarray(self.x[other]), same=columns is None
        )
        return block

    def _eigen(self, rows: Rows) -> EigenRidge:
        """Every alpha of some rows of positive weight, from S K S."""
        matrix, root = self._gram(rows), None if self.weight is None else np.sqrt(self.weight[rows])
        if root is not None:
            matrix *= root[:, None]
            matrix *= root
        is_psd = self.kernel is not None and self.kernel.positive_semidefinite
        options = {"fit_intercept": self.fit_intercept, "positive_semidefinite": is_psd}
        return EigenRidge(matrix, self.y[rows], root, **options)

    def search(self, alphas: Floats, search: AlphaSearch) -> None:
        """Add the held-out predictions of every alpha.

        Raises
        ------
        NotPositiveDefiniteError
            For an alpha, K + alpha I is not positive definite.
        DataError
            Nothing is left to train on, or a score is not a finite number.
        """
        self._check_folds()
        folds = [None] if self.folds is None else self.folds
        for number, fold in enumerate(folds):
            where = "" if fold is None else f"fold {number}"
            for batch, predictions in self._held_out(fold, alphas):
                rows = slice(None) if fold is None else fold.test
                search.add(batch, predictions, rows, where, 1 / len(folds))

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

    def _held_out(self, fold: Fold | None, alphas: Floats) -> Iterator[tuple[slice, Floats]]:
        """A batch of alphas, and the predictions (f, t, batch) of the rows of a fold by a fit without them."""
        refit = None
        if fold is not None and fold.train is not None:
            train = fold.train[self._place[fold.train] >= 0]
            refit = self._eigen(train), self._gram(fold.test, train)
        size = max(1, BATCH_NUMBERS // self.y.size)
        for start in range(0, len(alphas), size):
            batch = slice(start, min(start + size, len(alphas)))
            if refit is not None:
                yield batch, refit[0].predict(refit[1], alphas[batch])
            elif fold is not None:
                yield batch, self._without(fold.test, alphas[batch])
            else:
                yield batch, self._each_without_itself(alphas[batch])

    def _each_without_itself(self, alphas: Floats) -> Floats:
        """Leave-one-out predictions (n, t, k); rows of weight 0 are predicted by the fit of all."""
        predictions = np.empty((*self.y.shape, len(alphas)))
        predictions[self.inside] = self.y[self.inside][:, :, None] - self.system.leave_one_out(alphas)
        if self._outside is not None:
            predictions[self._place < 0] = self.system.predict(self._outside, alphas)
        return predictions

    def _without(self, rows: Rows, alphas: Floats) -> Floats:
        """Predictions (f, t, k) of some rows by the fit of all others."""
        place = self._place[rows]
        inside, outside = place >= 0, None
        if self._outside is not None:
            order = np.cumsum(self._place < 0) - 1  # of each row outside among those outside
            outside = self._outside[order[rows[~inside]]]
        assert isinstance(self.system, EigenRidge)  # noqa: S101  (narrows the type)
        residual, others = self.system.leave_fold_out(place[inside], alphas, outside)
        predictions = np.empty((len(rows), self.y.shape[1], len(alphas)))
        predictions[inside] = self.y[rows[inside]][:, :, None] - residual
        predictions[~inside] = 0.0 if others is None else others
        return predictions

    def fit(self, alphas: Floats, started: float) -> DenseFit:
        """The fit of all rows with one alpha for each target, with its true residual.

        Raises
        ------
        ResidualError
            See :func:`dkrr.linalg.dense.judge_dense`.
        """
        what = "Eigendecomposition" if self.method == "eigen" else "Cholesky factors"
        u = np.zeros(self.y.shape)
        u[self.inside] = self.system.solve_each(alphas)
        root = None if self.weight is None else np.sqrt(self.weight)
        centring = self.system.centring
        y = self.y if centring is None else centring.apply(self.y)
        rhs = y if root is None else root[:, None] * y
        offset = None if centring is None else centring.offset
        return judge_dense(
            self.kernel, self.x, root, alphas, rhs, u, offset, solver=self.method, precision="float64", started=started,
            message=f"{what} of {len(self.inside):,} rows in memory",
        )  # fmt: skip


def primal_search(source: FeatureRows, grid: Floats, search: AlphaSearch, *, fit_intercept: bool) -> None:
    """Add the leave-one-out errors of a grid of alphas (k,) in feature space.

    Parameters
    ----------
    source
        Rows, targets and weights as a primal fit reads them.

    Cost
    ----
    Two passes for mean squared errors; a scorer, or what is stored, needs every residual: three passes for each alpha.
    """
    if search.scoring is None and search.stored is None:
        errors = leave_one_out_errors(source, grid.tolist(), fit_intercept=fit_intercept).T  # (t, k), weighted means
        scores = -errors * (1.0 if search.weight is None else float(search.weight.mean()))
        search.scores[...] = scores if search.per_target else scores.mean(axis=0)
        return
    for number, alpha in enumerate(grid.tolist()):
        found = primal_leave_one_out(source, alpha, fit_intercept=fit_intercept)
        search.add(slice(number, number + 1), (search.y - found.residuals)[:, :, None])
