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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.engine.tasks import Node
from dkrr.errors import DamagedChunkError, DataError, NotPositiveDefiniteError
from dkrr.kernels import Kernel
from dkrr.linalg.gram import rows_of
from dkrr.linalg.inference.leave_one_out import LeaveOneOut, loo_from_leverages
from dkrr.linalg.nystrom.precondition import CenterFactor, independent_centers
from dkrr.linalg.operators import Rows
from dkrr.linalg.repairs import Repairs
from dkrr.linalg.row_pass import RowRanges, retried, whole_chunk
from dkrr.linalg.workspace import Workspace
from dkrr.store.chunks import ChunkArray
from dkrr.store.failpoints import failpoint
from dkrr.store.files import place, remove_array
from dkrr.tiles.blas import buffer, is_finite, potrf, syrk, trsm_right

__all__ = ["Centres", "nystrom_leave_one_out"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]

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
class _Task:
    """What the tasks read and write; chunks without metadata, whose shapes the tasks know.

    Parameters
    ----------
    ranges
        Rows of each task.
    centers : (m, d), factor : (m, m), coefficients : (m, t)
        Centred; L; c.
    grams : (parts (m + 1), m)
        -G of each part and below it -sum_i w_i phi_i; of the first pass.
    triangles : (a m, m), mean : (1, m)
        R of each alpha, and phi; of the second pass.
    found : (ranges rows, t + a)
        Residuals without the intercept, and |R^-1 (phi_i - phi)|^2.
    """

    kernel: Kernel
    rows: Rows
    ranges: RowRanges
    centers: ChunkArray
    factor: ChunkArray
    coefficients: ChunkArray
    grams: ChunkArray
    triangles: ChunkArray
    mean: ChunkArray
    found: ChunkArray
    inputs: tuple[str, ...] = field(default=("centers", "factor", "coefficients", "triangles", "mean"))

    def blocks(self, i: int) -> Iterator[tuple[int, FloatMatrix, FloatVector]]:
        """(start, k(X, Z) of at most 512 rows in a reused buffer, their weights)."""
        dataset = self.rows.open()
        centers: Any = np.array(self.centers.read((0, 0)))
        first, last = self.ranges.span(i)
        for start in range(first, last, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, last)
            block: Any = buffer("sample", (stop - start, len(centers)), np.float64)
            self.kernel.block(self.rows.read(start, stop), centers, block)
            weight = None if dataset.weight is None else dataset.weight.read(start, stop)[:, 0]
            yield start, block, np.ones(stop - start) if weight is None else weight

    def targets(self, start: int, stop: int) -> FloatMatrix:
        """Y (rows, t)."""
        array = self.rows.open().y
        assert array is not None  # noqa: S101  (narrows the type)
        return array.read(start, stop)


def gram_part(task: _Task, i: int) -> bool:
    """Compute and write the sums of part i unless they are there; whether they were computed."""
    if task.grams.is_valid((i, 0)):
        return False
    failpoint("leverage.gram.before_read")
    factor = task.factor.read((0, 0))
    m = len(factor)
    whole = np.zeros(task.grams.chunks)
    for _, block, weight in task.blocks(i):
        trsm_right(block, factor)
        whole[m] -= weight @ block
        block *= np.sqrt(weight)[:, None]
        columns: Any = buffer("sample transposed", (m, len(block)), np.float64)
        columns[...] = block.T
        syrk(whole[:m], columns)
    failpoint("leverage.gram.after_compute", whole)
    if not is_finite(whole):
        raise DataError("the Gram matrix of the centres is not finite", hint="scale the features")
    task.grams.write((i, 0), whole)
    return True


def leverage_range(task: _Task, i: int) -> bool:
    """Compute and write residuals and leverages of range i unless they are there; whether they were computed."""
    if task.found.is_valid((i, 0)):
        return False
    failpoint("leverage.range.before_read")
    factor, mean = task.factor.read((0, 0)), task.mean.read((0, 0))
    coefficients = task.coefficients.read((0, 0))
    t = coefficients.shape[1]
    first, last = task.ranges.span(i)
    found = np.full(task.found.chunks, np.nan)
    for start, block, _ in task.blocks(i):
        rows = slice(start - first, start - first + len(block))
        found[rows, :t] = task.targets(start, start + len(block)) - block @ coefficients
        trsm_right(block, factor)
        block -= mean
        for number in range(found.shape[1] - t):
            scaled: Any = buffer("scaled", block.shape, np.float64)
            scaled[...] = block
            trsm_right(scaled, task.triangles.read((number, 0)))
            found[rows, t + number] = np.einsum("im,im->i", scaled, scaled)
    failpoint("leverage.range.after_compute", found)
    if not is_finite(found[: last - first]):
        raise DataError(f"the leverages of rows {first:,} to {last - 1:,} are not finite", hint="raise alpha")
    task.found.write((i, 0), found)
    failpoint("leverage.range.after_write")
    return True


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
    scratch = place(workspace.store, "scratch", uuid.uuid4().hex + ".zarr")
    try:
        return _Leverages(dataset, fitted, alphas, workspace, scratch).run()
    finally:
        remove_array(scratch)


