"""The task of a pass over rows: W = B^T S^2 V for one range of them, with B = k(X, Z).

The entries of a few rows and all m centres are evaluated once and used twice while they are in the cache: for V, which
needs whole rows of B, and for their share of B^T S^2 V. Compiled code does it for kernels that are a function of one
distance or inner product, at least 1,024 centres and at most 8 targets (:mod:`dkrr.linalg.nystrom.compiled`), in
float32 or float64; otherwise strips of ``Kernel.block`` and two matrix products, in float64.

Cost: see :mod:`dkrr.linalg.nystrom.row_pass`; memory is that of :func:`pass_task_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.chunks import ChunkArray
from dkrr.dataset import Dataset
from dkrr.errors import DataError
from dkrr.failpoints import failpoint
from dkrr.kernels import Kernel
from dkrr.kernels.pairwise import MIN_COLUMNS, pack
from dkrr.linalg.operators import Rows
from dkrr.linalg.pairs import is_nonnegative
from dkrr.linalg.row_ranges import ROW_MULTIPLE, RowRanges
from dkrr.tiles.blas import buffer, is_finite

__all__ = ["PassTask", "Precision", "can_compile", "pass_range", "pass_task_bytes"]

FloatMatrix = NDArray[np.float64]
Precision = Literal["float64", "float32"]

BLOCK_BYTES = 8 << 20
MAX_BLOCK_ROWS = 65_536
STRIP_BYTES = 4 << 20
MIN_STRIP_ROWS, MAX_STRIP_ROWS = 32, 256
# more targets are faster with matrix products; the column of row sums comes on top
MAX_COMPILED_TARGETS = 8


def block_rows(num_features: int, num_targets: int) -> int:
    """Rows that a task holds at once: 8 MiB of X and Y, 256 to 65,536 rows."""
    rows = BLOCK_BYTES // (8 * (num_features + num_targets))
    return int(min(MAX_BLOCK_ROWS, max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE)))


def strip_rows(m: int) -> int:
    """Rows of a strip of ``Kernel.block``: 4 MiB of B, 32 to 256 rows."""
    return int(min(MAX_STRIP_ROWS, max(MIN_STRIP_ROWS, STRIP_BYTES // (8 * m) // 16 * 16)))


def can_compile(kernel: Kernel, m: int, num_targets: int) -> bool:
    """Whether passes go through compiled code; a function of the problem, so that all passes take one way."""
    return kernel.pairwise is not None and m >= MIN_COLUMNS and num_targets <= MAX_COMPILED_TARGETS


def pass_task_bytes(m: int, num_features: int, num_targets: int) -> int:
    """Memory of a task besides the baseline: 40 (q + m) (d + t) bytes and a strip twice.

    q rows of X and Y and m centres with P and W, each as read, centred, scaled and packed.
    """
    strip = 16 * strip_rows(m) * (m + num_targets)
    return 40 * (block_rows(num_features, num_targets) + m) * (num_features + num_targets + 1) + strip


@dataclass(frozen=True)
class PassTask:
    """What a pass computes, and where its operands and its results are.

    Parameters
    ----------
    kernel
        Resolved.
    rows
        X (n, d), Y and the weights, if there are any.
    ranges
        The rows of each task.
    centers : (m, d)
        One chunk, centred as the rows are.
    coefficients : (m, c), optional
        P, one chunk.
    targets
        Columns of Y, as many as P has columns, -1 for a column of zeros; None leaves Y out.
    shifts
        Added to these columns (c,), one after the other.
    sums : (len(ranges) m, c or c + 1)
        W of each task, one chunk each.
    compiled
        Whether compiled code may be used.
    precision
        Of the entries of B in compiled code.
    absolute_last
        One more column of W, |B|^T S^2 |B| 1.
    """

    kernel: Kernel
    rows: Rows
    ranges: RowRanges
    centers: ChunkArray
    coefficients: ChunkArray | None
    targets: tuple[int, ...] | None
    sums: ChunkArray
    compiled: bool
    precision: Precision = "float64"
    absolute_last: bool = False
    shifts: tuple[tuple[float, ...], ...] = ()

    def blocks(self, i: int) -> Iterator[tuple[FloatMatrix, FloatMatrix | None, NDArray[np.float64] | None]]:
        """The rows of range i with a positive weight, in blocks: X centred, Y, weights."""
        dataset = self.rows.open()
        first, last = self.ranges.span(i)
        step = block_rows(dataset.num_features, dataset.num_targets)
        for start in range(first, last, step):
            stop = min(start + step, last)
            x = self.rows.read(start, stop)
            y = None if self.targets is None else self._columns(dataset, start, stop)
            weight = None if dataset.weight is None else dataset.weight.read(start, stop)[:, 0]
            if weight is not None and not weight.all():
                used = weight > 0
                x, y, weight = x[used], None if y is None else y[used], weight[used]
            yield x, y, weight

    def _columns(self, dataset: Dataset, start: int, stop: int) -> FloatMatrix:
        """The columns of Y (stop - start, c) that are named, shifted."""
        wanted = np.array(self.targets, dtype=np.int64)
        named = wanted >= 0
        y = np.zeros((stop - start, len(wanted)))
        if named.any() and dataset.y is not None:
            y[:, named] = dataset.y.read(start, stop)[:, wanted[named]]
        for shift in self.shifts:
            y += shift
        return y


def pass_range(task: PassTask, i: int) -> bool:
    """Compute and write W of range i unless it is there; whether it was computed."""
    if task.sums.is_valid((i, 0)):
        return False
    failpoint("nystrom.pass.before_read")
    centers = np.array(task.centers.read((0, 0)), dtype=np.float64)
    p = None if task.coefficients is None else np.array(task.coefficients.read((0, 0)), dtype=np.float64)
    total = np.zeros(task.sums.chunks)
    for x, y, weight in task.blocks(i):
        if len(x):
            add_products(task, x, centers, p, y, weight, total)
    failpoint("nystrom.pass.after_compute", total)
    if not is_finite(total):
        start, stop = task.ranges.span(i)
        raise DataError(
            f"the sums over rows {start:,} to {stop - 1:,} are not finite ({task.kernel.describe()})",
            hint="scale the features and the targets",
        )
    task.sums.write((i, 0), total)
    failpoint("nystrom.pass.after_write")
    return True


def add_products(
    task: PassTask,
    x: FloatMatrix,
    centers: FloatMatrix,
    p: FloatMatrix | None,
    y: FloatMatrix | None,
    weight: NDArray[np.float64] | None,
    total: FloatMatrix,
) -> None:
    """Add B^T S^2 V of the rows in memory to W (m, c or c + 1), strip by strip."""
    absolute = task.absolute_last
    if absolute and is_nonnegative(task.kernel):
        # |B| 1 = 0 - B (-1), a column like the others
        count, absolute = total.shape[1] - 1, False
        p = np.hstack([np.zeros((len(centers), count)) if p is None else p, np.full((len(centers), 1), -1.0)])
        y = np.hstack([np.zeros((len(x), count)) if y is None else y, np.zeros((len(x), 1))])
    if task.compiled and not absolute and task.kernel.pairwise is not None:
        packed = pack(task.kernel.pairwise, x, centers, np.dtype(task.precision), task.kernel.describe())
        if packed is not None:
            # Numba is imported where it is needed
            from dkrr.linalg.nystrom.compiled import add_compiled

            add_compiled(packed, p, y, np.ones(len(x)) if weight is None else weight, total)
            return
    _add_by_strips(task.kernel, x, centers, p, y, weight, total, absolute)


def _add_by_strips(
    kernel: Kernel,
    x: FloatMatrix,
    centers: FloatMatrix,
    p: FloatMatrix | None,
    y: FloatMatrix | None,
    weight: NDArray[np.float64] | None,
    total: FloatMatrix,
    absolute: bool,
) -> None:
    """The same through ``Kernel.block``; with ``absolute`` the last column of W is |B|^T S^2 |B| 1."""
    count, step = total.shape[1] - absolute, strip_rows(len(centers))
    for start in range(0, len(x), step):
        rows = slice(start, min(start + step, len(x)))
        strip: Any = buffer("strip", (rows.stop - rows.start, len(centers)), np.float64)
        kernel.block(x[rows], centers, strip)
        v: Any = None if p is None else strip @ p
        if y is not None:
            v = y[rows] if v is None else y[rows] - v
        scale = 1.0 if weight is None else weight[rows, None]
        total[:, :count] += strip.T @ (scale * v)
        if absolute:
            np.abs(strip, out=strip)
            total[:, count:] += strip.T @ (scale * strip.sum(axis=1, keepdims=True))
