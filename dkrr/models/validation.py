"""What the estimator is given: parameters, arrays in memory, and rows that live elsewhere.

scikit-learn's own checks decide what is accepted; here their errors become errors of dkrr that name dtype, row and
column, and what those checks would convert without a word (datetimes, text, masked values) is refused.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import (
    Dataset,
    Floats,
    check_shape,
    decode_floats,
    frame_labels,
    given_names,
    matched_columns,
    to_floats,
    unique_names,
    with_mask,
)
from dkrr.errors import DataError, DkrrError, ParameterError
from dkrr.models.model import Model
from dkrr.tiles import MAX_TILE_SIZE
from dkrr.tiles.blas import is_finite

MAX_SPARSE_ENTRIES = 20_000_000
_CHECKS: dict[str, Any] = {"dtype": np.float64, "order": "C"}
TARGET_SIZES = (1e-140, 1e140)


class DataTypeError(DataError, TypeError):
    """Raised when values are not numbers; a ``TypeError`` too, as scikit-learn's checks expect."""


def check_tile_size(value: Any) -> int | None:
    """A tile edge, None for "auto"."""
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= MAX_TILE_SIZE:
        raise ParameterError(f"tile_size is {value!r}; 'auto' or a whole number from 1 to {MAX_TILE_SIZE:,} expected")
    return int(value)


def check_alpha(alpha: Any, num_targets: int | None = None) -> Floats:
    """alpha as an array of 1 or t values, each finite and at least 0; ``num_targets`` None leaves their number open."""
    raw = np.asanyarray(alpha) if not isinstance(alpha, str) else np.asarray("")
    if raw.dtype.kind not in "iuf" or raw.ndim > 1 or raw.size == 0:
        raise ParameterError(f"alpha is {alpha!r}; a number >= 0, or one per target, expected")
    values = np.atleast_1d(to_floats(raw, "alpha"))
    if not np.all(np.isfinite(values)) or np.any(values < 0):
        raise ParameterError(f"alpha is {alpha!r}; finite values of at least 0 expected")
    if num_targets is not None and len(values) not in (1, num_targets):
        raise ParameterError(
            f"alpha has {len(values)} values for {num_targets} targets; one, or one for each target, expected"
        )
    return values


def check_flag(name: str, value: Any) -> bool:
    """True or False, and nothing that only counts as one of them."""
    if not isinstance(value, bool | np.bool_):
        raise ParameterError(f"{name} is {value!r}; True or False expected")
    return bool(value)


def check_positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < np.inf:
        raise ParameterError(f"{name} is {value!r}; a finite number above 0 expected")
    return float(value)


def check_nonnegative(X: Floats, kernel: str) -> None:
    """Rows for a kernel between histograms."""
    if X.min() < 0:
        row, column = (int(place) for place in np.argwhere(X < 0)[0])
        raise DataError(
            f"Negative values in data: {float(X[row, column])!r} at row {row:,}, column {column}; "
            f"kernel {kernel!r} needs non-negative features",
            hint="shift the features to start at 0, or take another kernel",
            row=row,
            column=column,
        )


def check_weight(sample_weight: Any, X: Any) -> Floats | None:
    """Weights (n,), each finite and at least 0, not all 0; None for None."""
    if sample_weight is None:
        return None
    with _explaining() as theirs:
        given = to_floats(np.asanyarray(sample_weight), "sample_weight")
        bad = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
        if len(bad):
            raise DataError(
                f"sample_weight is {float(given.flat[bad[0]])} in row {bad[0]:,}; finite numbers >= 0 expected",
                hint="a weight of 0 leaves a row out",
                row=int(bad[0]),
            )
        if given.size and not given.any():
            raise DataError("all sample weights are zero", hint="give at least one row a positive weight")
        weight = theirs._check_sample_weight(given if given.ndim else float(given), X, dtype=np.float64)
    return owned(weight, sample_weight)


def owned(values: Floats, given: Any) -> Floats:
    """``values``, copied where they may be memory of ``given``, which its owner may change."""
    is_new = hasattr(given, "toarray") or (isinstance(given, np.ndarray) and not np.may_share_memory(values, given))
    return values if is_new else values.copy()


def is_dask_array(X: Any) -> bool:
    """Whether X is a dask array; other collections of dask have no rows of known length."""
    return type(X).__module__.startswith("dask.array")


def is_dask_frame(X: Any) -> bool:
    """Whether X is a dask frame or one of its columns: an array once its rows are counted."""
    return type(X).__module__.startswith("dask.dataframe") and hasattr(type(X), "to_dask_array")


