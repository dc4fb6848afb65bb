"""Scores of held-out predictions, by scikit-learn's conventions for RidgeCV.

Leave-one-out predictions are scored all together: without ``scoring`` by -mean(w_i e_i^2) over all rows, else by the
scorer. Folds are scored one by one, by R^2 unless told otherwise, and their scores averaged, as GridSearchCV does. A
scorer that takes sample weights is given them.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import check_scoring

from dkrr.errors import DataError, ParameterError
from dkrr.linalg.inference.leave_one_out import LeaveOneOut

__all__ = ["Scoring", "held_out"]

Floats = NDArray[np.float64]


class _Given(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor whose rows are their own predictions: what a scorer is called with."""

    def fit(self, X: Any, y: Any = None) -> _Given:
        return self

    def predict(self, X: Any) -> Any:
        return X

    def __sklearn_is_fitted__(self) -> bool:
        return True


def held_out(loo: LeaveOneOut, y: Floats, weight: Floats | None, stored: str | None) -> Floats:
    """Predictions (n, t), or squared errors times the weight."""
    if stored == "predictions":
        return np.asarray(y - loo.residuals)
    squares = np.square(loo.residuals)
    return np.asarray(squares if weight is None else squares * weight[:, None])


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
            squares = np.square(y[:, :, None] - predictions)
            if weight is not None:
                squares *= weight[:, None, None]
            scores = -squares.mean(axis=0)
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

    def of_left_out(self, loo: LeaveOneOut, y: Floats, weight: Floats | None) -> Floats:
        """The score of one alpha, or (t,)."""
        if self.scorer is None:
            return self.of_errors(loo.mean_squared_error[:, None], weight)[..., 0]
        predictions = (y - loo.residuals)[:, :, None]
        return np.asarray(self.of(y, predictions, weight, "the leave-one-out predictions")[..., 0])

    def _called(self, y: Floats, predictions: Floats, weight: Floats | None) -> Floats:
        """The scorer for predictions (m, k) or (m, t, k)."""
        given, scorer = _Given(), self._checked()
        options = {"sample_weight": weight} if weight is not None and _takes_weights(scorer) else {}
        columns = range(predictions.shape[-1])
        return np.array([float(scorer(given, predictions[..., number], y, **options)) for number in columns])
