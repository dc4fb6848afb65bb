"""The second triangle of Falkon's preconditioner, from a sample of the rows.

The formulas are in :mod:`dkrr.linalg.nystrom.precondition`.

Each task adds up its part of the sample, the driver adds the parts and factorises their sum.

Cost: (q + 1) m rows times 2 m^2 flops, on the workers; m^3 / 3 flops for each R, in the driver. A task holds 2 m^2
numbers and a few blocks of 512 rows: :func:`preconditioner_bytes`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.chunks import ChunkArray
from dkrr.engine.tasks import Node
from dkrr.errors import DamagedChunkError, DataError, NotPositiveDefiniteError
from dkrr.failpoints import failpoint
from dkrr.kernels import Kernel
from dkrr.linalg.nystrom.precondition import BLOCK_ROWS, EPS, CenterFactor
from dkrr.linalg.repairs import Repairs
from dkrr.linalg.whole_chunks import add_chunk, retried, whole_chunk
from dkrr.linalg.workspace import Workspace
from dkrr.tiles.blas import buffer, is_finite, potrf, syrk, trsm_right

__all__ = ["SampleGram", "preconditioner_bytes", "sample_size"]

logger = logging.getLogger("dkrr.linalg.nystrom.solver")

FloatMatrix = NDArray[np.float64]

MIN_OVERSAMPLING, MAX_OVERSAMPLING = 4, 16
MAX_PARTS, MIN_PART_ROWS = 8, 2048


def sample_size(n: int, m: int) -> int:
    """Rows of the sample besides the centres, q m of the n - m others: q = n / (25 m), but from 4 to 16.

    A sampled row costs 2 m^2 flops once, a row of a pass m kernel entries an iteration, so more passes ask for a better
    preconditioner.
    """
    q = min(max(n / (25 * m), MIN_OVERSAMPLING), MAX_OVERSAMPLING)
    return int(min(n - m, np.ceil(q * m)))


def preconditioner_bytes(m: int) -> int:
    """Memory of a task besides the baseline, in bytes: 16 m^2 for L and its part of G, and four blocks of 512 rows."""
    return 16 * m * m + 32 * BLOCK_ROWS * m


@dataclass(frozen=True)
class SampleTask:
    """G = sum over parts of C^T C with C = S_f B L^-T.

    Parameters
    ----------
    kernel
        Resolved.
    centers : (m, d)
    factor : (m, m)
        L, below and on the diagonal.
    sample : (parts r, d + 1)
        Rows, and in the last column the roots of their weights and factors; 0 for padding.
    grams : (parts m, m), or (parts (m + 1), m)
        -C^T C of each part, lower triangle. With one more row, that is -C^T S_f 1, for an intercept.
    """

    kernel: Kernel
    centers: ChunkArray
    factor: ChunkArray
    sample: ChunkArray
    grams: ChunkArray


def sample_part(task: SampleTask, i: int) -> bool:
    """Compute and write the Gram matrix of part i unless it is there; whether it was computed."""
    if task.grams.is_valid((i, 0)):
        return False
    failpoint("nystrom.sample.before_read")
    rows: Any = np.array(task.sample.read((i, 0)))
    rows = rows[rows[:, -1] > 0]
    centers: Any = np.array(task.centers.read((0, 0)))
    factor = task.factor.read((0, 0))
    m = len(centers)
    whole = np.zeros(task.grams.chunks)
    gram, sums = whole[:m], whole[m:]
    for start in range(0, len(rows), BLOCK_ROWS):
        part = rows[start : start + BLOCK_ROWS]
        block: Any = buffer("sample", (len(part), m), np.float64)
        task.kernel.block(np.ascontiguousarray(part[:, :-1]), centers, block)
        block *= part[:, -1:]
        trsm_right(block, factor)
        columns: Any = buffer("sample transposed", (m, len(part)), np.float64)
        columns[...] = block.T
        syrk(gram, columns)
        if len(sums):
            sums -= part[:, -1] @ block
    failpoint("nystrom.sample.after_compute", whole)
    if not is_finite(whole):
        raise DataError("the preconditioner of the centres is not finite", hint="scale the features")
    task.grams.write((i, 0), whole)
    failpoint("nystrom.sample.after_write")
    return True


class SampleGram:
    """The estimate of L^-1 B^T S^2 B L^-T from a sample of the rows, computed on the workers and kept in the store.

    Parameters
    ----------
    kernel
        Resolved.
    triangle
        L.
    centers : (m, d), sample : (s, d), root : (s,)
        Centred rows; roots of the sample's weights times factors.
    workspace, scratch
        Who runs the tasks; location of what travels, which the caller removes.
    centred
        With an intercept: B less its weighted mean over the sample, G - g g^T / W with g = C^T S_f 1 and W the sum of
        the weights.
    """

    def __init__(
        self,
        kernel: Kernel,
        triangle: CenterFactor,
        centers: FloatMatrix,
        sample: FloatMatrix,
        root: NDArray[np.float64],
        workspace: Workspace,
        scratch: Any,
        *,
        centred: bool = False,
    ) -> None:
        self.triangle, self.points, self.workspace = triangle, centers, workspace
        m, d = centers.shape
        self.num_parts = min(MAX_PARTS, -(-len(sample) // MIN_PART_ROWS))
        rows = -(-len(sample) // self.num_parts)
        self.rows = np.zeros((self.num_parts * rows, d + 1))
        self.rows[: len(sample), :d], self.rows[: len(sample), d] = sample, root
        self.task = SampleTask(
            kernel,
            whole_chunk(scratch, "centers", m, d),
            whole_chunk(scratch, "factor", m, m),
            whole_chunk(scratch, "sample", rows, d + 1, self.num_parts),
            whole_chunk(scratch, "grams", m + centred, m, self.num_parts),
        )
        self.weight = float(root @ root)
        self._run()

    def _run(self) -> None:
        """Every part that is not there."""
        task, work, repairs = self.task, self.workspace, Repairs()
        m = len(self.points)
        flops = 2.0 * m * m * task.sample.chunks[0]
        retried(self._write)
        while True:
            try:
                nodes = [Node((i,), (), flops) for i in range(self.num_parts)]
                work.record("precondition", work.executor.run("precondition", sample_part, task, nodes, work.progress))
                return
            except DamagedChunkError as damage:
                if damage.path not in (task.centers.location, task.factor.location, task.sample.location):
                    raise
                repairs.add(damage)
                retried(self._write)

    def _write(self) -> None:
        """What the tasks read."""
        task = self.task
        task.centers.write((0, 0), self.points)
        task.factor.write((0, 0), self.triangle.square)
        rows = task.sample.chunks[0]
        for i in range(self.num_parts):
            task.sample.write((i, 0), self.rows[i * rows : (i + 1) * rows])

    @property
    def shape(self) -> tuple[int, int]:
        """Of the array that :meth:`factor` works in."""
        rows, columns = self.task.grams.chunks
        return rows, columns

    def factor(self, alpha: float, whole: FloatMatrix) -> FloatMatrix:
        """R (m, m) lower with R R^T = G + alpha I, in the first rows of ``whole``, an array of :attr:`shape`.

        G is positive semi-definite but for rounding, which a very small alpha may not exceed; alpha then grows in
        the preconditioner, with a line in the log.
        """
        shift, out = alpha, whole[: len(self.points)]
        while True:
            self._summed(whole)
            self._centre(out, whole[len(out) :])
            scale = float(out.diagonal().max())
            out[np.diag_indices(len(out))] += shift
            info = potrf(out)
            if not info:
                return out
            larger = max(10.0 * shift, EPS * scale * np.sqrt(len(out)))
            logger.info("G + %.1e I has no Cholesky factor (row %d): %.1e instead", shift, info - 1, larger)
            if not 0 < larger <= scale:
                raise NotPositiveDefiniteError(
                    f"the preconditioner of the centres is not positive definite at row {info - 1:,}",
                    hint="use a positive semi-definite kernel, or raise alpha",
                    row=info - 1,
                )
            shift = larger

    def _centre(self, out: FloatMatrix, sums: FloatMatrix) -> None:
        """G - g g^T / W, its lower triangle, where there is a g."""
        for start in range(0, len(out) if len(sums) and self.weight else 0, BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            out[rows] -= sums[0, rows, None] * (sums[0] / self.weight)

    def _summed(self, out: FloatMatrix) -> None:
        """G, its lower triangle, and g."""
        repairs = Repairs()
        while True:
            try:
                out[...] = 0.0
                for i in range(self.num_parts):
                    retried(partial(add_chunk, out, self.task.grams, i))
                np.negative(out, out=out)
                return
            except DamagedChunkError as damage:
                repairs.add(damage)
                self.task.grams.delete(damage.index)
                self._run()