def is_out_of_core(X: Any, max_rows: int, max_bytes: int) -> bool:
    """Whether X is rows that are read a block at a time; a small memory map is read at once."""
    if isinstance(X, np.memmap):
        return X.ndim != 2 or len(X) > max_rows or 8 * X.size > max_bytes
    return isinstance(X, str | Path | Dataset) or type(X).__module__.startswith(("dask.", "zarr."))


def fit_arrays(estimator: Any, X: Any, y: Any) -> tuple[Floats, Floats]:
    """X (n, d) and y (n,) or (n, t) in memory, as float64 in C order; sets ``n_features_in_`` and feature names.

    X may be memory of the caller's; y is not.
    """
    import sklearn

    with _explaining() as theirs:
        rows = _numbers(X, "X")
        theirs.validate_data(estimator, X, y, skip_check_array=True)
        targets = _numbers(y, "y")
        with sklearn.config_context(assume_finite=True):  # they are: a second pass costs more than it says
            rows, targets = theirs.check_X_y(rows, targets, multi_output=True, y_numeric=True, **_CHECKS)
    targets = np.array(targets, dtype=np.float64, order="C")
    check_target_sizes(targets)
    return rows, targets


def label_arrays(estimator: Any, X: Any, y: Any) -> tuple[Floats, NDArray[Any], NDArray[np.intp]]:
    """X (n, d) as :func:`fit_arrays`, the classes (k,) among the labels y (n,), in order, and the place of each label.

    Raises
    ------
    DataError
        A label is missing, or none (a number with a fraction, several in a row); or all rows have the same.
    """
    from sklearn.utils import multiclass

    _refuse_missing_labels(y)
    y = with_own_integers(y)
    with _explaining() as theirs:
        rows = _numbers(X, "X")
        theirs.validate_data(estimator, X, y, skip_check_array=True)
        rows, labels = theirs.check_X_y(rows, y, **_CHECKS)
        multiclass.check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"y has one class, {classes.tolist()[0]!r}; at least two classes expected")
    return rows, classes, codes


def with_own_integers(values: Any) -> Any:
    """A series of nullable integers as an array of integers, which scikit-learn makes floats of; others as they are."""
    if hasattr(values, "iloc") and values.ndim == 2 and values.shape[1] == 1:
        found = with_own_integers(column := values.iloc[:, 0])
        return values if found is column else found[:, None]
    dtype = getattr(getattr(values, "dtype", None), "numpy_dtype", None)
    return values.to_numpy(dtype=dtype) if dtype is not None and dtype.kind in "iub" and not values.hasnans else values


def _refuse_missing_labels(y: Any) -> None:
    given = with_mask(y)
    given = given.tolist() if isinstance(given, np.ma.MaskedArray) else given  # None under the mask
    for row, label in enumerate(np.ravel(np.asarray(given, dtype=object)) if given is not None else ()):
        is_number = isinstance(label, float | np.floating)
        if label is None or type(label).__name__ in ("NAType", "NaTType") or (is_number and not np.isfinite(label)):
            raise DataError(f"the label in row {row:,} of y is {label}", hint="remove rows without a class", row=row)


def check_target_sizes(targets: Dataset | Floats) -> None:
    """Refuse targets whose squares, which residuals, scores and variances are made of, over- or underflow.

    Raises
    ------
    DataError
        Names the first one; a target of zeros is none of them.
    """
    if isinstance(targets, Dataset):
        sizes = np.hypot(targets.y_mean, decode_floats(targets.records["y"]["std"])) if targets.y else np.empty(0)
    else:
        sizes = np.abs(targets.reshape(len(targets), -1)).max(axis=0)
    wrong = (sizes != 0) & ~((sizes > TARGET_SIZES[0]) & (sizes < TARGET_SIZES[1]))
    if wrong.any():
        target = int(np.argmax(wrong))
        raise DataError(
            f"target {target} is of size {sizes[target]:.2g}, whose squares are too small or too large for float64; "
            f"{TARGET_SIZES[0]:.0e} to {TARGET_SIZES[1]:.0e} expected",
            hint="measure it in another unit",
        )


def column_names(X: Any, y: Any) -> dict[str, Any]:
    """What the columns of rows in memory are called, as a model has it; of targets where they have names."""
    names = {"feature_names": given_names(X, "X"), "target_names": given_names(y, "y")}
    return names if names["target_names"] else {"feature_names": names["feature_names"]}


