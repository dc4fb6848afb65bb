"""A grid of alphas in feature space (:mod:`dkrr.linalg.primal.solver`): two passes over the rows for all.

Folds: which rows are predicted by a fit of which others.

A fold whose training rows are all the others is answered from the fit of all rows; any other split (time-ordered ones
train on the past alone) needs a fit of its own.

With another loss than the square every fold needs a fit of its own, which has all values of C as columns.

Scores of held-out predictions, by scikit-learn's conventions for RidgeCV.

Leave-one-out predictions are scored all together: without ``scoring`` by -mean(w_i e_i^2) over all rows, else by the
scorer. Folds are scored one by one, by R^2 unless told otherwise, and their scores averaged, as GridSearchCV does. A
scorer that takes sample weights is given them.

Held-out predictions for a grid of alphas in memory, and the alpha that they choose.

    gram  ->  eigendecomposition  ->  for every alpha: predictions of held-out rows  ->  scores  ->  alpha

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
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv

from dkrr.errors import DataError, ParameterError
from dkrr.kernels import Kernel
from dkrr.linalg.factor.dense import DenseFit, FactorRidge, judge_dense
from dkrr.linalg.inference.eigen import EigenRidge, decompose
from dkrr.linalg.inference.leave_one_out import LeaveOneOut
from dkrr.linalg.losses.fit import fit_losses
from dkrr.linalg.losses.loss import log_probabilities
from dkrr.linalg.primal.passes import FeatureRows
from dkrr.linalg.primal.solver import leave_one_out_errors, primal_leave_one_out
from dkrr.models.tiled import label_targets
from dkrr.selection.choice import FoldLoss

__all__ = ["AlphaPath", "Chosen", "Fold", "Scoring", "choose", "fold_losses", "held_out", "make_folds", "primal_search"]

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
logger = logging.getLogger("dkrr.selection")

# on the gaps of the fits of folds, which only have to tell one C from another
FOLD_TOL = 1e-3


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
        A fold is empty, or names rows that do not exist.
    """
    n, is_array = len(X), hasattr(cv, "shape") and hasattr(cv, "dtype") and np.ndim(cv) == 1
    if is_array:
        return _folds_of_labels(cv, n)
    how = "give a number of folds, a splitter, (train, test) pairs, or a label for each row"
    if isinstance(cv, bool | str) or (isinstance(cv, numbers.Number) and not isinstance(cv, numbers.Integral)):
        raise ParameterError(f"cv is {cv!r}", hint=how)
    try:
        splits = list(check_cv(cv).split(X, y))
    except (ValueError, TypeError) as error:
        raise ParameterError(
            f"cv is {cv!r}: {str(error).partition(chr(10))[0]}",
            hint=f"{how}; a splitter by groups is given as list(splitter.split(X, y, groups))",
        ) from error
    if not splits:
        raise DataError("cv has no folds", hint="give at least one pair (train, test)")
    folds = []
    for number, (train, test) in enumerate(splits):
        sides = _rows(train, number, n), _rows(test, number, n)
        for name, rows in zip(("training", "test"), sides, strict=True):
            if not len(rows):
                raise DataError(f"fold {number} has no {name} rows", hint="every fold needs rows on both sides")
        is_whole = (np.bincount(np.concatenate(sides), minlength=n) == 1).all()
        folds.append(Fold(sides[1], None if is_whole else sides[0]))
    return folds


def _folds_of_labels(cv: Any, n: int) -> list[Fold]:
    if len(cv) != n:
        raise DataError(f"cv has {len(cv):,} labels for {n:,} rows", hint="give the fold of every row")
    labels = np.asarray(cv)
    try:
        names, fold = np.unique(labels, return_inverse=True)
        is_whole = not np.ma.is_masked(cv) and bool((labels == labels).all())  # NaN is not itself
    except TypeError:
        is_whole = False
    if not is_whole:
        raise DataError("cv has labels that are missing, or of several kinds", hint="give the fold of every row")
    if len(names) < 2:
        raise DataError(f"cv has one label for all {n:,} rows", hint="give at least two groups of rows")
    return [Fold(np.flatnonzero(fold == number)) for number in range(len(names))]


def _rows(values: Any, number: int, n: int) -> Rows:
    """Row numbers, from a mask too."""
    if np.ma.is_masked(values):
        raise DataError(f"fold {number} of cv has masked values", hint="give row numbers alone")
    rows = np.asarray(values)
    if rows.dtype == bool and rows.shape == (n,):
        rows = np.flatnonzero(rows)
    is_numbers = rows.dtype.kind in "iu" and rows.ndim == 1
    if rows.size and not (is_numbers and rows.min() >= 0 and rows.max() < n):
        raise DataError(
            f"fold {number} of cv is {rows.dtype} of shape {rows.shape}, from {rows.min()} to {rows.max()}",
            hint=f"give row numbers from 0 to {n - 1:,}",
        )
    return rows.astype(np.intp)


