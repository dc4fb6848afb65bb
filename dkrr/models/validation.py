"""What the estimator is given: parameters, arrays in memory, and rows that live elsewhere.

scikit-learn's own checks decide what is accepted; here their errors become errors of dkrr that name dtype, row and
column, and what those checks would convert without a word (datetimes, text, masked values) is refused.
"""

from __future__ import annotations

import numbers
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data

from dkrr.dataset import Dataset
from dkrr.dataset.columns import frame_labels, unique_names
from dkrr.dataset.sources.table import check_shape, to_floats, with_mask
from dkrr.dataset.summary import decode_floats
from dkrr.errors import DataError, ParameterError
from dkrr.tiles import MAX_TILE_SIZE

__all__ = [
    "DataTypeError",
    "check_alpha",
    "check_flag",
    "check_nonnegative",
    "check_positive",
    "check_target_sizes",
    "check_tile_size",
    "check_weight",
    "compared_targets",
    "dense_rows",
    "fit_arrays",
    "is_dask_array",
    "is_dask_frame",
    "is_out_of_core",
    "label_arrays",
    "owned",
    "rows_to_predict",
]


MAX_SPARSE_ENTRIES = 20_000_000

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


def check_alpha(alpha: Any, num_targets: int | None = None) -> NDArray[np.float64]:
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


def check_nonnegative(X: NDArray[np.float64], kernel: str) -> None:
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


def check_weight(sample_weight: Any, X: Any) -> NDArray[np.float64] | None:
    """Weights (n,), each finite and at least 0, not all 0; None for None."""
    if sample_weight is None:
        return None
    try:
        given = to_floats(np.asanyarray(sample_weight), "sample_weight")
        _check_weight_values(given.reshape(-1))
        weight: NDArray[np.float64] = _check_sample_weight(given if given.ndim else float(given), X, dtype=np.float64)
    except DataError:
        raise
    except (ValueError, TypeError) as exc:
        raise DataError(_one_line(exc)) from exc
    return owned(weight, sample_weight)


def _check_weight_values(weight: NDArray[np.float64]) -> None:
    bad = ~(np.isfinite(weight) & (weight >= 0))
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(
            f"sample_weight is {float(weight[row])} in row {row:,}; finite numbers >= 0 expected",
            hint="a weight of 0 leaves a row out",
            row=row,
        )
    if len(weight) and not np.any(weight > 0):
        raise DataError("all sample weights are zero", hint="give at least one row a positive weight")


def owned(values: NDArray[np.float64], given: Any) -> NDArray[np.float64]:
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


def fit_arrays(estimator: Any, X: Any, y: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """X (n, d) and y (n,) or (n, t) in memory, as float64 in C order; sets ``n_features_in_`` and feature names.

    X may be memory of the caller's; y is not.
    """
    X, y = _refused(X, "X"), _refused(y, "y")
    try:
        with np.errstate(invalid="ignore"):  # infinities of both signs, summed to see whether there is one
            X, y = validate_data(
                estimator, X, y, accept_sparse=("csr", "csc"), dtype=np.float64, order="C", multi_output=True,
                y_numeric=True,
            )  # fmt: skip
        y = np.array(y, dtype=np.float64, order="C")
        if not np.isfinite(y).all():  # of objects, which scikit-learn converts after its own check
            raise ValueError("targets are finite numbers")
    except (ValueError, TypeError, OverflowError) as exc:
        raise _explained(exc, X, y) from exc
    check_target_sizes(y)
    return dense_rows(X), y


def label_arrays(estimator: Any, X: Any, y: Any) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[np.intp]]:
    """X (n, d) as :func:`fit_arrays`, the classes (k,) among the labels y (n,), in order, and the place of each label.

    Raises
    ------
    DataError
        A label is missing, or none (a number with a fraction, several in a row); or all rows have the same.
    """
    X = _refused(X, "X")
    _refuse_missing_labels(y)
    try:
        with np.errstate(invalid="ignore"):
            X, y = validate_data(estimator, X, y, accept_sparse=("csr", "csc"), dtype=np.float64, order="C")
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
    except (ValueError, TypeError, OverflowError) as exc:
        raise _explained(exc, X, None) from exc
    if len(classes) < 2:
        raise DataError(f"y has one class, {classes.tolist()[0]!r}; at least two classes expected")
    return dense_rows(X), classes, codes


def _refuse_missing_labels(y: Any) -> None:
    given = with_mask(y)
    given = given.tolist() if isinstance(given, np.ma.MaskedArray) else given  # None under the mask
    for row, label in enumerate(np.ravel(np.asarray(given, dtype=object)) if given is not None else ()):
        is_number = isinstance(label, float | np.floating)
        if label is None or type(label).__name__ in ("NAType", "NaTType") or (is_number and not np.isfinite(label)):
            raise DataError(f"the label in row {row:,} of y is {label}", hint="remove rows without a class", row=row)


def check_target_sizes(targets: Dataset | NDArray[np.float64]) -> None:
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


def rows_to_predict(estimator: Any, X: Any) -> Any:
    """Rows (m, d) for the model: a plain array as it is (the model converts block by block), else float64."""
    X = _refused(X, "X")
    is_plain = isinstance(X, np.ndarray) and X.dtype.kind in "biuf"
    options: dict[str, Any] = {"accept_sparse": ("csr", "csc"), "dtype": np.float64, "order": "C"}
    try:
        with np.errstate(invalid="ignore"):
            checked = validate_data(estimator, X, reset=False, skip_check_array=is_plain, **options)
    except (ValueError, TypeError, OverflowError) as exc:
        raise _explained(exc, X, None) from exc
    return dense_rows(checked)


