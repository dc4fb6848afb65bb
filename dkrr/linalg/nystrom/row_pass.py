"""One pass over the rows of a Nystrom regression: W = B^T S^2 V with B = k(X, Z), n rows against m centres.

    V = B P          a product of the conjugate gradients
    V = Y            the right-hand side
    V = Y - B P      the residual

The rows are read from disk in blocks (:mod:`dkrr.linalg.nystrom.pass_task`). X is never in memory as a whole, and B
nowhere.

One task takes a fixed range of rows and writes its W as one chunk; the driver adds the chunks up in order. The ranges
depend on n and m alone, so the sums are the same bits on any number of workers. Every pass has a folder of its own: a
worker that was given up and comes back writes where nobody reads.

Cost
----
n m kernel entries and 4 n m t flops (2 n m t without P); n d numbers read. m t numbers to the tasks, and as many from
each. Memory of a task: :func:`dkrr.linalg.nystrom.pass_task.pass_task_bytes`.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.tasks import Node
from dkrr.errors import DamagedChunkError
from dkrr.kernels import Kernel
from dkrr.linalg.nystrom.pass_task import PassTask, Precision, can_compile, pass_range
from dkrr.linalg.operators import Rows
from dkrr.linalg.repairs import Repairs
from dkrr.linalg.row_ranges import RowRanges
from dkrr.linalg.whole_chunks import add_chunk, retried, whole_chunk
from dkrr.linalg.workspace import Workspace
from dkrr.stores import place, remove_array

__all__ = ["RowPass"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


class RowPass:
    """Passes over the rows of one fit, run on the workers.

    Parameters
    ----------
    kernel, rows
        Resolved kernel, and the training rows.
    n
        Number of rows.
    centers : (m, d)
        Centred as the rows are; written to ``scratch``.
    num_targets
        The most columns that a pass will have.
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
        self.ranges = RowRanges.of(n, len(centers))
        self.points = centers
        self.centers = whole_chunk(scratch, "centers", *centers.shape)
        retried(lambda: self.centers.write((0, 0), centers))
        self.num_passes = 0
        self.compiled = can_compile(kernel, len(centers), num_targets)

    def __call__(
        self,
        p: FloatMatrix | None = None,
        *,
        targets: tuple[int, ...] | None = None,
        shifts: tuple[FloatVector, ...] = (),
        precision: Precision = "float64",
        absolute_last: bool = False,
    ) -> FloatMatrix:
        """B^T S^2 V (m, c) float64 with V = B P, Y[:, targets], or Y[:, targets] - B P, whichever is given.

        A target -1 is a column of zeros; ``shifts`` (c,) are added to the columns of Y one after the other, so that a
        large mean can be taken away without its rounding.

        Raises
        ------
        DamagedChunkError
            A chunk of the rows is missing or damaged.
        """
        m = len(self.points)
        count = p.shape[1] if p is not None else len(targets or ())
        self.num_passes += 1
        # a name that no other process and no other attempt uses
        folder = f"pass-{self.num_passes}-{uuid.uuid4().hex}"
        coefficients = None if p is None else whole_chunk(self.scratch, f"{folder}/p", m, count)
        sums = whole_chunk(self.scratch, f"{folder}/w", m, count + absolute_last, len(self.ranges))
        task = PassTask(
            kernel=self.kernel,
            rows=self.rows,
            ranges=self.ranges,
            centers=self.centers,
            coefficients=coefficients,
            targets=targets,
            sums=sums,
            compiled=self.compiled,
            precision=precision,
            absolute_last=absolute_last,
            shifts=tuple(tuple(shift.tolist()) for shift in shifts),
        )
        try:
            return self._run(task, p)
        finally:
            remove_array(place(self.scratch, folder))

    def _run(self, task: PassTask, p: FloatMatrix | None) -> FloatMatrix:
        repairs = Repairs()
        self._write_coefficients(task, p)
        per_range = float(self.ranges.size) * len(self.points)
        flops = per_range * (2.0 * self.points.shape[1] + 4.0 * task.sums.shape[1])
        nodes = [Node((i,), (), flops) for i in range(len(self.ranges))]
        work = self.workspace
        while True:
            try:
                work.record("nystrom", work.executor.run("nystrom", pass_range, task, nodes, work.progress))
                return self._summed(task)
            except DamagedChunkError as damage:
                # the rows cannot be computed again, what travels can
                if damage.path == task.sums.location:
                    repairs.add(damage)
                    task.sums.delete(damage.index)
                elif damage.path == self.centers.location:
                    repairs.add(damage)
                    retried(lambda: self.centers.write((0, 0), self.points))
                elif task.coefficients is not None and damage.path == task.coefficients.location:
                    repairs.add(damage)
                    self._write_coefficients(task, p)
                else:
                    raise

    def _write_coefficients(self, task: PassTask, p: FloatMatrix | None) -> None:
        target = task.coefficients
        if target is not None and p is not None:
            values = np.ascontiguousarray(p, dtype=np.float64)
            retried(lambda: target.write((0, 0), values))

    def _summed(self, task: PassTask) -> FloatMatrix:
        total = np.zeros(task.sums.chunks)
        for i in range(len(self.ranges)):
            retried(partial(add_chunk, total, task.sums, i))
        return total
