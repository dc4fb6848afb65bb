"""Exact leave-one-out of a Nystrom regression whose centres stay: leverages from two passes over the rows.

    f = sum_j c_j k(z_j, .) + b,   K = k(Z, Z) = L L^T,   phi_i = L^-1 k(Z, x_i)  (m,)
    G = sum_i w_i (phi_i - phi)(phi_i - phi)^T + alpha I = R R^T,   phi = 0, or the weighted mean with an intercept
    h_i = w_i |R^-1 (phi_i - phi)|^2  (+ w_i / sum w with an intercept)
    y_i - f^(-i)(x_i) = (y_i - f(x_i)) / (1 - h_i)

A row that is left out stays a centre where it was one: this is what a fit with the same centres would say. The first
pass sums G, the second gives h and the residuals. The m x m system is not formed in the kernel's own coordinates, which
would square the condition of k(X, Z).

Cost
----
n m kernel entries twice, 2 n m^2 flops for G and 2 n m^2 for each distinct alpha. Memory of a task:
16 m^2 bytes and blocks of 512 rows; of this process 24 m^2 + 8 n t. On disk at most 8 m (m + 1) numbers, and n (t + 1)
until it is done. An interrupted computation begins anew.

References
----------
Allen, The relationship between variable selection and data augmentation and a method for prediction, Technometrics 16
(1974), for the residuals; Rudi, Carratino and Rosasco, FALKON, 2017, arXiv 1705.10958, for the coordinates.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.dataset import Dataset
from dkrr.errors import DataError, NotPositiveDefiniteError
from dkrr.kernels import Kernel
from dkrr.linalg.blocks import FloatMatrix, FloatVector
from dkrr.linalg.gram import rows_of
from dkrr.linalg.inference.leave_one_out import LeaveOneOut, loo_from_leverages
from dkrr.linalg.nystrom.precondition import CenterFactor, independent_centers
from dkrr.linalg.operators import Rows
from dkrr.linalg.passes import Operands, Pass, RowRanges
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place, remove_array
from dkrr.tiles.blas import buffer, potrf, syrk, trsm_right

MAX_PARTS, MIN_PART_ROWS = 8, 2048
BLOCK_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class Centres:
    """A fitted regression on centres: f = k(., Z) c + b.

    Parameters
    ----------
    kernel
        Resolved.
    points : (m, d), coefficients : (m, t)
        Not centred.
    center : (d,), optional
        Subtracted from rows and centres.
    intercept : (t,), optional
    """

    kernel: Kernel
    points: FloatMatrix
    coefficients: FloatMatrix
    center: FloatVector | None
    intercept: FloatVector | None


@dataclass(frozen=True)
class _Algebra:
    """What the tasks of both passes compute: of a few ranges of rows G, then of each row its residual and leverage."""

    kernel: Kernel
    rows: Rows
    ranges: RowRanges

    def blocks(self, operands: Operands, i: int) -> Iterator[tuple[int, FloatMatrix, FloatVector]]:
        """(start, k(X, Z) of at most 512 rows in a reused buffer, their weights)."""
        dataset = self.rows.open()
        centers: Any = np.array(operands["centers"].read())
        first, last = self.ranges.span(i)
        for start in range(first, last, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, last)
            block: Any = buffer("sample", (stop - start, len(centers)), np.float64)
            self.kernel.block(self.rows.read(start, stop), centers, block)
            weight = None if dataset.weight is None else dataset.weight.read(start, stop)[:, 0]
            yield start, block, np.ones(stop - start) if weight is None else weight

    def gram(self, operands: Operands, i: int, whole: FloatMatrix) -> None:
        """-G of part i and below it -sum_i w_i phi_i (m + 1, m)."""
        factor, m = operands["factor"].read(), whole.shape[1]
        for _, block, weight in self.blocks(operands, i):
            trsm_right(block, factor)
            whole[m] -= weight @ block
            block *= np.sqrt(weight)[:, None]
            columns: Any = buffer("sample transposed", (m, len(block)), np.float64)
            columns[...] = block.T
            syrk(whole[:m], columns)

    def leverages(self, operands: Operands, i: int, out: FloatMatrix) -> None:
        """Residuals without the intercept, and |R^-1 (phi_i - phi)|^2 for each alpha (rows, t + a)."""
        factor, mean, y = operands["factor"].read(), operands["mean"].read(), self.rows.open().y
        coefficients = operands["coefficients"].read()
        first, t = self.ranges.span(i)[0], coefficients.shape[1]
        assert y is not None  # noqa: S101  (narrows the type)
        for start, block, _ in self.blocks(operands, i):
            rows = slice(start - first, start - first + len(block))
            out[rows, :t] = y.read(start, start + len(block)) - block @ coefficients
            trsm_right(block, factor)
            block -= mean
            for number in range(out.shape[1] - t):
                scaled: Any = buffer("scaled", block.shape, np.float64)
                scaled[...] = block
                trsm_right(scaled, operands["triangles"].read(number))
                out[rows, t + number] = np.einsum("im,im->i", scaled, scaled)

    def not_finite(self, i: int) -> DataError:
        """The error for range i."""
        first, last = self.ranges.span(i)
        return DataError(f"the leverages of rows {first:,} to {last - 1:,} are not finite", hint="scale the features")


def nystrom_leave_one_out(
    dataset: Dataset, fitted: Centres, alphas: tuple[float, ...], workspace: Workspace
) -> LeaveOneOut:
    """Leave-one-out of a regression on fixed centres.

    Parameters
    ----------
    dataset
        The rows it was fitted to.
    fitted
        The regression.
    alphas
        One, or one for each target.
    workspace
        Where, and on whom.

    Raises
    ------
    NotPositiveDefiniteError
        alpha is 0, or lost in rounding, and the rows do not determine the coefficients.
    """
    kernel, n, t = fitted.kernel, dataset.num_rows, dataset.num_targets
    wanted = np.broadcast_to(np.asarray(alphas, dtype=np.float64), (t,))
    distinct = list(dict.fromkeys(wanted.tolist()))
    points = fitted.points if fitted.center is None else fitted.points - fitted.center
    order = independent_centers(kernel, points)
    triangle = CenterFactor(kernel, points[order], n, min(distinct), "float64")
    m = len(order)
    # f does not change when a centre in the span of the others is left out, but its coefficient has to go somewhere
    coefficients = fitted.coefficients[order]
    if m < len(points):
        whole = kernel.block(points[order], points) @ fitted.coefficients
        coefficients = triangle.solve(triangle.solve(whole, transposed=False), transposed=True)
    weight = None if dataset.weight is None else dataset.weight.read(0, n)[:, 0]
    root = None if weight is None else np.sqrt(weight)
    total = float(n if weight is None else weight.sum())
    operands = {"centers": [points[order]], "factor": [triangle.square]}
    scratch = place(workspace.store, "scratch", uuid.uuid4().hex + ".zarr")

    def run(name: str, ranges: RowRanges, flops: float, shape: tuple[int, ...], **others: list[FloatMatrix]) -> Pass:
        task, all_of_them = _Algebra(kernel, rows_of(dataset, kernel), ranges), operands | others
        work, each = {"workspace": workspace, "store": scratch}, [flops * ranges.size] * len(ranges)
        compute = getattr(task, name)
        return Pass("leverage", compute, task.not_finite, each, shape, operands=all_of_them, **work)  # type: ignore[arg-type]

    try:
        parts = RowRanges(n, max(MIN_PART_ROWS, -(-n // MAX_PARTS)))
        sums = run("gram", parts, 2.0 * m * m, (m + 1, m)).sum()
        sums[m] /= -total
        mean = sums[m:] if fitted.intercept is not None else np.zeros((1, m))
        square = -sums[:m] - total * mean.T @ mean
        ranges, found = RowRanges.of(n, m), np.empty((n, t + len(distinct)))

        def add(i: int, part: FloatMatrix) -> None:
            rows = slice(*ranges.span(i))
            found[rows] = part[: rows.stop - rows.start]

        flops, shape = m * m * (1.0 + len(distinct)), (ranges.size, t + len(distinct))
        triangles = [_triangle(square, alpha) for alpha in distinct]
        given = {"coefficients": [coefficients], "mean": [mean], "triangles": triangles}
        run("leverages", ranges, flops, shape, **given).consume(add)
    finally:
        remove_array(scratch)
    residuals, leverages = found[:, :t], found[:, t:]
    if fitted.intercept is not None:
        residuals, leverages = residuals - fitted.intercept, leverages + 1 / total
    leverages = (np.ones(n) if root is None else np.square(root))[:, None] * leverages
    column = [distinct.index(alpha) for alpha in wanted.tolist()]
    return loo_from_leverages(residuals=residuals, leverages=leverages[:, column], alpha=wanted, root=root)


def _triangle(square: FloatMatrix, alpha: float) -> FloatMatrix:
    """R of an alpha."""
    out = square.copy()
    out[np.diag_indices(len(out))] += alpha
    info = potrf(out)
    if info:
        raise NotPositiveDefiniteError(
            f"the rows do not determine the coefficients of {len(out):,} centres (row {info - 1:,}, alpha {alpha:.3g})",
            hint="raise alpha, or take fewer centres",
            row=info - 1,
        )
    return out