def compared_targets(y: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Finite targets of the shape of the values they are compared with; (m,) and (m, 1) are the same thing.

    Raises
    ------
    DataError
        Another shape, which NumPy might broadcast; a value that is not finite.
    """
    given = np.asarray(_refused(y, "y"))
    if given.shape != shape and {given.shape, shape} != {shape[:1], (shape[0], 1)}:
        one = len(shape) == 1 or shape[1] == 1
        expected = f"({shape[0]},) or ({shape[0]}, 1)" if one else str(shape)
        raise DataError(f"y has shape {given.shape}; {expected} expected", hint="give the targets of these rows")
    bad = _first_bad(given, "y", ValueError("a target is compared with a prediction"))
    if bad is not None:
        raise bad
    return _as_floats(given, "y").reshape(shape)


def dense_rows(X: Any) -> Any:
    """Sparse rows as a dense array when they are few; others as they are."""
    if not hasattr(X, "toarray"):
        return X
    entries = X.shape[0] * X.shape[1]
    if entries > MAX_SPARSE_ENTRIES:
        raise DataError(
            f"sparse X of shape {X.shape} would be dense with {entries:,} entries; at most {MAX_SPARSE_ENTRIES:,} "
            "are converted",
            hint="reduce the features (TruncatedSVD, hashing) or ingest dense rows",
        )
    return np.ascontiguousarray(X.toarray(), dtype=np.float64)


def _refused(values: Any, label: str) -> Any:
    """``values``, unless scikit-learn would convert them to something that nobody meant."""
    values = with_mask(values)
    unique_names(frame_labels(values) or (), label)
    dtypes = getattr(values, "dtypes", None)
    if dtypes is not None and hasattr(dtypes, "items"):
        for name, dtype in dtypes.items():
            if getattr(dtype, "kind", "O") in "mMcSU":
                raise DataError(f"column {name!r} of {label} has dtype {dtype}; numbers expected", dtype=str(dtype))
        return values
    if label == "y" and hasattr(values, "toarray"):
        raise DataError(f"y is sparse ({type(values).__name__}); dense targets expected", hint="pass y.toarray()")
    dtype, shape = getattr(values, "dtype", None), getattr(values, "shape", None)
    kind = getattr(dtype, "kind", "O")
    if kind == "c":
        raise DataError(f"Complex data not supported: {label} has dtype {dtype}", dtype=str(dtype))
    if kind in "mMSUV":
        raise DataError(f"{label} has dtype {dtype}; numbers expected", hint="convert it to float64", dtype=str(dtype))
    # scikit-learn's words for an empty axis say as much, and its checks look for them
    if isinstance(shape, tuple) and 0 not in shape and (len(shape) != 2 or label == "y"):
        check_shape(shape, label, allow_1d=label == "y")
    if label == "y" and isinstance(shape, tuple) and len(shape) == 2 and shape[1] == 0:
        check_shape(shape, label, allow_1d=True)
    if isinstance(values, np.ma.MaskedArray):
        # asarray would uncover what is under the mask; a masked value is a missing one
        return to_floats(values, label)
    return values


def _explained(error: Exception, X: Any, y: Any) -> DataError:
    """What scikit-learn refused, with the place where there is one."""
    for values, label in ((X, "X"), (y, "y")):
        found = None if values is None else _first_bad(values, label, error)
        if found is not None:
            return found
    return (DataTypeError if isinstance(error, TypeError) else DataError)(_one_line(error))


def _one_line(error: Exception) -> str:
    """The first line of scikit-learn's words; all of them about feature names, for its checks look for each."""
    text = str(error)
    return text if text.startswith("The feature names") else text.partition("\n")[0]


def _first_bad(values: Any, label: str, error: Exception) -> DataError | None:
    """The first value that is not a finite number."""
    try:
        array = _as_floats(values, label)
    except DataError as found:
        text = f"{found.message} ({_one_line(error)})"
        kind = DataTypeError if isinstance(error, TypeError) else DataError
        return kind(text, hint=found.hint, **found.details)
    except (ValueError, TypeError):
        return None  # no array at all: scikit-learn's words are all there is to say
    bad = ~np.isfinite(array)
    if not bad.any():
        return None
    count = int(np.count_nonzero(bad))
    first = np.argwhere(bad)[0]
    row, column = int(first[0]), int(first[1]) if array.ndim > 1 else 0
    noun = "1 value that is" if count == 1 else f"{count:,} values that are"
    return DataError(
        f"input {label} has {noun} NaN or infinity; the first is {array[tuple(first)]} at row {row:,}, column {column}",
        hint="remove these rows or fill the values in; rows and columns count from 0",
        row=row,
        column=column,
        count=count,
    )


def _as_floats(values: Any, label: str) -> NDArray[np.float64]:
    """The values as float64, NaN included."""
    if hasattr(values, "toarray"):
        # only the stored values of a sparse matrix can be wrong
        values = values.toarray() if values.shape[0] * values.shape[1] <= MAX_SPARSE_ENTRIES else values.data
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(values, pandas.DataFrame | pandas.Series):
        from dkrr.dataset.sources.frames import FrameTable

        table = FrameTable(values, label, allow_1d=True)
        blocks = [block for block, _ in table.blocks(range(len(table.names)))]
        return np.concatenate(blocks)
    return to_floats(np.asarray(values), label)
