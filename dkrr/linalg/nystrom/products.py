"""Products over the rows of a Nystrom regression: W = B^T S^2 V with B = k(X, Z), n rows against m centres.

    V = Y            the right-hand side
    V = Y - B P      the residual, and with Y = 0 the negative of a product of the conjugate gradients

Each is a :class:`~dkrr.linalg.passes.Pass` over ranges that depend on n and m alone. X is never in memory as a
whole, and B nowhere: the entries of a few rows and all m centres are evaluated once and used twice while they are in
the cache, for V, which needs whole rows of B, and for their share of B^T S^2 V. Compiled code does it for kernels that
are a function of one distance or inner product, at least 1,024 centres and at most 8 targets
(:mod:`dkrr.linalg.nystrom.compiled`), in float32 or float64; otherwise strips of ``Kernel.block`` and two matrix
products, in float64.

Cost
----
n m kernel entries and 4 n m t flops (2 n m t without P); n d numbers read. m t numbers to the tasks, and as many from
each. Memory of a task: :func:`product_task_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dkrr.errors import DataError
from dkrr.kernels import Kernel
from dkrr.kernels.pairwise import MIN_COLUMNS, compiled_form, pack
from dkrr.linalg.blocks import FloatMatrix, FloatVector
from dkrr.linalg.operators import Rows
from dkrr.linalg.passes import ROW_MULTIPLE, Operand, Operands, Pass, RowRanges, is_here
from dkrr.linalg.products import is_nonnegative
from dkrr.linalg.workspace import Workspace
from dkrr.tiles.blas import buffer

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
    """Whether products go through compiled code; a function of the problem, so that all of them take one way."""
    return compiled_form(kernel) is not None and m >= MIN_COLUMNS and num_targets <= MAX_COMPILED_TARGETS


def product_task_bytes(m: int, num_features: int, num_targets: int) -> int:
    """Memory of a task besides the baseline: 40 (q + m) (d + t) bytes and a strip twice.

    q rows of X and Y and m centres with P and W, each as read, centred, scaled and packed.
    """
    strip = 16 * strip_rows(m) * (m + num_targets)
    return 40 * (block_rows(num_features, num_targets) + m) * (num_features + num_targets + 1) + strip


class CentreProducts:
    """The products of one fit, each a pass over the rows.

    Parameters
    ----------
    kernel, rows
        Resolved kernel, and the training rows.
    n
        Number of rows.
    centers : (m, d)
        Centred as the rows are; written to ``scratch``.
    num_targets
        The most columns that a product will have.
    workspace
        Who runs the tasks.
    scratch
        Location of what travels; the caller removes it.
    """

    def __init__(
        self,
        kernel: Kernel,
        rows: Rows,
        n: int,
        centers: FloatMatrix,
        num_targets: int,
        workspace: Workspace,
        scratch: Any,
    ) -> None:
        self.kernel, self.rows, self.workspace, self.scratch = kernel, rows, workspace, scratch
        self.shape, self.ranges, self.num_passes = centers.shape, RowRanges.of(n, len(centers)), 0
        self.centers = Operand.of(None if is_here(workspace) else scratch, "centers", [centers])
        self.centers.write()
        self.compiled = can_compile(kernel, len(centers), num_targets)

    def __call__(
        self,
        targets: tuple[int, ...],
        p: FloatMatrix | None = None,
        *,
        shifts: Sequence[FloatVector] = (),
        precision: Precision = "float64",
        absolute_last: bool = False,
    ) -> FloatMatrix:
        """B^T S^2 V (m, c) float64 with V = Y[:, targets], or Y[:, targets] - B P where there is a P (m, c).

        A target -1 is a column of zeros; ``shifts`` (c,) are added to the columns of Y one after the other, so that a
        large mean can be taken away without its rounding. ``precision`` is that of the entries of B in compiled code.
        ``absolute_last`` adds a last column, |B|^T S^2 |B| 1.

        Raises
        ------
        DamagedChunkError
            A chunk of the rows is missing or damaged.
        """
        m, d = self.shape
        columns = len(targets) + absolute_last
        task = _Product(self.kernel, self.rows, self.ranges, targets, shifts, precision, absolute_last, self.compiled)
        self.num_passes += 1
        return Pass(  # type: ignore[no-any-return]
            "nystrom",
            task.add,
            task.not_finite,
            [float(self.ranges.size) * m * (2.0 * d + 4.0 * columns)] * len(self.ranges),
            (m, columns),
            operands={} if p is None else {"p": [p]},
            shared={"centers": self.centers},
            workspace=self.workspace,
            store=self.scratch,
        ).sum()


@dataclass(frozen=True)
class _Product:
    """What the tasks of a pass compute; parameters as those of :class:`CentreProducts` and its call."""

    kernel: Kernel
    rows: Rows
    ranges: RowRanges
    targets: tuple[int, ...]
    shifts: Sequence[FloatVector]
    precision: Precision
    absolute_last: bool
    compiled: bool

    def add(self, operands: Operands, i: int, total: FloatMatrix) -> None:
        """Add W of range i to ``total``."""
        centers = np.array(operands["centers"].read())
        p = np.array(operands["p"].read()) if "p" in operands else None
        for x, y, weight in self.blocks(i):
            if len(x):
                self.add_block(x, centers, p, y, weight, total)

    def not_finite(self, i: int) -> DataError:
        """The error for sums over range i."""
        start, stop = self.ranges.span(i)
        return DataError(
            f"the sums over rows {start:,} to {stop - 1:,} are not finite ({self.kernel.describe()})",
            hint="scale the features and the targets",
        )

    def blocks(self, i: int) -> Iterator[tuple[FloatMatrix, FloatMatrix, FloatVector | None]]:
        """The rows of range i with a positive weight, in blocks: X centred, the named columns of Y shifted, weights."""
        dataset, wanted = self.rows.open(), np.array(self.targets)
        first, last = self.ranges.span(i)
        step = block_rows(dataset.num_features, dataset.num_targets)
        for start in range(first, last, step):
            stop = min(start + step, last)
            x, y = self.rows.read(start, stop), np.zeros((stop - start, len(wanted)))
            if (wanted >= 0).any() and dataset.y is not None:
                y[:, wanted >= 0] = dataset.y.read(start, stop)[:, wanted[wanted >= 0]]
            for shift in self.shifts:
                y += shift
            weight = None if dataset.weight is None else dataset.weight.read(start, stop)[:, 0]
            if weight is not None and not weight.all():
                used = weight > 0
                x, y, weight = x[used], y[used], weight[used]
            yield x, y, weight

    def add_block(
        self,
        x: FloatMatrix,
        centers: FloatMatrix,
        p: FloatMatrix | None,
        y: FloatMatrix,
        weight: FloatVector | None,
        total: FloatMatrix,
    ) -> None:
        """Add B^T S^2 V of the rows in memory to W (m, c or c + 1)."""
        absolute = self.absolute_last
        if absolute and is_nonnegative(self.kernel):
            # |B| 1 = 0 - B (-1), a column like the others
            count, absolute = total.shape[1] - 1, False
            p = np.hstack([np.zeros((len(centers), count)) if p is None else p, np.full((len(centers), 1), -1.0)])
            y = np.hstack([y, np.zeros((len(x), 1))])
        form = compiled_form(self.kernel)
        if self.compiled and not absolute and form is not None:
            packed = pack(form, x, centers, np.dtype(self.precision))
            if packed is not None:
                # Numba is imported where it is needed
                from dkrr.linalg.nystrom.compiled import add_compiled

                add_compiled(packed, p, y, np.ones(len(x)) if weight is None else weight, total)
                return
        count, step = total.shape[1] - absolute, strip_rows(len(centers))
        for start in range(0, len(x), step):
            rows = slice(start, min(start + step, len(x)))
            strip: Any = buffer("strip", (rows.stop - rows.start, len(centers)), np.float64)
            self.kernel.block(x[rows], centers, strip)
            v = y[rows] if p is None else y[rows] - strip @ p
            scale = 1.0 if weight is None else weight[rows, None]
            total[:, :count] += strip.T @ (scale * v)
            if absolute:
                np.abs(strip, out=strip)
                total[:, count:] += strip.T @ (scale * strip.sum(axis=1, keepdims=True))