def rows_to_predict(estimator: Any, X: Any, model: Model) -> Any:
    """Rows (m, d) for the model: a plain array as it is (the model converts block by block), else float64.

    Columns of a frame stand where they stood in the fit, as scikit-learn checks where all names are text; others are
    brought there.
    """
    is_text = all(isinstance(label, str) for label in frame_labels(X) or ())
    if not (is_text and hasattr(estimator, "feature_names_in_")):
        X = matched_columns(X, model.names, "X")
    is_plain = isinstance(X, np.ndarray) and not isinstance(X, np.ma.MaskedArray) and X.dtype.kind in "biuf"
    with _explaining() as theirs:
        if is_plain and X.ndim != 2:
            check_shape(X.shape, "X")
        rows = X if is_plain else theirs.check_array(_numbers(X, "X"), **_CHECKS)
        theirs.validate_data(estimator, X, reset=False, skip_check_array=True)
    return rows


def compared_targets(y: Any, shape: tuple[int, ...], model: Model) -> Floats:
    """Finite targets of the shape of the values they are compared with; (m,) and (m, 1) are the same thing.

    Of a frame with several columns those that are called like the targets of the fit, in their order.

    Raises
    ------
    DataError
        Another shape, which NumPy might broadcast; a value that is not finite; a name that is missing.
    """
    if y is None:
        raise DataError(f"y is missing; {shape} expected", hint="give the targets of these rows")
    if len(frame_labels(y) or ()) > 1:
        y = matched_columns(y, () if "target_names" in model.made_up else model.target_names, "y", "targets")
    with _explaining():
        given = _numbers(y, "y")
    if given.shape != shape and {given.shape, shape} != {shape[:1], (shape[0], 1)}:
        one = len(shape) == 1 or shape[1] == 1
        expected = f"({shape[0]},) or ({shape[0]}, 1)" if one else str(shape)
        raise DataError(f"y has shape {given.shape}; {expected} expected", hint="give the targets of these rows")
    return np.asarray(given.reshape(shape))


def _numbers(values: Any, label: str) -> Any:
    """An array of finite float64; None, of which scikit-learn says that it is missing, for None.

    Raises
    ------
    DataError
        What scikit-learn would convert to something that nobody meant; the first value that is not a finite number.
    """
    values = with_mask(values)
    unique_names(frame_labels(values) or (), label)
    if values is None:
        return None
    if hasattr(values, "toarray"):
        values = _dense(values, label)
    try:
        if frame_labels(values):
            array = to_floats(values, label)
        else:
            given = np.asanyarray(values)
            if given.dtype.kind == "c":
                raise DataError(f"Complex data not supported: {label} has dtype {given.dtype}", dtype=str(given.dtype))
            array = to_floats(given, label)
    except DataError as exc:
        if "object" not in exc.message:
            raise
        said = f"{exc.message} (the argument must be a string or a real number)"  # scikit-learn's checks look for it
        raise DataTypeError(said, hint=exc.hint, **exc.details) from exc
    # scikit-learn's words for an empty axis say as much, and its checks look for them
    if (array.ndim != 2 and array.size) or (label == "y" and array.shape[1:] == (0,)):
        check_shape(array.shape, label, allow_1d=label == "y")
    bad: Any = () if is_finite(array) else np.argwhere(~np.isfinite(array))
    if len(bad):
        row, column = int(bad[0][0]), int(bad[0][1]) if array.ndim > 1 else 0
        noun = "1 value that is" if len(bad) == 1 else f"{len(bad):,} values that are"
        raise DataError(
            f"input {label} has {noun} NaN or infinity; the first is {array[tuple(bad[0])]} at row {row:,}, "
            f"column {column}",
            hint="remove these rows or fill the values in; rows and columns count from 0",
            row=row,
            column=column,
            count=len(bad),
        )
    return array


def _dense(X: Any, label: str) -> Any:
    """Sparse rows as a dense array when they are few."""
    if label == "y":
        raise DataError(f"y is sparse ({type(X).__name__}); dense targets expected", hint="pass y.toarray()")
    entries = X.shape[0] * X.shape[1]
    if entries > MAX_SPARSE_ENTRIES:
        raise DataError(
            f"sparse X of shape {X.shape} would be dense with {entries:,} entries; at most {MAX_SPARSE_ENTRIES:,} "
            "are converted",
            hint="reduce the features (TruncatedSVD, hashing) or ingest dense rows",
        )
    return X.toarray()


@contextlib.contextmanager
def _explaining() -> Iterator[Any]:
    """scikit-learn's validators; what they refuse in the block is an error of dkrr."""
    from sklearn.utils import validation  # loads for most of a second, and jobs do without

    try:
        yield validation
    except DkrrError:
        raise
    except (ValueError, TypeError, OverflowError) as exc:
        text = str(exc)
        # all words about feature names, for its checks look for each
        said = text if text.startswith("The feature names") else text.partition("\n")[0]
        raise (DataTypeError if isinstance(exc, TypeError) else DataError)(said) from exc