def fold_losses(
    asked: FoldLoss, kernel: Kernel, x: Floats, y: Floats, weight: Floats | None, *, fit_intercept: bool
) -> Floats:
    """What each row loses when the other folds are fitted, for each C of ``asked`` (n, k), by its metric.

    Row i is of fold i mod ``num_folds``, counted within each class.

    Parameters
    ----------
    kernel
        Resolved.
    x : (n, d), y : (n, t)
        Of a loss for labels a column for each class, largest where a row has it.
    weight : (n,), optional
        Above 0; they count in the fits, and the losses are multiplied by them over their mean.

    Raises
    ------
    DataError
        A class has one row alone.

    Cost
    ----
    ``num_folds`` fits with k values of C, and a product of each.
    """
    n, k, weight = len(x), len(asked.C), np.ones(len(x)) if weight is None else weight
    share = weight / weight.mean()
    codes = np.zeros(n, dtype=np.intp)
    if asked.losses[0].is_for_labels:
        varying = y[:, np.ptp(y, axis=0) > 0]  # a class that no row has cannot be told from the others
        codes = np.argmax(varying > 0.5 * (varying.min(axis=0) + varying.max(axis=0)), axis=1)
        count = np.bincount(codes)
        if count.min() < 2:
            raise DataError(
                f"a class has one of the {n:,} rows of a fold search; at least two expected",
                hint="give the search more rows ([tune] rows, search_rows), or leave that class out",
            )
        if asked.metric == "balanced_accuracy":
            share = weight * n / (len(count) * np.bincount(codes, weights=weight)[codes])
        y = label_targets(codes, weight, range(len(count)))
    fold = np.empty(n, dtype=np.intp)
    for code in range(codes.max() + 1):
        own = np.flatnonzero(codes == code)
        fold[own] = (np.arange(len(own)) + code) % asked.num_folds
    found = np.empty((n, k))
    for number in np.unique(fold):
        test = fold == number
        train = ~test
        fit = fit_losses(
            kernel, x[train], y[train], asked.losses, asked.C, weight=weight[train], fit_intercept=fit_intercept,
            tol=FOLD_TOL, allow_unconverged=True,
        )  # fmt: skip
        values = kernel.block(x[test], x[train]) @ fit.dual_coef + fit.intercept
        found[test] = _lost(asked, values.reshape(len(values), k, -1), y[test], codes[test])
    return np.asarray(found * share[:, None])


