"""Folds: which rows are predicted by a fit of which others.

A fold whose training rows are all the others is answered from the fit of all rows; any other split (time-ordered ones
train on the past alone) needs a fit of its own.

With another loss than the square every fold needs a fit of its own, which has all values of C as columns.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import check_cv

from dkrr.errors import DataError, ParameterError
from dkrr.kernels import Kernel
from dkrr.linalg.losses.fit import fit_losses
from dkrr.linalg.losses.loss import log_probabilities
from dkrr.records import label_targets
from dkrr.selection.choice import FoldLoss

__all__ = ["Fold", "fold_losses", "make_folds"]

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
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
    n = len(X)
    labels = _labels(cv, n)
    if labels is not None:
        numbers_of, inverse = np.unique(labels, return_inverse=True)
        if len(numbers_of) < 2:
            raise DataError(f"cv has one label for all {n:,} rows", hint="give at least two groups of rows")
        return [Fold(np.flatnonzero(inverse == number)) for number in range(len(numbers_of))]
    if isinstance(cv, bool | str) or (isinstance(cv, numbers.Number) and not isinstance(cv, numbers.Integral)):
        raise ParameterError(
            f"cv is {cv!r}", hint="give a number of folds, a splitter, (train, test) pairs, or a label for each row"
        )
    try:
        splits = list(check_cv(cv).split(X, y))
    except (ValueError, TypeError) as error:
        raise ParameterError(
            f"cv is {cv!r}: {str(error).partition(chr(10))[0]}",
            hint="give a number of folds, a splitter, (train, test) pairs, or a label for each row; "
            "a splitter by groups is given as list(splitter.split(X, y, groups))",
        ) from error
    if not splits:
        raise DataError("cv has no folds", hint="give at least one pair (train, test)")
    return [_fold(number, train, test, n) for number, (train, test) in enumerate(splits)]


def _labels(cv: Any, n: int) -> NDArray[Any] | None:
    """Labels (n,) if ``cv`` is an array or a column of them."""
    if not (hasattr(cv, "shape") and hasattr(cv, "dtype")) or np.ndim(cv) != 1:
        return None
    labels = np.asarray(cv)
    if len(labels) != n:
        raise DataError(f"cv has {len(labels):,} labels for {n:,} rows", hint="give the fold of every row")
    try:
        is_whole = not np.ma.is_masked(cv) and bool((labels == labels).all())  # NaN is not itself
        np.sort(labels)
    except TypeError:
        is_whole = False
    if not is_whole:
        raise DataError("cv has labels that are missing, or of several kinds", hint="give the fold of every row")
    return labels


def _fold(number: int, train: Any, test: Any, n: int) -> Fold:
    train_rows, test_rows = _rows(train, number, n), _rows(test, number, n)
    for name, rows in (("training", train_rows), ("test", test_rows)):
        if not len(rows):
            raise DataError(f"fold {number} has no {name} rows", hint="every fold needs rows on both sides")
    seen = np.zeros(n, dtype=np.intp)
    np.add.at(seen, train_rows, 1)
    np.add.at(seen, test_rows, 1)
    return Fold(test_rows, None if (seen == 1).all() else train_rows)


def _rows(values: Any, number: int, n: int) -> Rows:
    """Row numbers, from a mask too."""
    if np.ma.is_masked(values):
        raise DataError(f"fold {number} of cv has masked values", hint="give row numbers alone")
    rows = np.asarray(values)
    if rows.dtype == bool and rows.shape == (n,):
        return np.flatnonzero(rows)
    if rows.size == 0:
        return np.zeros(0, dtype=np.intp)
    if rows.dtype.kind not in "iu" or rows.ndim != 1 or rows.min() < 0 or rows.max() >= n:
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
