"""Walking a block in strips that stay in the cache of one core.

A kernel is one matrix product followed by a few passes of elementwise arithmetic. Done on the whole block, every pass
streams it through memory; done on strips of half a mebibyte, only the result does. A strip handed to a kernel is always
C-contiguous float64: it is a piece of ``out`` where that is so, else a scratch strip that is copied (and cast) into
``out``. Elementwise NumPy calls on a strided strip cost twice as much, because NumPy copies them through its buffer.

Cost, rbf with d = 10 on one core: 1.6 ns an entry with full rows of 2,048, 2.2 through the scratch strip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "STRIP_COLUMNS",
    "STRIP_ENTRIES",
    "Fill",
    "FloatArray",
    "fill_rectangle",
    "fill_symmetric",
    "mirror",
    "strip_shape",
]

FloatArray = npt.NDArray[np.float64]

# fill(rows, columns, strip) writes k(A[rows], B[columns]) into the contiguous float64 strip.
Fill = Callable[[slice, slice, FloatArray], None]

# 512 KiB: a strip, a scratch strip and a packed operand fit into an L2 of 2 MiB, and still into one of 1 MiB.
STRIP_ENTRIES = 1 << 16
STRIP_COLUMNS = 2048
# Edge of the squares in which a triangle is mirrored: source and destination fit into the L1 cache together.
MIRROR_EDGE = 64


def strip_shape(m: int, n: int, d: int) -> tuple[int, int]:
    """Rows and columns of the strips of an (m, n) block of rows with d features.

    The matrix product packs all columns of B anew for every strip, which costs about d / (2 rows) ns an entry. With
    rows >= 2 d (at most 256) that stays below a tenth of the product itself.
    """
    columns = max(1, min(n, STRIP_COLUMNS))
    rows = max(STRIP_ENTRIES // columns, min(2 * d, 256))
    return max(1, min(m, rows)), columns


def fill_rectangle(fill: Fill, out: npt.NDArray[Any], d: int, check: Callable[[npt.NDArray[Any]], None] | None) -> None:
    """Fill every entry of ``out``, strip by strip; ``check`` sees each strip while it is in the cache."""
    m, n = out.shape
    num_rows, num_columns = strip_shape(m, n, d)
    write = _Writer(fill, out, num_rows * num_columns, check)
    for i in range(0, m, num_rows):
        rows = slice(i, min(i + num_rows, m))
        for j in range(0, n, num_columns):
            write(rows, slice(j, min(j + num_columns, n)))


def fill_symmetric(fill: Fill, out: npt.NDArray[Any], d: int, check: Callable[[npt.NDArray[Any]], None] | None) -> None:
    """Fill the strips that meet the lower triangle of ``out`` and mirror it, so that ``out == out.T`` exactly."""
    n = out.shape[0]
    num_rows, num_columns = strip_shape(n, n, d)
    write = _Writer(fill, out, num_rows * num_columns, check)
    for i in range(0, n, num_rows):
        rows = slice(i, min(i + num_rows, n))
        for j in range(0, rows.stop, num_columns):
            write(rows, slice(j, min(j + num_columns, rows.stop)))
    mirror(out)


class _Writer:
    """Writes one strip of ``out``, through scratch where the strip is not contiguous float64."""

    def __init__(
        self, fill: Fill, out: npt.NDArray[Any], entries: int, check: Callable[[npt.NDArray[Any]], None] | None
    ) -> None:
        self.fill = fill
        self.out = out
        self.entries = entries
        self.check = check
        self.scratch: FloatArray | None = None

    def __call__(self, rows: slice, columns: slice) -> None:
        target = self.out[rows, columns]
        if target.flags.c_contiguous and target.dtype == np.float64:
            self.fill(rows, columns, target)
            if self.check is not None:
                self.check(target)
            return
        if self.scratch is None:
            self.scratch = np.empty(self.entries)
        strip = self.scratch[: target.size].reshape(target.shape)
        self.fill(rows, columns, strip)
        np.copyto(target, strip, casting="same_kind")
        if self.check is not None:
            # The value that counts is the one after the cast: 1e39 is finite in float64 only.
            self.check(strip if target.dtype == np.float64 else target)


def mirror(out: npt.NDArray[Any]) -> None:
    """Copy the lower triangle of a square array to the upper one."""
    n = out.shape[0]
    for i in range(0, n, MIRROR_EDGE):
        rows = slice(i, min(i + MIRROR_EDGE, n))
        for j in range(0, i, MIRROR_EDGE):
            columns = slice(j, j + MIRROR_EDGE)
            out[columns, rows] = out[rows, columns].T
        square = out[rows, rows]
        lower = np.tril(square)
        np.add(lower, np.tril(lower, -1).T, out=square)
