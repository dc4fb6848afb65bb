"""Validation shared by all kernels: parameters on construction, rows on use, and the sentences for what is wrong."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from dkrr.errors import DataError, ParameterError
from dkrr.kernels.strips import FloatArray

__all__ = [
    "LIMIT",
    "as_rows",
    "check_features",
    "check_names",
    "check_out",
    "finite",
    "finite_guard",
    "nearest",
    "overflow",
    "positive",
    "positive_or_vector",
    "real_values",
    "require_nonnegative",
    "rescale",
]

# Bound on the terms of a sum that is to be proved finite from its operands alone: leaves room for 1e8 of them.
LIMIT = 1e300


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint for a wrong name: the nearest right one, then all of them."""
    names = sorted(allowed)
    lowered = {item.lower(): item for item in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    listed = f"allowed: {', '.join(names)}" if names else "none is allowed here"
    return f"did you mean {lowered[close[0]]!r}? {listed}" if close else listed


def check_names(what: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raise ParameterError for the first key of ``given`` that is not allowed."""
    allowed = list(allowed)
    for key in given:
        if key not in allowed:
            raise ParameterError(f"{what} has no parameter {key!r}", hint=nearest(str(key), allowed))


def finite(kernel: str, name: str, value: Any) -> float:
    """``value`` as a finite float."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real) or not math.isfinite(value):
        raise ParameterError(f"{name} = {value!r} for kernel {kernel!r}", hint="a finite number is expected")
    return float(value)


def positive(kernel: str, name: str, value: Any) -> float:
    """``value`` as a finite float > 0."""
    number = finite(kernel, name, value)
    if number <= 0:
        raise ParameterError(f"{name} = {value!r} for kernel {kernel!r}", hint="a finite number > 0 is expected")
    return number


def positive_or_vector(kernel: str, name: str, value: Any) -> float | tuple[float, ...]:
    """``value`` as a float > 0, or a sequence as a tuple of them (one per feature)."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return positive(kernel, name, value)
    if not value:
        raise ParameterError(f"{name} = {value!r} for kernel {kernel!r}", hint="give a number, or one per feature")
    return tuple(positive(kernel, f"{name}[{i}]", item) for i, item in enumerate(value))


def rescale(rows: FloatArray, length_scale: float | tuple[float, ...], out: FloatArray | None = None) -> FloatArray:
    """Rows divided by the length scale of each feature, into ``out`` if given; without it, may return ``rows``."""
    if length_scale == 1.0:
        if out is None:
            return rows
        out[...] = rows
        return out
    divided: FloatArray = np.divide(rows, np.asarray(length_scale), out=out)
    return divided


def as_rows(rows: Any, side: str) -> FloatArray:
    """``rows`` as a C-contiguous float64 array (m, d); no copy where it is one already."""
    array = np.asarray(rows)
    if array.ndim != 2:
        raise DataError(f"{side} has {array.ndim} dimensions; (rows, features) expected", hint="reshape it to two")
    if array.shape[1] == 0:
        raise DataError(f"{side} has shape {array.shape}", hint="at least one feature is expected")
    if array.dtype.kind not in "fiub":
        raise DataError(f"{side} has dtype {array.dtype}; real numbers expected", hint="convert it to float64")
    return np.ascontiguousarray(array, dtype=np.float64)


def real_values(what: str, values: Any) -> FloatArray:
    """What foreign code returned as float64; ParameterError for complex numbers, dates, text and masked values."""
    array = np.asarray(values)
    is_masked = np.ma.is_masked(values)  # asarray uncovers what is under the mask
    if is_masked or array.dtype.kind not in "biufO":
        raise ParameterError(
            f"{what} returned {'masked values' if is_masked else f'values of dtype {array.dtype}'}",
            hint="real numbers are expected",
        )
    return array.astype(np.float64, copy=False)


def check_features(A: FloatArray, B: FloatArray) -> None:
    """Raise DataError unless A (m, d) and B (n, d) have the same number of features."""
    if A.shape[1] != B.shape[1]:
        raise DataError(f"A has {A.shape[1]} features, B has {B.shape[1]}", hint="both need the same features")


def check_out(out: npt.NDArray[Any], m: int, n: int) -> None:
    """Raise ParameterError unless ``out`` can take an (m, n) block: float64 or float32, writable, contiguous rows."""
    if out.shape != (m, n) or out.dtype not in (np.float64, np.float32):
        raise ParameterError(
            f"out has shape {out.shape} and dtype {out.dtype}", hint=f"({m}, {n}) float64 or float32 is expected"
        )
    if not out.flags.writeable or (m > 0 and n > 1 and out.strides[1] != out.itemsize):
        raise ParameterError(
            f"out has strides {out.strides} and writeable {out.flags.writeable}",
            hint="writable, contiguous rows are expected",
        )


def _first(mask: npt.NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.argwhere(mask)[0]
    return int(row), int(column)


def require_nonnegative(kernel: str, rows: FloatArray, side: str) -> None:
    """Raise DataError for the first negative entry. NaN passes; the finiteness check names it."""
    if rows.size and np.fmin.reduce(rows, axis=None) < 0:
        row, column = _first(rows < 0)
        value = float(rows[row, column])
        raise DataError(
            f"{side}[{row}, {column}] = {value!r}; kernel {kernel!r} needs non-negative features",
            hint="shift the features to start at 0, or take another kernel",
            row=row,
            column=column,
            value=value,
            side=side,
        )


def overflow(description: str, A: FloatArray, B: FloatArray) -> DataError:
    """The error for a kernel that is not finite: names a bad entry of the rows if there is one, else the overflow."""
    for rows, side in ((A, "A"), (B, "B")):
        if not np.isfinite(rows).all():
            row, column = _first(~np.isfinite(rows))
            value = float(rows[row, column])
            return DataError(
                f"{side}[{row}, {column}] = {value!r}; finite features expected",
                hint="remove or impute such rows",
                row=row,
                column=column,
                value=value,
                side=side,
            )
    largest = max(float(np.abs(rows).max(initial=0.0)) for rows in (A, B))
    return DataError(
        f"{description} is not finite on these rows (largest |feature| {largest:.3g})", hint="scale the features"
    )


def finite_guard(description: str, A: FloatArray, B: FloatArray) -> Callable[[npt.NDArray[Any]], None]:
    """A function that raises :func:`overflow` for a strip with a value that is not finite."""

    def check(strip: npt.NDArray[Any]) -> None:
        # Infinity and NaN survive a sum of squares, which is the cheapest pass; it may also overflow by itself.
        flat = strip.ravel()
        if not np.isfinite(flat @ flat) and not np.isfinite(flat).all():
            raise overflow(description, A, B)

    return check