class _Leverages:
    """One computation: the parts that its steps share."""

    def __init__(
        self, dataset: Dataset, fitted: Centres, alphas: tuple[float, ...], workspace: Workspace, scratch: Any
    ) -> None:
        self.dataset, self.fitted, self.workspace = dataset, fitted, workspace
        n, t = dataset.num_rows, dataset.num_targets
        self.alphas = np.broadcast_to(np.asarray(alphas, dtype=np.float64), (t,))
        self.distinct = list(dict.fromkeys(self.alphas.tolist()))
        points = fitted.points if fitted.center is None else fitted.points - fitted.center
        order = independent_centers(fitted.kernel, points)
        self.triangle = CenterFactor(fitted.kernel, points[order], n, min(self.distinct), "float64")
        m, d = len(order), points.shape[1]
        self.parts = RowRanges(n, max(MIN_PART_ROWS, -(-n // MAX_PARTS)))
        ranges = RowRanges.of(n, m)
        self.task = _Task(
            fitted.kernel,
            rows_of(dataset, fitted.kernel),
            ranges,
            whole_chunk(scratch, "centers", m, d),
            whole_chunk(scratch, "factor", m, m),
            whole_chunk(scratch, "coefficients", m, t),
            whole_chunk(scratch, "grams", m + 1, m, len(self.parts)),
            whole_chunk(scratch, "triangles", m, m, len(self.distinct)),
            whole_chunk(scratch, "mean", 1, m),
            whole_chunk(scratch, "found", ranges.size, t + len(self.distinct), len(ranges)),
        )
        # f does not change when a centre in the span of the others is left out, but its coefficient has to go somewhere
        self.coefficients = fitted.coefficients[order]
        if m < len(points):
            whole = fitted.kernel.block(points[order], points) @ fitted.coefficients
            self.coefficients = self.triangle.solve(self.triangle.solve(whole, transposed=False), transposed=True)
        self.points = points[order]
        weight = None if dataset.weight is None else dataset.weight.read(0, n)[:, 0]
        self.root = None if weight is None else np.sqrt(weight)
        self.total = float(n if weight is None else weight.sum())

    def run(self) -> LeaveOneOut:
        task, (m, t) = self.task, self.coefficients.shape
        retried(self._write)
        flops = 2.0 * self.parts.size * m * m
        self._run(gram_part, replace(task, ranges=self.parts), task.grams, len(self.parts), flops, self._write)
        sums = self._read(task.grams)
        sums[m] /= -self.total
        self.mean = sums[m:] if self.fitted.intercept is not None else np.zeros((1, m))
        self.square = -sums[:m] - self.total * self.mean.T @ self.mean
        retried(self._write_triangles)
        flops = task.ranges.size * m * m * (1.0 + len(self.distinct))
        again = self._write_all
        self._run(leverage_range, task, task.found, len(task.ranges), flops, again)
        n = self.dataset.num_rows
        found = np.concatenate([task.found.read((i, 0)) for i in range(len(task.ranges))])[:n]
        residuals, leverages = found[:, :t], found[:, t:]
        weight = np.ones(n) if self.root is None else np.square(self.root)
        if self.fitted.intercept is not None:
            residuals, leverages = residuals - self.fitted.intercept, leverages + 1 / self.total
        leverages = weight[:, None] * leverages
        column = [self.distinct.index(alpha) for alpha in self.alphas.tolist()]
        return loo_from_leverages(
            residuals=residuals, leverages=leverages[:, column], alpha=self.alphas, root=self.root
        )

    def _write(self) -> None:
        """What the first pass reads, and the coefficients."""
        self.task.centers.write((0, 0), self.points)
        self.task.factor.write((0, 0), self.triangle.square)
        self.task.coefficients.write((0, 0), self.coefficients)

    def _write_all(self) -> None:
        self._write()
        self._write_triangles()

    def _write_triangles(self) -> None:
        """R of every alpha."""
        self.task.mean.write((0, 0), self.mean)
        for number, alpha in enumerate(self.distinct):
            out = self.square.copy()
            out[np.diag_indices(len(out))] += alpha
            info = potrf(out)
            if info:
                raise NotPositiveDefiniteError(
                    f"the rows do not determine the coefficients of {len(out):,} centres (row {info - 1:,}, "
                    f"alpha {alpha:.3g})",
                    hint="raise alpha, or take fewer centres",
                    row=info - 1,
                )
            self.task.triangles.write((number, 0), out)

    def _run(
        self,
        function: Callable[[_Task, int], bool],
        task: _Task,
        results: ChunkArray,
        count: int,
        flops: float,
        write_again: Callable[[], None],
    ) -> None:
        """Run a pass; what travels is written again where it was damaged."""
        work, repairs = self.workspace, Repairs()
        nodes = [Node((i,), (), flops) for i in range(count)]
        locations = {getattr(task, name).location for name in task.inputs}
        while True:
            try:
                work.record("leverage", work.executor.run("leverage", function, task, nodes, work.progress))
                for i in range(count):  # a damaged result is found here, not after the pass
                    results.read((i, 0))
                return
            except DamagedChunkError as damage:
                if damage.path == results.location:
                    repairs.add(damage)
                    results.delete(damage.index)
                elif damage.path in locations:
                    repairs.add(damage)
                    retried(write_again)
                else:
                    raise

    def _read(self, grams: ChunkArray) -> FloatMatrix:
        """The sums of all parts."""
        total = np.zeros(grams.chunks)
        for i in range(grams.num_chunks[0]):
            total += grams.read((i, 0))
        return total
