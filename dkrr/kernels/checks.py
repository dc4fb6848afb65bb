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

FloatArray = npt.NDArray[np.float64]

# Bound on the terms of a sum that is to be proved finite from its operands alone: leaves room for 1e8 of them.
LIMIT = 1e300


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint for a wrong name: the nearest right one, then all of them."""
    lowered = {item.lower(): item for item in sorted(allowed)}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    listed = f"allowed: {', '.join(lowered.values())}" if lowered else "none is allowed here"
    return f"did you mean {lowered[close[0]]!r}? {listed}" if close else listed


def check_names(what: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raise ParameterError for the first key of ``given`` that is not allowed."""
    allowed = list(allowed)
    for key in given:
        if key not in allowed:
            raise ParameterError(f"{what} has no parameter {key!r}", hint=nearest(str(key), allowed))


def finite(kernel: str, name: str, value: Any, *, above: float = -math.inf) -> float:
    """``value`` as a finite float larger than ``above``."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    is_wrong = isinstance(value, (bool, np.bool_)) or not isinstance(value, Real) or not math.isfinite(value)
    if is_wrong or value <= above:
        least = "" if above == -math.inf else f" > {above:g}"
        raise ParameterError(f"{name} = {value!r} for kernel {kernel!r}", hint=f"a finite number{least} is expected")
    return float(value)


def positive(kernel: str, name: str, value: Any) -> float:
    """``value`` as a finite float > 0."""
    return finite(kernel, name, value, above=0.0)


def positive_or_vector(kernel: str, name: str, value: Any) -> float | tuple[float, ...]:
    """``value`` as a float > 0, or a sequence as a tuple of them (one per feature)."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return positive(kernel, name, value)
    if not value:
        raise ParameterError(f"{name} = {value!r} for kernel {kernel!r}", hint="give a number, or one per feature")
    return tuple(positive(kernel, f"{name}[{i}]", item) for i, item in enumerate(value))


def as_rows(rows: Any, side: str) -> FloatArray:
    """``rows`` as a C-contiguous float64 array (m, d); no copy where it is one already."""
    array = np.asarray(rows)
    if array.ndim != 2 or array.shape[1] == 0:
        raise DataError(f"{side} has shape {array.shape}; (rows, features) expected", hint="reshape it to two")
    if array.dtype.kind not in "fiub":
        raise DataError(f"{side} has dtype {array.dtype}; real numbers expected", hint="convert it to float64")
    return np.ascontiguousarray(array, dtype=np.float64)


def check_features(A: FloatArray, B: FloatArray) -> None:
    """Raise DataError unless A (m, d) and B (n, d) have the same number of features."""
    if A.shape[1] != B.shape[1]:
        raise DataError(f"A has {A.shape[1]} features, B has {B.shape[1]}", hint="both need the same features")


def check_out(out: npt.NDArray[Any], m: int, n: int) -> None:
    """Raise ParameterError unless ``out`` can take an (m, n) block: float64 or float32, writable, contiguous rows."""
    is_one = out.shape == (m, n) and out.dtype in (np.float64, np.float32) and out.flags.writeable
    if not is_one or (m > 0 and n > 1 and out.strides[1] != out.itemsize):
        raise ParameterError(
            f"out has shape {out.shape}, dtype {out.dtype}, strides {out.strides} and writeable {out.flags.writeable}",
            hint=f"({m}, {n}) float64 or float32 with writable, contiguous rows is expected",
        )


def _at_first(wrong: npt.NDArray[np.bool_], rows: FloatArray, side: str, expected: str, hint: str) -> DataError:
    """The error for the first entry of the rows that is wrong."""
    row, column = (int(index) for index in np.argwhere(wrong)[0])
    value = float(rows[row, column])
    message = f"{side}[{row}, {column}] = {value!r}; {expected}"
    return DataError(message, hint=hint, row=row, column=column, value=value, side=side)


def require_nonnegative(kernel: str, rows: FloatArray, side: str) -> None:
    """Raise DataError for the first negative entry. NaN passes; the finiteness check names it."""
    if rows.size and np.fmin.reduce(rows, axis=None) < 0:
        hint = "shift the features to start at 0, or take another kernel"
        raise _at_first(rows < 0, rows, side, f"kernel {kernel!r} needs non-negative features", hint)


def overflow(description: str, A: FloatArray, B: FloatArray) -> DataError:
    """The error for a kernel that is not finite: names a bad entry of the rows if there is one, else the overflow."""
    for rows, side in ((A, "A"), (B, "B")):
        if not np.isfinite(rows).all():
            return _at_first(~np.isfinite(rows), rows, side, "finite features expected", "remove or impute such rows")
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