def _lost(asked: FoldLoss, values: Floats, y: Floats, codes: Rows) -> Floats:
    """Of rows with decision values or predictions (f, k, m): (f, k)."""
    if asked.losses[0].is_for_labels:
        whole = np.concatenate((-values, values), axis=2) if values.shape[2] == 1 else values
        if asked.metric == "log_loss":
            logarithms = log_probabilities(whole.reshape(-1, whole.shape[2])).reshape(whole.shape)
            return np.asarray(-logarithms[np.arange(len(y)), :, codes])
        return np.asarray(whole.argmax(axis=2) != codes[:, None], dtype=np.float64)
    truth = np.broadcast_to(y[:, None, :], values.shape)
    if asked.metric == "rmse":
        return np.asarray(np.square(truth - values).mean(axis=2))
    losses = asked.losses * (values.shape[2] // len(asked.losses))
    lost = [loss.value(truth[..., j], values[..., j]) for j, loss in enumerate(losses)]
    return np.asarray(np.mean(lost, axis=0))


class _Given(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor whose rows are their own predictions: what a scorer is called with."""

    def fit(self, X: Any, y: Any = None) -> _Given:
        return self

    def predict(self, X: Any) -> Any:
        return X

    def __sklearn_is_fitted__(self) -> bool:
        return True


def held_out(y: Floats, predictions: Floats, weight: Floats | None, stored: str | None) -> Floats:
    """Held-out predictions (n, t, k) as they are, or their squared errors times the weight."""
    if stored == "predictions":
        return predictions
    squares: Floats = np.square(y[:, :, None] - predictions)
    return squares if weight is None else squares * weight[:, None, None]


def _takes_weights(scorer: Any) -> bool:
    """Whether a scorer, or the metric that it was made of, has a parameter for weights."""
    parameters = signature(getattr(scorer, "_score_func", scorer)).parameters.values()
    return any(item.name == "sample_weight" or item.kind is item.VAR_KEYWORD for item in parameters)


@dataclass(frozen=True)
class Scoring:
    """How predictions become a number for each alpha.

    Parameters
    ----------
    scorer
        A name or a function (estimator, X, y) of scikit-learn; None means the negative mean squared error.
    per_target
        A number for each target as well.
    is_1d
        The target is one column, and scorers see it as such.
    """

    scorer: Any = None
    per_target: bool = False
    is_1d: bool = False

    def __post_init__(self) -> None:
        if self.scorer is not None:
            self._checked()

    def _checked(self) -> Any:
        try:
            return check_scoring(_Given(), scoring=self.scorer)
        except (ValueError, TypeError) as exc:
            raise ParameterError(
                f"scoring is {self.scorer!r}; the name of a scorer, a function (estimator, X, y) or None expected",
                hint="sklearn.metrics.get_scorer_names() lists the names",
            ) from exc

    def of(self, y: Floats, predictions: Floats, weight: Floats | None, where: str) -> Floats:
        """Scores (k,), or (t, k) per target, of predictions (m, t, k) for y (m, t).

        Raises
        ------
        DataError
            A score is not a finite number.
        """
        if self.scorer is None:
            scores = -held_out(y, predictions, weight, "errors").mean(axis=0)
            scores = scores if self.per_target else scores.mean(axis=0)
        elif self.per_target:
            scores = np.stack(
                [self._called(y[:, j], predictions[:, j], weight) for j in range(y.shape[1])]
            )  # fmt: skip
        else:
            scores = self._called(
                y[:, 0] if self.is_1d else y, predictions[:, 0] if self.is_1d else predictions, weight
            )
        if not np.isfinite(scores).all():
            value = float(scores[~np.isfinite(scores)].ravel()[0])
            raise DataError(
                f"the score of {where} is {value}",
                hint="R^2 needs at least two rows in a fold; another scoring, or larger folds, may do",
            )
        return np.asarray(scores, dtype=np.float64)

    def of_errors(self, errors: Floats, weight: Floats | None) -> Floats:
        """Scores (k,), or (t, k), of weighted mean squared errors (t, k), which are not divided by the weights here."""
        scores = -errors * (1.0 if weight is None else float(weight.mean()))
        return np.asarray(scores if self.per_target else scores.mean(axis=0))

    def of_left_out(self, loo: LeaveOneOut, y: Floats, weight: Floats | None, stored: str | None) -> tuple[Any, Any]:
        """The score of one alpha, or (t,), and what is stored of it (n, t)."""
        predictions = (y - loo.residuals)[:, :, None]
        scores = self.of(y, predictions, weight, "the leave-one-out predictions")
        return scores[..., 0], None if stored is None else held_out(y, predictions, weight, stored)[..., 0]

    def _called(self, y: Floats, predictions: Floats, weight: Floats | None) -> Floats:
        """The scorer for predictions (m, k) or (m, t, k)."""
        given, scorer = _Given(), self._checked()
        options = {"sample_weight": weight} if weight is not None and _takes_weights(scorer) else {}
        columns = range(predictions.shape[-1])
        return np.array([float(scorer(given, predictions[..., number], y, **options)) for number in columns])


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
        return np.arange(len(self.y)) if self.weight is None else np.flatnonzero(self.weight > 0)

    @cached_property
    def _place(self) -> Rows:
        """Of each row among those inside; -1 outside."""
        place = np.full(len(self.y), -1)
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
        shape = (len(self.y), t, k)
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
                    values[rows, :, batch] = held_out(y, predictions, weight, store)
        return choose(sums, t, values)

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
                yield batch, np.arange(len(self.y)), self._each_without_itself(alphas[batch])

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


def primal_search(
    source: FeatureRows,
    y: Floats,
    grid: Floats,
    scoring: Scoring,
    *,
    fit_intercept: bool,
    stored: Literal["errors", "predictions"] | None = None,
) -> Chosen:
    """The alpha with the best leave-one-out score.

    Parameters
    ----------
    source
        Rows, targets and weights as a primal fit reads them.
    y : (n, t)
        The targets.
    grid : (k,)
    scoring, stored
        See :meth:`dkrr.selection.path.AlphaPath.search`.

    Cost
    ----
    Two passes for mean squared errors; a scorer, or what is stored, needs every residual: three passes for each alpha.
    """
    t, weight = y.shape[1], source.rows.weights()
    if scoring.scorer is None and stored is None:
        errors = leave_one_out_errors(source, grid.tolist(), fit_intercept=fit_intercept).T  # (t, k)
        return choose(scoring.of_errors(errors, weight), t)
    found = [
        scoring.of_left_out(primal_leave_one_out(source, alpha, fit_intercept=fit_intercept), y, weight, stored)
        for alpha in grid.tolist()
    ]
    values = None if stored is None else np.stack([kept for _, kept in found], axis=-1)
    return choose(np.stack([score for score, _ in found], axis=-1), t, values)
