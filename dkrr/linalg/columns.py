"""Arithmetic on tall matrices whose columns are vectors of their own, in blocks of rows.

No temporary array is as long as the columns, and every sum has one order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["add_scaled", "dots", "largest", "norms", "ratio", "row_blocks", "take"]

BLOCK_ROWS = 4096

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]
Indices = NDArray[np.int64]


def row_blocks(n: int) -> Iterator[slice]:
    """0 .. n in slices."""
    for start in range(0, n, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, n))


def dots(a: FloatMatrix, b: FloatMatrix) -> FloatVector:
    """a_k^T b_k for every column k, (t,)."""
    total = np.zeros(a.shape[1])
    for rows in row_blocks(len(a)):
        total += np.einsum("ij,ij->j", a[rows], b[rows])
    return total


def norms(a: FloatMatrix) -> FloatVector:
    """|a_k| for every column k, (t,)."""
    return np.sqrt(dots(a, a))


def largest(a: FloatMatrix) -> FloatVector:
    """max |a_ik| for every column k, (t,)."""
    found: FloatVector = np.maximum(a.max(axis=0), -a.min(axis=0))
    return found


def ratio(a: FloatVector, b: FloatVector) -> FloatVector:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def add_scaled(y: FloatMatrix, c: FloatVector, x: FloatMatrix, columns: Indices | None = None) -> None:
    """y_k += c_k x_k in place, for all columns of y or those that are named."""
    for rows in row_blocks(len(y)):
        if columns is None or len(columns) == y.shape[1]:
            y[rows] += c * x[rows]
        else:
            y[rows, columns] += c * x[rows]


def take(a: FloatMatrix, columns: Indices) -> FloatMatrix:
    """The named columns in C order; ``a`` itself when those are all."""
    return a if len(columns) == a.shape[1] else np.take(a, columns, axis=1)
