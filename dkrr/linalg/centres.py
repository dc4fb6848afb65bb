"""Kernels at centres: the functions k(z_j, .) of a Nystrom regression as features, and products with them.

    B = k(X, Z) (n, m),   K = k(Z, Z) = L L^T (m, m)
    phi(x) = L^-1 k(Z, x)                          features whose ridge is |f|^2: K^-1/2 without its condition

    V = Y            the right-hand side                                              W = B^T S^2 V
    V = Y - B P      the residual, and with Y = 0 the negative of a product of the conjugate gradients

Features L^-1 k(Z, x) serve the sums of the preconditioner and of leave-one-out (:mod:`dkrr.linalg.primal_passes`).
:class:`CentreProducts` are the passes of the conjugate gradients. X is never in memory as a whole, and B nowhere: the
entries of a few rows and all m centres are evaluated once and used twice while they are in the cache, for V, which
needs whole rows of B, and for their share of B^T S^2 V. Compiled code does it for kernels that are a function of one
distance or inner product, at least 1,024 centres and at most 8 targets (:mod:`dkrr.kernels.compiled`), in
float32 or float64; otherwise strips of ``Kernel.block`` and two matrix products, in float64.

Centres in the span of the others (duplicated rows, a kernel of small rank) add nothing to f, and are left out: those
that a Cholesky factorisation with complete pivoting puts last, with pivots of rounding size, 10 eps times the trace.

Cost
----
A product: n m kernel entries and 4 n m t flops (2 n m t without P); n d numbers read. m t numbers to the tasks, and as
many from each. Memory of a task: :func:`product_task_bytes`. L: m^2 entries and m^3 / 3 flops, in the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import blas, lapack

from dkrr.errors import DataError, NotPositiveDefiniteError
from dkrr.kernels import Kernel
from dkrr.kernels.pairwise import MIN_COLUMNS, Packed, compiled_form, pack, pack_rows, pack_sums
from dkrr.linalg.operators import FloatMatrix, FloatVector
from dkrr.linalg.primal_passes import DatasetRows
from dkrr.linalg.products import Precision, block_strips
from dkrr.linalg.workspace import ROW_MULTIPLE, Operands, Pass, RowRanges, Workspace
from dkrr.tiles.blas import potrf

EPS = float(np.finfo(np.float64).eps)
# of an entry that comes from rounded rows
FLOAT32_ROUNDING = 2.0**-22
MAX_NOISE = 0.1

BLOCK_BYTES = 8 << 20
MAX_BLOCK_ROWS = 65_536
STRIP_BYTES = 4 << 20
MIN_STRIP_ROWS, MAX_STRIP_ROWS = 32, 256
# more targets are faster with matrix products; the column of row sums comes on top
MAX_COMPILED_TARGETS = 8


def independent_centers(kernel: Kernel, centers: FloatMatrix) -> NDArray[np.int64]:
    """Numbers (r,) of centres that span all of them to rounding, in the order of the pivots.

    Raises
    ------
    NotPositiveDefiniteError
        K is indefinite by more than rounding.
    DataError
        The kernel is zero on all centres.

    Cost
    ----
    m^3 / 3 flops, 8 m^2 bytes.
    """
    m = len(centers)
    square: Any = kernel.block(centers, centers, same=True)
    diagonal = square.diagonal().copy()
    trace = float(np.abs(diagonal).sum())
    if not trace:
        raise DataError(f"{kernel.describe()} is zero on all {m:,} centres", hint="use another kernel")
    tolerance = 10.0 * EPS * trace
    # in columns a C-order square is its transpose: its lower triangle is the upper one there
    _, order, rank, info = lapack.dpstrf(square.T, lower=0, tol=tolerance, overwrite_a=1)
    pivots: NDArray[np.int64] = order.astype(np.int64) - 1
    if info:
        lower, rest = square[rank:, :rank], np.ascontiguousarray(centers[pivots[rank:]])
        left = diagonal[pivots[rank:]] - np.square(lower).sum(axis=1)
        worst = float(left.min())
        if not kernel.positive_semidefinite:  # of a semi-definite matrix no entry is larger than the largest pivot
            worst = min(worst, -float(np.abs(kernel.block(rest, rest, same=True) - lower @ lower.T).max()))
        if worst < -100.0 * tolerance:
            raise NotPositiveDefiniteError(
                f"the kernel matrix of the {m:,} centres is not positive semi-definite (pivot {worst:.2g})",
                hint="use a positive semi-definite kernel",
                pivot=worst,
            )
    return pivots[:rank]


def jitter_for(diagonal: FloatVector, n: int, alpha: float, precision: Precision) -> float:
    """j: 0 for products in float64, what keeps the rounding of float32 entries small otherwise.

    They are rounded by E, amplified by L^-1 and R^-1, which shall stay small even where K has no weight:

        |R^-1 L^-1 E^T| ~ u n^1/2 k / (j (alpha + (n / m) j))^1/2 = 1 / 10      u = 2^-22,  k = mean of k(z, z)
    """
    if precision == "float64":
        return 0.0
    noise = n * (FLOAT32_ROUNDING * float(diagonal.mean()) / MAX_NOISE) ** 2
    slope = n / len(diagonal)
    # the positive root of slope j^2 + alpha j = noise, without cancellation
    return float(2.0 * noise / (alpha + np.sqrt(alpha * alpha + 4.0 * slope * noise))) if noise else 0.0


class CenterFactor:
    """L of K + j I = L L^T with K = k(Z, Z), in one square; its upper triangle holds nothing that is read.

    The jitter j is in the coordinates only, the system stays what it is.

    Parameters
    ----------
    kernel
        Resolved.
    centers : (m, d)
        Centred as the rows are, independent, in the order of the pivots.
    n, alpha, precision
        What :func:`jitter_for` depends on.

    Raises
    ------
    NotPositiveDefiniteError
        K + j I is not.
    """

    def __init__(self, kernel: Kernel, centers: FloatMatrix, n: int, alpha: float, precision: Precision) -> None:
        self.square: Any = kernel.block(centers, centers, same=True)
        self.row_sums: FloatVector = np.array([np.abs(row).sum() for row in self.square])
        self.jitter = jitter_for(self.square.diagonal(), n, alpha, precision)
        self.square[np.diag_indices_from(self.square)] += self.jitter
        info = potrf(self.square)
        if info:
            raise NotPositiveDefiniteError(
                f"the kernel matrix of {len(self):,} centres is not positive definite at row {info - 1:,}",
                hint="use a positive semi-definite kernel",
                row=info - 1,
            )

    def __len__(self) -> int:
        return len(self.square)

    def solve(self, b: FloatMatrix, *, transposed: bool) -> FloatMatrix:
        """L^-1 B, or L^-T B, (m, t)."""
        return solve_lower(self.square, b, transposed=transposed)

    def reduced(self, c: FloatMatrix) -> FloatMatrix:
        """L^-1 K C = L^T C - j L^-1 C (m, t): no rounding of K C that L^-1 would amplify."""
        product = np.ascontiguousarray(blas.dtrmm(1.0, self.square.T, c, lower=0, trans_a=0))
        return product - self.jitter * self.solve(c, transposed=False) if self.jitter else product

    def multiply(self, c: FloatMatrix) -> FloatMatrix:
        """K C (m, t)."""
        product = blas.dtrmm(1.0, self.square.T, c, lower=0, trans_a=0)
        return np.ascontiguousarray(blas.dtrmm(1.0, self.square.T, product, lower=0, trans_a=1)) - self.jitter * c


def solve_lower(square: FloatMatrix, b: FloatMatrix, *, transposed: bool) -> FloatMatrix:
    """L^-1 B or L^-T B with L below and on the diagonal of a C-order square; m^2 t flops."""
    return np.ascontiguousarray(blas.dtrsm(1.0, square.T, b, lower=0, trans_a=int(not transposed)))


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
    centers : (m, d)
        Centred as the rows are.
    num_targets
        The most columns that a product will have.
    workspace, scratch
        Who runs the tasks, and the location of what travels; the caller removes it.
    """

    def __init__(
        self,
        kernel: Kernel,
        rows: DatasetRows,
        centers: FloatMatrix,
        num_targets: int,
        workspace: Workspace,
        scratch: Any,
    ) -> None:
        self.kernel, self.rows, self.workspace, self.scratch, self.centers = kernel, rows, workspace, scratch, centers
        self.shape, self.ranges, self.num_passes = centers.shape, RowRanges.of(rows.shape[0], len(centers)), 0
        self.is_compiled = can_compile(kernel, len(centers), num_targets)

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs."""
        return self.__dict__ | {"workspace": None, "centers": None}

    def __call__(
        self,
        targets: Sequence[int],
        p: FloatMatrix | None = None,
        *,
        shifts: Sequence[FloatVector] = (),
        precision: Precision = "float64",
        absolute: bool = False,
    ) -> tuple[FloatMatrix, FloatVector]:
        """B^T S^2 V (m, c) float64 with V = Y[:, targets], or Y[:, targets] - B P where there is a P (m, c).

        A target -1 is a column of zeros; ``shifts`` (c,) are added to the columns of Y one after the other, so that a
        large mean can be taken away without its rounding. ``precision`` is that of the entries of B in compiled code.
        ``absolute`` takes |B| in the place of B. The second result is 1^T S^2 V (c,).

        Raises
        ------
        DamagedChunkError
            A chunk of the rows is missing or damaged.
        """
        (m, d), columns = self.shape, len(targets)
        operands = {"centers": [self.centers]}
        if p is not None:
            operands["p"] = [p]
        if len(shifts):
            operands["shifts"] = [np.stack(shifts)]
        self.num_passes += 1
        sums = Pass(
            "nystrom",
            partial(self._add, tuple(targets), precision, absolute),
            self._not_finite,
            [float(self.ranges.size) * m * (2.0 * d + 4.0 * columns)] * len(self.ranges),
            (m + 1, columns),
            operands=operands,
            workspace=self.workspace,
            store=self.scratch,
        ).sum()
        return sums[:m], sums[m]

    def _not_finite(self, i: int) -> DataError:
        return self.rows.not_finite(self.kernel, *self.ranges.span(i))

    def _add(
        self,
        targets: tuple[int, ...],
        precision: Precision,
        absolute: bool,
        operands: Operands,
        i: int,
        total: FloatMatrix,
    ) -> None:
        """Add W of range i, and 1^T S^2 V below it, to ``total``."""
        centers, columns = np.array(operands["centers"].read()), np.array(targets)
        p = np.array(operands["p"].read()) if "p" in operands else None
        step = block_rows(self.shape[1], self.rows.shape[1])
        for strip in self.rows.strips(operands, self.ranges, i, step):
            used = strip.used()
            if used is None:
                continue
            y = np.zeros((len(used.x), len(targets)))
            y[:, columns >= 0] = used.y[:, columns[columns >= 0]]
            for shift in operands["shifts"].read() if "shifts" in operands else ():
                y += shift
            weight = np.ones(len(y)) if used.weight is None else used.weight
            form = compiled_form(self.kernel) if self.is_compiled and not absolute else None
            packed = None if form is None else pack(form, used.x, centers, np.dtype(precision))
            if packed is not None:
                _add_compiled(packed, p, y, weight, total)
                continue
            for rows, _, values in block_strips(self.kernel, used.x, centers, num_rows=strip_rows(len(centers))):
                entries = np.abs(values, out=values) if absolute else values
                v = weight[rows, None] * (y[rows] if p is None else y[rows] - entries @ p)
                total[:-1] += entries.T @ v
                total[-1] += v.sum(axis=0)


def _add_compiled(
    packed: Packed, p: FloatMatrix | None, y: FloatMatrix, weight: FloatVector, total: FloatMatrix
) -> None:
    """Add B^T S^2 V and 1^T S^2 V for packed rows and centres; V = Y or Y - B P. ``weight`` has one entry a row."""
    from dkrr.kernels.compiled import two_sided_function

    (blocks, _, rows), (panels, _, panel) = packed.sides[0].shape, packed.sides[2].shape
    # rows that only fill up the last block have weight 0
    targets, factors = np.zeros((blocks * rows, total.shape[1])), np.zeros(blocks * rows)
    factors[: len(weight)], targets[: len(y)] = weight, y
    sums = np.zeros((panels, total.shape[1], panel))
    columns = sums[:0] if p is None else pack_rows(p, panel, np.float64)
    two_sided_function(packed.kind, packed.width)(*packed.sides, columns, targets, factors, sums, packed.factor)
    total[:-1] += pack_sums(sums, len(total) - 1)
    total[-1] += factors @ targets
