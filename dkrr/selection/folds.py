"""Folds: which rows are predicted by a fit of which others.

A fold whose training rows are all the others is answered from the fit of all rows; any other split (time-ordered ones
train on the past alone) needs a fit of its own.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import check_cv

from dkrr.errors import DataError, ParameterError

__all__ = ["Fold", "make_folds"]

Rows = NDArray[np.intp]


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
